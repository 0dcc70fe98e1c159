"""What chapters 10 and 11 read of ``notebooks/results/multi_gpu.json``: several GPUs measured, beside predictions.

``python -m ladder.bench multi_gpu`` records the file. While it, or a part of it, is missing, a sentence in the table's
place says so.
The error of a prediction is prediction / measurement - 1.
"""

import re

from ladder.chapters import plots
from ladder.chapters.article import ARTICLE
from ladder.chapters.ch11_end_to_end.tables import implementation_title
from ladder.chapters.markdown import Markdown
from ladder.lab import results

COMMAND = "python -m ladder.bench multi_gpu --json notebooks/results/multi_gpu.json"
WAYS = {"neither": "neither", "kernel": "kernel: step 08", "scheduler": "scheduler: placed", "both": "both"}


def record():
    """The recorded document, or None where it is not recorded yet."""
    return results.load("multi_gpu") if (results.FOLDER / "multi_gpu.json").exists() else None


def rows(doc, part, **case):
    """Rows of a part; an empty list where it is not recorded."""
    doc, wanted = doc or record(), {"part": part, **case}
    return [r for r in doc["rows"] if all(r["case"].get(k) == v for k, v in wanted.items())] if doc else []


def missing(part, doc=None):
    """What stands in a table's place while its part is missing, with the reason where the record has one."""
    doc = doc or record()
    reasons = [f["error"] for f in doc.get("failures", []) if f["part"] in (part, "serve")] if doc else []
    why = f" (`{reasons[0][:120]}`)" if reasons else ""
    where = "on a machine with two GPUs records it; the cells around this one do not need it"
    return Markdown(f"*Not recorded yet: part {part}{why}. `{COMMAND}` {where}.*")


def table(doc, head, lines, text, shown, attention=False):
    """A Markdown table with a note under it: what it shows, and where the rows ``shown`` were recorded.

    ``head`` is the line of titles, in which a title that starts with "<" stands over a column aligned to the left;
    ``lines`` are lists of cells. With ``attention`` the note adds what the record says of its attention kernels.
    """
    titles = head.split(" | ")
    cells = [[t.removeprefix("<") for t in titles], *lines]
    body = [re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(map(str, line))} |") for line in cells]
    body.insert(1, f"|{'|'.join(':--' if t.startswith('<') else '--:' for t in titles)}|")
    doc = doc or record()
    gpus = max(r["case"]["gpus"] for r in doc["rows"])
    more = f" {doc['note']}" if attention and "note" in doc else ""
    return Markdown("\n".join([*body, f"\n*{text} {gpus} ranks; {results.caption(doc, shown)}.{more}*"]))


def pair(measured, predicted):
    """A measurement, its prediction, and the error of the prediction in per cent, as cells of a table."""
    return f"{measured:.3g} | {predicted:.3g} | {100 * (predicted / measured - 1):+.0f} %"


def layer_table(doc=None):
    """A MoE layer over the ranks, experts in order against placed: where the time goes, beside the simulator's."""
    found = rows(doc, "dispatch", what="layer")
    if not found:
        return missing("dispatch", doc)
    head = (
        "<routing, tokens of a rank | <experts | balancedness | GPU utilisation, experts | experts, ms | predicted "
        "| error | exchange, ms | predicted | step, ms | of it planning"
    )
    lines = []
    for r in found:
        c, p, ms = r["case"], r["predicted"], lambda seconds: f"{1e3 * seconds:.3g}"
        lines.append([
            f"{c['routing']}, {c['tokens_per_rank']:,}", "in order" if r["impl"] == "identity" else "**placed**",
            f"{r['balancedness']:.3f}", " / ".join(f"{100 * v:.0f} %" for v in r["utilisation"]),
            pair(1e3 * r["experts_s"], 1e3 * p["experts_s"]), ms(r["exchange_s"]), ms(p["exchange_s"]),
            ms(r["step_s"]), ms(r["planning_s"]),
        ])  # fmt: skip
    text = (
        f"{found[0]['case']['layers']} layers of 64 experts, top 6, at V2-Lite's widths on GPUs. Planning is the "
        "exchange of counts over the CPU and the computation of the plan. The exchange includes planning and the wait "
        "for the other rank. Both are times of the slowest rank. Routing is generated."
    )
    return table(doc, head, lines, text, found)


