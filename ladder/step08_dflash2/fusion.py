"""Coarse fusion: the work before attention (projection, norm, rotation, cache) and after it (norm, router) in one launch
where rows are few, in a library's product and one pass where they are many.

Where the line lies is arithmetic. A product of T rows does T FLOP for each byte of its weight (two bytes an element), and a
GPU that multiplies at 793 TFLOP/s and reads 4.4 TB/s can do 180. Of few rows the weight's bytes are all that counts: one kernel
streams them once and finishes in the same launch. Of more than ``FEW_TOKENS`` it would stream them again for every tile of 64
rows. Measured, the library's product and one pass over its result win earlier, from ``ONE_LAUNCH_TOKENS`` on.
"""

import math
import numbers

import torch

from ladder.contract import (
    FLOATS,
    check_flag,
    check_integer,
    check_no_overlap,
    kernel_entry,
    outside_autocast,
)
from ladder.step06_paged.attention import processors
from ladder.step07_dflash1 import DecodeWorkspace

from .dispatch import device_code

RUNG = "step08_dflash2"
FEW_TOKENS = 64  # rows up to which one launch can do product and epilogue: one tile of rows, so the weight is read once
ONE_LAUNCH_TOKENS = 16  # and up to which it does unless told: at 8 it is 8 to 20 % faster than two, at 64 16 % to 5 x slower
REREAD_BYTES = 1 << 17  # rows up to which every program of the router norms for itself: at 229 kB two launches are 22 % faster
MAX_HIDDEN = 32768  # columns of a row that the norm holds in registers
MAX_EXPERTS = 1024
INTEGERS = (torch.int32, torch.int64)


# Rotary tables


