"""What chapter 11 computes and reads: arithmetic of a served model,
runs of the scheduler, the article's table beside ours.

Recorded files in ``notebooks/results``: ``engine`` (rows of ``python -m ladder.engine bench``: throughput, memory
table, the dense control, peers) and ``engine_quality`` (``python -m ladder.engine quality``). Where a file or a
row is missing, a sentence in the table's place says so, and the chapter runs all the same.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ladder.chapters import plots
from ladder.chapters.article import ARTICLE, ARTICLE_CONCURRENCY
from ladder.chapters.markdown import Markdown
from ladder.engine.kv_pool import PagePool
from ladder.engine.memory import GRAPH_RESERVE, MemoryPlan
from ladder.engine.models import find, tiny_moe
from ladder.engine.sampling import SamplingParams
from ladder.engine.scheduler import Request, Scheduler
from ladder.lab import results
from ladder.lab.names import title

OURS, V1 = "step08_dflash2", "step07_dflash1"
RECORDS = {
    "engine": "python -m ladder.engine bench --model deepseek-v2-lite --backend step07,step08 --json "
    "notebooks/results/engine.json",
    "step08_fusion": "python -m ladder.bench fusion --json notebooks/results/step08_fusion.json",
    "engine_quality": "python -m ladder.engine quality --json notebooks/results/engine_quality.json",
}
SERVED = dict(model="deepseek-v2-lite", input_len=4096, output_len=512, concurrency=8)
TRAINING = tiny_moe.WEIGHTS.with_name("tiny_moe_training.json")


def implementation_title(impl):
    """A backend, or a peer of the whole engine, as a table names it."""
    peers = {"transformers_grouped_mm": "transformers, SDPA and grouped_mm", "transformers_eager": "transformers, SDPA"}
    return peers.get(impl) or title(impl)


def record(name):
    """A recorded file by name, or None where it is not recorded yet."""
    return results.load(name) if (results.FOLDER / f"{name}.json").exists() else None


def missing(name, what=""):
    """What stands in a table's place while its file, or that part of it, is missing."""
    return Markdown(
        f"*Not recorded yet{': ' + what if what else ''}. `{RECORDS[name]}` on a GPU records it; the cells around this "
        f"one do not need it.*"
    )


# ---------------------------------------------------------------- training


@plots.styled
def training_picture(path=TRAINING):
    """Bits per byte while tiny-moe learnt, and of held-out text, as a Picture."""
    run = json.loads(Path(path).read_text())
    curve, held = run["curve"], run["evaluations"]
    figure, (axes, contexts) = plots.canvas(3.4, columns=2, width_ratios=[2, 1])
    axes.plot(
        [r["tokens"] / 1e6 for r in curve], [r["bits_per_byte"] for r in curve], color=plots.SKY, lw=1.4,
        label="text being learnt",
    )  # fmt: skip
    axes.plot([r["tokens"] / 1e6 for r in held], [r["held_out_bits_per_byte"] for r in held], "o-", color=plots.RED,
              mec=plots.INK, lw=1.6,
              label="held-out text, at 4,096 tokens")  # fmt: skip
    axes.set(xlabel="tokens, millions", ylabel="bits per byte", ylim=(0, 8.3))
    axes.grid(True, lw=0.6)
    axes.legend(loc="upper right")
    full = next((r["tokens"] / 1e6 for r in curve if r["seq_len"] == curve[-1]["seq_len"]), None)
    axes.axvline(full, color=plots.GREY, ls="--", lw=1.0)
    axes.text(full + 1, 4.6, "full length\nfrom here", fontsize=9, color=plots.GREY)
    bits = run["held_out_bits_per_byte"]
    contexts.plot(range(len(bits)), list(bits.values()), "o-", color=plots.RED, mec=plots.INK, lw=1.6)
    for x, value in enumerate(bits.values()):
        contexts.text(x, value + 0.006, f"{value:.3f}", ha="center", va="bottom", fontsize=9)
    low = min(bits.values())
    contexts.grid(True, lw=0.6)
    contexts.set_xticks(range(len(bits)), [plots.tokens(int(n)) for n in bits])
    contexts.set(xlabel="tokens of context", xlim=(-0.5, len(bits) - 0.5), ylim=(low - 0.06, max(bits.values()) + 0.03))
    contexts.set_title("held out, at the end", fontsize=10.5)
    plots.caption(
        figure,
        f"Trained in {run['seconds']:.0f} s on {run['machine']['gpu']}, {run['parameters'] / 1e6:.1f} M parameters. "
        f"Left of the dashed line it learns from {curve[0]['seq_len']:,} tokens at a time, and the red curve rises, "
        "because the held-out text has positions that the model has not seen yet. Right: bits per byte fall with the "
        "context, partly because in a long text fewer bytes stand near its beginning.",
    )  # fmt: skip
    return plots.Picture(
        figure,
        f"training of tiny-moe, {run['steps']:,} steps, {curve[0]['bits_per_byte']:.2f} to {bits['4096']:.2f} bits per "
        f"byte held out",
    )


