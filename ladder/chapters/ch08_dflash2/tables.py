"""What chapter 08 reads: recorded prefill, decode, windows, variants and fusion of step 08, and what to say where a
record is missing.

Four files in ``notebooks/results``: ``step08_dflash2`` (``ladder.bench.step08``), ``step08_variants`` (the Hopper
kernel with its ideas switched on in turn), ``step08_fusion`` (``ladder.bench.fusion``). A missing file is said in words
in the place of its table, so that the chapter runs before it is recorded.

Rows of ``step08_variants``, schema 1 of ``lab.results``: ``case`` of a prefill, ``impl`` the variant ("hopper_base",
"+overlap", "+pingpong", ...) in the order in which they were switched on, and, where known, ``over`` (the impl it
builds on; the row before it by default), ``predicted`` (the factor over that), ``why`` (one sentence), ``kept`` (False
when the kernel went without it). Peers measured in the same run have their usual names.
"""


import torch
from IPython.display import Markdown

from ladder.chapters import plots
from ladder.lab import results
from ladder.lab.cells import OURS, V1, by_cell, faster
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem
from ladder.lab.names import title as implementation_title
from ladder.lab.parity import Oracle
from ladder.lab.problem import MINILM, AttentionProblem
from ladder.lab.window_oracle import WindowOracle
from ladder.rungs import find

from . import plots as plots_dflash2
from . import simulate as schedules

RECORDS = {
    OURS: "python -m ladder.bench step08 --json notebooks/results/step08_dflash2.json",
    "step08_variants": "python -m ladder.bench variants --json notebooks/results/step08_variants.json",
    "step08_fusion": "python -m ladder.bench fusion --json notebooks/results/step08_fusion.json",
}


def numbers():
    """Recorded results of step 08, or None where there are none yet."""
    return record(OURS)


def record(name):
    """A recorded file by name, or None where it is not recorded yet."""
    return results.load(name) if (results.FOLDER / f"{name}.json").exists() else None


def missing(name):
    """What stands in a table's place while its file is missing."""
    how = RECORDS[name]
    text = (
        f"`{how}` on a Hopper GPU records it"
        if how.startswith("python")
        else f"{how} will stand in `notebooks/results/{name}.json`"
    )
    return Markdown(f"*Not recorded yet: {text}. The cells around this one do not need it.*")


def rows_by_cell(doc, mode):
    """[{implementation: row}] of the timed rows of one mode."""
    return by_cell(doc["rows"], mode) if doc else []


# ---------------------------------------------------------------- where step 07 stands


