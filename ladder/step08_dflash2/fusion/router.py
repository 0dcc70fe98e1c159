"""After attention: residual add, norm, router."""

import torch

from ladder.contract import FLOATS, check_flag, check_integer, kernel_entry, outside_autocast

from . import launch
from .checks import MAX_EXPERTS, RUNG, check_hidden, check_number, check_options, expect
from .launch import power, scaled


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
        num_groups, topk_groups: experts are in num_groups equal groups, in order; only those of the topk_groups best
        groups
            may be chosen (DeepSeek-V2: 8 and 3, V3: 8 and 4). None: no groups.
        group_score: what makes a group good: "max", its best expert (V2), or "top2", the sum of its best two (V3).
            None: "top2" with a correction bias, else "max".
        renormalize: weights of a token are divided by their sum.
        routed_scaling_factor: on the weights, after that.
        workspace: as in ``fused_qkv_rope_append``.
        fused: True: one launch, at most ``FEW_TOKENS`` tokens; False: add and norm, then the router; None: True while x
            and residual together are at most ``REREAD_BYTES``, for in one launch every program reads all of them.

    Returns:
        normed: (T, hidden). residual_out: (T, hidden), x + residual rounded to their dtype, which is what is normed; x
        itself without residual. topk_weights: (T, top_k) float32, best first. topk_ids: (T, top_k) int32.
        expert_counts: (E,) int32, assignments of each expert.
        ``ladder.step07_dflash1.group_tokens(topk_ids, E)`` sorts them.

        The product takes the rounded ``normed`` and sums in float32. Of equal scores
        the lowest expert wins; where a softmax or sigmoid saturates, logits still
        tell experts apart. NaN ranks first, as in ``torch.topk``, so it shows.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. NotImplementedError: sizes, gradients.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.2; "DeepSeek-V3", section 2.1.2.
    """
    expect("x", x, ("T", "hidden"), FLOATS)
    own, device = (x.dtype,), x.device
    expect("residual", residual, tuple(x.shape), own, device, optional=True)
    expect("norm_weight", norm_weight, (x.shape[1],), FLOATS, device, contiguous=True)
    expect("gate_weight", gate_weight, ("E", x.shape[1]), (x.dtype, torch.float32), device)
    num_experts = gate_weight.shape[0]
    expect("correction_bias", correction_bias, (num_experts,), FLOATS, device, optional=True, contiguous=True)
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
        raise ValueError(
            f"{RUNG}: num_groups is {num_groups}, one expert each; want two experts or more for group_score 'top2'"
        )
    if num_experts > MAX_EXPERTS:
        raise NotImplementedError(
            f"{RUNG}: gate_weight has {num_experts} experts; the router holds up to {MAX_EXPERTS}"
        )
    check_hidden(x)
    eps = check_number("eps", eps)
    scaling = check_number("routed_scaling_factor", routed_scaling_factor, signed=True)
    check_flag(RUNG, "renormalize", renormalize)
    check_options(workspace, device, fused=fused)
    if fused and x.shape[0] > launch.FEW_TOKENS:
        raise ValueError(f"{RUNG}: fused is True for {x.shape[0]} tokens; want at most {launch.FEW_TOKENS}, or None")
    arguments = (
        x, residual, norm_weight, gate_weight, correction_bias, top_k, eps, scoring == "sigmoid", num_groups,
        topk_groups,
        top2, renormalize, scaling, fused,
    )  # fmt: skip
    if launch.as_operator():
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
    expect("x", x, ("T", "hidden"), FLOATS)
    expect("residual", residual, tuple(x.shape), (x.dtype,), x.device, optional=True)
    expect("norm_weight", norm_weight, (x.shape[1],), FLOATS, x.device, contiguous=True)
    check_hidden(x)
    eps = check_number("eps", eps)
    run = torch.ops.ladder.dflash2_add_norm if launch.as_operator() else _add_norm
    normed, residual_out = run(x, residual, norm_weight, eps)
    return normed, x if residual is None else residual_out


@outside_autocast
def _norm_router(
    x, residual, norm, gate, bias, top_k, eps, sigmoid, num_groups, topk_groups, top2, renormalize, scaling, fused,
    workspace=None,
):  # fmt: skip
    (tokens, hidden), num_experts = x.shape, gate.shape[0]
    kernels = launch.kernels(x)
    if kernels is None:
        normed, residual_out = _add_norm(x, residual, norm, eps)
        choice = _choose(
            normed.float() @ gate.float().T, bias, top_k, sigmoid, num_groups, topk_groups, top2, renormalize, scaling
        )
        return (normed, residual_out, *choice)
    weights = x.new_empty(tokens, top_k, dtype=torch.float32)
    ids = x.new_empty(tokens, top_k, dtype=torch.int32)
    one_launch = launch.few_rows_to_route(x, residual) if fused is None else fused
    if one_launch and tokens:
        counts = x.new_empty(num_experts, dtype=torch.int32)
        normed = x.new_empty(tokens, hidden)
        residual_out = x.new_empty((0,) if residual is None else (tokens, hidden))
        source = x
    else:
        counts = (
            x.new_zeros(num_experts, dtype=torch.int32) if tokens == 0 else x.new_empty(num_experts, dtype=torch.int32)
        )
        normed, residual_out = _add_norm(x, residual, norm, eps, counts)
        source, residual = normed, None
    if tokens == 0:
        return normed, residual_out, weights, ids, counts
    config = launch.router_config(tokens, num_experts, hidden, num_groups, gate.element_size(), gate.dtype == x.dtype,
                           one_launch,
                           launch.processors(x.device))  # fmt: skip
    row_tiles = -(-tokens // config["BLOCK_T"])
    splits = config.pop("splits")
    partials, counters = launch.scratch(workspace, x, splits, config["TILES"], tokens * num_experts, row_tiles)
    with torch.cuda.device_of(x):
        kernels.dflash2_norm_router[(row_tiles * config["TILES"] * splits,)](
            source, residual, norm, gate, bias, normed, residual_out, weights, ids, counts, partials, counters,
            *source.stride(), *(residual.stride() if residual is not None else (0, 0)), *gate.stride(),
            tokens, hidden, launch.per_split(hidden, splits, config), splits, row_tiles, num_experts, eps, scaling,
            NORM=one_launch, ONE_TILE=one_launch, TOPK_GROUPS=topk_groups, TOP_K=top_k, BLOCK_TOPK=power(top_k),
            SIGMOID=sigmoid, TOP2=top2, RENORMALIZE=renormalize, **config,
        )  # fmt: skip
    return normed, residual_out, weights, ids, counts


@outside_autocast
def _add_norm(x, residual, norm, eps, counts=None):
    """(normed, sum); the sum is empty without residual. Zeroes ``counts`` on the way when given."""
    kernels = launch.kernels(x)
    if kernels is None:
        total = x if residual is None else x + residual
        return x.new_empty(x.shape).copy_(scaled(total, norm, eps)), x.new_empty(
            0
        ) if residual is None else total.contiguous()
    tokens, hidden = x.shape
    normed = x.new_empty(tokens, hidden)
    residual_out = x.new_empty((0,) if residual is None else (tokens, hidden))
    if tokens:
        block_h = power(hidden)
        block_t = max(1, min(4, 4096 // block_h))
        num_experts = 0 if counts is None else counts.numel()
        with torch.cuda.device_of(x):
            kernels.dflash2_add_norm[(-(-tokens // block_t),)](
                x, residual, norm, normed, residual_out, counts, *x.stride(),
                *(residual.stride() if residual is not None else (0, 0)), tokens, hidden, eps, num_experts,
                BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_E=power(max(num_experts, 1)),
                num_warps=max(4, min(16, block_t * block_h // 1024)),
            )  # fmt: skip
    return normed, residual_out


def _choose(logits, bias, top_k, sigmoid, num_groups, topk_groups, top2, renormalize, scaling):
    """Weights, ids and counts from (T, E) float32 logits, ranked as the kernel ranks."""
    scores = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
    key = scores + bias.float() if bias is not None else scores if top2 else logits
    key = torch.nan_to_num(key, nan=1e38).clamp(-1e38, 1e38)
    if topk_groups < num_groups:
        grouped = key.unflatten(-1, (num_groups, -1))
        group_key = grouped.topk(2, dim=-1)[0].sum(-1) if top2 else grouped.amax(-1)
        # stable: the lowest of equals
        groups = group_key.sort(dim=-1, descending=True, stable=True)[1][:, :topk_groups]
        kept = torch.zeros_like(group_key, dtype=torch.bool).scatter_(1, groups, True)
        key = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    ids = key.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    counts = torch.bincount(ids.flatten(), minlength=logits.shape[1])
    return weights * scaling, ids.int(), counts.int()


# Custom operators, as in ``append``


@torch.library.custom_op("ladder::dflash2_norm_router", mutates_args=())
def _norm_router_op(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor | None,
    top_k: int, eps: float, sigmoid: bool, num_groups: int, topk_groups: int, top2: bool, renormalize: bool,
    scaling: float,
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


@_add_norm_op.register_fake
def _(x, residual, norm, eps):
    return x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)


@_norm_router_op.register_fake
def _(x, residual, norm, gate, bias, top_k, *rest):
    weights = x.new_empty(x.shape[0], top_k, dtype=torch.float32)
    normed, total = x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)
    return (
        normed,
        total,
        weights,
        torch.empty_like(weights, dtype=torch.int32),
        x.new_empty(gate.shape[0], dtype=torch.int32),
    )
