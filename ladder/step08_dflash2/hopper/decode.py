"""Launching the Hopper kernel of paged GQA decode: what it can take,
and how the batch is cut. Needs CUDA of capability 9.0."""

import functools

import torch

from ladder.step05_fused.attention import LOG2_E

from .. import dispatch
from .descriptors import contiguous, counter, describe, most_splits, refuse

TILE = 64  # rows, and keys
MIN_TILES = 4  # fewer keys are read faster than their partial result is merged
MOST = 12  # works a processor where one sequence stands out, so that the others' fill in beside it
# tiles of K and of V under way in each of two programs a processor: more read slower, see TUNING.md
STAGES = {64: 3, 128: 2}
MAXNREG = 128  # and its registers


def supports_decode(call):
    """None when the Hopper decode kernel takes this
    ``decision.DecodeCall``, else the reason in words why it does not."""
    (q_shape, q_strides, _), head_dim_v, page_size = call.q, call.v[0][3], call.k[0][1]
    if not pays(q_shape[3], q_shape[1] * (q_shape[2] // call.k[0][2]), page_size):
        return f"heads of {q_shape[3]} in pages of {page_size} are faster with this one"
    if q_shape[3] not in STAGES or head_dim_v != q_shape[3]:
        return f"head sizes {q_shape[3]}/{head_dim_v}: it is built for 64 and 128"
    if call.masked or call.softcap or call.scheduled:
        return "range windows, softcap and a schedule go with the portable kernel"
    if q_strides[3] != 1 or call.out[1][3] != 1:
        return f"q or out has strides {q_strides}, {call.out[1]}; their rows must lie together"
    return refuse(call, page_size, k_cache=call.k, v_cache=call.v)


def pays(head_dim, rows, page_size):
    """Whether this kernel is the faster one, measured: with heads of 128 everywhere; with heads of 64 where a tile
    spans several pages, which a thread of the portable kernel looks up one by one, or where its rows take more than its
    16; see TUNING.md.
    """
    return head_dim == 128 or page_size < TILE or rows > 16


@functools.lru_cache(maxsize=1024)
def plan_decode(batch, rows, num_kv_heads, capacity, processors, num_kv_splits):
    """(row tiles, found on the device, slots, splits of a sequence when not, target, most): see
    ``portable.decode_kernel.dflash2_chunk``."""
    row_tiles = -(-rows // TILE)
    tasks = row_tiles * num_kv_heads
    target = max(1, 2 * processors // tasks)  # finer works end more together, and cost more: see TUNING.md
    most = max(target, MOST * processors // tasks)
    tiles = -(-capacity // TILE)
    if num_kv_splits is not None:
        num_kv_splits = min(num_kv_splits, max(1, tiles))  # no sequence has more
        return row_tiles, False, batch * num_kv_splits, num_kv_splits, target, most
    of_one = most_splits(tiles, MIN_TILES)
    if of_one == 1 or batch == 1 and target == 1:
        return row_tiles, False, batch, 1, target, most
    return row_tiles, True, min(batch * of_one, (target if batch == 1 else most + batch)), 1, target, most


def describe_decode(p, plan):
    """Sentences about how a problem (fields of
    ``ladder.lab.decode_problem.DecodeProblem``) is launched by a ``plan_decode``."""
    rows, (row_tiles, found, slots, _, target, _) = p.q_len * (p.Hq // p.Hkv), plan
    lines = [
        "Kernel: dflash2_decode_hopper, Gluon for sm_90 (TMA, wgmma, specialised warps).",
        f"Tiles: {TILE} rows for the {rows} of a KV head ({p.q_len} tokens x {p.Hq // p.Hkv} heads), so K and V are "
        f"read {row_tiles} x, by {TILE} "
        f"keys; {STAGES[p.D]} tiles of K and of V under way in each of two programs a processor, brought by a warp of "
        f"their own.",
    ]
    if found:
        lines.append(f"Work: the device cuts the batch into about {target} parts of equal length a KV head, no part "
            f"below {MIN_TILES * TILE} keys. Programs draw "
                     "them from a counter, and the part of a sequence that finishes last merges the others in the same "
                     "launch.")  # fmt: skip
    else:
        lines.append(
            f"Work: {p.Hkv * row_tiles * slots} parts, one a sequence, KV head and row tile; keys are not split, so "
            f"nothing is merged."
        )
    return lines


def launch_decode(
    q, k_cache, v_cache, block_table, seq_lens, out, lse, *, scale, right, sinks, num_kv_splits, workspace, plan=None
):  # fmt: skip
    """Run the kernel on checked arguments that ``supports_decode``; fills ``out`` and, unless None, ``lse``.

    workspace: a ``DecodeWorkspace``, or None. right: keys after its own position that a token sees, or None for all.
    plan: of ``plan_decode``; None makes one.
    """
    from triton.experimental.gluon import language as gl

    from .decode_kernel import dflash2_decode_hopper

    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    group, device, capacity = num_heads // num_kv_heads, q.device, block_table.shape[1] * page_size
    rows, processors = q_len * group, dispatch.machine(device).processors
    row_tiles, found, slots, num_splits, target, most = plan or plan_decode(
        batch, rows, num_kv_heads, capacity, processors, num_kv_splits
    )
    part_out = part_lse = arrivals = out  # not written where no sequence is split
    tickets = None
    if slots > batch:
        workspace = dispatch.workspace_on(device, workspace)
        part_rows = num_kv_heads * slots * rows
        groups = num_kv_heads * slots * row_tiles
        part_out, arrivals = workspace.reserve(part_rows * (head_dim + 1), groups + 1)
        part_lse, tickets = part_out[part_rows * head_dim :], arrivals[groups:]
    sinks, seq_lens, block_table = contiguous(sinks, seq_lens, block_table)
    key_rows = min(page_size, TILE)
    block_b = 1 if batch == 1 else min(1024, max(32, 1 << (batch - 1).bit_length()))
    numbers = (capacity, slots, num_splits, target, most, MIN_TILES)
    with torch.cuda.device(device):
        dflash2_decode_hopper[(min(num_kv_heads * row_tiles * slots, 2 * processors),)](
            describe(k_cache.transpose(1, 2), key_rows, head_dim),
            describe(v_cache.transpose(1, 2), key_rows, head_dim),
            q, block_table, seq_lens, out, part_out, part_lse, lse, sinks, arrivals,
            counter(device) if tickets is None else tickets,
            *q.stride()[:3], *out.stride()[:3], block_table.stride(0),
            batch, num_kv_heads, q_len, *numbers, q_len if right is None else right, abs(scale) * LOG2_E,
            GROUP=group, D=head_dim, PAGE=page_size, STAGES=STAGES[head_dim], FOUND=found, BLOCK_B=block_b,
            NEGATIVE=scale < 0,
            HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, MERGE_ROWS=4 if rows <= 4 else 8,
            DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, num_warps=4, maxnreg=MAXNREG,
        )  # fmt: skip
