"""Measure step 08's fusion on a GPU: ``python -m ladder.bench fusion --json FILE``.

Each fused call beside the chain of PyTorch operations that it replaces, as a model's
code writes it: device launches, bytes moved, microseconds in a CUDA graph with L2 filled
with other data before, and errors against float64. ``one_launch`` and ``two_launches``
are the two ways that the call chooses between; ``step08_dflash2`` is what it chooses.
"""

import functools
import sys
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.lab.parity import Parity, band, distance
from ladder.step07_dflash1 import DecodeWorkspace
from ladder.step08_dflash2 import fusion

from . import harness
from .harness import Cell, Suite, Work

TOKENS = (8, 64, 4096)


# The chains, in the dtype of their inputs: float64 inputs make the reference


def chain_norm(x, weight, eps):
    """RMSNorm as models write it: float32 inside, rounded, then the weight."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


def chain_rope(x, cos, sin, positions, interleaved):
    """Rotary embedding of (T, heads, D) by slices of the tables, the columns behind them passed on."""
    cos, sin = (table[positions].to(x.dtype)[:, None] for table in (cos, sin))
    rot_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rot_dim], x[..., rot_dim:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        turned = turned * cos + torch.cat((-b, a), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def chain_qkv(
    x, weight_qkv, cos, sin, positions, k_cache, v_cache, slot_mapping, *,
    num_heads, num_kv_heads, head_dim, bias=None, q_norm_weight=None, k_norm_weight=None, norm_eps=1e-6,
    interleaved=False,
):  # fmt: skip
    """What ``fused_qkv_rope_append`` replaces. Every slot must be valid."""
    qkv = torch.nn.functional.linear(x, weight_qkv, bias).view(x.shape[0], -1, head_dim)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm_weight is not None:
        q = chain_norm(q, q_norm_weight, norm_eps)
    if k_norm_weight is not None:
        k = chain_norm(k, k_norm_weight, norm_eps)
    q, k = (chain_rope(y, cos, sin, positions, interleaved) for y in (q, k))
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slot_mapping, v)
    return q


def chain_mla(
    x, kv_norm_weight, cos, sin, positions, latent_cache, slot_mapping, q_pe, *,
    weight=None, q_nope=None, norm_eps=1e-6, interleaved=True,
):  # fmt: skip
    """What ``fused_mla_append`` replaces. Every slot must be valid."""
    kv = x if weight is None else torch.nn.functional.linear(x, weight)
    latent, k_pe = kv.split([kv_norm_weight.shape[0], q_pe.shape[2]], dim=-1)
    k_pe = chain_rope(k_pe[:, None], cos, sin, positions, interleaved)[:, 0]
    rows = torch.cat((chain_norm(latent, kv_norm_weight, norm_eps), k_pe), dim=-1)
    latent_cache.view(-1, rows.shape[1]).index_copy_(0, slot_mapping, rows)
    q_pe = chain_rope(q_pe, cos, sin, positions, interleaved)
    return q_pe if q_nope is None else torch.cat((q_nope, q_pe), dim=-1)


def chain_router(
    x, residual, norm_weight, gate_weight, *, top_k, eps=1e-6, scoring="softmax", correction_bias=None,
    num_groups=None, topk_groups=None, renormalize=True, routed_scaling_factor=1.0,
):  # fmt: skip
    """What ``fused_norm_router`` replaces: the gate of DeepSeek's model code, and counts."""
    residual = x if residual is None else x + residual
    normed = chain_norm(residual, norm_weight, eps)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    logits = torch.nn.functional.linear(normed.to(wide), gate_weight.to(wide))
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction_bias is None else scores + correction_bias
    if num_groups is not None:
        grouped = ranked.view(x.shape[0], num_groups, -1)
        best = grouped.amax(-1) if correction_bias is None else grouped.topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(topk_groups, dim=-1)[1], 1)
        ranked = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
    ids = ranked.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    counts = torch.zeros(gate_weight.shape[0], dtype=torch.int32, device=x.device)
    counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    return normed, residual, weights * routed_scaling_factor, ids.int(), counts


# Is it right


