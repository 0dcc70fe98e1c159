"""Device code of MLA's latent decode for sm_90, in Gluon: 64 query rows on tiles of 64 latent keys of 576 columns.

A float32 accumulator of 64 x 512 fills half the register file, so two warp groups hold 256 value columns each. The first
makes the scores and probabilities, and hands them to the second through shared memory; a producer warp brings the tiles,
which serve as keys (576 columns) and as values (512) both.
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

STAGES = gl.constexpr(2)
LEFT = gl.constexpr(0)  # pieces of a tile, barriers of their own each: columns 0 .. 256, 256 .. 512, 512 .. 576
RIGHT = gl.constexpr(2)
LAST = gl.constexpr(4)
P_FULL = gl.constexpr(11)  # hardware barriers behind those of the pieces: the second group may read probabilities, and has read them
P_FREE = gl.constexpr(12)
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)  # value columns of a group
ROPE = gl.constexpr(64)


@gluon.jit
def dflash2_mla_tiles(length, capacity):
    """Tiles of a sequence; none when no page holds its length."""
    return gl.where((length < 0) | (length > capacity), 0, (length + KEYS - 1) // KEYS)


@gluon.jit
def dflash2_mla_splits(tiles, chunk):
    return gl.maximum(1, (2 * tiles + chunk) // (2 * chunk))


@gluon.jit
def dflash2_mla_slot(slot, seq_lens_ptr, batch, capacity, target, most, min_tiles, num_splits, FOUND: gl.constexpr, BLOCK_B: gl.constexpr):
    """(sequence, split, splits of it) of a slot, as ``decode_kernel.dflash2_find``; sequence ``batch`` is no work."""
    if FOUND:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        total = 0
        longest = 0
        for first in range(0, batch, BLOCK_B):
            b = first + gl.arange(0, BLOCK_B, LAYOUT)
            tiles = dflash2_mla_tiles(gl.load(seq_lens_ptr + b, mask=b < batch, other=0), capacity)
            total += gl.sum(tiles, 0)
            longest = gl.maximum(longest, gl.max(tiles, 0))
        mean = (total + batch - 1) // batch
        wanted = gl.where(longest * 4 > mean * 5, most, target)
        chunk = gl.maximum(min_tiles, (total + wanted - 1) // wanted)
        seq = 0
        before = 0
        used = 0
        for first in range(0, batch, BLOCK_B):
            b = first + gl.arange(0, BLOCK_B, LAYOUT)
            tiles = dflash2_mla_tiles(gl.load(seq_lens_ptr + b, mask=b < batch, other=0), capacity)
            wants = gl.where(b < batch, dflash2_mla_splits(tiles, chunk), 0)
            done = (b < batch) & (used + gl.associative_scan(wants, 0, dflash2_mla_add) <= slot)
            seq += gl.sum(done.to(gl.int32), 0)
            before += gl.sum(gl.where(done, wants, 0), 0)
            used += gl.sum(wants, 0)
        mine = gl.load(seq_lens_ptr + seq, mask=seq < batch, other=0)
        split = slot - before
        splits = dflash2_mla_splits(dflash2_mla_tiles(mine, capacity), chunk)
    else:
        seq = slot // num_splits
        split = slot % num_splits
        splits = gl.maximum(1, gl.minimum(num_splits, dflash2_mla_tiles(gl.load(seq_lens_ptr + seq), capacity)))
    return seq, split, splits


@gluon.jit
def dflash2_mla_add(a, b):
    return a + b


@gluon.jit
def dflash2_mla_produce(
    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
    pages_ptr, seq, first_row, first, last, length, PAGE: gl.constexpr,
):  # fmt: skip
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.expect(q_full, ROWS * 576 * 2)
    async_load(q1_desc, [seq, first_row, 0], q_full, q1_smem)
    async_load(q1_desc, [seq, first_row, 256], q_full, q2_smem)
    async_load(q3_desc, [seq, first_row, 512], q_full, q3_smem)
    ahead = dflash2_decode_pages(pages_ptr, first, length, PAGE)  # looked up a tile ahead: a copy does not wait for it
    for tile in range(first, last):
        it = tile - first
        slot = it % STAGES
        mine = ahead
        ahead = dflash2_decode_pages(pages_ptr, tile + 1, length, PAGE)
        dflash2_await_slot(anchor, it, FREE + LAST, STAGES, 160)  # in the order in which they become free, and are wanted
        dflash2_mla_copy(k3_desc, k3_smem, k_full.index(LAST + slot), slot, mine, tile, 512, ROPE, PAGE)
        dflash2_await_slot(anchor, it, FREE + RIGHT, STAGES, 160)
        dflash2_mla_copy(k1_desc, k2_smem, k_full.index(RIGHT + slot), slot, mine, tile, 256, HALF, PAGE)
        dflash2_await_slot(anchor, it, FREE + LEFT, STAGES, 160)
        dflash2_mla_copy(k1_desc, k1_smem, k_full.index(LEFT + slot), slot, mine, tile, 0, HALF, PAGE)


@gluon.jit
def dflash2_mla_copy(desc, smem, full, slot, pages, tile, COLUMN: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr):
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
def dflash2_mla_scores(q1, q2, q3, k1_smem, k2_smem, k3_smem, k_full, it, S_LAYOUT: gl.constexpr):
    """Scores of tile number ``it`` under way: 576 columns in three parts, each as soon as it is there."""
    slot = it % STAGES
    phase = (it // STAGES) & 1
    mbarrier.wait(k_full.index(LAST + slot), phase)
    s = warpgroup_mma(q3, k3_smem.index(slot).reshape([KEYS, ROPE]).permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT), use_acc=False, is_async=True)
    mbarrier.wait(k_full.index(RIGHT + slot), phase)
    s = warpgroup_mma(q2, k2_smem.index(slot).reshape([KEYS, HALF]).permute((1, 0)), s, is_async=True)
    mbarrier.wait(k_full.index(LEFT + slot), phase)
    return warpgroup_mma(q1, k1_smem.index(slot).reshape([KEYS, HALF]).permute((1, 0)), s, is_async=True)


@gluon.jit
def dflash2_mla_softmax(s, tile, last_key, row_max, row_sum, scale_log2, NEGATIVE: gl.constexpr, S_LAYOUT: gl.constexpr):
    if NEGATIVE:
        s = -s
    column = gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))[None, :]
    s = gl.where(column <= (last_key - tile * KEYS)[:, None], s, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(s, 1))
    shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
    alpha = gl.exp2(row_max * scale_log2 - shift)
    p = gl.exp2(s * scale_log2 - shift[:, None])
    return p, new_max, row_sum * alpha + gl.sum(p, 1), alpha


@gluon.jit
def dflash2_mla_first(
    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, p_smem, row_smem, q_full, k_full,
    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2,
    NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, WAIT_FOR_V: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of all rows, and value columns 0 .. 256."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    q1 = q1_smem.reshape([ROWS, HALF])
    q2 = q2_smem.reshape([ROWS, HALF])
    q3 = q3_smem.reshape([ROWS, ROPE])
    row = first_row + gl.arange(0, ROWS, ROW)
    last_key = gl.minimum(length - 1, length - q_len + row // num_heads + right)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    mbarrier.wait(q_full, 0)
    if first < last:
        s = dflash2_mla_scores(q1, q2, q3, k1_smem, k2_smem, k3_smem, k_full, 0, S_LAYOUT)
        s = warpgroup_mma_wait(0, [s])
        if first + STAGES < last:
            dflash2_arrive(anchor, FREE + LAST, 160)
        p, row_max, row_sum, alpha = dflash2_mla_softmax(s, first, last_key, row_max, row_sum, scale_log2, NEGATIVE, S_LAYOUT)
        p_smem.store(p.to(DT))
        row_smem.store(alpha)
        fence_async_shared()
        dflash2_arrive(anchor, P_FULL, 256)
        packed = dflash2_pack(p, KEYS, DT)
        for tile in range(first + 1, last):
            it = tile - first
            slot = it % STAGES
            before = (it - 1) % STAGES
            acc = warpgroup_mma(dflash2_unpack(packed, KEYS, DT, P_LAYOUT), k1_smem.index(before).reshape([KEYS, HALF]), acc, is_async=True)
            if WAIT_FOR_V:  # memory binds: give the piece back before the next tile is there
                acc, packed = warpgroup_mma_wait(0, [acc, packed])
                dflash2_arrive_if(anchor, tile + 1 < last, FREE + LEFT + before, 160)
                s = dflash2_mla_scores(q1, q2, q3, k1_smem, k2_smem, k3_smem, k_full, it, S_LAYOUT)
            else:  # the tensor cores bind: never let them wait
                s = dflash2_mla_scores(q1, q2, q3, k1_smem, k2_smem, k3_smem, k_full, it, S_LAYOUT)
                acc, packed = warpgroup_mma_wait(3, [acc, packed])
                dflash2_arrive_if(anchor, tile + 1 < last, FREE + LEFT + before, 160)
            s = warpgroup_mma_wait(0, [s])
            dflash2_arrive_if(anchor, tile + STAGES < last, FREE + LAST + slot, 160)
            p, row_max, row_sum, alpha = dflash2_mla_softmax(s, tile, last_key, row_max, row_sum, scale_log2, NEGATIVE, S_LAYOUT)
            dflash2_sync(anchor, P_FREE, 256)
            p_smem.store(p.to(DT))
            row_smem.store(alpha)
            fence_async_shared()
            dflash2_arrive(anchor, P_FULL, 256)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            packed = dflash2_pack(p, KEYS, DT)
        slot = (last - 1 - first) % STAGES
        if last * KEYS > length:
            dflash2_clean(k1_smem, slot, last - 1, length, 0, 0, KEYS, HALF, 0)
        acc = warpgroup_mma(dflash2_unpack(packed, KEYS, DT, P_LAYOUT), k1_smem.index(slot).reshape([KEYS, HALF]), acc, is_async=True)
        acc, packed = warpgroup_mma_wait(0, [acc, packed])
        dflash2_sync(anchor, P_FREE, 256)
    row_max = row_max * scale_log2
    norm = gl.full([ROWS], 1.0, gl.float32, ROW)
    if HAS_SINKS:
        if splits == 1:  # else the merge counts it
            logit = gl.load(sinks_ptr + row % num_heads).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(row_max, logit)
            norm = gl.exp2(row_max - top)
            row_sum = row_sum * norm + gl.exp2(logit - top)
            row_max = top
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
    factor = gl.where(beyond, float("nan"), norm / row_sum)  # a length that no page holds: loud, not wrong
    row_smem.store(factor)
    dflash2_arrive(anchor, P_FULL, 256)
    lse = row_max + gl.log2(row_sum)
    if splits == 1:
        if HAS_LSE:
            place = (seq.to(gl.int64) * num_heads + row % num_heads) * q_len + row // num_heads
            gl.store(lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows)
    else:
        gl.store(part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
    dflash2_mla_store(acc, 0, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit
def dflash2_mla_second(
    k2_smem, p_smem, row_smem, k_full, out_ptr, part_out_ptr,
    stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, first, last, length,
):  # fmt: skip
    """Value columns 256 .. 512, with the probabilities of the first group."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    acc = gl.zeros([ROWS, HALF], gl.float32, O_LAYOUT)
    for tile in range(first, last):
        it = tile - first
        slot = it % STAGES
        mbarrier.wait(k_full.index(RIGHT + slot), (it // STAGES) & 1)
        if (tile + 1) * KEYS > length:
            dflash2_clean(k2_smem, slot, tile, length, 0, 0, KEYS, HALF, 0)
        dflash2_sync(anchor, P_FULL, 256)
        acc = acc * row_smem.load(gl.SliceLayout(1, O_LAYOUT))[:, None]
        acc = warpgroup_mma(p_smem, k2_smem.index(slot).reshape([KEYS, HALF]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        dflash2_arrive(anchor, P_FREE, 256)
        if tile + STAGES < last:
            dflash2_arrive(anchor, FREE + RIGHT + slot, 160)  # the first group's scores of it were over before its probabilities came
    dflash2_sync(anchor, P_FULL, 256)
    acc = acc * row_smem.load(gl.SliceLayout(1, O_LAYOUT))[:, None]
    dflash2_mla_store(acc, HALF, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, rows, O_LAYOUT)


@gluon.jit
def dflash2_mla_store(
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


PLAIN = (
    "stride_ob", "stride_om", "stride_oh", "stride_pages", "batch", "num_heads", "q_len", "capacity", "num_slots", "num_splits",
    "target", "most", "min_tiles", "right",
)  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_hopper(
    q1_desc, q3_desc, k1_desc, k3_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, WAIT_FOR_V: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """64 rows (token, head) of one sequence over one split of its tiles; grid (row tiles * slots,).

    A part of ``part_out`` (num parts, 64, 512) float32 and ``part_lse`` (num parts, 64), log2, is that of its program;
    ``meta`` (batch, 2) tells the merge where the parts of a sequence start and how many they are.
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
            q1_smem = gl.allocate_shared_memory(DT, [1, ROWS, HALF], q1_desc.layout)
            q2_smem = gl.allocate_shared_memory(DT, [1, ROWS, HALF], q1_desc.layout)
            q3_smem = gl.allocate_shared_memory(DT, [1, ROWS, ROPE], q3_desc.layout)
            k1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
            k2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, HALF], k1_desc.layout)
            k3_smem = gl.allocate_shared_memory(DT, [STAGES, 1, KEYS, ROPE], k3_desc.layout)
            p_smem = gl.allocate_shared_memory(DT, [ROWS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
            row_smem = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
            q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            k_full = gl.allocate_shared_memory(gl.int64, [3 * STAGES, 1], mbarrier.MBarrierLayout())
            mbarrier.init(q_full, count=1)
            for i in gl.static_range(3 * STAGES):
                mbarrier.init(k_full.index(i), count=1)
            fence_async_shared()
            gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
                (dflash2_mla_first, (
                    q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, p_smem, row_smem, q_full, k_full,
                    out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr, stride_ob, stride_om, stride_oh, num_heads, q_len, right,
                    seq, part, splits, first_row, rows, first, last, length, beyond, scale_log2, NEGATIVE, HAS_SINKS, HAS_LSE, WAIT_FOR_V, DT)),
                (dflash2_mla_second, (
                    k2_smem, p_smem, row_smem, k_full, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads,
                    seq, part, splits, first_row, rows, first, last, length)),
                (dflash2_mla_produce, (
                    q1_desc, q3_desc, k1_desc, k3_desc, q1_smem, q2_smem, q3_smem, k1_smem, k2_smem, k3_smem, q_full, k_full,
                    pages, seq, first_row, first, last, length, PAGE)),
            ], [4, 1], [240, 24])  # fmt: skip
