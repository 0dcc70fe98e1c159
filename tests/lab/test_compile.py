"""Step 05 compiled for GPUs that are not there: no spills, tensor cores used, shared memory within the limit."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton.backends.nvidia", reason="Triton's NVIDIA back end compiles these kernels")

from ladder.lab.compile import matrix as compile_matrix  # noqa: E402
from ladder.lab.compile.cases_step05 import CASES, HEAD_SIZES  # noqa: E402
from ladder.lab.compile.compiler import SHARED_MEMORY_LIMIT, TARGETS, capability  # noqa: E402
from ladder.rungs import RUNGS, find  # noqa: E402

TENSOR_CORES = {"sm_80": "HMMA", "sm_86": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


@pytest.mark.parametrize("target", TENSOR_CORES)
def test_step05_compiles_for(target):
    rows = compile_matrix.compile_in_subprocess(target, chosen="step05_fused")
    assert len(rows) == len(CASES)
    for row in rows:
        name = f"{row['case']} on {target}"
        assert row["problem"] is None, f"{name}: {row['problem']}"
        assert row["spills"] == 0 and 0 < row["registers"] <= 255, name
        assert 0 < row["shared"] <= SHARED_MEMORY_LIMIT[target], name
        assert row["kernel"] == "fused_attention_forward" and row["num_warps"] in (4, 8)
        for instruction in compile_matrix.MATRIX_INSTRUCTIONS:
            wanted = instruction == TENSOR_CORES[target] and "float32" not in row["case"]
            if instruction != "HMMA" and " 32x" in row["case"]:
                wanted = False  # Hopper's and Blackwell's own instructions want 64 rows; HMMA does these
            elif target in ("sm_90", "sm_100") and instruction == "HMMA":
                wanted = " 32x" in row["case"] and "float32" not in row["case"]
            assert (row[instruction] > 0) == wanted, f"{name}: {row[instruction]} x {instruction}"


def test_targets():
    assert set(TARGETS) <= set(SHARED_MEMORY_LIMIT) and set(compile_matrix.TARGETS) <= set(SHARED_MEMORY_LIMIT)
    assert [capability(t) for t in ("sm_80", "sm_90a", "sm_120")] == [(8, 0), (9, 0), (12, 0)]
    for bad in ("90", "sm_9", "cuda", "sm_90b"):
        with pytest.raises(ValueError, match=f"target is '{bad}'; want 'sm_90' or the like"):
            capability(bad)


def test_a_spill_that_ships_is_bound_to_its_kernel_target_and_size():
    case = "decode d576/512 bfloat16 group 128 q1 page 64 batch 8 64x64"
    assert "1.6 x" in compile_matrix.known_spill(find(8), "sm_90", case, 376)
    assert compile_matrix.known_spill(find(8), "sm_90", case, 513) is None
    assert compile_matrix.known_spill(find(8), "sm_100", case, 8) is None
    assert compile_matrix.known_spill(find(8), "sm_90", "decode d128", 8) is None
    assert compile_matrix.known_spill(find(5), "sm_90", case, 8) is None


def test_every_triton_rung_brings_its_cases():
    for rung in RUNGS:
        cases = list(compile_matrix.cases_of(rung, "sm_90"))
        assert bool(cases) == rung.needs_triton, rung.name
        names = [name for name, *_ in cases]
        assert len(set(names)) == len(names)


def test_thorough_cases_hold_every_head_size_dtype_and_mask():
    thorough = list(compile_matrix.cases_of(find(5), "sm_90", thorough=True))
    assert len(thorough) == len(HEAD_SIZES) * 3 * 2
    assert {args[0].dtype for _, _, args, _ in thorough} == {torch.float16, torch.bfloat16, torch.float32}
    assert {k["HEAD_DIM"] for *_, k in thorough} == {d for d, _ in HEAD_SIZES}


def test_cases_are_launches_as_attention_makes_them(monkeypatch):
    """Same positions, same options: what the matrix compiles is what a call launches."""
    import importlib

    attention = importlib.import_module("ladder.step05_fused.attention")
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append((args, kwargs))

    monkeypatch.setattr(attention, "_kernel", lambda rung, q: Recorder())
    shared_memory, major_minor = attention.processor(torch.device("cpu"))
    for _, _, args, kwargs in compile_matrix.cases_of(find(5), "sm_90"):
        assert (shared_memory, major_minor) == (SHARED_MEMORY_LIMIT["sm_90"], capability("sm_90"))
        q, k, v = (torch.empty(x.shape, dtype=x.dtype) for x in args[:3])
        attention.attention(q, k, v, causal=kwargs["IS_CAUSAL"], return_lse=kwargs["HAS_LSE"])
        launch_args, launch_kwargs = launched.pop()
        assert launch_kwargs == kwargs
        assert len(launch_args) == len(args)
        for ours, theirs in zip(args, launch_args):
            if isinstance(theirs, torch.Tensor):
                assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
            elif isinstance(theirs, float):
                assert ours == pytest.approx(theirs)
            else:
                assert ours == theirs and type(ours) is type(theirs)


@pytest.mark.slow
def test_serving_rungs_compile_for_hopper():
    """Rungs 06 and 07 on sm_90; the other targets are `make compile-matrix`'s."""
    rows = compile_matrix.compile_in_subprocess("sm_90", chosen="6-7")
    assert {row["rung"] for row in rows} == {"step06_paged", "step07_dflash1"} and len(rows) > 40
    for row in rows:
        name = f"{row['rung']} {row['case']}"
        assert row["problem"] is None, f"{name}: {row['problem']}"
        assert row["kernel"].startswith(("paged_", "dflash1_")), name  # what a profiler's regex finds
    prefill = [row for row in rows if row["kernel"] == "dflash1_prefill" and "float32" not in row["case"]]
    assert prefill and all(row["HGMMA"] > 0 and row["HMMA"] == 0 for row in prefill)
    # One by one they cost 5 %: see ladder/step07_dflash1/TUNING.md.
    assert not [row["case"] for row in prefill if row["serialized"]]


