"""Device code of MLA's latent decode for sm_90 with many query rows, in Gluon: two groups share the scores and the output.

As in ``hopper_mla_kernel``, each warp group holds 256 of the 512 value columns of 64 rows. Here tiles go in pairs: the first
group makes the scores and probabilities of the even tiles, the second of the odd ones, and each multiplies both with its
columns. So the exponentials of one tile run under the other tile's scores, or under the products of the tile before:

    tensor cores   even scores | odd scores  | even tile: left, right | odd tile: right, left | even scores ..
    first group    (wait)      | even maxima, exponentials            | (wait)
    second group   (wait)                    | odd maxima, exponentials

Probabilities change hands through shared memory, in the place of the tile's last 64 key columns, which only its scores read:
two tiles and Q leave no room for more. The running maxima go with them; a group finds the rescale of the other by itself.
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
from .hopper_decode_kernel import dflash2_decode_pages
from .hopper_kernel import (
    FREE,
    dflash2_arrive,
    dflash2_arrive_if,
    dflash2_await_slot,
    dflash2_clean,
    dflash2_pack,
    dflash2_sync,
    dflash2_unpack,
)
from .hopper_mla_kernel import (
    HALF,
    KEYS,
    LAST,
    LEFT,
    PLAIN,
    RIGHT,
    ROPE,
    ROWS,
    STAGES,
    dflash2_mla_copy,
    dflash2_mla_slot,
    dflash2_mla_store,
    dflash2_mla_tiles,
)

EVEN_P = gl.constexpr(11)  # hardware barriers behind those of the pieces: probabilities of the even tile are there, of the odd one
ODD_P = gl.constexpr(12)
ODD_TURN = gl.constexpr(13)  # the even scores are all but done; the odd ones
EVEN_TURN = gl.constexpr(15)
SUMS = gl.constexpr(14)


@gluon.jit
def dflash2_mla_pair_bring(
    k1_desc, k3_desc, k1_smem, k2_smem, k3_smem, k_full, anchor, it, pages, tile, SLOT: gl.constexpr, PAGE: gl.constexpr
):
    """Bring a tile, piece by piece in the order in which they become free, and in which its scores want them."""
    if SLOT == 0:
        dflash2_await_slot(anchor, it, FREE + LEFT, STAGES, 160)
        dflash2_mla_copy(k1_desc, k1_smem, k_full.index(LEFT), 0, pages, tile, 0, HALF, PAGE)
    dflash2_await_slot(anchor, it, FREE + RIGHT, STAGES, 160)
    dflash2_mla_copy(k1_desc, k2_smem, k_full.index(RIGHT + SLOT), SLOT, pages, tile, HALF, HALF, PAGE)
    if SLOT == 1:
        dflash2_await_slot(anchor, it, FREE + LEFT, STAGES, 160)
        dflash2_mla_copy(k1_desc, k1_smem, k_full.index(LEFT + 1), 1, pages, tile, 0, HALF, PAGE)
    dflash2_await_slot(anchor, it, FREE + LAST, STAGES, 160)
    dflash2_mla_copy(k3_desc, k3_smem, k_full.index(LAST + SLOT), SLOT, pages, tile, 512, ROPE, PAGE)


@gluon.jit
def dflash2_mla_pair_produce(
    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
    pages_ptr, seq, first_row, first, last, length, PAGE: gl.constexpr,
):  # fmt: skip
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.expect(q_full, ROWS * 576 * 2)
    async_load(q1_desc, [seq, first_row, 0], q_full, q1_smem.index(0))
    async_load(q1_desc, [seq, first_row, 256], q_full, q2_smem.index(0))
    async_load(q3_desc, [seq, first_row, 512], q_full, q3_smem.index(0))
    ahead = dflash2_decode_pages(pages_ptr, first, length, PAGE)  # looked up a tile ahead: a copy does not wait for it
    for tile in range(first, last, 2):
        mine = ahead
        ahead = dflash2_decode_pages(pages_ptr, tile + 1, length, PAGE)
        dflash2_mla_pair_bring(k1_desc, k3_desc, k1_smem, k2_smem, k3_smem, k_full, anchor, tile - first, mine, tile, 0, PAGE)
        if tile + 1 < last:
            mine = ahead
            ahead = dflash2_decode_pages(pages_ptr, tile + 2, length, PAGE)
            dflash2_mla_pair_bring(k1_desc, k3_desc, k1_smem, k2_smem, k3_smem, k_full, anchor, tile + 1 - first, mine, tile + 1, 1, PAGE)


@gluon.jit
def dflash2_mla_pair_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, tile, phase, SLOT: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Scores of a tile under way, in three groups of products: each part of the 576 columns as soon as it is there."""
    zero = tile >> 30  # the compiler does not know: it would find all addresses before the loop, and spill them
    left = k1_smem.index(SLOT + zero).reshape([KEYS, HALF]).permute((1, 0))
    right = k2_smem.index(SLOT + zero).reshape([KEYS, HALF]).permute((1, 0))
    q1 = q1_smem.index(zero).reshape([ROWS, HALF])
    q2 = q2_smem.index(zero).reshape([ROWS, HALF])
    q3 = q3_smem.index(zero).reshape([ROWS, ROPE])
    s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    if SLOT == 0:
        mbarrier.wait(k_full.index(LEFT), phase)
        s = warpgroup_mma(q1, left, s, use_acc=False, is_async=True)
        mbarrier.wait(k_full.index(RIGHT), phase)
        s = warpgroup_mma(q2, right, s, is_async=True)
    else:  # its right piece is free first
        mbarrier.wait(k_full.index(RIGHT + 1), phase)
        s = warpgroup_mma(q2, right, s, use_acc=False, is_async=True)
        mbarrier.wait(k_full.index(LEFT + 1), phase)
        s = warpgroup_mma(q1, left, s, is_async=True)
    mbarrier.wait(k_full.index(LAST + SLOT), phase)
    return warpgroup_mma(q3, k3_smem.index(SLOT + zero).reshape([KEYS, ROPE]).permute((1, 0)), s, is_async=True)


