"""Before attention: projection, norm, rotation and the write into the cache."""

import torch

from ladder.contract import FLOATS, check_integer, kernel_entry, outside_autocast

from . import launch
from .checks import (
    INTEGERS,
    RUNG,
    check_cache,
    check_number,
    check_options,
    check_rotation,
    check_values,
    expect,
    output,
)
from .launch import power, scaled, turn, write


@kernel_entry
def fused_qkv_rope_append(
    x, weight_qkv, cos, sin, positions, k_cache, v_cache, slot_mapping, *,
    num_heads, num_kv_heads, head_dim, bias=None, q_norm_weight=None, k_norm_weight=None, norm_eps=1e-6,
    interleaved=False, out=None, workspace=None, fused=None,
):  # fmt: skip
    """QKV projection, RMSNorm of each query and key head, rotary embedding, and keys and values into the paged cache.

    Args:
        x: (T, hidden) float16, bfloat16 or float32, any strides.
        weight_qkv: ((Hq + 2 Hkv) * D, hidden), as in ``nn.Linear``: rows of queries, of keys, of values.
        cos, sin: (max_positions, rot_dim / 2), from ``rope_tables``. rot_dim may be less than D: the first rot_dim
        columns
            of a head are rotated, the others pass.
        positions: (T,) int32 or int64.
        k_cache, v_cache: (num_pages, page_size, Hkv, D), written in place.
        slot_mapping: (T,) int32 or int64, where token t's key and value go: page * page_size + slot. Negative: nowhere.
            No two tokens may name the same slot.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        bias: ((Hq + 2 Hkv) * D,) or None.
        q_norm_weight, k_norm_weight: (D,), the norm over each head before the rotation (Qwen3), or None.
        norm_eps: of that norm.
        interleaved: columns 2i and 2i + 1 are a pair (GPT-J, DeepSeek), not i and i + rot_dim / 2 (Llama, GPT-NeoX).
        out: (T, Hq, D) for the queries, any strides. None allocates.
        workspace: a ``DecodeWorkspace`` for partial sums, which calls on one stream may share. None allocates. Not used
            under ``torch.compile``, which plans memory itself.
        fused: True: one launch for all; False: a library's product,
        then one pass; None: True up to ``ONE_LAUNCH_TOKENS`` tokens.

    Returns:
        q (T, Hq, D). Norm and rotation are float32; with one launch so is what enters them. A position outside the
        tables or a slot outside the cache is a ValueError on a CPU; on a GPU the token's q becomes NaN and nothing is
        written outside the cache.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: gradients.

    Source: the article's section 4.1; RMSNorm of heads as in Qwen3.
    """
    num_heads = check_integer(RUNG, "num_heads", num_heads, 1)
    num_kv_heads = check_integer(RUNG, "num_kv_heads", num_kv_heads, 1)
    head_dim = check_integer(RUNG, "head_dim", head_dim, 2)
    if num_heads % num_kv_heads:
        raise ValueError(f"{RUNG}: num_heads is {num_heads}; want a multiple of num_kv_heads, {num_kv_heads}")
    columns = (num_heads + 2 * num_kv_heads) * head_dim
    expect("x", x, ("T", "hidden"), FLOATS)
    tokens, hidden = x.shape
    own, device = (x.dtype,), x.device
    expect("weight_qkv", weight_qkv, (columns, hidden), own, device)
    expect("bias", bias, (columns,), own, device, optional=True, contiguous=True)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        expect(name, weight, (head_dim,), FLOATS, device, optional=True, contiguous=True)
    check_rotation(cos, sin, positions, tokens, head_dim, "D", device)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        expect(name, cache, ("num_pages", "page_size", num_kv_heads, head_dim), own, device)
        check_cache(name, cache)
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"{RUNG}: v_cache has shape {tuple(v_cache.shape)}; want {tuple(k_cache.shape)}, that of k_cache"
        )
    expect("slot_mapping", slot_mapping, (tokens,), INTEGERS, device, contiguous=True)
    norm_eps = check_number("norm_eps", norm_eps)
    check_options(workspace, device, interleaved=interleaved, fused=fused)
    out = output("out", out, x, (tokens, num_heads, head_dim))
    arguments = (
        x, weight_qkv, bias, q_norm_weight, k_norm_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, out,
        num_heads, norm_eps, interleaved, fused,
    )  # fmt: skip
    if launch.as_operator():
        torch.ops.ladder.dflash2_qkv_rope_append(*arguments)
    else:
        _qkv_rope_append(*arguments, workspace)
    return out


