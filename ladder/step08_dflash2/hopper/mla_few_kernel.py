"""Device code of MLA's latent decode for sm_90 with few query rows, in
Gluon: memory binds, so all is done to keep it busy.

The products are turned round: keys, and then value columns, are the 64 rows that a tensor-core instruction wants, and
the 16 or 32 query rows are its columns. So nothing is padded, the 512 columns of output of a row fit the registers of
one warp group, and Q is small: what is left of shared memory is a ring of pieces of 64 keys by 192 columns, three of
them a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import FREE, PLACES, dflash2_arrive, dflash2_sync
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
from .mla_kernel import PLAIN, MlaCall
from .prefill_kernel import dflash2_await_slot, dflash2_clean
from .work import dflash2_field

KEYS = gl.constexpr(64)
CHUNK = gl.constexpr(64)  # columns of one copy: a row of the swizzle
PIECE = gl.constexpr(3)  # chunks of a slot of the ring, and slots of a tile
Q_FREE = gl.constexpr(13)  # hardware barrier behind those of the ring
THREADS = gl.constexpr(160)  # of the group and the producer


# Shared memory of a program: Q, the ring of pieces of keys, probabilities, their mbarriers, and the work items told
# of.
FewMemory = record("FewMemory", "q k p q_full k_full work work_full work_free")


@gluon.jit
def dflash2_mla_few_copy(k_desc, k_smem, k_full, slot, pages, tile, piece, PAGE: gl.constexpr):
    """Bring 192 columns of a tile, a copy for each page and 64 columns."""
    mbarrier.expect(k_full.index(slot), KEYS * PIECE * CHUNK * 2)
    if PAGE >= KEYS:
        for c in gl.static_range(PIECE):
            async_load(
                k_desc, [pages, tile * KEYS % PAGE, CHUNK * (PIECE * piece + c)], k_full.index(slot),
                k_smem.index(PIECE * slot + c),
            )  # fmt: skip
    else:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for part in gl.static_range(KEYS // PAGE):
            page = gl.sum(gl.where(lane == part, pages, 0), 0)
            for c in gl.static_range(PIECE):
                async_load(
                    k_desc,
                    [page, 0, CHUNK * (PIECE * piece + c)],
                    k_full.index(slot),
                    k_smem.index(PIECE * slot + c).slice(part * PAGE, PAGE, 1),
                )


@gluon.jit
def dflash2_mla_few_touch(pages_ptr, stride_pages, seq, batch, capacity, PAGE: gl.constexpr):
    """Ask for the block table's row of a sequence before the lengths
    say which part is wanted: of 32 pages a line, a lane each."""
    page = 32 * gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    row = pages_ptr + gl.minimum(seq, batch - 1).to(gl.int64) * stride_pages
    # volatile: or the compiler would see that nobody reads it
    gl.load(row + page, mask=page < capacity // PAGE, other=0, volatile=True)


@gluon.jit
def dflash2_mla_few_produce(
    q_desc, k_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, row_tiles,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """Draw works, tell the consumers of them, and bring their Q and
    keys; the keys of a work come while the last is computed."""
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    dflash2_mla_few_touch(pages_ptr, stride_pages, gl.program_id(0) // row_tiles, lengths.batch, lengths.capacity, PAGE)
    chunk, slots, each = dflash2_decode_cut(lengths, FOUND, BLOCK_B)
    num_work = slots * row_tiles  # tiles that share keys run side by side
    t = gl.program_id(0)
    turn = 0
    q_turn = 0
    it = 0
    seq = -1
    split = 0
    splits = 1
    length = 0
    if t < num_work:
        seq, split, splits, length = dflash2_decode_find(t // row_tiles, chunk, each, lengths, FOUND, BLOCK_B)
    while seq >= 0:
        dflash2_decode_tell(memory, turn, t, seq, split, splits, length)
        turn += 1
        pages = pages_ptr + seq.to(gl.int64) * stride_pages
        tiles = dflash2_decode_tiles(length, lengths.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        if split >= splits:
            last = first
        first_row = t % row_tiles * ROWS
        # its place is free later than those of keys
        q_piece = gl.where(q_turn == 0, 0, gl.minimum(4, PIECE * (last - first) - 1))
        keys = gl.where(tiles > 0, length, 0)  # no page is looked up for a length that none holds
        ahead = dflash2_decode_pages(pages, first, keys, PAGE)  # looked up a tile ahead: a copy does not wait for it
        for tile in range(first, last):
            mine = ahead
            ahead = dflash2_decode_pages(pages, tile + 1, keys, PAGE)
            for piece in range(PIECE):
                if PIECE * (tile - first) + piece == q_piece:
                    if q_turn > 0:
                        dflash2_sync(anchor, Q_FREE, THREADS)
                    mbarrier.expect(memory.q_full, ROWS * 576 * 2)
                    for c in gl.static_range(9):
                        async_load(q_desc, [seq, first_row, CHUNK * c], memory.q_full, memory.q.index(c))
                dflash2_await_slot(anchor, it, FREE, SLOTS, THREADS)
                dflash2_mla_few_copy(k_desc, memory.k, memory.k_full, it % SLOTS, mine, tile, piece, PAGE)
                it += 1
        q_turn += gl.where(first < last, 1, 0)
        seq = -1
        if num_work > gl.num_programs(0):  # one program for each work needs no counter
            ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
            # every program draws one number too many: the last draw leaves the counter at zero
            if ticket == num_work - 1:
                gl.store(counter_ptr, 0)
            t = ticket + gl.num_programs(0)
            if t < num_work:
                seq, split, splits, length = dflash2_decode_find(t // row_tiles, chunk, each, lengths, FOUND, BLOCK_B)
    dflash2_decode_tell(memory, turn, t, seq, split, splits, length)


@gluon.jit
def dflash2_mla_few_product(acc, alpha, k_smem, p_smem, g, J: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr):
    """Value columns 64 J and on, times the probabilities: under way."""
    chunk = k_smem.index(PIECE * ((g + J // PIECE) % SLOTS) + J % PIECE).reshape([KEYS, CHUNK])
    return warpgroup_mma(chunk.permute((1, 0)), p_smem.permute((1, 0)), acc * alpha[None, :], is_async=True)


@gluon.jit
def dflash2_mla_few_consume(
    memory, call, ROWS: gl.constexpr, SLOTS: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    SPLIT: gl.constexpr, MERGES: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """The warp group that computes: ROWS rows of a work item against
    each of its tiles, then the output or a part of it."""
    # of scores and of output: rows are columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    rows = call.q_len * call.num_heads
    turn = 0
    q_turn = 0
    base = 0
    mbarrier.wait(memory.work_full.index(0), 0)
    seq = dflash2_field(memory.work, 0, 1)
    while seq >= 0:
        told = turn % PLACES
        t = dflash2_field(memory.work, told, 0)
        split = dflash2_field(memory.work, told, 2)
        splits = dflash2_field(memory.work, told, 3)
        length = dflash2_field(memory.work, told, 4)
        mbarrier.arrive(memory.work_free.index(told))
        beyond = (length < 0) | (length > call.capacity)
        length = gl.where(beyond, 0, length)
        tiles = dflash2_decode_tiles(length, call.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        if split >= splits:
            last = first
        first_row = t % call.row_tiles * ROWS
        slot_of_work = t // call.row_tiles
        part = ((t % call.row_tiles) * call.num_slots + slot_of_work).to(gl.int64)
        row = first_row + gl.arange(0, ROWS, ROW)
        last_key = gl.minimum(length - 1, length - call.q_len + row // call.num_heads + call.right)
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
            mbarrier.wait(memory.q_full, q_turn & 1)
            q_turn += 1
        for tile in range(first, last):
            g = base + PIECE * (tile - first)
            zero = g >> 30  # the compiler does not know: it would find all addresses before the loop, and spill them
            s = gl.zeros([KEYS, ROWS], gl.float32, LAYOUT)
            for piece in gl.static_range(PIECE):
                slot = (g + piece) % SLOTS
                mbarrier.wait(memory.k_full.index(slot), ((g + piece) // SLOTS) & 1)
                for c in gl.static_range(PIECE):
                    q = memory.q.index(PIECE * piece + c + zero).reshape([ROWS, CHUNK])
                    k = memory.k.index(PIECE * slot + c).reshape([KEYS, CHUNK])
                    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=piece + c > 0, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            if tile == last - 1:
                dflash2_arrive(anchor, Q_FREE, THREADS)
            if NEGATIVE:
                s = -s
            key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
            s = gl.where(key[:, None] <= last_key[None, :], s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 0))
            shift = gl.where(new_max == float("-inf"), 0.0, new_max * call.scale_log2)  # -inf - -inf would be NaN
            alpha = gl.exp2(row_max * call.scale_log2 - shift)
            row_max = new_max
            p = gl.exp2(s * call.scale_log2 - shift[None, :])
            memory.p.permute((1, 0)).store(p.to(DT))
            sums = sums * alpha[None, :] + p
            if (tile + 1) * KEYS > length:
                for j in gl.static_range(8):
                    dflash2_clean(
                        memory.k, PIECE * ((g + j // PIECE) % SLOTS) + j % PIECE, tile, length, 0, 0, KEYS, CHUNK, 0
                    )
            fence_async_shared()
            o0 = dflash2_mla_few_product(o0, alpha, memory.k, memory.p, g, 0, SLOTS, ROWS)
            o1 = dflash2_mla_few_product(o1, alpha, memory.k, memory.p, g, 1, SLOTS, ROWS)
            o2 = dflash2_mla_few_product(o2, alpha, memory.k, memory.p, g, 2, SLOTS, ROWS)
            o3 = dflash2_mla_few_product(o3, alpha, memory.k, memory.p, g, 3, SLOTS, ROWS)
            o4 = dflash2_mla_few_product(o4, alpha, memory.k, memory.p, g, 4, SLOTS, ROWS)
            o5 = dflash2_mla_few_product(o5, alpha, memory.k, memory.p, g, 5, SLOTS, ROWS)
            o6 = dflash2_mla_few_product(o6, alpha, memory.k, memory.p, g, 6, SLOTS, ROWS)
            o7 = dflash2_mla_few_product(o7, alpha, memory.k, memory.p, g, 7, SLOTS, ROWS)
            o0, o1, o2 = warpgroup_mma_wait(5, [o0, o1, o2])  # a piece goes back as soon as it is read
            dflash2_arrive(anchor, FREE + g % SLOTS, THREADS)
            o3, o4, o5 = warpgroup_mma_wait(2, [o3, o4, o5])
            dflash2_arrive(anchor, FREE + (g + 1) % SLOTS, THREADS)
            o6, o7 = warpgroup_mma_wait(0, [o6, o7])
            dflash2_arrive(anchor, FREE + (g + 2) % SLOTS, THREADS)
        base += PIECE * (last - first)
        if split < splits:
            row_sum = gl.sum(sums, 0)
            row_max = row_max * call.scale_log2
            norm = gl.full([ROWS], 1.0, gl.float32, ROW)
            if HAS_SINKS:
                if splits == 1:  # else the merge counts it
                    logit = gl.load(call.sinks_ptr + row % call.num_heads).to(gl.float32) * 1.4426950408889634
                    top = gl.maximum(row_max, logit)
                    safe = gl.where(top == float("-inf"), 0.0, top)
                    norm = gl.exp2(row_max - safe)
                    row_sum = row_sum * norm + gl.exp2(logit - safe)
                    row_max = top
            row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
            factor = gl.where(beyond, float("nan"), norm / row_sum)  # a length that no page holds: loud, not wrong
            lse = row_max + gl.log2(row_sum)
            if splits == 1:
                if HAS_LSE:
                    place = (
                        seq.to(gl.int64) * call.num_heads + row % call.num_heads
                    ) * call.q_len + row // call.num_heads
                    gl.store(
                        call.lse_ptr + place, gl.where(beyond, float("nan"), lse * 0.6931471805599453), mask=row < rows
                    )
            else:
                gl.store(call.part_lse_ptr + part * ROWS + row - first_row, lse, mask=row < rows)
            dflash2_mla_few_store(o0, 0, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o1, 64, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o2, 128, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o3, 192, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o4, 256, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o5, 320, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o6, 384, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            dflash2_mla_few_store(o7, 448, factor, call, seq, part, splits, first_row, row, rows, ROWS, LAYOUT)
            if SPLIT:
                if MERGES:
                    if splits > 1:
                        dflash2_mla_merge(
                            call.part_out_ptr, call.part_lse_ptr, call.out_ptr, call.lse_ptr, call.sinks_ptr,
                            call.arrivals_ptr, part - split, split, splits, seq,
                            call.num_heads, call.q_len, first_row, call.stride_ob, call.stride_om, call.stride_oh, ROWS,
                            0, 512, HAS_SINKS, HAS_LSE,
                        )  # fmt: skip
                else:
                    if (split == 0) & (first_row == 0):
                        gl.store(call.meta_ptr + 2 * seq, slot_of_work.to(gl.float32))
                        gl.store(call.meta_ptr + 2 * seq + 1, splits.to(gl.float32))
        turn += 1
        mbarrier.wait(memory.work_full.index(turn % PLACES), (turn // PLACES) & 1)
        seq = dflash2_field(memory.work, turn % PLACES, 1)


@gluon.jit
def dflash2_mla_few_store(
    acc, COLUMN: gl.constexpr, factor, call, seq, part, splits, first_row, row, rows, ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Store 64 value columns of ROWS rows: into the output, or into a part of it in float32."""
    acc = acc * factor[None, :]
    column = COLUMN + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    if splits == 1:
        place = (
            seq.to(gl.int64) * call.stride_ob
            + (row // call.num_heads).to(gl.int64) * call.stride_om
            + (row % call.num_heads).to(gl.int64) * call.stride_oh
        )
        gl.store(
            call.out_ptr + place[None, :] + column[:, None],
            acc.to(call.out_ptr.dtype.element_ty),
            mask=(row < rows)[None, :],
        )
    else:
        place = (part * ROWS + row - first_row) * 512
        gl.store(call.part_out_ptr + place[None, :] + column[:, None], acc, mask=(row < rows)[None, :])


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_mla_few_hopper(
    q_desc, k_desc, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr,
    arrivals_ptr, counter_ptr,
    stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, PAGE: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr,
    NEGATIVE: gl.constexpr,
    HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr, MERGES: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """ROWS rows (token, head) of one sequence over one split of its
    tiles a work; the programs draw works until none is left.

    A part of ``part_out`` (num parts, ROWS, 512) float32 and ``part_lse`` (num parts, ROWS), log2, is that of its work.
    With MERGES, the programs merge them, and ``arrivals`` (num parts) counts who is done; else ``meta`` (batch, 2)
    tells the merge where the parts of a sequence start and how many they are.
    """
    q_smem = gl.allocate_shared_memory(DT, [9, 1, ROWS, CHUNK], q_desc.layout)
    k_smem = gl.allocate_shared_memory(DT, [PIECE * SLOTS, 1, KEYS, CHUNK], k_desc.layout)
    p_smem = gl.allocate_shared_memory(DT, [ROWS, KEYS], gl.NVMMASharedLayout(128, 16, rank=2))
    work_smem = gl.allocate_shared_memory(gl.int32, [8 * PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    work_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    work_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=1)
    fence_async_shared()
    row_tiles = (q_len * num_heads + ROWS - 1) // ROWS
    memory = FewMemory(q_smem, k_smem, p_smem, q_full, k_full, work_smem, work_full, work_free)
    lengths = Lengths(seq_lens_ptr, batch, capacity, num_splits, target, most, min_tiles)
    call = MlaCall(
        out_ptr, part_out_ptr, part_lse_ptr, meta_ptr, lse_ptr, sinks_ptr, arrivals_ptr, stride_ob, stride_om,
        stride_oh,
        num_heads, q_len, right, row_tiles, capacity, num_slots, scale_log2,
    )  # fmt: skip
    gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
        (dflash2_mla_few_consume, (memory, call, ROWS, SLOTS, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, MERGES, DT)),
        (dflash2_mla_few_produce, (
            q_desc, k_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, row_tiles, ROWS, SLOTS, PAGE, FOUND,
            BLOCK_B)),
    ], [1], [40])  # fmt: skip