@gluon.jit
def dflash2_mla_pair_mask(s, tile, last_key, low_key, NEGATIVE: gl.constexpr):
    """Hide the keys behind the last one of a row. No tile that the first row sees whole spends instructions on it."""
    if NEGATIVE:
        s = -s
    if tile * KEYS + KEYS - 1 > low_key:
        column = gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout))[None, :]
        s = gl.where(column <= (last_key - tile * KEYS)[:, None], s, float("-inf"))
    return s


@gluon.jit
def dflash2_mla_pair_softmax(s, row_max, row_sum, scale_log2):
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def dflash2_mla_pair_tell(p, row_max, k3_smem, max_smem, anchor, SLOT: gl.constexpr, IDS: gl.constexpr, DT: gl.constexpr):
    """Hand probabilities and maxima to the other group, in the place of the tile's last key columns."""
    k3_smem.index(SLOT).reshape([KEYS, ROPE]).store(p.to(DT))
    max_smem.store(row_max)
    fence_async_shared()
    dflash2_arrive(anchor, IDS, 256)


@gluon.jit
def dflash2_mla_pair_hear(max_smem, row_max, row_sum, anchor, scale_log2, IDS: gl.constexpr):
    """What ``dflash2_mla_pair_tell`` told: the new maxima and the rescale that they ask for."""
    dflash2_sync(anchor, IDS, 256)
    new_max = max_smem.load(row_max.type.layout)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    return new_max, row_sum * alpha, alpha


@gluon.jit
def dflash2_mla_pair_other(acc, alpha, k3_smem, v_smem, SLOT: gl.constexpr):
    """The other group's probabilities times this group's columns of its tile: under way."""
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return warpgroup_mma(k3_smem.index(SLOT).reshape([ROWS, KEYS]), v_smem.index(SLOT).reshape([KEYS, HALF]), acc, is_async=True)


