"""The explorers of chapters 01 to 05: tiles, the online softmax, masks, costs, memory, what the compiler makes."""

import math

import ipywidgets as ipw
import numpy as np
import torch
from matplotlib.patches import Rectangle

from ladder.chapters import plots
from ladder.chapters.explorer import Explorer, choice, slider
from ladder.lab import results
from ladder.lab.names import title as implementation_title
from ladder.lab.trace import watch

# ---------------------------------------------------------------- the tile stepper


class TileStepper(Explorer):
    """Replays a run of a tiled rung, tile by tile: the live tile, one row's maximum, sum and accumulator, the bytes.

    Args:
        attention: function of step 02, 03 or 04. It is run once, here, and watched (``ladder.lab.trace``).
        q, k, v: (1, H, S, D), small; ``head`` says which KV head to show.
        options: passed to ``attention``: causal, scale, tile_q, tile_k.
    """

    title = "tile stepper"

    def __init__(self, attention, q, k, v, *, head=0, **options):
        super().__init__()
        self.watched = watch(attention, q, k, v, **options)
        self.head, self.group = (head, q.shape[1] // k.shape[1])  # a tile of step 04 holds the rows of a whole group
        self.rows, self.columns = q.shape[2] * self.group, k.shape[2]
        self.name = attention.__module__.split(".")[1]
        self.step = slider("tile", 1, 0, len(self.watched.steps))
        self.row = slider("row of the tile", 0, 0, self.watched.steps[0].row_max.shape[2] - 1, width="280px")
        self.start([self.step, self.row])

    def state(self):
        """The Step on show, or None before the first tile."""
        return self.watched.steps[self.step.value - 1] if self.step.value else None

    def draw(self):
        figure, (matrix, vector) = plots.canvas(3.5, columns=2, width_ratios=[1.15, 1])
        grid = np.full((self.rows, self.columns), np.nan)
        for step in self.watched.steps[: self.step.value]:
            scores = step.scores[0, self.head].numpy()
            top = step.q0 * self.group
            grid[top : top + scores.shape[0], step.k0 : step.k0 + scores.shape[1]] = scores
        shown = np.ma.masked_invalid(grid)
        every = torch.cat([s.scores[0, self.head].flatten() for s in self.watched.steps])
        finite = every[torch.isfinite(every)]
        matrix.imshow(
            shown,
            cmap="cividis",
            vmin=float(finite.min()),
            vmax=float(finite.max()),
            extent=(0, self.columns, self.rows, 0),
        )
        height = self.watched.tile_q * self.group
        for q0 in range(0, self.rows, height):
            for k0 in range(0, self.columns, self.watched.tile_k):
                extent = min(self.watched.tile_k, self.columns - k0), min(height, self.rows - q0)
                matrix.add_patch(Rectangle((k0, q0), *extent, fill=False, edgecolor=plots.GREY, lw=0.8))
        step = self.state()
        matrix.set(xlabel="key", ylabel="query" if self.group == 1 else "row: head by head")
        matrix.set_title("scores seen so far")
        if step is None:
            vector.set(xticks=[], yticks=[])
            vector.text(0.5, 0.5, "nothing yet: move the slider", ha="center", transform=vector.transAxes)
            return figure, f"{self.name}: {len(self.watched.steps)} tiles to come. Nothing has moved."
        scores = step.scores[0, self.head]
        row = min(self.row.value, scores.shape[0] - 1)
        top = step.q0 * self.group
        matrix.add_patch(
            Rectangle((step.k0, top), scores.shape[1], scores.shape[0], fill=False, edgecolor=plots.RED, lw=3)
        )
        matrix.plot([step.k0, step.k0 + scores.shape[1]], [top + row + 0.5] * 2, color=plots.RED, lw=1.5, ls=":")

        maximum = float(step.row_max[0, self.head, row])
        text = f"<b>{self.name}</b>, tile {self.step.value} of {len(self.watched.steps)}"
        if step.sweep == 1 and step.acc is None:
            text += f", pass 1. Row {top + row}: maximum so far {maximum:.3f}; no exponential taken yet."
            vector.set(xticks=[], yticks=[])
            vector.text(
                0.5, 0.5, f"pass 1 keeps one number a row:\nm = {maximum:.3f}", ha="center", transform=vector.transAxes
            )
        else:
            total, acc = float(step.row_sum[0, self.head, row]), step.acc[0, self.head, row].numpy()
            text += f". Row {top + row}: maximum m = {maximum:.3f}, sum l = {total:.3f}"
            if step.rescale is not None:
                text += f", what was there before was multiplied by {float(step.rescale[0, self.head, row]):.3f}"
            vector.bar(np.arange(len(acc)), acc, color=plots.SKY, edgecolor=plots.INK, lw=0.5)
            vector.axhline(0, color=plots.INK, lw=0.8)
            vector.set_xlabel("value dimension")
            vector.set_title(f"accumulator of row {top + row}")
            text += "."
        text += f"<br>Bytes loaded and stored by all heads so far: {step.num_bytes:,} of {self.watched.num_bytes:,}."
        return figure, text


# ---------------------------------------------------------------- online softmax


class OnlineSoftmaxExplorer(Explorer):
    """Six scores in three tiles, folded by step 03 itself: drag a score and see the maximum, the sum and the rescale.

    Args:
        scores: six start values. values: the six numbers that the weights average.
    """

    title = "online softmax"
    TILE = 2

    def __init__(self, scores=(1.0, 2.0, 0.5, 4.0, 3.0, -1.0), values=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)):
        from ladder.step03_online_softmax import attention

        super().__init__()
        self.attention, self.values = attention, torch.tensor(values).view(1, 1, -1, 1)
        self.scores = [slider(f"s{i}", float(s), -6.0, 6.0, 0.5, width="235px") for i, s in enumerate(scores)]
        self.seen = slider("tiles seen", len(scores) // self.TILE, 1, len(scores) // self.TILE, width="280px")
        self.start(self.scores[:3], self.scores[3:], [self.seen])

    def states(self):
        """The Steps of step 03 on one query and these scores."""
        scores = torch.tensor([s.value for s in self.scores]).view(1, 1, -1, 1)
        run = watch(self.attention, torch.ones(1, 1, 1, 1), scores, self.values, scale=1.0, tile_q=1, tile_k=self.TILE)
        return run.steps

    def draw(self):
        steps = self.states()[: self.seen.value]
        scores = np.array([s.value for s in self.scores])
        seen = self.seen.value * self.TILE
        maxima = [float(s.row_max) for s in steps]
        figure, (left, right) = plots.canvas(3.2, columns=2)
        position = np.arange(len(scores))
        colours = [plots.BLUE if i < seen else plots.PALE for i in position]
        left.bar(position, scores, color=colours, edgecolor=plots.INK, lw=0.5)
        for n, m in enumerate(maxima):
            left.plot(
                [n * 2 - 0.45, n * 2 + 1.45],
                [m, m],
                color=plots.RED,
                lw=2.5,
                label="running maximum m" if n == 0 else None,
            )
        for edge in range(self.TILE, len(scores), self.TILE):
            left.axvline(edge - 0.5, color=plots.GREY, lw=0.8, ls=":")
        left.axhline(0, color=plots.INK, lw=0.8)
        left.set(xticks=position, xlabel="key", ylim=(-6.8, 8.4))
        left.legend(loc="upper left")
        left.set_title("scores, two a tile")

        final = np.exp(scores[:seen] - maxima[-1])
        at_time = np.exp(scores[:seen] - np.repeat(maxima, self.TILE))
        right.bar(
            position[:seen] - 0.2,
            at_time,
            width=0.4,
            color=plots.PAPER,
            edgecolor=plots.INK,
            hatch="///",
            label="exp(s - m) when its tile was live",
        )
        right.bar(
            position[:seen] + 0.2,
            final,
            width=0.4,
            color=plots.BLUE,
            edgecolor=plots.INK,
            label="after every rescale since",
        )
        right.set(xticks=position, xlabel="key", ylim=(0, 1.45), xlim=(-0.6, len(scores) - 0.4))
        right.legend(loc="upper left")
        right.set_title("what the accumulator holds")

        lines = []
        for n, step in enumerate(steps):
            out = float(step.acc) / float(step.row_sum)
            lines.append(
                f"tile {n}: rescale {float(step.rescale):.4f}, m = {float(step.row_max):.2f}, l = "
                f"{float(step.row_sum):.4f}, "
                f"acc = {float(step.acc):.4f}, acc / l = {out:.4f}"
            )
        exact = float(torch.softmax(torch.tensor(scores[:seen]), 0) @ self.values.flatten()[:seen].double())
        lines.append(f"softmax of the {seen} scores seen, by its definition: {exact:.4f}")
        return figure, "<br>".join(lines)


# ---------------------------------------------------------------- masks and tiles


class TileMapExplorer(Explorer):
    """Which tiles of a causal (or dense) head a kernel computes without a mask, with one, and not at all."""

    title = "tile map"

    def __init__(self, seqlen_q=96, seqlen_k=160, tile_q=32, tile_k=32, causal=True):
        super().__init__()
        self.seqlen_q = slider("Sq", seqlen_q, 1, 256)
        self.seqlen_k = slider("Sk", seqlen_k, 1, 256)
        self.tile_q = choice("tile_q", (16, 32, 64, 128), tile_q)
        self.tile_k = choice("tile_k", (16, 32, 64, 128), tile_k)
        self.causal = ipw.Checkbox(
            value=causal, description="causal", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.start([self.seqlen_q, self.seqlen_k], [self.tile_q, self.tile_k, self.causal])

    def counts(self):
        """{"whole", "cut", "skipped"}: how many tiles of each kind."""
        kinds = list(plots.tile_kinds(*self._shape()).values())
        return {kind: kinds.count(kind) for kind in plots.KINDS}

    def _shape(self):
        return (self.seqlen_q.value, self.seqlen_k.value, self.tile_q.value, self.tile_k.value, self.causal.value)

    def draw(self):
        figure, axes = plots.canvas(3.6)
        counts = plots.tile_map(axes, *self._shape())
        plots.kinds_legend(axes, loc="upper left", bbox_to_anchor=(1.02, 1.0))
        axes.set_title("tiles of one head")
        seqlen_q, seqlen_k, tile_q, tile_k, causal = self._shape()
        pairs = sum(
            min(tile_q, seqlen_q - q0) * min(tile_k, seqlen_k - k0)
            for (q0, k0), kind in plots.tile_kinds(*self._shape()).items() if kind != "skipped"
        )  # fmt: skip
        visible = (
            sum(min(seqlen_k, max(0, i + 1 + seqlen_k - seqlen_q)) for i in range(seqlen_q))
            if causal
            else seqlen_q * seqlen_k
        )
        computed = counts["whole"] + counts["cut"]
        text = (
            f"{counts['whole']} whole, {counts['cut']} cut, {counts['skipped']} skipped: {computed} of "
            f"{sum(counts.values())} tiles computed. "
            f"Visible pairs {visible:,}; pairs in computed tiles {pairs:,}"
        )
        text += f", so {100 * (1 - visible / pairs):.0f} % of the arithmetic is masked away." if pairs else "."
        blind = max(0, seqlen_q - seqlen_k) if causal else 0
        if blind:
            text += f"<br>The first {blind} rows see no key: their output is 0."
        return figure, text


# ---------------------------------------------------------------- what a problem costs


class NaiveCostExplorer(Explorer):
    """What step 01 must move and compute, and how long each takes at least, by a machine's recorded limits."""

    title = "cost of the naive rung"

    def __init__(self, limits, *, seqlen=16384, num_heads=16, head_dim=128):
        super().__init__()
        self.limits = limits
        self.seqlen = choice("S", [(plots.tokens(1 << n), 1 << n) for n in range(9, 18)], seqlen)
        self.num_heads = choice("heads", (1, 8, 16, 32, 128), num_heads)
        self.head_dim = choice("head size", (32, 64, 128), head_dim)
        self.causal = ipw.Checkbox(
            value=False, description="causal", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.start([self.seqlen, self.num_heads, self.head_dim, self.causal])

    def costs(self):
        """{"matrix": bytes of S x S scores, "moved": bytes, "flops", "memory_ms", "compute_ms"} of step 01, bf16."""
        from ladder import step01_naive
        from ladder.lab.problem import AttentionProblem

        s, h, d = self.seqlen.value, self.num_heads.value, self.head_dim.value
        problem = AttentionProblem(Hq=h, Hkv=h, Sq=s, Sk=s, D=d, Dv=d, causal=self.causal.value, dtype="bfloat16")
        moved = step01_naive.bytes_moved(problem)
        flops = 4 * h * s * s * d  # the naive rung computes the hidden half of a causal square too
        return {
            "matrix": 2 * h * s * s, "moved": moved, "flops": flops, "inputs": problem.min_bytes,
            "memory_ms": moved / self.limits["read_tbs"] / 1e9,
            "compute_ms": flops / self.limits["matmul_tflops"] / 1e9,
        }  # fmt: skip

    def draw(self):
        c = self.costs()
        entries = [
            ("moving the bytes", c["memory_ms"], plots.ORANGE),
            ("two products", c["compute_ms"], plots.BLUE),
            ("Q, K, V, out once", c["inputs"] / self.limits["read_tbs"] / 1e9, plots.GREEN),
        ]
        figure = plots.bars(
            entries, unit="milliseconds at the machine's limits", log=True, title="Least time of step 01"
        )
        text = (
            f"Score matrix {plots.size(c['matrix'])}; moved in all {plots.size(c['moved'])}; inputs and output "
            f"{plots.size(c['inputs'])}; {c['flops'] / c['moved']:.0f} FLOPs per byte; the machine's ridge is at "
            f"{self.limits['matmul_tflops'] / self.limits['read_tbs']:.0f}."
        )
        return figure, text


class Roofline(Explorer):
    """The roofline that grows by a dot a chapter: rungs 1 to ``upto`` on a recorded problem, and the peers.

    Args:
        doc: recorded results (``ladder.lab.results``) whose rows have ``tflops`` and ``bytes_moved``.
        cases: {label: case fields} to choose from.
        upto: the last rung to show. peers: whether to draw their levels.
    """

    title = "roofline"

    def __init__(self, doc, cases, *, upto, peers=False):
        super().__init__()
        self.doc, self.upto = doc, upto
        self.case = choice("problem", list(cases.items()))
        self.peers = ipw.Checkbox(
            value=peers, description="peers", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.start([self.case, self.peers])

    def _rows(self, impl=None):
        return [row for row in results.select(self.doc, impl, **self.case.value) if "ms" in row]

    def points(self):
        """(label, FLOPs per byte, TFLOP/s, number) of each rung that has the chosen case."""
        from ladder.rungs import RUNGS

        found = []
        for rung in RUNGS[: self.upto]:
            for row in self._rows(rung.name):
                flops = row["tflops"] * row["ms"]["median"] * 1e9
                found.append(
                    (f"{rung.number:02d} {rung.title}", flops / row["bytes_moved"], row["tflops"], rung.number)
                )
        return found

    def draw(self):
        levels = []
        if self.peers.value:
            levels = [
                (implementation_title(r["impl"]), r["tflops"]) for r in self._rows() if not r["impl"].startswith("step")
            ]
        points, reach = self.points(), self.reach()
        figure = plots.roofline(self.doc["limits"], points, lines=levels, reach=reach, title="Where each rung stands")
        if not points:
            return figure, "No rung so far computes this problem."
        label, intensity, speed, number = points[-1]
        peak, rate = self.doc["limits"]["matmul_tflops"], self.doc["limits"]["read_tbs"]
        known = f"{intensity:.3g} FLOPs a byte"
        if number in reach:
            known += f" counting every load, {reach[number]:,.0f} if the L2 cache served every repeat"
        roof = min(peak, reach.get(number, intensity) * rate)
        binds = "arithmetic" if roof == peak else "memory traffic"
        text = (
            f"{label}: {known}. So {binds} binds, at {roof:.3g} TFLOP/s; it reaches {speed:.3g}, "
            f"{100 * speed / roof:.0f} % of that ({results.caption(self.doc)})."
        )
        return figure, text

    def reach(self):
        """{number: FLOPs a byte} of fused rungs if each input were loaded from device memory once."""
        from ladder.lab.problem import AttentionProblem
        from ladder.rungs import RUNGS

        problem = AttentionProblem(**self.case.value)
        once = problem.flops / problem.min_bytes
        return {rung.number: once for rung in RUNGS[: self.upto] if rung.needs_triton}


# ---------------------------------------------------------------- memory of a large model


class ModelMemoryExplorer(Explorer):
    """Weights and KV cache of a large model: how much memory a service needs, by attention layout and context."""

    title = "memory of a 671B model"
    LAYERS, HEADS, HEAD_DIM, LATENT, ROTARY = 61, 128, 128, 512, 64  # DeepSeek-V3's published configuration
    PARAMETERS = 671e9

    def __init__(self):
        super().__init__()
        self.weights = choice("weights", [("bf16, 2 bytes", 2.0), ("fp8, 1 byte", 1.0), ("4 bits, 0.5 byte", 0.5)])
        self.layout_ = choice("attention", ["MHA", "GQA, 8 KV heads", "MLA latent"], "MLA latent")
        self.context = choice("context", [(plots.tokens(1 << n), 1 << n) for n in range(12, 18)], 1 << 15)
        self.requests = slider("requests at once", 64, 1, 256)
        self.gpu = choice("GPU", [("H200, 141 GB", 141e9), ("A100 or H100, 80 GB", 80e9)])
        self.start([self.weights, self.layout_, self.gpu], [self.context, self.requests])

    @classmethod
    def kv_bytes_per_token(cls, layout):
        """Bytes of cache that one token takes over all layers, bf16."""
        numbers = {
            "MHA": 2 * cls.HEADS * cls.HEAD_DIM,  # a key and a value for each head
            "GQA, 8 KV heads": 2 * 8 * cls.HEAD_DIM,
            "MLA latent": cls.LATENT + cls.ROTARY,  # one latent vector and one rotary key, shared by all heads
        }
        return 2 * cls.LAYERS * numbers[layout]

    def needs(self):
        """{"weights", "cache": bytes, "gpus": how many GPUs hold both, a tenth of each kept free}."""
        weights = self.PARAMETERS * self.weights.value
        cache = self.kv_bytes_per_token(self.layout_.value) * self.context.value * self.requests.value
        return {"weights": weights, "cache": cache, "gpus": math.ceil((weights + cache) / (0.9 * self.gpu.value))}

    def draw(self):
        n = self.needs()
        figure, axes = plots.canvas(1.9)
        axes.barh(0, n["weights"] / 1e12, color=plots.BLUE, edgecolor=plots.INK, lw=0.6, label="weights")
        axes.barh(
            0,
            n["cache"] / 1e12,
            left=n["weights"] / 1e12,
            color=plots.ORANGE,
            edgecolor=plots.INK,
            lw=0.6,
            hatch="///",
            label="KV cache",
        )
        total = (n["weights"] + n["cache"]) / 1e12
        axes.axvline(0.9 * self.gpu.value / 1e12, color=plots.RED, lw=2, label="what one GPU can hold")
        axes.set(xlabel="TB", yticks=[], ylim=(-0.6, 1.1), xlim=(0, total * 1.05))
        axes.legend(loc="upper center", ncols=3)
        per_token = self.kv_bytes_per_token(self.layout_.value)
        text = (
            f"Weights {plots.size(n['weights'])}, KV cache {plots.size(n['cache'])} ({plots.size(per_token)} a token): "
            f"at least {n['gpus']} GPUs, before any activation."
        )
        return figure, text


# ---------------------------------------------------------------- what the compiler makes of a tile size


class LaunchExplorer(Explorer):
    """Tile sizes of the fused kernel against the limits of a processor, from recorded compiler output.

    Args:
        doc: recorded results of ``ladder.lab.compile.sweep``.
    """

    title = "tile sizes"
    REGISTERS, SHARED, THREADS = 65536, 227 * 1024, 2048  # of one H100 or H200 SM

    def __init__(self, doc):
        super().__init__()
        self.doc = doc
        cases = [row["case"] for row in results.wanted(doc["rows"], doc, "any setting of the kernel")]

        def values(name):
            return sorted({c[name] for c in cases})

        self.head = choice(
            "head size",
            [(f"{d}" if d == dv else f"{d}/{dv}", (d, dv)) for d, dv in sorted({(c["D"], c["Dv"]) for c in cases})],
            (128, 128),
        )
        self.block_m = choice("BLOCK_M", values("BLOCK_M"), 128)
        self.block_n = choice("BLOCK_N", values("BLOCK_N"), 128)
        self.num_warps = choice("warps", values("num_warps"), 8)
        self.num_stages = choice("stages", values("num_stages"), 2)
        self.start([self.head, self.block_m, self.block_n, self.num_warps, self.num_stages])

    def row(self):
        """The recorded row for the controls as they stand, or None."""
        d, dv = self.head.value
        found = results.select(
            self.doc, D=d, Dv=dv, BLOCK_M=self.block_m.value, BLOCK_N=self.block_n.value,
            num_warps=self.num_warps.value, num_stages=self.num_stages.value,
        )  # fmt: skip
        return found[0] if found else None

    @classmethod
    def programs_per_sm(cls, row):
        """How many programs one processor holds at once: what registers, shared memory and threads allow."""
        threads = 32 * row["case"]["num_warps"]
        by_registers = cls.REGISTERS // (max(row["registers"], 1) * threads)
        by_shared = cls.SHARED // (row["shared"] + 1024)  # the system keeps 1 KiB of each program's
        return min(by_registers, by_shared, cls.THREADS // threads)

    def draw(self):
        row = self.row()
        if row is None:
            figure, axes = plots.canvas(1.2)
            axes.set_axis_off()
            axes.text(0.5, 0.5, "not recorded: choose another combination", ha="center")
            return figure, "This combination was not compiled."
        entries = [
            ("registers a thread", 100 * row["registers"] / 255, plots.BLUE),
            ("shared memory", 100 * row["shared"] / self.SHARED, plots.ORANGE),
        ]
        figure = plots.bars(
            entries, unit="% of the limit (255 registers a thread, 227 KiB a program)", title="What one program takes"
        )
        figure.axes[0].axvline(100, color=plots.RED, lw=2)
        figure.axes[0].set_xlim(0, max(115, 1.14 * max(v for _, v, _ in entries)))
        if row["shared"] > self.SHARED:
            verdict = "does not launch: more shared memory than a program may have"
        elif row["spill_loads"] + row["spill_stores"] + row["local"]:
            verdict = (
                f"spills: {row['spill_stores']} stores to and {row['spill_loads']} loads from local memory in the code"
            )
        else:
            n = self.programs_per_sm(row)
            verdict = f"no spills; {n} program{'s' if n != 1 else ''} of {row['case']['num_warps']} warps on each SM"
        unit = "wgmma (HGMMA)" if row["hgmma"] else "older tensor-core (HMMA)" if row["hmma"] else "no tensor-core"
        text = (
            f"{row['registers']} registers a thread, {row['shared'] / 1024:.0f} KiB shared: {verdict}.<br>"
            f"Products use {unit} instructions: {row['hgmma']} HGMMA, {row['hmma']} HMMA in the code. "
            f"({self.doc['machine']['triton'] and 'Triton ' + self.doc['machine']['triton']}, sm_90, "
            f"{self.doc['recorded'][:10]})"
        )
        return figure, text