@pytest.mark.parametrize("shared_memory, major_minor", [(99 * 1024, (8, 6)), (163 * 1024, (8, 0)), (227 * 1024, (9, 0)),
                                                        (227 * 1024, (10, 0)), (99 * 1024, (12, 0))])  # fmt: skip
def test_launch_config_is_made_of_powers_of_two_that_cover_the_head(shared_memory, major_minor):
    import importlib

    launch_config = importlib.import_module("ladder.step05_fused.attention").launch_config
    for head_dim in range(1, 257):
        for head_dim_v in {head_dim, 128}:
            for itemsize in (2, 4):
                config = launch_config(head_dim, head_dim_v, itemsize, shared_memory, major_minor)
                for key, least in (
                    ("BLOCK_D", max(32, head_dim)),
                    ("BLOCK_DV", max(32, head_dim_v)),
                    ("BLOCK_M", 16),
                    ("BLOCK_N", 16),
                ):
                    assert config[key] & (config[key] - 1) == 0 and least <= config[key], (head_dim, head_dim_v, key)
                assert config["BLOCK_D"] < 2 * max(32, head_dim)
                pipeline = (
                    itemsize * config["BLOCK_N"] * (config["BLOCK_D"] + config["BLOCK_DV"]) * config["num_stages"]
                )
                assert pipeline <= shared_memory, (head_dim, head_dim_v, config)


def without_interpreter(code):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(compile_matrix.ROOT), os.environ.get("PYTHONPATH")) if p
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=compile_matrix.ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_each_target_gets_its_own_code_and_the_driver_comes_back():
    """One process, several targets in turn: a kernel must not remember the first."""
    out = without_interpreter(
        """
import json, triton
from ladder.lab.compile.compiler import compile_for
from ladder.lab.compile.matrix import cases_of
from ladder.rungs import find

found = {}
for target in ("sm_90", "sm_80", "sm_90"):
    name, kernel, args, kwargs = next(c for c in cases_of(find(5), target) if c[0].startswith("d64 float16"))
    caches, driver = kernel.device_caches, triton.runtime.driver._active
    code = compile_for(target, kernel, *args, **kwargs)
    assert kernel.device_caches is caches and triton.runtime.driver._active is driver
    assert code.target == target
    found[target] = [code.count("HGMMA"), code.count("HMMA"), f".target {target}" in code.ptx]
print(json.dumps(found))
"""
    )
    found = json.loads(out)
    assert found["sm_90"][0] > 0 and found["sm_90"][1] == 0 and found["sm_90"][2]
    assert found["sm_80"][0] == 0 and found["sm_80"][1] > 0 and found["sm_80"][2]


def test_spills_are_seen():
    """A kernel that holds more values than a thread has registers: the report has to say so."""
    source = '''
import sys, tempfile, pathlib, importlib.util
folder = tempfile.mkdtemp()
path = pathlib.Path(folder, "hoarder.py")
path.write_text("""
import triton, triton.language as tl

@triton.jit
def hoarder(x_ptr, out_ptr, N: tl.constexpr):
    offsets = tl.arange(0, 64)[:, None] * 256 + tl.arange(0, 256)[None, :]
    a = tl.load(x_ptr + offsets)
    b = tl.load(x_ptr + 16384 + offsets)
    for i in range(N):
        a, b = a * b + tl.sum(b, axis=1)[:, None], b + tl.sum(a, axis=0)[None, :]
    tl.store(out_ptr + offsets, a + b)
""")
spec = importlib.util.spec_from_file_location("hoarder", path)
module = importlib.util.module_from_spec(spec)
sys.modules["hoarder"] = module
spec.loader.exec_module(module)
import torch
from ladder.lab.compile.compiler import compile_for
x = torch.empty(1, device="meta")
few = compile_for("sm_90", module.hoarder, x, x, N=8, num_warps=32)
many = compile_for("sm_90", module.hoarder, x, x, N=8, num_warps=1)
print(few.spills, many.spills, many.spill_stores, many.spill_loads)
'''
    few, many, stores, loads = map(int, without_interpreter(source).split())
    assert few == 0
    assert many > 0 and stores > 0 and loads > 0