# ---------------------------------------------------------------- the scheduler at work


@dataclass(frozen=True)
class Mark:
    """What one request did in one step. ``what``: "prefill", "decode", "wait", "out" (preempted)."""

    step: int
    request: int
    what: str
    tokens: int = 0


@dataclass(frozen=True)
class Run:
    """A run of the scheduler: every request's ``Mark`` in every step, the pages in use in each, and the requests.

    ``times`` of a request are the steps in which its tokens came.
    """

    marks: list
    used: list
    requests: list
    preemptions: int


def serve(arrivals, *, pages, page_size=16, chunk_tokens=64, decode_every=4, max_seqs=64, most=2000):
    """The ``Run`` of the engine's scheduler on its page pool, tokens counted and not computed.

    Args:
        arrivals: (step of arrival, prompt tokens, answer tokens) each.
        pages: of the pool, beyond page 0. The others: see ``ladder.engine.scheduler.Scheduler``.

    Raises:
        ValueError: a request that the pool could never hold.
    """
    pool = PagePool(pages + 1, page_size)
    scheduler = Scheduler(pool, max_seqs=max_seqs, chunk_tokens=chunk_tokens, decode_every=decode_every)
    for _, prompt, answer in arrivals:
        if prompt + answer > pool.tokens:
            raise ValueError(f"a request of {prompt + answer} tokens; want at most {pool.tokens}, the whole pool")
    requests = [
        Request(n, [0] * prompt, SamplingParams(max_tokens=answer)) for n, (_, prompt, answer) in enumerate(arrivals)
    ]
    marks, used, added = [], [], 0
    for step in range(most):
        while added < len(arrivals) and arrivals[added][0] <= step:
            scheduler.add(requests[added])
            added += 1
        if added == len(arrivals) and not scheduler.busy:
            break
        plan = scheduler.next()
        busy = {r.id: n for r, n in plan.chunks} if plan else {}
        for request in requests[:added]:
            if request.id in busy:
                marks.append(Mark(step, request.id, "decode" if plan.decode else "prefill", busy[request.id]))
            elif not request.finished:
                marks.append(Mark(step, request.id, "out" if request.preempted and not request.pages else "wait"))
        used.append(pool.used)
        for request, new in plan.chunks if plan else ():
            request.computed += new
            if request.computed == request.length:
                request.output.append(0)
                request.times.append(step)
                if len(request.output) == request.params.max_tokens:
                    scheduler.finish(request, "length")
    return Run(marks, used, requests, scheduler.preemptions)


COLOURS = {"prefill": plots.BLUE, "decode": plots.ORANGE, "wait": plots.PALE, "out": plots.RED}
WORDS = {
    "prefill": "prefill, tokens of the chunk", "decode": "decode, one token", "wait": "waits",
    "out": "preempted: pages given back",
}  # fmt: skip


