"""RangeWindows: which keys each range of queries sees: the first few (sinks), the newest few (a window), or all."""

from typing import NamedTuple

import torch

from ladder.contract import check_attention, check_flag, check_integer, outside_autocast

RUNG = "step08_dflash2"
UNLIMITED = 1 << 30  # in the table: a stop or a left reach of None; longer than any sequence
MAX_RANGES = 8


class Range(NamedTuple):
    """Queries at positions start <= p < stop see the first ``sink`` keys and the ``window`` newest up to themselves.

    start, stop: positions in tokens, negative ones counted from the end of the sequence's keys, as in slices; a stop of
        None is the end. sink: first keys that stay visible. window: a window of W is the keys p - W + 1 .. p, the
        query's own included; None: all.
    """

    start: int
    stop: int | None
    sink: int = 0
    window: int | None = None


class VisitedTiles(NamedTuple):
    """What the kernel's loops visit: ``count`` tiles, and ``tiles``, a tuple (row tile, key tile, masked) for each.

    masked: an edge crosses the tile, so that it runs the code with a mask.
    """

    count: int
    tiles: list


class RangeWindows:
    """Which key ranges each query range sees. Positions in no range see everything.

    Query i of a sequence stands at position p = i + Sk - Sq. Within a range it sees key j when j < sink or
    p - window < j, and in either case only keys at or before p under a causal mask. Without one the window limits the
    left side alone.

    Immutable, hashable, equal when the ranges are. In a sequence so short that a range counted from its end reaches
    into one counted from its start, the earlier one counts.

    Args:
        ranges: up to 8 ``Range``, or tuples of their fields, in any order.

    Raises:
        TypeError, ValueError: a field that is no integer or out of
        bounds, an empty range, ranges that overlap, too many.

    Source: sliding windows are section 3.1 of Beltagy et al., "Longformer"; first tokens kept as sinks are section 3 of
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks".
    """

    __slots__ = ("_flat", "ranges")

    def __init__(self, ranges):
        if isinstance(ranges, Range) or not hasattr(ranges, "__iter__"):
            raise TypeError(f"{RUNG}: ranges is {ranges!r}; want a list of Range")
        checked = sorted((_check_range(i, r) for i, r in enumerate(ranges)), key=lambda r: _in_a_long_sequence(r.start))
        if len(checked) > MAX_RANGES:
            raise ValueError(f"{RUNG}: ranges has {len(checked)} entries; want at most {MAX_RANGES}")
        for a, b in zip(checked, checked[1:]):
            if _in_a_long_sequence(a.stop) > _in_a_long_sequence(b.start):
                raise ValueError(
                    f"{RUNG}: ranges {tuple(a)} and {tuple(b)} overlap; want each position in one range at most"
                )
        object.__setattr__(self, "ranges", tuple(checked))
        object.__setattr__(self, "_flat", tuple(
            n for r in checked for n in (
                r.start, UNLIMITED if r.stop is None else r.stop, r.sink,
                UNLIMITED if r.window is None else r.window - 1
            )
        ))  # fmt: skip

    @classmethod
    def sink_window(cls, sink, window):
        """Every query sees the first ``sink`` keys and the ``window`` newest: StreamingLLM's mask."""
        return cls([Range(0, None, sink, window)])

    @classmethod
    def sliding(cls, window):
        """Every query sees the ``window`` newest keys, its own included: Mistral's mask."""
        return cls([Range(0, None, 0, window)])

    @classmethod
    def prefix_local(cls, prefix, sink, window):
        """Positions before ``prefix`` see ``sink`` and ``window`` keys, the tail everything.

        A negative ``prefix`` is counted from the end: -64 gives the newest 64 tokens full attention.
        """
        prefix = _check_position("prefix", prefix)
        return cls([] if prefix == 0 else [Range(0, prefix, sink, window)])

    def __setattr__(self, name, value):
        raise AttributeError(f"{RUNG}: RangeWindows is immutable; make a new one")

    def __reduce__(self):
        return type(self), (self.ranges,)

    def __eq__(self, other):
        return isinstance(other, RangeWindows) and self.ranges == other.ranges

    def __hash__(self):
        return hash(self.ranges)

    def __repr__(self):
        return f"RangeWindows([{', '.join(repr(r) for r in self.ranges)}])"

    def __len__(self):
        return len(self.ranges)

    @property
    def flat(self):
        """The rows of ``table`` one after another, as a tuple of integers: what a custom operator can be given."""
        return self._flat

    @classmethod
    def from_flat(cls, flat):
        """The inverse of ``flat``; trusts its numbers."""
        windows = cls.__new__(cls)
        rows = [flat[i : i + 4] for i in range(0, len(flat), 4)]
        object.__setattr__(windows, "_flat", tuple(flat))
        object.__setattr__(windows, "ranges", tuple(
            Range(start, None if stop == UNLIMITED else stop, sink, None if left == UNLIMITED else left + 1)
            for start, stop, sink, left in rows
        ))  # fmt: skip
        return windows

    def table(self, device):
        """(num_ranges, 4) int32 on ``device``: start, stop, sink, left = window - 1; None is 2**30.

        Negative positions stay as they are: the kernel adds the length of its sequence. Made once for each device.
        """
        return _table(self._flat, torch.device(device))

    def limits(self, position, seqlen_k):
        """(sink, left) of queries at ``position``: they see keys below sink, and keys from position - left on.

        position: integer tensor of any shape. seqlen_k: an int, or a tensor that broadcasts with it.
        """
        sink, left = torch.zeros_like(position), torch.full_like(position, UNLIMITED)
        for i in range(len(self._flat) - 4, -1, -4):  # backwards, so that the earlier of two counts
            start, stop, some_sink, some_left = self._flat[i : i + 4]
            inside = (position >= (start if start >= 0 else start + seqlen_k)) & (
                position < (stop if stop >= 0 else stop + seqlen_k)
            )
            sink, left = torch.where(inside, some_sink, sink), torch.where(inside, some_left, left)
        return sink, left

    def visible(self, Sq, Sk, causal=False, right=None, device="cpu"):
        """The mask as a bool tensor (Sq, Sk): True where the query
        sees the key. The definition, not the way to compute.

        right: keys after its own position that a query sees; None is 0 under a causal mask and all without one.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted.
        """
        Sq, Sk, right = _check_sizes(Sq, Sk, causal, right)
        position = torch.arange(Sq, device=device)[:, None] + (Sk - Sq)
        key = torch.arange(Sk, device=device)[None, :]
        sink, left = self.limits(position, Sk)
        seen = (key >= position - left) | (key < sink)
        return seen if right is None else seen & (key <= position + right)

    def visited_tiles(self, Sq, Sk, causal, block_m, block_n, right=None):
        """The tiles that the kernel loads and computes: ``VisitedTiles``, in the order of its loops.

        Tiles that no edge crosses come first, then those that need a mask; tiles outside come not at all.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted.
        """
        Sq, Sk, right = _check_sizes(Sq, Sk, causal, right)
        block_m, block_n = check_integer(RUNG, "block_m", block_m, 1), check_integer(RUNG, "block_n", block_n, 1)
        position = torch.arange(Sq) + (Sk - Sq)
        sink, left = self.limits(position, Sk)
        low = torch.where(position - left <= sink, 0, position - left)  # sinks that meet the window: all from the start
        tiles = []
        for tile in range(-(-Sq // block_m)):
            rows = slice(tile * block_m, (tile + 1) * block_m)
            pos, some_low, some_sink = position[rows], low[rows], sink[rows]
            end = Sk if right is None else max(0, min(Sk, int(pos[-1]) + right + 1))
            whole = Sk if right is None else max(0, min(Sk, int(pos[0]) + right + 1))
            last = -(-end // block_n)
            first = min(last, max(0, int(some_low.min())) // block_n)  # of the window
            body = max(first, min(last, -(-max(0, int(some_low.max())) // block_n)))  # the first that every row sees
            body_end = max(body, whole // block_n)
            sink_end = min(first, -(-min(end, int(some_sink.max())) // block_n))
            sink_whole = min(sink_end, min(whole, int(some_sink.min())) // block_n)
            tiles += [(tile, n, False) for n in (*range(sink_whole), *range(body, body_end))]
            tiles += [
                (tile, n, True) for n in (*range(sink_whole, sink_end), *range(first, body), *range(body_end, last))
            ]
        return VisitedTiles(len(tiles), tiles)

    @outside_autocast
    def attention_mass(self, q, k, causal=True, scale=None, rows=64, seed=0, per_head=False):
        """How much probability these windows drop: the mean over
        sampled rows of what full attention gives to hidden keys.

        Args:
            q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). causal, scale: as in attention.
            rows: how many query positions to sample, the same for every head; over keys the sum is exact.
            seed: of the sample. per_head: return one number a head.

        Returns:
            A float in 0 .. 1, 0 when nothing is lost; with per_head a float32 tensor (B, Hq).

        Raises:
            TypeError, ValueError: naming the argument, what came and what is wanted.
        """
        scale = check_attention(RUNG, q, k, k, causal=causal, scale=scale, any_heads=True)
        (_, num_heads, Sq, _), (_, num_kv_heads, Sk, _) = q.shape, k.shape
        rows, seed = check_integer(RUNG, "rows", rows, 1), check_integer(RUNG, "seed", seed, 0)
        check_flag(RUNG, "per_head", per_head)
        chosen = torch.randperm(Sq, generator=torch.Generator().manual_seed(seed))[:rows].to(q.device)
        if not chosen.numel() or not Sk or not num_heads:
            return torch.zeros(q.shape[:2], device=q.device) if per_head else 0.0
        position = chosen[:, None] + (Sk - Sq)
        key = torch.arange(Sk, device=q.device)[None, :]
        sink, left = self.limits(position, Sk)
        hidden = (key < position - left) & (key >= sink)
        grouped = q[:, :, chosen].float().unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        dropped = []
        for row in range(len(chosen)):  # a row of scores at a time: 128k keys of many heads are large enough
            scores = (grouped[:, :, :, row] @ k.float().transpose(2, 3)) * scale
            if causal:
                scores = scores.masked_fill(key > position[row], float("-inf"))
            probs = torch.nan_to_num(scores.softmax(dim=-1))  # a row that sees no key drops nothing
            dropped.append(probs.masked_fill(~hidden[row], 0.0).sum(dim=-1).flatten(1))
        mass = torch.stack(dropped).mean(dim=0)
        return mass if per_head else float(mass.mean())


def _check_sizes(Sq, Sk, causal, right):
    """(Sq, Sk, right), of which right is 0 under a causal mask."""
    check_flag(RUNG, "causal", causal)
    right = None if right is None else check_integer(RUNG, "right", right, 0, optional=True)
    return check_integer(RUNG, "Sq", Sq, 0), check_integer(RUNG, "Sk", Sk, 0), 0 if causal and right is None else right


def _check_position(name, value):
    return check_integer(RUNG, name, value, -UNLIMITED + 1)


def _check_range(index, given):
    try:
        start, stop, sink, window = Range(*given)
    except TypeError:
        raise TypeError(f"{RUNG}: ranges[{index}] is {given!r}; want Range(start, stop, sink, window)") from None
    name = f"ranges[{index}]"
    start = _check_position(f"{name}.start", start)
    stop = None if stop is None else _check_position(f"{name}.stop", stop)
    sink = check_integer(RUNG, f"{name}.sink", sink, 0)
    window = None if window is None else check_integer(RUNG, f"{name}.window", window, 1, optional=True)
    if _in_a_long_sequence(start) >= _in_a_long_sequence(stop):
        raise ValueError(f"{RUNG}: {name} is {start} .. {stop}, which holds no position; want start below stop")
    for field, value in (("start", start), ("stop", stop), ("sink", sink), ("window", window)):
        if value is not None and value >= UNLIMITED:
            raise ValueError(f"{RUNG}: {name}.{field} is {value}; want less than 2**30")
    return Range(start, stop, sink, window)


def _in_a_long_sequence(position):
    """Where a position lies in a sequence longer than any number here."""
    return 1 << 41 if position is None else position if position >= 0 else (1 << 40) + position


_TABLES = {}  # (numbers, device) -> table; none is ever dropped, for a captured graph may hold its address


def _table(flat, device):
    table = _TABLES.get((flat, device))
    if table is not None:
        return table
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # A copy from the host cannot be captured, and what a capture writes does not exist until its replay: a table of
        # this graph's own, written by fills.
        table = torch.empty(len(flat), dtype=torch.int32, device=device)
        for i, value in enumerate(flat):
            table[i].fill_(value)
        return table.view(-1, 4)
    return _TABLES.setdefault((flat, device), torch.tensor(flat, dtype=torch.int32, device=device).view(-1, 4))
