"""The reader's own attention kernel beside rung 05 on the reader's GPU: the second live cell of chapter 05.

``own_kernel.time(attend)`` copies the source of ``attend``, and of the kernels that it launches, into a module, and
measures it in a process without Triton's interpreter.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import tempfile
import textwrap
from pathlib import Path

import torch
from IPython.display import Markdown

from ladder.chapters import live, live_process, plots
from ladder.lab import results, timing
from ladder.lab.names import title
from ladder.lab.parity import Oracle, nan_allocations
from ladder.lab.problem import AttentionProblem
from ladder.lab.roofline import measure_limits
from ladder.rungs import find

HEADER = "import torch\nimport triton\nimport triton.language as tl\n"
YOURS = "your kernel"
FIELDS = {"registers": "n_regs", "spills": "n_spills"}  # of Triton's compiled kernel
PROBLEMS = [
    AttentionProblem(B=1, Hq=16, Hkv=16, Sq=length, Sk=length, D=dim, Dv=dim, dtype="bfloat16")
    for length, dim in ((1000, 64), (4096, 64), (4096, 128))
]
DOES = (
    "tests your kernel against float64, times it beside rung 05 in bf16, and says how many registers it takes and "
    "whether they spill."
)


def time(attend, *, again=False):
    """Test and time ``attend(q, k, v)``, q, k, v (heads, tokens, head size), a launch of the reader's own kernel.

    Returns:
        An OwnKernel to display; None where there is no CUDA device or
        nothing could be measured, with the reason printed.

    Raises:
        TypeError: ``attend`` is no function that was written in a file or a notebook.
    """
    text = source(attend)
    name = f"own-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    sources = ("chapters/ch01_05_rungs/own_kernel.py", "step05_fused/*.py", "lab/*.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "reader.py")
        path.write_text(text)
        module = "ladder.chapters.ch01_05_rungs.own_kernel"
        topic = live_process.Topic(name, module, DOES, sources, (str(path), attend.__name__))
        doc = live_process.document(topic, again)
    return doc and OwnKernel(doc)


def recorded():
    """How the chapter's kernel, unchanged, did on the recorded GPU, as Markdown."""
    doc = results.load("live_h200")
    rows = results.wanted([row for row in doc["rows"] if row["impl"] == YOURS], doc, "the chapter's own kernel")
    said = []
    for row in rows:
        rung = results.one(doc, "step05_fused", **row["case"])
        share = rung["ms"]["median"] / row["ms"]["median"]
        said.append(f"**{share:.0%}** with {row['case']['Sq']:,} tokens and heads of {row['case']['D']}")
    spills = "none of its registers spill" if not any(row.get("spills") for row in rows) else "some registers spill"
    return Markdown(
        f"On the recorded GPU the kernel as it stands above reaches, of rung 05's speed, {', '.join(said)}; {spills} "
        f"({results.caption(doc)})."
    )


def source(function):
    """A module's text with ``function`` and everything of its own file that it uses: kernels, functions, numbers."""
    function = getattr(function, "fn", function)
    if not inspect.isfunction(function):
        raise TypeError(f"attend is a {type(function).__name__}; want the function that launches your kernel")
    parts, seen = [], set()

    def collect(one):
        if one.__name__ in seen:
            return
        seen.add(one.__name__)
        text = textwrap.dedent(inspect.getsource(one))
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        for name in sorted(names & set(one.__globals__)):
            value = one.__globals__[name]
            inner = getattr(value, "fn", value)
            if inspect.isfunction(inner) and inner.__module__ == function.__module__:
                collect(inner)
            elif isinstance(value, (int, float, str)) and name not in seen and not name.startswith("_"):
                seen.add(name)
                parts.append(f"{name} = {value!r}")
        parts.append(text)

    collect(function)
    return HEADER + "\n\n" + "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------- in the process that measures


def measure(path, function, doing, device="cuda", problems=None):
    """The document: for each problem a row of the reader's kernel and one of rung 05."""
    device, problems = torch.device(device), problems or PROBLEMS
    doing(0, len(problems) + 1, "the limits of this machine")
    limits = measure_limits(device, quick=True)
    rows = []
    for number, problem in enumerate(problems, 1):
        doing(number, len(problems) + 1, f"{problem.label()}: your kernel and rung 05")
        q, k, v = problem.make(device)
        oracle = Oracle(q, k, v)
        for name, call in ((YOURS, _yours(path, function)), ("step05_fused", find(5).module.attention)):
            row = {"case": problem.case(), "impl": name}
            try:
                with nan_allocations():
                    out = call(q, k, v)
                parity = oracle.check(out, None)
                took = timing.measure(call, [(q, k, v)], device=device, budget_ms=60)
                about = call.about() if name == YOURS else {}
                row = results.row(problem.case(), name, timing=took, flops=problem.flops, parity=parity, **about)
            except Exception as error:  # the reader's code may do anything
                row["skipped"] = _sentence(error)
            rows.append(row)
        if any("skipped" in row and row["impl"] == YOURS for row in rows):
            break  # a kernel that does not run will not run on the next problem either
    return results.document(rows, device=device, limits=limits)