ROPE_KEYS = {  # what each type of rotary scaling reads, besides its own name and rope_theta
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
             "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip


def rope_tables(head_dim, max_positions, theta=None, scaling=None, *, device="cpu"):
    """cos and sin of the rotary embedding for every position.

    Args:
        head_dim: columns that are rotated (``rot_dim``): even; less than the head's size where the model rotates a part.
        max_positions: rows of the tables.
        theta: base of the frequencies; None is the ``rope_theta`` of ``scaling``, or 10000 where that names none.
        scaling: None, or the ``rope_scaling`` or ``rope_parameters`` entry of a model's config.json: a dict with "rope_type" or
            "type" among "default" (also when there is neither); "linear" (factor); "yarn" (factor,
            original_max_position_embeddings, and optionally beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim,
            truncate); "llama3" (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings). Each may have
            "rope_theta". They mean what they mean in transformers; any other key is refused unless its value is None.
        device: of the tables.

    Returns:
        cos, sin: (max_positions, head_dim / 2) float32, YaRN's attention factor multiplied in. Angles are computed in
        float64, so that position 128k is as exact as position 1. DeepSeek's models also scale their softmax: see
        ``yarn_mscale``.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.

    Source: Su et al., "RoFormer"; Peng et al., "YaRN", section 3.
    """
    head_dim = check_integer(RUNG, "head_dim", head_dim, 2)
    max_positions = check_integer(RUNG, "max_positions", max_positions, 0)
    if head_dim % 2:
        raise ValueError(f"{RUNG}: head_dim is {head_dim}; want an even number: columns are rotated in pairs")
    if theta is not None and not _is_positive(theta):
        raise ValueError(f"{RUNG}: theta is {theta!r}; want a positive number")
    frequencies, factor = _frequencies(head_dim, theta, scaling)
    angles = torch.arange(max_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return tuple((f(angles) * factor).float().to(device=device) for f in (torch.cos, torch.sin))


def yarn_mscale(factor, mscale=1.0):
    """YaRN's 0.1 * mscale * ln(factor) + 1, and 1 up to a factor of 1.

    DeepSeek multiplies its softmax scale by the square of it, with ``mscale_all_dim`` of its rope_scaling for mscale.

    Raises:
        TypeError, ValueError: ``factor`` or ``mscale`` is no finite number.

    Source: Peng et al., "YaRN", section 3.4.
    """
    factor, mscale = check_number("factor", factor, signed=True), check_number("mscale", mscale, signed=True)
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _is_positive(number):
    return isinstance(number, numbers.Real) and not isinstance(number, bool) and 0 < number < math.inf


def _frequencies(dim, theta=None, scaling=None):
    """(dim / 2,) float64 radians per position, and the factor on cos and sin."""
    if scaling is not None and not isinstance(scaling, dict):
        raise TypeError(f"{RUNG}: scaling is a {type(scaling).__name__}; want a dict with a 'rope_type', or None")
    scaling = {name: given for name, given in (scaling or {}).items() if given is not None or name == "truncate"}
    kinds = {name: scaling.pop(name) for name in ("rope_type", "type") if name in scaling} or {"rope_type": "default"}
    kind = next(iter(kinds.values()))
    if any(other != kind for other in kinds.values()):
        raise ValueError(f"{RUNG}: scaling has rope_type {kind!r} and type {kinds['type']!r}; want one of them, or the same twice")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"{RUNG}: scaling has type {kind!r}; want 'default', 'linear', 'yarn' or 'llama3'")
    if scaling.pop("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{RUNG}: scaling has a partial_rotary_factor other than 1; want none: head_dim is the number of rotated columns")
    for name in scaling:
        if name not in ROPE_KEYS[kind] and name != "rope_theta":
            raise ValueError(f"{RUNG}: scaling[{name!r}] is {scaling[name]!r}; want no such key: type {kind!r} does not read it")

    def value(name, default=None):
        number = scaling.get(name, default)
        if not _is_positive(number):
            raise ValueError(f"{RUNG}: scaling[{name!r}] is {number!r}; want a positive number for type {kind!r}")
        return float(number)

    base = value("rope_theta", 10000.0 if theta is None else theta)
    if theta is not None and base != theta:
        raise ValueError(f"{RUNG}: theta is {theta} and scaling['rope_theta'] is {base}; want one of them, or the same twice")
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if kind == "default":
        return plain, 1.0
    factor = value("factor")
    if kind == "linear":
        return plain / factor, 1.0
    trained = value("original_max_position_embeddings")
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if high <= low:
            raise ValueError(f"{RUNG}: scaling['high_freq_factor'] is {high}; want more than low_freq_factor, {low}")
        turns = trained * plain / (2 * math.pi)  # of each pair within the trained context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * keep + plain / factor * (1 - keep), 1.0
    if base <= 1:
        raise ValueError(f"{RUNG}: theta is {base:g}; want more than 1 for type 'yarn', which divides by its logarithm")
    first, last = (
        dim * math.log(trained / (value(name, default) * 2 * math.pi)) / (2 * math.log(base))
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    )  # the pairs that turn so often within the trained context
    truncate = scaling.get("truncate", True)
    check_flag(RUNG, "scaling['truncate']", truncate)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - first) / ((last - first) or 0.001)).clamp(0, 1)
    if "attention_factor" in scaling:
        attention = value("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = yarn_mscale(factor, value("mscale")) / yarn_mscale(factor, value("mscale_all_dim"))
    else:
        attention = yarn_mscale(factor)
    return plain * (1 - ramp) + plain / factor * ramp, attention


# Before attention


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
        cos, sin: (max_positions, rot_dim / 2), from ``rope_tables``. rot_dim may be less than D: the first rot_dim columns
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
        fused: True: one launch for all; False: a library's product, then one pass; None: True up to ``ONE_LAUNCH_TOKENS`` tokens.

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
    _expect("x", x, ("T", "hidden"), FLOATS)
    tokens, hidden = x.shape
    own, device = (x.dtype,), x.device
    _expect("weight_qkv", weight_qkv, (columns, hidden), own, device)
    _expect("bias", bias, (columns,), own, device, optional=True, contiguous=True)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        _expect(name, weight, (head_dim,), FLOATS, device, optional=True, contiguous=True)
    _check_rotation(cos, sin, positions, tokens, head_dim, "D", device)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _expect(name, cache, ("num_pages", "page_size", num_kv_heads, head_dim), own, device)
        _check_cache(name, cache)
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"{RUNG}: v_cache has shape {tuple(v_cache.shape)}; want {tuple(k_cache.shape)}, that of k_cache")
    _expect("slot_mapping", slot_mapping, (tokens,), INTEGERS, device, contiguous=True)
    norm_eps = check_number("norm_eps", norm_eps)
    _check_options(workspace, device, interleaved=interleaved, fused=fused)
    out = _output("out", out, x, (tokens, num_heads, head_dim))
    arguments = (
        x, weight_qkv, bias, q_norm_weight, k_norm_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, out,
        num_heads, norm_eps, interleaved, fused,
    )  # fmt: skip
    if _as_operator():
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
        x: (T, rank + rot_dim), the output of the KV down projection (``kv_a_proj_with_mqa``); with ``weight`` the hidden
            state (T, hidden) that it projects. float16, bfloat16 or float32, any strides.
        kv_norm_weight: (rank,), RMSNorm of the latent (``kv_a_layernorm``); rank is 512 in DeepSeek-V2 and V3.
        cos, sin: (max_positions, rot_dim / 2), from ``rope_tables``; rot_dim is 64 there.
        positions, slot_mapping: (T,), as in ``fused_qkv_rope_append``.
        latent_cache: (num_pages, page_size, rank + rot_dim), written in place: the normed latent, then the rotated key.
        q_pe: (T, H, rot_dim), the rotary columns of the queries, any strides.
        weight: (rank + rot_dim, hidden) of the down projection, or None when x is its output.
        q_nope: (T, H, n), the other columns, already multiplied by the key's up projection (absorbed: n is the rank), or None.
        norm_eps: of the norm.
        interleaved: pairs are neighbours, as DeepSeek's weights have them. Pairs stay where they are: Hugging Face's code
            moves them apart, in queries and keys alike, which leaves every score the same.
        out: (T, H, rot_dim), or (T, H, n + rot_dim) with q_nope, any strides. Without q_nope it may be q_pe itself, which is
            then turned where it stands. None allocates.
        workspace, fused: as in ``fused_qkv_rope_append``; without ``weight`` there is no product and neither matters.

    Returns:
        The rotated q_pe (T, H, rot_dim), or with q_nope (T, H, n + rot_dim), as ``dflash2_mla_decode`` wants it.

    Raises:
        As ``fused_qkv_rope_append``.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1.
    """
    _expect("x", x, ("T", "hidden" if weight is not None else "rank + rot_dim"), FLOATS)
    own, device, tokens = (x.dtype,), x.device, x.shape[0]
    _expect("kv_norm_weight", kv_norm_weight, ("rank",), FLOATS, device, contiguous=True)
    _expect("latent_cache", latent_cache, ("num_pages", "page_size", "rank + rot_dim"), own, device)
    _check_cache("latent_cache", latent_cache)
    rank, width = kv_norm_weight.shape[0], latent_cache.shape[2]
    rot_dim = width - rank
    if rank < 1 or rot_dim < 2 or rot_dim % 2:
        raise ValueError(f"{RUNG}: latent_cache has {width} columns, kv_norm_weight {rank}; want an even number more, rot_dim")
    if weight is None:
        _expect("x", x, (tokens, width), own)
    else:
        _expect("weight", weight, (width, x.shape[1]), own, device)
    _check_rotation(cos, sin, positions, tokens, rot_dim, "rot_dim", device, whole=True)
    _expect("slot_mapping", slot_mapping, (tokens,), INTEGERS, device, contiguous=True)
    _expect("q_pe", q_pe, (tokens, "H", rot_dim), own, device)
    num_heads = q_pe.shape[1]
    _expect("q_nope", q_nope, (tokens, num_heads, "n"), own, device, optional=True)
    norm_eps = check_number("norm_eps", norm_eps)
    _check_options(workspace, device, interleaved=interleaved, fused=fused)
    out = _output("out", out, x, (tokens, num_heads, rot_dim + (0 if q_nope is None else q_nope.shape[2])))
    arguments = (
        x, weight, kv_norm_weight, cos, sin, positions, slot_mapping, latent_cache, q_pe, q_nope, out, norm_eps, interleaved, fused,
    )  # fmt: skip
    if _as_operator():
        torch.ops.ladder.dflash2_mla_append(*arguments)
    else:
        _mla_append(*arguments, workspace)
    return out


# After attention


@kernel_entry
def fused_norm_router(
    x, residual, norm_weight, gate_weight, *,
    top_k, eps=1e-6, scoring="softmax", correction_bias=None, num_groups=None, topk_groups=None, group_score=None,
    renormalize=True, routed_scaling_factor=1.0, workspace=None, fused=None,
):  # fmt: skip
    """Residual add, RMSNorm, gate product, choice of experts and their counts.

    Args:
        x: (T, hidden) float16, bfloat16 or float32, any strides; hidden up to 32768.
        residual: (T, hidden) like x, added to it, or None.
        norm_weight: (hidden,).
        gate_weight: (E, hidden), in the dtype of x or float32. E up to 1024.
        top_k: experts of a token.
        eps: of the norm.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        correction_bias: (E,), added to the scores for the choice but not to the weights (DeepSeek-V3), or None.
        num_groups, topk_groups: experts are in num_groups equal groups, in order; only those of the topk_groups best groups
            may be chosen (DeepSeek-V2: 8 and 3, V3: 8 and 4). None: no groups.
        group_score: what makes a group good: "max", its best expert (V2), or "top2", the sum of its best two (V3).
            None: "top2" with a correction bias, else "max".
        renormalize: weights of a token are divided by their sum.
        routed_scaling_factor: on the weights, after that.
        workspace: as in ``fused_qkv_rope_append``.
        fused: True: one launch, at most ``FEW_TOKENS`` tokens; False: add and norm, then the router; None: True while x and
            residual together are at most ``REREAD_BYTES``, for in one launch every program reads all of them.

    Returns:
        normed: (T, hidden). residual_out: (T, hidden), x + residual rounded to their dtype, which is what is normed; x
        itself without residual. topk_weights: (T, top_k) float32, best first. topk_ids: (T, top_k) int32.
        expert_counts: (E,) int32, assignments of each expert. ``ladder.step07_dflash1.group_tokens(topk_ids, E)`` sorts them.

        The product takes the rounded ``normed`` and sums in float32. Of equal scores the lowest expert wins; where a
        softmax or sigmoid saturates, logits still tell experts apart. NaN ranks first, as in ``torch.topk``, so it shows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: sizes, gradients.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.2; "DeepSeek-V3", section 2.1.2.
    """
    _expect("x", x, ("T", "hidden"), FLOATS)
    own, device = (x.dtype,), x.device
    _expect("residual", residual, tuple(x.shape), own, device, optional=True)
    _expect("norm_weight", norm_weight, (x.shape[1],), FLOATS, device, contiguous=True)
    _expect("gate_weight", gate_weight, ("E", x.shape[1]), (x.dtype, torch.float32), device)
    num_experts = gate_weight.shape[0]
    _expect("correction_bias", correction_bias, (num_experts,), FLOATS, device, optional=True, contiguous=True)
    top_k = check_integer(RUNG, "top_k", top_k, 1)
    if not isinstance(scoring, str) or scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"{RUNG}: scoring is {scoring!r}; want 'softmax' or 'sigmoid'")
    if (num_groups is None) != (topk_groups is None):
        raise ValueError(f"{RUNG}: num_groups is {num_groups}, topk_groups {topk_groups}; want both, or None for both")
    num_groups = 1 if num_groups is None else check_integer(RUNG, "num_groups", num_groups, 1, optional=True)
    topk_groups = 1 if topk_groups is None else check_integer(RUNG, "topk_groups", topk_groups, 1, optional=True)
    if num_experts == 0 or num_experts % num_groups:
        raise ValueError(f"{RUNG}: gate_weight has {num_experts} experts; want a multiple of num_groups, {num_groups}")
    if topk_groups > num_groups:
        raise ValueError(f"{RUNG}: topk_groups is {topk_groups}; want at most num_groups, {num_groups}")
    choice = num_experts // num_groups * topk_groups
    if top_k > choice:
        raise ValueError(f"{RUNG}: top_k is {top_k}; want at most {choice}, the experts that may be chosen")
    if group_score is not None and (not isinstance(group_score, str) or group_score not in ("max", "top2")):
        raise ValueError(f"{RUNG}: group_score is {group_score!r}; want 'max', 'top2' or None")
    top2 = group_score == "top2" if group_score is not None else correction_bias is not None
    top2 = top2 and topk_groups < num_groups
    if top2 and num_experts == num_groups:
        raise ValueError(f"{RUNG}: num_groups is {num_groups}, one expert each; want two experts or more for group_score 'top2'")
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(f"{RUNG}: gate_weight has {num_experts} experts; the router holds up to {MAX_EXPERTS}")
    _check_hidden(x)
    eps = check_number("eps", eps)
    scaling = check_number("routed_scaling_factor", routed_scaling_factor, signed=True)
    check_flag(RUNG, "renormalize", renormalize)
    _check_options(workspace, device, fused=fused)
    if fused and x.shape[0] > FEW_TOKENS:
        raise ValueError(f"{RUNG}: fused is True for {x.shape[0]} tokens; want at most {FEW_TOKENS}, or None")
    arguments = (
        x, residual, norm_weight, gate_weight, correction_bias, top_k, eps, scoring == "sigmoid", num_groups, topk_groups,
        top2, renormalize, scaling, fused,
    )  # fmt: skip
    if _as_operator():
        results = torch.ops.ladder.dflash2_norm_router(*arguments)
    else:
        results = _norm_router(*arguments, workspace)
    return (results[0], x if residual is None else results[1], *results[2:])


@kernel_entry
def fused_add_norm(x, residual, norm_weight, *, eps=1e-6):
    """RMSNorm(x + residual) and the sum: what a block starts with, one pass.

    Args:
        x, residual, norm_weight, eps: as in ``fused_norm_router``.

    Returns:
        normed (T, hidden), residual_out (T, hidden): as there.

    Raises:
        As there.
    """
    _expect("x", x, ("T", "hidden"), FLOATS)
    _expect("residual", residual, tuple(x.shape), (x.dtype,), x.device, optional=True)
    _expect("norm_weight", norm_weight, (x.shape[1],), FLOATS, x.device, contiguous=True)
    _check_hidden(x)
    eps = check_number("eps", eps)
    run = torch.ops.ladder.dflash2_add_norm if _as_operator() else _add_norm
    normed, residual_out = run(x, residual, norm_weight, eps)
    return normed, x if residual is None else residual_out


# Launches, on checked arguments


@outside_autocast
def _qkv_rope_append(
    x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, k_cache, v_cache, out, num_heads, eps, interleaved, fused,
    workspace=None,
):  # fmt: skip
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    _check_values(cos, positions, slots, num_slots)
    (tokens, hidden), units = x.shape, num_heads + 2 * num_kv_heads
    kernels = _kernels(x)
    if tokens == 0:
        return
    if kernels is None:
        qkv = torch.nn.functional.linear(x, weight, bias).view(tokens, units, head_dim)
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        out.copy_(_turn(_scaled(q, q_norm, eps), cos, sin, positions, interleaved))
        _write(k_cache, slots, _turn(_scaled(k, k_norm, eps), cos, sin, positions, interleaved))
        _write(v_cache, slots, v)
        return
    rotation = _rotation(cos, head_dim, interleaved)
    places = (*out.stride(), *k_cache.stride(), *v_cache.stride())
    cache = (cos.shape[0], num_slots, k_cache.shape[1], eps)
    with torch.cuda.device_of(x):  # the launch goes to the current device
        if tokens <= ONE_LAUNCH_TOKENS if fused is None else fused:
            config = projection_config(tokens, units, head_dim, hidden, x.element_size(), processors(x.device))
            row_tiles = -(-tokens // config["BLOCK_T"])
            splits = config.pop("splits")
            programs = row_tiles * units * config["TILES"] * splits
            partials, counters = _scratch(workspace, x, splits, config["TILES"], tokens * units * head_dim, row_tiles * units)
            kernels.dflash2_qkv_rope_append[(programs,)](
                x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, out, k_cache, v_cache, partials, counters,
                *x.stride(), *weight.stride(), *places,
                tokens, hidden, _per_split(hidden, splits, config), splits, row_tiles, num_heads, num_kv_heads, *cache,
                HEAD_DIM=head_dim, **rotation, **config,
            )  # fmt: skip
        else:
            qkv = torch.nn.functional.linear(x, weight, bias)
            config = pass_config(tokens, units, head_dim, processors(x.device))
            grid = (-(-tokens // config["BLOCK_T"]), -(-units // config["heads_in_turn"]))
            kernels.dflash2_rope_append[grid](
                qkv, q_norm, k_norm, cos, sin, positions, slots, out, k_cache, v_cache,
                *qkv.stride(), *places, tokens, num_heads, num_kv_heads, *cache,
                HEAD_DIM=head_dim, **rotation, **config,
            )  # fmt: skip


@outside_autocast
def _mla_append(
    x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, eps, interleaved, fused, workspace=None,
):  # fmt: skip
    num_slots = latent_cache.shape[0] * latent_cache.shape[1]
    _check_values(cos, positions, slots, num_slots)
    tokens, num_heads, rot_dim = q_pe.shape
    rank = norm.shape[0]
    kernels = _kernels(x)
    if tokens == 0:
        return
    if kernels is None:
        latent, k_pe = (x if weight is None else torch.nn.functional.linear(x, weight)).split([rank, rot_dim], dim=1)
        k_pe = _turn(k_pe[:, None], cos, sin, positions, interleaved)[:, 0]
        _write(latent_cache, slots, torch.cat([_scaled(latent, norm, eps).float(), k_pe.float()], dim=1))
        out[..., out.shape[2] - rot_dim :] = _turn(q_pe, cos, sin, positions, interleaved).to(out.dtype)
        if q_nope is not None:
            out[..., : q_nope.shape[2]] = q_nope
        return
    nope = 0 if q_nope is None else q_nope.shape[2]
    with torch.cuda.device_of(x):
        if weight is not None and not (tokens <= ONE_LAUNCH_TOKENS if fused is None else fused):
            x, weight = torch.nn.functional.linear(x, weight), None
        inner, per_split, splits, partials, counters, weight_strides = x.shape[1], 0, 1, None, None, (0, 0)
        if weight is None:
            config = dict(TILES=1, BLOCK_T=max(1, 2048 // _power(rank)), BLOCK_N=16, BLOCK_K=16, FINISH_T=1, EVEN=False,
                          PRECISION="ieee", num_warps=4, num_stages=1)  # fmt: skip
        else:
            config = projection_config(tokens, 1, rank + rot_dim, inner, x.element_size(), processors(x.device))
            splits = config.pop("splits")
            per_split, weight_strides = _per_split(inner, splits, config), weight.stride()
        row_tiles = -(-tokens // config["BLOCK_T"])
        if weight is not None:
            partials, counters = _scratch(workspace, x, splits, config["TILES"], tokens * (rank + rot_dim), row_tiles)
        block_q = max(1, min(16, 4096 // _power(max(nope, rot_dim))))
        latent_programs = row_tiles * config["TILES"] * splits
        kernels.dflash2_mla_append[(latent_programs + -(-tokens * num_heads // block_q),)](
            x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, partials, counters,
            *x.stride(), *weight_strides, *latent_cache.stride(), *q_pe.stride(),
            *(q_nope.stride() if nope else (0, 0, 0)), *out.stride(),
            tokens, num_heads, inner, per_split, splits, row_tiles, cos.shape[0], num_slots, latent_cache.shape[1], eps,
            RANK=rank, BLOCK_R=_power(rank), ROT=rot_dim, HALF=_power(rot_dim // 2), INTERLEAVED=interleaved,
            NOPE=nope, BLOCK_NOPE=_power(max(nope, 1)), BLOCK_Q=block_q, PROJECT=weight is not None, **config,
        )  # fmt: skip


@outside_autocast
def _norm_router(
    x, residual, norm, gate, bias, top_k, eps, sigmoid, num_groups, topk_groups, top2, renormalize, scaling, fused,
    workspace=None,
):  # fmt: skip
    (tokens, hidden), num_experts = x.shape, gate.shape[0]
    kernels = _kernels(x)
    if kernels is None:
        normed, residual_out = _add_norm(x, residual, norm, eps)
        choice = _choose(normed.float() @ gate.float().T, bias, top_k, sigmoid, num_groups, topk_groups, top2, renormalize, scaling)
        return (normed, residual_out, *choice)
    weights = x.new_empty(tokens, top_k, dtype=torch.float32)
    ids = x.new_empty(tokens, top_k, dtype=torch.int32)
    one_launch = few_rows_to_route(x, residual) if fused is None else fused
    if one_launch and tokens:
        counts = x.new_empty(num_experts, dtype=torch.int32)
        normed = x.new_empty(tokens, hidden)
        residual_out = x.new_empty((0,) if residual is None else (tokens, hidden))
        source = x
    else:
        counts = x.new_zeros(num_experts, dtype=torch.int32) if tokens == 0 else x.new_empty(num_experts, dtype=torch.int32)
        normed, residual_out = _add_norm(x, residual, norm, eps, counts)
        source, residual = normed, None
    if tokens == 0:
        return normed, residual_out, weights, ids, counts
    config = router_config(tokens, num_experts, hidden, num_groups, gate.element_size(), gate.dtype == x.dtype, one_launch,
                           processors(x.device))  # fmt: skip
    row_tiles = -(-tokens // config["BLOCK_T"])
    splits = config.pop("splits")
    partials, counters = _scratch(workspace, x, splits, config["TILES"], tokens * num_experts, row_tiles)
    with torch.cuda.device_of(x):
        kernels.dflash2_norm_router[(row_tiles * config["TILES"] * splits,)](
            source, residual, norm, gate, bias, normed, residual_out, weights, ids, counts, partials, counters,
            *source.stride(), *(residual.stride() if residual is not None else (0, 0)), *gate.stride(),
            tokens, hidden, _per_split(hidden, splits, config), splits, row_tiles, num_experts, eps, scaling,
            NORM=one_launch, ONE_TILE=one_launch, TOPK_GROUPS=topk_groups, TOP_K=top_k, BLOCK_TOPK=_power(top_k),
            SIGMOID=sigmoid, TOP2=top2, RENORMALIZE=renormalize, **config,
        )  # fmt: skip
    return normed, residual_out, weights, ids, counts


def few_rows_to_route(x, residual):
    """Whether norm and router take one launch: every program reads all rows, which must cost less than a second launch."""
    row_bytes = x.shape[1] * x.element_size() * (1 if residual is None else 2)
    return x.shape[0] <= min(FEW_TOKENS, REREAD_BYTES // row_bytes)


@outside_autocast
def _add_norm(x, residual, norm, eps, counts=None):
    """(normed, sum); the sum is empty without residual. Zeroes ``counts`` on the way when given."""
    kernels = _kernels(x)
    if kernels is None:
        total = x if residual is None else x + residual
        return x.new_empty(x.shape).copy_(_scaled(total, norm, eps)), x.new_empty(0) if residual is None else total.contiguous()
    tokens, hidden = x.shape
    normed = x.new_empty(tokens, hidden)
    residual_out = x.new_empty((0,) if residual is None else (tokens, hidden))
    if tokens:
        block_h = _power(hidden)
        block_t = max(1, min(4, 4096 // block_h))
        num_experts = 0 if counts is None else counts.numel()
        with torch.cuda.device_of(x):
            kernels.dflash2_add_norm[(-(-tokens // block_t),)](
                x, residual, norm, normed, residual_out, counts, *x.stride(),
                *(residual.stride() if residual is not None else (0, 0)), tokens, hidden, eps, num_experts,
                BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_E=_power(max(num_experts, 1)),
                num_warps=max(4, min(16, block_t * block_h // 1024)),
            )  # fmt: skip
    return normed, residual_out


# Launch parameters


def projection_config(tokens, units, unit_columns, inner, itemsize, num_processors):
    """Tiles and splits of a product with few rows, ``units`` groups of ``unit_columns`` output columns.

    Two programs for each processor or more keep enough of the weight in flight; a split shorter than two tiles would not.
    """
    block_t = max(16, min(64 if itemsize == 2 else 32, _power(tokens)))
    block_n = next((n for n in (64, 32, 16) if unit_columns % n == 0), 32)
    block_k = min(128 if itemsize == 2 else 32, max(16, _power(inner)))
    tiles = -(-unit_columns // block_n)
    splits, most = 1, 16 if unit_columns <= 256 else 4  # whoever finishes a wide unit reads all its partial sums alone
    while splits < most and tiles * units * splits < 2 * num_processors and inner >= 4 * splits * block_k:
        splits *= 2
    return dict(
        splits=splits, TILES=tiles, BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=block_k,
        FINISH_T=max(1, min(block_t, 4096 // itemsize // _power(unit_columns))), EVEN=inner % block_k == 0,
        PRECISION="tf32" if itemsize == 2 else "ieee", num_warps=4, num_stages=(4 if block_t <= 32 else 3) if itemsize == 2 else 2,
    )  # fmt: skip


def pass_config(tokens, units, head_dim, num_processors):
    """Tiles of the pass behind a library's product: 2048 elements, and as many heads in turn as leave four programs for each
    processor, because heads share the angles."""
    block_t = max(1, min(16, 2048 // _power(head_dim)))
    tiles = -(-tokens // block_t)
    return dict(BLOCK_T=block_t, heads_in_turn=max(1, min(8, tiles * units // (4 * num_processors))), num_warps=4)


def router_config(tokens, num_experts, hidden, num_groups, itemsize, same_dtype, one_launch, num_processors):
    """Tiles and splits of the router: programs score a tile of experts for a tile of rows over a part of the hidden columns.

    Few rows: narrow tiles, because whoever finishes a row tile reads all its partial sums alone. Many: 64 rows by all
    experts, as far as registers allow, so that neither rows nor gate are read more often than they must.
    """
    wide, every = itemsize == 4, max(16, _power(num_experts))
    ieee = wide and same_dtype
    most_t, most_e = (16, 64) if ieee else (64, 128) if wide else (64, 256)
    block_t, block_e = (most_t, min(most_e, every)) if tokens > 512 else (16, min(64, every))
    if one_launch:
        block_t = max(16, _power(tokens))  # one tile of rows: who finishes it knows the counts
    block_k = min(32 if wide else 128 if block_t * block_e <= 2048 else 64, max(16, _power(hidden)))
    row_tiles, tiles, splits = -(-tokens // block_t), -(-num_experts // block_e), 1
    while splits < 16 and 2 * row_tiles * tiles * splits <= num_processors and hidden >= 2 * splits * block_k:
        splits *= 2
    per_group = num_experts // num_groups
    block_g, block_p = _power(num_groups), _power(per_group)
    # Eight warps for a large tile, and with 256 columns or more, where each of them ranks two tokens.
    num_warps = 8 if block_t * block_e > 4096 or block_g * block_p >= 256 else 4
    return dict(
        splits=splits, TILES=tiles, BLOCK_T=block_t, BLOCK_E=block_e, BLOCK_K=block_k,
        BLOCK_S=max(block_k, min(_power(hidden), 8192 // block_t)),  # columns of the rows' sums of squares
        FINISH_T=max(1, min(block_t, 512 * num_warps // (block_g * block_p))),
        GROUPS=num_groups, BLOCK_G=block_g, PER_GROUP=per_group, BLOCK_P=block_p,
        # 16-bit rows are TF32 numbers already: three TF32 products hold all that float32 gates add.
        PRECISION="ieee" if ieee else "tf32x3" if wide else "tf32",
        num_warps=num_warps, num_stages=2 if wide else 3,
    )  # fmt: skip


def _per_split(inner, splits, config):
    """Inner columns of a split, a multiple of the tile."""
    tile = config["BLOCK_K"]
    return -(-(-(-inner // splits)) // tile) * tile


def _scratch(workspace, x, splits, tiles, elements, counters):
    """Float32 partial sums and counters of a launch, out of ``workspace`` or new; zeroed counters, if any will be counted."""
    elements *= splits
    if workspace is not None:
        return workspace.reserve(elements, counters)
    partials = x.new_empty(elements, dtype=torch.float32)
    return partials, x.new_zeros(counters, dtype=torch.int32) if splits * tiles > 1 else partials.view(torch.int32)


def _rotation(cos, head_dim, interleaved):
    rot_dim = 2 * cos.shape[1]
    return dict(ROT=rot_dim, HALF=_power(max(rot_dim // 2, 1)), REST=_power(max(head_dim - rot_dim, 1)), INTERLEAVED=interleaved)


def _power(n):
    """The lowest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# PyTorch path for CPU tensors: the same sums, norms and rotations in float32


