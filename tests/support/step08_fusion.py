"""Inputs of step 08's fused functions, and checks of their results against PyTorch's chains in float64."""

import torch

from ladder.bench import fusion as chains
from ladder.lab.parity import nan_allocations
from ladder.step08_dflash2 import fusion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")


def qkv_inputs(
    T=5, hidden=48, heads=4, kv_heads=2, dim=16, rot=16, dtype=torch.float32, norms=False, bias=False, interleaved=False, seed=0
):
    """Positional and keyword arguments of ``fused_qkv_rope_append``: caches of NaN, slots out of order."""
    random = torch.Generator().manual_seed(seed)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=random) * scale).to(DEVICE, dtype)

    columns, page_size = (heads + 2 * kv_heads) * dim, 4
    pages = -(-T // page_size) + 2
    cos, sin = fusion.rope_tables(rot, 60, device=DEVICE)
    caches = [torch.full((pages, page_size, kv_heads, dim), NAN, device=DEVICE, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(pages * page_size, generator=random)[:T].to(DEVICE)
    positions = torch.randint(60, (T,), generator=random).to(DEVICE)
    options = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, interleaved=interleaved)
    if norms:
        options |= dict(q_norm_weight=1 + normal(dim, scale=0.2), k_norm_weight=1 + normal(dim, scale=0.2), norm_eps=1e-5)
    if bias:
        options["bias"] = normal(columns)
    return [normal(T, hidden), normal(columns, hidden, scale=hidden**-0.5), cos, sin, positions, *caches, slots], options


def mla_inputs(T=5, hidden=48, heads=3, rank=32, rot=16, dtype=torch.float32, weight=True, nope=True, interleaved=True, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=random) * scale).to(DEVICE, dtype)

    page_size = 4
    pages = -(-T // page_size) + 2
    cos, sin = fusion.rope_tables(rot, 60, device=DEVICE)
    cache = torch.full((pages, page_size, rank + rot), NAN, device=DEVICE, dtype=dtype)
    slots = torch.randperm(pages * page_size, generator=random)[:T].to(DEVICE)
    positions = torch.randint(60, (T,), generator=random).to(DEVICE)
    options = dict(interleaved=interleaved, norm_eps=1e-5)
    if weight:
        options["weight"] = normal(rank + rot, hidden, scale=hidden**-0.5)
    if nope:
        options["q_nope"] = normal(T, heads, rank)
    x = normal(T, hidden if weight else rank + rot)
    return [x, 1 + normal(rank, scale=0.2), cos, sin, positions, cache, slots, normal(T, heads, rot)], options


def router_inputs(T=5, hidden=48, experts=16, top_k=3, dtype=torch.float32, gate_dtype=None, residual=True, bias=False, seed=0, **options):
    random = torch.Generator().manual_seed(seed)

    def normal(*size, scale=1.0, dtype=dtype):
        return (torch.randn(size, generator=random) * scale).to(DEVICE, dtype)

    gate = normal(experts, hidden, scale=2 * hidden**-0.5, dtype=gate_dtype or dtype)
    args = [normal(T, hidden), normal(T, hidden) if residual else None, 1 + normal(hidden, scale=0.2), gate]
    return args, dict(top_k=top_k, correction_bias=normal(experts, scale=0.3, dtype=torch.float32) if bias else None, **options)


def _each(values, function):
    return [function(v) if isinstance(v, torch.Tensor) else v for v in values]


def chain(function, args, options, dtype=None):
    """(result, args) of a chain on copies of the arguments; negative slots go to one page more than the caches have."""
    cast = (lambda x: x.to(dtype or x.dtype, copy=True) if x.is_floating_point() else x.clone())  # fmt: skip
    args = _each(args, cast)
    options = dict(zip(options, _each(options.values(), cast)))
    where = [i for i, x in enumerate(args) if i in (5, 6) and isinstance(x, torch.Tensor) and x.is_floating_point()]
    if where:
        slots = args[where[-1] + 1]
        spare = args[where[0]].shape[0] * args[where[0]].shape[1]
        for i in where:
            more = args[i].new_full((1 + len(slots) // args[i].shape[1], *args[i].shape[1:]), NAN)
            args[i] = torch.cat([args[i], more])
        number = torch.arange(len(slots), device=slots.device)
        args[where[-1] + 1] = torch.where(slots < 0, spare + number, slots).long()
    args[4:5] = [args[4].long()] if len(args) > 4 else []
    return function(*args, **options), args


def check_append(call, function, args, options, caches, **more):
    """Run ``call`` and hold its result and the whole of its caches against the chain in float64."""
    before = [args[i].clone() for i in caches]
    exact, exact_args = chain(function, args, options, torch.float64)
    other, other_args = chain(function, args, options)
    with nan_allocations():
        result = call(*args, **options, **more)
    for i, old in zip(caches, before):
        pages = len(old)
        touched = ~exact_args[i][:pages].isnan()
        assert torch.equal(args[i].isnan(), ~touched), "rows that no slot names were written, or some were not"
    pick = [exact_args[i][: len(args[i])].nan_to_num() for i in caches]
    parity = chains.check_budget(
        [result, *(args[i].nan_to_num() for i in caches)], [exact, *pick],
        [other, *(other_args[i][: len(args[i])].nan_to_num() for i in caches)],
    )  # fmt: skip
    assert parity, parity.reason
    return result


def check_qkv(args, options, **more):
    return check_append(fusion.fused_qkv_rope_append, chains.chain_qkv, args, options, (5, 6), **more)


def check_mla(args, options, **more):
    return check_append(fusion.fused_mla_append, chains.chain_mla, args, options, (5,), **more)


def check_router(args, options, **more):
    exact, _ = chain(chains.chain_router, args, {k: v for k, v in options.items() if k != "group_score"}, torch.float64)
    other, _ = chain(chains.chain_router, args, {k: v for k, v in options.items() if k != "group_score"})
    with nan_allocations():
        result = fusion.fused_norm_router(*args, **options, **more)
    parity = chains.check_budget(result[:2], exact[:2], other[:2])
    assert parity, parity.reason
    rules = {k: v for k, v in options.items() if k not in ("top_k", "eps", "group_score")}
    parity = chains.check_choice(result[0], args[3], *result[2:], **rules)
    assert parity, parity.reason
    assert [x.dtype for x in result[2:]] == [torch.float32, torch.int32, torch.int32]
    return result
