"""What chapters 06 and 07 do the same way: recorded decode, parity on a paged cache, experts, what each rung accepts.

As in ``ladder.chapters.ch01_05_rungs.tables``, text that goes into an
output holds booleans, shapes and recorded numbers only.
"""


import torch
from IPython.display import Markdown

from ladder.chapters import plots
from ladder.lab import cells, results
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.names import title as implementation_title
from ladder.lab.problem import AttentionProblem, reference
from ladder.rungs import RUNGS, find

RECORD = "step07_dflash1"
# Head layouts that people serve, from the published configurations: layers, KV heads, and numbers a token keeps a
# layer.
LAYOUTS = {
    "MHA: 32 layers, 32 KV heads (Llama-2-7B)": (32, 2 * 32 * 128),
    "GQA: 32 layers, 8 KV heads (Llama-3-8B)": (32, 2 * 8 * 128),
    "GQA: 48 layers, 4 KV heads (Qwen3-30B-A3B)": (48, 2 * 4 * 128),
    "MLA: 27 layers, 512 + 64 (DeepSeek-V2-Lite)": (27, 576),
    "MLA: 61 layers, 512 + 64 (DeepSeek-V3)": (61, 576),
}


def numbers():
    """The recorded results of rungs 06 and 07."""
    return results.load(RECORD)


# ---------------------------------------------------------------- recorded decode


def decode_problems():
    """{label: DecodeProblem} of the table of decode cells: 32 query
    and 8 KV heads of 128, one new token, pages of 64."""
    return {label(problem): problem for problem in cells.decode_problems()}


def mla_problems():
    """{label: DecodeProblem} of the recorded absorbed MLA cells."""
    return {f"{label(problem)}, {problem.Hq} heads": problem for problem in cells.mla_problems()}


def label(problem):
    """How tables call a batch: "64 x 4k"."""
    return f"{problem.B} x {plots.tokens(problem.context)}"


def row(doc, impl, problem):
    """The recorded row of an implementation on a DecodeProblem or AttentionProblem, or None."""
    found = [entry for entry in results.select(doc, impl, **problem.case()) if "ms" in entry]
    return found[0] if found else None


def one(doc, impl, problem):
    """The recorded row of an implementation on a problem; results.NotRecorded where there is none."""
    return results.wanted(row(doc, impl, problem), doc, f"{impl} on {problem.label()}")


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
    lines = [
        f"| batch x context | K and V | {heads} | best peer | its us |",
        "|:--|--:|" + "--:|--:|--:|" * len(rungs) + ":--|--:|",
    ]
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
    note = (
        f"{results.caption(doc)}; medians of CUDA-graph launches with a cold L2. The rungs read pages; the peers read "
        f"the same "
        "numbers from contiguous memory. The read limit is what a plain reading kernel reached in the same run; a "
        "kernel may "
        "exceed it by a per cent or two."
    )
    if any("does not support paged KV" in failure["error"] for failure in doc.get("failures", ())):
        note += " FlashAttention-3 is missing: the build at hand does not read pages."
    lines.append(f"\n*{note}*")
    return Markdown("\n".join(lines))


def speed_bars(doc, upto, name, note="", title=""):
    """Recorded microseconds of rungs 6 to ``upto`` and the peers on one decode problem, as a Picture."""
    problem = decode_problems()[name]
    entries = []
    for rung in RUNGS[5:upto]:
        if (entry := row(doc, rung.name, problem)) is not None:
            entries.append(
                (f"{rung.number:02d} {rung.title}", 1e3 * entry["ms"]["median"], plots.RUNG_COLOURS[rung.number])
            )
    highlight = results.wanted(entries, doc, f"decode of {name}")[-1][0]
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
        rows.append(
            attention(inputs.q[b : b + 1].transpose(1, 2), k, v, causal=True, scale=problem.scale).transpose(1, 2)
        )
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
            f"| {name}, {problem.dtype} | `{tuple(inputs.q.shape)}` | `{tuple(inputs.k_cache.shape)}` | {word} | "
            f"{agrees} |"
        )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- cache arithmetic


def cache_table(context=131072, memory=100e9):
    """Bytes of cache of published head layouts, and how many sequences of ``context`` tokens ``memory`` bytes hold."""
    lines = [
        f"| attention | a token, a layer | a token | {plots.tokens(context)} tokens | sequences in "
        f"{plots.size(memory)} |",
        "|:--|--:|--:|--:|--:|",
    ]
    for name, (layers, width) in LAYOUTS.items():
        token = 2 * width * layers
        lines.append(
            f"| {name} | {2 * width:,} B | {plots.size(token)} | {plots.size(token * context)} | "
            f"{memory / (token * context):.1f} |"
        )
    lines.append("\n*bf16, 2 bytes a number; arithmetic, nothing measured.*")
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- what a rung accepts