def moves_table(doc=None):
    """The link, and copies of experts moved over it, beside the data sheet's rate."""
    link, moved = rows(doc, "dispatch", what="link"), rows(doc, "dispatch", what="migration")
    if not link or not moved:
        return missing("dispatch", doc)
    bare, size = link[0], plots.size
    took = bare["bytes_sent"] / bare["predicted_gb_s"] / 1e6
    rate = f"{1e3 * bare['seconds']:.3g} | {bare['gb_s']:.0f} | {took:.3g}"
    lines = [["one all-to-all of equal parts", "", size(bare["bytes_sent"]), rate, ""]]
    for r in moved:
        before, after = r["balancedness"]
        kind = "rebalance" if r["case"]["kind"] == "rebalance" else "every copy to the next GPU"
        rate = f"{1e3 * r['seconds']:.3g} | {r['gb_s']:.0f} | {1e3 * r['predicted_s']:.3g}"
        most, balance = size(max(r["bytes_received"])), f"{before:.3f} to {after:.3f}"
        lines.append([f"{kind}, {r['case']['routing']}", r["copies"], most, rate, balance])
    head = "<what moves | copies | bytes to the busiest GPU | ms | GB/s | predicted, ms | balancedness"
    text = (
        "Weights of experts in 16 bits, moved layer by layer while no request is served; the prediction is the data "
        "sheet's rate of one direction."
    )
    return table(doc, head, lines, text, link + moved)


def loss_table(doc=None):
    """A rank killed while serving: when it was noticed and repaired, and what was lost."""
    found = rows(doc, "survive")
    if not found:
        return missing("survive", doc)
    lines = [
        [
            f"{max(r['noticed_s'].values()):.3f}", f"{r['resumed_s']:.3f}",
            f"{r['copies_fetched']}, {r['from_storage']}", r["restarted"], f"{r['finished']} of {r['jobs']}",
            "yes" if r["identical"] else "**no**",
        ]
        for r in found
    ]  # fmt: skip
    head = (
        "noticed after, s | serving again after, s | copies fetched, from storage | requests started again | "
        "finished | <outputs as in an undisturbed run"
    )
    text = "One of the ranks is killed in the middle of a step; control messages travel over gloo, rows over NCCL."
    return table(doc, head, lines, text, found)


def parity_table(doc=None):
    """The logits of a few layers on all ranks against one rank's."""
    found = rows(doc, "parity")
    if not found:
        return missing("parity", doc)
    lines = [
        [
            implementation_title(r["impl"]), r["case"]["experts"], f"{r['error']:.1e}",
            f"{100 * r['same_tokens']:.0f} %", "within budget" if r["ok"] else "**too far**",
        ]
        for r in found
    ]  # fmt: skip
    text = (
        f"{found[0]['case']['layers']} layers, random weights; distance is the norm of the difference over the norm."
        " In 16 bits a sum in another order sometimes leads to another expert. Same tokens: of 4 for each of 3 prompts."
    )
    head = "<backend | <experts | distance of the logits | same greedy tokens | <"
    return table(doc, head, lines, text, found, True)


def engine_table(doc=None):
    """Steps 07 and 08 on all ranks, beside the article's two cards and the simulator."""
    found = {r["impl"]: r for r in rows(doc, "engine")}
    old, new = found.get("step07_dflash1"), found.get("step08_dflash2")
    if old is None or new is None:
        return missing("engine", doc)
    lines = []
    for name, (what, unit, first, second) in ARTICLE.items():
        ours = [r["peak_bytes"] / 1e9 if name == "peak_gb" else r[name] for r in (old, new)]
        said = [r["predicted"].get(name) for r in (old, new)]
        gain = lambda a, b: f"({b / a if unit == 'tokens/s' else a / b:.2f} x)"  # noqa: B023, E731
        predicted, errors = "-", "-"
        if None not in said:
            predicted = f"{said[0]:,.4g}, {said[1]:,.4g}"
            errors = ", ".join(f"{100 * (s / o - 1):+.0f} %" for s, o in zip(said, ours))
        article = f"{first:,.0f} to {second:,.0f} {gain(first, second)}"
        lines.append([f"{what}, {unit}", article, f"{ours[0]:,.4g} to {ours[1]:,.4g} {gain(*ours)}", predicted, errors])
    text = (
        "8 requests, 4,096 tokens in, 512 out, DeepSeek-V2-Lite in 16 bits, tensor parallel, random weights; better"
        " in brackets. The simulator knows attention, experts and exchange, and no launches, norms or output "
        "matrix. Prompts in steps of 8,192 tokens."
    )
    head = "< | the article: 2 x A100, SGLang | here, steps 07 and 08 | predicted, steps 07 and 08 | error"
    return table(doc, head, lines, text, [old, new], True)


def four_ways(doc=None):
    """{skew of the routers: {neither, kernel, scheduler, both: row}}, the skews of which all four were measured."""
    skews = {}
    for r in rows(doc, "four_way"):
        if r.get("predicted"):
            skews.setdefault(r["case"]["skew"], {})[r["case"]["which"]] = r
    return {skew: ways for skew, ways in skews.items() if set(ways) == set(WAYS)}


