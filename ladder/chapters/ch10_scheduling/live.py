"""What a placement of experts is worth on the reader's GPU: the live cell of chapter 10.

A layer of experts ends when its busiest GPU does. One GPU can stand for each of eight in turn: it computes the rows
that a plan gives to that GPU, so the slowest of the eight times is the layer's. With several GPUs the exchange between
them is measured too, by ``ladder.bench.multi_gpu``.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from dspark_mini import Placement, baselines, bundled_trace, place, split_batch
from dspark_mini.bench_multi_gpu import SIZES
from dspark_mini.experts import Experts
from dspark_mini.split import gpu_tokens
from ladder.chapters import live_process, plots
from ladder.lab import results, timing

GPUS, SLOTS, TOKENS = 8, 72, 65536  # of a layer and a step, over all GPUs
TOPIC = live_process.Topic(
    "experts", "ladder.chapters.ch10_scheduling.live",
    "computes one layer of 64 experts as each of eight GPUs would, under three placements, and shows which one keeps "
    "the busiest GPU's time down; with several GPUs it also measures the exchange between them.",
    ("../dspark_mini/*.py", "chapters/ch10_scheduling/live.py", "bench/multi_gpu.py"),
)  # fmt: skip


def show(*, again=False):
    """Placements on this machine's GPU; None, with the reason printed, where there is none. ``again``: not cached."""
    doc = live_process.document(TOPIC, again)
    return doc and Layers(doc)


def plans(counts):
    """{name: (Placement, rule that divides an expert's tokens among its copies)} of ``counts`` (layers, experts)."""
    greedy = baselines.replicate_and_pack(counts, num_gpus=GPUS, num_slots=SLOTS)
    return {
        "experts in order": (baselines.contiguous(counts, num_gpus=GPUS), baselines.equal_split),
        "EPLB, equal split": (Placement(greedy.slot_expert, counts, GPUS), baselines.equal_split),
        "dspark_mini": (place(counts, num_gpus=GPUS, num_slots=SLOTS), split_batch),
    }