@kernel_entry
def fused_mla_append(
    x, kv_norm_weight, cos, sin, positions, latent_cache, slot_mapping, q_pe, *,
    weight=None, q_nope=None, norm_eps=1e-6, interleaved=True, out=None, workspace=None, fused=None,
):  # fmt: skip
    """Multi-head latent attention before the kernel: latent into its paged cache, queries rotated and put together.

    Args:
        x: (T, rank + rot_dim), the output of the KV down projection (``kv_a_proj_with_mqa``); with ``weight`` the
            hidden state (T, hidden) that it projects. float16, bfloat16 or float32, any strides.
        kv_norm_weight: (rank,), RMSNorm of the latent (``kv_a_layernorm``); rank is 512 in DeepSeek-V2 and V3.
        cos, sin: (max_positions, rot_dim / 2), from ``rope_tables``; rot_dim is 64 there.
        positions, slot_mapping: (T,), as in ``fused_qkv_rope_append``.
        latent_cache: (num_pages, page_size, rank + rot_dim), written in place: the normed latent, then the rotated key.
        q_pe: (T, H, rot_dim), the rotary columns of the queries, any strides.
        weight: (rank + rot_dim, hidden) of the down projection, or None when x is its output.
        q_nope: (T, H, n), the other columns, already multiplied by the key's up projection (absorbed: n is the rank),
            or None.
        norm_eps: of the norm.
        interleaved: pairs are neighbours, as DeepSeek's weights have them. Pairs stay where they are: Hugging Face's
            code moves them apart, in queries and keys alike, which leaves every score the same.
        out: (T, H, rot_dim), or (T, H, n + rot_dim) with q_nope, any strides. Without q_nope it may be q_pe itself,
            which is then turned where it stands. None allocates.
        workspace, fused: as in ``fused_qkv_rope_append``; without ``weight`` there is no product and neither matters.

    Returns:
        The rotated q_pe (T, H, rot_dim), or with q_nope (T, H, n + rot_dim), as ``dflash2_mla_decode`` wants it.

    Raises:
        As ``fused_qkv_rope_append``.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1.
    """
    expect("x", x, ("T", "hidden" if weight is not None else "rank + rot_dim"), FLOATS)
    own, device, tokens = (x.dtype,), x.device, x.shape[0]
    expect("kv_norm_weight", kv_norm_weight, ("rank",), FLOATS, device, contiguous=True)
    expect("latent_cache", latent_cache, ("num_pages", "page_size", "rank + rot_dim"), own, device)
    check_cache("latent_cache", latent_cache)
    rank, width = kv_norm_weight.shape[0], latent_cache.shape[2]
    rot_dim = width - rank
    if rank < 1 or rot_dim < 2 or rot_dim % 2:
        raise ValueError(
            f"{RUNG}: latent_cache has {width} columns, kv_norm_weight {rank}; want an even number more, rot_dim"
        )
    if weight is None:
        expect("x", x, (tokens, width), own)
    else:
        expect("weight", weight, (width, x.shape[1]), own, device)
    check_rotation(cos, sin, positions, tokens, rot_dim, "rot_dim", device, whole=True)
    expect("slot_mapping", slot_mapping, (tokens,), INTEGERS, device, contiguous=True)
    expect("q_pe", q_pe, (tokens, "H", rot_dim), own, device)
    num_heads = q_pe.shape[1]
    expect("q_nope", q_nope, (tokens, num_heads, "n"), own, device, optional=True)
    norm_eps = check_number("norm_eps", norm_eps)
    check_options(workspace, device, interleaved=interleaved, fused=fused)
    out = output("out", out, x, (tokens, num_heads, rot_dim + (0 if q_nope is None else q_nope.shape[2])))
    arguments = (
        x, weight, kv_norm_weight, cos, sin, positions, slot_mapping, latent_cache, q_pe, q_nope, out, norm_eps,
        interleaved, fused,
    )  # fmt: skip
    if launch.as_operator():
        torch.ops.ladder.dflash2_mla_append(*arguments)
    else:
        _mla_append(*arguments, workspace)
    return out


