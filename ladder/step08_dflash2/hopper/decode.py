"""Launching the Hopper kernel of paged GQA decode: what it can take, and how the batch is cut. Needs CUDA of capability 9.0."""

import functools

import torch

from ladder.step05_fused.attention import LOG2_E

from .descriptors import _counter, _describe, _processors, most_splits

TILE = 64  # rows, and keys
MIN_TILES = 4  # fewer keys are read faster than their partial result is merged
MOST = 12  # works a processor where one sequence stands out, so that the others' fill in beside it
STAGES = {64: 3, 128: 2}  # tiles of K and of V under way in each of two programs a processor: more read slower, see TUNING.md
MAXNREG = 128  # and its registers


def supports_decode(q, k_cache, v_cache, out, *, scale, windows=None, softcap=0.0, schedule=None):
    """None when the Hopper decode kernel takes this call of q (B, q_len, Hq, D), else the reason in words why it does not."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {str(q.dtype).removeprefix('torch.')}: the tensor cores of this kernel take bfloat16 and float16"
    if q.shape[3] not in STAGES or v_cache.shape[3] != q.shape[3]:
        return f"head sizes {q.shape[3]}/{v_cache.shape[3]}: it is built for 64 and 128"
    if windows is not None or softcap > 0 or schedule is not None:
        return "range windows, softcap and a schedule go with the portable kernel"
    if abs(scale) < 1e-37:
        return "a scale of zero"
    page_size = k_cache.shape[1]
    if page_size < 16 or page_size & (page_size - 1):
        return f"page_size {page_size} is no power of two of at least 16"
    if q.stride(3) != 1 or out.stride(3) != 1:
        return f"q or out has strides {q.stride()}, {out.stride()}; their rows must lie together"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s % 8 or s <= 0 for s in x.stride()[:-1]):
            return f"{name} has strides {x.stride()}; the copy engine wants rows of neighbours and strides of 16 bytes"
        if 0 in x.shape:
            return f"{name} is empty"
    return None


def pays(head_dim, rows, page_size):
    """Whether this kernel is the faster one, measured: with heads of 128 everywhere; with heads of 64 where a tile spans several
    pages, which a thread of the portable kernel looks up one by one, or where its rows take more than its 16; see TUNING.md.
    """
    return head_dim == 128 or page_size < TILE or rows > 16


@functools.lru_cache(maxsize=1024)
def plan_decode(batch, rows, num_kv_heads, capacity, processors, num_kv_splits):
    """(row tiles, found on the device, slots, splits of a sequence when not, target, most): see ``portable.decode_kernel.dflash2_chunk``."""
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


def describe_decode(p, processors=132):
    """Sentences about how a problem (fields of ``ladder.lab.decode_problem.DecodeProblem``) is launched, for ``explain``."""
    rows = p.q_len * (p.Hq // p.Hkv)
    row_tiles, found, slots, _, target, _ = plan_decode(p.B, rows, p.Hkv, p.capacity, processors, None)
    lines = [
        "Kernel: dflash2_decode_hopper, Gluon for sm_90 (TMA, wgmma, specialised warps).",
        f"Tiles: {TILE} rows for the {rows} of a KV head ({p.q_len} tokens x {p.Hq // p.Hkv} heads), so K and V are read {row_tiles} x, by {TILE} "
        f"keys; {STAGES[p.D]} tiles of K and of V under way in each of two programs a processor, brought by a warp of their own.",
    ]
    if found:
        lines.append(f"Work: the device cuts the batch into about {target} parts of equal length a KV head, no part below {MIN_TILES * TILE} keys. Programs draw "
                     "them from a counter, and the part of a sequence that finishes last merges the others in the same launch.")  # fmt: skip
    else:
        lines.append(f"Work: {p.Hkv * row_tiles * slots} parts, one a sequence, KV head and row tile; keys are not split, so nothing is merged.")
    return lines


def launch_decode(q, k_cache, v_cache, block_table, seq_lens, out, lse, *, scale, right, sinks, num_kv_splits, workspace):
    """Run the kernel on checked arguments that ``supports_decode``; fills ``out`` and, unless None, ``lse``.

    workspace: a ``DecodeWorkspace``, or None. right: keys after its own position that a token sees, or None for all.
    """
    from triton.experimental.gluon import language as gl

    from ladder.step07_dflash1.decode import DecodeWorkspace

    from .decode_kernel import dflash2_decode_hopper

    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_cache.shape
    group, device, capacity = num_heads // num_kv_heads, q.device, block_table.shape[1] * page_size
    rows = q_len * group
    row_tiles, found, slots, num_splits, target, most = plan_decode(
        batch, rows, num_kv_heads, capacity, _processors(device), num_kv_splits
    )
    part_out = part_lse = arrivals = out  # not written where no sequence is split
    tickets = None
    split = slots > batch
    if split:
        workspace = DecodeWorkspace(device) if workspace is None else workspace
        if workspace.partials.device != device:
            raise ValueError(f"step08_dflash2: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")
        part_rows = num_kv_heads * slots * rows
        groups = num_kv_heads * slots * row_tiles
        part_out, arrivals = workspace.reserve(part_rows * (head_dim + 1), groups + 1)
        part_lse, tickets = part_out[part_rows * head_dim :], arrivals[groups:]
    sinks, seq_lens, block_table = (x if x is None or x.is_contiguous() else x.contiguous() for x in (sinks, seq_lens, block_table))
    key_rows = min(page_size, TILE)
    block_b = 1 if batch == 1 else min(1024, max(32, 1 << (batch - 1).bit_length()))
    numbers = (capacity, slots, num_splits, target, most, MIN_TILES)
    with torch.cuda.device(device):
        dflash2_decode_hopper[(min(num_kv_heads * row_tiles * slots, 2 * _processors(device)),)](
            _describe(k_cache.transpose(1, 2), key_rows, head_dim), _describe(v_cache.transpose(1, 2), key_rows, head_dim),
            q, block_table, seq_lens, out, part_out, part_lse, lse, sinks, arrivals,
            _counter(device) if tickets is None else tickets,
            *q.stride()[:3], *out.stride()[:3], block_table.stride(0),
            batch, num_kv_heads, q_len, *numbers, q_len if right is None else right, abs(scale) * LOG2_E,
            GROUP=group, D=head_dim, PAGE=page_size, STAGES=STAGES[head_dim], FOUND=found, BLOCK_B=block_b, NEGATIVE=scale < 0,
            HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, MERGE_ROWS=4 if rows <= 4 else 8,
            DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, num_warps=4, maxnreg=MAXNREG,
        )  # fmt: skip
