"""What chapters 06 and 07 do the same way: recorded decode, parity on a paged cache, experts, what each rung accepts.

As in ``ladder.lab.chapter``, text that goes into an output holds booleans, shapes and recorded numbers only.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from IPython.display import Markdown

from ladder.rungs import RUNGS, find

from . import plots, results
from .decode import DecodeOracle, DecodeProblem
from .problem import AttentionProblem, reference
from .report import title as implementation_title

RECORD = "step07_dflash1"
# Head layouts that people serve, from the published configurations: layers, KV heads, and numbers a token keeps a layer.
LAYOUTS = {
    "MHA: 32 layers, 32 KV heads (Llama-2-7B)": (32, 2 * 32 * 128),
    "GQA: 32 layers, 8 KV heads (Llama-3-8B)": (32, 2 * 8 * 128),
    "GQA: 48 layers, 4 KV heads (Qwen3-30B-A3B)": (48, 2 * 4 * 128),
    "MLA: 27 layers, 512 + 64 (DeepSeek-V2-Lite)": (27, 576),
    "MLA: 61 layers, 512 + 64 (DeepSeek-V3)": (61, 576),
}


def numbers(remeasure=False):
    """The recorded results of rungs 06 and 07; with ``remeasure``, measured here, on this GPU (a few minutes).

    Raises:
        RuntimeError: ``remeasure`` without a CUDA device.
    """
    if not remeasure:
        return results.load(RECORD)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "REMEASURE is True but no CUDA device is here; set it to False to read the recorded numbers"
        )
    # A process of its own: this one may have Triton's interpreter on, which would be timed in place of the GPU.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{RECORD}.json")
        command = [sys.executable, "-m", "ladder.bench_v1", "--json", str(path)]
        subprocess.run(command, env=env, stdout=subprocess.DEVNULL, check=True)
        return results.load(path)


# ---------------------------------------------------------------- recorded decode


def decode_problems():
    """{label: DecodeProblem} of the table of decode cells: 32 query and 8 KV heads of 128, one new token, pages of 64."""
    from ladder.bench_v1 import decode_problems as cells

    return {label(problem): problem for problem in cells()}


def mla_problems():
    """{label: DecodeProblem} of the recorded absorbed MLA cells."""
    from ladder.bench_v1 import mla_problems as cells

    return {f"{label(problem)}, {problem.Hq} heads": problem for problem in cells()}


def label(problem):
    """How tables call a batch: "64 x 4k"."""
    return f"{problem.B} x {plots.tokens(problem.context)}"


def row(doc, impl, problem):
    """The recorded row of an implementation on a DecodeProblem or AttentionProblem, or None."""
    found = [entry for entry in results.select(doc, impl, **problem.case()) if "ms" in entry]
    return found[0] if found else None


def us(entry):
    """Microseconds of a row as a reader says them."""
    time = 1e3 * entry["ms"]["median"]
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def peers_of(doc, problem):
    """{name: row} of the peers that were measured on a problem."""
    entries = [entry for entry in results.select(doc, **problem.case()) if "ms" in entry]
    return {e["impl"]: e for e in entries if not e["impl"].startswith(("step", "sweep"))}


def speed(doc, upto, problems=None):
    """Recorded decode of rungs 6 to ``upto`` and of the best peer, as a Markdown table."""
    problems = problems or decode_problems()
    rungs = [rung for rung in RUNGS[5:upto]]
    heads = " | ".join(f"{r.number:02d} us | {r.number:02d} TB/s | of the read limit" for r in rungs)
    lines = [f"| batch x context | K and V | {heads} | best peer | its us |", "|:--|--:|" + "--:|--:|--:|" * len(rungs) + ":--|--:|"]
    for name, problem in problems.items():
        cells = []
        for rung in rungs:
            entry = row(doc, rung.name, problem)
            if entry is None:
                cells += ["-", "-", "-"]
            else:
                cells += [us(entry), f"{entry['tbs']:.2f}", f"{100 * entry['tbs'] / doc['limits']['read_tbs']:.0f} %"]
        peers = peers_of(doc, problem)
        best = min(peers, key=lambda n: peers[n]["ms"]["median"]) if peers else None
        cells += [implementation_title(best), us(peers[best])] if best else ["-", "-"]
        lines.append(f"| {name} | {plots.size(problem.kv_bytes)} | {' | '.join(cells)} |")
    lines.append(
        f"\n*{results.caption(doc)}; medians of CUDA-graph launches with a cold L2. The rungs read pages; the peers read the "
        "same numbers from contiguous memory.*"
    )
    return Markdown("\n".join(lines))


def speed_bars(doc, upto, name, note="", title=""):
    """Recorded microseconds of rungs 6 to ``upto`` and the peers on one decode problem, as a Picture."""
    problem = decode_problems()[name]
    entries = []
    for rung in RUNGS[5:upto]:
        if (entry := row(doc, rung.name, problem)) is not None:
            entries.append((f"{rung.number:02d} {rung.title}", 1e3 * entry["ms"]["median"], plots.RUNG_COLOURS[rung.number]))
    highlight = entries[-1][0]
    for peer, entry in peers_of(doc, problem).items():
        entries.append((f"{implementation_title(peer)}, no pages", 1e3 * entry["ms"]["median"], plots.PALE))
    entries.append(("K and V at the read limit", problem.kv_bytes / doc["limits"]["read_tbs"] / 1e6, plots.PAPER))
    figure = plots.bars(
        entries, unit="microseconds", title=title or f"decode, {name}", highlight=highlight,
        note=f"{note} Medians, {results.caption(doc)}.",
    )  # fmt: skip
    return plots.Picture(figure, f"bars: microseconds of {len(entries) - 1} implementations, decode of {name}")


# ---------------------------------------------------------------- parity


def small_decode_problems(number):
    """{label: (DecodeProblem, options)} that Triton's interpreter finishes in a second each."""
    base = DecodeProblem(Hq=4, Hkv=2, D=32, Dv=32, page_size=16, dtype="float16", context=40)
    problems = {
        "lengths 0, 1, page - 1, page, page + 1": (base.replace(B=5, lengths=(0, 1, 15, 16, 17)), {}),
        "4 new tokens": (base.replace(B=2, lengths=(3, 50), q_len=4), {}),
        "group of 7, head 80, pages of 5": (base.replace(B=1, Hq=7, Hkv=1, D=80, Dv=80, page_size=5, context=33), {}),
        "6 splits": (base.replace(context=150, dtype="float32"), {"num_kv_splits": 6}),
    }
    if number >= 7:
        latent = dict(Hq=16, Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
        problems["MLA 576/512, absorbed"] = (base.replace(context=37, **latent), {})
    return problems


def decode(number, problem, inputs, **options):
    """(out, lse) of a rung's decode on PagedInputs."""
    import importlib

    rung = importlib.import_module(f"ladder.{find(number).name}")
    q, k_cache, v_cache, table, lens = inputs
    options = dict(scale=problem.scale, return_lse=True, **options)
    if problem.latent:
        return rung.mla_decode(q, k_cache[:, :, 0], table, lens, head_dim_v=problem.Dv, **options)
    return rung.paged_decode(q, k_cache, v_cache, table, lens, **options)


def by_step_05(problem, inputs):
    """The same rows from step 05, one sequence after another, on keys gathered out of their pages."""
    from ladder.step05_fused import attention

    rows = []
    for b in range(problem.B):
        k, v = inputs.sequence(b)
        rows.append(attention(inputs.q[b : b + 1].transpose(1, 2), k, v, causal=True, scale=problem.scale).transpose(1, 2))
    return torch.cat(rows)


def parity(number):
    """Check a rung's decode on the CPU against the float64 oracle and the rung before; a Markdown table of verdicts.

    Every dead slot of the caches is NaN, and the block tables hold garbage past the lengths.
    """
    before = find(number - 1)
    lines = [f"| decode | q | pages of K | float64 oracle | {before.name} |", "|:--|:--|:--|:--|:--|"]
    for name, (problem, options) in small_decode_problems(number).items():
        inputs = problem.make()
        oracle = DecodeOracle(inputs, scale=problem.scale, most_sequences=99)
        out, lse = decode(number, problem, inputs, **options)
        if problem.latent:
            agrees = "cannot: no latent cache"
        else:
            other = by_step_05(problem, inputs) if number == 6 else decode(6, problem, inputs, **options)[0]
            error = float((out.double() - other.double()).abs().max())
            agrees = "within budget" if error <= oracle.budget else f"**FAILS**: {error:.2g}"
        verdict = oracle.check(out, lse)
        word = "within budget" if verdict else f"**FAILS**: {verdict.reason}"
        lines.append(
            f"| {name}, {problem.dtype} | `{tuple(inputs.q.shape)}` | `{tuple(inputs.k_cache.shape)}` | {word} | {agrees} |"
        )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- cache arithmetic


def cache_table(context=131072, memory=100e9):
    """Bytes of cache of published head layouts, and how many sequences of ``context`` tokens ``memory`` bytes hold."""
    lines = [
        f"| attention | a token, a layer | a token | {plots.tokens(context)} tokens | sequences in {plots.size(memory)} |",
        "|:--|--:|--:|--:|--:|",
    ]
    for name, (layers, width) in LAYOUTS.items():
        token = 2 * width * layers
        lines.append(
            f"| {name} | {2 * width:,} B | {plots.size(token)} | {plots.size(token * context)} | {memory / (token * context):.1f} |"
        )
    lines.append("\n*bf16, 2 bytes a number; arithmetic, nothing measured.*")
    return Markdown("\n".join(lines))
