"""Device code of MLA's latent decode for sm_90 with many query rows,
in Gluon: 64 rows on tiles of 64 latent keys of 576 columns.

A float32 accumulator of 64 x 512 fills half the register file, so two warp groups hold 256 value
columns each; a producer warp brings the tiles, which serve as keys (576 columns) and as values
(512) both. Tiles go in pairs: the first group makes the scores and probabilities of the even
tiles, the second of the odd ones, and each multiplies both with its columns. So the exponentials
of one tile run under the other tile's scores, or under the products of the tile before:

    tensor cores   even scores | odd scores  | even tile: left, right | odd tile: right, left | even scores ..
    first group    (wait)      | even maxima, exponentials            | (wait)
    second group   (wait)                    | odd maxima, exponentials

Probabilities change hands through shared memory, in the place of the tile's last 64 key columns, which only its scores
read: two tiles and Q leave no room for more. The running maxima go
with them; a group finds the rescale of the other by itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import FREE, PLACES, dflash2_arrive, dflash2_arrive_if, dflash2_sync
from .decode_kernel import (
    Lengths,
    dflash2_decode_cut,
    dflash2_decode_find,
    dflash2_decode_pages,
    dflash2_decode_tell,
    dflash2_decode_tiles,
)
from .gluon_compat import async_load, record
from .merge_kernel import dflash2_mla_merge
from .prefill_kernel import dflash2_clean, dflash2_wide
from .softmax import dflash2_pack, dflash2_unpack
from .work import dflash2_field

STAGES = gl.constexpr(2)
LEFT = gl.constexpr(0)  # pieces of a tile, barriers of their own each: columns 0 .. 256, 256 .. 512, 512 .. 576
RIGHT = gl.constexpr(2)
LAST = gl.constexpr(4)
# hardware barriers behind those of the pieces: probabilities of the even tile are there, of the odd one
EVEN_P = gl.constexpr(11)
ODD_P = gl.constexpr(12)
ODD_TURN = gl.constexpr(13)  # the even scores are all but done; the odd ones
EVEN_TURN = gl.constexpr(15)
SUMS = gl.constexpr(14)
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)  # value columns of a group
ROPE = gl.constexpr(64)


# What one launch was given, the same for all its programs.
MlaCall = record("MlaCall", """
    out_ptr part_out_ptr part_lse_ptr meta_ptr lse_ptr sinks_ptr arrivals_ptr stride_ob stride_om stride_oh
    num_heads q_len right row_tiles capacity num_slots scale_log2
""")


# Shared memory of a program: Q and two tiles in three pieces each, what the groups tell each other, mbarriers, work
# items.
MlaMemory = record("MlaMemory", """
    q1 q2 q3 k1 k2 k3 even_max odd_max even_sum odd_sum q_full q_free k_full work work_full work_free
