# Two commands do everything on a fresh Linux machine with Python 3.10 to 3.13: `make ladder` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadscope
TRITON_VERSIONS ?= 3.6.0 3.8.0 3.9.0
PAIRS ?= 3.5.0:1.26.4 3.6.0:2.4.6 3.9.0:2.4.6

# With a GPU pip chooses the newest torch that fits; without one the pinned CPU environment is installed.
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
ifeq ($(GPUS),0)
CONSTRAINTS := --constraint .ci/constraints-cpu.txt
endif
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) $(CONSTRAINTS)

.PHONY: ladder test lab venv compile-matrix interpreter-pairs clean
.DEFAULT_GOAL := ladder

ladder: $(VENV)/.core  ## climb every rung: parity, speed, memory, share of this machine's limit
	$(BIN)/python -m ladder $(ARGS)

test: $(VENV)/.test  ## every test and every notebook
	$(BIN)/python -m pytest --nbval $(PYTEST_ARGS)

lab: $(VENV)/.test  ## the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=notebooks

venv: $(VENV)/.test  ## only the environment

compile-matrix: $(VENV)/.test  ## device code under several Tritons for sm_80, sm_86, sm_90 and sm_100, no GPU needed
	$(BIN)/python -m ladder.lab.compile.matrix --triton $(TRITON_VERSIONS) --cache $(VENV)/triton

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# A marker file says what is installed; it is newer than the files that decide about it.
$(VENV)/.core: pyproject.toml .ci/constraints-cpu.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) (some minutes)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml .ci/constraints-cpu.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV) (some minutes)"
	$(INSTALL) --editable '.[test]'
	@touch $(VENV)/.core $@

interpreter-pairs: $(VENV)/.test  ## Triton's interpreter under PAIRS of Triton and NumPy: the oldest, the newest, and what breaks
	for pair in $(PAIRS); do \
	  triton=$${pair%%:*} numpy=$${pair##*:} && target=$(VENV)/pairs/$$triton-$$numpy && echo "Triton $$triton, NumPy $$numpy" && \
	  $(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --upgrade --target $$target triton==$$triton numpy==$$numpy && \
	  PYTHONPATH=$$target $(BIN)/python -m pytest -q tests/lab/test_interpret.py tests/step08/test_decode.py \
	    tests/chapters/test_own_kernel.py -k "interp or copied or splits or kernel" || exit 1; \
	done

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .hypothesis build *.egg-info
