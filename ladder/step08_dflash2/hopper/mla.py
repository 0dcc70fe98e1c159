"""Launching the Hopper kernels of MLA's latent decode: what they can
take, which of the two, and how the batch is cut."""

import functools

import torch

from ladder.step05_fused.attention import LOG2_E

from .. import dispatch
from .descriptors import contiguous, counter, describe, most_splits, refuse

MLA_TILE = 64  # rows, and keys
MERGE_PROGRAMS = 1024  # of a whole batch: each costs time where nothing was split, which the host does not know
MLA_MIN_TILES = 4  # fewer keys are read faster than their partial result is merged


def supports_mla(call):
    """None when a Hopper MLA kernel takes this ``decision.DecodeCall``, else the reason in words why it does not."""
    (q_shape, q_strides, _), (out_shape, out_strides, _) = call.q, call.out
    if q_shape[3] != 576 or out_shape[3] != 512:
        return f"head sizes {q_shape[3]}/{out_shape[3]}: it is built for 576/512"
    if call.masked or call.softcap or call.scheduled:
        return "range windows, softcap and a schedule go with the portable kernel"
    if q_shape[1] > 1 and q_strides[1] != q_shape[2] * q_strides[2]:
        return "the heads of two tokens do not follow one another"
    if out_strides[3] != 1:
        return f"out has strides {out_strides}; its rows must lie together"
    return refuse(call, call.k[0][1], q=call.q, latent_cache=call.k)