""")


@gluon.jit
def dflash2_mla_copy(
    desc, smem, full, slot, pages, tile, COLUMN: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr
):
    """Bring a piece of a tile, a copy for each page."""
    mbarrier.expect(full, KEYS * WIDTH * 2)
    if PAGE >= KEYS:
        async_load(desc, [pages, tile * KEYS % PAGE, COLUMN], full, smem.index(slot))
    else:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for part in gl.static_range(KEYS // PAGE):
            page = gl.sum(gl.where(lane == part, pages, 0), 0)
            async_load(desc, [page, 0, COLUMN], full, smem.index(slot).slice(part * PAGE, PAGE, 1))


@gluon.jit
def dflash2_mla_await(anchor, use, ids: gl.constexpr):
    """Wait until a piece has been given back; in its first use it is free. Its groups give it back after every use."""
    if use > 0:
        dflash2_sync(anchor, ids, 160)


@gluon.jit
def dflash2_mla_bring(
    k1_desc, k3_desc, memory, anchor, use, pages, tile, SLOT: gl.constexpr, PAGE: gl.constexpr
):
    """Bring a tile, piece by piece in the order in which they become free, and in which its scores want them."""
    if SLOT == 0:
        dflash2_mla_await(anchor, use, FREE + LEFT)
        dflash2_mla_copy(k1_desc, memory.k1, memory.k_full.index(LEFT), 0, pages, tile, 0, HALF, PAGE)
    dflash2_mla_await(anchor, use, FREE + RIGHT + SLOT)
    dflash2_mla_copy(k1_desc, memory.k2, memory.k_full.index(RIGHT + SLOT), SLOT, pages, tile, HALF, HALF, PAGE)
    if SLOT == 1:
        dflash2_mla_await(anchor, use, FREE + LEFT + 1)
        dflash2_mla_copy(k1_desc, memory.k1, memory.k_full.index(LEFT + 1), 1, pages, tile, 0, HALF, PAGE)
    dflash2_mla_await(anchor, use, FREE + LAST + SLOT)
    dflash2_mla_copy(k3_desc, memory.k3, memory.k_full.index(LAST + SLOT), SLOT, pages, tile, 512, ROPE, PAGE)


@gluon.jit
def dflash2_mla_query(q1_desc, q3_desc, memory, turn, seq, first_row):
    """Bring the Q of a work item into the place that both groups have given back."""
    mbarrier.wait(memory.q_free, (turn & 1) ^ 1)
    mbarrier.expect(memory.q_full, ROWS * 576 * 2)
    async_load(q1_desc, [seq, first_row, 0], memory.q_full, memory.q1.index(0))
    async_load(q1_desc, [seq, first_row, 256], memory.q_full, memory.q2.index(0))
    async_load(q3_desc, [seq, first_row, 512], memory.q_full, memory.q3.index(0))


@gluon.jit
def dflash2_mla_produce(
    q1_desc, q3_desc, k1_desc, k3_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, row_tiles,
    PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """Draw works, tell both groups of them, and bring their Q and
    tiles; those of a work come while the last one is ended."""
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    chunk, slots, each = dflash2_decode_cut(lengths, FOUND, BLOCK_B)
    num_work = slots * row_tiles  # tiles that share keys run side by side
    t = gl.program_id(0)
    turn = 0
    evens = 0  # uses of the first slot, and of the second
    odds = 0
    while t < num_work:
        seq, split, splits, length = dflash2_decode_find(t // row_tiles, chunk, each, lengths, FOUND, BLOCK_B)
        if split < splits:
            dflash2_decode_tell(memory, turn, t, seq, split, splits, length)
            first_row = t % row_tiles * ROWS
            pages = pages_ptr + seq.to(gl.int64) * stride_pages
            tiles = dflash2_decode_tiles(length, lengths.capacity)
            keys = gl.where(tiles > 0, length, 0)  # no page is looked up for a length that none holds
            first = tiles * split // splits
            last = tiles * (split + 1) // splits
            if turn == 0:
                dflash2_mla_query(q1_desc, q3_desc, memory, turn, seq, first_row)
            # looked up a tile ahead: a copy does not wait for it
            ahead = dflash2_decode_pages(pages, first, keys, PAGE)
            for tile in range(first, last, 2):
                mine = ahead
                ahead = dflash2_decode_pages(pages, tile + 1, keys, PAGE)
                dflash2_mla_bring(k1_desc, k3_desc, memory, anchor, evens, mine, tile, 0, PAGE)
                evens += 1
                if (turn > 0) & (tile == first):  # it is free later than the first tile's place
                    dflash2_mla_query(q1_desc, q3_desc, memory, turn, seq, first_row)
                if tile + 1 < last:
                    mine = ahead
                    ahead = dflash2_decode_pages(pages, tile + 2, keys, PAGE)
                    dflash2_mla_bring(k1_desc, k3_desc, memory, anchor, odds, mine, tile + 1, 1, PAGE)
                    odds += 1
            if (turn > 0) & (first == last):  # groups wait for Q in works of no tile too
                dflash2_mla_query(q1_desc, q3_desc, memory, turn, seq, first_row)
            turn += 1
        if num_work > gl.num_programs(0):
            ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
            # every program draws one number too many: the last draw leaves the counter at zero
            if ticket == num_work - 1:
                gl.store(counter_ptr, 0)
            t = ticket + gl.num_programs(0)
        else:  # one program for each work needs no counter
            t = num_work
    dflash2_decode_tell(memory, turn, t, -1, 0, 1, 0)


@gluon.jit
def dflash2_mla_scores(memory, tile, phase, SLOT: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores of a tile under way, in three groups of products: each part of the 576 columns as soon as it is there."""
    zero = tile >> 30  # the compiler does not know: it would find all addresses before the loop, and spill them
    left = memory.k1.index(SLOT + zero).reshape([KEYS, HALF]).permute((1, 0))
    right = memory.k2.index(SLOT + zero).reshape([KEYS, HALF]).permute((1, 0))
    q1 = memory.q1.index(zero).reshape([ROWS, HALF])
    q2 = memory.q2.index(zero).reshape([ROWS, HALF])
    q3 = memory.q3.index(zero).reshape([ROWS, ROPE])
    s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    if SLOT == 0:
        mbarrier.wait(memory.k_full.index(LEFT), phase)
        s = warpgroup_mma(q1, left, s, use_acc=False, is_async=True)
        mbarrier.wait(memory.k_full.index(RIGHT), phase)
        s = warpgroup_mma(q2, right, s, is_async=True)
    else:  # its right piece is free first
        mbarrier.wait(memory.k_full.index(RIGHT + 1), phase)
        s = warpgroup_mma(q2, right, s, use_acc=False, is_async=True)
        mbarrier.wait(memory.k_full.index(LEFT + 1), phase)
        s = warpgroup_mma(q1, left, s, is_async=True)
    mbarrier.wait(memory.k_full.index(LAST + SLOT), phase)
    return warpgroup_mma(q3, memory.k3.index(SLOT + zero).reshape([KEYS, ROPE]).permute((1, 0)), s, is_async=True)