@gluon.jit
def dflash2_mla_pair_own(acc, packed, v_smem, SLOT: gl.constexpr, DT: gl.constexpr):
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return warpgroup_mma(dflash2_unpack(packed, KEYS, DT, P_LAYOUT), v_smem.index(SLOT).reshape([KEYS, HALF]), acc, is_async=True)


@gluon.jit
def dflash2_mla_pair_factor(
    row_max, row_sum, my_smem, other_smem, anchor, row, sinks_ptr, num_heads, splits, beyond, scale_log2, HAS_SINKS: gl.constexpr
):
    """(factor of the output, log-sum-exp in log2) of all keys; each group has summed up its own tiles."""
    my_smem.store(row_sum)
    dflash2_sync(anchor, SUMS, 256)
    row_sum += other_smem.load(row_sum.type.layout)
    row_max = row_max * scale_log2
    norm = gl.full([ROWS], 1.0, gl.float32, row_sum.type.layout)
    if HAS_SINKS:
        if splits == 1:  # else the merge counts it
            logit = gl.load(sinks_ptr + row % num_heads).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(row_max, logit)
            safe = gl.where(top == float("-inf"), 0.0, top)
            norm = gl.exp2(row_max - safe)
            row_sum = row_sum * norm + gl.exp2(logit - safe)
            row_max = top
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    return gl.where(beyond, float("nan"), norm / row_sum), row_max + gl.log2(row_sum)  # a length that no page holds: loud, not wrong