def measure(name, doing, device="cuda", sizes=SIZES, tokens=TOKENS):
    """The document: a row for each plan with the milliseconds of each of its GPUs, and rows of several GPUs."""
    device = torch.device(device)
    trace = bundled_trace()
    half = trace.num_tokens // 2  # plans are made for the first half, and the second half is served
    known, served = trace.counts(0, half), trace.counts(half)
    layer = int(baselines.contiguous(known, num_gpus=GPUS).balancedness.argmin())
    batch = np.floor(served[layer] * (tokens * trace.top_k / served[layer].sum())).astype(np.int64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, shape = [], dict(dim=sizes["dim"], hidden=sizes["hidden"], dtype=dtype, device=device)
    for number, (plan_name, (plan, split)) in enumerate(plans(known).items()):
        doing(number, 4, f"eight GPUs, one after the other: {plan_name}")
        try:
            rows.append(_plan(plan, split, layer, batch, tokens, shape) | {"impl": plan_name})
        except torch.OutOfMemoryError:
            case = {"mode": "experts", "gpus": GPUS, "tokens": tokens, "layer": layer}
            rows.append({"case": case, "impl": plan_name, "skipped": "does not fit"})
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        doing(3, 4, f"the exchange between {torch.cuda.device_count()} GPUs")
        rows += several_gpus(torch.cuda.device_count())
    return results.document(rows, device=device)


def _plan(plan, split, layer, batch, tokens, shape):
    """Times of the GPUs of one plan, computed here one after the other, and whether a GPU's result is right."""
    slots = split(batch, plan, layer)
    milliseconds, error, budget = [], 0.0, 0.02 if shape["dtype"] == torch.bfloat16 else 1e-5
    for gpu in range(plan.num_gpus):
        mine = plan.slot_gpu == gpu
        experts = Experts(plan.slot_expert[layer : layer + 1, mine], **shape)
        counts = slots[mine].tolist()
        x = torch.randn(sum(counts), shape["dim"], device=shape["device"]).to(shape["dtype"])
        if gpu == 0:  # the grouped product against one product after the other
            want = experts.run_one_by_one(0, x, counts)
            error = float((experts.run(0, x, counts) - want).norm() / want.norm())
        took = timing.measure(experts.run, [(0, x, counts)], device=shape["device"], budget_ms=60)
        milliseconds.append(round(took.median, 5))
    loads = gpu_tokens(slots, plan)
    return results.row(
        {"mode": "experts", "gpus": plan.num_gpus, "tokens": tokens, "layer": layer}, "", gpu_ms=milliseconds,
        layer_ms=max(milliseconds), rows=loads.tolist(), balancedness=round(float(loads.mean() / loads.max()), 4),
        max_error=error, budget=budget, ok=error <= budget,
    )  # fmt: skip


def several_gpus(count):
    """Rows of ``ladder.bench.multi_gpu``'s layers on all GPUs there are, or one row that says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "multi_gpu.json")
        command = [sys.executable, "-m", "ladder.bench", "multi_gpu", "--only", "dispatch", "--ranks", str(count)]
        done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True)
        if path.exists():
            found = [row for row in json.loads(path.read_text())["rows"] if "step_s" in row]
            if found:
                return [row | {"case": row["case"] | {"mode": "exchange"}} for row in found]
        said = (done.stderr or done.stdout).strip().splitlines()
        return [{"case": {"mode": "exchange", "gpus": count}, "impl": "exchange", "skipped": said[-1] if said else ""}]


class Layers(live_process.Shown):
    """The time of one layer of experts under three placements."""

    @property
    def layers(self):
        """Rows of the eight GPUs."""
        return [row for row in self.measured if row["case"]["mode"] == "experts"]

    def verdict(self):
        """What the placement is worth."""
        if not self.ok:
            return "Parity FAILED: the grouped product differs from one product after the other."
        if len(self.layers) < 2:
            return "Nothing could be measured here."
        first, *_, last = self.layers
        gain, promised = first["layer_ms"] / last["layer_ms"], last["balancedness"] / first["balancedness"]
        return (
            f"Placed by dspark_mini this layer takes {last['layer_ms']:.3g} ms in place of {first['layer_ms']:.3g} ms "
            f"with experts in order: {gain:.2f} x as fast, where counting tokens promises {promised:.2f} x. The plan "
            "was made for other tokens than those served."
        )

    def table(self):
        """(headings, rows of text)."""
        lines = []
        for row in self.doc["rows"]:
            case = row["case"]
            if "skipped" in row:
                lines.append((row["impl"], row["skipped"], "", "", ""))
            elif case["mode"] == "experts":
                idle, busy = min(row["gpu_ms"]), max(row["gpu_ms"])
                lines.append((
                    row["impl"], f"{row['balancedness']:.3f}", f"{busy:.3g}", f"{idle:.3g}",
                    f"{row['max_error']:.1e} / {row['budget']:.0e}",
                ))  # fmt: skip
            else:
                what = ", ".join(f"{key} {value}" for key, value in case.items() if key != "mode")
                lines.append((f"{row['impl']}, {what}", "", f"{1e3 * row['step_s']:.3g} a step", "", ""))
        return ("plan", "balancedness", "busiest GPU, ms", "idlest GPU, ms", "error / budget"), lines

    @plots.styled
    def figure(self):
        """Milliseconds of each GPU, a panel for each plan."""
        figure, panels = plots.canvas(2.8, columns=len(self.layers), sharey=True)
        for axes, row in zip(panels, self.layers):
            times = row["gpu_ms"]
            colours = [plots.ORANGE if t == max(times) else plots.SKY for t in times]
            axes.bar(range(len(times)), times, color=colours, edgecolor=plots.INK, lw=0.6)
            axes.axhline(sum(times) / len(times), color=plots.INK, lw=1, ls="--")
            axes.set_title(row["impl"], fontsize=10)
            axes.set_xlabel("GPU")
        panels[0].set_ylabel("ms of the layer's experts")
        return plots.caption(figure, "Look at the orange bar: the layer takes as long as it. Dashed: the mean.")


if __name__ == "__main__":
    live_process.serve(measure, [TOPIC.name])