def _scaled(x, weight, eps):
    """RMSNorm over the last dimension in float32; x when there is no weight."""
    if weight is None:
        return x
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _turn(x, cos, sin, positions, interleaved):
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


def _write(cache, slots, rows):
    """Rows into their slots (page, offset) of the cache; negative slots are skipped."""
    kept = slots >= 0
    slots = slots[kept].long()
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[kept].to(cache.dtype)


def _choose(logits, bias, top_k, sigmoid, num_groups, topk_groups, top2, renormalize, scaling):
    """Weights, ids and counts from (T, E) float32 logits, ranked as the kernel ranks."""
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    key = scores + bias.float() if bias is not None else scores if top2 else logits
    key = torch.nan_to_num(key, nan=1e38).clamp(-1e38, 1e38)
    if topk_groups < num_groups:
        grouped = key.unflatten(-1, (num_groups, -1))
        group_key = grouped.topk(2, dim=-1)[0].sum(-1) if top2 else grouped.amax(-1)
        groups = group_key.sort(dim=-1, descending=True, stable=True)[1][:, :topk_groups]  # stable: the lowest of equals
        kept = torch.zeros_like(group_key, dtype=torch.bool).scatter_(1, groups, True)
        key = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = key.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    counts = torch.bincount(ids.flatten(), minlength=logits.shape[1])
    return weights * scaling, ids.int(), counts.int()