def check_budget(outputs, reference, chain):
    """Parity of several tensors: each within twice the error of the chain in its own dtype, and a rounding band.

    Another order of the float32 sums costs two units more, whatever the chain's own order happened to cost.
    """
    worst = Parity(True, 0.0, 0.0)
    for number, (out, exact, other) in enumerate(zip(outputs, reference, chain, strict=True)):
        budget = 2 * distance(other.double(), exact.double()) + band(exact, out.dtype) + band(exact, torch.float32)
        error = distance(out.double(), exact.double())
        if not error <= budget:
            return Parity(
                False, error, budget, f"output {number}: max error {error:.3g} is over the budget {budget:.3g}"
            )
        if error >= worst.max_error:
            worst = Parity(True, error, budget)
    return worst


def check_choice(
    normed, gate_weight, weights, ids, counts, *, scoring="softmax", correction_bias=None, num_groups=None,
    topk_groups=None,
    renormalize=True, routed_scaling_factor=1.0, tolerance=2e-5,
):  # fmt: skip
    """Parity of a router's choice with float64 scores of the very rows that it returned: no better expert was left out,
    order, weights and counts fit. Experts closer than ``tolerance`` may change places.
    """
    scores = normed.double() @ gate_weight.double().T
    scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
    ranked = scores if correction_bias is None else scores + correction_bias.double()
    chosen = ids.long()
    if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < gate_weight.shape[0]:
        return Parity(False, float("inf"), tolerance, "an id names no expert")
    if (chosen.sort(-1)[0].diff(dim=-1) == 0).any():
        return Parity(False, float("inf"), tolerance, "an expert was chosen twice")
    kept = torch.zeros_like(ranked, dtype=torch.bool).scatter_(1, chosen, True)
    if num_groups is not None:
        grouped = ranked.unflatten(-1, (num_groups, -1))
        best = grouped.amax(-1) if correction_bias is None else grouped.topk(2, dim=-1)[0].sum(-1)
        limit = best.topk(topk_groups, dim=-1)[0][:, -1:]
        used = kept.unflatten(-1, (num_groups, -1)).any(-1)
        if (used & (best < limit - tolerance)).any():
            return Parity(False, float("inf"), tolerance, "an expert of a worse group was chosen")
        ranked = grouped.masked_fill((best < limit + tolerance)[..., None] & ~used[..., None], float("-inf")).flatten(1)
    key = ranked.gather(1, chosen)
    left = ranked.masked_fill(kept, float("-inf")).amax(-1)
    # all downwards, to the best that is left
    steps = torch.cat([key.diff(dim=-1), (left - key[:, -1])[:, None]], dim=1)
    error = distance(steps.clamp(min=0), torch.zeros_like(steps))
    if not error <= tolerance:
        return Parity(False, error, tolerance, f"a score of {error:.3g} more was left out or put behind")
    exact = scores.gather(1, chosen)
    if renormalize:
        exact = exact / (exact.sum(-1, keepdim=True) + 1e-20)
    error = distance(weights.double(), exact * routed_scaling_factor)
    if not error <= tolerance * max(1.0, abs(routed_scaling_factor)):
        return Parity(False, error, tolerance, f"weights are off by {error:.3g}")
    if not torch.equal(counts.long(), torch.bincount(chosen.flatten(), minlength=gate_weight.shape[0])):
        return Parity(False, error, tolerance, "counts do not fit the ids")
    return Parity(True, error, tolerance)


# What it costs


INDEXED = {"index", "index_put_", "index_copy_", "index_select", "gather", "scatter_", "scatter_add_"}


class Traffic(TorchDispatchMode):
    """Counts the operations that compute (views do not), and the bytes of the tensors that they read and write."""

    def __init__(self):
        super().__init__()
        self.operations, self.bytes, self.names = 0, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        name = func.overloadpacket.__name__
        if is_view or name in ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_reshape_alias"):
            return result
        self.operations += 1
        self.names.append(name)
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in INDEXED:  # touches the rows that the others name or bring, not the whole of the first
            rows = [x for x in tensors[1:]] + ([result] if not name.endswith("_") else [])
            self.bytes += sum(_bytes(x) for x in rows) + _bytes(max(rows, key=_bytes))
        else:
            outputs = [] if any(r.alias_info is not None for r in returns) else torch.utils._pytree.tree_leaves(result)
            self.bytes += sum(_bytes(x) for x in (*tensors, *outputs) if isinstance(x, torch.Tensor))
        return result


