"""Device code of step 08's prefill for sm_90, in Gluon: TMA brings tiles, wgmma multiplies them, warps have one job each.

One program owns 64 * WG query rows of one head. A producer warp issues every copy; WG consumer warp groups own 64 rows
each, which drift apart or take turns: while one fills the tensor cores, another does its exponentials. The slots of K and V go round.
"""

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .barriers import FREE, PLACES, TURN, dflash2_arrive, dflash2_arrive_if, dflash2_sync
from .gluon_compat import async_load, async_store
from .softmax import (
    dflash2_first_pack,
    dflash2_first_softmax,
    dflash2_logits,
    dflash2_pack,
    dflash2_softmax,
    dflash2_unpack,
)
from .work import (
    dflash2_extent,
    dflash2_field,
    dflash2_keys,
    dflash2_next,
    dflash2_publish,
    dflash2_receive,
    dflash2_tile_number,
    dflash2_work,
)


@gluon.jit
def dflash2_copy_keys(
    desc_1, desc_2, smem_1, smem_2, full, slot, batch, kv_head, first_k, tile, keys, low, sink, pages_ptr,
    N: gl.constexpr, D1: gl.constexpr, D2: gl.constexpr, PAGE: gl.constexpr, NUM_RANGES: gl.constexpr,
):  # fmt: skip
    """Bring one tile of K or V: one copy, or one for each page. A page that no row sees is not looked up."""
    mbarrier.expect(full.index(slot), N * (D1 + D2) * 2)
    if PAGE == 0:
        async_load(desc_1, [batch, kv_head, first_k + tile * N, 0], full.index(slot), smem_1.index(slot))
        if D2 > 0:
            async_load(desc_2, [batch, kv_head, first_k + tile * N, D1], full.index(slot), smem_2.index(slot))
    else:
        ROWS: gl.constexpr = PAGE if PAGE < N else N
        for part in gl.static_range(N // ROWS):
            key = tile * N + part * ROWS
            wanted = key < keys
            if NUM_RANGES > 0:
                wanted = wanted & ((key + ROWS > low) | (key < sink))
            page = gl.load(pages_ptr + key // PAGE, mask=wanted, other=0).to(gl.int32)
            async_load(desc_1, [page, kv_head, key % PAGE, 0], full.index(slot), smem_1.index(slot).slice(part * ROWS, ROWS, 2))
            if D2 > 0:
                async_load(desc_2, [page, kv_head, key % PAGE, D1], full.index(slot), smem_2.index(slot).slice(part * ROWS, ROWS, 2))


@gluon.jit
def dflash2_await_slot(anchor, it, FIRST: gl.constexpr, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Wait until every consumer has left the slot of tile number ``it``; the first round finds them empty."""
    if it >= STAGES:
        dflash2_sync(anchor, FIRST + it % STAGES, THREADS)


@gluon.jit
def dflash2_copy_queries(
    q1_desc, q2_desc, q1_smem, q2_smem, q_full, q_free, anchor, turn, batch, head, row,
    D1: gl.constexpr, D2: gl.constexpr, WG: gl.constexpr, QBUF: gl.constexpr, Q_EARLY: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring the Q of work number ``turn``, each group's 64 rows once it needs no more what their buffer holds."""
    for c in gl.static_range(WG):
        place = turn % QBUF * WG + c
        if Q_EARLY:
            if turn > 0:
                dflash2_sync(anchor, FREE + 2 * STAGES + c, 128 + 32)
        else:
            mbarrier.wait(q_free.index(place), ((turn // QBUF) & 1) ^ 1)
        mbarrier.expect(q_full.index(place), 64 * (D1 + D2) * 2)
        async_load(q1_desc, [batch, head, row + 64 * c, 0], q_full.index(place), q1_smem.index(place))
        if D2 > 0:
            async_load(q2_desc, [batch, head, row + 64 * c, D1], q_full.index(place), q2_smem.index(place))


@gluon.jit
def dflash2_produce(
    q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
    q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
    cu_q_ptr, cu_k_ptr, seq_lens_ptr, pages_ptr, table_ptr, counter_ptr, stride_pages,
    seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, NUM_RANGES: gl.constexpr, DYNAMIC: gl.constexpr, SPLIT: gl.constexpr, K_AHEAD: gl.constexpr,
    QBUF: gl.constexpr, Q_EARLY: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * WG
    THREADS: gl.constexpr = 128 * WG + 32
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    anchor = gl.full([32], 0, gl.int32, ONE)
    it = 0
    turn = 0
    t = gl.program_id(0)
    first, batch, head, rows, first_q, keys, first_k, split = dflash2_work(
        t, cu_q_ptr, cu_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, num_heads, num_seqs, num_m, section, num_splits,
        BLOCK_M, RAGGED, PAGE > 0, HAS_RIGHT, SPLIT,
    )  # fmt: skip
    dflash2_publish(work_smem, work_full, work_free, turn, first, batch, head, rows, first_q, keys, first_k, split)
    while t < num_work:
        keys = gl.maximum(keys, 0)
        low, sink, high_tile, low_tile, sink_tile, begin, end = dflash2_keys(
            first, rows, keys, right, table_ptr, split, num_splits, N, BLOCK_M, HAS_RIGHT, NUM_RANGES, SPLIT
        )
        if first >= rows:
            end = begin
        kv_head = head // group_size
        q_batch = batch
        k_batch = batch
        if RAGGED:
            q_batch = 0
            k_batch = 0
        pages = pages_ptr
        if PAGE > 0:
            pages = pages_ptr + batch.to(gl.int64) * stride_pages
        if QBUF > 1:  # the other buffer is free by now
            dflash2_copy_queries(q1_desc, q2_desc, q1_smem, q2_smem, q_full, q_free, anchor, turn, q_batch, head, first_q + first, D1, D2, WG, QBUF, Q_EARLY, STAGES)
        if begin < end:  # K of the first tile may come while the consumers still hold the Q of the work before
            tile = dflash2_tile_number(begin, high_tile, low_tile, sink_tile, NUM_RANGES)
            dflash2_await_slot(anchor, it, FREE, STAGES, THREADS)
            dflash2_copy_keys(k1_desc, k2_desc, k1_smem, k2_smem, k_full, it % STAGES, k_batch, kv_head, first_k, tile, keys, low, sink, pages, N, D1, D2, PAGE, NUM_RANGES)
        if QBUF == 1:
            dflash2_copy_queries(q1_desc, q2_desc, q1_smem, q2_smem, q_full, q_free, anchor, turn, q_batch, head, first_q + first, D1, D2, WG, QBUF, Q_EARLY, STAGES)
        t = dflash2_next(t, counter_ptr, DYNAMIC, num_work)
        next_first = -1
        next_batch = 0
        next_head = 0
        next_rows = 0
        next_first_q = 0
        next_keys = 0
        next_first_k = 0
        next_split = 0
        if t < num_work:
            next_first, next_batch, next_head, next_rows, next_first_q, next_keys, next_first_k, next_split = dflash2_work(
                t, cu_q_ptr, cu_k_ptr, seq_lens_ptr, seqlen_q, seqlen_k, num_heads, num_seqs, num_m, section, num_splits,
                BLOCK_M, RAGGED, PAGE > 0, HAS_RIGHT, SPLIT,
            )  # fmt: skip
        dflash2_publish(
            work_smem, work_full, work_free, turn + 1,
            next_first, next_batch, next_head, next_rows, next_first_q, next_keys, next_first_k, next_split,
        )  # fmt: skip
        for i in range(begin + 1, end + 1):
            if K_AHEAD:
                if i < end:
                    ahead = dflash2_tile_number(i, high_tile, low_tile, sink_tile, NUM_RANGES)
                    dflash2_await_slot(anchor, it + 1, FREE, STAGES, THREADS)
                    dflash2_copy_keys(k1_desc, k2_desc, k1_smem, k2_smem, k_full, (it + 1) % STAGES, k_batch, kv_head, first_k, ahead, keys, low, sink, pages, N, D1, D2, PAGE, NUM_RANGES)
            tile = dflash2_tile_number(i - 1, high_tile, low_tile, sink_tile, NUM_RANGES)
            dflash2_await_slot(anchor, it, FREE + STAGES, STAGES, THREADS)
            dflash2_copy_keys(v1_desc, v2_desc, v1_smem, v2_smem, v_full, it % STAGES, k_batch, kv_head, first_k, tile, keys, low, sink, pages, N, V1, V2, PAGE, NUM_RANGES)
            if not K_AHEAD:
                if i < end:
                    ahead = dflash2_tile_number(i, high_tile, low_tile, sink_tile, NUM_RANGES)
                    dflash2_await_slot(anchor, it + 1, FREE, STAGES, THREADS)
                    dflash2_copy_keys(k1_desc, k2_desc, k1_smem, k2_smem, k_full, (it + 1) % STAGES, k_batch, kv_head, first_k, ahead, keys, low, sink, pages, N, D1, D2, PAGE, NUM_RANGES)
            it += 1
        turn += 1
        first = next_first
        batch = next_batch
        head = next_head
        rows = next_rows
        first_q = next_first_q
        keys = next_keys
        first_k = next_first_k
        split = next_split


@gluon.jit
def dflash2_scores(q1, q2, k1_smem, k2_smem, slot, D1: gl.constexpr, D2: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr):
    """Start the products of 64 rows of Q with the first COLUMNS keys of a tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    k1 = k1_smem.index(slot).reshape([N, D1])
    k2 = k2_smem.index(slot).reshape([N, D2 if D2 > 0 else D1])
    if COLUMNS < N:
        k1 = k1.slice(0, COLUMNS, 0)
        k2 = k2.slice(0, COLUMNS, 0)
    s = warpgroup_mma(q1, k1.permute((1, 0)), gl.zeros([64, COLUMNS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    if D2 > 0:
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def dflash2_multiply(
    acc1, acc2, packed, it, v1_smem, v2_smem, v_full,
    V1: gl.constexpr, V2: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, DT: gl.constexpr,
):  # fmt: skip
    """Start adding the product of the probabilities of tile number ``it`` with the first ROWS rows of its V, once that is there.

    The probabilities beyond ROWS are zero.
    """
    slot = it % STAGES
    mbarrier.wait(v_full.index(slot), (it // STAGES) & 1)
    P1_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc1.type.layout, 2)
    P2_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc2.type.layout, 2)
    v1 = v1_smem.index(slot).reshape([N, V1])
    v2 = v2_smem.index(slot).reshape([N, V2 if V2 > 0 else V1])
    if ROWS < N:
        v1 = v1.slice(0, ROWS, 0)
        v2 = v2.slice(0, ROWS, 0)
        packed, zeros = gl.split(gl.permute(gl.reshape(packed, [64, 2, N // 4]), (0, 2, 1)))
    acc1 = warpgroup_mma(dflash2_unpack(packed, ROWS, DT, P1_LAYOUT), v1, acc1, is_async=True)
    if V2 > 0:
        acc2 = warpgroup_mma(dflash2_unpack(packed, ROWS, DT, P2_LAYOUT), v2, acc2, is_async=True)
    return acc1, acc2


@gluon.jit
def dflash2_settle(acc1, acc2, packed, V2: gl.constexpr):
    """Wait until all products are done; their probabilities stay in place until then."""
    if V2 > 0:
        return warpgroup_mma_wait(0, [acc1, acc2, packed])
    else:
        acc1, packed = warpgroup_mma_wait(0, [acc1, packed])
        return acc1, acc2, packed


@gluon.jit
def dflash2_clean(v_smem, slot, tile, keys, low, sink, N: gl.constexpr, V: gl.constexpr, NUM_RANGES: gl.constexpr):
    """Zero the rows of a V tile that no query sees: 0 x NaN is NaN. Every group writes the same, so none waits."""
    CHUNK: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // V, V // 8], [4, 1], [1, 0])
    for part in gl.static_range(N // CHUNK):
        piece = v_smem.index(slot).reshape([N, V]).slice(part * CHUNK, CHUNK, 0)
        key = tile * N + part * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
        ok = key < keys
        if NUM_RANGES > 0:
            ok = ok & ((key >= low) | (key < sink))
        v = piece.load(LAYOUT)
        piece.store(gl.where(ok[:, None], v, gl.zeros_like(v)))
    fence_async_shared()


@gluon.jit
def dflash2_clean_if_edge(v1_smem, v2_smem, v_full, it, tile, keys, low, sink, N: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, STAGES: gl.constexpr, NUM_RANGES: gl.constexpr):
    """Clean the V tile that is next to be multiplied when a row of it is dead."""
    edge = (tile + 1) * N > keys
    if NUM_RANGES > 0:
        edge = edge | ((tile * N < low) & ((tile + 1) * N > sink))
    if edge:
        slot = it % STAGES
        mbarrier.wait(v_full.index(slot), (it // STAGES) & 1)
        dflash2_clean(v1_smem, slot, tile, keys, low, sink, N, V1, NUM_RANGES)
        if V2 > 0:
            dflash2_clean(v2_smem, slot, tile, keys, low, sink, N, V2, NUM_RANGES)


@gluon.jit
def dflash2_fold(
    acc1, acc2, packed, row_max, row_sum, it, from_i, to_i, last_i, C: gl.constexpr, anchor,
    q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
    high_tile, low_tile, sink_tile, scale_log2, cap,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    CLEAN: gl.constexpr, NUM_RANGES: gl.constexpr, TURNS: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr, MASKED: gl.constexpr,
    P_ROWS: gl.constexpr, DT: gl.constexpr, CHAINS: gl.constexpr, HALVES: gl.constexpr, Q_EARLY: gl.constexpr,
):  # fmt: skip
    """Fold tiles from_i .. to_i into the state. The probabilities of the tile before are multiplied with its V while the
    scores of this one are on the way, and the exponentials of this one run while that product does."""
    THREADS: gl.constexpr = 128 * WG + 32
    O1_LAYOUT: gl.constexpr = acc1.type.layout
    O2_LAYOUT: gl.constexpr = acc2.type.layout
    LANES: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    for i in range(from_i, to_i):
        if CLEAN and MASKED:
            last = dflash2_tile_number(i - 1, high_tile, low_tile, sink_tile, NUM_RANGES)
            dflash2_clean_if_edge(v1_smem, v2_smem, v_full, it, last, keys, low, sink, N, V1, V2, STAGES, NUM_RANGES)
        tile = dflash2_tile_number(i, high_tile, low_tile, sink_tile, NUM_RANGES)
        it += 1
        slot = it % STAGES
        mbarrier.wait(k_full.index(slot), (it // STAGES) & 1)
        if TURNS:
            dflash2_sync(anchor, TURN + C, 256)
        s = dflash2_scores(q1, q2, k1_smem, k2_smem, slot, D1, D2, N, N)
        acc1, acc2 = dflash2_multiply(acc1, acc2, packed, it - 1, v1_smem, v2_smem, v_full, V1, V2, N, P_ROWS, STAGES, DT)
        if TURNS:
            dflash2_arrive(anchor, TURN + (C + 1) % WG, 256)
        s = warpgroup_mma_wait(2 if V2 > 0 else 1, [s])
        dflash2_arrive(anchor, FREE + slot, THREADS)
        if Q_EARLY:
            dflash2_arrive_if(anchor, i == last_i, FREE + 2 * STAGES + C, 128 + 32)
        s = dflash2_logits(s, tile * N, last_row, low_row, sink_row, scale_log2, cap, N, NUM_RANGES, CAP, NEGATIVE, MASKED)
        p, row_max, alpha, part = dflash2_softmax(s, row_max, 1.0 if CAP else scale_log2, N, MASKED, CHAINS, HALVES)
        acc1, acc2, packed = dflash2_settle(acc1, acc2, packed, V2)
        dflash2_arrive(anchor, FREE + STAGES + (it - 1) % STAGES, THREADS)
        row_sum = row_sum * gl.convert_layout(alpha, LANES)[:, None] + gl.convert_layout(part, row_sum.type.layout)
        acc1 = acc1 * gl.convert_layout(alpha, gl.SliceLayout(1, O1_LAYOUT))[:, None]
        if V2 > 0:
            acc2 = acc2 * gl.convert_layout(alpha, gl.SliceLayout(1, O2_LAYOUT))[:, None]
        packed = dflash2_pack(p, N, DT)
    return acc1, acc2, packed, row_max, row_sum, it


@gluon.jit
def dflash2_leave(
    it, begin, dead, end, C: gl.constexpr, anchor, k_full, v_full,
    STAGES: gl.constexpr, WG: gl.constexpr, TURNS: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Give back the tiles begin .. dead, which lie wholly to the right of this group's rows."""
    for i in range(begin, dead):
        slot = it % STAGES
        phase = (it // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        dflash2_arrive(anchor, FREE + slot, THREADS)
        mbarrier.wait(v_full.index(slot), phase)
        dflash2_arrive(anchor, FREE + STAGES + slot, THREADS)
        if TURNS and end - i > 1:
            dflash2_sync(anchor, TURN + C, 256)
            dflash2_arrive(anchor, TURN + (C + 1) % WG, 256)
        it += 1
    return it


@gluon.jit
def dflash2_start(
    it, dead, end, C: gl.constexpr, anchor, q1, q2, k1_smem, k2_smem, k_full, last_row, low_row, sink_row,
    high_tile, low_tile, sink_tile, scale_log2, cap,
    D1: gl.constexpr, D2: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr, NUM_RANGES: gl.constexpr,
    CAP: gl.constexpr, NEGATIVE: gl.constexpr, DT: gl.constexpr, CHAINS: gl.constexpr, Q_EARLY: gl.constexpr,
):  # fmt: skip
    """Scores and probabilities of the first tile of a work that some row of this group sees."""
    THREADS: gl.constexpr = 128 * WG + 32
    tile = dflash2_tile_number(dead, high_tile, low_tile, sink_tile, NUM_RANGES)
    slot = it % STAGES
    mbarrier.wait(k_full.index(slot), (it // STAGES) & 1)
    s = dflash2_scores(q1, q2, k1_smem, k2_smem, slot, D1, D2, N, COLUMNS)
    s = warpgroup_mma_wait(0, [s])
    dflash2_arrive(anchor, FREE + slot, THREADS)
    if Q_EARLY:
        dflash2_arrive_if(anchor, dead + 1 == end, FREE + 2 * STAGES + C, 128 + 32)
    p, row_max, row_sum = dflash2_first_softmax(
        s, tile * N, last_row, low_row, sink_row, scale_log2, cap, N, COLUMNS, NUM_RANGES, CAP, NEGATIVE, CHAINS
    )
    return dflash2_first_pack(p, N, COLUMNS, DT), row_max, row_sum


@gluon.jit
def dflash2_rest(
    acc1, acc2, packed, row_max, row_sum, it, dead, masked, full, end, C: gl.constexpr, anchor,
    q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
    high_tile, low_tile, sink_tile, scale_log2, cap,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, N: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    CLEAN: gl.constexpr, NUM_RANGES: gl.constexpr, ALIGNED: gl.constexpr, TURNS: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr,
    DT: gl.constexpr, CHAINS: gl.constexpr, HALVES: gl.constexpr, Q_EARLY: gl.constexpr,
):  # fmt: skip
    """Fold all tiles behind the first: with a mask, without one, and with one again where a window ends."""
    if ALIGNED:  # no mask behind the first tile, of which a group may have done a half
        if COLUMNS < N:
            acc1, acc2, packed, row_max, row_sum, it = dflash2_fold(
                acc1, acc2, packed, row_max, row_sum, it, dead + 1, gl.minimum(dead + 2, end), end - 1, C, anchor,
                q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
                high_tile, low_tile, sink_tile, scale_log2, cap, D1, D2, V1, V2, N, STAGES, WG,
                CLEAN, NUM_RANGES, TURNS, CAP, NEGATIVE, False, COLUMNS, DT, CHAINS, HALVES, Q_EARLY,
            )  # fmt: skip
            masked = gl.minimum(dead + 2, end)
    else:
        acc1, acc2, packed, row_max, row_sum, it = dflash2_fold(
            acc1, acc2, packed, row_max, row_sum, it, dead + 1, masked, end - 1, C, anchor,
            q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
            high_tile, low_tile, sink_tile, scale_log2, cap, D1, D2, V1, V2, N, STAGES, WG,
            CLEAN, NUM_RANGES, TURNS, CAP, NEGATIVE, True, N, DT, CHAINS, HALVES, Q_EARLY,
        )  # fmt: skip
        if CLEAN:
            tile = dflash2_tile_number(masked - 1, high_tile, low_tile, sink_tile, NUM_RANGES)
            dflash2_clean_if_edge(v1_smem, v2_smem, v_full, it, tile, keys, low, sink, N, V1, V2, STAGES, NUM_RANGES)
    acc1, acc2, packed, row_max, row_sum, it = dflash2_fold(
        acc1, acc2, packed, row_max, row_sum, it, masked, full, end - 1, C, anchor,
        q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
        high_tile, low_tile, sink_tile, scale_log2, cap, D1, D2, V1, V2, N, STAGES, WG,
        CLEAN, NUM_RANGES, TURNS, CAP, NEGATIVE, False, N, DT, CHAINS, HALVES, Q_EARLY,
    )  # fmt: skip
    if NUM_RANGES > 0:
        acc1, acc2, packed, row_max, row_sum, it = dflash2_fold(
            acc1, acc2, packed, row_max, row_sum, it, full, end, end - 1, C, anchor,
            q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
            high_tile, low_tile, sink_tile, scale_log2, cap, D1, D2, V1, V2, N, STAGES, WG,
            CLEAN, NUM_RANGES, TURNS, CAP, NEGATIVE, True, N, DT, CHAINS, HALVES, Q_EARLY,
        )  # fmt: skip
    if CLEAN:
        last = dflash2_tile_number(end - 1, high_tile, low_tile, sink_tile, NUM_RANGES)
        dflash2_clean_if_edge(v1_smem, v2_smem, v_full, it, last, keys, low, sink, N, V1, V2, STAGES, NUM_RANGES)
    return acc1, acc2, packed, row_max, row_sum, it


@gluon.jit
def dflash2_consume(
    C: gl.constexpr, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
    q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
    out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
    seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, HEAD_V: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, NUM_RANGES: gl.constexpr, DYNAMIC: gl.constexpr,
    TURNS: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr,
    O_IN_Q: gl.constexpr, DT: gl.constexpr, QBUF: gl.constexpr, DIRECT: gl.constexpr, Q_EARLY: gl.constexpr,
    CHAINS: gl.constexpr, HALVES: gl.constexpr, ALIGNED: gl.constexpr,
):  # fmt: skip
    """Group C of the consumers: rows 64 C .. 64 C + 63 of every work."""
    BLOCK_M: gl.constexpr = 64 * WG
    THREADS: gl.constexpr = 128 * WG + 32
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O1_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V1, 16])
    O2_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V2 if V2 > 0 else 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    CLEAN: gl.constexpr = RAGGED or NUM_RANGES > 0
    LEAVE: gl.constexpr = HAS_RIGHT and NUM_RANGES == 0 and not ALIGNED
    COLUMNS: gl.constexpr = N // 2 if ALIGNED and C == 0 else N  # of the first tile, which the diagonal crosses
    Q_FREE_LAST: gl.constexpr = O_IN_Q and not (DIRECT or RAGGED or SPLIT)  # Q's memory takes the output
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    it = 0
    turn = 0
    if TURNS and C == WG - 1:
        dflash2_arrive(anchor, TURN, 256)
    first, rows, keys = dflash2_receive(work_smem, work_full, turn)
    while first >= 0:
        place = turn % PLACES
        q_place = turn % QBUF * WG + C
        q1 = q1_smem.index(q_place).reshape([64, D1])
        q2 = q2_smem.index(q_place).reshape([64, D2 if D2 > 0 else D1])
        mine = first + 64 * C
        row = mine + gl.arange(0, 64, ROW)
        acc1 = gl.zeros([64, V1], gl.float32, O1_LAYOUT)
        acc2 = gl.zeros([64, V2 if V2 > 0 else 16], gl.float32, O2_LAYOUT)
        split = first * 0
        if SPLIT:
            split = dflash2_field(work_smem, place, 7)
        keys = gl.maximum(keys, 0)
        low, sink, high_tile, low_tile, sink_tile, begin, end, dead, masked, full, last_row, low_row, sink_row = dflash2_extent(
            C, first, rows, keys, right, table_ptr, split, num_splits, ROW, N, BLOCK_M, HAS_RIGHT, NUM_RANGES, SPLIT
        )
        top = gl.full([64], float("-inf"), gl.float32, ROW)
        total_by_lane = gl.sum(gl.sum(gl.reshape(gl.zeros([64, N], gl.float32, S_LAYOUT), [64, N // 8, 4, 2]), 3), 1)
        mbarrier.wait(q_full.index(q_place), (turn // QBUF) & 1)
        if LEAVE:
            it = dflash2_leave(it, begin, dead, end, C, anchor, k_full, v_full, STAGES, WG, TURNS, THREADS)
        if dead < end:
            packed, top, total_by_lane = dflash2_start(
                it, dead, end, C, anchor, q1, q2, k1_smem, k2_smem, k_full, last_row, low_row, sink_row,
                high_tile, low_tile, sink_tile, scale_log2, cap,
                D1, D2, N, COLUMNS, STAGES, WG, NUM_RANGES, CAP, NEGATIVE, DT, CHAINS, Q_EARLY,
            )  # fmt: skip
            acc1, acc2, packed, top, total_by_lane, it = dflash2_rest(
                acc1, acc2, packed, top, total_by_lane, it, dead, masked, full, end, C, anchor,
                q1, q2, k1_smem, k2_smem, v1_smem, v2_smem, k_full, v_full, keys, low, sink, last_row, low_row, sink_row,
                high_tile, low_tile, sink_tile, scale_log2, cap, D1, D2, V1, V2, N, COLUMNS, STAGES, WG,
                CLEAN, NUM_RANGES, ALIGNED, TURNS, CAP, NEGATIVE, DT, CHAINS, HALVES, Q_EARLY,
            )  # fmt: skip
            if not Q_FREE_LAST and not Q_EARLY:
                mbarrier.arrive(q_free.index(q_place))
            acc1, acc2 = dflash2_multiply(acc1, acc2, packed, it, v1_smem, v2_smem, v_full, V1, V2, N, N, STAGES, DT)
            acc1, acc2, packed = dflash2_settle(acc1, acc2, packed, V2)
            dflash2_arrive(anchor, FREE + STAGES + it % STAGES, THREADS)
            it += 1
        elif Q_EARLY:
            dflash2_arrive(anchor, FREE + 2 * STAGES + C, 128 + 32)
        elif not Q_FREE_LAST:
            mbarrier.arrive(q_free.index(q_place))

        batch = dflash2_field(work_smem, place, 1)
        head = dflash2_field(work_smem, place, 2)
        first_q = dflash2_field(work_smem, place, 4)
        total = gl.convert_layout(gl.sum(total_by_lane, 1), ROW)
        if not CAP:
            top = top * scale_log2
        norm = gl.full([64], 1.0, gl.float32, ROW)
        if HAS_SINKS and not SPLIT:  # one more logit in the denominator
            logit = gl.load(sinks_ptr + head).to(gl.float32) * 1.4426950408889634
            higher = gl.maximum(top, logit)
            safe = gl.where(higher == float("-inf"), 0.0, higher)  # a sink of -inf for a row without keys: -inf - -inf would be NaN
            norm = gl.exp2(top - safe)
            total = total * norm + gl.exp2(logit - safe)
            top = higher
        total = gl.where(total == 0.0, 1.0, total)  # no key seen: 0 stays 0, and the log-sum-exp -inf
        factor = norm / total
        if PAGE > 0:
            beyond = dflash2_field(work_smem, place, 5) < 0
            factor = gl.where(beyond, float("nan"), factor)  # a length that no page holds: loud, not wrong
        acc1 = acc1 * gl.convert_layout(factor, gl.SliceLayout(1, O1_LAYOUT))[:, None]
        if V2 > 0:
            acc2 = acc2 * gl.convert_layout(factor, gl.SliceLayout(1, O2_LAYOUT))[:, None]
        if HAS_LSE:
            lse = (top + gl.log2(total)) * 0.6931471805599453
            if PAGE > 0:
                lse = gl.where(beyond, float("nan"), lse)
            lse_place = first_q + row
            if not RAGGED:
                lse_place += (batch * num_heads).to(gl.int64) * stride_lse
            if SPLIT:
                lse_place += split.to(gl.int64) * num_heads * (1 if RAGGED else num_seqs) * stride_lse
            gl.store(lse_ptr + head.to(gl.int64) * stride_lse + lse_place, lse, mask=row < rows)
        if RAGGED or SPLIT or DIRECT:
            dflash2_store(acc1, out_ptr, batch, head, first_q, mine, rows, split, num_seqs, num_heads, seqlen_q, stride_om, stride_oh, stride_ob, 0, V1, HEAD_V, RAGGED, SPLIT)
            if V2 > 0:
                dflash2_store(acc2, out_ptr, batch, head, first_q, mine, rows, split, num_seqs, num_heads, seqlen_q, stride_om, stride_oh, stride_ob, V1, V2, HEAD_V, RAGGED, SPLIT)
        else:
            o1 = o1_smem.index(C)
            o2 = o2_smem.index(C)
            if not O_IN_Q:
                tma.store_wait(0)  # the tile before has left its buffer
            o1.reshape([64, V1]).store(acc1.to(DT))
            if V2 > 0:
                o2.reshape([64, V2]).store(acc2.to(DT))
            fence_async_shared()
            async_store(o1_desc, [batch, head, mine, 0], o1)
            if V2 > 0:
                async_store(o2_desc, [batch, head, mine, V1], o2)
            if O_IN_Q:
                tma.store_wait(0)
                mbarrier.arrive(q_free.index(q_place))
        mbarrier.arrive(work_free.index(place))
        turn += 1
        first, rows, keys = dflash2_receive(work_smem, work_full, turn)
    tma.store_wait(0)


@constexpr_function
def dflash2_wide(columns):
    """The layout of a product's (64, columns) after the four lanes of a row have exchanged columns: each has eight neighbours."""
    rest = [[0, c] for c in (32, 64, 128) if c < columns]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *rest], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.jit
def dflash2_store(
    acc, out_ptr, batch, head, first_q, mine, rows, split, num_seqs, num_heads, seqlen_q, stride_om, stride_oh, stride_ob,
    COLUMN: gl.constexpr, V: gl.constexpr, HEAD_V: gl.constexpr, RAGGED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Store from registers what a copy of a whole tile would run over (a ragged end), or has no room for, or float32 parts."""
    LAYOUT: gl.constexpr = acc.type.layout if SPLIT else dflash2_wide(V)
    acc = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT)
    row = mine + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = COLUMN + gl.arange(0, V, gl.SliceLayout(0, LAYOUT))
    if RAGGED:
        place = (first_q + row).to(gl.int64) * stride_om + head.to(gl.int64) * stride_oh
        if SPLIT:
            place += split.to(gl.int64) * num_heads * stride_oh
    else:
        place = row.to(gl.int64) * stride_om + (split.to(gl.int64) * num_seqs + batch) * stride_ob + head.to(gl.int64) * stride_oh
    if not SPLIT:
        place = gl.multiple_of(place, 8)  # ``supports_prefill`` asks for it
    seen = (row < rows)[:, None]
    if COLUMN + V > HEAD_V:
        seen = seen & (column < HEAD_V)[None, :]
    gl.store(out_ptr + place[:, None] + column[None, :], acc, mask=seen)


PLAIN = (  # lengths and strides: values, never reasons to compile again
    "stride_om", "stride_oh", "stride_ob", "stride_lse", "stride_pages", "seqlen_q", "seqlen_k", "num_heads", "group_size", "num_seqs",
    "num_m", "section", "num_splits", "num_work", "right",
)  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_prefill_hopper(
    q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, o1_desc, o2_desc,
    out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, pages_ptr, table_ptr, counter_ptr,
    stride_om, stride_oh, stride_ob, stride_lse, stride_pages,
    seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
    D1: gl.constexpr, D2: gl.constexpr, V1: gl.constexpr, V2: gl.constexpr, HEAD_V: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, WG: gl.constexpr,
    HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr, PAGE: gl.constexpr, NUM_RANGES: gl.constexpr, DYNAMIC: gl.constexpr,
    TURNS: gl.constexpr, CAP: gl.constexpr, NEGATIVE: gl.constexpr, HAS_SINKS: gl.constexpr, HAS_LSE: gl.constexpr, SPLIT: gl.constexpr,
    O_IN_Q: gl.constexpr, DT: gl.constexpr, K_AHEAD: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    QBUF: gl.constexpr, DIRECT: gl.constexpr, Q_EARLY: gl.constexpr, CHAINS: gl.constexpr, HALVES: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """Attention of all rows; persistent: a grid of at most one program per SM walks ``num_work`` tiles.

    D1 + D2, V1 + V2: columns of Q and K, of V. N: keys of a tile; STAGES: slots of K and of V; WG: groups of 64 rows.
    TURNS: groups pass the tensor cores on to each other. QBUF: buffers of Q. ALIGNED: the diagonal runs through the corners of
    the tiles, so that of a work only the first needs a mask, and the first group half of that one.
    Q's memory: given back after the last scores and a hardware barrier (Q_EARLY), or taking the output first (O_IN_Q).
    DIRECT: output straight from registers. CHAINS, HALVES: see ``dflash2_softmax``.
    """
    q1_smem = gl.allocate_shared_memory(DT, [QBUF * WG, 1, 1, 64, D1], q1_desc.layout)
    k1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, D1], k1_desc.layout)
    v1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, V1], v1_desc.layout)
    q2_smem = q1_smem
    k2_smem = k1_smem
    v2_smem = v1_smem
    if D2 > 0:
        q2_smem = gl.allocate_shared_memory(DT, [QBUF * WG, 1, 1, 64, D2], q2_desc.layout)
        k2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, D2], k2_desc.layout)
    if V2 > 0:
        v2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, V2], v2_desc.layout)
    o1_smem = q1_smem
    o2_smem = q2_smem
    if not O_IN_Q and not DIRECT:
        o1_smem = gl.allocate_shared_memory(DT, [WG, 1, 1, 64, V1], o1_desc.layout)
        if V2 > 0:
            o2_smem = gl.allocate_shared_memory(DT, [WG, 1, 1, 64, V2], o2_desc.layout)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [QBUF * WG, 1], BAR)
    q_free = gl.allocate_shared_memory(gl.int64, [QBUF * WG, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    work_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BAR)
    work_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BAR)
    work_smem = gl.allocate_shared_memory(gl.int32, [8 * PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(QBUF * WG):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_free.index(i), count=WG)
    fence_async_shared()
    if WG == 3:
        gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
            (dflash2_consume, (0, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
                D1, D2, V1, V2, HEAD_V, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC,
                TURNS, CAP, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, O_IN_Q, DT, QBUF, DIRECT, Q_EARLY, CHAINS, HALVES, ALIGNED)),
            (dflash2_consume, (1, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
                D1, D2, V1, V2, HEAD_V, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC,
                TURNS, CAP, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, O_IN_Q, DT, QBUF, DIRECT, Q_EARLY, CHAINS, HALVES, ALIGNED)),
            (dflash2_consume, (2, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
                D1, D2, V1, V2, HEAD_V, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC,
                TURNS, CAP, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, O_IN_Q, DT, QBUF, DIRECT, Q_EARLY, CHAINS, HALVES, ALIGNED)),
            (dflash2_produce, (q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                cu_q_ptr, cu_k_ptr, seq_lens_ptr, pages_ptr, table_ptr, counter_ptr, stride_pages,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right,
                D1, D2, V1, V2, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC, SPLIT, K_AHEAD, QBUF, Q_EARLY)),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([  # the tuples stand here in full: a variable would turn their constants into values
            (dflash2_consume, (0, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
                D1, D2, V1, V2, HEAD_V, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC,
                TURNS, CAP, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, O_IN_Q, DT, QBUF, DIRECT, Q_EARLY, CHAINS, HALVES, ALIGNED)),
            (dflash2_consume, (1, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem, o1_desc, o2_desc,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob, stride_lse,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
                D1, D2, V1, V2, HEAD_V, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC,
                TURNS, CAP, NEGATIVE, HAS_SINKS, HAS_LSE, SPLIT, O_IN_Q, DT, QBUF, DIRECT, Q_EARLY, CHAINS, HALVES, ALIGNED)),
            (dflash2_produce, (q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem,
                q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
                cu_q_ptr, cu_k_ptr, seq_lens_ptr, pages_ptr, table_ptr, counter_ptr, stride_pages,
                seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right,
                D1, D2, V1, V2, N, STAGES, WG, HAS_RIGHT, RAGGED, PAGE, NUM_RANGES, DYNAMIC, SPLIT, K_AHEAD, QBUF, Q_EARLY)),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
