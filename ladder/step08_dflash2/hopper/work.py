"""Device code of the kernels for sm_90: which work a program does
next, which keys it sees, and how its warps are told."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .barriers import PLACES
from .gluon_compat import record

NEVER = gl.constexpr(1 << 30)


@gluon.jit
def dflash2_find(cu_ptr, slot, num_seqs, BLOCK: gl.constexpr):
    """The sequence that owns tile slot ``slot``, when sequence s owns
    slots cu[s] // BLOCK + s and on (as in step 07)."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = gl.load(cu_ptr + middle).to(gl.int32) // BLOCK + middle <= slot
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle)
    return low


# One tile of queries: its first row in its sequence, batch, head, rows of the sequence, row of q at which they start,
# keys of the sequence (-1: a length that no page holds), row of k at which they start, and part of a split.
WorkItem = record("WorkItem", "first batch head rows first_q keys first_k split")


# The key tiles that a work item visits, as ``dflash2_keys`` returns them.
Tiles = record("Tiles", "low sink high_tile low_tile sink_tile begin end")


# What the 64 rows of a group see: see ``dflash2_extent``. ``keys``: of the sequence.
Sight = record("Sight", "keys dead masked full last_row low_row sink_row")


@gluon.jit
def dflash2_work(t, call, shape: gl.constexpr):
    """Work item number t of a ``Call``.

    Heads go in sections whose K and V fit the L2 cache; in a section
    the last tiles, which see the most keys, come first.
    """
    split = t * 0
    if shape.SPLIT:
        split = t % call.num_splits
        t = t // call.num_splits
    first_q = 0
    first_k = 0
    if shape.RAGGED:
        head = t % call.num_heads
        tile = call.num_m - 1 - t // call.num_heads
        batch = dflash2_find(call.cu_q_ptr, tile, call.num_seqs, shape.BLOCK_M)
        first_q = gl.load(call.cu_q_ptr + batch).to(gl.int32)
        rows = gl.load(call.cu_q_ptr + batch + 1).to(gl.int32) - first_q
        m = tile - (first_q // shape.BLOCK_M + batch)
        if shape.PAGE > 0:
            keys = gl.load(call.seq_lens_ptr + batch).to(gl.int32)
            keys = gl.where((keys < 0) | (keys > call.seqlen_k), -1, keys)  # a length that no page holds
        else:
            first_k = gl.load(call.cu_k_ptr + batch).to(gl.int32)
            keys = gl.load(call.cu_k_ptr + batch + 1).to(gl.int32) - first_k
    else:
        all_heads = call.num_seqs * call.num_heads
        first_head = t // (call.section * call.num_m) * call.section
        width = gl.minimum(call.section, all_heads - first_head)
        t -= first_head * call.num_m
        bh = first_head + t % width
        m = t // width
        if shape.HAS_RIGHT:  # the heaviest tiles first
            m = call.num_m - 1 - m
        batch = bh // call.num_heads
        head = bh % call.num_heads
        rows = call.seqlen_q
        keys = call.seqlen_k
    return WorkItem(m * shape.BLOCK_M, batch, head, rows, first_q, keys, first_k, split)


@gluon.jit
def dflash2_range(table_ptr, r, keys):
    """First position of range r, and the one after its last; negative ones count from the end of the keys."""
    start = gl.load(table_ptr + 4 * r)
    end = gl.load(table_ptr + 4 * r + 1)
    return gl.where(start < 0, start + keys, start), gl.where(end < 0, end + keys, end)


@gluon.jit
def dflash2_keys(
    first, rows, keys, right, table_ptr, split, num_splits,
    N: gl.constexpr, BLOCK_M: gl.constexpr, HAS_RIGHT: gl.constexpr, NUM_RANGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """The key tiles that rows first .. first + BLOCK_M see.

    Returns (low, sink, high_tile, low_tile, sink_tile, begin, end): keys below ``low`` and not below ``sink`` are seen
    by no row; tiles run high_tile - 1 down to low_tile, then sink_tile - 1 down to 0; this split does the numbers begin
    .. end of that list.
    """
    past = keys - rows
    last = gl.minimum(first + BLOCK_M, rows) - 1
    stop = keys
    if HAS_RIGHT:
        stop = gl.maximum(0, gl.minimum(keys, last + past + right + 1))
    low = 0
    sink = 0
    if NUM_RANGES > 0:
        p0 = first + past
        p1 = last + past
        low = NEVER
        covered = p0  # rows below this position lie in some range
        for again in gl.static_range(NUM_RANGES):
            for r in gl.static_range(NUM_RANGES):
                start, end = dflash2_range(table_ptr, r, keys)
                covered = gl.where((start <= covered) & (end > covered), end, covered)
                if again == 0:
                    a = gl.maximum(start, p0)
                    for earlier in gl.static_range(r):  # of two ranges that hold a position the earlier counts
                        begun, done = dflash2_range(table_ptr, earlier, keys)
                        a = gl.where((begun <= a) & (a < done), done, a)
                    here = a <= gl.minimum(end - 1, p1)
                    low = gl.where(here, gl.minimum(low, a - gl.load(table_ptr + 4 * r + 3)), low)
                    sink = gl.where(here, gl.maximum(sink, gl.load(table_ptr + 4 * r + 2)), sink)
        low = gl.where(covered <= p1, 0, gl.maximum(low, 0))
    high_tile = gl.cdiv(stop, N)
    low_tile = gl.minimum(low // N, high_tile)
    sink_tile = gl.minimum(gl.cdiv(gl.minimum(sink, stop), N), low_tile)
    number = high_tile - low_tile + sink_tile
    begin = 0
    end = number
    if SPLIT:
        begin = number * split // num_splits
        end = number * (split + 1) // num_splits
    return low, sink, high_tile, low_tile, sink_tile, begin, end


@gluon.jit
def dflash2_tiles(item, keys, call, shape: gl.constexpr):
    """The ``Tiles`` of a work item; none of one whose rows all lie beyond its sequence."""
    low, sink, high_tile, low_tile, sink_tile, begin, end = dflash2_keys(
        item.first, item.rows, keys, call.right, call.table_ptr, item.split, call.num_splits,
        shape.N, shape.BLOCK_M, shape.HAS_RIGHT, shape.NUM_RANGES, shape.SPLIT,
    )  # fmt: skip
    if item.first >= item.rows:
        end = begin
    return Tiles(low, sink, high_tile, low_tile, sink_tile, begin, end)


@gluon.jit
def dflash2_tile_number(i, tiles, shape: gl.constexpr):
    """The tile that stands at place i of the list of tiles."""
    if shape.NUM_RANGES > 0:
        near = tiles.high_tile - tiles.low_tile
        return gl.where(i < near, tiles.high_tile - 1 - i, tiles.sink_tile - 1 - (i - near))
    else:
        return tiles.high_tile - 1 - i


@gluon.jit
def dflash2_next(t, counter_ptr, DYNAMIC: gl.constexpr, num_work):
    """The work item after t: a fixed stride, or the next number of a counter that all programs share."""
    if DYNAMIC:
        ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
        if ticket == num_work - 1:  # every program draws one number too many: the last draw leaves the counter at zero
            gl.store(counter_ptr, 0)
        return ticket + gl.num_programs(0)
    else:
        return t + gl.num_programs(0)


@gluon.jit
def dflash2_publish(memory, turn, item):
    """Tell the consumers their next work item, one field a word: they
    would spend the divisions that find it between tiles."""
    place = turn % PLACES
    mbarrier.wait(memory.work_free.index(place), ((turn // PLACES) & 1) ^ 1)
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    memory.work.index(8 * place + 0).store(zero + item.first)
    memory.work.index(8 * place + 1).store(zero + item.batch)
    memory.work.index(8 * place + 2).store(zero + item.head)
    memory.work.index(8 * place + 3).store(zero + item.rows)
    memory.work.index(8 * place + 4).store(zero + item.first_q)
    memory.work.index(8 * place + 5).store(zero + item.keys)
    memory.work.index(8 * place + 6).store(zero + item.first_k)
    memory.work.index(8 * place + 7).store(zero + item.split)
    mbarrier.arrive(memory.work_full.index(place))


@gluon.jit
def dflash2_field(work_smem, place, I: gl.constexpr):
    return gl.max(work_smem.index(8 * place + I).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def dflash2_receive(memory, turn):
    """What ``dflash2_publish`` told of the next work item that its tiles depend on: (first row, rows, keys).

    first is -1 when there is no more, keys is -1 when no page holds the length. The other fields are read where the
    tile is stored: until then they would only sit in registers that the accumulators want.
    """
    place = turn % PLACES
    mbarrier.wait(memory.work_full.index(place), (turn // PLACES) & 1)
    return (
        dflash2_field(memory.work, place, 0),
        dflash2_field(memory.work, place, 3),
        dflash2_field(memory.work, place, 5),
    )


@gluon.jit
def dflash2_extent(C: gl.constexpr, item, keys, call, ROW: gl.constexpr, shape: gl.constexpr):
    """The ``Tiles`` of a work item and what group C's rows see of them, a ``Sight``.

    The first ``dead`` tiles lie right of all rows; those before ``masked`` and from ``full`` on need a mask, whose
    bounds a row are ``last_row``, ``low_row`` and ``sink_row``.
    """
    NUM_RANGES: gl.constexpr = shape.NUM_RANGES
    tiles = dflash2_tiles(item, keys, call, shape)
    past = keys - item.rows
    mine = item.first + 64 * C
    row = mine + gl.arange(0, 64, ROW)
    whole = keys  # keys that every row of this group sees on the right
    seen = tiles.high_tile  # tiles that some row does
    if shape.HAS_RIGHT:
        whole = gl.maximum(0, gl.minimum(keys, mine + past + call.right + 1))
        seen = gl.cdiv(gl.maximum(0, gl.minimum(keys, mine + 63 + past + call.right + 1)), shape.N)
    dead = tiles.begin
    if NUM_RANGES == 0:
        dead = gl.maximum(tiles.begin, gl.minimum(tiles.high_tile - seen, tiles.end))
    masked = gl.minimum(gl.maximum(tiles.high_tile - whole // shape.N, dead + 1), tiles.end)
    full = tiles.end
    last_row = keys - 1 + row * 0
    if shape.HAS_RIGHT:
        last_row = gl.minimum(last_row, row + past + call.right)
    low_row = row * 0
    sink_row = row * 0
    if NUM_RANGES > 0:
        position = row + past
        left = 0
        for back in gl.static_range(NUM_RANGES):  # backwards: of two ranges that overlap the earlier counts
            r = NUM_RANGES - 1 - back
            start, stop = dflash2_range(call.table_ptr, r, keys)
            reach = gl.load(call.table_ptr + 4 * r + 3)
            here = (position >= start) & (position < stop)
            low_row = gl.where(here, gl.maximum(0, position - reach), low_row)
            sink_row = gl.where(here, gl.load(call.table_ptr + 4 * r + 2), sink_row)
            high_position = gl.minimum(stop - 1, mine + past + 63)
            some = gl.maximum(start, mine + past) <= high_position
            left = gl.where(some, gl.maximum(left, high_position - reach), left)
        full = gl.minimum(tiles.end, gl.maximum(masked, tiles.high_tile - gl.cdiv(left, shape.N)))
    return tiles, Sight(keys, dead, masked, full, last_row, low_row, sink_row)