@plots.styled
def draw_timeline(axes, marks, num_requests):
    """Requests downwards, steps to the right."""
    last = max(m.step for m in marks) + 1
    for mark in marks:
        hatch = {"wait": "..", "out": "xx"}.get(mark.what)
        axes.barh(
            mark.request, 1, left=mark.step, height=0.78, color=COLOURS[mark.what],
            edgecolor=plots.PAPER if hatch is None else plots.GREY, lw=0.4, hatch=hatch,
        )  # fmt: skip
        if mark.what == "prefill" and last <= 60:
            axes.text(
                mark.step + 0.5, mark.request, str(mark.tokens), ha="center", va="center", color=plots.PAPER,
                fontsize=8 if last <= 40 else 6.5,
            )  # fmt: skip
    axes.set(xlim=(0, last), ylim=(num_requests - 0.5, -0.5), yticks=range(num_requests), ylabel="request")
    for what, word in WORDS.items():
        axes.barh(
            0, 0, color=COLOURS[what], label=word, hatch={"wait": "..", "out": "xx"}.get(what), edgecolor=plots.GREY,
            lw=0.4,
        )  # fmt: skip
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8.5, handlelength=1.3, columnspacing=1.2
    )
    return axes


# ---------------------------------------------------------------- memory


GPUS = {"H200, 141 GB": 141_000_000_000, "A100, 80 GB": 80_000_000_000}


def memory_plan(
    total, fraction, *, model="deepseek-v2-lite", dtype=torch.bfloat16, page_size=64, chunk_keys=65536, longest=None,
    weights=None,
):  # fmt: skip
    """The engine's ``MemoryPlan`` by arithmetic alone, on a device that nobody else uses.

    Args:
        total: bytes of the device. fraction: share of it that the engine takes. longest: tokens of the longest
            sequence.
        weights: bytes of weights; None counts the model's.
    """
    spec = find(model)
    activations = max(chunk_keys, longest or 0) * spec.key_bytes(dtype, False)
    weights = spec.parameters * dtype.itemsize if weights is None else weights
    return MemoryPlan(total, fraction, 0, weights, activations, GRAPH_RESERVE, page_size * spec.token_bytes(dtype))


def concurrency(plan, tokens, page_size=64):
    """Most requests of ``tokens`` tokens that the pool of a plan holds at once; page 0 is nobody's."""
    return max(0, plan.pages - 1) // -(-tokens // page_size)


def concurrency_table(tokens=4608, gpus=GPUS):
    """Most requests of so many tokens at three memory fractions, by
    arithmetic, beside the article's, as a Markdown table."""
    spec = find("deepseek-v2-lite")
    weights = 2 * spec.parameters
    lines = [
        "| memory fraction | " + " | ".join(f"{name}: pool, requests" for name in gpus) + " | the article, one A100 |",
        "|:--|" + "--:|" * (len(gpus) + 1),
    ]
    for fraction, theirs in ARTICLE_CONCURRENCY.items():
        cells = []
        for total in gpus.values():
            plan = memory_plan(total, fraction, weights=weights)
            cells.append(f"{plots.size(plan.pool)}, **{concurrency(plan, tokens):,}**")
        lines.append(
            f"| {fraction:.2f} | {' | '.join(cells)} | "
            f"{theirs}{', sometimes out of memory' if fraction == 0.95 else ''} |"
        )
    lines.append(
        f"\n*By arithmetic: DeepSeek-V2-Lite in bf16, {plots.size(weights)} of weights, "
        f"{spec.token_bytes(torch.bfloat16):,} bytes of cache a token, requests of {tokens:,} tokens.*"
    )
    return Markdown("\n".join(lines))