# Checks


def _expect(name, x, shape, dtypes, device=None, *, optional=False, contiguous=False):
    """Check one tensor; names in ``shape`` stand for any size."""
    if x is None and optional:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{RUNG}: {name} is a {type(x).__name__}; want a torch.Tensor {_layout(shape)}{', or None' if optional else ''}")
    if x.ndim != len(shape) or any(not isinstance(n, str) and n != m for n, m in zip(shape, x.shape)):
        raise ValueError(f"{RUNG}: {name} has shape {tuple(x.shape)}; want {_layout(shape)}")
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{RUNG}: {name} has dtype {x.dtype}; want {wanted}")
    if device is not None and x.device != device:
        raise ValueError(f"{RUNG}: {name} is on {x.device}; want {device}, the device of x")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{RUNG}: {name} has strides {x.stride()}; want a contiguous tensor")


def _layout(shape):
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def _check_cache(name, cache):
    if cache.shape[1] == 0:
        raise ValueError(f"{RUNG}: {name} has shape {tuple(cache.shape)}, pages of no tokens; want at least 1")
    check_no_overlap(RUNG, name, cache)


def _check_rotation(cos, sin, positions, tokens, columns, what, device, *, whole=False):
    _expect("cos", cos, ("max_positions", "rot_dim / 2"), FLOATS, device, contiguous=True)
    _expect("sin", sin, tuple(cos.shape), (cos.dtype,), device, contiguous=True)
    if (2 * cos.shape[1] != columns) if whole else not 0 < 2 * cos.shape[1] <= columns:
        wanted = f"{columns // 2}" if whole else f"1 to {columns // 2}"
        raise ValueError(f"{RUNG}: cos has {cos.shape[1]} columns; want {wanted}, pairs of the {columns} columns of {what}")
    _expect("positions", positions, (tokens,), INTEGERS, device, contiguous=True)