@gluon.jit
def dflash2_mla_pair_even(
    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, even_max, odd_max, even_sum, odd_sum, q_full, k_full,
    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2,
    NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, TURNS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the even tiles, and value columns 0 .. 256."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    row = first_row + gl.arange(0, ROWS, ROW)
    last_key = gl.minimum(length - 1, length - q_len + row // num_heads + right)
    low_key = gl.minimum(length - 1, length - q_len + first_row // num_heads + right)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    mbarrier.wait(q_full, 0)
    if first < last:
        s = dflash2_mla_pair_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, first, 0, 0, S_LAYOUT)
        s = warpgroup_mma_wait(0, [s])
        if TURNS > 0:
            dflash2_arrive_if(anchor, first + 1 < last, ODD_TURN, 256)
        s = dflash2_mla_pair_mask(s, first, last_key, low_key, NEGATIVE)
        p, row_max, row_sum, alpha = dflash2_mla_pair_softmax(s, row_max, row_sum, scale_log2)
        dflash2_mla_pair_tell(p, row_max, k3_smem, even_max, anchor, 0, EVEN_P, DT)
        packed = dflash2_pack(p, KEYS, DT)
        for tile in range(first + 2, last, 2):
            phase = ((tile - first) // 2) & 1
            if TURNS > 1:
                dflash2_sync(anchor, EVEN_TURN, 256)
            acc = dflash2_mla_pair_own(acc, packed, k1_smem, 0, DT)
            mbarrier.wait(k_full.index(LEFT + 1), phase ^ 1)
            acc, packed = warpgroup_mma_wait(0, [acc, packed])
            dflash2_arrive(anchor, FREE + LEFT, 160)
            row_max, row_sum, alpha = dflash2_mla_pair_hear(odd_max, row_max, row_sum, anchor, scale_log2, ODD_P)
            acc = dflash2_mla_pair_other(acc, alpha, k3_smem, k1_smem, 1)
            s = dflash2_mla_pair_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, tile, phase, 0, S_LAYOUT)
            acc = warpgroup_mma_wait(3, [acc])
            dflash2_arrive_if(anchor, tile + 1 < last, FREE + LEFT + 1, 160)
            dflash2_arrive_if(anchor, tile + 1 < last, FREE + LAST + 1, 160)
            if TURNS > 0:
                acc = warpgroup_mma_wait(1, [acc])
                dflash2_arrive_if(anchor, tile + 1 < last, ODD_TURN, 256)
            s = warpgroup_mma_wait(0, [s])
            s = dflash2_mla_pair_mask(s, tile, last_key, low_key, NEGATIVE)
            p, row_max, row_sum, alpha = dflash2_mla_pair_softmax(s, row_max, row_sum, scale_log2)
            dflash2_mla_pair_tell(p, row_max, k3_smem, even_max, anchor, 0, EVEN_P, DT)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            packed = dflash2_pack(p, KEYS, DT)
        odd = (last - first) % 2
        if TURNS > 1:
            if odd == 0:
                dflash2_sync(anchor, EVEN_TURN, 256)
        if (odd == 1) & (last * KEYS > length):
            dflash2_clean(k1_smem, 0, last - 1, length, 0, 0, KEYS, HALF, 0)
        acc = dflash2_mla_pair_own(acc, packed, k1_smem, 0, DT)
        acc, packed = warpgroup_mma_wait(0, [acc, packed])
        if odd == 0:
            mbarrier.wait(k_full.index(LEFT + 1), ((last - first) // 2 - 1) & 1)
            row_max, row_sum, alpha = dflash2_mla_pair_hear(odd_max, row_max, row_sum, anchor, scale_log2, ODD_P)
            if last * KEYS > length:
                dflash2_clean(k1_smem, 1, last - 1, length, 0, 0, KEYS, HALF, 0)
            acc = dflash2_mla_pair_other(acc, alpha, k3_smem, k1_smem, 1)
            acc = warpgroup_mma_wait(0, [acc])
    factor, lse = dflash2_mla_pair_factor(row_max, row_sum, even_sum, odd_sum, anchor, row, sinks_ptr, num_heads, splits, beyond, scale_log2, HAS_SINKS)
    if splits == 1:
        if HAS_LSE:
            place = (seq.to(gl.int64) * num_heads + row % num_heads) * q_len + row // num_heads
            gl.store(lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows)
    else:
        gl.store(part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
    dflash2_mla_store(acc, 0, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit
def dflash2_mla_pair_odd(
    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, even_max, odd_max, even_sum, odd_sum, q_full, k_full,
    out_ptr, part_out_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2,
    NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, TURNS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the odd tiles, and value columns 256 .. 512."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    row = first_row + gl.arange(0, ROWS, ROW)
    last_key = gl.minimum(length - 1, length - q_len + row // num_heads + right)
    low_key = gl.minimum(length - 1, length - q_len + first_row // num_heads + right)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    mbarrier.wait(q_full, 0)
    for tile in range(first + 1, last, 2):
        phase = ((tile - first) // 2) & 1
        if TURNS > 0:  # the even scores first: else both groups would do their exponentials at once
            dflash2_sync(anchor, ODD_TURN, 256)
        if (tile + 1) * KEYS > length:
            mbarrier.wait(k_full.index(RIGHT + 1), phase)
            dflash2_clean(k2_smem, 1, tile, length, 0, 0, KEYS, HALF, 0)
        s = dflash2_mla_pair_scores(q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, k_full, tile, phase, 1, S_LAYOUT)
        mbarrier.wait(k_full.index(RIGHT), phase)
        row_max, row_sum, alpha = dflash2_mla_pair_hear(even_max, row_max, row_sum, anchor, scale_log2, EVEN_P)
        if TURNS > 1:  # the left product of the even tile would take half of the cores from these scores, and be over too early
            acc = warpgroup_mma_wait(1, [acc])
            dflash2_arrive(anchor, EVEN_TURN, 256)
        s = warpgroup_mma_wait(0, [s])  # ptxas would wait here anyway: the rescale writes accumulators
        s = dflash2_mla_pair_mask(s, tile, last_key, low_key, NEGATIVE)
        acc = dflash2_mla_pair_other(acc, alpha, k3_smem, k2_smem, 0)
        p, row_max, row_sum, alpha = dflash2_mla_pair_softmax(s, row_max, row_sum, scale_log2)
        dflash2_mla_pair_tell(p, row_max, k3_smem, odd_max, anchor, 1, ODD_P, DT)
        packed = dflash2_pack(p, KEYS, DT)
        acc = warpgroup_mma_wait(0, [acc])
        dflash2_arrive_if(anchor, tile + 1 < last, FREE + RIGHT, 160)
        dflash2_arrive_if(anchor, tile + 1 < last, FREE + LAST, 160)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
        acc = dflash2_mla_pair_own(acc, packed, k2_smem, 1, DT)
        acc, packed = warpgroup_mma_wait(0, [acc, packed])
        dflash2_arrive_if(anchor, tile + 2 < last, FREE + RIGHT + 1, 160)
    if (last > first) & ((last - first) % 2 == 1):
        mbarrier.wait(k_full.index(RIGHT), ((last - first) // 2) & 1)
        row_max, row_sum, alpha = dflash2_mla_pair_hear(even_max, row_max, row_sum, anchor, scale_log2, EVEN_P)
        if last * KEYS > length:
            dflash2_clean(k2_smem, 0, last - 1, length, 0, 0, KEYS, HALF, 0)
        acc = dflash2_mla_pair_other(acc, alpha, k3_smem, k2_smem, 0)
        acc = warpgroup_mma_wait(0, [acc])
    factor, _ = dflash2_mla_pair_factor(row_max, row_sum, odd_sum, even_sum, anchor, row, sinks_ptr, num_heads, splits, beyond, scale_log2, HAS_SINKS)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
    dflash2_mla_store(acc, HALF, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_pair_hopper(
    q1_desc, q3_desc, k1_desc, k3_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, TURNS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """As ``hopper_mla_kernel.dflash2_mla_hopper``: the same grid, works, parts and ``meta``.

    TURNS: with 1, the odd scores start when the even ones are all but done; with 2, the even products when the odd scores are.
    """
    rows = q_len * num_heads
    row_tiles = (rows + ROWS - 1) // ROWS
    pid = gl.program_id(0)
    row_tile = pid % row_tiles  # tiles that share keys run side by side
    slot = pid // row_tiles
    seq, split, splits = dflash2_mla_slot(slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, FOUND, BLOCK_B)
    if seq < batch:
        if split < splits:
            length = gl.load(seq_lens_ptr + seq)
            beyond = (length < 0) | (length > capacity)
            length = gl.where(beyond, 0, length)
            tiles = dflash2_mla_tiles(length, capacity)
            first = tiles * split // splits
            last = tiles * (split + 1) // splits
            first_row = row_tile * ROWS
            part = (row_tile * num_slots + slot).to(gl.int64)
            pages = pages_ptr + seq.to(gl.int64) * stride_pages
            if SPLIT:
                if (split == 0) & (row_tile == 0):
                    gl.store(meta_ptr + 2 * seq, slot.to(gl.float32))
                    gl.store(meta_ptr + 2 * seq + 1, splits.to(gl.float32))
            q1_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
            q2_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, HALF], q1_desc.layout)
            q3_smem = gl.allocate_shared_memory(DT, [1, 1, ROWS, ROPE], q3_desc.layout)
            k1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
            k2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
            k3_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, ROPE], k3_desc.layout)
            even_max = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            odd_max = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            even_sum = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            odd_sum = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            k_full = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], mbarrier.MBarrierLayout())
            mbarrier.init(q_full, count=1)
            for i in gl.static_range(3 * STAGES):
                mbarrier.init(k_full.index(i), count=1)
            fence_async_shared()
            gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
                (dflash2_mla_pair_even, (
                    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, even_max, odd_max, even_sum, odd_sum, q_full, k_full,
                    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, right,
                    seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2, NEGATIVE, HAS_SINKS, HAS_LSE, TURNS, DT)),
                (dflash2_mla_pair_odd, (
                    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, even_max, odd_max, even_sum, odd_sum, q_full, k_full,
                    out_ptr, part_out_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, right,
                    seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2, NEGATIVE, HAS_SINKS, TURNS, DT)),
                (dflash2_mla_pair_produce, (
                    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
                    pages, seq, first_row, first, last, length, PAGE)),
            ], [4, 1], [240, 24])  # fmt: skip