@functools.lru_cache(maxsize=1024)
def plan_mla(batch, rows, capacity, processors, num_kv_splits, tile=MLA_TILE):
    """(row tiles, found on the device, slots, splits of a sequence when not, target, most): see
    ``portable.decode_kernel.dflash2_chunk``."""
    row_tiles = -(-rows // tile)
    target = max(1, processors // row_tiles)
    most = 2 * target
    tiles = -(-capacity // MLA_TILE)
    if num_kv_splits is not None:
        num_kv_splits = min(num_kv_splits, max(1, tiles))  # no sequence has more
        return row_tiles, False, batch * num_kv_splits, num_kv_splits, target, most
    of_one = most_splits(tiles, MLA_MIN_TILES)
    if of_one == 1 or batch >= 2 * target:
        return row_tiles, of_one > 1, batch if of_one == 1 else batch + most, 1, target, most
    return row_tiles, True, min(batch * of_one, most + batch), 1, target, most


def mla_design(rows):
    """(kernel, rows of its tile) for a sequence of so many query rows.
    It depends on nothing else: so fixed splits give fixed bits.

    "few": ``mla_few_kernel``; "many": ``mla_kernel``.
    """
    if rows <= 32:
        return "few", 16 if rows <= 16 else 32
    return "many", MLA_TILE


def mla_merges(kind, batch, target, num_kv_splits):
    """Whether the last programs to finish a sequence merge it; else a launch spreads that over the chip.

    They do with few splits of each sequence, and with many rows where next to none is split, which the host does not
    know; the split count alone chooses where it is given. target: as ``plan_mla`` finds it.
    """
    if num_kv_splits is not None:
        return kind == "few" and num_kv_splits <= 8
    return batch >= 16 if kind == "few" else 3 * batch >= 2 * target


def merge_config(batch, rows, num_kv_splits):
    """Blocks (rows, columns, splits) of the merge; the split count alone chooses where it is given."""
    many = num_kv_splits > 8 if num_kv_splits is not None else batch * rows < 1024
    return dict(BLOCK_M=1, BLOCK_V=64, BLOCK_S=64) if many else dict(BLOCK_M=4, BLOCK_V=128, BLOCK_S=4)


def describe_mla(p, plan):
    """Sentences about how a problem (fields of ``ladder.lab.decode_problem.DecodeProblem``) with a latent cache is
    launched by a ``plan_mla``.
    """
    rows = p.q_len * p.Hq
    kind, tile = mla_design(rows)
    row_tiles, found, slots, _, target, _ = plan
    name = "dflash2_mla_few_hopper" if kind == "few" else "dflash2_mla_hopper"
    lines = [f"Kernel: {name}, Gluon for sm_90 (TMA, wgmma, specialised warps).",
             f"Tiles: {tile} rows for the {rows} of a sequence ({p.q_len} tokens x {p.Hq} heads), so the latents are "
             f"read {row_tiles} x, by {MLA_TILE} keys. "
             + ("Keys and value columns are the rows of its products: memory binds." if kind == "few" else
                "Two warp groups share tiles in pairs: each makes the probabilities of one, and multiplies both with "
                "half of the value columns.")]  # fmt: skip
    if found:
        where = "in the same launch" if mla_merges(kind, p.B, target, None) else "by a second one"
        lines.append(f"Work: the device cuts the batch into about {target} parts of equal length a row tile, no part "
            f"below {MLA_MIN_TILES * MLA_TILE} keys. Programs "
                     f"draw them from a counter, and what was split is merged {where}.")  # fmt: skip
    else:
        lines.append(
            f"Work: {row_tiles * slots} parts, one a sequence and row tile; keys are not split, so nothing is merged."
        )
    return lines


def launch_mla(
    q, latent_cache, block_table, seq_lens, out, lse, *, scale, right, sinks, num_kv_splits, workspace, design=None,
    merges=None,
    plan=None,
):  # fmt: skip
    """Run the kernel on checked arguments that ``supports_mla``; fills ``out`` and, unless None, ``lse``.

    workspace: a ``DecodeWorkspace``, or None. right: as in ``launch_prefill``. design, merges: what ``mla_design`` and
    ``mla_merges`` would choose. plan: of ``plan_mla``; None makes one.
    """
    from triton.experimental.gluon import language as gl

    from .merge_kernel import dflash2_mla_merge_parts
    from .mla_few_kernel import dflash2_mla_few_hopper
    from .mla_kernel import dflash2_mla_hopper

    batch, q_len, num_heads, head_dim = q.shape
    page_size, rows, device = latent_cache.shape[1], q_len * num_heads, q.device
    capacity = block_table.shape[1] * page_size
    kind, tile = mla_design(rows) if design is None else design
    processors = dispatch.machine(device).processors
    row_tiles, found, slots, num_splits, target, most = plan or plan_mla(
        batch, rows, capacity, processors, num_kv_splits, tile
    )
    works, split = row_tiles * slots, slots > batch
    merges = split and (mla_merges(kind, batch, target, num_kv_splits) if merges is None else merges)
    if split or workspace is not None:
        workspace = dispatch.workspace_on(device, workspace)
    if split:
        part_rows = works * tile
        part_out, tickets = workspace.reserve(part_rows * 514 + 2 * batch, 1 + 2 * works)
        part_lse, meta, arrivals = part_out[part_rows * 512 :], part_out[part_rows * 514 :], tickets[1:]
    else:
        part_out = part_lse = meta = arrivals = out  # not written where no sequence is split
        tickets = counter(device)
    sinks, seq_lens, block_table = contiguous(sinks, seq_lens, block_table)
    flat = torch.as_strided(q, (batch, rows, head_dim), (q.stride(0), q.stride(2), 1)) if batch * rows else q
    key_rows = min(page_size, MLA_TILE)
    block_b = min(1024, max(128, 1 << (batch - 1).bit_length()))
    strides, numbers = out.stride()[:3], (capacity, slots, num_splits, target, most, MLA_MIN_TILES)
    if kind == "few":
        kernel, widths = dflash2_mla_few_hopper, (64,)
        chosen = dict(ROWS=tile, SLOTS=8 if tile == 16 else 7)
        block_b = 1 if batch == 1 else block_b
    else:
        kernel, widths = dflash2_mla_hopper, (256, 64)
        chosen = dict(WIDE=out.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in out.stride()[:3]))
        block_b = 1 if found and batch == 1 else 128  # lengths that the producer's few registers hold
    with torch.cuda.device(device):
        kernel[(min(works, processors),)](
            *(describe(flat, tile, n, 64) for n in widths), *(describe(latent_cache, key_rows, n, 64) for n in widths),
            block_table, seq_lens, out, part_out, part_lse, meta, lse, sinks, arrivals, tickets, *strides,
            block_table.stride(0),
            batch, num_heads, q_len, *numbers, q_len if right is None else right, abs(scale) * LOG2_E,
            PAGE=page_size, FOUND=found, BLOCK_B=block_b, NEGATIVE=scale < 0, HAS_SINKS=sinks is not None,
            HAS_LSE=lse is not None,
            SPLIT=split, MERGES=merges, DT=gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16, num_warps=4,
            **chosen,
        )  # fmt: skip
        if split and not merges:
            blocks = merge_config(batch, rows, num_kv_splits)
            columns = 512 // blocks["BLOCK_V"]
            programs = min(-(-rows // blocks["BLOCK_M"]), max(1, MERGE_PROGRAMS // (batch * columns)))
            dflash2_mla_merge_parts[(batch * programs, columns)](
                part_out, part_lse, meta, out, lse, sinks, *strides, num_heads, q_len, slots, programs, PART_ROWS=tile,
                HEAD_V=512, **blocks,
                HAS_SINKS=sinks is not None, HAS_LSE=lse is not None, num_warps=4,
            )  # fmt: skip