@plots.styled
def four_way_picture(simulated, title, source, doc=None):
    """Throughput of the four ways as a Picture: simulated on many GPUs, and measured beside simulated on two.

    Args:
        simulated: {neither, kernel, scheduler, both: throughput, neither = 1} of the many GPUs.
        title: of their panel. source: where these numbers come from.
    """
    skews = four_ways(doc)
    figure, panels = plots.canvas(3.9, columns=1 + len(skews), sharey=True, squeeze=False)
    panels = panels[0]
    _four_bars(panels[0], {"simulated": simulated}, title)
    for axes, (skew, ways) in zip(panels[1:], skews.items()):
        both = {
            "measured": {name: r.get("gain", 1.0) for name, r in ways.items()},
            "simulated": {name: r["predicted"].get("gain", 1.0) for name, r in ways.items()},
        }
        name = "routing like V2-Lite's" if skew.startswith("popularity") else skew
        _four_bars(axes, both, f"2 GPUs,\n{name}")
    panels[0].set_ylabel("throughput, neither = 1")
    tallest = [r.get("gain", 1.0) for ways in skews.values() for r in ways.values()]
    panels[0].set_ylim(0, 1.25 * max([*simulated.values(), *tallest]))
    panels[-1].legend(loc="upper left", fontsize=8.5)
    doc = doc or record()
    measured = [r for ways in skews.values() for r in ways.values()]
    where = f" Two GPUs: {results.caption(doc, measured)}." if measured else " Nothing is measured yet."
    plots.caption(
        figure,
        'Look at the bars of "both": the black line is the product of the two gains. Blue bars with a hatch are '
        f"simulated, orange bars are measured. Many GPUs: {source}.{where}",
    )
    return plots.Picture(figure, f"throughput of kernel, scheduler and both in {len(panels)} panels")


def _four_bars(axes, kinds, title):
    """Bars of the four ways for each kind, "measured" or "simulated", and a line where the product would be."""
    looks = {"measured": (plots.ORANGE, None), "simulated": (plots.SKY, "//")}
    width = 0.8 / len(kinds)
    for number, (kind, values) in enumerate(kinds.items()):
        colour, hatch = looks[kind]
        x = [place - 0.4 + width * (number + 0.5) for place in range(len(WAYS))]
        heights = [values[name] for name in WAYS]
        axes.bar(x, heights, width, color=colour, hatch=hatch, edgecolor=plots.INK, lw=0.6, label=kind)
        product = values["kernel"] * values["scheduler"]
        tops = [*heights[:-1], max(heights[-1], product)]
        for at, height, top in zip(x, heights, tops):
            axes.text(at, top + 0.02, f"{height:.2f}", ha="center", fontsize=7.5 if len(kinds) > 1 else 9)
        axes.hlines(product, x[-1] - width / 2, x[-1] + width / 2, color=plots.INK, lw=2.2)
    axes.set_xticks(range(len(WAYS)), ["neither", "kernel", "sched-\nuler", "both"], fontsize=9)
    axes.set_title(title, fontsize=9.5)


def four_way_table(doc=None):
    """Throughput of {neither, kernel, scheduler, both}, and whether both is the product, beside the simulator's."""
    found = [r for r in rows(doc, "four_way") if r.get("predicted")]
    skews = four_ways(doc)
    if not skews:
        return missing("four_way", doc)
    lines = []
    for skew, ways in skews.items():
        gains = {name: (r.get("gain", 1.0), r["predicted"].get("gain", 1.0)) for name, r in ways.items()}
        for name, what in WAYS.items():
            r = ways[name]
            times = [f"{r['ttft_ms']:,.4g}", f"{r['itl_ms']:.3g}", f"{r['balancedness']:.3f}"]
            lines.append([skew, what, f"{r['tok_s']:,.4g}", pair(*gains[name]), *times])
        product = [gains["kernel"][n] * gains["scheduler"][n] for n in (0, 1)]
        lines.append([skew, "*product of the two*", "", pair(*product), "", "", ""])
    c = found[0]["case"]
    text = (
        f"{c['concurrency']} requests, {c['input_len']:,} tokens in, {c['output_len']} out, DeepSeek-V2-Lite in 16 "
        "bits, whole experts on each rank, random weights with biased routers. The simulator's kernel is faster "
        "attention alone, at the recorded speed of one GPU; the engine's step 08 also fuses what surrounds it."
    )
    head = "<skew of the routers | < | tokens/s | gain | predicted | error | TTFT, ms | ITL, ms | balancedness"
    return table(doc, head, lines, text, found, True)