@gluon.jit
def dflash2_mla_mask(s, tile, last_key, low_key, NEGATIVE: gl.constexpr):
    """Hide the keys behind the last one of a row. No tile that the first row sees whole spends instructions on it."""
    if NEGATIVE:
        s = -s
    if tile * KEYS + KEYS - 1 > low_key:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))[None, :]
        s = gl.where(column <= (last_key - tile * KEYS)[:, None], s, float("-inf"))
    return s


@gluon.jit
def dflash2_mla_softmax(s, row_max, row_sum, scale_log2):
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def dflash2_mla_tell(p, row_max, k3_smem, max_smem, anchor, SLOT: gl.constexpr, IDS: gl.constexpr, DT: gl.constexpr):
    """Hand probabilities and maxima to the other group, in the place of the tile's last key columns."""
    k3_smem.index(SLOT).reshape([KEYS, ROPE]).store(p.to(DT))
    max_smem.store(row_max)
    fence_async_shared()
    dflash2_arrive(anchor, IDS, 256)


@gluon.jit
def dflash2_mla_hear(max_smem, row_max, row_sum, anchor, scale_log2, IDS: gl.constexpr):
    """What ``dflash2_mla_tell`` told: the new maxima and the rescale that they ask for."""
    dflash2_sync(anchor, IDS, 256)
    new_max = max_smem.load(row_max.type.layout)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    return new_max, row_sum * alpha, alpha


@gluon.jit
def dflash2_mla_other(acc, alpha, k3_smem, v_smem, SLOT: gl.constexpr):
    """The other group's probabilities times this group's columns of its tile: under way."""
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return warpgroup_mma(
        k3_smem.index(SLOT).reshape([ROWS, KEYS]), v_smem.index(SLOT).reshape([KEYS, HALF]), acc, is_async=True
    )


@gluon.jit
def dflash2_mla_own(acc, packed, v_smem, SLOT: gl.constexpr, DT: gl.constexpr):
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(
        dflash2_unpack(packed, KEYS, DT, P_LAYOUT), v_smem.index(SLOT).reshape([KEYS, HALF]), acc, is_async=True
    )


