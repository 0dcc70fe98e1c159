"""Device code of paged GQA decode for sm_90, in Gluon: rows (token, head of a group) on tiles of 64 keys and values.

Memory binds, so all that counts is that copies are always under way. A producer warp asks the copy engine for tiles,
which takes no registers of the warps that compute; one warp group multiplies them, padded to the 64 rows of a wgmma.
Two programs share a processor: while one waits for its tensor cores or its exponentials, the other's copies go on.
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
from .gluon_compat import async_load, record
from .prefill_kernel import dflash2_await_slot, dflash2_clean
from .softmax import dflash2_pack, dflash2_unpack
from .work import dflash2_field

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
MERGE = gl.constexpr(15)  # hardware barrier of the warp group that computes


# The lengths of a batch, and how it is cut into parts: for ``dflash2_decode_cut`` and ``dflash2_decode_find``.
Lengths = record("Lengths", "seq_lens_ptr batch capacity num_splits target most min_tiles")


# What one launch was given, the same for all its programs.
DecodeCall = record("DecodeCall", """
    q_ptr out_ptr part_out_ptr part_lse_ptr lse_ptr sinks_ptr arrivals_ptr stride_qb stride_qm stride_qh stride_ob
    stride_om stride_oh q_len right num_kv_heads row_tiles capacity num_slots scale_log2