def memory_recorded(doc=None):
    """The recorded memory table: requests at once at each fraction,
    and whether anything ran out, as a Markdown table."""
    doc = doc or record("engine")
    rows = [e for e in doc["rows"] if "concurrency" in e and "mem_fraction" in e["case"]] if doc else []
    if not rows:
        return missing("engine", "the memory table, `--memory-table --requests 200`")
    lines = [
        "| memory fraction | backend | KV pool, tokens | requests at once | mixed requests served | preemptions | out "
        "of memory |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for e in rows:
        by = f", limited by {e['limited_by']}" if e.get("limited_by") not in (None, "memory") else ""
        lines.append(
            f"| {e['case']['mem_fraction']:.2f} | {implementation_title(e['impl'])} | {e['kv_pool_tokens']:,} | "
            f"**{e['concurrency']:,}**{by} | {e.get('mixed_requests', '-')} "
            f"| {e.get('preemptions', '-')} | {e.get('out_of_memory', '-')} |"
        )
    lines.append(f"\n*{results.caption(doc, rows)}.*")
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- where the time goes, by arithmetic


@dataclass(frozen=True)
class Served:
    """What arithmetic needs of a model. Sizes of one layer on average;
    ``heads`` (q/k size, v size) of attention as it runs.

    Args:
        num_layers, num_heads: as they say. qk_dim, v_dim: sizes of a head in prefill. cache: numbers cached a token and
        layer. latent: whether decode multiplies latents (MLA): q/k and v then have ``cache`` and ``cache`` - 64
        numbers. attention_weights, ffn_weights: weights of a layer that a token meets. expert_weights: of one routed
        expert, 0 when dense. num_experts, top_k: of a layer. other_weights: embedding and output, of which a token
        meets the output's half.
    """

    num_layers: int
    num_heads: int
    qk_dim: int
    v_dim: int
    cache: int
    latent: bool
    attention_weights: int
    ffn_weights: float
    expert_weights: int
    num_experts: int
    top_k: int
    output_weights: int

    def touched(self, tokens):
        """Routed experts of a layer that ``tokens`` tokens touch on average, if the router chose evenly."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** tokens) if self.num_experts else 0.0

    def prefill_flops(self, length):
        """(attention core, everything else): FLOPs of a causal prompt of ``length`` tokens."""
        pairs = length * (length + 1) / 2
        core = 2 * pairs * self.num_heads * (self.qk_dim + self.v_dim) * self.num_layers
        met = self.attention_weights + self.ffn_weights + self.top_k * self.expert_weights
        return core, 2 * length * met * self.num_layers + 2 * self.output_weights

    def decode_bytes(self, batch, context, itemsize=2):
        """(cache, weights): bytes that one decode step reads."""
        read = self.attention_weights + self.ffn_weights + self.touched(batch) * self.expert_weights
        return batch * context * self.cache * self.num_layers * itemsize, (
            read * self.num_layers + self.output_weights
        ) * itemsize

    def share(self, phase, context, *, batch=8, efficiency=1.0):
        """Attention's share (0 .. 1) of the time. ``efficiency``: speed of the attention core relative to the rest."""
        core, rest = self.prefill_flops(context) if phase == "prefill" else self.decode_bytes(batch, context)
        return core / efficiency / (core / efficiency + rest)


def _v2_lite(dense):
    c = find("deepseek-v2-lite").config
    attention = (
        c.width * c.num_heads * c.qk_dim
        + c.width * (c.latent + c.rope_dim)
        + c.latent * c.num_heads * (c.nope_dim + c.v_dim)
        + c.num_heads * c.v_dim * c.width
    )
    routed = 0 if dense else c.num_layers - c.num_dense
    mlp, expert = 3 * c.width * c.dense_width, 3 * c.width * c.expert_width
    return Served(
        c.num_layers, c.num_heads, c.qk_dim, c.v_dim, c.latent + c.rope_dim, True, attention,
        (mlp * (c.num_layers - routed) + routed * (c.num_shared * expert + c.width * c.num_experts)) / c.num_layers,
        round(expert * routed / c.num_layers), c.num_experts if routed else 0, c.top_k if routed else 0,
        c.vocab * c.width,
    )  # fmt: skip


def models():
    """{name: Served} of the arithmetic: DeepSeek-V2-Lite, the same
    with every layer dense, and a dense 7B with grouped heads."""
    width, ffn, heads, kv, dim, layers, vocab = 3584, 18944, 28, 4, 128, 28, 152064  # Qwen2-7B, from its config.json
    seven = Served(
        layers, heads, dim, dim, 2 * kv * dim, False, width * dim * (2 * heads + 2 * kv), 3 * width * ffn, 0, 0, 0,
        vocab * width,
    )  # fmt: skip
    return {
        "DeepSeek-V2-Lite": _v2_lite(False),
        "V2-Lite, every layer dense": _v2_lite(True),
        "dense 7B (Qwen2)": seven,
    }


def crossing(model, phase, share, *, batch=8, efficiency=1.0, longest=1 << 22):
    """The shortest context at which attention takes more than ``share`` of the time; None beyond ``longest``."""
    low, high = 0, longest
    if model.share(phase, high, batch=batch, efficiency=efficiency) <= share:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if model.share(phase, middle, batch=batch, efficiency=efficiency) > share else (middle, high)
        )
    return high