@gluon.jit
def dflash2_mla_factor(
    row_max, row_sum, my_smem, other_smem, anchor, row, call, splits, beyond, HAS_SINKS: gl.constexpr
):
    """(factor of the output, log-sum-exp in log2) of all keys; each group has summed up its own tiles."""
    my_smem.store(row_sum)
    dflash2_sync(anchor, SUMS, 256)
    row_sum += other_smem.load(row_sum.type.layout)
    row_max = row_max * call.scale_log2
    norm = gl.full([ROWS], 1.0, gl.float32, row_sum.type.layout)
    if HAS_SINKS:
        if splits == 1:  # else the merge counts it
            logit = gl.load(call.sinks_ptr + row % call.num_heads).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(row_max, logit)
            safe = gl.where(top == float("-inf"), 0.0, top)
            norm = gl.exp2(row_max - safe)
            row_sum = row_sum * norm + gl.exp2(logit - safe)
            row_max = top
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    # a length that no page holds: loud, not wrong
    return gl.where(beyond, float("nan"), norm / row_sum), row_max + gl.log2(row_sum)


@gluon.jit
def dflash2_mla_store(acc, COLUMN: gl.constexpr, call, seq, part, splits, first_row, rows, WIDE: gl.constexpr):
    """WIDE: rows of the output start at 16 bytes, so that a lane stores eight columns at once."""
    if splits == 1:
        LAYOUT: gl.constexpr = dflash2_wide(HALF) if WIDE else acc.type.layout
        row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        column = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
        place = (
            seq.to(gl.int64) * call.stride_ob
            + (row // call.num_heads).to(gl.int64) * call.stride_om
            + (row % call.num_heads).to(gl.int64) * call.stride_oh
        )
        if WIDE:
            place = gl.multiple_of(place, 8)
        acc_out = gl.convert_layout(acc.to(call.out_ptr.dtype.element_ty), LAYOUT)
        gl.store(call.out_ptr + place[:, None] + column[None, :], acc_out, mask=(row < rows)[:, None])
    else:
        part_row = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
        part_column = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, acc.type.layout))
        part_place = (part * ROWS + part_row) * 512
        gl.store(
            call.part_out_ptr + part_place[:, None] + part_column[None, :],
            acc,
            mask=(first_row + part_row < rows)[:, None],
        )