@outside_autocast
def _qkv_rope_append(
    x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, k_cache, v_cache, out, num_heads, eps, interleaved,
    fused,
    workspace=None,
):  # fmt: skip
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    check_values(cos, positions, slots, num_slots)
    (tokens, hidden), units = x.shape, num_heads + 2 * num_kv_heads
    kernels = launch.kernels(x)
    if tokens == 0:
        return
    if kernels is None:
        qkv = torch.nn.functional.linear(x, weight, bias).view(tokens, units, head_dim)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        out.copy_(turn(scaled(q, q_norm, eps), cos, sin, positions, interleaved))
        write(k_cache, slots, turn(scaled(k, k_norm, eps), cos, sin, positions, interleaved))
        write(v_cache, slots, v)
        return
    rotation = launch.rotation(cos, head_dim, interleaved)
    places = (*out.stride(), *k_cache.stride(), *v_cache.stride())
    cache = (cos.shape[0], num_slots, k_cache.shape[1], eps)
    with torch.cuda.device_of(x):  # the launch goes to the current device
        if tokens <= launch.ONE_LAUNCH_TOKENS if fused is None else fused:
            config = launch.projection_config(
                tokens, units, head_dim, hidden, x.element_size(), launch.processors(x.device)
            )
            row_tiles = -(-tokens // config["BLOCK_T"])
            splits = config.pop("splits")
            programs = row_tiles * units * config["TILES"] * splits
            partials, counters = launch.scratch(
                workspace, x, splits, config["TILES"], tokens * units * head_dim, row_tiles * units
            )
            kernels.dflash2_qkv_rope_append[(programs,)](
                x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, out, k_cache, v_cache, partials, counters,
                *x.stride(), *weight.stride(), *places,
                tokens, hidden, launch.per_split(hidden, splits, config), splits, row_tiles, num_heads, num_kv_heads,
                *cache,
                HEAD_DIM=head_dim, **rotation, **config,
            )  # fmt: skip
        else:
            qkv = torch.nn.functional.linear(x, weight, bias)
            config = launch.pass_config(tokens, units, head_dim, launch.processors(x.device))
            grid = (-(-tokens // config["BLOCK_T"]), -(-units // config["heads_in_turn"]))
            kernels.dflash2_rope_append[grid](
                qkv, q_norm, k_norm, cos, sin, positions, slots, out, k_cache, v_cache,
                *qkv.stride(), *places, tokens, num_heads, num_kv_heads, *cache,
                HEAD_DIM=head_dim, **rotation, **config,
            )  # fmt: skip


@outside_autocast
def _mla_append(
    x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, eps, interleaved, fused,
    workspace=None,
):  # fmt: skip
    num_slots = latent_cache.shape[0] * latent_cache.shape[1]
    check_values(cos, positions, slots, num_slots)
    tokens, num_heads, rot_dim = q_pe.shape
    rank = norm.shape[0]
    kernels = launch.kernels(x)
    if tokens == 0:
        return
    if kernels is None:
        latent, k_pe = (x if weight is None else torch.nn.functional.linear(x, weight)).split([rank, rot_dim], dim=1)
        k_pe = turn(k_pe[:, None], cos, sin, positions, interleaved)[:, 0]
        write(latent_cache, slots, torch.cat([scaled(latent, norm, eps).float(), k_pe.float()], dim=1))
        out[..., out.shape[2] - rot_dim :] = turn(q_pe, cos, sin, positions, interleaved).to(out.dtype)
        if q_nope is not None:
            out[..., : q_nope.shape[2]] = q_nope
        return
    nope = 0 if q_nope is None else q_nope.shape[2]
    with torch.cuda.device_of(x):
        if weight is not None and not (tokens <= launch.ONE_LAUNCH_TOKENS if fused is None else fused):
            x, weight = torch.nn.functional.linear(x, weight), None
        inner, per_split, splits, partials, counters, weight_strides = x.shape[1], 0, 1, None, None, (0, 0)
        if weight is None:
            config = dict(TILES=1, BLOCK_T=max(1, 2048 // power(rank)), BLOCK_N=16, BLOCK_K=16, FINISH_T=1, EVEN=False,
                          PRECISION="ieee", num_warps=4, num_stages=1)  # fmt: skip
        else:
            config = launch.projection_config(
                tokens, 1, rank + rot_dim, inner, x.element_size(), launch.processors(x.device)
            )
            splits = config.pop("splits")
            per_split, weight_strides = launch.per_split(inner, splits, config), weight.stride()
        row_tiles = -(-tokens // config["BLOCK_T"])
        if weight is not None:
            partials, counters = launch.scratch(
                workspace, x, splits, config["TILES"], tokens * (rank + rot_dim), row_tiles
            )
        block_q = max(1, min(16, 4096 // power(max(nope, rot_dim))))
        latent_programs = row_tiles * config["TILES"] * splits
        kernels.dflash2_mla_append[(latent_programs + -(-tokens * num_heads // block_q),)](
            x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, partials, counters,
            *x.stride(), *weight_strides, *latent_cache.stride(), *q_pe.stride(),
            *(q_nope.stride() if nope else (0, 0, 0)), *out.stride(),
            tokens, num_heads, inner, per_split, splits, row_tiles, cos.shape[0], num_slots, latent_cache.shape[1], eps,
            RANK=rank, BLOCK_R=power(rank), ROT=rot_dim, HALF=power(rot_dim // 2), INTERLEAVED=interleaved,
            NOPE=nope, BLOCK_NOPE=power(max(nope, 1)), BLOCK_Q=block_q, PROJECT=weight is not None, **config,
        )  # fmt: skip


# Custom operators, so that torch.compile(fullgraph=True) sees one opaque call


@torch.library.custom_op("ladder::dflash2_qkv_rope_append", mutates_args=("k_cache", "v_cache", "out"))
def _qkv_rope_append_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
    num_heads: int, eps: float, interleaved: bool, fused: bool | None,
) -> None:  # fmt: skip
    _qkv_rope_append(
        x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, k_cache, v_cache, out, num_heads, eps,
        interleaved, fused,
    )  # fmt: skip


@torch.library.custom_op("ladder::dflash2_mla_append", mutates_args=("latent_cache", "out"))
def _mla_append_op(
    x: torch.Tensor, weight: torch.Tensor | None, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, latent_cache: torch.Tensor, q_pe: torch.Tensor,
    q_nope: torch.Tensor | None,
    out: torch.Tensor, eps: float, interleaved: bool, fused: bool | None,
) -> None:  # fmt: skip
    _mla_append(x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, eps, interleaved, fused)


@_qkv_rope_append_op.register_fake
@_mla_append_op.register_fake
def _(*args):
    return None