class _yours:  # noqa: N801  called like a function
    """The reader's function on (1, heads, tokens, head size), with what the compiler said of its last kernel."""

    def __init__(self, path, function):
        self.path, self.function, self.compiled = path, function, None

    @functools.cached_property
    def call(self):
        spec = importlib.util.spec_from_file_location("reader", self.path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.watch()
        return getattr(module, self.function)

    def watch(self):
        """Keep the compiled kernel of every launch: Triton's own function returns it."""
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def watched(kernel, *args, **options):
            self.compiled = run(kernel, *args, **options)
            return self.compiled

        JITFunction.run = watched

    def about(self):
        """{"registers", "spills"} of the kernel that was launched, as far as this Triton says."""
        found = {name: getattr(self.compiled, field, None) for name, field in FIELDS.items()}
        return {name: value for name, value in found.items() if value is not None}

    def __call__(self, q, k, v):
        out = self.call(q[0], k[0], v[0])
        if not isinstance(out, torch.Tensor) or out.shape != q[0].shape:
            got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise ValueError(f"{self.function} returned {got}; want a tensor of shape {tuple(q[0].shape)}")
        return out[None]


def _sentence(error):
    """One line of an exception: the last that says something, without the compiler's drawing of the place."""
    lines = [line.strip() for line in str(error).splitlines() if re.search(r"\w", line)]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


# ---------------------------------------------------------------- what the notebook shows


class OwnKernel(live_process.Shown):
    """The reader's kernel beside rung 05."""

    @property
    def yours(self):
        """Measured rows of the reader's kernel."""
        return [row for row in self.measured if row["impl"] == YOURS]

    def verdict(self):
        """Whether it is right, and how near to rung 05 it comes."""
        broken = [row for row in self.doc["rows"] if row["impl"] == YOURS and "skipped" in row]
        if broken:
            return f"Your kernel does not run here. {broken[0]['skipped']}"
        wrong = [row for row in self.yours if not row["ok"]]
        if wrong:
            return f"Parity FAILED on {live.label(wrong[0]['case'])}: {wrong[0]['reason']}"
        pairs = zip(self.yours, (row for row in self.measured if row["impl"] != YOURS))
        shares = [rung["ms"]["median"] / ours["ms"]["median"] for ours, rung in pairs]
        spilled = ", though some registers spill" if any(row.get("spills") for row in self.yours) else ""
        return (
            f"Parity ok on {len(self.yours)} problems. Your kernel reaches {min(shares):.0%} to {max(shares):.0%} of "
            f"rung 05's speed{spilled}."
        )

    def table(self):
        """(headings, rows of text)."""
        lines = []
        for row in self.doc["rows"]:
            name = row["impl"] if row["impl"] == YOURS else title(row["impl"])
            if "skipped" in row:
                lines.append((live.label(row["case"]), name, "does not run", *[""] * 5))
                continue
            share = row["tflops"] / self.doc["limits"]["matmul_tflops"]
            lines.append((
                live.label(row["case"]), name, "ok" if row["ok"] else "FAILED", f"{row['ms']['median']:.3g}",
                f"{row['tflops']:.3g}", f"{share:.0%}", str(row.get("registers", "")), str(row.get("spills", "")),
            ))  # fmt: skip
        return ("problem", "kernel", "parity", "ms", "TFLOP/s", "of the limit", "registers", "spills"), lines

    @plots.styled
    def figure(self):
        """TFLOP/s of both kernels, a group of bars a problem."""
        cases = list(dict.fromkeys(live.label(row["case"]) for row in self.measured))
        figure, axes = plots.canvas(0.9 + 0.7 * len(cases))
        for row in self.measured:
            ours = row["impl"] == YOURS
            place = len(cases) - 1 - cases.index(live.label(row["case"])) + (0.19 if ours else -0.19)
            axes.barh(place, row["tflops"], height=0.36, color=plots.ORANGE if ours else plots.SKY, edgecolor=plots.INK)
            axes.text(row["tflops"], place, f" {row['tflops']:.3g}", va="center", fontsize=9)
        axes.set_yticks(range(len(cases)), cases[::-1], fontsize=9)
        axes.margins(x=0.12)
        axes.set_xlabel("TFLOP/s; orange: your kernel, blue: rung 05")
        return figure


def main(argv=None):
    """Measure the function of a module: the arguments are the topic's name, the module's file and the function."""
    import sys

    _, path, function = sys.argv[1:] if argv is None else argv
    live_process.report(functools.partial(measure, path, function))


if __name__ == "__main__":
    main()