def _bytes(x):
    """Bytes of the elements that exist: a dimension of stride 0 is one."""
    elements = 1
    for size, stride in zip(x.shape, x.stride()):
        elements *= 1 if stride == 0 else size
    return elements * x.element_size()


def launches(fn, device):
    """Device activities (kernels, copies, fills) of one call on a GPU; operations that PyTorch dispatches on a CPU."""
    if device.type != "cuda":
        with Traffic() as traffic:
            fn()
        return traffic.operations
    from torch.profiler import ProfilerActivity, profile

    fn()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        fn()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return len([e for e in on_device if not e.name.startswith(("ProfilerStep", "Activity Buffer"))])


@dataclass
class Case:
    """One fused call on one shape: how to make its inputs, and what it moves."""

    op: str
    model: str
    tokens: int
    hidden: int
    shape: dict = field(default_factory=dict)

    def label(self):
        return f"{self.op} {self.model} T={self.tokens}"

    def as_dict(self):
        case = {"mode": "fusion", "op": self.op, "model": self.model, "T": self.tokens, "hidden": self.hidden}
        return {**case, "dtype": "bfloat16", **self.shape}

    def make(self, device, dtype=torch.bfloat16, seed=0):
        """(positional arguments, keyword arguments) of the call."""
        random = torch.Generator(device).manual_seed(seed)
        T, n, s = self.tokens, self.hidden, self.shape

        def normal(*size, scale=1.0, dtype=dtype):
            return (torch.randn(size, generator=random, device=device) * scale).to(dtype)

        if self.op == "router":
            bias = normal(s["E"], scale=0.1, dtype=torch.float32) if s.get("scoring") == "sigmoid" else None
            options = {k: v for k, v in s.items() if k != "E"}
            args = [normal(T, n), normal(T, n), 1 + normal(n, scale=0.1), normal(s["E"], n, scale=n**-0.5)]
            return args, {**options, "correction_bias": bias}
        page_size, rot_dim = 64, s["rot_dim"]
        pages = -(-T // page_size) + 1
        cos, sin = fusion.rope_tables(rot_dim, 8192, device=device)
        positions = torch.randint(8192, (T,), generator=random, device=device)
        slots = torch.randperm(pages * page_size, generator=random, device=device)[:T]
        if self.op == "qkv":
            heads, kv_heads, dim = s["Hq"], s["Hkv"], s["D"]
            caches = [
                torch.full((pages, page_size, kv_heads, dim), float("nan"), dtype=dtype, device=device)
                for _ in range(2)
            ]
            weight = normal((heads + 2 * kv_heads) * dim, n, scale=n**-0.5)
            norms = {f"{x}_norm_weight": 1 + normal(dim, scale=0.1) for x in "qk"} if s.get("norms") else {}
            options = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, **norms)
            return [normal(T, n), weight, cos, sin, positions, *caches, slots], options
        rank, heads = s["rank"], s["H"]
        cache = torch.full((pages, page_size, rank + rot_dim), float("nan"), dtype=dtype, device=device)
        options = dict(weight=normal(rank + rot_dim, n, scale=n**-0.5), q_nope=normal(T, heads, rank))
        q = normal(T, heads, 128 + rot_dim)  # as the projection of queries leaves them
        return [normal(T, n), 1 + normal(rank, scale=0.1), cos, sin, positions, cache, slots, q[..., 128:]], options

    @property
    def call(self):
        return {
            "qkv": fusion.fused_qkv_rope_append,
            "mla": fusion.fused_mla_append,
            "router": fusion.fused_norm_router,
        }[self.op]

    @property
    def chain(self):
        return {"qkv": chain_qkv, "mla": chain_mla, "router": chain_router}[self.op]

    def outputs(self, result, args):
        """The tensors that a call computed, caches as the rows that it wrote."""
        if self.op == "router":
            return result[:2]
        caches, slots = (args[5:7], args[7]) if self.op == "qkv" else (args[5:6], args[6])
        return [result, *(cache.flatten(0, 1)[slots] for cache in caches)]

    def bytes_moved(self, args, options, fused=None):
        """Bytes of a fused call: every input once, every output once, of tables and caches the rows in use; with two
        launches also what one leaves for the other. Partial sums stay in L2.
        """
        element, T = args[0].element_size(), self.tokens
        if self.op == "router":
            two = not (fusion.few_rows_to_route(*args[:2]) if fused is None else fused)
            rows = (4 + two) * T * self.hidden + self.hidden
            return element * rows + _bytes(args[3]) + 8 * T * options["top_k"] + 4 * self.shape["E"]
        two = not (T <= fusion.ONE_LAUNCH_TOKENS if fused is None else fused)
        tables = 4 * T * self.shape["rot_dim"] + 16 * T
        if self.op == "qkv":
            columns = args[1].shape[0]
            return element * (T * self.hidden + (1 + 2 * two) * T * columns) + _bytes(args[1]) + tables
        heads, width = self.shape["H"], args[5].shape[2]
        return (
            element * (T * self.hidden + (1 + 2 * two) * T * width + 2 * T * heads * width)
            + _bytes(options["weight"])
            + tables
        )


