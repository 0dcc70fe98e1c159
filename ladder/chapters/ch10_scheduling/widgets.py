"""Explorers of chapter 10: packing by hand, water-filling step by step, and the simulator with the reader's numbers."""

from __future__ import annotations

import ipywidgets as ipw
import numpy as np

from dspark_mini import baselines, plots, simulator
from dspark_mini.load import balancedness
from dspark_mini.placement import Placement
from dspark_mini.placing import place
from dspark_mini.split import balance, split_bound
from dspark_mini.topology import Topology
from ladder.chapters import plots as house
from ladder.chapters.explorer import Explorer, PredictThenMeasure, slider

__all__ = ["PourStepper", "PredictThenMeasure", "Puzzle", "SimulationExplorer", "picture", "pour_trace"]


def picture(figure, text):
    """A figure of ``dspark_mini.plots`` with a caption under it that says what to look at, as a Picture."""
    return house.Picture(house.caption(figure, text), text)


class Puzzle(Explorer):
    """Packing by hand: choose the expert of every slot; the picture shows what each GPU gets to do."""

    title = "packing puzzle"

    def __init__(self, load=(30, 22, 11, 9, 7, 5, 4, 2), num_gpus=3, num_slots=9):
        super().__init__()
        self.load, self.num_gpus = np.array(load, dtype=float), num_gpus
        self.best = place(self.load, num_gpus=num_gpus, num_slots=num_slots)
        names = [(f"{chr(65 + e)}: {n:g}", e) for e, n in enumerate(load)]
        gpu = self.best.slot_gpu
        self.slots = [
            ipw.Dropdown(
                options=names,
                value=s % len(load),
                description=f"GPU {gpu[s]}",
                layout=ipw.Layout(width="170px"),
                style={"description_width": "initial"},
            )
            for s in range(num_slots)
        ]
        self.solve = ipw.Button(description="solve", button_style="primary")
        self.solve.on_click(self.show_solution)
        self.start(*[[s for s, g in zip(self.slots, gpu) if g == x] for x in range(num_gpus)])
        self.children = [*self.children[:-2], self.solve, *self.children[-2:]]

    def show_solution(self, button=None):
        for slot, expert in zip(self.slots, self.best.slot_expert[0].tolist()):
            slot.value = expert

    @property
    def placement(self):
        """The reader's placement, or None while an expert is missing."""
        chosen = [s.value for s in self.slots]
        if set(chosen) != set(range(len(self.load))):
            return None
        return Placement([chosen], self.load, self.num_gpus)

    def draw(self):
        chosen = [s.value for s in self.slots]
        copies = np.bincount(chosen, minlength=len(self.load))
        gpu = self.best.slot_gpu
        parts = [[(e, self.load[e] / copies[e]) for e, g in zip(chosen, gpu) if g == x] for x in range(self.num_gpus)]
        totals = np.array([sum(a for _, a in stack) for stack in parts])
        missing = [chr(65 + e) for e in np.flatnonzero(copies == 0)]
        figure = plots.levels_figure(
            parts,
            [chr(65 + e) for e in range(len(self.load))],
            level=self.load.sum() / self.num_gpus / self.best.bound[0],
            title="load of each GPU; an expert with two copies splits its load",
            ylabel="load",
        )
        if missing:
            return figure, f"<b>Experts {', '.join(missing)} are nowhere.</b> Every expert needs a slot."
        score = float(balancedness(totals))
        return figure, (
            f"balancedness <b>{score:.3f}</b>; the solver reaches {self.best.balancedness[0]:.3f}, "
            f"the bound is {self.best.bound[0]:.3f}"
        )


def pour_trace(counts, placement, layer):
    """`split_batch`, one change at a time: a list of (what, expert or None, tokens[expert][GPU], tokens of each GPU).

    The first entry is the equal split; then one entry per pour that changed something, and one per chain. The
    last entry is what `split_batch` returns, which a test checks.
    """
    states = []

    def watch(what, expert, tokens, total):
        table = [dict(zip(gpus, part)) for gpus, part in zip(placement.gpus_of(layer), tokens)]
        states.append((what, expert, table, list(total)))

    balance(counts, placement, layer, watch)
    return states