HEADLINE = [
    AttentionProblem(B=max(1, 16384 // s), Sq=s, Sk=s, Hq=h, Hkv=h, D=d, Dv=dv, causal=True, dtype="bfloat16")
    for d, dv, h in ((128, 128, 16), (64, 64, 32), (192, 128, 16)) for s in (4096, 16384, 32768, 131072)
]  # fmt: skip


def step_07_rows(v1, doc=None):
    """[(problem, step 07's row, FlashAttention-3's row or None)] of causal prefill, from step 08's run where it has
    them."""
    found = []
    for problem in HEADLINE:
        for source in (doc, v1):
            entries = {e["impl"]: e for e in results.select(source, **problem.case()) if "ms" in e} if source else {}
            if V1 in entries:
                found.append((problem, entries[V1], entries.get("fa3"), source))
                break
    return found


def two_records(seqlen=16384):
    """Step 08 over step 07 on one causal prompt, from both records that measured the two in one run, as Markdown."""
    case = dict(mode="prefill", B=1, Hq=16, Hkv=16, Sq=seqlen, Sk=seqlen, D=128, Dv=128, causal=True)
    lines = ["| causal, 16k, 16 heads of 128 | step 07 | step 08 | gain |", "|:--|--:|--:|--:|"]
    for name in ("ladder", OURS):
        doc = results.load(name)
        old, new = (results.one(doc, impl, **case) for impl in (V1, OURS))
        lines.append(
            f"| `{name}.json`, {results.caption(doc, [old, new])} | {old['tflops']:.0f} TFLOP/s | "
            f"{new['tflops']:.0f} TFLOP/s | **{old['ms']['median'] / new['ms']['median']:.2f} x** |"
        )
    lines.append(
        "\n*Both kernels ran side by side in each record. The card and what it had computed before were different, and "
        "with them its clock: differences below a tenth between two records say nothing about a kernel.*"
    )
    return Markdown("\n".join(lines))


def in_turn(v1, doc=None):
    """Step 07's recorded speed beside what "products and softmax take turns" predicts, as a Markdown table."""
    lines = [
        "| causal prefill | products : softmax, clocks of a step | in turn: share of the product limit | predicted "
        "TFLOP/s | **step 07** | FlashAttention-3 |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    used = {}
    for problem, ours, peer, source in step_07_rows(v1, doc):
        clocks = schedules.clocks(problem.D, problem.Dv)
        share = schedules.overlap_prediction(problem.D, problem.Dv, schedules.PIPELINES[0])
        predicted = share * source["limits"]["matmul_tflops"]
        other = f"{peer['tflops']:.0f}" if peer else "-"
        lines.append(
            f"| {_short(problem)} | {clocks.products:,.0f} : {clocks.softmax:,.0f} | {100 * share:.0f} % | "
            f"{predicted:.0f} | **{ours['tflops']:.0f}** | {other} |"
        )
        used[results.caption(source)] = source
    lines.append(
        f"\n*bf16; {'; '.join(used)}. Predicted from two published rates, {schedules.MMA_FLOPS_PER_CLOCK:,} FLOPs and "
        f"{schedules.EXPS_PER_CLOCK} exponentials a clock and processor, and the measured product limit.*"
    )
    return Markdown("\n".join(lines))


def _short(problem):
    heads = f"{problem.Hq} heads" if problem.Hq == problem.Hkv else f"{problem.Hq}/{problem.Hkv} heads"
    size = f"{problem.D}" if problem.D == problem.Dv else f"{problem.D}/{problem.Dv}"
    batch = f"{problem.B} x " if problem.B > 1 else ""
    return f"{batch}{plots.tokens(problem.Sq)}, {heads} of {size}"


# ---------------------------------------------------------------- parity


def parity(number=8):
    """Check step 08 on the CPU against the float64 oracle and step 07; a Markdown table of verdicts.

    Outputs are NaN beforehand, and so is every dead slot of the caches.
    """
    from ladder import step07_dflash1, step08_dflash2

    windows = step08_dflash2.RangeWindows
    lines = [f"| step {number:02d} | shapes: q, k | float64 oracle | {find(7).name} |", "|:--|:--|:--|:--|"]
    minilm = MINILM.replace(B=1, Sq=160, Sk=160, causal=True)
    noise = AttentionProblem(Hq=4, Hkv=4, Sq=96, Sk=96, D=32, Dv=32, causal=True)
    prefill = [
        ("MiniLM, real input, causal", minilm, {}),
        ("noise, Sq > Sk, causal", noise.replace(Sk=40), {}),
        ("group of 6, dense", noise.replace(Hq=6, Hkv=1, causal=False, dtype="float32"), {}),
        ("MLA prefill heads, 192 / 128", noise.replace(Hq=1, Hkv=1, Sq=48, Sk=48, D=192, Dv=128), {}),
        ("MiniLM, sink 4 + window 32", minilm, dict(windows=windows.sink_window(4, 32), ranges=[(0, None, 4, 32)])),
        (
            "MiniLM, local prefix, full tail of 16",
            minilm,
            dict(windows=windows.prefix_local(-16, 4, 32), ranges=[(0, -16, 4, 32)]),
        ),
        ("attention sinks: a logit without a value", noise, dict(sinks=torch.tensor([1.0, -2.0, 0.0, 3.0]))),
    ]
    for name, problem, options in prefill:
        q, k, v = problem.make()
        ranges, sinks = options.pop("ranges", None), options.get("sinks")
        oracle = WindowOracle(q, k, v, ranges) if ranges else Oracle(q, k, v, causal=problem.causal)
        if sinks is not None:  # one more term exp(sink) in the denominator
            oracle.out = oracle.out * torch.sigmoid(oracle.lse - sinks[None, :, None])[..., None]
        out = torch.full((*q.shape[:3], problem.Dv), float("nan"), dtype=q.dtype)
        step08_dflash2.dflash2_attention(q, k, v, causal=problem.causal, out=out, **options)
        if options:
            agrees = "cannot: arrives with this rung"
        else:
            agrees = _word(oracle.agree(out, step07_dflash1.attention(q, k, v, causal=problem.causal)))
        lines.append(
            f"| {name}, {problem.dtype} | `{tuple(q.shape)} {tuple(k.shape)}` | {_word(oracle.check(out))} | {agrees} |"
        )
    for name, problem in {
        "decode, ragged": DecodeProblem(
            B=3, Hq=6, Hkv=2, D=32, Dv=32, lengths=(1, 17, 70), page_size=16, dtype="float16"
        ),  # fmt: skip
        "decode, 2 new tokens": DecodeProblem(
            B=1, Hq=4, Hkv=2, D=32, Dv=32, context=40, q_len=2, page_size=16, dtype="float32"
        ),
        "MLA decode, absorbed": DecodeProblem(
            B=1, Hq=4, Hkv=1, D=576, Dv=512, latent=True, context=40, page_size=16, scale=192**-0.5, dtype="float16"
        ),
    }.items():
        inputs = problem.make()
        oracle = DecodeOracle(inputs, scale=problem.scale, most_sequences=99)
        out = torch.full((*inputs.q.shape[:3], problem.Dv), float("nan"), dtype=inputs.q.dtype)
        q, k_cache, v_cache, table, lens = inputs
        if problem.latent:
            options = dict(scale=problem.scale, head_dim_v=problem.Dv)
            step08_dflash2.dflash2_mla_decode(q, k_cache[:, :, 0], table, lens, out=out, **options)
            other = step07_dflash1.mla_decode(q, k_cache[:, :, 0], table, lens, **options)
        else:
            step08_dflash2.dflash2_decode(q, k_cache, v_cache, table, lens, out=out)
            other = step07_dflash1.paged_decode(q, k_cache, v_cache, table, lens)
        error = float((out.double() - other.double()).abs().max())
        agrees = "within budget" if error <= 2 * oracle.budget else f"**FAILS**: {error:.2g}"
        lines.append(
            f"| {name}, {problem.dtype} | `{tuple(q.shape)} {tuple(k_cache.shape)}` | {_word(oracle.check(out))} | "
            f"{agrees} |"
        )
    return Markdown("\n".join(lines))


def _word(verdict):
    return "within budget" if verdict else f"**FAILS**: {verdict.reason}"


# ---------------------------------------------------------------- the variants


# What arithmetic alone says of a variant, as a factor over the one it builds on, for rows that do not say it
# themselves.
def predicted_gain(impl, case):
    """The factor that the models of ``simulate`` predict for a variant on a prefill case; None where they say
    nothing."""
    one, two, ahead = (schedules.overlap_prediction(case["D"], case["Dv"], kind) for kind in schedules.PIPELINES)
    gains = {"hopper_base": two / one, "+overlap": ahead / two, "+pingpong": 1.0}
    if impl in gains:
        return gains[impl]
    if impl in ("+persistent", "+heaviest_first"):
        tiles = schedules.tiles_of(
            [case["Sq"]] * case["B"], [case["Sk"]] * case["B"], case["Hq"], causal=case["causal"]
        )
        orders, ways = list(schedules.ORDERS), list(schedules.ASSIGNMENTS)
        before = schedules.makespan(schedules.simulate(tiles, orders[1], ways[0]))
        after = schedules.simulate(tiles, orders[2], ways[3] if impl == "+persistent" else ways[0])
        return before / schedules.makespan(after)
    return None


def variant_chains(doc):
    """[(case, [(row, the row it builds on or None, predicted factor or None)], {peer: row})] of a variants document."""
    cases = {}
    for entry in doc["rows"]:
        if "ms" in entry:
            cases.setdefault(tuple(sorted((k, str(v)) for k, v in entry["case"].items())), []).append(entry)
    chains = []
    for entries in cases.values():
        known = {entry["impl"]: entry for entry in entries}
        chain, last = [], known.get(V1)
        for entry in entries:
            if not entry["impl"].startswith(("hopper", "+")):
                continue
            before = known.get(entry["over"]) if "over" in entry else last
            predicted = entry.get("predicted", predicted_gain(entry["impl"], entry["case"])) if before else None
            chain.append((entry, before, predicted))
            last = last if entry.get("kept") is False else entry  # what was not kept is not built upon
        peers = {name: entry for name, entry in known.items() if not name.startswith(("hopper", "+", "step"))}
        if chain:
            chains.append((entries[0]["case"], chain, peers))
    return chains


def variants(doc=None):
    """Each idea of the Hopper kernel switched on in turn: predicted and measured gain, as a Markdown table."""
    doc = doc or record("step08_variants")
    if doc is None:
        return missing("step08_variants")
    lines = [
        "| problem | switched on | TFLOP/s | predicted gain | measured gain | of FlashAttention-3 | |",
        "|:--|:--|--:|--:|--:|--:|:--|",
    ]
    for case, chain, peers in variant_chains(doc):
        name = _short(_problem(case)) + (", causal" if case["causal"] else ", dense")
        for entry, before, predicted in chain:
            gain = before["ms"]["median"] / entry["ms"]["median"] if before else None
            peer = f"{peers['fa3']['ms']['median'] / entry['ms']['median']:.2f}" if "fa3" in peers else "-"
            verdict = (
                "**wrong answer**" if entry.get("ok") is False else "not kept" if entry.get("kept") is False else ""
            )
            why = ": ".join(filter(None, (verdict, entry.get("why", ""))))
            lines.append(
                f"| {name} | `{entry['impl']}` | {entry['tflops']:.0f} | {_factor(predicted)} | {_factor(gain)} | "
                f"{peer} | {why} |"
            )
            name = ""
    lines.append(
        f"\n*Gains over the variant above that was kept, the first over step 07 where it was measured; bf16, "
        f"{results.caption(doc)}. Predicted: by the overlap and schedule models of this chapter unless the row says "
        f"why.*"
    )
    return Markdown("\n".join(lines))


def variants_picture(doc=None, case=None):
    """Predicted and measured gains of one problem of the variants (the one with most rows), as a Picture."""
    doc = doc or record("step08_variants")
    if doc is None:
        return missing("step08_variants")
    chains = [chain for chain in variant_chains(doc) if case is None or chain[0] == case]
    results.wanted(chains, doc, "any variant of the kernel")
    chosen, chain, _ = max(chains, key=lambda c: (sum(before is not None for _, before, _ in c[1]), c[0]["Sq"]))
    entries = [
        (e["impl"], predicted, before["ms"]["median"] / e["ms"]["median"]) for e, before, predicted in chain if before
    ]
    if not entries:
        return Markdown("*The record holds a single variant, and nothing to compare it with.*")
    name = _short(_problem(chosen)) + (", causal" if chosen["causal"] else ", dense")
    figure = plots_dflash2.predicted_and_measured(
        entries, unit="x as fast as the variant it builds on", title=f"One idea at a time: {name}",
        note=f"Look at diamonds far from their dots: there the model of the machine was wrong. Medians, "
            f"{results.caption(doc)}.",
    )  # fmt: skip
    return plots.Picture(figure, f"predicted and measured gains of {len(entries)} variants, {name}")


def _factor(value):
    return "-" if value is None else f"{value:.2f} x"


def _problem(case):
    return AttentionProblem(**{k: v for k, v in case.items() if k in AttentionProblem.__dataclass_fields__})


# ---------------------------------------------------------------- fusion


def fusion(doc=None):
    """What the fused calls save in launches and bytes beside PyTorch's chains, and what that gave, as a Markdown
    table."""
    doc = doc or record("step08_fusion")
    if doc is None:
        return missing("step08_fusion")
    lines = [
        "| call | model | new tokens | launches | bytes | bytes promise | measured | one launch, us | two launches, us "
        "|",
        "|:--|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for case, ours, chain, ways in fusion_pairs(doc):
        promise = chain["bytes"] / ours["bytes"]
        times = [
            f"{1e3 * ways[name]['ms']['median']:.3g}" if name in ways else "-"
            for name in ("one_launch", "two_launches")
        ]
        lines.append(
            f"| {case['op']} | {case['model']} | {case['T']:,} | {chain['launches']} to {ours['launches']} | "
            f"{plots.size(chain['bytes'])} to "
            f"{plots.size(ours['bytes'])} | {promise:.2f} x | **{chain['ms']['median'] / ours['ms']['median']:.2f} x** "
            f"| {' | '.join(times)} |"
        )
    lines.append(
        f"\n*Beside the same operations as PyTorch calls, both in CUDA graphs with a cold L2, bf16; "
        f"{results.caption(doc)}. Bytes promise: as if memory alone bound both.*"
    )
    return Markdown("\n".join(lines))


def fusion_pairs(doc):
    """[(case, step 08's row, the row of PyTorch's chain, {"one_launch", "two_launches": row})] of a fusion document."""
    cases = {}
    for entry in doc["rows"]:
        if "ms" in entry and entry.get("ok") is not False:
            cases.setdefault(tuple(sorted((k, str(v)) for k, v in entry["case"].items())), {})[entry["impl"]] = entry
    return [
        (ways[OURS]["case"], ways[OURS], ways["torch"], ways) for ways in cases.values() if {OURS, "torch"} <= set(ways)
    ]


# ---------------------------------------------------------------- prefill, decode, windows, memory


COLUMNS = ("1k", "4k", "16k", "32k", "128k")


def grid(doc, peer="fa3"):
    """Step 08's prefill speed over a peer in every recorded cell, as a Picture."""
    if doc is None:
        return missing(OURS)
    ratios, rows = {}, []
    for impls in rows_by_cell(doc, "prefill"):
        ratio = faster(impls, peer)
        if ratio is None:
            continue
        _, size, mask, length, layout = impls[OURS]["cell"].split(" ", 4)
        row = f"{size} {mask}, {layout}"
        rows.append(row)
        ratios[row, length] = ratio
    if not ratios:
        return Markdown(f"*The record holds no cell that {implementation_title(peer)} ran too.*")
    rows = list(dict.fromkeys(rows))
    figure = plots_dflash2.ratio_grid(
        ratios, rows, COLUMNS, title=f"Prefill: step 08 over {implementation_title(peer)}",
        note=f"Purple: faster. Orange and bold: slower. bf16, both in the same run in turn, {results.caption(doc)}. "
            f"Look at rows and columns, not at single cells: "
        "a few per cent are noise.",
    )  # fmt: skip
    return plots.Picture(figure, f"grid: step 08 over {implementation_title(peer)} in {len(ratios)} prefill cells")


def speed(doc, upto=8, mode="prefill"):
    """Recorded steps 07 and 08 and the peers on the headline shapes, as a Markdown table."""
    if doc is None:
        return missing(OURS)
    impls = [V1, OURS] if upto == 8 else [V1]
    cells = rows_by_cell(doc, mode)
    rate = "tflops" if mode in ("prefill", "chunked", "window") else "tbs"
    if mode == "prefill":
        cells = [c for c in cells if V1 in c]
    peers = list(dict.fromkeys(name for cell in cells for name in cell if not name.startswith("step")))
    unit, limit = (
        ("TFLOP/s", doc["limits"]["matmul_tflops"]) if rate == "tflops" else ("TB/s", doc["limits"]["read_tbs"])
    )
    heads = " | ".join(
        f"**{implementation_title(i)}**" if i == OURS else implementation_title(i) for i in (*impls, *peers)
    )
    lines = [
        f"| {mode.replace('_', ' ')} | {heads} | of the limit | 08 over 07 |",
        "|:--|" + "--:|" * (len(impls) + len(peers) + 2),
    ]
    for cell in cells:
        ours = cell.get(OURS)
        if ours is None:
            continue
        shown = [
            (
                f"**{cell[i][rate]:.{0 if rate == 'tflops' else 2}f}**"
                if i == OURS
                else f"{cell[i][rate]:.{0 if rate == 'tflops' else 2}f}"
            )
            if i in cell
            else "-"
            for i in (*impls, *peers)
        ]
        gain = f"{cell[V1]['ms']['median'] / ours['ms']['median']:.2f} x" if V1 in cell else "-"
        lines.append(
            f"| {ours['cell'].removeprefix(mode + ' ')} | {' | '.join(shown)} | {100 * ours[rate] / limit:.0f} % | "
            f"{gain} |"
        )
    kind = (
        "events"
        if rate == "tflops"
        else "CUDA-graph launches with a cold L2, TB/s of live K and V; the peers read contiguous memory, the rungs "
            "pages of 64"
    )
    lines.append(f"\n*{unit}, bf16, medians of {kind}; {results.caption(doc)}.*")
    return Markdown("\n".join(lines))


def windows(doc):
    """Recorded range windows: time against the pairs that are left, as a Markdown table."""
    if doc is None:
        return missing(OURS)
    cells = rows_by_cell(doc, "window")
    full = {
        (c[OURS]["case"]["Sq"], c[OURS]["case"]["causal"]): c[OURS]
        for c in cells
        if OURS in c and c[OURS]["case"]["windows"] is None
    }
    lines = [
        "| windows | of causal's pairs | ms | x causal | the pairs promise | x dense | flex_attention, ms | "
        "FlashAttention-3, ms |",
        "|:--|" + "--:|" * 7,
    ]
    for cell in cells:
        ours = cell.get(OURS)
        if ours is None or ours["case"]["windows"] is None:
            continue
        bases = [full.get((ours["case"]["Sq"], causal)) for causal in (True, False)]
        gains = [f"{base['ms']['median'] / ours['ms']['median']:.1f} x" if base else "-" for base in bases]
        others = [f"{cell[p]['ms']['median']:.3g}" if p in cell else "-" for p in ("flex", "fa3")]
        lines.append(
            f"| {ours['cell'].removeprefix('windows ')} | {100 * ours['visible_share']:.1f} % | "
            f"{ours['ms']['median']:.3g} | **{gains[0]}** "
            f"| {1 / ours['visible_share']:.1f} x | {gains[1]} | {' | '.join(others)} |"
        )
    lines.append(
        f"\n*16 heads of 128, causal, bf16; {results.caption(doc)}. FlashAttention-3 has windows but no sinks, and the "
        f"build that was measured beside has none of either.*"
    )
    return Markdown("\n".join(lines))


def memory_and_start(doc):
    """Recorded peak memory of a 128k prefill and seconds of the first calls, as a Markdown list."""
    if doc is None:
        return missing(OURS)
    lines = []
    peaks = {e["impl"]: e["peak_bytes"] for e in doc["rows"] if e["case"].get("mode") == "memory"}
    if {OURS, V1} <= set(peaks):
        lines.append(
            f"- Peak memory of a 128k causal prefill on top of its inputs: step 07 {plots.size(peaks[V1])}, step 08 "
            f"{plots.size(peaks[OURS])}."
        )
    for entry in doc["rows"]:
        if entry["case"].get("mode") == "first_call":
            case = entry["case"]
            how = f"compiled code {'cached' if case['cache'] == 'warm' else 'not cached'}{', after `warmup`' if case['warmup'] else ''}"  # noqa: E501
            warm = f", warmup {entry['seconds_warmup']:.1f} s" if case["warmup"] else ""
            lines.append(
                f"- First calls, {how}: import {entry['seconds_import']:.2f} s{warm}, prefill "
                f"{entry['seconds_prefill']:.2f} s, decode {entry['seconds_decode']:.2f} s."
            )
    return Markdown(
        "\n".join([*lines, f"\n*{results.caption(doc)}.*"])
        if lines
        else "*The record holds no memory and no first call.*"
    )


def verdicts(doc):
    """Which of step 08's targets the recorded run reached; the missed ones by name, as Markdown."""
    if doc is None:
        return missing(OURS)
    lines, reached = [], sum(line["ok"] for line in doc["must_reach"])
    for line in doc["must_reach"]:
        if not line["ok"]:
            lines.append(
                f"| {line['what']} | {line['value']:.3g} | {'at most' if line.get('most') else 'at least'} "
                f"{line['want']:g} |"
            )
    text = f"{reached} of {len(doc['must_reach'])} targets reached"
    text += (
        "." if doc.get("complete", True) else f", in a run that was cut short ({doc.get('stopped', 'not finished')})."
    )
    if lines:
        text += " Missed:\n\n| | value | wanted |\n|:--|--:|--:|\n" + "\n".join(lines)
    return Markdown(f"{text}\n\n*{results.caption(doc)}.*")


def ratio(doc, mode, peer, cell):
    """How many times as fast as ``peer`` step 08 is in a recorded cell, or None where it is not recorded."""
    found = [impls for impls in rows_by_cell(doc, mode) if OURS in impls and impls[OURS]["cell"] == cell]
    return faster(found[0], peer) if found else None


# ---------------------------------------------------------------- what the chapter computes itself


def tiles_saved(length=131072, sink=128, window=4096, block=128):
    """How many times fewer tiles a causal square has under a sink and a window, counted by the rung's own loop."""
    from ladder.step08_dflash2 import RangeWindows

    rows = -(-length // block)
    return rows * (rows + 1) / 2 / RangeWindows.sink_window(sink, window).visited_tiles(
        length, length, True, block, block,
    ).count  # fmt: skip


def decode_splits(lengths, *, num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, max_seq_len=None):
    """Splits that step 08's device schedule gives each sequence of a decode batch on a Hopper's 132 processors."""
    from unittest import mock

    from ladder.step08_dflash2 import schedule as scheduling

    hopper = scheduling.machine(torch.device("cpu"))._replace(processors=schedules.PROCESSORS)
    with mock.patch.object(scheduling, "machine", lambda device: hopper):
        schedule = scheduling.get_decode_schedule(
            torch.tensor(lengths, dtype=torch.int32), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
            page_size=page_size,
            max_seq_len=max_seq_len or -(-max(lengths) // page_size) * page_size,
        )  # fmt: skip
    splits = [1] * len(lengths)
    for seq, _, count, _ in schedule.tolist():
        if seq >= 0:
            splits[seq] = count
    return splits


def split_picture(lengths=(32768, *[1024] * 15), kv_heads=8):
    """A ragged decode batch without splits, with one number of splits for all, and as step 08 cuts it, as a Picture."""
    ours = decode_splits(lengths, num_kv_heads=kv_heads)
    even = max(1, round(2 * schedules.PROCESSORS / (len(lengths) * kv_heads)))
    plans = {"one program a KV head": 1, f"{even} splits for each": even, "step 08: about equal parts": ours}
    figure = plots_dflash2.split_schedules(
        lengths, kv_heads, plans,
        note=f"{len(lengths)} sequences, the longest of {max(lengths):,} keys (orange) among {min(lengths):,}; "
            f"{kv_heads} KV heads. Each part pays one "
        "tile's time for its start and end. Look at where the last processor stops, against the dashed line of a "
        "perfect share.",
    )  # fmt: skip
    return plots.Picture(
        figure, f"decode schedules of a ragged batch; step 08 cuts the sequences into {sorted(set(ours))} parts"
    )


def projection_bytes(tokens, num_heads, num_kv_heads, head_dim, hidden, itemsize=2):
    """(product, one pass, passes apart): bytes of the QKV projection and of what follows it.

    Apart, RoPE reads and writes q and k, and the append reads and writes k and v; one pass reads and writes each once.
    """
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    product = tokens * hidden + hidden * (queries + 2 * keys) + tokens * (queries + 2 * keys)
    one_pass = 2 * tokens * (queries + 2 * keys)
    apart = 2 * tokens * (queries + keys) + 2 * tokens * 2 * keys
    return itemsize * product, itemsize * one_pass, itemsize * apart


def projection_table(hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, limits=None):
    """What one launch, and a product with one pass, should gain over three at this machine's limits, as a Markdown
    table."""
    limits = limits or results.load(V1)["limits"]
    lines = [
        "| new tokens | the product moves | and is bound by | passes apart move | product and one pass: predicted gain "
        "| one launch: predicted gain |",
        "|--:|--:|:--|--:|--:|--:|",
    ]
    for tokens in (1, 64, 256, 1024, 8192, 32768):
        moved, one_pass, apart = projection_bytes(tokens, num_heads, num_kv_heads, head_dim, hidden)
        # us
        arithmetic = 2 * tokens * hidden * (num_heads + 2 * num_kv_heads) * head_dim / limits["matmul_tflops"] / 1e6
        reading = moved / limits["read_tbs"] / 1e6
        product = max(arithmetic, reading)
        three, two = (product + x / limits["copy_tbs"] / 1e6 for x in (apart, one_pass))
        binds = "memory" if reading > arithmetic else "arithmetic"
        lines.append(
            f"| {tokens:,} | {plots.size(moved)} | {binds} | {plots.size(apart)} | {three / two:.3f} x | "
            f"{three / product:.3f} x |"
        )
    lines.append(
        f"\n*Hidden size {hidden:,}, {num_heads} query and {num_kv_heads} KV heads of {head_dim}, bf16; predicted from "
        f"the limits {results.caption(results.load(V1))}; "
        "launches are not counted.*"
    )
    return Markdown("\n".join(lines))
