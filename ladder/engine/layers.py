"""What the models share: RMS norm, rotary positions, the router, and experts run as one grouped product.

Everything here works on packed tokens (T, width), with and without gradients: training and serving are one model.
"""

import torch
import torch.nn.functional as F

GROUPED_MM = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # public since torch 2.10


def linear(x, weight):
    """x @ weight.T in the dtype of x: master weights in float32 are cast where they are used."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x, weight, eps):
    """x (T, width) over its root mean square, times ``weight``. Source: Zhang and Sennrich, "Root Mean Square Layer Norm"."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def rotary_table(head_dim, length, theta, device=None):
    """Cosines and sines (length, head_dim): the first half of a row is cos, the second sin. float32.

    Source: Su et al., "RoFormer", section 3.2.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float().to(device)


def rotate(x, cos_sin):
    """Rotate x (T, H, D) by the positions whose rows ``cos_sin`` (T, D) holds; first and second half are the pairs."""
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def add_norm(x, residual, weight, eps):
    """RMS norm of x + residual, and the sum; residual None is none yet."""
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps), total


def choose_experts(logits, top_k, renormalize, scale=1.0):
    """Softmax over all experts, then the ``top_k`` largest.

    Args:
        logits: (T, num_experts) float32. renormalize: make the chosen weights of a token sum to 1. scale: on the weights.

    Returns:
        weights (T, top_k) float32, ids (T, top_k) int64, probs (T, num_experts).
    """
    probs = logits.softmax(dim=-1)
    weights, ids = probs.topk(top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights
    return weights * scale if scale != 1.0 else weights, ids, probs


def sort_by_expert(ids, num_experts):
    """A stable sort of the assignments ids (T, top_k) by expert, on the device.

    Returns:
        order (T * top_k,): the assignment at each row; places (T, top_k): the row of each assignment;
        ends (num_experts,) int32: where each expert's rows end.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(flat), device=ids.device)
    counts = (flat[:, None] == torch.arange(num_experts, device=ids.device)).sum(dim=0)
    return order, places.view(ids.shape), counts.cumsum(0, dtype=torch.int32)


class Dispatch(torch.autograd.Function):
    """x (T, width) copied behind each of its experts. The gradient gathers too, where autograd's own would scatter-add."""

    @staticmethod
    def forward(ctx, x, order, places):
        ctx.save_for_backward(places)
        return x[order // places.shape[1]]

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad[places].sum(dim=1), None, None


class Collect(torch.autograd.Function):
    """Rows in expert order back as (T, top_k, width): a permutation, so its gradient is one too."""

    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.save_for_backward(order)
        return rows[places]

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1)[order], None, None


def grouped_product(x, weight, ends):
    """x[rows of expert e] @ weight[e].T for every expert: the library's grouped product, or a loop on the CPU.

    Args:
        x: (rows, K) in expert order. weight: (num_experts, N, K). ends: (num_experts,) int32.
    """
    if grouped_mm_works(x):
        return GROUPED_MM(x, weight.to(x.dtype).transpose(-2, -1), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([linear(x[a:b], w) for a, b, w in zip(bounds, bounds[1:], weight)])


_checked = {}


def grouped_mm_works(x):
    """Whether this torch's grouped product serves ``x``: bfloat16 on a GPU, tried once with ragged groups and gradients."""
    if GROUPED_MM is None or not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    if x.device not in _checked:
        with torch.enable_grad():
            generator = torch.Generator(x.device).manual_seed(0)
            a = torch.randn(203, 64, generator=generator, device=x.device, dtype=x.dtype).requires_grad_()
            w = torch.randn(5, 96, 64, generator=generator, device=x.device, dtype=x.dtype).requires_grad_()
            ends = torch.tensor([3, 3, 90, 131, 203], dtype=torch.int32, device=x.device)
            try:
                got = torch.autograd.grad(GROUPED_MM(a, w.transpose(-2, -1), offs=ends).square().sum(), (a, w))
                bounds = [0, *ends.tolist()]
                loop = torch.cat([F.linear(a[i:j], w[e]) for e, (i, j) in enumerate(zip(bounds, bounds[1:]))])
                want = torch.autograd.grad(loop.square().sum(), (a, w))
                _checked[x.device] = all((g - t).norm() < 0.02 * t.norm() for g, t in zip(got, want))
            except RuntimeError as error:
                print(f"grouped_mm does not run here, experts run one by one: {str(error).splitlines()[0]}")
                _checked[x.device] = False
    return _checked[x.device]


def swiglu(gate_up):
    """silu(first half) * second half. Source: Shazeer, "GLU Variants Improve Transformer"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def run_experts(x, ids, weights, gate_up, down):
    """sum_k weights[:, k] * expert[ids[:, k]](x), tokens sorted by expert so that each weight is read once.

    Args:
        x: (T, width). ids, weights: (T, top_k). gate_up: (experts, 2 * hidden, width). down: (experts, width, hidden).

    Returns:
        (T, width) in the dtype of x.
    """
    order, places, ends = sort_by_expert(ids, gate_up.shape[0])
    rows = Dispatch.apply(x, order, places)
    rows = grouped_product(swiglu(grouped_product(rows, gate_up, ends)), down, ends)
    return (Collect.apply(rows, order, places) * weights[..., None].to(x.dtype)).sum(dim=1)


def with_shared(ids, weights, num_experts, num_shared):
    """``ids`` and ``weights`` (T, top_k) with the shared experts behind them, (T, top_k + num_shared)."""
    if not num_shared:
        return ids, weights
    shared = torch.arange(num_experts, num_experts + num_shared, device=ids.device, dtype=ids.dtype)
    ids = torch.cat([ids, shared.expand(len(ids), -1)], dim=1)
    return ids, torch.cat([weights, weights.new_ones(len(ids), num_shared)], dim=1)