def share_table(lengths=(512, 4096, 16384, 131072), batch=8):
    """Attention's share by arithmetic, as a Markdown table."""
    lines = [
        "| model | phase | " + " | ".join(plots.tokens(n) for n in lengths) + " | 30 % from |",
        "|:--|:--|" + "--:|" * (len(lengths) + 1),
    ]
    for name, model in models().items():
        for phase in ("prefill", "decode"):
            cells = " | ".join(f"{100 * model.share(phase, n, batch=batch):.0f} %" for n in lengths)
            first = crossing(model, phase, 0.3, batch=batch)
            lines.append(
                f"| {name} | {phase}{'' if phase == 'prefill' else f', {batch} requests'} | {cells} | {first:,} tokens "
                f"|"
            )
    lines.append(
        "\n*Prefill by FLOPs, decode by bytes, as if attention ran as near its limit as the rest; routers that choose "
        "evenly.*"
    )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- the article's table beside ours


def implied_throughput(ttft_ms, itl_ms, *, concurrency=8, output_len=512):
    """Output tokens a second of a batch that starts together: first
    tokens after ``ttft_ms``, then one each ``itl_ms``."""
    return concurrency * output_len / (1e-3 * (ttft_ms + (output_len - 1) * itl_ms))


def served(doc, impl, **changes):
    """The throughput row of a backend, None where there is none; ``changes`` of ``SERVED``."""
    rows = _whole(results.select(doc, impl, **{**SERVED, **changes})) if doc else []
    # A run whose pool is sized to its requests shows the memory that they need; another one fills the fraction it was
    # given.
    peaks = [e["peak_bytes"] for e in rows if e.get("peak_bytes")]
    return {**rows[-1], "peak_bytes": min(peaks, default=None)} if rows else None


def served_rows(doc, **changes):
    """``served`` of every backend that was recorded on one workload."""
    names = dict.fromkeys(e["impl"] for e in _whole(results.select(doc, **{**SERVED, **changes}))) if doc else {}
    return [served(doc, name, **changes) for name in names]


def _whole(rows):
    return [e for e in rows if "ttft_ms" in e and not e.get("partial")]