HEADS = (
    ("G = 1", 4, 4, 64, 64), ("G = 2", 4, 2, 64, 64), ("G = 3", 6, 2, 64, 64), ("G = 7", 7, 1, 64, 64),
    ("G = 16", 16, 1, 64, 64), ("6 heads on 4", 6, 4, 64, 64), ("head 40", 2, 2, 40, 40), ("head 80", 2, 2, 80, 80),
    ("head 256", 2, 2, 256, 256), ("head 320", 2, 2, 320, 320), ("192 / 128: MLA prefill", 2, 2, 192, 128),
    ("576 / 512: MLA decode", 4, 1, 576, 512),
)  # fmt: skip


def _calls():
    """{column: function (q, k, v) -> out} of everything that a user may call, on contiguous tensors of one sequence."""
    from ladder import step06_paged, step07_dflash1

    def paged(rung, q, k, v):
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([k.shape[2]], dtype=torch.int32)
        return rung.paged_decode(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), table, lens).transpose(1, 2)

    def latent(q, k, v):
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([k.shape[2]], dtype=torch.int32)
        out = step07_dflash1.mla_decode(
            q.transpose(1, 2), k[:, 0], table, lens, scale=q.shape[3] ** -0.5, head_dim_v=v.shape[3]
        )
        return out.transpose(1, 2)

    calls = {f"{rung.number:02d}": rung.attention for rung in RUNGS[:7]}
    calls["06 decode"] = lambda q, k, v: paged(step06_paged, q, k, v)
    calls["07 decode"] = lambda q, k, v: paged(step07_dflash1, q, k, v)
    calls["07 MLA decode"] = latent
    return calls


