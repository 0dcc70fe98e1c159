"""Explorers of chapters 06 and 07: pages, splits, expert tiles, and the roofline of decode."""

import inspect

import ipywidgets as ipw
import numpy as np
import torch
from matplotlib.patches import Rectangle

from ladder.chapters import plots
from ladder.chapters.ch01_05_rungs.widgets import Roofline
from ladder.chapters.explorer import Explorer, choice, slider
from ladder.lab import results

from . import tables as serving

COLOURS = (plots.SKY, plots.ORANGE, plots.GREEN, plots.PINK)


class CacheFitExplorer(Explorer):
    """How many sequences a pool holds: the longest length reserved for each, against pages taken as they grow.

    Lengths are drawn once, log-normal around a typical one and cut at the longest, as chats and documents mix.
    """

    title = "what fits into a KV cache"

    def __init__(
        self, layout="GQA: 32 layers, 8 KV heads (Llama-3-8B)", typical=2048, longest=32768, page_size=64, pool=40e9
    ):
        super().__init__()
        self.pool = pool
        self.layout_ = choice("attention", list(serving.LAYOUTS.items()), serving.LAYOUTS[layout])
        self.typical = choice("typical length", [(plots.tokens(1 << n), 1 << n) for n in range(8, 15)], typical)
        self.longest = choice("longest allowed", [(plots.tokens(1 << n), 1 << n) for n in range(13, 18)], longest)
        self.page_size = choice("page size", (1, 16, 64, 256, 1024, 4096), page_size)
        self.start([self.layout_], [self.typical, self.longest, self.page_size])

    def lengths(self):
        """20,000 lengths, the same on every run."""
        draws = np.random.default_rng(0).lognormal(np.log(self.typical.value), 1.0, 20_000)
        return np.clip(draws.astype(np.int64), 1, self.longest.value)

    def fits(self):
        """{"reserved", "paged": sequences in the pool; "live": share of the paged pool that holds tokens, ...}."""
        layers, width = self.layout_.value
        token, size = 2 * width * layers, self.page_size.value
        lengths = self.lengths()
        slots = int(self.pool // token)
        pages = -(-lengths // size)
        reserved = min(slots // self.longest.value, len(lengths))
        paged = int(np.searchsorted(np.cumsum(pages * size), slots, side="right"))
        return {
            "token": token, "reserved": reserved, "paged": paged,
            "live_reserved": float(lengths[:reserved].sum() / max(1, reserved * self.longest.value)),
            "live_paged": float(lengths[:paged].sum() / max(1, (pages[:paged] * size).sum())),
        }  # fmt: skip

    def draw(self):
        f = self.fits()
        entries = [
            ("reserve the longest", f["reserved"], plots.ORANGE),
            (f"pages of {self.page_size.value}", f["paged"], plots.BLUE),
        ]
        figure = plots.bars(
            [(a, max(b, 1e-9), c) for a, b, c in entries], unit=f"sequences that fit into {plots.size(self.pool)}",
            title="The same pool, two ways to hand it out", highlight=entries[1][0],
        )  # fmt: skip
        text = (
            f"{plots.size(f['token'])} a token. Of the slots taken, tokens lie in {100 * f['live_reserved']:.0f} % "
            f"when the longest is "
            f"reserved and in {100 * f['live_paged']:.1f} % of the pages: {f['reserved']} against {f['paged']} "
            f"sequences."
        )
        return figure, text


class PageExplorer(Explorer):
    """Three sequences that grow, end and share in a pool of eight pages, told by a real PagedKVCache.

    ``EVENTS`` run in order up to the slider; the tables drawn are those that the kernel would read.
    """

    title = "pages"
    EVENTS = (
        ("nothing stored yet", None, 0),
        ("A: prompt of 6 tokens", 0, 6),
        ("B: prompt of 3 tokens", 1, 3),
        ("A: 3 more tokens", 0, 3),
        ("C: prompt of 9 tokens", 2, 9),
        ("B: 2 more tokens", 1, 2),
        ("A ends: its pages are free", 0, None),
        ("B: 4 more tokens", 1, 4),
        ("D shares C's full pages", 3, "share"),
    )
    PAGES = 8

    def __init__(self, page_size=4, event=5):
        super().__init__()
        self.page_size = choice("page size", (2, 3, 4, 8), page_size)
        self.event = slider("event", event, 0, len(self.EVENTS) - 1)
        self.start([self.event, self.page_size])

    def cache(self):
        """(PagedKVCache after the events, what went wrong or None). A
        token's key is its position plus 100 x sequence."""
        from ladder.step06_paged import PagedKVCache

        size = self.page_size.value
        pages = self.PAGES * 4 // size
        cache = PagedKVCache(pages, size, num_kv_heads=1, head_dim=1, max_seqs=4, max_seq_len=16, dtype=torch.float32)
        cache.k_pages.fill_(float("nan"))
        cache.v_pages.fill_(float("nan"))
        for text, seq, tokens in self.EVENTS[1 : self.event.value + 1]:
            if tokens is None:
                cache.free(seq)
            elif tokens == "share":
                full = int(cache.seq_lens[2]) // size
                cache.block_table[seq, :full] = cache.block_table[2, :full]
                cache.seq_lens[seq] = full * size
            else:
                positions = torch.arange(cache.length(seq), cache.length(seq) + tokens, dtype=torch.float32)
                new = (positions + 100 * seq).view(1, -1, 1, 1)
                try:
                    cache.append(new, new, [seq])
                except MemoryError as error:
                    return cache, f"{text}: {error}"
        return cache, None

    def draw(self):
        cache, problem = self.cache()
        size, pages = self.page_size.value, len(cache.k_pages)
        figure, (pool, table) = plots.canvas(3.4, columns=2, width_ratios=[1, 1.15])
        lens = cache.seq_lens.tolist()
        owners = {}
        for seq, length in enumerate(lens):
            for i in range(-(-length // size)):
                owners.setdefault(int(cache.block_table[seq, i]), []).append((seq, i))
        live = 0
        for page in range(pages):
            held = owners.get(page, [])
            for slot in range(size):
                filled = [(s, i) for s, i in held if i * size + slot < lens[s]]
                live += bool(filled)
                style = (
                    dict(facecolor=COLOURS[filled[0][0]])
                    if filled
                    else dict(facecolor=plots.PAPER, hatch="...." if held else None)
                )
                pool.add_patch(Rectangle((slot, page), 1, 0.86, edgecolor=plots.GREY, lw=0.8, **style))
                if filled:
                    s, i = filled[0]
                    pool.text(
                        slot + 0.5, page + 0.43, f"{'ABCD'[s]}{i * size + slot}", ha="center", va="center", fontsize=8.5
                    )
            if len(held) > 1:
                pool.text(
                    size + 0.12, page + 0.43, "shared: " + ", ".join("ABCD"[s] for s, _ in held), va="center",
                    fontsize=8.5,
                )  # fmt: skip
        pool.set(xlim=(-0.05, size * 1.5), ylim=(pages + 0.1, -0.1), xticks=[], yticks=np.arange(pages) + 0.43)
        pool.set_yticklabels(range(pages))
        pool.set_ylabel("page")
        pool.tick_params(length=0)
        pool.spines[["left", "bottom"]].set_visible(False)
        pool.set_title("the pool")
        width = cache.block_table.shape[1]
        for seq in range(4):
            used = -(-lens[seq] // size)
            for i in range(width):
                face = COLOURS[seq] if i < used else plots.PAPER
                table.add_patch(Rectangle((i, seq), 0.94, 0.8, facecolor=face, edgecolor=plots.GREY, lw=0.8))
                table.text(
                    i + 0.47, seq + 0.4, int(cache.block_table[seq, i]), ha="center", va="center", fontsize=9,
                    color=plots.INK if i < used else plots.GREY,
                )  # fmt: skip
            table.text(width + 0.25, seq + 0.4, lens[seq], va="center", fontsize=9.5, fontweight="bold")
        table.text(width + 0.25, -0.25, "seq_lens", fontsize=9)
        table.set(xlim=(-0.1, width * 1.25 + 0.8), ylim=(4.1, -0.6), xticks=[], yticks=np.arange(4) + 0.4)
        table.set_yticklabels("ABCD")
        table.tick_params(length=0)
        table.spines[["left", "bottom"]].set_visible(False)
        table.set_title("block_table: pages in order")
        taken = len(owners) * size
        text = f"<b>{problem or self.EVENTS[self.event.value][0]}.</b>"
        text += (
            f" {cache.free_pages} of {pages} pages free; {taken - live} of {taken} slots taken are empty (dotted): "
            f"less than one page for each sequence."
            if taken
            else f" {pages} pages free."
        )
        return figure, text


class SplitExplorer(Explorer):
    """How many programs a decode step starts, how they fill the
    processors, and which number of splits the rung chooses.

    Numbers come from the rung's own ``choose_num_splits``; "packed" gives one program a KV head, as step 07 does.
    """

    title = "splits"

    def __init__(self, batch=1, context=32768, num_heads=32, num_kv_heads=8, packed=False, splits=0, processors=132):
        super().__init__()
        self.processors = processors
        self.batch = choice("batch", (1, 2, 4, 8, 16, 32, 64, 128), batch)
        self.context = choice("context", [(plots.tokens(1 << n), 1 << n) for n in range(8, 18)], context)
        self.num_heads = choice("query heads", (8, 16, 28, 32, 64, 128), num_heads)
        self.num_kv_heads = choice("KV heads", (1, 4, 8), num_kv_heads)
        self.packed = ipw.Checkbox(
            value=packed, description="one program a KV head", indent=False, layout=ipw.Layout(width="max-content")
        )
        self.splits = slider("splits (0: the rung chooses)", splits, 0, 64)
        self.start([self.batch, self.context, self.num_heads, self.num_kv_heads], [self.splits, self.packed])

    @property
    def slots(self):
        """Programs that run at a time: what the rung assumes for each processor, times the processors."""
        from ladder.step06_paged import choose_num_splits

        return self.processors * inspect.signature(choose_num_splits).parameters["programs_per_processor"].default

    def tasks(self):
        """Programs without splitting."""
        return self.batch.value * (self.num_kv_heads.value if self.packed.value else self.num_heads.value)

    def rule(self):
        """(fewest keys of a split, share of the slots that must be filled) by which the rung chooses."""
        from ladder.step07_dflash1.tiles import MIN_SPLIT_KEYS

        return (MIN_SPLIT_KEYS, 0.95) if self.packed.value else (64, 0.85)

    def chosen(self):
        """What step 06 would choose here, or step 07 with "packed"."""
        from ladder.step06_paged import choose_num_splits

        keys, filled = self.rule()
        return choose_num_splits(self.tasks(), self.context.value, keys, self.processors, filled=filled)

    def filled(self, splits):
        """Share of the program slots of all waves that have a program."""
        programs = splits * self.tasks()
        return programs / (-(-programs // self.slots) * self.slots)

    def draw(self):
        splits = self.splits.value or self.chosen()
        programs = splits * self.tasks()
        first = min(programs, self.slots)
        figure, (chip, curve) = plots.canvas(3.1, columns=2, width_ratios=[1, 1.35])
        for p in range(self.processors):
            running = first // self.processors + (p < first % self.processors)
            style = (
                dict(facecolor=plots.PAPER)
                if not running
                else dict(facecolor=plots.SKY)
                if running == 1
                else dict(facecolor=plots.BLUE, hatch="///")
            )
            chip.add_patch(Rectangle((p % 12, p // 12), 0.86, 0.86, edgecolor=plots.GREY, lw=0.7, **style))
        chip.set(xlim=(-0.2, 12), ylim=(self.processors / 12 + 0.2, -0.2), xticks=[], yticks=[], aspect="equal")
        chip.spines[["left", "bottom"]].set_visible(False)
        busy = min(self.processors, programs)
        chip.set_title(f"first wave: {busy} of {self.processors} busy", fontsize=10.5)
        counts = np.arange(1, 65)
        curve.plot(counts, [100 * self.filled(int(n)) for n in counts], color=plots.GREY, lw=1.3)
        enough = 100 * self.rule()[1]
        curve.axhline(enough, color=plots.ORANGE, lw=1.5, ls="--", label=f"{enough:.0f} %: good enough")
        curve.plot(
            splits, 100 * self.filled(splits), "o", color=plots.RED, ms=9, mec=plots.INK,
            label=f"{splits} split{'s' * (splits != 1)}",
        )  # fmt: skip
        curve.set(xlabel="splits of each sequence", ylabel="% of program slots filled", ylim=(0, 108), xlim=(0, 65))
        curve.grid(True, lw=0.6)
        curve.legend(loc="lower right")
        curve.set_title("all waves", fontsize=10.5)
        waves = -(-programs // self.slots)
        text = (
            f"{self.tasks()} programs without splits; x {splits} = {programs}, in {waves} wave{'s' * (waves != 1)} of "
            f"{self.slots} ({self.slots // self.processors} for each processor). Each program reads about "
            f"{-(-self.context.value // splits):,} keys. Step {'07' if self.packed.value else '06'} itself would "
            f"choose {self.chosen()}."
        )
        return figure, text


class GroupedTileExplorer(Explorer):
    """Rows that an expert product computes: experts x capacity, against tiles that hold a real row.

    Loads fall off like 1 / rank^skew. ``ladder.step07_dflash1.tile_map`` makes the same tiles on the device.
    """

    title = "expert tiles"

    def __init__(self, tokens=4096, experts=64, top_k=6, skew=0.6, block_rows=64):
        super().__init__()
        self.tokens = choice("tokens", (64, 256, 1024, 4096, 16384), tokens)
        self.experts = choice("experts", (8, 16, 64, 128), experts)
        self.top_k = choice("top_k", (1, 2, 6, 8), top_k)
        self.skew = slider("skew", skew, 0.0, 1.5, 0.1)
        self.block_rows = choice("rows of a tile", (16, 32, 64, 128), block_rows)
        self.start([self.tokens, self.experts, self.top_k, self.block_rows], [self.skew])

    def loads(self):
        """Rows of each expert, heaviest first; they sum to tokens x top_k."""
        total, n = self.tokens.value * self.top_k.value, self.experts.value
        share = np.arange(1, n + 1, dtype=np.float64) ** -self.skew.value
        exact = total * share / share.sum()
        counts = np.floor(exact).astype(np.int64)
        counts[: total - counts.sum()] += 1
        return counts

    def rows(self):
        """{"real", "compact", "padded": rows computed, "tiles": compact tiles}."""
        counts, block = self.loads(), self.block_rows.value
        tiles = -(-counts // block)
        padded = -(-counts.max() // block) * block * len(counts)
        return {
            "real": int(counts.sum()), "compact": int(tiles.sum() * block), "padded": int(padded),
            "tiles": int(tiles.sum()),
        }  # fmt: skip

    def draw(self):
        counts, block, r = self.loads(), self.block_rows.value, self.rows()
        figure, axes = plots.canvas(3.3)
        x = np.arange(len(counts))
        compact = -(-counts // block) * block
        axes.bar(
            x, r["padded"] // len(counts), width=1.0, color=plots.PAPER, edgecolor=plots.PALE, hatch="....", lw=0.3,
            label="padding up to the capacity",
        )  # fmt: skip
        axes.bar(
            x, compact, width=1.0, color=plots.ORANGE, edgecolor=plots.INK, lw=0.3, hatch="///",
            label="empty rows of a last tile",
        )  # fmt: skip
        axes.bar(x, counts, width=1.0, color=plots.SKY, edgecolor=plots.INK, lw=0.3, label="real rows")
        axes.set(xlabel="expert, heaviest first", ylabel="rows", xlim=(-0.6, len(counts) - 0.4))
        axes.legend(loc="upper right", framealpha=0.95, frameon=True)
        axes.set_title("rows that are computed")
        text = (
            f"{r['real']:,} real rows. Compact: {r['tiles']} tiles, {r['compact']:,} rows, "
            f"{100 * (1 - r['real'] / r['compact']):.0f} % of them "
            f"empty. Experts x capacity: {r['padded']:,} rows, {100 * (1 - r['real'] / r['padded']):.0f} % empty, "
            f"{r['padded'] / r['compact']:.1f} x the compact work."
        )
        return figure, text


class DecodeRoofline(Roofline):
    """The roofline of decode: FLOPs against the bytes that must be read, for rungs 6 to ``upto`` on recorded problems.

    Args:
        doc: recorded results of rungs 06 and 07. problems: {label: DecodeProblem}.
    """

    title = "roofline of decode"

    def __init__(self, doc, problems, *, upto, peers=False):
        self.problems = problems
        super().__init__(doc, {name: problem.case() for name, problem in problems.items()}, upto=upto, peers=peers)

    def _rows(self, impl=None):
        problem = self.problems[self.case.label]
        entries = [
            row
            for row in results.select(self.doc, impl, **problem.case())
            if "ms" in row and not row["impl"].startswith("sweep")
        ]
        return [
            {**row, "tflops": problem.flops / row["ms"]["median"] / 1e9, "bytes_moved": problem.min_bytes}
            for row in entries
        ]

    def reach(self):
        return {}  # the bytes are already those that must be read once

    def draw(self):
        figure, text = super().draw()
        figure.axes[0].set_xlabel("FLOPs per byte of Q, K, V and output")
        return figure, text