@gluon.jit
def dflash2_mla_even(
    memory, call, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr,
    MERGES: gl.constexpr, WIDE: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the even tiles of a work, and value columns 0 .. 256."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    rows = call.q_len * call.num_heads
    turn = 0
    evens = 0  # uses of the first slot, and of the second, by the works before
    odds = 0
    mbarrier.wait(memory.work_full.index(0), 0)
    seq = dflash2_field(memory.work, 0, 1)
    while seq >= 0:
        told = turn % PLACES
        t = dflash2_field(memory.work, told, 0)
        split = dflash2_field(memory.work, told, 2)
        splits = dflash2_field(memory.work, told, 3)
        length = dflash2_field(memory.work, told, 4)
        beyond = (length < 0) | (length > call.capacity)
        length = gl.where(beyond, 0, length)
        tiles = dflash2_decode_tiles(length, call.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        first_row = t % call.row_tiles * ROWS
        row = first_row + gl.arange(0, ROWS, ROW)
        last_key = gl.minimum(length - 1, length - call.q_len + row // call.num_heads + call.right)
        low_key = gl.minimum(length - 1, length - call.q_len + first_row // call.num_heads + call.right)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
        mbarrier.wait(memory.q_full, turn & 1)
        if first < last:
            s = dflash2_mla_scores(memory, first, evens & 1, 0, S_LAYOUT)
            s = warpgroup_mma_wait(0, [s])
            dflash2_arrive_if(anchor, first + 1 < last, ODD_TURN, 256)
            s = dflash2_mla_mask(s, first, last_key, low_key, NEGATIVE)
            p, row_max, row_sum, alpha = dflash2_mla_softmax(s, row_max, row_sum, call.scale_log2)
            dflash2_mla_tell(p, row_max, memory.k3, memory.even_max, anchor, 0, EVEN_P, DT)
            packed = dflash2_pack(p, KEYS, DT)
            for tile in range(first + 2, last, 2):
                half = (tile - first) // 2
                dflash2_sync(anchor, EVEN_TURN, 256)
                acc = dflash2_mla_own(acc, packed, memory.k1, 0, DT)
                mbarrier.wait(memory.k_full.index(LEFT + 1), (odds + half - 1) & 1)
                acc, packed = warpgroup_mma_wait(0, [acc, packed])
                dflash2_arrive(anchor, FREE + LEFT, 160)
                row_max, row_sum, alpha = dflash2_mla_hear(
                    memory.odd_max, row_max, row_sum, anchor, call.scale_log2, ODD_P
                )
                acc = dflash2_mla_other(acc, alpha, memory.k3, memory.k1, 1)
                s = dflash2_mla_scores(memory, tile, (evens + half) & 1, 0, S_LAYOUT)
                acc = warpgroup_mma_wait(3, [acc])
                dflash2_arrive(anchor, FREE + LEFT + 1, 160)
                dflash2_arrive(anchor, FREE + LAST + 1, 160)
                acc = warpgroup_mma_wait(1, [acc])
                dflash2_arrive_if(anchor, tile + 1 < last, ODD_TURN, 256)
                s = warpgroup_mma_wait(0, [s])
                s = dflash2_mla_mask(s, tile, last_key, low_key, NEGATIVE)
                p, row_max, row_sum, alpha = dflash2_mla_softmax(s, row_max, row_sum, call.scale_log2)
                dflash2_mla_tell(p, row_max, memory.k3, memory.even_max, anchor, 0, EVEN_P, DT)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
                packed = dflash2_pack(p, KEYS, DT)
            mbarrier.arrive(memory.q_free)
            odd = (last - first) % 2
            evens += (last - first + 1) // 2
            odds += (last - first) // 2
            if odd == 0:
                dflash2_sync(anchor, EVEN_TURN, 256)
            elif last * KEYS > length:
                dflash2_clean(memory.k1, 0, last - 1, length, 0, 0, KEYS, HALF, 0)
            acc = dflash2_mla_own(acc, packed, memory.k1, 0, DT)
            acc, packed = warpgroup_mma_wait(0, [acc, packed])
            dflash2_arrive(anchor, FREE + LEFT, 160)
            if odd == 0:
                mbarrier.wait(memory.k_full.index(LEFT + 1), (odds - 1) & 1)
                row_max, row_sum, alpha = dflash2_mla_hear(
                    memory.odd_max, row_max, row_sum, anchor, call.scale_log2, ODD_P
                )
                if last * KEYS > length:
                    dflash2_clean(memory.k1, 1, last - 1, length, 0, 0, KEYS, HALF, 0)
                acc = dflash2_mla_other(acc, alpha, memory.k3, memory.k1, 1)
                acc = warpgroup_mma_wait(0, [acc])
                dflash2_arrive(anchor, FREE + LEFT + 1, 160)
                dflash2_arrive(anchor, FREE + LAST + 1, 160)
        else:
            mbarrier.arrive(memory.q_free)
        factor, lse = dflash2_mla_factor(
            row_max,
            row_sum,
            memory.even_sum.index(turn & 1),
            memory.odd_sum.index(turn & 1),
            anchor,
            row,
            call,
            splits,
            beyond,
            HAS_SINKS,
        )
        slot = t // call.row_tiles
        part = ((t % call.row_tiles) * call.num_slots + slot).to(gl.int64)
        if splits == 1:
            if HAS_LSE:
                place = (seq.to(gl.int64) * call.num_heads + row % call.num_heads) * call.q_len + row // call.num_heads
                gl.store(
                    call.lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows
                )
        else:
            gl.store(call.part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
        dflash2_mla_store(acc, 0, call, seq, part, splits, first_row, rows, WIDE)
        if SPLIT:
            if MERGES:
                if splits > 1:
                    dflash2_mla_merge(
                        call.part_out_ptr, call.part_lse_ptr, call.out_ptr, call.lse_ptr, call.sinks_ptr,
                        call.arrivals_ptr, part - split, split, splits, seq,
                        call.num_heads, call.q_len, first_row, call.stride_ob, call.stride_om, call.stride_oh, ROWS, 0,
                        HALF, HAS_SINKS, HAS_LSE,
                    )  # fmt: skip
            else:
                if (split == 0) & (first_row == 0):
                    gl.store(call.meta_ptr + 2 * seq, slot.to(gl.float32))
                    gl.store(call.meta_ptr + 2 * seq + 1, splits.to(gl.float32))
        mbarrier.arrive(memory.work_free.index(told))
        turn += 1
        mbarrier.wait(memory.work_full.index(turn % PLACES), (turn // PLACES) & 1)
        seq = dflash2_field(memory.work, turn % PLACES, 1)


@gluon.jit
def dflash2_mla_odd(
    memory, call, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, SPLIT: gl.constexpr, MERGES: gl.constexpr,
    WIDE: gl.constexpr,
    DT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the odd tiles of a work, and value columns 256 .. 512."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    rows = call.q_len * call.num_heads
    turn = 0
    evens = 0  # uses of the first slot, and of the second, by the works before
    odds = 0
    mbarrier.wait(memory.work_full.index(0), 0)
    seq = dflash2_field(memory.work, 0, 1)
    while seq >= 0:
        told = turn % PLACES
        t = dflash2_field(memory.work, told, 0)
        split = dflash2_field(memory.work, told, 2)
        splits = dflash2_field(memory.work, told, 3)
        length = dflash2_field(memory.work, told, 4)
        beyond = (length < 0) | (length > call.capacity)
        length = gl.where(beyond, 0, length)
        tiles = dflash2_decode_tiles(length, call.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        first_row = t % call.row_tiles * ROWS
        row = first_row + gl.arange(0, ROWS, ROW)
        last_key = gl.minimum(length - 1, length - call.q_len + row // call.num_heads + call.right)
        low_key = gl.minimum(length - 1, length - call.q_len + first_row // call.num_heads + call.right)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
        mbarrier.wait(memory.q_full, turn & 1)
        for tile in range(first + 1, last, 2):
            half = (tile - first) // 2
            phase = (odds + half) & 1
            # the even scores first: else both groups would do their exponentials at once
            dflash2_sync(anchor, ODD_TURN, 256)
            if (tile + 1) * KEYS > length:
                mbarrier.wait(memory.k_full.index(RIGHT + 1), phase)
                dflash2_clean(memory.k2, 1, tile, length, 0, 0, KEYS, HALF, 0)
            s = dflash2_mla_scores(memory, tile, phase, 1, S_LAYOUT)
            mbarrier.wait(memory.k_full.index(RIGHT), (evens + half) & 1)
            row_max, row_sum, alpha = dflash2_mla_hear(
                memory.even_max, row_max, row_sum, anchor, call.scale_log2, EVEN_P
            )
            acc = warpgroup_mma_wait(1, [acc])
            # the left product of the even tile would take half of the cores from these scores, and be over too early
            dflash2_arrive(anchor, EVEN_TURN, 256)
            s = warpgroup_mma_wait(0, [s])  # ptxas would wait here anyway: the rescale writes accumulators
            s = dflash2_mla_mask(s, tile, last_key, low_key, NEGATIVE)
            acc = dflash2_mla_other(acc, alpha, memory.k3, memory.k2, 0)
            p, row_max, row_sum, alpha = dflash2_mla_softmax(s, row_max, row_sum, call.scale_log2)
            dflash2_mla_tell(p, row_max, memory.k3, memory.odd_max, anchor, 1, ODD_P, DT)
            packed = dflash2_pack(p, KEYS, DT)
            acc = warpgroup_mma_wait(0, [acc])
            dflash2_arrive(anchor, FREE + RIGHT, 160)
            dflash2_arrive(anchor, FREE + LAST, 160)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            acc = dflash2_mla_own(acc, packed, memory.k2, 1, DT)
            acc, packed = warpgroup_mma_wait(0, [acc, packed])
            dflash2_arrive(anchor, FREE + RIGHT + 1, 160)
        mbarrier.arrive(memory.q_free)
        evens += (last - first + 1) // 2
        odds += (last - first) // 2
        if (last - first) % 2 == 1:
            mbarrier.wait(memory.k_full.index(RIGHT), (evens - 1) & 1)
            row_max, row_sum, alpha = dflash2_mla_hear(
                memory.even_max, row_max, row_sum, anchor, call.scale_log2, EVEN_P
            )
            if last * KEYS > length:
                dflash2_clean(memory.k2, 0, last - 1, length, 0, 0, KEYS, HALF, 0)
            acc = dflash2_mla_other(acc, alpha, memory.k3, memory.k2, 0)
            acc = warpgroup_mma_wait(0, [acc])
            dflash2_arrive(anchor, FREE + RIGHT, 160)
            dflash2_arrive(anchor, FREE + LAST, 160)
        factor, lse = dflash2_mla_factor(
            row_max,
            row_sum,
            memory.odd_sum.index(turn & 1),
            memory.even_sum.index(turn & 1),
            anchor,
            row,
            call,
            splits,
            beyond,
            HAS_SINKS,
        )
        part = ((t % call.row_tiles) * call.num_slots + t // call.row_tiles).to(gl.int64)
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
        dflash2_mla_store(acc, HALF, call, seq, part, splits, first_row, rows, WIDE)
        if SPLIT and MERGES:
            if splits > 1:  # apart from the first group's merge, with log-sum-exps and counts of its own
                works = call.row_tiles * call.num_slots
                gl.store(call.part_lse_ptr + (works + part) * ROWS + row - first_row, lse, mask=row < rows)
                dflash2_mla_merge(
                    call.part_out_ptr, call.part_lse_ptr + works.to(gl.int64) * ROWS, call.out_ptr, call.part_lse_ptr,
                    call.sinks_ptr, call.arrivals_ptr + works, part - split, split,
                    splits, seq, call.num_heads, call.q_len, first_row, call.stride_ob, call.stride_om, call.stride_oh,
                    ROWS, HALF, HALF, HAS_SINKS, False,
                )  # fmt: skip
        mbarrier.arrive(memory.work_free.index(told))
        turn += 1
        mbarrier.wait(memory.work_full.index(turn % PLACES), (turn // PLACES) & 1)
        seq = dflash2_field(memory.work, turn % PLACES, 1)


PLAIN = (
    "stride_ob", "stride_om", "stride_oh", "stride_pages", "batch", "num_heads", "q_len", "capacity", "num_slots",
    "num_splits",
    "target", "most", "min_tiles", "right",
)  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_hopper(
    q1_desc, q3_desc, k1_desc, k3_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr,
    sinks_ptr, arrivals_ptr, counter_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, MERGES: gl.constexpr, WIDE: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """64 rows (token, head) of one sequence over one split of its
    tiles a work; the programs draw works until none is left.

    A part of ``part_out`` (num parts, 64, 512) float32 and ``part_lse`` (num parts, 64), log2, is that of its work.
    With MERGES, each group merges its columns: it has a ``part_lse`` and ``arrivals`` (num parts) of its own, the
    second's behind the first's. Else ``meta`` (batch, 2) tells the merge where the parts of a sequence start and how
    many they are. WIDE: see ``dflash2_mla_store``.
    """
    q1_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
    q2_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
    q3_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, ROPE], q3_desc.layout)
    k1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
    k2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
    k3_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, ROPE], k3_desc.layout)
    even_max = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    odd_max = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # of works in turn: a group may be one ahead
    even_sum = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    odd_sum = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_smem = gl.allocate_shared_memory(gl.int32, [8 * PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], mbarrier.MBarrierLayout())
    work_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    work_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(3 * STAGES):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=2)
    fence_async_shared()
    row_tiles = (q_len * num_heads + ROWS - 1) // ROWS
    memory = MlaMemory(
        q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, even_max, odd_max, even_sum, odd_sum, q_full, q_free,
        k_full,
        work_smem, work_full, work_free,
    )  # fmt: skip
    lengths = Lengths(seq_lens_ptr, batch, capacity, num_splits, target, most, min_tiles)
    call = MlaCall(
        out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr, arrivals_ptr, stride_ob, stride_om,
        stride_oh,
        num_heads, q_len, right, row_tiles, capacity, num_slots, scale_log2,
    )  # fmt: skip
    gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
        (dflash2_mla_even, (memory, call, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, MERGES, WIDE, DT)),
        (dflash2_mla_odd, (memory, call, NEGATIVE, HAS_SINKS, SPLIT, MERGES, WIDE, DT)),
        (dflash2_mla_produce, (
            q1_desc, q3_desc, k1_desc, k3_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, row_tiles,
            PAGE, FOUND, BLOCK_B)),
    ], [4, 1], [240, 24])  # fmt: skip
