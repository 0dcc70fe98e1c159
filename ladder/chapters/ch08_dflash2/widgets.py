"""Explorers of chapter 08: schedules of tiles, tensor cores beside
softmax, range windows, and the roofline of prefill."""

import functools
from importlib import resources

import ipywidgets as ipw

from ladder.chapters import plots
from ladder.chapters.explorer import Explorer, choice, slider
from ladder.lab import results
from ladder.lab.names import title as implementation_title
from ladder.lab.problem import CAPTURED, MINILM, AttentionProblem
from ladder.step08_dflash2 import RangeWindows

from . import plots as plots_dflash2
from . import simulate as schedules


class ScheduleExplorer(Explorer):
    """132 programs and a batch of tiles: which program computes which
    tile when, under three orders and four assignments.

    A tile costs one step for each tile of keys it visits, and ``overhead`` steps for what surrounds the loop: loading
    Q, filling the pipeline, storing. A persistent program hides two thirds of that behind its neighbours. Everything
    else (caches, clocks) is left out: what the record says beyond this is theirs.
    """

    title = "schedules"
    # name: lengths of queries, lengths of keys, heads
    BATCHES = {
        "1 prompt of 16k, 16 heads": ([16384], [16384], 16),
        "16 prompts of 1k, 16 heads": ([1024] * 16, [1024] * 16, 16),
        "4 prompts of 4k, 16 heads": ([4096] * 4, [4096] * 4, 16),
        "1 prompt of 4k, 16 heads": ([4096], [4096], 16),
        "ragged: 32k and 15 of 1k, 16 heads": ([*[1024] * 15, 32768], [*[1024] * 15, 32768], 16),
        "512 new tokens on 32k, 32 heads": ([512], [32768 + 512], 32),
        "1 prompt of 64k, 16 heads": ([65536], [65536], 16),
    }

    def __init__(
        self,
        batch="1 prompt of 16k, 16 heads",
        order="heaviest first, head by head",
        assignment="persistent, fixed stride",
        causal=True,
        overhead=1.5,
    ):
        super().__init__()
        self.batch = choice("batch", list(self.BATCHES), batch)
        self.order = choice("order", list(schedules.ORDERS), order)
        self.assignment = choice("programs", list(schedules.ASSIGNMENTS), assignment)
        self.causal = ipw.Checkbox(
            value=causal, description="causal", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.overhead = slider("around a tile, in steps", overhead, 0.0, 6.0, 0.5)
        self.start([self.batch, self.causal], [self.order, self.assignment], [self.overhead])

    def tiles(self):
        """The batch's tiles, in the order of storage."""
        lengths_q, lengths_k, heads = self.BATCHES[self.batch.value]
        return schedules.tiles_of(lengths_q, lengths_k, heads, causal=self.causal.value)

    def pieces(self, order=None, assignment=None):
        """The schedule under the controls, or under another order or assignment."""
        return schedules.simulate(
            self.tiles(), order or self.order.value, assignment or self.assignment.value, overhead=self.overhead.value
        )

    def balances(self):
        """{assignment: balance} under the chosen order."""
        return {
            name: schedules.balance(self.pieces(assignment=name), schedules.PROCESSORS)
            for name in schedules.ASSIGNMENTS
        }

    def draw(self):
        pieces, values = self.pieces(), self.balances()
        figure, (chart, bars) = plots.canvas(4.6, rows=2, height_ratios=[1.75, 1])
        plots_dflash2.draw_schedule(figure, chart, pieces, schedules.PROCESSORS)
        chart.set_title(f"{len(pieces)} tiles on {schedules.PROCESSORS} programs", fontsize=10.5)
        plots_dflash2.draw_balances(bars, values, self.assignment.value)
        end = schedules.makespan(pieces)
        work = sum(p.tile.steps for p in pieces)
        best = max(
            (schedules.balance(self.pieces(order, name), schedules.PROCESSORS), order, name)
            for order in schedules.ORDERS for name in schedules.ASSIGNMENTS
        )  # fmt: skip
        text = (
            f"{work:,} steps of work; perfectly shared they take {work / schedules.PROCESSORS:,.0f}, this schedule "
            f"takes <b>{end:,.0f}</b>: "
            f"the programs spend {100 * values[self.assignment.value]:.0f} % of their time on keys. "
            f"Best of all twelve here: {100 * best[0]:.0f} %, {best[1]}, {best[2]}."
        )
        return figure, text


class OverlapExplorer(Explorer):
    """Tensor cores and softmax of one processor, step by step, from two published rates; nothing is measured here."""

    title = "overlap"
    HEADS = {"64": (64, 64), "128": (128, 128), "192 / 128 (MLA prefill)": (192, 128), "256": (256, 256)}

    def __init__(self, head="128", softmax=1.0, steps=5):
        super().__init__()
        self.head = choice("head size", list(self.HEADS.items()), self.HEADS[head])
        self.softmax = slider("softmax takes x the exponentials alone", softmax, 0.5, 3.0, 0.1, width="420px")
        self.steps = slider("steps shown", steps, 3, 8)
        self.start([self.head, self.steps], [self.softmax])

    def clocks(self):
        """Clocks of a tile step of 128 x 128 under the controls."""
        c = schedules.clocks(*self.head.value)
        return schedules.Clocks(c.scores, c.softmax * self.softmax.value, c.values)

    def shares(self):
        """{kind of loop: share of a long loop in which the tensor cores work}."""
        return {
            kind: schedules.tensor_share(schedules.pipeline(self.clocks(), kind, 256)) for kind in schedules.PIPELINES
        }

    def draw(self):
        c, shares = self.clocks(), self.shares()
        figure = plots_dflash2.pipelines(c, steps=self.steps.value)
        first, last = (shares[kind] for kind in (schedules.PIPELINES[0], schedules.PIPELINES[-1]))
        text = (
            f"A step of 128 x 128: products {c.products:,.0f} clocks, softmax {c.softmax:,.0f}. In turn they add up: "
            f"{100 * first:.0f} % of the "
            f"matrix-product limit. Overlapped, the longer one hides the other: {100 * last:.0f} %, at best "
            f"{last / first:.2f} x as fast."
        )
        return figure, text


@functools.cache
def _captured(name):
    """q (3, Hq, 512, D) and k (3, Hkv, 512, D) of three layers of a trained model."""
    num_heads, num_kv_heads, head_dim, *_ = CAPTURED[name]
    problem = MINILM.replace(input=name, Hq=num_heads, Hkv=num_kv_heads, D=head_dim, Dv=head_dim)
    return tuple(x.float() for x in problem.make()[:2])


def _is_here(name):
    """Whether the captured tensors of a model are part of this checkout."""
    return (resources.files("ladder.lab") / "data" / CAPTURED[name][4]).is_file()


class WindowExplorer(Explorer):
    """What a range window saves and what it costs: tiles visited, and
    the probability that real heads give to hidden keys.

    The heads are those of small trained models: all-MiniLM-L6-v2, with a causal mask put on it, and where its tensors
    are at hand the causal tiny-moe; 512 tokens. "noise" draws q and k at random, whose attention is spread evenly.
    """

    title = "range windows"
    KINDS = ("sink + window", "window alone", "local prefix, full tail")
    SEQLEN, BLOCK, LONG_BLOCK = 512, 32, 128

    def __init__(self, kind="sink + window", sink=4, window=64, tail=64, length=131072, source="minilm"):
        super().__init__()
        self.kind = choice("kind", self.KINDS, kind)
        self.sink = slider("sink, keys", sink, 0, 64)
        self.window = slider("window, keys", window, 8, 512, 8)
        self.tail = slider("full tail, queries", tail, 0, 256, 16)
        names = [
            ("MiniLM", "minilm"),
            *([("tiny-moe", "tiny-moe")] if _is_here("tiny-moe") else []),
            ("noise", "noise"),
        ]
        self.source = choice("heads", names, source)
        self.length = choice("predict for", [(plots.tokens(1 << n), 1 << n) for n in range(13, 18)], length)
        self.start([self.kind, self.source, self.length], [self.sink, self.window], [self.tail])

    def windows(self):
        """The RangeWindows of the controls."""
        kind, sink, window = self.kind.value, self.sink.value, self.window.value
        if kind == self.KINDS[0]:
            return RangeWindows.sink_window(sink, window)
        if kind == self.KINDS[1]:
            return RangeWindows.sliding(window)
        return (
            RangeWindows.prefix_local(-self.tail.value, sink, window)
            if self.tail.value
            else RangeWindows.sink_window(sink, window)
        )

    def inputs(self):
        """q and k, one batch entry a layer."""
        if self.source.value != "noise":
            return _captured(self.source.value)
        q, k, _ = AttentionProblem(
            B=3, Hq=12, Hkv=12, Sq=self.SEQLEN, Sk=self.SEQLEN, D=32, Dv=32, dtype="float32"
        ).make()
        return q, k

    def dropped(self):
        """(layers, heads) probability that full causal attention gives to keys which the windows hide."""
        return self.windows().attention_mass(*self.inputs(), causal=True, rows=64, per_head=True).numpy()

    def tiles(self, length=None):
        """(visited, all) tiles of a causal square of ``length``."""
        length = length or self.length.value
        rows = -(-length // self.LONG_BLOCK)
        return self.windows().visited_tiles(length, length, True, self.LONG_BLOCK, self.LONG_BLOCK).count, rows * (
            rows + 1
        ) // 2

    def draw(self):
        figure, (tiles, mass) = plots.canvas(3.7, columns=2, width_ratios=[1, 1.05])
        count = plots_dflash2.draw_windows(tiles, self.SEQLEN, self.windows(), self.BLOCK, self.BLOCK, True)
        rows = self.SEQLEN // self.BLOCK
        tiles.set_title(f"{count} of {rows * (rows + 1) // 2} tiles of {self.BLOCK} x {self.BLOCK}", fontsize=10.5)
        dropped = self.dropped()
        source = self.source.value
        names = (
            [f"draw {n}" for n in range(len(dropped))]
            if source == "noise"
            else [f"layer {n}" for n in CAPTURED[source][-1]]
        )
        plots_dflash2.draw_mass(mass, dropped, names)
        mass.set_title("what each head loses (red: mean)", fontsize=10.5)
        visited, all_tiles = self.tiles()
        text = (
            f"At {self.SEQLEN} tokens these windows hide {100 * dropped.mean():.0f} % of the probability on average, "
            f"{100 * dropped.max():.0f} % in the head that loses "
            f"most. At {plots.tokens(self.length.value)} tokens, with tiles of {self.LONG_BLOCK}, the kernel visits "
            f"{visited:,} of {all_tiles:,} tiles: predicted "
            f"<b>{all_tiles / visited:.1f} x</b> as fast as full attention."
        )
        return figure, text


class PrefillRoofline(Explorer):
    """The roofline of long prefill, FLOPs against bytes that must move once: step 07, step 08 and the peers.

    Args:
        doc: recorded results of ``ladder.bench.step08``. Rows of mode "prefill" give the problems to choose from.
        upto: the last rung to show.
    """

    title = "roofline of prefill"

    def __init__(self, doc, *, upto, peers=True):
        super().__init__()
        self.doc, self.upto = doc, upto
        cases = {}
        for row in results.select(doc, mode="prefill"):
            if "ms" in row and "sweep" not in row["impl"] and row["case"].get("dtype") == "bfloat16":
                problem = self.problem(row["case"])
                cases.setdefault(problem.label().removesuffix(" bfloat16"), row["case"])
        results.wanted(cases, doc, "any prefill")
        longest = max(cases.items(), key=lambda item: (item[1]["Sq"], item[1]["causal"], item[1]["D"] == 128))[1]
        self.case = choice("problem", list(cases.items()), longest)
        self.peers = ipw.Checkbox(
            value=peers, description="peers", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.start([self.case, self.peers])

    @staticmethod
    def problem(case):
        """The AttentionProblem of a recorded case."""
        return AttentionProblem(**{k: v for k, v in case.items() if k in AttentionProblem.__dataclass_fields__})

    def rows(self):
        """{implementation: row} of the chosen problem."""
        return {row["impl"]: row for row in results.select(self.doc, **self.case.value) if "ms" in row}

    def points(self):
        """(label, FLOPs per byte, TFLOP/s, number) of each rung up to ``upto``."""
        problem, rows = self.problem(self.case.value), self.rows()
        intensity = problem.flops / problem.min_bytes
        return [
            (implementation_title(impl), intensity, row["tflops"], int(impl[4:6])) for impl, row in sorted(rows.items())
            if impl.startswith("step") and impl[4:6].isdigit() and int(impl[4:6]) <= self.upto
        ]  # fmt: skip

    def draw(self):
        rows, points = self.rows(), self.points()
        levels = (
            [(implementation_title(name), row["tflops"]) for name, row in rows.items() if not name.startswith("step")]
            if self.peers.value
            else []
        )
        figure = plots.roofline(self.doc["limits"], points, lines=levels, title="Long prefill")
        figure.axes[0].set_xlabel("FLOPs per byte of Q, K, V and output")
        if not points:
            return figure, "No rung has this problem."
        label, intensity, speed, _ = points[-1]
        peak = self.doc["limits"]["matmul_tflops"]
        text = (
            f"{intensity:,.0f} FLOPs a byte: far right of the ridge, arithmetic binds. {label} reaches {speed:.0f} "
            f"TFLOP/s, "
            f"{100 * speed / peak:.0f} % of a plain matrix product on the same machine ({results.caption(self.doc)})."
        )
        return figure, text