def cases():
    """DeepSeek-V2-Lite, a Llama of 8B and DeepSeek-V3's routing, at decode and prefill sizes."""
    grouped = dict(num_groups=8, topk_groups=4, scoring="sigmoid", routed_scaling_factor=2.5)
    found = []
    for T in TOKENS:
        found += [
            Case("qkv", "Llama-8B", T, 4096, dict(Hq=32, Hkv=8, D=128, rot_dim=128)),
            Case("mla", "DeepSeek-V2-Lite", T, 2048, dict(H=16, rank=512, rot_dim=64)),
            Case("router", "DeepSeek-V2-Lite", T, 2048, dict(E=64, top_k=6, renormalize=False)),
            Case("router", "DeepSeek-V3", T, 7168, dict(E=256, top_k=8, **grouped)),
        ]  # fmt: skip
    return found


class Judge:
    """Whether a call's result is right: within the chain's own error of float64, and a router's choice sound."""

    def __init__(self, case, args, options):
        self.case, self.args, self.options = case, args, options
        exact_args = [x.double() if x.is_floating_point() else x for x in args]
        exact_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        self.reference = case.outputs(case.chain(*exact_args, **exact_options), exact_args)
        self.chained = case.outputs(case.chain(*args, **options), args)
        self.budget = 0.0

    def check(self, result):
        """Parity of what a call returned and wrote."""
        parity = check_budget(self.case.outputs(result, self.args), self.reference, self.chained)
        if parity and self.case.op == "router":
            checking = {k: v for k, v in self.options.items() if k not in ("top_k", "eps")}
            parity = check_choice(result[0], self.args[3], *result[2:], **checking)
        return parity


def case_work(case, device, peers):
    """Every way to compute one case: PyTorch's chain, what the call
    chooses, and each of the two that it chooses between."""
    args, options = case.make(device)
    workspace = DecodeWorkspace(device)
    # The chain's bytes do not depend on what the tensors hold nor where they are.
    with Traffic() as traffic:
        case.chain(*args, **options)
    impls, moved = {"torch": functools.partial(case.chain, *args, **options)}, {"torch": traffic.bytes}
    for name, fused in (("step08_dflash2", None), ("one_launch", True), ("two_launches", False)):
        if not (fused and case.tokens > fusion.FEW_TOKENS):
            impls[name] = functools.partial(case.call, *args, **options, workspace=workspace, fused=fused)
            moved[name] = case.bytes_moved(args, options, fused)
    caches = {"qkv": args[5:7], "mla": args[5:6], "router": []}[case.op]
    return [Work(
        case.as_dict(), impls, lambda: Judge(case, args, options), dict.fromkeys(impls, caches), num_bytes=moved,
        graph=True,
        about=lambda name, fn: {"launches": launches(fn, device), "bytes": moved[name]},
    )]  # fmt: skip


def cells(args):
    """A cell a case."""
    return [Cell(case.op, case.label(), functools.partial(case_work, case)) for case in cases()]


main = functools.partial(
    harness.main, Suite("fusion", __doc__, "bench_fusion.json", 2.0, ("qkv", "mla", "router"), cells, strict=True)
)

if __name__ == "__main__":
    sys.exit(main())
