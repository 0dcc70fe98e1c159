"""Device code of step 08's prefill for sm_90, in Gluon: TMA brings
tiles, wgmma multiplies them, warps have one job each.

One program owns 64 * WG query rows of one head. A producer warp issues every copy; WG
consumer warp groups own 64 rows each, which drift apart or take turns: while one fills the
tensor cores, another does its exponentials. The slots of K and V go round. What a kernel is
compiled for is its ``PrefillShape``; a ``Call`` and a ``Memory`` are what a launch was given.
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

from .barriers import PLACES, TURN, dflash2_arrive, dflash2_arrive_if, dflash2_sync
from .gluon_compat import async_load, async_store, record
from .softmax import (
    dflash2_first_pack,
    dflash2_first_softmax,
    dflash2_logits,
    dflash2_pack,
    dflash2_softmax,
    dflash2_unpack,
)
from .work import (
    WorkItem,
    dflash2_extent,
    dflash2_field,
    dflash2_next,
    dflash2_publish,
    dflash2_receive,
    dflash2_tile_number,
    dflash2_tiles,
    dflash2_work,
)

# What one launch was given: pointers, lengths, strides and numbers, the same for all its programs.
Call = record("Call", """
    out_ptr lse_ptr sinks_ptr cu_q_ptr cu_k_ptr seq_lens_ptr table_ptr stride_om stride_oh stride_ob stride_lse
    seqlen_q seqlen_k num_heads group_size num_seqs num_m section num_splits num_work right scale_log2 cap
""")


# Shared memory of a program: buffers of Q, slots of K and V, places of output, each in two parts of the columns; the
# mbarriers that say which are full and which are free; and the work items that the producer has told of.
Memory = record("Memory", "q1 q2 k1 k2 v1 v2 o1 o2 q_full q_free k_full v_full work work_full work_free")


# Where the keys of a work item lie: batch and head of K and V, the first row of a packed sequence, its block table.
Pages = record("Pages", "batch head first table_ptr keys")


# The softmax of 64 rows so far: accumulators (64, V1) and (64, V2), the probabilities (64, N / 2) of the last tile,
# packed in pairs and not yet multiplied, the running maximum (64), and the running sums (64, lanes).
State = record("State", "acc1 acc2 packed row_max row_sum")


@gluon.jit
def dflash2_copy_keys(
    desc_1, desc_2, smem_1, smem_2, full, slot, where, tile, tiles, D1: gl.constexpr, D2: gl.constexpr,
    shape: gl.constexpr,
):  # fmt: skip
    """Bring one tile of K or V: one copy, or one for each page. A page that no row sees is not looked up."""
    N: gl.constexpr = shape.N
    PAGE: gl.constexpr = shape.PAGE
    mbarrier.expect(full.index(slot), N * (D1 + D2) * 2)
    if PAGE == 0:
        async_load(desc_1, [where.batch, where.head, where.first + tile * N, 0], full.index(slot), smem_1.index(slot))
        if D2 > 0:
            async_load(
                desc_2, [where.batch, where.head, where.first + tile * N, D1], full.index(slot), smem_2.index(slot)
            )
    else:
        ROWS: gl.constexpr = PAGE if PAGE < N else N
        for part in gl.static_range(N // ROWS):
            key = tile * N + part * ROWS
            wanted = key < where.keys
            if shape.NUM_RANGES > 0:
                wanted = wanted & ((key + ROWS > tiles.low) | (key < tiles.sink))
            page = gl.load(where.table_ptr + key // PAGE, mask=wanted, other=0).to(gl.int32)
            place = smem_1.index(slot).slice(part * ROWS, ROWS, 2)
            async_load(desc_1, [page, where.head, key % PAGE, 0], full.index(slot), place)
            if D2 > 0:
                place = smem_2.index(slot).slice(part * ROWS, ROWS, 2)
                async_load(desc_2, [page, where.head, key % PAGE, D1], full.index(slot), place)


@gluon.jit
def dflash2_await_slot(anchor, it, FIRST: gl.constexpr, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Wait until every consumer has left the slot of tile number ``it``; the first round finds them empty."""
    if it >= STAGES:
        dflash2_sync(anchor, FIRST + it % STAGES, THREADS)