def try_heads(attention, num_heads, num_kv_heads, head_dim, head_dim_v, latent=False):
    """Call ``attention`` on 3 queries and 5 keys: None when its answer
    is the float64 oracle's, else what a user sees."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, num_heads, 3, head_dim, generator=generator)
    k = torch.randn(1, num_kv_heads, 5, head_dim, generator=generator)
    v = k[..., :head_dim_v] if latent else torch.randn(1, num_kv_heads, 5, head_dim_v, generator=generator)
    try:
        out = attention(q, k, v)
    except Exception as error:  # what a user would see is the point
        return f"{type(error).__name__}: {error}"
    wants = [reference(q, k, v, causal=causal)[0] for causal in (False, True)]  # decode is causal, prefill here is not
    right = out.shape == wants[0].shape and any(torch.allclose(out.double(), want, atol=1e-4) for want in wants)
    return None if right else "a wrong answer"


def accepts():
    """Which head layouts each rung takes: every cell is a call made now, checked where it returns; a Markdown table.

    The letters name the errors, as a user sees them; the same error with other numbers keeps its letter.
    """
    import re

    calls, letters = _calls(), {}
    lines = [f"| heads | {' | '.join(calls)} |", "|:--|" + ":-:|" * len(calls)]
    for name, num_heads, num_kv_heads, head_dim, head_dim_v in HEADS:
        cells = []
        for column, call in calls.items():
            latent = column.endswith("MLA decode")
            if latent and not (num_kv_heads == 1 and head_dim > head_dim_v):
                cells.append("")  # a latent cache has one head, and its values are part of its keys
                continue
            error = try_heads(call, num_heads, num_kv_heads, head_dim, head_dim_v, latent)
            if error is None:
                cells.append("yes")
                continue
            message = re.sub(r"step0\d_\w+: ", "", error)
            kind = re.sub(r"\d+", "N", message)
            letters.setdefault(kind, ("abcdefgh"[len(letters)], message))
            cells.append(f"**{letters[kind][0]}**")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [""] + [f"- **{letter}** `{message}`" for letter, message in letters.values()]
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- recorded: prefill, MLA, chunks, memory, promises


def prefill(doc):
    """Recorded prefill of steps 05 and 07 and the peers, in TFLOP/s, as a Markdown table."""
    by_case = {}
    for entry in results.select(doc, mode="prefill"):
        if "ms" in entry and not entry["impl"].startswith("sweep"):
            by_case.setdefault(tuple(entry["case"].items()), {})[entry["impl"]] = entry
    peers = list(dict.fromkeys(i for entries in by_case.values() for i in entries if not i.startswith("step")))
    heads = " | ".join(map(implementation_title, peers))
    lines = [f"| problem | 05 | **07** | 07 over 05 | {heads} |", "|:--|--:|--:|--:|" + "--:|" * len(peers)]
    for case, entries in by_case.items():
        problem = AttentionProblem(**{k: v for k, v in case if k != "mode"})
        speeds = {impl: entry["tflops"] for impl, entry in entries.items()}
        old, new = speeds.get("step05_fused"), speeds.get(RECORD)
        cells = [f"{speeds[p]:.0f}" if p in speeds else "-" for p in peers]
        ratio = f"{new / old:.2f}" if old and new else "-"
        shape = f"{problem.B} x {plots.tokens(problem.Sq)}, {problem.Hq}/{problem.Hkv} heads of {problem.D}"
        shape += (f"/{problem.Dv}" if problem.Dv != problem.D else "") + (", causal" if problem.causal else ", dense")
        lines.append(f"| {shape} | {old or 0:.0f} | **{new or 0:.0f}** | {ratio} | {' | '.join(cells)} |")
    lines.append(f"\n*TFLOP/s, bf16, {results.caption(doc)}.*")
    return Markdown("\n".join(lines))


def prefill_ratios(doc):
    """[speed of step 07 over step 05] of every recorded prefill cell that both computed."""
    pairs = {}
    for entry in results.select(doc, mode="prefill"):
        if "ms" in entry and entry["impl"] in ("step05_fused", RECORD):
            pairs.setdefault(tuple(entry["case"].items()), {})[entry["impl"]] = entry["ms"]["median"]
    ratios = [p["step05_fused"] / p[RECORD] for p in pairs.values() if len(p) == 2]
    return results.wanted(ratios, doc, "prefill by steps 05 and 07")


def mla(doc):
    """Recorded absorbed MLA decode, as a Markdown table: rate of the latent cache, and TFLOP/s."""
    limits = doc["limits"]
    lines = [
        "| batch x context, heads | latent cache | FLOPs a byte | us | TB/s | TFLOP/s | of the binding limit | best "
        "peer, us |",
        "|:--|" + "--:|" * 7,
    ]
    for name, problem in mla_problems().items():
        entry = row(doc, RECORD, problem)
        if entry is None:
            continue
        intensity = problem.flops / problem.kv_bytes
        roof = min(limits["matmul_tflops"], intensity * limits["read_tbs"])
        speed = problem.flops / entry["ms"]["median"] / 1e9
        peers = peers_of(doc, problem)
        best = min(peers.values(), key=lambda e: e["ms"]["median"]) if peers else None
        peer = f"{implementation_title(best['impl'])}, {us(best)}" if best else "-"
        lines.append(
            f"| {name} | {plots.size(problem.kv_bytes)} | {intensity:.0f} | {us(entry)} | {entry['tbs']:.2f} | "
            f"{speed:.0f} "
            f"| {100 * speed / roof:.0f} % | {peer} |"
        )
    lines.append(f"\n*{results.caption(doc)}; medians of CUDA-graph launches with a cold L2.*")
    return Markdown("\n".join(lines))


def chunked(doc):
    """Recorded chunked prefill, from pages and from contiguous memory, as a Markdown table."""
    lines = ["| 8 sequences, 512 new tokens each | from pages, ms | contiguous, ms | pages cost |", "|:--|--:|--:|--:|"]
    for entry in results.select(doc, RECORD, mode="chunked"):
        other = results.one(doc, "step07_contiguous", **entry["case"])
        a, b = entry["ms"]["median"], other["ms"]["median"]
        lines.append(
            f"| behind {plots.tokens(entry['case']['Sk'])} in all | {a:.3g} | {b:.3g} | {100 * (a / b - 1):+.0f} % |"
        )
    lines.append(f"\n*{results.caption(doc)}.*")
    return Markdown("\n".join(lines))


def memory_bars(doc):
    """Recorded peak memory of a dense 32k prefill, every rung, as a Picture."""
    entries = [e for e in results.select(doc, mode="prefill") if "peak_bytes" in e]
    results.wanted(entries, doc, "peak memory of a prefill")
    bars = []
    for rung in RUNGS[:7]:
        for entry in entries:
            if entry["impl"] == rung.name:
                bars.append(
                    (f"{rung.number:02d} {rung.title}", entry["peak_bytes"] / 1e9, plots.RUNG_COLOURS[rung.number])
                )
    case = entries[0]["case"]
    figure = plots.bars(
        bars, unit="GB on top of the inputs", log=True, title="Peak memory of a 32k prefill", highlight=bars[-1][0],
        note=f"{case['Hq']} heads of {case['D']}, {plots.tokens(case['Sq'])} tokens, dense, bf16; "
            f"{results.caption(doc)}. Look at the "
        "first bar: the S x S matrix. From 05 on only the output is left.",
    )  # fmt: skip
    return plots.Picture(figure, f"bars: peak memory of {len(bars)} rungs, prefill of 32k tokens")


def promises(doc):
    """What the recorded run checked and a table of speeds does not show, as a Markdown list."""
    lines = [f"- {'kept' if e['kept'] else '**BROKEN**'}: {e['promise']}" for e in doc["rows"] if "kept" in e]
    return Markdown("\n".join([*lines, f"\n*{results.caption(doc)}.*"]))


# ---------------------------------------------------------------- recorded: experts


def groups(doc):
    """Recorded expert product, compact tiles against experts x capacity, on real routing, as a Markdown table."""
    lines = [
        "| routing | real rows | padded rows | fewer rows | padded, us | compact, us | faster | gathering too, us | "
        "cuBLAS, padded, us | sort, us |",
        "|:--|" + "--:|" * 9,
    ]
    for entry in results.select(doc, "compact", mode="groups"):
        case, times = entry["case"], {}
        for name in ("compact", "padded", "compact_gather", "bmm_padded", "sort"):
            times[name] = results.one(doc, name, **case)["ms"]["median"]
        lines.append(
            f"| {case['task']}, layer {case['layer']} | {case['rows']:,} | {case['padded_rows']:,} | "
            f"{case['padded_rows'] / case['rows']:.2f} x "
            f"| {1e3 * times['padded']:,.0f} | {1e3 * times['compact']:,.0f} | "
            f"**{times['padded'] / times['compact']:.2f} x** "
            f"| {1e3 * times['compact_gather']:,.0f} | {1e3 * times['bmm_padded']:,.0f} | {1e3 * times['sort']:.0f} |"
        )
    lines.append(
        f"\n*Router choices of DeepSeek-V2-Lite on two kinds of text: 64 experts, top_k 6, a product of 2048 x 1408 an "
        f"expert, bf16; {results.caption(doc)}.*"
    )
    return Markdown("\n".join(lines))


def permute_ratio(doc, top_k):
    """Recorded time of attention and a separate permute pass, over attention that stores in expert order."""
    separate = results.one(doc, "attention_then_permute", mode="permute", top_k=top_k)
    direct = results.one(doc, "attention_in_expert_order", mode="permute", top_k=top_k)
    return separate["ms"]["median"] / direct["ms"]["median"]


def permute(doc):
    """Recorded ways to bring attention's output into expert order, as a Markdown table."""
    names = ("attention", "attention_then_permute", "attention_in_expert_order")
    lines = [
        "| top_k | attention alone, us | then a permute pass, us | stored in expert order, us | direct is |",
        "|--:|--:|--:|--:|:--|",
    ]
    for top_k in (1, 6):
        times = [results.one(doc, name, mode="permute", top_k=top_k)["ms"]["median"] for name in names]
        ratio = times[1] / times[2]
        verdict = f"{ratio:.2f} x faster" if ratio >= 1 else f"**{1 / ratio:.2f} x slower**"
        lines.append(f"| {top_k} | {' | '.join(f'{1e3 * t:.0f}' for t in times)} | {verdict} |")
    case = results.one(doc, names[0], mode="permute", top_k=1)["case"]
    lines.append(
        f"\n*{case['tokens']:,} tokens in {case['sequences']} sequences, {case['Hq']} heads of {case['D']}, 64 "
        f"experts, bf16; {results.caption(doc)}.*"
    )
    return Markdown("\n".join(lines))