def test_a_kernel_of_the_interpreter_is_refused():
    from ladder.lab.compile.compiler import compile_for
    from ladder.lab.interpret import is_enabled

    if not is_enabled():
        pytest.skip("the interpreter is off")
    _, kernel, args, kwargs = next(iter(compile_matrix.cases_of(find(5), "sm_90")))
    with pytest.raises(ValueError, match="interpreter; want it imported with TRITON_INTERPRET unset"):
        compile_for("sm_90", kernel, *args, **kwargs)


def run_matrix(monkeypatch, capsys, rows, *arguments):
    monkeypatch.setattr(compile_matrix, "compile_in_subprocess", lambda *args, **kwargs: rows)
    status = compile_matrix.main(["--targets", "sm_90", *arguments])
    return status, capsys.readouterr().out


def test_matrix_fails_on_spills_and_on_nothing(monkeypatch, capsys, tmp_path):
    good = {"rung": "step05_fused", "case": "good", "target": "sm_90", "registers": 100, "spills": 0, "shared": 1024,
            "HMMA": 0, "HGMMA": 32, "UTCHMMA": 0, "problem": None}  # fmt: skip
    spilled = {**good, "case": "bad", "spills": 9, "problem": "spills: 4 stores, 3 loads, 2 bytes"}
    broken = {"rung": "step05_fused", "case": "broken", "target": "sm_90", "problem": "does not compile: boom"}
    status, out = run_matrix(monkeypatch, capsys, [good], "--json", str(tmp_path / "rows.json"))
    assert status == 0 and re.search(r"1 kernels, 0 that must not ship", out)
    assert json.loads((tmp_path / "rows.json").read_text()) == [{"triton": "installed", **good}]
    status, out = run_matrix(monkeypatch, capsys, [good, spilled, broken])
    assert status == 1 and "3 kernels, 2 that must not ship" in out
    assert "bad: spills: 4 stores, 3 loads, 2 bytes" in out and "broken: does not compile: boom" in out
    assert run_matrix(monkeypatch, capsys, [])[0] == 1


def test_matrix_reports_a_kernel_that_does_not_compile(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("PTXAS error: out of luck\nmore")

    monkeypatch.setattr(compile_matrix, "compile_for", broken)
    rows = list(compile_matrix.compile_rows(["sm_90"], [find(5)]))
    assert len(rows) == len(CASES)
    assert rows[0]["problem"] == "does not compile: RuntimeError: PTXAS error: out of luck"


def test_matrix_refuses_unknown_rungs_and_targets(capsys):
    for arguments, words in ((["--rungs", "99"], "rung is '99'"), (["--targets", "sm_75"], "sm_75")):
        with pytest.raises(SystemExit) as stopped:
            compile_matrix.main(arguments)
        assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_matrix_says_what_pip_said(monkeypatch, capsys, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "No matching distribution found for triton==0.0.0")
    monkeypatch.setattr(compile_matrix.subprocess, "run", lambda *args, **kwargs: failed)
    assert compile_matrix.main(["--triton", "0.0.0", "--cache", str(tmp_path)]) == 2
    assert "pip could not install triton 0.0.0: No matching distribution" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_installed_triton_is_used_again(monkeypatch, tmp_path):
    (tmp_path / "triton-3.6.0" / "triton-3.6.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(compile_matrix.subprocess, "run", lambda *a, **k: pytest.fail("pip was called"))
    assert compile_matrix.install("3.6.0", tmp_path) == tmp_path / "triton-3.6.0"


def test_a_full_disk_costs_no_earlier_matrix(tmp_path, monkeypatch, capsys, full_disk):
    file = tmp_path / "matrix.json"
    file.write_text("before")
    monkeypatch.setattr(compile_matrix, "compile_in_subprocess", lambda *args, **options: [{"rung": "", "case": "x" * 2000, "target": "sm_90", "problem": "none"}])
    with full_disk():
        assert compile_matrix.main(["--targets", "sm_90", "--json", str(file)]) == 2
    assert f"cannot write {file}: " in capsys.readouterr().err and file.read_text() == "before"
