"""Expert-grouped execution: tokens sorted by expert on the device, and launches that cover real rows only."""

from dataclasses import dataclass

import torch

from ladder.contract import (
    INT32,
    INTEGERS,
    check_bounds,
    check_integer,
    check_out,
    expect,
    kernel_entry,
    merge_config,
)

from .checks import RUNG, check_rows, device_code

SORT_BLOCK = 128  # assignments that one program of the sort ranks among themselves


@dataclass(frozen=True)
class TokenGroups:
    """Assignments sorted by expert, in token order within an expert: the same on every run.

    order: (T * top_k,) int32. Row p of the expert order is assignment order[p], made by token order[p] // top_k.
    offsets: (num_experts + 1,) int32. Expert e owns rows offsets[e] .. offsets[e + 1].
    places: (T, top_k) int32. The row where each assignment went, -1 when its id named no expert: the inverse of
        ``order`` and the ``out_index`` of ``attention_varlen``.
    """

    order: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor

    @property
    def top_k(self):
        return self.places.shape[1]

    @property
    def num_experts(self):
        return self.offsets.numel() - 1


def group_tokens(expert_ids, num_experts):
    """Sort tokens by expert: a stable counting sort on the device, without waiting for it.

    Args:
        expert_ids: (T,) or (T, top_k) int32 or int64: the experts that each token chose. An id outside
            0 .. num_experts - 1 is an assignment dropped by the router: it goes nowhere.
        num_experts: at least 1.

    Returns:
        TokenGroups. Rows of ``order`` behind offsets[-1] (there are some when ids were dropped) are -1.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    one_choice = isinstance(expert_ids, torch.Tensor) and expert_ids.ndim == 1
    expect(RUNG, "expert_ids", expert_ids, ("T",) if one_choice else ("T", "top_k"), INTEGERS)
    num_experts = check_integer(RUNG, "num_experts", num_experts, 1)
    kernels = device_code(expert_ids, "groups_kernel")
    expert_ids = (expert_ids[:, None] if one_choice else expert_ids).contiguous()
    total = expert_ids.numel()
    blocks = -(-total // SORT_BLOCK)
    device = expert_ids.device
    order = torch.full((total,), -1, dtype=torch.int32, device=device)
    places = torch.empty(expert_ids.shape, dtype=torch.int32, device=device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    if not total:
        return TokenGroups(order, offsets, places)
    counts = torch.empty(num_experts, blocks, dtype=torch.int32, device=device)
    with torch.cuda.device_of(expert_ids):
        kernels.dflash1_group_count[(blocks,)](
            expert_ids, counts, total, num_experts, blocks, BLOCK=SORT_BLOCK, BINS=1 << num_experts.bit_length()
        )
        # Expert-major, block-minor: one running sum gives where every (expert, block) starts.
        ends = counts.view(-1).cumsum(0, dtype=torch.int32).view(num_experts, blocks)
        starts = ends - counts
        offsets[1:] = ends[:, -1]
        kernels.dflash1_group_place[(blocks,)](
            expert_ids, starts, order, places, total, num_experts, blocks, BLOCK=SORT_BLOCK
        )
    return TokenGroups(order, offsets, places)


def tile_map(offsets, block_rows, total_rows):
    """Which program works on which rows: one entry for each tile that holds a real row, none for padding.

    Args:
        offsets: (num_experts + 1,) int32, as in ``TokenGroups``. block_rows: rows of a tile.
        total_rows: rows of all experts, or more: known on the host.

    Returns:
        (slots, 2) int32: expert and first row of each tile, expert by expert. There are as many slots as ``total_rows``
        rows can need, total_rows // block_rows + num_experts at the most; the ones left over are -1.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted; values in ``offsets`` on a CPU only.
    """
    block_rows = check_integer(RUNG, "block_rows", block_rows, 1)
    total_rows = check_integer(RUNG, "total_rows", total_rows, 0)
    num_experts = _check_offsets(offsets, total_rows)
    slots = min(total_rows, total_rows // block_rows + num_experts)
    tiles = torch.full((slots, 2), -1, dtype=torch.int32, device=offsets.device)
    if slots:
        with torch.cuda.device_of(offsets):
            device_code(offsets, "groups_kernel").dflash1_tile_map[(num_experts,)](
                offsets, tiles, num_experts, BLOCK_ROWS=block_rows, EXPERTS=1 << (num_experts - 1).bit_length()
            )
    return tiles


def capacity_offsets(num_experts, capacity, device="cpu"):
    """The offsets of the padded layout: ``capacity`` rows for every expert, used or not."""
    num_experts = check_integer(RUNG, "num_experts", num_experts, 1)
    capacity = check_integer(RUNG, "capacity", capacity, 0)
    return torch.arange(num_experts + 1, dtype=torch.int32, device=device) * capacity


@kernel_entry
def grouped_matmul(x, weight, offsets, *, order=None, top_k=1, out=None, tiles=None, config=None):
    """out[p] = x[token of row p] @ weight[expert of row p]: every expert's product in one launch, over real rows only.

    Args:
        x: (T, K), tokens; with ``order`` None its rows are already in expert order.
        weight: (num_experts, K, N), any strides.
        offsets: (num_experts + 1,) int32: expert e owns rows offsets[e] .. offsets[e + 1] of the output.
            ``capacity_offsets`` gives the padded layout that this replaces.
        order: (rows,) int32: ``TokenGroups.order``; the rows are gathered while they are loaded. None: no gather.
        top_k: assignments of a token in ``order``, which has T * top_k entries.
        out: (rows, N) for the result. None allocates. Rows behind offsets[-1] are not written.
        tiles: ``tile_map(offsets, BLOCK_M, rows)`` made before, when several products share it. None makes it.
        config: launch parameters that replace those of ``matmul_config``, for tuning.

    Returns:
        (rows, N), rows = len(order), or len(x) without it.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted; values in ``offsets`` and ``order`` on
            a CPU only.
    """
    expect(RUNG, "x", x, ("T", "K"))
    expect(RUNG, "weight", weight, ("num_experts", x.shape[1], "N"), x.dtype, x.device, owner="x")
    top_k = check_integer(RUNG, "top_k", top_k, 1)
    num_experts, inner, columns = weight.shape
    if order is not None:
        _check_order(order, x, top_k)
    rows = x.shape[0] if order is None else order.numel()
    _check_offsets(offsets, rows, num_experts, x.device)
    if order is not None and order.device.type == "cpu":
        live = order[: int(offsets[-1])]
        if live.numel() and not 0 <= int(live.min()) <= int(live.max()) < rows:
            wrong = int(live.min()) if int(live.min()) < 0 else int(live.max())
            end = f"row {live.numel()}, the end of offsets"
            raise ValueError(f"{RUNG}: order holds {wrong} before {end}; want 0 .. {rows - 1}")
    config = merge_config(RUNG, matmul_config(x.element_size()), config)
    kernels = device_code(x, "groups_kernel")
    out = check_out(RUNG, out, x, (rows, columns), owner="x")
    if tiles is None:
        tiles = tile_map(offsets, config["BLOCK_M"], rows)
    expect(RUNG, "tiles", tiles, ("slots", 2), INT32, x.device, owner="x", contiguous=True)
    column_tiles = -(-columns // config["BLOCK_N"])
    if tiles.shape[0] and column_tiles:
        with torch.cuda.device_of(x):
            kernels.dflash1_grouped_matmul[(tiles.shape[0] * column_tiles,)](
                x, weight, out, tiles, offsets, order, *x.stride(), *weight.stride(), *out.stride(),
                inner, columns, column_tiles, top_k, **config,
            )  # fmt: skip
    return out


def matmul_config(itemsize):
    """Tile sizes of ``grouped_matmul``: 64 rows, because a group's last tile is half empty on average."""
    if itemsize == 4:
        return dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, PRECISION="ieee", num_warps=4, num_stages=2)
    return dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, PRECISION="tf32", num_warps=4, num_stages=4)