def _check_values(cos, positions, slots, num_slots):
    """Positions and slots within bounds, on a CPU only: on a GPU reading them would wait for it."""
    if positions.device.type != "cpu" or positions.numel() == 0:
        return
    low, high = (int(n) for n in positions.aminmax())
    if low < 0 or high >= cos.shape[0]:
        raise ValueError(f"{RUNG}: positions holds {low if low < 0 else high}; want 0 .. {cos.shape[0] - 1}, the rows of cos")
    if int(slots.max()) >= num_slots:
        raise ValueError(f"{RUNG}: slot_mapping holds {int(slots.max())}; want at most {num_slots - 1}, the last slot of the cache")


def _check_options(workspace, device, *, fused, **flags):
    for name, value in flags.items():
        check_flag(RUNG, name, value)
    if fused is not None:
        check_flag(RUNG, "fused", fused)
    if workspace is not None and not isinstance(workspace, DecodeWorkspace):
        raise TypeError(f"{RUNG}: workspace is a {type(workspace).__name__}; want a DecodeWorkspace on {device}, or None")
    if workspace is not None and workspace.partials.device != device:
        raise ValueError(f"{RUNG}: workspace is on {workspace.partials.device}; want a DecodeWorkspace on {device}")


def check_number(name, value, signed=False):
    """A finite float, not negative unless ``signed``."""
    wanted = "a finite number" if signed else "a finite number, 0 or more"
    if isinstance(value, bool) or not isinstance(value, (int, float)) and not isinstance(value, numbers.Real):
        raise TypeError(f"{RUNG}: {name} is {value!r}; want {wanted}")
    if not -math.inf < value < math.inf or (value < 0 and not signed):  # comparisons, which torch.compile can follow
        raise ValueError(f"{RUNG}: {name} is {value}; want {wanted}")
    return float(value)


