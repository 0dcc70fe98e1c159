"""Coarse fusion: the work before attention (projection, norm, rotation, cache) and after it (norm, router) in one
launch where rows are few, in a library's product and one pass where they are many.

Where the line lies is arithmetic. A product of T rows does T FLOP for each byte of its weight (two bytes an element),
and a GPU that multiplies at 793 TFLOP/s and reads 4.4 TB/s can do 180. Of few rows the weight's bytes are all that
counts: one kernel streams them once and finishes in the same launch. Of more than
``FEW_TOKENS`` it would stream them again for every tile of 64 rows. Measured, the
library's product and one pass over its result win earlier, from ``ONE_LAUNCH_TOKENS`` on.
"""

import torch

from ladder.step06_paged.attention import processors  # noqa: F401 - the launches take it from here

from ..dispatch import device_code

FEW_TOKENS = 64  # rows up to which one launch can do product and epilogue: one tile of rows, so the weight is read once
# and up to which it does unless told: at 8 it is 8 to 20 % faster than two, at 64 16 % to 5 x slower
ONE_LAUNCH_TOKENS = 16
# rows up to which every program of the router norms for itself: at 229 kB two launches are 22 % faster
REREAD_BYTES = 1 << 17


def few_rows_to_route(x, residual):
    """Whether norm and router take one launch: every program reads all
    rows, which must cost less than a second launch."""
    row_bytes = x.shape[1] * x.element_size() * (1 if residual is None else 2)
    return x.shape[0] <= min(FEW_TOKENS, REREAD_BYTES // row_bytes)


def projection_config(tokens, units, unit_columns, inner, itemsize, num_processors):
    """Tiles and splits of a product with few rows, ``units`` groups of ``unit_columns`` output columns.

    Two programs for each processor or more keep enough of the weight
    in flight; a split shorter than two tiles would not.
    """
    block_t = max(16, min(64 if itemsize == 2 else 32, power(tokens)))
    block_n = next((n for n in (64, 32, 16) if unit_columns % n == 0), 32)
    block_k = min(128 if itemsize == 2 else 32, max(16, power(inner)))
    tiles = -(-unit_columns // block_n)
    splits, most = 1, 16 if unit_columns <= 256 else 4  # whoever finishes a wide unit reads all its partial sums alone
    while splits < most and tiles * units * splits < 2 * num_processors and inner >= 4 * splits * block_k:
        splits *= 2
    return dict(
        splits=splits, TILES=tiles, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        FINISH_T=max(1, min(block_t, 4096 // itemsize // power(unit_columns))), EVEN=inner % block_k == 0,
        PRECISION="tf32" if itemsize == 2 else "ieee", num_warps=4,
        num_stages=(4 if block_t <= 32 else 3) if itemsize == 2 else 2,
    )  # fmt: skip


def pass_config(tokens, units, head_dim, num_processors):
    """Tiles of the pass behind a library's product: 2048 elements, and as many heads in turn as leave four programs for
    each processor, because heads share the angles."""
    block_t = max(1, min(16, 2048 // power(head_dim)))
    tiles = -(-tokens // block_t)
    return dict(BLOCK_T=block_t, heads_in_turn=max(1, min(8, tiles * units // (4 * num_processors))), num_warps=4)


def router_config(tokens, num_experts, hidden, num_groups, itemsize, same_dtype, one_launch, num_processors):
    """Tiles and splits of the router: programs score a tile of experts
    for a tile of rows over a part of the hidden columns.

    Few rows: narrow tiles, because whoever finishes a row tile reads all its partial sums alone. Many: 64 rows by all
    experts, as far as registers allow, so that neither rows nor gate are read more often than they must.
    """
    wide, every = itemsize == 4, max(16, power(num_experts))
    ieee = wide and same_dtype
    most_t, most_e = (16, 64) if ieee else (64, 128) if wide else (64, 256)
    block_t, block_e = (most_t, min(most_e, every)) if tokens > 512 else (16, min(64, every))
    if one_launch:
        block_t = max(16, power(tokens))  # one tile of rows: who finishes it knows the counts
    block_k = min(32 if wide else 128 if block_t * block_e <= 2048 else 64, max(16, power(hidden)))
    row_tiles, tiles, splits = -(-tokens // block_t), -(-num_experts // block_e), 1
    while splits < 16 and 2 * row_tiles * tiles * splits <= num_processors and hidden >= 2 * splits * block_k:
        splits *= 2
    per_group = num_experts // num_groups
    block_g, block_p = power(num_groups), power(per_group)
    # Eight warps for a large tile, and with 256 columns or more, where each of them ranks two tokens.
    num_warps = 8 if block_t * block_e > 4096 or block_g * block_p >= 256 else 4
    return dict(
        splits=splits, TILES=tiles, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=block_k,
        BLOCK_S=max(block_k, min(power(hidden), 8192 // block_t)),  # columns of the rows' sums of squares
        FINISH_T=max(1, min(block_t, 512 * num_warps // (block_g * block_p))),
        GROUPS=num_groups, BLOCK_G=block_g, PER_GROUP=per_group, BLOCK_P=block_p,
        # 16-bit rows are TF32 numbers already: three TF32 products hold all that float32 gates add.
        PRECISION="ieee" if ieee else "tf32x3" if wide else "tf32",
        num_warps=num_warps, num_stages=2 if wide else 3,
    )  # fmt: skip


def per_split(inner, splits, config):
    """Inner columns of a split, a multiple of the tile."""
    tile = config["BLOCK_K"]
    return -(-(-(-inner // splits)) // tile) * tile


def scratch(workspace, x, splits, tiles, elements, counters):
    """Float32 partial sums and counters of a launch, out of
    ``workspace`` or new; zeroed counters, if any will be counted."""
    elements *= splits
    if workspace is not None:
        return workspace.reserve(elements, counters)
    partials = x.new_empty(elements, dtype=torch.float32)
    return partials, x.new_zeros(counters, dtype=torch.int32) if splits * tiles > 1 else partials.view(torch.int32)


def rotation(cos, head_dim, interleaved):
    rot_dim = 2 * cos.shape[1]
    return dict(
        ROT=rot_dim, HALF=power(max(rot_dim // 2, 1)), REST=power(max(head_dim - rot_dim, 1)), INTERLEAVED=interleaved
    )


def power(n):
    """The lowest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def scaled(x, weight, eps):
    """RMSNorm over the last dimension in float32; x when there is no weight."""
    if weight is None:
        return x
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def turn(x, cos, sin, positions, interleaved):
    """(T, heads, D) in float32, the first columns rotated by each token's angles."""
    x, half = x.float(), cos.shape[1]
    cos, sin = (table[positions.long()].float()[:, None] for table in (cos, sin))
    turned, rest = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    if interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned.split(half, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def write(cache, slots, rows):
    """Rows into their slots (page, offset) of the cache; negative slots are skipped."""
    kept = slots >= 0
    slots = slots[kept].long()
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[kept].to(cache.dtype)


def kernels(x):
    """The module of kernels, or None where PyTorch computes, as in ``dispatch.device_code``."""
    return device_code(x, "fusion.kernel")


def as_operator():
    """Whether somebody traces: torch.compile, or a dispatch mode (fake tensors, make_fx, counters of operations).

    Otherwise the launch is called directly: the operator's wrapping costs more than a small kernel takes.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