""")


# Shared memory of a program: Q, slots of K and V with the mbarriers that say which are full, and the work items told
# of.
DecodeMemory = record("DecodeMemory", "q k v k_full v_full work work_full work_free")


@gluon.jit
def dflash2_decode_tiles(length, capacity):
    """Tiles of a sequence; none when no page holds its length."""
    return gl.where((length < 0) | (length > capacity), 0, (length + KEYS - 1) // KEYS)


@gluon.jit
def dflash2_decode_splits(tiles, chunk):
    """Splits of a sequence, to the nearest, so that a length just above a chunk makes no second."""
    return gl.maximum(1, (2 * tiles + chunk) // (2 * chunk))


@gluon.jit
def dflash2_decode_add(a, b):
    return a + b


@gluon.jit
def dflash2_decode_cut(lengths, FOUND: gl.constexpr, BLOCK_B: gl.constexpr):
    """(tiles of a split, slots in use, splits of every sequence where all have as many tiles, else 0): how the batch is
    cut, as ``portable.decode_kernel.dflash2_chunk`` does it. One warp's work.
    """
    chunk = 1
    each = 0
    slots = lengths.batch * lengths.num_splits
    if FOUND and BLOCK_B == 1:
        tiles = dflash2_decode_tiles(gl.load(lengths.seq_lens_ptr), lengths.capacity)
        chunk = gl.maximum(lengths.min_tiles, (tiles + lengths.target - 1) // lengths.target)
        slots = dflash2_decode_splits(tiles, chunk)
    elif FOUND:
        LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0])
        total = 0
        longest = 0
        for first in range(0, lengths.batch, BLOCK_B):
            b = first + gl.arange(0, BLOCK_B, LAYOUT)
            tiles = dflash2_decode_tiles(
                gl.load(lengths.seq_lens_ptr + b, mask=b < lengths.batch, other=0), lengths.capacity
            )
            total += gl.sum(tiles, 0)
            longest = gl.maximum(longest, gl.max(tiles, 0))
        mean = (total + lengths.batch - 1) // lengths.batch
        wanted = gl.where(longest * 4 > mean * 5, lengths.most, lengths.target)
        chunk = gl.maximum(lengths.min_tiles, (total + wanted - 1) // wanted)
        if longest * lengths.batch == total:  # no need to look at each
            each = dflash2_decode_splits(longest, chunk)
            slots = each * lengths.batch
        else:
            slots = 0
            for first in range(0, lengths.batch, BLOCK_B):
                b = first + gl.arange(0, BLOCK_B, LAYOUT)
                tiles = dflash2_decode_tiles(
                    gl.load(lengths.seq_lens_ptr + b, mask=b < lengths.batch, other=0), lengths.capacity
                )
                slots += gl.sum(gl.where(b < lengths.batch, dflash2_decode_splits(tiles, chunk), 0), 0)
    return chunk, slots, each


@gluon.jit
def dflash2_decode_find(slot, chunk, each, lengths, FOUND: gl.constexpr, BLOCK_B: gl.constexpr):
    """(sequence, split, splits of it, its length) of a slot in use."""
    if FOUND and BLOCK_B == 1:
        seq = slot * 0
        split = slot
        length = gl.load(lengths.seq_lens_ptr)
        splits = dflash2_decode_splits(dflash2_decode_tiles(length, lengths.capacity), chunk)
    elif FOUND:
        LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_B // 32], [32], [1], [0])
        seq = 0
        before = 0
        if each > 0:
            seq = slot // each
            before = seq * each
        else:
            used = 0
            for first in range(0, lengths.batch, BLOCK_B):
                b = first + gl.arange(0, BLOCK_B, LAYOUT)
                tiles = dflash2_decode_tiles(
                    gl.load(lengths.seq_lens_ptr + b, mask=b < lengths.batch, other=0), lengths.capacity
                )
                wants = gl.where(b < lengths.batch, dflash2_decode_splits(tiles, chunk), 0)
                done = (b < lengths.batch) & (used + gl.associative_scan(wants, 0, dflash2_decode_add) <= slot)
                seq += gl.sum(done.to(gl.int32), 0)
                before += gl.sum(gl.where(done, wants, 0), 0)
                used += gl.sum(wants, 0)
        length = gl.load(lengths.seq_lens_ptr + seq)
        split = slot - before
        splits = dflash2_decode_splits(dflash2_decode_tiles(length, lengths.capacity), chunk)
    else:
        seq = slot // lengths.num_splits
        split = slot % lengths.num_splits
        length = gl.load(lengths.seq_lens_ptr + seq)
        splits = gl.maximum(1, gl.minimum(lengths.num_splits, dflash2_decode_tiles(length, lengths.capacity)))
    return seq, split, splits, length


@gluon.jit
def dflash2_decode_tell(memory, turn, t, seq, split, splits, length):
    """Tell the consumers of work t, one field a word; seq -1 is the end."""
    place = turn % PLACES
    mbarrier.wait(memory.work_free.index(place), ((turn // PLACES) & 1) ^ 1)
    zero = gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    memory.work.index(8 * place + 0).store(zero + t)
    memory.work.index(8 * place + 1).store(zero + seq)
    memory.work.index(8 * place + 2).store(zero + split)
    memory.work.index(8 * place + 3).store(zero + splits)
    memory.work.index(8 * place + 4).store(zero + length)
    mbarrier.arrive(memory.work_full.index(place))


@gluon.jit
def dflash2_decode_pages(pages_ptr, tile, length, PAGE: gl.constexpr):
    """The pages of a tile, one a lane, or its only one; none behind the length is looked up."""
    if PAGE >= KEYS:
        key = tile * KEYS
        return gl.load(pages_ptr + key // PAGE, mask=key < length, other=0).to(gl.int32)
    else:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        key = tile * KEYS + lane * PAGE
        return gl.load(pages_ptr + key // PAGE, mask=(lane < KEYS // PAGE) & (key < length), other=0).to(gl.int32)


@gluon.jit
def dflash2_decode_copy(desc, smem, full, slot, pages, kv_head, tile, D: gl.constexpr, PAGE: gl.constexpr):
    """Bring a tile of K or V, a copy for each page."""
    mbarrier.expect(full.index(slot), KEYS * D * 2)
    if PAGE >= KEYS:
        async_load(desc, [pages, kv_head, tile * KEYS % PAGE, 0], full.index(slot), smem.index(slot))
    else:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        for part in gl.static_range(KEYS // PAGE):
            page = gl.sum(gl.where(lane == part, pages, 0), 0)
            async_load(desc, [page, kv_head, 0, 0], full.index(slot), smem.index(slot).slice(part * PAGE, PAGE, 2))


@gluon.jit
def dflash2_decode_produce(
    k_desc, v_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, num_kv_heads, row_tiles,
    D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, FOUND: gl.constexpr, BLOCK_B: gl.constexpr,
):  # fmt: skip
    """The producer's warp: cuts the batch, draws work items, tells the
    consumers of them, and issues the copies of K and V."""
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    heads = num_kv_heads * row_tiles  # tiles that share keys run side by side, then heads that are neighbours in memory
    chunk, slots, each = dflash2_decode_cut(lengths, FOUND, BLOCK_B)
    num_work = slots * heads
    t = gl.program_id(0)
    turn = 0
    it = 0
    seq = -1
    split = 0
    splits = 1
    length = 0
    if t < num_work:
        seq, split, splits, length = dflash2_decode_find(t // heads, chunk, each, lengths, FOUND, BLOCK_B)
    dflash2_decode_tell(memory, turn, t, seq, split, splits, length)
    while seq >= 0:
        kv_head = t % heads // row_tiles
        pages = pages_ptr + seq.to(gl.int64) * stride_pages
        tiles = dflash2_decode_tiles(length, lengths.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        if split >= splits:
            last = first
        keys = gl.where(tiles > 0, length, 0)  # no page is looked up for a length that none holds
        ahead = dflash2_decode_pages(pages, first, keys, PAGE)  # looked up a tile ahead: a copy does not wait for it
        for tile in range(first, gl.minimum(last, first + STAGES)):  # under way before the next work is sought
            mine = ahead
            ahead = dflash2_decode_pages(pages, tile + 1, keys, PAGE)
            dflash2_await_slot(anchor, it, FREE, STAGES, 160)
            dflash2_decode_copy(k_desc, memory.k, memory.k_full, it % STAGES, mine, kv_head, tile, D, PAGE)
            dflash2_await_slot(anchor, it, FREE + STAGES, STAGES, 160)
            dflash2_decode_copy(v_desc, memory.v, memory.v_full, it % STAGES, mine, kv_head, tile, D, PAGE)
            it += 1
        ticket = gl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
        if ticket == num_work - 1:  # every program draws one number too many: the last draw leaves the counter at zero
            gl.store(counter_ptr, 0)
        t = ticket + gl.num_programs(0)
        seq = -1
        if t < num_work:
            seq, split, splits, length = dflash2_decode_find(t // heads, chunk, each, lengths, FOUND, BLOCK_B)
        turn += 1
        dflash2_decode_tell(memory, turn, t, seq, split, splits, length)
        for tile in range(first + STAGES, last):
            mine = ahead
            ahead = dflash2_decode_pages(pages, tile + 1, keys, PAGE)
            dflash2_await_slot(anchor, it, FREE, STAGES, 160)
            dflash2_decode_copy(k_desc, memory.k, memory.k_full, it % STAGES, mine, kv_head, tile, D, PAGE)
            dflash2_await_slot(anchor, it, FREE + STAGES, STAGES, 160)
            dflash2_decode_copy(v_desc, memory.v, memory.v_full, it % STAGES, mine, kv_head, tile, D, PAGE)
            it += 1


@gluon.jit
def dflash2_decode_arrive(anchor, arrivals_ptr, number):
    """Whether this program is the last of ``number`` to come; it leaves the counter at zero."""
    dflash2_sync(anchor, MERGE, 128)  # every warp has stored before one thread announces it
    is_last = gl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == number - 1
    if is_last:
        gl.store(arrivals_ptr, 0)  # ready for the next launch
    return is_last


@gluon.jit
def dflash2_decode_merge(
    anchor, part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, arrivals_ptr, stride_arrivals, first_part, split,
    splits,
    seq, num_kv_heads, kv_head, first_row, q_len,
    stride_om, stride_oh, GROUP: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    SOME: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """The last split of a sequence to finish merges all; of very many, the last of
    some neighbours merges those, and the last of these the rest: a long sequence
    among short ones has over a hundred, which one program would read in turn.
    """
    SPLITS: gl.constexpr = 64 // SOME  # under way together, of SOME rows
    together = gl.where(splits > 4 * SPLITS, SPLITS, splits)
    groups = (splits + together - 1) // together
    start = split // together * together
    number = gl.minimum(together, splits - start)
    stride = groups * 0 + 1
    final = groups == 1
    mine = dflash2_decode_arrive(anchor, arrivals_ptr + (first_part + start) * stride_arrivals, number)
    while mine:
        dflash2_decode_merge_add(
            anchor, part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first_part + start, number, stride, final,
            seq, num_kv_heads, kv_head, first_row, q_len, stride_om, stride_oh, GROUP, D, HAS_SINKS, HAS_LSE, SOME, DT,
        )  # fmt: skip
        mine = final == 0
        if mine:
            # no neighbours start there
            mine = dflash2_decode_arrive(anchor, arrivals_ptr + (first_part + 1) * stride_arrivals, groups)
            start = start * 0
            number = groups
            stride = together
            final = groups > 1


@gluon.jit
def dflash2_decode_merge_add(
    anchor, part_out_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, first_part, number, stride, final,
    seq, num_kv_heads, kv_head, first_row, q_len,
    stride_om, stride_oh, GROUP: gl.constexpr, D: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr,
    SOME: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Add up ``number`` parts, ``stride`` apart, into the output, or into the first of them: for the rows of one tile,
    out = sum_s 2^(lse_s - lse) out_s, lse = log2 sum_s 2^lse_s.

    Parts are added in their order, not in that of arrival: the same bits on every run. They are read past L1 (.cg),
    which may hold what the workspace was before. A sink is one more part, of no value.
    """
    SPLITS: gl.constexpr = 64 // SOME
    L3: gl.constexpr = gl.BlockedLayout([SPLITS, 1, D // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])
    L2: gl.constexpr = gl.SliceLayout(2, L3)
    ROW: gl.constexpr = gl.SliceLayout(0, L2)
    rows = q_len * GROUP
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(0, L3)))
    last_row = gl.minimum(rows, first_row + ROWS)
    for start in range(first_row, last_row, SOME):
        row = start + gl.arange(0, SOME, ROW)
        head = kv_head * GROUP + row % GROUP
        top = gl.full([SOME], float("-inf"), gl.float32, ROW)
        total = gl.zeros([SOME], gl.float32, ROW)
        if HAS_SINKS:
            logit = gl.load(sinks_ptr + head, mask=row < rows, other=0.0).to(gl.float32) * 1.4426950408889634
            top = gl.where(final, logit, float("-inf"))
            total = gl.where(top == float("-inf"), 0.0, 1.0)
        acc = gl.zeros([SOME, D], gl.float32, gl.SliceLayout(0, L3))
        for s in range(0, number, SPLITS):
            part = s + gl.arange(0, SPLITS, gl.SliceLayout(1, L2))
            mask = (part < number)[:, None] & (row < rows)[None, :]
            place = (first_part + part[:, None].to(gl.int64) * stride) * rows + row[None, :]
            lse = gl.load(part_lse_ptr + place, mask=mask, other=float("-inf"), cache_modifier=".cg")
            ptrs = part_out_ptr + gl.expand_dims(place, 2) * D + gl.expand_dims(gl.expand_dims(column, 0), 0)
            out = gl.load(ptrs, mask=gl.expand_dims(mask, 2), other=0.0, cache_modifier=".cg")
            new_top = gl.maximum(top, gl.max(lse, 0))
            shift = gl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
            rescale = gl.exp2(top - shift)
            weight = gl.exp2(lse - shift[None, :])
            acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, gl.SliceLayout(0, L3)))[:, None] + gl.sum(
                out * gl.expand_dims(weight, 2), 0
            )
            total = total * rescale + gl.sum(weight, 0)
            top = new_top
        total = gl.where(total == 0.0, 1.0, total)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, gl.SliceLayout(0, L3)))[:, None]
        o_row = start + gl.arange(0, SOME, gl.SliceLayout(1, gl.SliceLayout(0, L3)))
        if final:
            place_o = (
                (o_row // GROUP).to(gl.int64) * stride_om
                + (kv_head * GROUP + o_row % GROUP).to(gl.int64) * stride_oh
            )
            gl.store(out_ptr + place_o[:, None] + column[None, :], acc.to(DT), mask=(o_row < rows)[:, None])
            if HAS_LSE:
                place_l = (seq.to(gl.int64) * num_kv_heads * GROUP + head) * q_len + row // GROUP
                gl.store(lse_ptr + place_l, (top + gl.log2(total)) * 0.6931471805599453, mask=row < rows)
        else:
            dflash2_sync(anchor, MERGE, 128)  # all have read what is now written over
            gl.store(
                part_out_ptr + (first_part * rows + o_row)[:, None] * D + column[None, :],
                acc,
                mask=(o_row < rows)[:, None],
            )
            gl.store(part_lse_ptr + first_part * rows + row, top + gl.log2(total), mask=row < rows)


@gluon.jit
def dflash2_decode_consume(
    memory, call, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, NEGATIVE: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr, MERGE_ROWS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """The warp group that computes: 64 rows of a work item against
    each of its tiles, then the output or a part of it."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    rows = call.q_len * GROUP
    turn = 0
    it = 0
    mbarrier.wait(memory.work_full.index(0), 0)
    seq = dflash2_field(memory.work, 0, 1)
    while seq >= 0:
        place = turn % PLACES
        t = dflash2_field(memory.work, place, 0)
        split = dflash2_field(memory.work, place, 2)
        splits = dflash2_field(memory.work, place, 3)
        length = dflash2_field(memory.work, place, 4)
        mbarrier.arrive(memory.work_free.index(place))
        beyond = (length < 0) | (length > call.capacity)
        length = gl.where(beyond, 0, length)
        tiles = dflash2_decode_tiles(length, call.capacity)
        first = tiles * split // splits
        last = tiles * (split + 1) // splits
        if split >= splits:
            last = first
        first_row = t % call.row_tiles * ROWS
        kv_head = t // call.row_tiles % call.num_kv_heads
        slot_of_work = t // call.row_tiles // call.num_kv_heads

        q_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, Q_LAYOUT))
        q_place = (
            (q_row // GROUP).to(gl.int64) * call.stride_qm
            + (kv_head * GROUP + q_row % GROUP).to(gl.int64) * call.stride_qh
        )
        column = gl.arange(0, D, gl.SliceLayout(0, Q_LAYOUT))
        q_base = call.q_ptr + seq.to(gl.int64) * call.stride_qb
        q = gl.load(q_base + q_place[:, None] + column[None, :], mask=(q_row < rows)[:, None], other=0.0)
        if NEGATIVE:  # exact; lets call.scale_log2 stay positive
            q = -q
        memory.q.store(q)
        fence_async_shared()

        row = first_row + gl.arange(0, ROWS, ROW)
        last_key = gl.minimum(length - 1, length - call.q_len + row // GROUP + call.right)
        # tiles that every row sees whole
        whole = gl.minimum(gl.maximum(0, length - call.q_len + call.right + 1), length) // KEYS
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        row_sum = gl.zeros([ROWS], gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
        keys = gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))[None, :]
        for tile in range(first, last):
            slot = it % STAGES
            phase = (it // STAGES) & 1
            it += 1
            mbarrier.wait(memory.k_full.index(slot), phase)
            s = warpgroup_mma(
                memory.q, memory.k.index(slot).reshape([KEYS, D]).permute((1, 0)),
                gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT),
                use_acc=False, is_async=True,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, [s])
            dflash2_arrive(anchor, FREE + slot, 160)
            if tile >= whole:
                s = gl.where(keys <= (last_key - tile * KEYS)[:, None], s, float("-inf"))
            new_max = gl.maximum(row_max, gl.max(s, 1))
            shift = gl.where(new_max == float("-inf"), 0.0, new_max * call.scale_log2)  # -inf - -inf would be NaN
            alpha = gl.exp2(row_max * call.scale_log2 - shift)
            p = gl.exp2(s * call.scale_log2 - shift[:, None])
            row_sum = row_sum * alpha + gl.sum(p, 1)
            row_max = new_max
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT))[:, None]
            packed = dflash2_pack(p, KEYS, DT)
            mbarrier.wait(memory.v_full.index(slot), phase)
            if (tile + 1) * KEYS > length:  # 0 x NaN is NaN
                dflash2_clean(memory.v, slot, tile, length, 0, 0, KEYS, D, 0)
            acc = warpgroup_mma(
                dflash2_unpack(packed, KEYS, DT, P_LAYOUT), memory.v.index(slot).reshape([KEYS, D]), acc, is_async=True
            )
            acc, packed = warpgroup_mma_wait(0, [acc, packed])
            dflash2_arrive(anchor, FREE + STAGES + slot, 160)

        if split < splits:
            row_max = row_max * call.scale_log2
            norm = gl.full([ROWS], 1.0, gl.float32, ROW)
            head = kv_head * GROUP + row % GROUP
            if HAS_SINKS:
                if splits == 1:  # else the merge counts it
                    logit = gl.load(call.sinks_ptr + head).to(gl.float32) * 1.4426950408889634
                    top = gl.maximum(row_max, logit)
                    safe = gl.where(top == float("-inf"), 0.0, top)
                    norm = gl.exp2(row_max - safe)
                    row_sum = row_sum * norm + gl.exp2(logit - safe)
                    row_max = top
            row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # no key seen: 0 stays 0, and the log-sum-exp -inf
            factor = gl.where(beyond, float("nan"), norm / row_sum)  # a length that no page holds: loud, not wrong
            row_lse = row_max + gl.log2(row_sum)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, O_LAYOUT))[:, None]
            o_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, O_LAYOUT))
            column_o = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
            if splits == 1:
                if HAS_LSE:
                    place_l = (seq.to(gl.int64) * call.num_kv_heads * GROUP + head) * call.q_len + row // GROUP
                    gl.store(
                        call.lse_ptr + place_l,
                        gl.where(beyond, float("nan"), row_lse * 0.6931471805599453),
                        mask=row < rows,
                    )
                place_o = (
                    (o_row // GROUP).to(gl.int64) * call.stride_om
                    + (kv_head * GROUP + o_row % GROUP).to(gl.int64) * call.stride_oh
                )
                o_base = call.out_ptr + seq.to(gl.int64) * call.stride_ob
                gl.store(o_base + place_o[:, None] + column_o[None, :], acc.to(DT), mask=(o_row < rows)[:, None])
            else:
                part = (kv_head * call.num_slots + slot_of_work).to(gl.int64)
                gl.store(call.part_lse_ptr + part * rows + row, row_lse, mask=row < rows)
                gl.store(
                    call.part_out_ptr + (part * rows + o_row)[:, None] * D + column_o[None, :],
                    acc,
                    mask=(o_row < rows)[:, None],
                )
                dflash2_decode_merge(
                    anchor, call.part_out_ptr, call.part_lse_ptr, call.out_ptr + seq.to(gl.int64) * call.stride_ob,
                    call.lse_ptr, call.sinks_ptr,
                    call.arrivals_ptr + t % call.row_tiles, call.row_tiles, part - split, split, splits, seq,
                    call.num_kv_heads, kv_head, first_row, call.q_len,
                    call.stride_om, call.stride_oh, GROUP, D, HAS_SINKS, HAS_LSE, MERGE_ROWS, DT,
                )  # fmt: skip
        turn += 1
        mbarrier.wait(memory.work_full.index(turn % PLACES), (turn // PLACES) & 1)
        seq = dflash2_field(memory.work, turn % PLACES, 1)


PLAIN = (
    "stride_qb", "stride_qm", "stride_qh", "stride_ob", "stride_om", "stride_oh", "stride_pages", "batch",
    "num_kv_heads",
    "q_len", "capacity", "num_slots", "num_splits", "target", "most", "min_tiles", "right",
)  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=(*PLAIN, "arrivals_ptr", "counter_ptr"))
def dflash2_decode_hopper(
    k_desc, v_desc, q_ptr, pages_ptr, seq_lens_ptr, out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr,
    arrivals_ptr, counter_ptr,
    stride_qb, stride_qm, stride_qh, stride_ob, stride_om, stride_oh, stride_pages,
    batch, num_kv_heads, q_len, capacity, num_slots, num_splits, target, most, min_tiles, right, scale_log2,
    GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, FOUND: gl.constexpr,
    BLOCK_B: gl.constexpr,
    NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, MERGE_ROWS: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Works of 64 rows (token, head) of one KV group over one split of the sequence's tiles, drawn from a counter by as
    many programs as the chip holds.

    The last program to finish a split of a sequence adds them up, MERGE_ROWS rows at a time. A part is the ``rows`` of
    a work: ``part_out`` (KV heads * num_slots * rows, D) float32 and ``part_lse``, log2; ``arrivals`` has a counter for
    each and row tile.
    """
    row_tiles = (q_len * GROUP + ROWS - 1) // ROWS
    q_smem = gl.allocate_shared_memory(DT, [ROWS, D], gl.NVMMASharedLayout(128, 16, rank=2))
    k_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, KEYS, D], v_desc.layout)
    work_smem = gl.allocate_shared_memory(gl.int32, [8 * PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    work_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    work_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=1)
    fence_async_shared()
    memory = DecodeMemory(q_smem, k_smem, v_smem, k_full, v_full, work_smem, work_full, work_free)
    lengths = Lengths(seq_lens_ptr, batch, capacity, num_splits, target, most, min_tiles)
    call = DecodeCall(
        q_ptr, out_ptr, part_out_ptr, part_lse_ptr, lse_ptr, sinks_ptr, arrivals_ptr, stride_qb, stride_qm, stride_qh,
        stride_ob, stride_om, stride_oh, q_len, right, num_kv_heads, row_tiles, capacity, num_slots, scale_log2,
    )  # fmt: skip
    gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
        (dflash2_decode_consume, (memory, call, GROUP, D, STAGES, NEGATIVE, HAS_SINKS, HAS_LSE, MERGE_ROWS, DT)),
        (dflash2_decode_produce, (
            k_desc, v_desc, memory, lengths, pages_ptr, counter_ptr, stride_pages, num_kv_heads, row_tiles,
            D, PAGE, STAGES, FOUND, BLOCK_B)),
    ], [1], [40])  # fmt: skip