@kernel_entry
def permute_rows(x, groups, out=None):
    """x (T, width) copied into expert order, (T * top_k, width): the pass that ``out_index`` makes unnecessary.

    Args:
        x: (T, width), rows contiguous. groups: ``TokenGroups`` of those T tokens.
        out: (T * top_k, width) for the result, rows contiguous. None allocates.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    if not isinstance(groups, TokenGroups):
        raise TypeError(f"{RUNG}: groups is a {type(groups).__name__}; want TokenGroups, as group_tokens returns them")
    expect(RUNG, "x", x, (groups.places.shape[0], "width"), None, groups.places.device, owner="groups")
    out = check_out(RUNG, out, x, (groups.places.numel(), x.shape[1]), owner="x")
    for name, rows in (("x", x), ("out", out)):
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(f"{RUNG}: {name} has strides {rows.stride()}; want rows contiguous")
    check_rows("groups.places", groups.places, out.shape[0])
    if x.numel():
        width = x.shape[1]
        block = min(2048, 1 << (width - 1).bit_length())
        with torch.cuda.device_of(x):
            device_code(x, "groups_kernel").dflash1_permute_rows[(x.shape[0], -(-width // block))](
                x, out, groups.places, x.stride(0), out.stride(0), width, TOP_K=groups.top_k, BLOCK=block
            )
    return out


def _check_offsets(offsets, rows, num_experts=None, device=None):
    """Check where experts start, the values on a CPU only; returns the number of experts."""
    wanted = ("num_experts + 1" if num_experts is None else num_experts + 1,)
    expect(RUNG, "offsets", offsets, wanted, INT32, device, owner="x", contiguous=True)
    if not offsets.numel():
        raise ValueError(f"{RUNG}: offsets has shape (0,); want (num_experts + 1,)")
    if offsets.device.type == "cpu":
        bounds = offsets.tolist()
        check_bounds(RUNG, "offsets", bounds, min(rows, bounds[-1]), f"up to {rows} rows at the most")
    return offsets.numel() - 1


def _check_order(order, x, top_k):
    """Check shape, dtype and device of ``order``: what a host knows without its values."""
    expect(RUNG, "order", order, ("rows",), INT32, x.device, owner="x", contiguous=True)
    if order.numel() != x.shape[0] * top_k:
        given, rest = divmod(order.numel(), x.shape[0]) if x.shape[0] else (0, 1)
        hint = f"; was top_k={given} meant?" if given and not rest else ""
        raise ValueError(
            f"{RUNG}: order has {order.numel()} rows; want {x.shape[0] * top_k}, "
            f"the {x.shape[0]} tokens of x times top_k={top_k}{hint}"
        )