def _short(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ours(entry, name):
    if entry is None:
        return None
    if name == "peak_gb":
        return entry["peak_bytes"] / 1e9 if entry.get("peak_bytes") else None
    return entry.get(name)


def _pair(old, new, unit):
    if old is None or new is None:
        return "not recorded yet"
    change = new / old if unit == "tokens/s" else old / new
    return f"{_short(old)} to {_short(new)} {unit} ({change:.2f} x)"


def results_table(doc=None):
    """The article's result table, DFlash 1 to DFlash 2, and ours, step 07 to step 08, as a Markdown table."""
    doc = doc or record("engine")
    old, new = served(doc, V1), served(doc, OURS)
    lines = ["| | the article: 2 x A100, SGLang | here: one GPU, `ladder.engine`, steps 07 and 08 |", "|:--|--:|--:|"]
    for name, (what, unit, first, second) in ARTICLE.items():
        lines.append(f"| {what} | {_pair(first, second, unit)} | {_pair(_ours(old, name), _ours(new, name), unit)} |")
    source = (
        results.caption(doc, [e for e in (old, new) if e]) if doc else f"recorded by `{RECORDS['engine']}` on a GPU"
    )
    lines.append(
        f"\n*8 requests, 4,096 tokens in, 512 out, DeepSeek-V2-Lite in bf16; better in brackets. Ours with random "
        f"weights, {source}.*"
    )
    return Markdown("\n".join(lines))


def backends_table(doc=None, **changes):
    """Every backend that was recorded on one workload, slowest token first, as a Markdown table."""
    doc = doc or record("engine")
    case = {**SERVED, **changes}
    rows = served_rows(doc, **changes)
    if not rows:
        return missing("engine", ", ".join(f"{k} {v}" for k, v in case.items()))
    lines = ["| backend | TTFT, ms | ITL, ms | ITL p99, ms | tokens/s | peak memory |", "|:--|--:|--:|--:|--:|--:|"]
    for e in sorted(rows, key=lambda e: -e.get("itl_ms", math.inf)):
        peak = plots.size(e["peak_bytes"]) if e["peak_bytes"] else "-"
        bold = "**" if e["impl"] == OURS else ""
        values = " | ".join(_short(e[n]) if n in e else "-" for n in ("ttft_ms", "itl_ms", "itl_p99_ms", "tok_s"))
        lines.append(f"| {bold}{implementation_title(e['impl'])}{bold} | {values} | {peak} |")
    lines.append(f"\n*{results.caption(doc, rows)}; random weights.{' ' + doc['note'] if 'note' in doc else ''}*")
    return Markdown("\n".join(lines))


def long_table(doc=None, least=32768):
    """Peak memory and first token of every backend on prompts of ``least`` tokens and more, as a Markdown table."""
    doc = doc or record("engine")
    rows = (
        [e for e in _whole(results.select(doc, model=SERVED["model"])) if e["case"]["input_len"] >= least]
        if doc
        else []
    )
    if not rows:
        return missing(
            "engine", f"prompts of {least:,} tokens, `--input-len {least} --output-len 16 --concurrency 1 --fit`"
        )
    lines = ["| tokens in, out, requests | backend | in steps of | TTFT, ms | peak memory |", "|:--|:--|--:|--:|--:|"]
    for e in sorted(rows, key=lambda e: (e["case"]["input_len"], e["case"]["concurrency"], e["impl"])):
        c, peak = e["case"], plots.size(e["peak_bytes"]) if e.get("peak_bytes") else "-"
        lines.append(
            f"| {c['input_len']:,}, {c['output_len']}, {c['concurrency']} | {implementation_title(e['impl'])} | "
            f"{e.get('chunk_tokens', c['input_len']):,} | {_short(e['ttft_ms'])} | {peak} |"
        )
    lines.append(f"\n*{results.caption(doc, rows)}; random weights.*")
    return Markdown("\n".join(lines))


def dense_table(doc=None):
    """Steps 07 and 08 where the gain should vanish, short prompts of a dense model, beside where it should not."""
    doc = doc or record("engine")
    dense = _whole(results.select(doc, model="mla-dense")) if doc else []
    lengths = sorted({(e["case"]["input_len"], e["case"]["output_len"], e["case"]["concurrency"]) for e in dense})
    lines = ["| model | tokens in, out, requests | TTFT, step 07 to 08 | ITL, step 07 to 08 |", "|:--|--:|--:|--:|"]
    cases = [("deepseek-v2-lite", (4096, 512, 8)), *(("mla-dense", n) for n in lengths)]
    for model, (ins, outs, many) in cases:
        pair = [served(doc, impl, model=model, input_len=ins, output_len=outs, concurrency=many) for impl in (V1, OURS)]
        if None not in pair:
            cells = " | ".join(_pair(pair[0].get(n), pair[1].get(n), "ms") for n in ("ttft_ms", "itl_ms"))
            lines.append(f"| {model} | {ins:,}, {outs:,}, {many} | {cells} |")
    if len(lines) == 2 or not dense:
        return missing("engine", "the dense control, `--model mla-dense --input-len 512`")
    notes = " ".join(e["note"] for e in dense if "note" in e)
    lines.append(
        f"\n*{results.caption(doc, dense)}; random weights. The dense model is V2-Lite with every layer's experts "
        f"replaced by one feed-forward block.{' ' + notes if notes else ''}*"
    )
    return Markdown("\n".join(lines))


def training_lengths(path=TRAINING):
    """{tokens of a training sequence: share (0 .. 1) of all tokens that tiny-moe was trained on}."""
    shares, before, curve = {}, 0, json.loads(Path(path).read_text())["curve"]
    for r in curve:
        shares[r["seq_len"]] = shares.get(r["seq_len"], 0) + (r["tokens"] - before) / curve[-1]["tokens"]
        before = r["tokens"]
    return shares


def latency_table(doc=None, fusion=None):
    """Where step 08 saves time between two tokens: what attention can
    explain, and what fused launches can, as a Markdown table."""
    doc, fusion = doc or record("engine"), fusion or record("step08_fusion")
    old, new = served(doc, V1), served(doc, OURS)
    config = find(SERVED["model"]).config
    context = SERVED["input_len"] + SERVED["output_len"]
    saved, sources = {}, []
    for op, layers in (("mla", config.num_layers), ("router", config.num_layers - config.num_dense)):
        pair = [
            r
            for impl in ("torch", OURS)
            for r in (results.select(fusion, impl, op=op, model="DeepSeek-V2-Lite", T=8) if fusion else [])
            if "ms" in r
        ]
        if len(pair) == 2:
            saved[op] = layers * (pair[0]["ms"]["median"] - pair[1]["ms"]["median"])
            sources += pair
    if old is None or new is None or len(saved) < 2:
        return missing("engine", "steps 07 and 08 on 8 requests of 4,096 tokens, or step08_fusion.json")
    share = models()["DeepSeek-V2-Lite"].share("decode", context, batch=SERVED["concurrency"])
    control = [served(doc, impl, model="mla-dense", input_len=512, output_len=128) for impl in (V1, OURS)]
    before, after = (e and e["itl_ms"] for e in control)
    kernels = record("step08_dflash2")
    alone = [
        r["ms"]["median"]
        for impl in (V1, OURS)
        for r in (
            results.select(kernels, impl, mode="mla_decode", B=1, Hq=config.num_heads, Sk=32768) if kernels else []
        )
        if "ms" in r
    ]
    lines = [
        "| of the time between two tokens | ms | x as fast |",
        "|:--|--:|--:|",
        f"| step 07, measured | {old['itl_ms']:.2f} | 1 |",
        f"| if attention, {100 * share:.0f} % of the bytes, took no time: Amdahl's limit | "
        f"{old['itl_ms'] * (1 - share):.2f} | {1 / (1 - share):.2f} |",
        f"| step 08, measured | {new['itl_ms']:.2f} | **{old['itl_ms'] / new['itl_ms']:.2f}** |",
        f"| *difference of the two measurements* | {old['itl_ms'] - new['itl_ms']:.2f} | |",
        f"| norm of the latent, rotary embedding and cache write in one launch, {config.num_layers} layers | "
        f"-{saved['mla']:.2f} | |",
        f"| residual sum, norm and router in one launch, {config.num_layers - config.num_dense} layers | "
        f"-{saved['router']:.2f} | |",
    ]
    if None not in control:
        lines.append(
            f"| control, 512 tokens of a dense model: from {before:.2f} to {after:.2f} ms | {after - before:.2f} | "
            f"{before / after:.2f} |"
        )
    said = (
        " Attention alone is not recorded for these eight sequences; for one sequence of 32,768 tokens it takes "
        f"{alone[0]:.3f} ms a layer in step 07 and {alone[1]:.3f} in step 08."
        if len(alone) == 2
        else ""
    )
    lines.append(
        f"\n*Steps: {SERVED['concurrency']} requests, up to {context:,} tokens, {results.caption(doc, [old, new])}. "
        "Rows with layers: step 08's fused kernels against PyTorch's chain of operators, 8 tokens, each timed alone in "
        f"a CUDA graph and multiplied by the layers, {results.caption(fusion, sources)}.{said}*"
    )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- quality of windows


def quality_readings(doc=None):
    """What the recorded windows say of sinks, and of windows that beat exact attention, as Markdown."""
    doc = doc or record("engine_quality")
    rows = [e for e in doc["rows"] if e["case"].get("task") == "quality"] if doc else []
    bits = {e["case"]["policy"]: e["bits_per_byte"] for e in rows}
    gains = []
    for policy, value in bits.items():
        found = re.fullmatch(r"sink (\d+) \+ window (\d+)", policy)
        plain = f"sliding {int(found[1]) + int(found[2])}" if found else None
        if plain in bits:
            gains.append(bits[plain] - value)
    if "exact" not in bits or not gains:
        return missing("engine_quality")
    better = [f"{policy} ({value - bits['exact']:+.4f})" for policy, value in bits.items() if value < bits["exact"]]
    lengths = training_lengths()
    said = ", ".join(f"{100 * share:.0f} % at {n:,} tokens" for n, share in lengths.items())
    lines = [
        f"- Sinks: 4 sinks in place of 4 keys of the window change the result by {-max(gains):+.4f} to "
        f"{-min(gains):+.4f} bits per byte.",
        f"- Better than exact attention: {', '.join(better) or 'none'}.",
        f"- Tokens that the model was trained on: {said}.",
    ]
    return Markdown("\n".join(lines) + f"\n\n*{results.caption(doc)}; training: `{Path(TRAINING).name}`.*")


def quality_table(doc=None):
    """Recorded bits per byte of held-out text against window policy, as a Markdown table."""
    doc = doc or record("engine_quality")
    rows = [e for e in doc["rows"] if e["case"].get("task") == "quality"] if doc else []
    exact = next((e for e in rows if e["case"]["policy"] == "exact"), None)
    if exact is None:
        return missing("engine_quality")
    lines = ["| policy | bits per byte | above exact | pairs of query and key visible |", "|:--|--:|--:|--:|"]
    for e in rows:
        lines.append(
            f"| {e['case']['policy']} | {e['bits_per_byte']:.4f} | {e['bits_per_byte'] - exact['bits_per_byte']:+.4f} "
            f"| {100 * e['visible_pairs']:.0f} % |"
        )
    c = exact["case"]
    lines.append(
        f"\n*tiny-moe, {c['sequences']} held-out sequences of {c['context']:,} tokens, second halves, {c['dtype']}; "
        f"{results.caption(doc)}.*"
    )
    return Markdown("\n".join(lines))


def quality_here(tokens=1024, window=64):
    """{policy: bits per byte} of tiny-moe on a source file of this
    repository, computed here in float32 by step 08's CPU path."""
    from ladder.engine.quality import bits_per_byte
    from ladder.step08_dflash2 import RangeWindows

    # it does not change any more
    text = (Path(__file__).resolve().parents[2] / "step07_dflash1" / "kernel.py").read_bytes()[: tokens + 1]
    rows = torch.tensor([list(text)])
    policies = {
        "exact": None, f"sliding {window}": RangeWindows.sliding(window),
        f"sink 4 + window {window - 4}": RangeWindows.sink_window(4, window - 4),
        f"sliding {4 * window}": RangeWindows.sliding(4 * window),
        f"last quarter exact, before it {window}": RangeWindows.prefix_local(-(tokens // 4), 4, window - 4),
    }  # fmt: skip
    model = tiny_moe.load()
    return {name: bits_per_byte(model, rows, policy) for name, policy in policies.items()}


def quality_picture(found):
    """Bars of ``quality_here``."""
    colours = [plots.INK if name == "exact" else plots.SKY for name in found]
    entries = [(name, value, colour) for (name, value), colour in zip(found.items(), colours)]
    figure = plots.bars(
        entries, unit="bits per byte, second half of the text", highlight="exact",
        note="Computed here: tiny-moe reads the first lines of a source file of this repository. This is little text: "
            "compare the order of the bars and not their third digit.",
    )  # fmt: skip
    return plots.Picture(figure, f"bits per byte under {len(found)} window policies")