class PourStepper(Explorer):
    """Step through the pours of one batch: which expert is poured, and how high each GPU stands afterwards."""

    title = "water-filling stepper"

    def __init__(self, counts, placement, layer=0):
        super().__init__()
        self.counts, self.bound = counts, split_bound(counts, placement, layer)
        self.states = pour_trace(counts, placement, layer)
        self.step = slider("step", 0, 0, len(self.states) - 1)
        self.start([self.step])

    def draw(self):
        what, expert, table, total = self.states[self.step.value]
        parts = [[(e, row[g]) for e, row in enumerate(table) if g in row] for g in range(len(total))]
        figure = plots.levels_figure(
            parts,
            [chr(65 + e) if e < 26 else str(e) for e in range(len(table))],
            level=self.bound[0],
            marked=expert,
            title=f"step {self.step.value} of {len(self.states) - 1}: {what}"
            + (f" {chr(65 + expert)}" if expert is not None else ""),
        )
        gpus = ", ".join(map(str, self.bound[1]))
        return figure, (
            f"busiest GPU {max(total)} tokens, bound {self.bound[0]}: the experts whose copies are all on GPUs {gpus} "
            f"bring that many tokens for each of these GPUs"
        )


class SimulationExplorer(Explorer):
    """The simulator with the reader's numbers: GPUs, slots, skew, batch, context, topology."""

    title = "live simulation"

    def __init__(self):
        super().__init__()
        style = {"style": {"description_width": "initial"}, "layout": ipw.Layout(width="380px")}
        self.gpus = ipw.SelectionSlider(options=[2, 4, 8, 16, 32, 64], value=8, description="GPUs", **style)
        self.per_node = ipw.SelectionSlider(options=[2, 4, 8], value=8, description="GPUs per node", **style)
        self.spare = slider("spare slots per GPU", 2, 0, 4)
        self.skew = slider("skew of routing", 0.8, 0, 2, 0.1)
        self.batch = ipw.SelectionSlider(
            options=[256, 1024, 4096, 16384], value=4096, description="tokens per step", **style
        )
        self.context = ipw.SelectionSlider(
            options=[1024, 4096, 16384, 65536], value=16384, description="prompt length", **style
        )
        self.kernel = slider("attention becomes x as fast", 2, 1, 3, 0.25)
        self.start([self.gpus, self.per_node], [self.spare, self.skew], [self.batch, self.context], [self.kernel])

    def run(self):
        """{neither, kernel, scheduler, both} -> Result, for the controls as they stand."""
        model, gpus = simulator.MODELS["v2-lite"], self.gpus.value
        rng = np.random.default_rng(0)
        scores = self.skew.value * rng.standard_normal((4, model.num_experts))
        popularity = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        history = popularity * 1e6
        batches = [np.stack([rng.multinomial(self.batch.value * model.top_k, p) for p in popularity])]
        per_node = min(self.per_node.value, gpus)
        topology = Topology(gpus // per_node, per_node)
        load = simulator.chunk_load(self.batch.value, self.context.value, max(32, 4 * gpus))
        slots = (-(-model.num_experts // gpus) + self.spare.value) * gpus
        before = {"placement": baselines.contiguous(history, num_gpus=gpus), "split": baselines.equal_split}
        after = {"placement": place(history, num_gpus=gpus, num_slots=slots), "spread_requests": True}
        common = {"topology": topology, "model": model, "load": load}
        return {
            name: simulator.simulate(batches, **plan, attention_speedup=speed, **common)
            for name, plan, speed in (
                ("neither", before, 1.0),
                ("kernel", before, self.kernel.value),
                ("scheduler", after, 1.0),
                ("both", after, self.kernel.value),
            )
        }

    def draw(self):
        results = self.run()
        base = results["neither"]
        gain = {name: base.step_s / r.step_s for name, r in results.items()}
        worst = int(base.layer_utilisation.min(axis=1).argmin())
        figure = plots.utilisation_figure(
            base.layer_utilisation[worst],
            results["both"].layer_utilisation[worst],
            "tokens per GPU in the least balanced of four layers, busiest = 100 %",
        )
        share = ", ".join(f"{name} {base.phases[name] / base.step_s:.0%}" for name in base.phases)
        return figure, (
            f"time before: {share}.<br>throughput, neither = 1: kernel <b>{gain['kernel']:.2f}</b>, scheduler "
            f"<b>{gain['scheduler']:.2f}</b>, both <b>{gain['both']:.2f}</b> "
            f"(product {gain['kernel'] * gain['scheduler']:.2f}); balancedness {base.balancedness:.2f} "
            f"to {results['both'].balancedness:.2f}"
        )