def _check_hidden(x):
    if x.shape[1] == 0:
        raise ValueError(f"{RUNG}: x has shape {tuple(x.shape)}, no columns; want at least 1")
    if x.shape[1] > MAX_HIDDEN:
        raise NotImplementedError(f"{RUNG}: x has {x.shape[1]} columns; the norm holds up to {MAX_HIDDEN}")


def _output(name, out, x, shape):
    if out is None:
        return x.new_empty(shape)
    _expect(name, out, shape, (x.dtype,), x.device, optional=True)
    check_no_overlap(RUNG, name, out)
    return out


def _kernels(x):
    """The module of kernels, or None where PyTorch computes, as in ``dispatch.device_code``."""
    return device_code(x, "fusion_kernel")


# Custom operators, so that torch.compile(fullgraph=True) sees one opaque call


def _as_operator():
    """Whether somebody traces: torch.compile, or a dispatch mode (fake tensors, make_fx, counters of operations).

    Otherwise the launch is called directly: the operator's wrapping costs more than a small kernel takes.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


@torch.library.custom_op("ladder::dflash2_qkv_rope_append", mutates_args=("k_cache", "v_cache", "out"))
def _qkv_rope_append_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None,
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
    k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor,
    num_heads: int, eps: float, interleaved: bool, fused: bool | None,
) -> None:  # fmt: skip
    _qkv_rope_append(
        x, weight, bias, q_norm, k_norm, cos, sin, positions, slots, k_cache, v_cache, out, num_heads, eps, interleaved, fused
    )


@torch.library.custom_op("ladder::dflash2_mla_append", mutates_args=("latent_cache", "out"))
def _mla_append_op(
    x: torch.Tensor, weight: torch.Tensor | None, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, latent_cache: torch.Tensor, q_pe: torch.Tensor, q_nope: torch.Tensor | None,
    out: torch.Tensor, eps: float, interleaved: bool, fused: bool | None,
) -> None:  # fmt: skip
    _mla_append(x, weight, norm, cos, sin, positions, slots, latent_cache, q_pe, q_nope, out, eps, interleaved, fused)


@torch.library.custom_op("ladder::dflash2_norm_router", mutates_args=())
def _norm_router_op(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None,
    top_k: int, eps: float, sigmoid: bool, num_groups: int, topk_groups: int, top2: bool, renormalize: bool, scaling: float,
    fused: bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _norm_router(
        x, residual, norm, gate, bias, top_k, eps, sigmoid, num_groups, topk_groups, top2, renormalize, scaling, fused
    )


@torch.library.custom_op("ladder::dflash2_add_norm", mutates_args=())
def _add_norm_op(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _add_norm(x, residual, norm, eps)


@_qkv_rope_append_op.register_fake
@_mla_append_op.register_fake
def _(*args):
    return None


@_add_norm_op.register_fake
def _(x, residual, norm, eps):
    return x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)


@_norm_router_op.register_fake
def _(x, residual, norm, gate, bias, top_k, *rest):
    weights = x.new_empty(x.shape[0], top_k, dtype=torch.float32)
    normed, total = x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)
    return normed, total, weights, torch.empty_like(weights, dtype=torch.int32), x.new_empty(gate.shape[0], dtype=torch.int32)
