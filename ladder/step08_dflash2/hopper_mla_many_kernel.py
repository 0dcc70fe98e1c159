"""Device code of MLA's latent decode for sm_90 with many query rows, in Gluon: 64 rows, whose 64 x 512 outputs two warp groups share.

Tiles of 64 latent keys come in pairs. Each group makes the scores and probabilities of one tile of the pair, all 576 columns,
and owns 256 columns of the output, to which both tiles add: its own probabilities from registers, the other's from shared
memory, where they take the place of the tile's rotary columns, which the scores have read by then. So both have the same work, and while one does exponentials the other fills the tensor cores (the idea is FlashMLA's).
The running maximum goes from the first group to the second within a pair, and back to the first for the next pair.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_compat import async_load
from .hopper_kernel import FREE, dflash2_arrive, dflash2_clean, dflash2_pack, dflash2_sync, dflash2_unpack
from .hopper_mla_work_kernel import PLAIN, dflash2_mla_next, dflash2_mla_work

P0_READY = gl.constexpr(9)  # hardware barriers between the groups; FREE .. FREE + 3 give the producer a piece back
P1_READY = gl.constexpr(10)
SUMS = gl.constexpr(11)
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)  # value columns of a group
ROPE = gl.constexpr(64)
ONE = gl.constexpr(160)  # threads of a group and the producer: one group is always the last to read a piece
BOTH = gl.constexpr(256)


@gluon.jit
def dflash2_mla_many_piece(
    k1_desc, k3_desc, k_smem, rope_smem, full, pages_ptr, tile, last, length, COLUMN: gl.constexpr, WITH_ROPE: gl.constexpr, PAGE: gl.constexpr
):
    """Half of the value columns of a tile, with or without the rotary columns. Pages past the end are filled with zeros."""
    PART: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    COLUMNS: gl.constexpr = HALF + ROPE if WITH_ROPE else HALF
    mbarrier.expect(full, KEYS * COLUMNS * 2)
    for part in gl.static_range(KEYS // PART):
        key = tile * KEYS + part * PART
        page = gl.load(pages_ptr + key // PAGE, mask=(key < length) & (tile < last), other=-1).to(gl.int32)
        async_load(k1_desc, [page, key % PAGE, COLUMN], full, k_smem.slice(part * PART, PART, 1))
        if WITH_ROPE:
            async_load(k3_desc, [page, key % PAGE, 2 * HALF], full, rope_smem.slice(part * PART, PART, 1))


@gluon.jit
def dflash2_mla_many_produce(
    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
    pages_ptr, seq, first_row, first, last, length, PAGE: gl.constexpr,
):  # fmt: skip
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    if first < last:
        mbarrier.expect(q_full, ROWS * 576 * 2)
        async_load(q1_desc, [seq, first_row, 0], q_full, q1_smem.index(0))
        async_load(q1_desc, [seq, first_row, 256], q_full, q2_smem.index(0))
        async_load(q3_desc, [seq, first_row, 512], q_full, q3_smem.index(0))
    for tile in range(first, last, 2):
        if tile > first:
            dflash2_sync(anchor, FREE, ONE)
        dflash2_mla_many_piece(k1_desc, k3_desc, k1_smem.index(0), k3_smem.index(0), k_full.index(0), pages_ptr, tile, last, length, 0, False, PAGE)
        if tile > first:
            dflash2_sync(anchor, FREE + 1, ONE)
        dflash2_mla_many_piece(k1_desc, k3_desc, k2_smem.index(0), k3_smem.index(0), k_full.index(1), pages_ptr, tile, last, length, HALF, True, PAGE)
        if tile > first:
            dflash2_sync(anchor, FREE + 2, ONE)
        dflash2_mla_many_piece(k1_desc, k3_desc, k1_smem.index(1), k3_smem.index(1), k_full.index(2), pages_ptr, tile + 1, last, length, 0, True, PAGE)
        if tile > first:
            dflash2_sync(anchor, FREE + 3, ONE)
        dflash2_mla_many_piece(k1_desc, k3_desc, k2_smem.index(1), k3_smem.index(1), k_full.index(3), pages_ptr, tile + 1, last, length, HALF, False, PAGE)
    if first < last:  # leave the barriers as they were found
        for i in gl.static_range(4):
            dflash2_sync(anchor, FREE + i, ONE)


@gluon.jit
def dflash2_mla_many_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, pair, TILE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores of a tile under way, in three products. Its rotary columns come with the half that the other group reads last."""
    zero = pair >> 30  # the compiler does not know: it would find all addresses before the loop, and spill them
    phase = pair & 1
    q1 = q1_smem.index(zero).reshape([ROWS, HALF])
    q2 = q2_smem.index(zero).reshape([ROWS, HALF])
    q3 = q3_smem.index(zero).reshape([ROWS, ROPE])
    k1 = k1_smem.index(TILE + zero).reshape([KEYS, HALF]).permute((1, 0))
    k2 = k2_smem.index(TILE + zero).reshape([KEYS, HALF]).permute((1, 0))
    k3 = k3_smem.index(TILE + zero).reshape([KEYS, ROPE]).permute((1, 0))
    mbarrier.wait(k_full.index(2 * TILE), phase)
    s = warpgroup_mma(q1, k1, gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT), use_acc=False, is_async=True)
    if TILE == 1:
        s = warpgroup_mma(q3, k3, s, is_async=True)
    mbarrier.wait(k_full.index(2 * TILE + 1), phase)
    s = warpgroup_mma(q2, k2, s, is_async=True)
    if TILE == 0:
        s = warpgroup_mma(q3, k3, s, is_async=True)
    return s


