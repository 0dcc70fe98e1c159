"""Device code of MLA's latent decode for sm_90 with few query rows, in Gluon: memory binds, so all is done to keep it busy.

The products are turned round: keys, and then value columns, are the 64 rows that a tensor-core instruction wants, and the 16
or 32 query rows are its columns. So nothing is padded, the 512 columns of output of a row fit the registers of one warp
group, and Q is small: what is left of shared memory is a ring of pieces of 64 keys by 192 columns, three of them a tile.
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
from .hopper_kernel import FREE, dflash2_arrive, dflash2_clean, dflash2_sync
from .hopper_mla_work_kernel import PLAIN, dflash2_mla_next, dflash2_mla_trigger, dflash2_mla_work

KEYS = gl.constexpr(64)
CHUNK = gl.constexpr(64)  # columns of one copy: a row of the swizzle
PIECE = gl.constexpr(3)  # chunks of a slot of the ring, and slots of a tile
THREADS = gl.constexpr(160)  # of the group and the producer


@gluon.jit
def dflash2_mla_few_produce(
    q_desc, k_desc, q_smem, k_smem, q_full, k_full, pages_ptr, seq, first_row, first, last, length, base,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    PART: gl.constexpr = PAGE if PAGE < KEYS else KEYS
    if first < last:
        mbarrier.expect(q_full, ROWS * 576 * 2)
        for c in gl.static_range(9):
            async_load(q_desc, [seq, first_row, CHUNK * c], q_full, q_smem.index(c))
    count = PIECE * (last - first)
    for i in range(count):
        tile = first + i // PIECE
        piece = i % PIECE
        slot = (base + i) % SLOTS
        if i >= SLOTS:
            dflash2_sync(anchor, FREE + slot, THREADS)
        mbarrier.expect(k_full.index(slot), KEYS * PIECE * CHUNK * 2)
        for part in gl.static_range(KEYS // PART):
            key = tile * KEYS + part * PART
            page = gl.load(pages_ptr + key // PAGE, mask=key < length, other=-1).to(gl.int32)  # page -1 is filled with zeros
            for c in gl.static_range(PIECE):
                async_load(
                    k_desc, [page, key % PAGE, CHUNK * (PIECE * piece + c)], k_full.index(slot),
                    k_smem.index(PIECE * slot + c).slice(part * PART, PART, 1),
                )  # fmt: skip
    for i in range(gl.maximum(0, count - SLOTS), count):  # leave the barriers as they were found
        dflash2_sync(anchor, FREE + (base + i) % SLOTS, THREADS)


@gluon.jit
def dflash2_mla_few_product(acc, alpha, k_smem, p_smem, g, J: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Value columns 64 J and on, times the probabilities: under way."""
    chunk = k_smem.index(PIECE * ((g + J // PIECE) % SLOTS) + J % PIECE).reshape([KEYS, CHUNK])
    return warpgroup_mma(chunk.permute((1, 0)), p_smem.permute((1, 0)), acc * alpha[None, :], is_async=True)


@gluon.jit
def dflash2_mla_few_consume(
    q_smem, k_smem, p_smem, q_full, k_full, out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond, base, turn,
    scale_log2, ROWS: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])  # of scores and of output: rows are columns
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    row = first_row + gl.arange(0, ROWS, ROW)
    last_key = gl.minimum(length - 1, length - q_len + row // num_heads + right)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    sums = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)  # of a thread's own keys; added up once, at the end
    o0 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o1 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o2 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o3 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o4 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o5 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o6 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    o7 = gl.zeros([CHUNK, ROWS], gl.float32, LAYOUT)
    if first < last:
        mbarrier.wait(q_full, turn & 1)
    for tile in range(first, last):
        g = base + PIECE * (tile - first)
        zero = g >> 30  # the compiler does not know: it would find all addresses before the loop, and spill them
        s = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
        for piece in gl.static_range(PIECE):
            slot = (g + piece) % SLOTS
            mbarrier.wait(k_full.index(slot), ((g + piece) // SLOTS) & 1)
            for c in gl.static_range(PIECE):
                q = q_smem.index(PIECE * piece + c + zero).reshape([ROWS, CHUNK])
                s = warpgroup_mma(k_smem.index(PIECE * slot + c).reshape([KEYS, CHUNK]), q.permute((1, 0)), s, use_acc=piece + c > 0, is_async=True)
        s = warpgroup_mma_wait(0, [s])
        if NEGATIVE:
            s = -s
        key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
        s = gl.where(key[:, None] <= last_key[None, :], s, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(s, 0))
        shift = gl.where(new_max == float("-inf"), 0.0, new_max * scale_log2)  # -inf - -inf would be NaN
        alpha = gl.exp2(row_max * scale_log2 - shift)
        row_max = new_max
        p = gl.exp2(s * scale_log2 - shift[None, :])
        p_smem.permute((1, 0)).store(p.to(DT))
        sums = sums * alpha[None, :] + p
        if (tile + 1) * KEYS > length:
            for j in gl.static_range(8):
                dflash2_clean(k_smem, PIECE * ((g + j // PIECE) % SLOTS) + j % PIECE, tile, length, 0, 0, KEYS, CHUNK, 0)
        fence_async_shared()
        o0 = dflash2_mla_few_product(o0, alpha, k_smem, p_smem, g, 0, SLOTS, ROWS)
        o1 = dflash2_mla_few_product(o1, alpha, k_smem, p_smem, g, 1, SLOTS, ROWS)
        o2 = dflash2_mla_few_product(o2, alpha, k_smem, p_smem, g, 2, SLOTS, ROWS)
        o3 = dflash2_mla_few_product(o3, alpha, k_smem, p_smem, g, 3, SLOTS, ROWS)
        o4 = dflash2_mla_few_product(o4, alpha, k_smem, p_smem, g, 4, SLOTS, ROWS)
        o5 = dflash2_mla_few_product(o5, alpha, k_smem, p_smem, g, 5, SLOTS, ROWS)
        o6 = dflash2_mla_few_product(o6, alpha, k_smem, p_smem, g, 6, SLOTS, ROWS)
        o7 = dflash2_mla_few_product(o7, alpha, k_smem, p_smem, g, 7, SLOTS, ROWS)
        if EARLY:
            o0, o1, o2 = warpgroup_mma_wait(5, [o0, o1, o2])
            dflash2_arrive(anchor, FREE + g % SLOTS, THREADS)
            o3, o4, o5 = warpgroup_mma_wait(2, [o3, o4, o5])
            dflash2_arrive(anchor, FREE + (g + 1) % SLOTS, THREADS)
            o6, o7 = warpgroup_mma_wait(0, [o6, o7])
            dflash2_arrive(anchor, FREE + (g + 2) % SLOTS, THREADS)
        else:
            o0, o1, o2, o3, o4, o5, o6, o7 = warpgroup_mma_wait(0, [o0, o1, o2, o3, o4, o5, o6, o7])
            for piece in gl.static_range(PIECE):
                dflash2_arrive(anchor, FREE + (g + piece) % SLOTS, THREADS)
    row_sum = gl.sum(sums, 0)
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
    lse = row_max + gl.log2(row_sum)
    if splits == 1:
        if HAS_LSE:
            place = (seq.to(gl.int64) * num_heads + row % num_heads) * q_len + row // num_heads
            gl.store(lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows)
    else:
        gl.store(part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
    dflash2_mla_few_store(o0, 0, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o1, 64, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o2, 128, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o3, 192, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o4, 256, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o5, 320, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o6, 384, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
    dflash2_mla_few_store(o7, 448, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)


@gluon.jit
def dflash2_mla_few_store(
    acc, COLUMN: gl.constexpr, factor, out_ptr, part_out_ptr, stride_ob, stride_om, stride_oh, num_heads, seq, part, splits, first_row, row, rows,
    ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    acc = acc * factor[None, :]
    column = COLUMN + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    if splits == 1:
        place = seq.to(gl.int64) * stride_ob + (row // num_heads).to(gl.int64) * stride_om + (row % num_heads).to(gl.int64) * stride_oh
        gl.store(out_ptr + place[None, :] + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :])
    else:
        place = (part * ROWS + row - first_row) * 512
        gl.store(part_out_ptr + place[None, :] + column[:, None], acc, mask=(row < rows)[None, :])


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_few_hopper(
    q_desc, k_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr, counter_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, EARLY: gl.constexpr, PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr, NEGATIVE: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """ROWS rows (token, head) of one sequence over one split of its tiles a work; the programs draw works until none is left.

    A part of ``part_out`` (num parts, ROWS, 512) float32 and ``part_lse`` (num parts, ROWS), log2, is that of its work;
    ``meta`` (batch, 2) tells the merge where the parts of a sequence start and how many they are.
    """
    q_smem = gl.allocate_shared_memory(DT, [9, 1, ROWS, CHUNK], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DT, [PIECE * SLOTS, 1, KEYS, CHUNK], k_desc.layout)
    p_smem = gl.allocate_shared_memory(DT, [ROWS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    fence_async_shared()
    if SPLIT:
        dflash2_mla_trigger()
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
                (dflash2_mla_few_consume, (
                    q_smem, k_smem, p_smem, q_full, k_full, out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
                    stride_ob, stride_om, stride_oh, num_heads, q_len, right, seq, part, splits, first_row, rows, first, last, length, beyond,
                    base, turn, scale_log2, ROWS, SLOTS, EARLY, NEGATIVE, HAS_SINKS, HAS_LSE, DT)),
                (dflash2_mla_few_produce, (
                    q_desc, k_desc, q_smem, k_smem, q_full, k_full, pages, seq, first_row, first, last, length, base, ROWS, SLOTS, PAGE)),
            ], [1], [24])  # fmt: skip
            base += PIECE * (last - first)
            turn += gl.where(first < last, 1, 0)
        work = dflash2_mla_next(work, used * row_tiles, counter_ptr)