# ---------------------------------------------------------------- a picture


@plots.styled
def packed_rows(group, rows=16):
    """Rows of decode tiles at one new token: a program for each query
    head (step 06), and one for the group (step 07)."""
    from matplotlib.patches import Rectangle

    figure, all_axes = plots.canvas(3.0, columns=2, width_ratios=[group, 1.6])
    for axes, count, live, title in (
        (all_axes[0], group, 1, f"Step 06: {group} programs, each loads the same K and V"),
        (all_axes[1], 1, group, "Step 07: one program"),
    ):
        for tile in range(count):
            for r in range(rows):
                style = dict(facecolor=plots.SKY) if r < live else dict(facecolor=plots.PAPER, hatch="....")
                axes.add_patch(Rectangle((tile * 1.3, r), 1, 0.9, edgecolor=plots.GREY, lw=0.6, **style))
                if r < live:
                    axes.text(tile * 1.3 + 0.5, r + 0.45, f"head {tile + r}", ha="center", va="center", fontsize=8)
        axes.set(xlim=(-0.1, max(count * 1.3, 1.6)), ylim=(rows, -0.1), xticks=[], yticks=[])
        axes.set_ylabel(f"{rows} rows of a tile" if count > 1 else "")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(title, fontsize=10)
    note = "Blue: rows with a query. Dotted: rows that the tensor cores multiply for nothing. Look at how often K and V are loaded."  # noqa: E501
    return plots.caption(figure, note)