@gluon.jit
def dflash2_mla_many_softmax(s, tile, last_key, seen_by_all, row_max, scale_log2, NEGATIVE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """(probabilities, new maxima, what the old state is multiplied by)."""
    if NEGATIVE:
        s = -s
    if (tile + 1) * KEYS > seen_by_all:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))[None, :]
        s = gl.where(column <= (last_key - tile * KEYS)[:, None], s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    return gl.exp2(s * scale_log2 - shift[:, None]), new_max, alpha


@gluon.jit
def dflash2_mla_many_scale(acc, alpha, O_LAYOUT: gl.constexpr):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]


@gluon.jit
def dflash2_mla_many_alpha(row_max, new_max, scale_log2):
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)
    return gl.exp2(row_max * scale_log2 - shift)


@gluon.jit
def dflash2_mla_many_clean(k_smem, TILE: gl.constexpr, tile, length):
    """Zero the rows of a tile in which the sequence ends: 0 x NaN is NaN."""
    if (tile * KEYS < length) & ((tile + 1) * KEYS > length):
        dflash2_clean(k_smem, TILE, tile, length, 0, 0, KEYS, HALF, 0)


@gluon.jit
def dflash2_mla_many_own(
    s, acc, tile, last_key, seen_by_all, length, row_max, row_sum, scale_log2, anchor, k1_smem, p0_smem, p1_smem, m0_smem, m1_smem,
    NEGATIVE: gl.constexpr, DT: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """First group: the probabilities of its tile and their product, up to where the other tile's probabilities are there."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    p, row_max, alpha = dflash2_mla_many_softmax(s, tile, last_key, seen_by_all, row_max, scale_log2, NEGATIVE, S_LAYOUT)
    row_sum = row_sum * alpha + gl.sum(p, 1)
    p0_smem.store(p.to(DT))
    m0_smem.store(row_max)
    dflash2_mla_many_clean(k1_smem, 0, tile, length)
    fence_async_shared()
    dflash2_arrive(anchor, P0_READY, BOTH)
    packed = dflash2_pack(p, KEYS, DT)
    acc = dflash2_mla_many_scale(acc, alpha, O_LAYOUT)
    acc = warpgroup_mma(dflash2_unpack(packed, KEYS, DT, P_LAYOUT), k1_smem.index(0).reshape([KEYS, HALF]), acc, is_async=True)
    acc, packed = warpgroup_mma_wait(0, [acc, packed])
    dflash2_arrive(anchor, FREE, ONE)
    dflash2_sync(anchor, P1_READY, BOTH)
    new_max = m1_smem.load(gl.SliceLayout(1, S_LAYOUT))
    alpha = dflash2_mla_many_alpha(row_max, new_max, scale_log2)
    dflash2_mla_many_clean(k1_smem, 1, tile + 1, length)
    return dflash2_mla_many_scale(acc, alpha, O_LAYOUT), new_max, row_sum * alpha


@gluon.jit
def dflash2_mla_many_first(
    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, m0_smem, m1_smem, sum_smem, q_full, k_full,
    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, base, turn,
    scale_log2, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Tiles first, first + 2, ..; value columns 0 .. 256; and the log-sum-exp."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    last_key, seen_by_all = dflash2_mla_many_limits(first_row, num_heads, q_len, right, last, length, S_LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    if first < last:
        p0_smem = k3_smem.index(0).reshape([ROWS, KEYS])
        p1_smem = k3_smem.index(1).reshape([ROWS, KEYS])
        v1 = k1_smem.index(1).reshape([KEYS, HALF])
        mbarrier.wait(q_full, turn & 1)
        s = dflash2_mla_many_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, base, 0, S_LAYOUT)
        s = warpgroup_mma_wait(0, [s])
        acc, row_max, row_sum = dflash2_mla_many_own(
            s, acc, first, last_key, seen_by_all, length, row_max, row_sum, scale_log2, anchor, k1_smem, p0_smem, p1_smem, m0_smem, m1_smem,
            NEGATIVE, DT, S_LAYOUT, O_LAYOUT,
        )  # fmt: skip
        for tile in range(first + 2, last, 2):
            acc = warpgroup_mma(p1_smem, v1, acc, is_async=True)
            s = dflash2_mla_many_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, base + (tile - first) // 2, 0, S_LAYOUT)
            acc = warpgroup_mma_wait(3, [acc])
            dflash2_arrive(anchor, FREE + 2, ONE)
            s = warpgroup_mma_wait(0, [s])
            acc, row_max, row_sum = dflash2_mla_many_own(
                s, acc, tile, last_key, seen_by_all, length, row_max, row_sum, scale_log2, anchor, k1_smem, p0_smem, p1_smem, m0_smem, m1_smem,
                NEGATIVE, DT, S_LAYOUT, O_LAYOUT,
            )  # fmt: skip
        acc = warpgroup_mma(p1_smem, v1, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        dflash2_arrive(anchor, FREE + 2, ONE)
        sum_smem.index(0).store(row_sum)
        dflash2_sync(anchor, SUMS, BOTH)
        row_sum = row_sum + sum_smem.index(1).load(gl.SliceLayout(1, S_LAYOUT))
    factor, lse = dflash2_mla_many_end(row_max * scale_log2, row_sum, sinks_ptr, first_row, num_heads, splits, beyond, HAS_SINKS, S_LAYOUT)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    if splits == 1:
        if HAS_LSE:
            place = (seq.to(gl.int64) * num_heads + row % num_heads) * q_len + row // num_heads
            gl.store(lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows)
    else:
        gl.store(part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
    acc = dflash2_mla_many_scale(acc, factor, O_LAYOUT)
    dflash2_mla_many_store(acc, 0, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit
def dflash2_mla_many_second(
    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, m0_smem, m1_smem, sum_smem, q_full, k_full, out_ptr, part_out_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, base, turn,
    scale_log2, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Tiles first + 1, first + 3, ..; value columns 256 .. 512."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    last_key, seen_by_all = dflash2_mla_many_limits(first_row, num_heads, q_len, right, last, length, S_LAYOUT)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    if first < last:
        p0_smem = k3_smem.index(0).reshape([ROWS, KEYS])
        p1_smem = k3_smem.index(1).reshape([ROWS, KEYS])
        mbarrier.wait(q_full, turn & 1)
        for tile in range(first, last, 2):
            s = dflash2_mla_many_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, base + (tile - first) // 2, 1, S_LAYOUT)
            s = warpgroup_mma_wait(0, [s])
            dflash2_sync(anchor, P0_READY, BOTH)
            first_max = m0_smem.load(gl.SliceLayout(1, S_LAYOUT))
            alpha = dflash2_mla_many_alpha(row_max, first_max, scale_log2)
            row_sum = row_sum * alpha
            dflash2_mla_many_clean(k2_smem, 0, tile, length)
            acc = dflash2_mla_many_scale(acc, alpha, O_LAYOUT)
            acc = warpgroup_mma(p0_smem, k2_smem.index(0).reshape([KEYS, HALF]), acc, is_async=True)  # under way while this group does
            p, row_max, alpha = dflash2_mla_many_softmax(s, tile + 1, last_key, seen_by_all, first_max, scale_log2, NEGATIVE, S_LAYOUT)
            row_sum = row_sum * alpha + gl.sum(p, 1)  # its exponentials
            p1_smem.store(p.to(DT))
            m1_smem.store(row_max)
            fence_async_shared()
            dflash2_arrive(anchor, P1_READY, BOTH)
            packed = dflash2_pack(p, KEYS, DT)
            acc = warpgroup_mma_wait(0, [acc])
            dflash2_arrive(anchor, FREE + 1, ONE)
            dflash2_mla_many_clean(k2_smem, 1, tile + 1, length)
            acc = dflash2_mla_many_scale(acc, alpha, O_LAYOUT)
            acc = warpgroup_mma(dflash2_unpack(packed, KEYS, DT, P_LAYOUT), k2_smem.index(1).reshape([KEYS, HALF]), acc, is_async=True)
            acc, packed = warpgroup_mma_wait(0, [acc, packed])
            dflash2_arrive(anchor, FREE + 3, ONE)
        sum_smem.index(1).store(row_sum)
        dflash2_sync(anchor, SUMS, BOTH)
        row_sum = sum_smem.index(0).load(gl.SliceLayout(1, S_LAYOUT)) + row_sum
    factor, lse = dflash2_mla_many_end(row_max * scale_log2, row_sum, sinks_ptr, first_row, num_heads, splits, beyond, HAS_SINKS, S_LAYOUT)
    acc = dflash2_mla_many_scale(acc, factor, O_LAYOUT)
    dflash2_mla_many_store(acc, HALF, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit
def dflash2_mla_many_limits(first_row, num_heads, q_len, right, last, length, S_LAYOUT: gl.constexpr):
    """(last key that each row sees in this split, number of keys that all rows see)."""
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    stop = gl.minimum(length, last * KEYS)
    last_key = gl.minimum(stop - 1, length - q_len + row // num_heads + right)
    return last_key, gl.minimum(stop, length - q_len + first_row // num_heads + right + 1)


@gluon.jit
def dflash2_mla_many_end(row_max, row_sum, sinks_ptr, first_row, num_heads, splits, beyond, HAS_SINKS: gl.constexpr, S_LAYOUT: gl.constexpr):
    """(what the output is multiplied by, log-sum-exp in base 2). A sink of split keys is for the merge to count."""
    norm = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if HAS_SINKS:
        if splits == 1:
            row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
            logit = gl.load(sinks_ptr + row % num_heads).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(row_max, logit)
            norm = gl.exp2(row_max - top)
            row_sum = row_sum * norm + gl.exp2(logit - top)
            row_max = top
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    return gl.where(beyond, float("nan"), norm / row_sum), row_max + gl.log2(row_sum)  # a length that no page holds: loud, not wrong


@gluon.jit
def dflash2_mla_many_store(
    acc, COLUMN: gl.constexpr, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    if splits == 1:
        place = seq.to(gl.int64) * stride_ob + (row // num_heads).to(gl.int64) * stride_om + (row % num_heads).to(gl.int64) * stride_oh
        gl.store(out_ptr + place[:, None] + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])
    else:
        place = (part * ROWS + row - first_row) * 512
        gl.store(part_out_ptr + place[:, None] + column[None, :], acc, mask=(row < rows)[:, None])


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_many_hopper(
    q1_desc, q3_desc, k1_desc, k3_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr, counter_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """64 rows (token, head) of one sequence over one split of its tiles a work; the programs draw works until none is left.

    A part of ``part_out`` (num parts, 64, 512) float32 and ``part_lse`` (num parts, 64), log2, is that of its work;
    ``meta`` (batch, 2) tells the merge where the parts of a sequence start and how many they are.
    """
    q1_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
    q2_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
    q3_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, ROPE], q3_desc.layout)
    k1_smem = gl.allocate_shared_memory(DT, [2, 1, KEYS, HALF], k1_desc.layout)
    k2_smem = gl.allocate_shared_memory(DT, [2, 1, KEYS, HALF], k1_desc.layout)
    k3_smem = gl.allocate_shared_memory(DT, [2, 1, KEYS, ROPE], k3_desc.layout)
    m0_smem = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    m1_smem = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sum_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(4):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()
    rows = q_len * num_heads
    row_tiles = (rows + ROWS - 1) // ROWS
    work = gl.program_id(0)
    base = 0
    turn = 0
    while work >= 0:
        slot = work // row_tiles  # tiles that share keys run side by side
        row_tile = work % row_tiles
        seq, split, splits, first, last, length, beyond, used = dflash2_mla_work(
            slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, num_slots, FOUND, BLOCK_B
        )
        if (seq < batch) & (split < splits):
            first_row = row_tile * ROWS
            part = (row_tile * num_slots + slot).to(gl.int64)
            pages = pages_ptr + seq.to(gl.int64) * stride_pages
            if SPLIT:
                if (split == 0) & (row_tile == 0):
                    gl.store(meta_ptr + 2 * seq, slot.to(gl.float32))
                    gl.store(meta_ptr + 2 * seq + 1, splits.to(gl.float32))
            gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
                (dflash2_mla_many_first, (
                    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, m0_smem, m1_smem, sum_smem, q_full, k_full,
                    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, right,
                    seq, part, splits, first_row, rows, first, last, length, beyond, base, turn, scale_log2, NEGATIVE, HAS_SINKS, HAS_LSE, DT)),
                (dflash2_mla_many_second, (
                    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, m0_smem, m1_smem, sum_smem, q_full, k_full,
                    out_ptr, part_out_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, right,
                    seq, part, splits, first_row, rows, first, last, length, beyond, base, turn, scale_log2, NEGATIVE, HAS_SINKS, DT)),
                (dflash2_mla_many_produce, (
                    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
                    pages, seq, first_row, first, last, length, PAGE)),
            ], [4, 1], [240, 24])  # fmt: skip
            base += (last - first + 1) // 2
            turn += gl.where(first < last, 1, 0)
        work = dflash2_mla_next(work, used * row_tiles, counter_ptr)