@gluon.jit
def dflash2_copy_queries(q1_desc, q2_desc, memory, anchor, turn, batch, head, row, shape: gl.constexpr):
    """Bring the Q of work item number ``turn``, each group's 64 rows once it needs no more what their buffer holds."""
    WG: gl.constexpr = shape.WG
    for c in gl.static_range(WG):
        place = turn % shape.QBUF * WG + c
        if shape.Q_EARLY:
            if turn > 0:
                dflash2_sync(anchor, shape.Q_FREE + c, 128 + 32)
        else:
            mbarrier.wait(memory.q_free.index(place), ((turn // shape.QBUF) & 1) ^ 1)
        full = memory.q_full.index(place)
        mbarrier.expect(full, 64 * (shape.D1 + shape.D2) * 2)
        async_load(q1_desc, [batch, head, row + 64 * c, 0], full, memory.q1.index(place))
        if shape.D2 > 0:
            async_load(q2_desc, [batch, head, row + 64 * c, shape.D1], full, memory.q2.index(place))


@gluon.jit
def dflash2_bring_keys(k1_desc, k2_desc, memory, anchor, it, i, where, tiles, shape: gl.constexpr):
    """K of the tile at place i of the list, into the slot of tile number ``it``."""
    tile = dflash2_tile_number(i, tiles, shape)
    dflash2_await_slot(anchor, it, shape.K_FREE, shape.STAGES, shape.THREADS)
    dflash2_copy_keys(
        k1_desc,
        k2_desc,
        memory.k1,
        memory.k2,
        memory.k_full,
        it % shape.STAGES,
        where,
        tile,
        tiles,
        shape.D1,
        shape.D2,
        shape,
    )


@gluon.jit
def dflash2_produce(
    q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, pages_ptr, stride_pages, counter_ptr, memory, call,
    shape: gl.constexpr,
):  # fmt: skip
    """The producer's warp: draws work items, tells the consumers of them, and issues every copy of Q, K and V."""
    STAGES: gl.constexpr = shape.STAGES
    anchor = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    it = 0
    turn = 0
    t = gl.program_id(0)
    item = dflash2_work(t, call, shape)
    first, batch, head, rows, first_q, keys, first_k, split = (
        item.first, item.batch, item.head, item.rows, item.first_q, item.keys, item.first_k, item.split,
    )  # fmt: skip
    dflash2_publish(memory, turn, item)
    while t < call.num_work:
        # Where the tiles of this work item lie.
        keys = gl.maximum(keys, 0)
        tiles = dflash2_tiles(WorkItem(first, batch, head, rows, first_q, keys, first_k, split), keys, call, shape)
        kv_head = head // call.group_size
        q_batch = batch
        k_batch = batch
        if shape.RAGGED:
            q_batch = 0
            k_batch = 0
        pages = pages_ptr
        if shape.PAGE > 0:
            pages = pages_ptr + batch.to(gl.int64) * stride_pages
        where = Pages(k_batch, kv_head, first_k, pages, keys)
        # Q, and K of the first tile, which may come while the consumers still hold the Q of the work item before.
        if shape.QBUF > 1:  # the other buffer is free by now
            dflash2_copy_queries(q1_desc, q2_desc, memory, anchor, turn, q_batch, head, first_q + first, shape)
        if tiles.begin < tiles.end:
            dflash2_bring_keys(k1_desc, k2_desc, memory, anchor, it, tiles.begin, where, tiles, shape)
        if shape.QBUF == 1:
            dflash2_copy_queries(q1_desc, q2_desc, memory, anchor, turn, q_batch, head, first_q + first, shape)
        # The next work item, while the copies are under way.
        t = dflash2_next(t, counter_ptr, shape.DYNAMIC, call.num_work)
        next_first = -1
        next_batch = 0
        next_head = 0
        next_rows = 0
        next_first_q = 0
        next_keys = 0
        next_first_k = 0
        next_split = 0
        if t < call.num_work:
            item = dflash2_work(t, call, shape)
            next_first, next_batch, next_head, next_rows = item.first, item.batch, item.head, item.rows
            next_first_q, next_keys, next_first_k, next_split = item.first_q, item.keys, item.first_k, item.split
        dflash2_publish(
            memory, turn + 1,
            WorkItem(next_first, next_batch, next_head, next_rows, next_first_q, next_keys, next_first_k, next_split),
        )  # fmt: skip
        # V of each tile, and K of the one behind it.
        for i in range(tiles.begin + 1, tiles.end + 1):
            if shape.K_AHEAD:
                if i < tiles.end:
                    dflash2_bring_keys(k1_desc, k2_desc, memory, anchor, it + 1, i, where, tiles, shape)
            tile = dflash2_tile_number(i - 1, tiles, shape)
            dflash2_await_slot(anchor, it, shape.V_FREE, STAGES, shape.THREADS)
            dflash2_copy_keys(
                v1_desc,
                v2_desc,
                memory.v1,
                memory.v2,
                memory.v_full,
                it % STAGES,
                where,
                tile,
                tiles,
                shape.V1,
                shape.V2,
                shape,
            )
            if not shape.K_AHEAD:
                if i < tiles.end:
                    dflash2_bring_keys(k1_desc, k2_desc, memory, anchor, it + 1, i, where, tiles, shape)
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
def dflash2_scores(q1, q2, memory, slot, COLUMNS: gl.constexpr, shape: gl.constexpr):
    """Start the products of 64 rows of Q with the first COLUMNS keys of a tile: (64, COLUMNS) float32."""
    N: gl.constexpr = shape.N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    k1 = memory.k1.index(slot).reshape([N, shape.D1])
    k2 = memory.k2.index(slot).reshape([N, shape.D2 if shape.D2 > 0 else shape.D1])
    if COLUMNS < N:
        k1 = k1.slice(0, COLUMNS, 0)
        k2 = k2.slice(0, COLUMNS, 0)
    s = warpgroup_mma(q1, k1.permute((1, 0)), gl.zeros([64, COLUMNS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    if shape.D2 > 0:
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def dflash2_multiply(acc1, acc2, packed, it, memory, ROWS: gl.constexpr, shape: gl.constexpr):
    """Start adding the product of the probabilities of tile number
    ``it`` with the first ROWS rows of its V, once that is there.

    The probabilities beyond ROWS are zero.
    """
    N: gl.constexpr = shape.N
    slot = it % shape.STAGES
    mbarrier.wait(memory.v_full.index(slot), (it // shape.STAGES) & 1)
    P1_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc1.type.layout, 2)
    P2_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc2.type.layout, 2)
    v1 = memory.v1.index(slot).reshape([N, shape.V1])
    v2 = memory.v2.index(slot).reshape([N, shape.V2 if shape.V2 > 0 else shape.V1])
    if ROWS < N:
        v1 = v1.slice(0, ROWS, 0)
        v2 = v2.slice(0, ROWS, 0)
        packed, zeros = gl.split(gl.permute(gl.reshape(packed, [64, 2, N // 4]), (0, 2, 1)))
    acc1 = warpgroup_mma(dflash2_unpack(packed, ROWS, shape.DT, P1_LAYOUT), v1, acc1, is_async=True)
    if shape.V2 > 0:
        acc2 = warpgroup_mma(dflash2_unpack(packed, ROWS, shape.DT, P2_LAYOUT), v2, acc2, is_async=True)
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
def dflash2_clean_if_edge(memory, it, i, keys, tiles, shape: gl.constexpr):
    """Clean V of the tile at place i of the list, which is next to be multiplied, when a row of it is dead."""
    N: gl.constexpr = shape.N
    tile = dflash2_tile_number(i, tiles, shape)
    edge = (tile + 1) * N > keys
    if shape.NUM_RANGES > 0:
        edge = edge | ((tile * N < tiles.low) & ((tile + 1) * N > tiles.sink))
    if edge:
        slot = it % shape.STAGES
        mbarrier.wait(memory.v_full.index(slot), (it // shape.STAGES) & 1)
        dflash2_clean(memory.v1, slot, tile, keys, tiles.low, tiles.sink, N, shape.V1, shape.NUM_RANGES)
        if shape.V2 > 0:
            dflash2_clean(memory.v2, slot, tile, keys, tiles.low, tiles.sink, N, shape.V2, shape.NUM_RANGES)


@gluon.jit
def dflash2_fold(
    state, it, from_i, to_i, C: gl.constexpr, anchor, q1, q2, memory, tiles, sight, call,
    MASKED: gl.constexpr, P_ROWS: gl.constexpr, shape: gl.constexpr,
):  # fmt: skip
    """Fold tiles from_i .. to_i into the state. The probabilities of the tile before are multiplied with its V while
    the scores of this one are on the way, and the exponentials of this one run while that product does."""
    N: gl.constexpr = shape.N
    STAGES: gl.constexpr = shape.STAGES
    acc1, acc2, packed, row_max, row_sum = state.acc1, state.acc2, state.packed, state.row_max, state.row_sum
    O1_LAYOUT: gl.constexpr = acc1.type.layout
    O2_LAYOUT: gl.constexpr = acc2.type.layout
    LANES: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    last_i = tiles.end - 1
    for i in range(from_i, to_i):
        if shape.CLEAN and MASKED:
            dflash2_clean_if_edge(memory, it, i - 1, sight.keys, tiles, shape)
        # Scores of this tile, and behind them the values of the tile before.
        tile = dflash2_tile_number(i, tiles, shape)
        it += 1
        slot = it % STAGES
        mbarrier.wait(memory.k_full.index(slot), (it // STAGES) & 1)
        if shape.TURNS:
            dflash2_sync(anchor, TURN + C, 256)
        s = dflash2_scores(q1, q2, memory, slot, N, shape)
        acc1, acc2 = dflash2_multiply(acc1, acc2, packed, it - 1, memory, P_ROWS, shape)
        if shape.TURNS:
            dflash2_arrive(anchor, TURN + (C + 1) % shape.WG, 256)
        s = warpgroup_mma_wait(2 if shape.V2 > 0 else 1, [s])
        dflash2_arrive(anchor, shape.K_FREE + slot, shape.THREADS)
        if shape.Q_EARLY:
            dflash2_arrive_if(anchor, i == last_i, shape.Q_FREE + C, 128 + 32)
        # Probabilities of this tile, while the values are multiplied.
        s = dflash2_logits(s, tile * N, sight, call, N, shape, MASKED)
        scale = 1.0 if shape.CAP else call.scale_log2
        p, row_max, alpha, part = dflash2_softmax(s, row_max, scale, N, MASKED, shape.CHAINS, shape.HALVES)
        acc1, acc2, packed = dflash2_settle(acc1, acc2, packed, shape.V2)
        dflash2_arrive(anchor, shape.V_FREE + (it - 1) % STAGES, shape.THREADS)
        # Rescale what came before.
        row_sum = row_sum * gl.convert_layout(alpha, LANES)[:, None] + gl.convert_layout(part, row_sum.type.layout)
        acc1 = acc1 * gl.convert_layout(alpha, gl.SliceLayout(1, O1_LAYOUT))[:, None]
        if shape.V2 > 0:
            acc2 = acc2 * gl.convert_layout(alpha, gl.SliceLayout(1, O2_LAYOUT))[:, None]
        packed = dflash2_pack(p, N, shape.DT)
    return State(acc1, acc2, packed, row_max, row_sum), it


@gluon.jit
def dflash2_leave(it, tiles, dead, C: gl.constexpr, anchor, memory, shape: gl.constexpr):
    """Give back the tiles up to ``dead``, which lie wholly to the right of this group's rows."""
    for i in range(tiles.begin, dead):
        slot = it % shape.STAGES
        phase = (it // shape.STAGES) & 1
        mbarrier.wait(memory.k_full.index(slot), phase)
        dflash2_arrive(anchor, shape.K_FREE + slot, shape.THREADS)
        mbarrier.wait(memory.v_full.index(slot), phase)
        dflash2_arrive(anchor, shape.V_FREE + slot, shape.THREADS)
        if shape.TURNS and tiles.end - i > 1:
            dflash2_sync(anchor, TURN + C, 256)
            dflash2_arrive(anchor, TURN + (C + 1) % shape.WG, 256)
        it += 1
    return it


@gluon.jit
def dflash2_start(
    it, C: gl.constexpr, anchor, q1, q2, memory, tiles, sight, call, COLUMNS: gl.constexpr, shape: gl.constexpr
):
    """Scores and probabilities of the first tile of a work item that some row of this group sees."""
    tile = dflash2_tile_number(sight.dead, tiles, shape)
    slot = it % shape.STAGES
    mbarrier.wait(memory.k_full.index(slot), (it // shape.STAGES) & 1)
    s = dflash2_scores(q1, q2, memory, slot, COLUMNS, shape)
    s = warpgroup_mma_wait(0, [s])
    dflash2_arrive(anchor, shape.K_FREE + slot, shape.THREADS)
    if shape.Q_EARLY:
        dflash2_arrive_if(anchor, sight.dead + 1 == tiles.end, shape.Q_FREE + C, 128 + 32)
    p, row_max, row_sum = dflash2_first_softmax(s, tile * shape.N, sight, call, COLUMNS, shape)
    return dflash2_first_pack(p, shape.N, COLUMNS, shape.DT), row_max, row_sum


@gluon.jit
def dflash2_rest(
    state, it, C: gl.constexpr, anchor, q1, q2, memory, tiles, sight, call, COLUMNS: gl.constexpr, shape: gl.constexpr
):
    """Fold all tiles behind the first: with a mask, without one, and with one again where a window ends."""
    N: gl.constexpr = shape.N
    masked = sight.masked
    if shape.ALIGNED:  # no mask behind the first tile, of which a group may have done a half
        if COLUMNS < N:
            second = gl.minimum(sight.dead + 2, tiles.end)
            state, it = dflash2_fold(
                state, it, sight.dead + 1, second, C, anchor, q1, q2, memory, tiles, sight, call, False, COLUMNS, shape
            )
            masked = gl.minimum(sight.dead + 2, tiles.end)
    else:
        state, it = dflash2_fold(
            state, it, sight.dead + 1, masked, C, anchor, q1, q2, memory, tiles, sight, call, True, N, shape
        )
        if shape.CLEAN:
            dflash2_clean_if_edge(memory, it, masked - 1, sight.keys, tiles, shape)
    state, it = dflash2_fold(
        state, it, masked, sight.full, C, anchor, q1, q2, memory, tiles, sight, call, False, N, shape
    )
    if shape.NUM_RANGES > 0:
        state, it = dflash2_fold(
            state, it, sight.full, tiles.end, C, anchor, q1, q2, memory, tiles, sight, call, True, N, shape
        )
    if shape.CLEAN:
        dflash2_clean_if_edge(memory, it, tiles.end - 1, sight.keys, tiles, shape)
    return state, it


@gluon.jit
def dflash2_consume(C: gl.constexpr, o1_desc, o2_desc, memory, call, shape: gl.constexpr):
    """Group C of the consumers: rows 64 C .. 64 C + 63 of every work item."""
    N: gl.constexpr = shape.N
    V1: gl.constexpr = shape.V1
    V2: gl.constexpr = shape.V2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    O1_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V1, 16])
    O2_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V2 if V2 > 0 else 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEAVE: gl.constexpr = shape.HAS_RIGHT and shape.NUM_RANGES == 0 and not shape.ALIGNED
    COLUMNS: gl.constexpr = N // 2 if shape.ALIGNED and C == 0 else N  # of the first tile, which the diagonal crosses
    Q_FREE_LAST: gl.constexpr = shape.O_IN_Q and shape.FULL_STORE  # Q's memory takes the output
    anchor = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    it = 0
    turn = 0
    if shape.TURNS and C == shape.WG - 1:
        dflash2_arrive(anchor, TURN, 256)
    first, rows, keys = dflash2_receive(memory, turn)
    while first >= 0:
        # This work item: its Q, its tiles, and an empty state.
        place = turn % PLACES
        q_place = turn % shape.QBUF * shape.WG + C
        q1 = memory.q1.index(q_place).reshape([64, shape.D1])
        q2 = memory.q2.index(q_place).reshape([64, shape.D2 if shape.D2 > 0 else shape.D1])
        mine = first + 64 * C
        row = mine + gl.arange(0, 64, ROW)
        acc1 = gl.zeros([64, V1], gl.float32, O1_LAYOUT)
        acc2 = gl.zeros([64, V2 if V2 > 0 else 16], gl.float32, O2_LAYOUT)
        split = first * 0
        if shape.SPLIT:
            split = dflash2_field(memory.work, place, 7)
        keys = gl.maximum(keys, 0)
        item = WorkItem(first, 0, 0, rows, 0, keys, 0, split)
        tiles, sight = dflash2_extent(C, item, keys, call, ROW, shape)
        top = gl.full([64], float("-inf"), gl.float32, ROW)
        total_by_lane = gl.sum(gl.sum(gl.reshape(gl.zeros([64, N], gl.float32, S_LAYOUT), [64, N // 8, 4, 2]), 3), 1)
        mbarrier.wait(memory.q_full.index(q_place), (turn // shape.QBUF) & 1)
        if LEAVE:
            it = dflash2_leave(it, tiles, sight.dead, C, anchor, memory, shape)
        if sight.dead < tiles.end:
            # The first tile, all others, and the values of the last.
            packed, top, total_by_lane = dflash2_start(
                it, C, anchor, q1, q2, memory, tiles, sight, call, COLUMNS, shape
            )
            state = State(acc1, acc2, packed, top, total_by_lane)
            state, it = dflash2_rest(state, it, C, anchor, q1, q2, memory, tiles, sight, call, COLUMNS, shape)
            top, total_by_lane = state.row_max, state.row_sum
            if not Q_FREE_LAST and not shape.Q_EARLY:
                mbarrier.arrive(memory.q_free.index(q_place))
            acc1, acc2 = dflash2_multiply(state.acc1, state.acc2, state.packed, it, memory, N, shape)
            acc1, acc2, packed = dflash2_settle(acc1, acc2, state.packed, V2)
            dflash2_arrive(anchor, shape.V_FREE + it % shape.STAGES, shape.THREADS)
            it += 1
        elif shape.Q_EARLY:
            dflash2_arrive(anchor, shape.Q_FREE + C, 128 + 32)
        elif not Q_FREE_LAST:
            mbarrier.arrive(memory.q_free.index(q_place))

        # Divide by the sum, which may hold a learned sink.
        batch = dflash2_field(memory.work, place, 1)
        head = dflash2_field(memory.work, place, 2)
        first_q = dflash2_field(memory.work, place, 4)
        total = gl.convert_layout(gl.sum(total_by_lane, 1), ROW)
        if not shape.CAP:
            top = top * call.scale_log2
        norm = gl.full([64], 1.0, gl.float32, ROW)
        if shape.HAS_SINKS and not shape.SPLIT:  # one more logit in the denominator
            logit = gl.load(call.sinks_ptr + head).to(gl.float32) * 1.4426950408889634
            higher = gl.maximum(top, logit)
            # a sink of -inf for a row without keys: -inf - -inf is NaN
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            norm = gl.exp2(top - safe)
            total = total * norm + gl.exp2(logit - safe)
            top = higher
        total = gl.where(total == 0.0, 1.0, total)  # no key seen: 0 stays 0, and the log-sum-exp -inf
        factor = norm / total
        if shape.PAGE > 0:
            beyond = dflash2_field(memory.work, place, 5) < 0
            factor = gl.where(beyond, float("nan"), factor)  # a length that no page holds: loud, not wrong
        acc1 = acc1 * gl.convert_layout(factor, gl.SliceLayout(1, O1_LAYOUT))[:, None]
        if V2 > 0:
            acc2 = acc2 * gl.convert_layout(factor, gl.SliceLayout(1, O2_LAYOUT))[:, None]
        # Store the log-sum-exp and the output.
        if shape.HAS_LSE:
            lse = (top + gl.log2(total)) * 0.6931471805599453
            if shape.PAGE > 0:
                lse = gl.where(beyond, float("nan"), lse)
            lse_place = first_q + row
            if not shape.RAGGED:
                lse_place += (batch * call.num_heads).to(gl.int64) * call.stride_lse
            if shape.SPLIT:
                lse_place += (
                    split.to(gl.int64) * call.num_heads * (1 if shape.RAGGED else call.num_seqs) * call.stride_lse
                )
            gl.store(call.lse_ptr + head.to(gl.int64) * call.stride_lse + lse_place, lse, mask=row < rows)
        if not shape.FULL_STORE:
            dflash2_store(acc1, batch, head, first_q, mine, rows, split, call, 0, V1, shape)
            if V2 > 0:
                dflash2_store(acc2, batch, head, first_q, mine, rows, split, call, V1, V2, shape)
        else:
            o1 = memory.o1.index(C)
            o2 = memory.o2.index(C)
            if not shape.O_IN_Q:
                tma.store_wait(0)  # the tile before has left its buffer
            o1.reshape([64, V1]).store(acc1.to(shape.DT))
            if V2 > 0:
                o2.reshape([64, V2]).store(acc2.to(shape.DT))
            fence_async_shared()
            async_store(o1_desc, [batch, head, mine, 0], o1)
            if V2 > 0:
                async_store(o2_desc, [batch, head, mine, V1], o2)
            if shape.O_IN_Q:
                tma.store_wait(0)
                mbarrier.arrive(memory.q_free.index(q_place))
        mbarrier.arrive(memory.work_free.index(place))
        turn += 1
        first, rows, keys = dflash2_receive(memory, turn)
    tma.store_wait(0)


@constexpr_function
def dflash2_wide(columns):
    """The layout of a product's (64, columns) after the four lanes of
    a row have exchanged columns: each has eight neighbours."""
    rest = [[0, c] for c in (32, 64, 128) if c < columns]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *rest], [
            [0, 8], [0, 16], [1, 0], [2, 0], [4, 0],
        ], [[16, 0], [32, 0]], [], [64, columns]  # fmt: skip
    )


@gluon.jit
def dflash2_store(
    acc, batch, head, first_q, mine, rows, split, call, COLUMN: gl.constexpr, V: gl.constexpr, shape: gl.constexpr
):
    """Store from registers what a copy of a whole tile would run over
    (a ragged end), or has no room for, or float32 parts."""
    LAYOUT: gl.constexpr = acc.type.layout if shape.SPLIT else dflash2_wide(V)
    acc = gl.convert_layout(acc.to(call.out_ptr.dtype.element_ty), LAYOUT)
    row = mine + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    column = COLUMN + gl.arange(0, V, gl.SliceLayout(0, LAYOUT))
    if shape.RAGGED:
        place = (first_q + row).to(gl.int64) * call.stride_om + head.to(gl.int64) * call.stride_oh
        if shape.SPLIT:
            place += split.to(gl.int64) * call.num_heads * call.stride_oh
    else:
        place = row.to(gl.int64) * call.stride_om + (split.to(gl.int64) * call.num_seqs + batch) * call.stride_ob
        place = place + head.to(gl.int64) * call.stride_oh
    if not shape.SPLIT:
        place = gl.multiple_of(place, 8)  # ``supports_prefill`` asks for it
    seen = (row < rows)[:, None]
    if COLUMN + V > shape.HEAD_V:
        seen = seen & (column < shape.HEAD_V)[None, :]
    gl.store(call.out_ptr + place[:, None] + column[None, :], acc, mask=seen)


PLAIN = (  # lengths and strides: values, never reasons to compile again
    "stride_om", "stride_oh", "stride_ob", "stride_lse", "stride_pages", "seqlen_q", "seqlen_k", "num_heads",
    "group_size", "num_seqs",
    "num_m", "section", "num_splits", "num_work", "right",
)  # fmt: skip


@gluon.jit(do_not_specialize=PLAIN, do_not_specialize_on_alignment=PLAIN)
def dflash2_prefill_hopper(
    q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, o1_desc, o2_desc,
    out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, pages_ptr, table_ptr, counter_ptr,
    stride_om, stride_oh, stride_ob, stride_lse, stride_pages,
    seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2, cap,
    shape: gl.constexpr,
):  # fmt: skip
    """Attention of all rows; persistent: a grid of at most one program per SM walks ``num_work`` work items."""
    QBUF: gl.constexpr = shape.QBUF
    STAGES: gl.constexpr = shape.STAGES
    WG: gl.constexpr = shape.WG
    N: gl.constexpr = shape.N
    DT: gl.constexpr = shape.DT
    q1_smem = gl.allocate_shared_memory(DT, [QBUF * WG, 1, 1, 64, shape.D1], q1_desc.layout)
    k1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, shape.D1], k1_desc.layout)
    v1_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, shape.V1], v1_desc.layout)
    q2_smem = q1_smem
    k2_smem = k1_smem
    v2_smem = v1_smem
    if shape.D2 > 0:
        q2_smem = gl.allocate_shared_memory(DT, [QBUF * WG, 1, 1, 64, shape.D2], q2_desc.layout)
        k2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, shape.D2], k2_desc.layout)
    if shape.V2 > 0:
        v2_smem = gl.allocate_shared_memory(DT, [STAGES, 1, 1, N, shape.V2], v2_desc.layout)
    o1_smem = q1_smem
    o2_smem = q2_smem
    if not shape.O_IN_Q and not shape.DIRECT:
        o1_smem = gl.allocate_shared_memory(DT, [WG, 1, 1, 64, shape.V1], o1_desc.layout)
        if shape.V2 > 0:
            o2_smem = gl.allocate_shared_memory(DT, [WG, 1, 1, 64, shape.V2], o2_desc.layout)
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
    memory = Memory(
        q1_smem, q2_smem, k1_smem, k2_smem, v1_smem, v2_smem, o1_smem, o2_smem,
        q_full, q_free, k_full, v_full, work_smem, work_full, work_free,
    )  # fmt: skip
    call = Call(
        out_ptr, lse_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, seq_lens_ptr, table_ptr, stride_om, stride_oh, stride_ob,
        stride_lse,
        seqlen_q, seqlen_k, num_heads, group_size, num_seqs, num_m, section, num_splits, num_work, right, scale_log2,
        cap,
    )  # fmt: skip
    if WG == 3:
        gl.warp_specialize([
            (dflash2_consume, (0, o1_desc, o2_desc, memory, call, shape)),
            (dflash2_consume, (1, o1_desc, o2_desc, memory, call, shape)),
            (dflash2_consume, (2, o1_desc, o2_desc, memory, call, shape)),
            (dflash2_produce, (
                q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, pages_ptr, stride_pages, counter_ptr, memory,
                call, shape)),
        ], [4, 4, 1], [shape.CONSUMER_REGS, shape.CONSUMER_REGS, shape.PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (dflash2_consume, (0, o1_desc, o2_desc, memory, call, shape)),
            (dflash2_consume, (1, o1_desc, o2_desc, memory, call, shape)),
            (dflash2_produce, (
                q1_desc, q2_desc, k1_desc, k2_desc, v1_desc, v2_desc, pages_ptr, stride_pages, counter_ptr, memory,
                call, shape)),
        ], [4, 1], [shape.CONSUMER_REGS, shape.PRODUCER_REGS])  # fmt: skip
