# ruff: noqa: E501  (rows of a table)
"""What surrounds a call must not change its numbers in silence: autocast, gradients, transforms, tensors of other kinds."""

from contextlib import contextmanager

import pytest
import torch
from support.calls import (
    LENGTHS,
    TABLE,
    append,
    cached,
    chunk,
    groups,
    heads,
    latent,
    mla_append,
    packed,
    paged,
    random,
    route,
)  # fmt: skip
from torch.autograd import forward_ad

import ladder.step08_dflash2 as step08
from ladder import rungs
from ladder.contract import kernel_entry
from ladder.integrations import flash_attn as fa
from ladder.step06_paged import paged_decode
from ladder.step07_dflash1 import (
    attention_varlen,
    group_tokens,
    grouped_matmul,
    mla_decode,
    paged_prefill,
    permute_rows,
)
from ladder.step07_dflash1 import paged_decode as paged_decode_07
from ladder.step08_dflash2.fusion import AttentionBatch, DFlash2AttentionBlock, DFlash2MLABlock, Router

pytestmark = pytest.mark.filterwarnings("default")  # torch warns of its own transforms and nested tensors

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["pytorch", "interpreter", GPU])
def path(request, monkeypatch):
    """Which implementation runs: PyTorch's on the CPU, the kernels in Triton's interpreter, or on the GPU."""
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "interpreter" else "0")
    return request.param


def to(path, arguments):
    """The arguments where ``path`` runs."""
    return {name: x.cuda() if isinstance(x, torch.Tensor) and path == "gpu" else x for name, x in arguments.items()}


def batch(decode):
    if decode:
        return AttentionBatch(LENGTHS.long() - 1, torch.tensor([12, 10]), TABLE, LENGTHS)
    return AttentionBatch(torch.arange(5), torch.arange(5), torch.tensor([[0, 1]], dtype=torch.int32), LENGTHS[:1],
                          torch.tensor([0, 5], dtype=torch.int32), 5)  # fmt: skip


def block(decode, mla):
    """A call of a whole block, on fresh copies of its weights and caches."""

    def call(x):
        torch.manual_seed(0)
        sizes = dict(router=Router(8, 2), dtype=torch.float32, device=x.device)
        if mla:
            made = DFlash2MLABlock(64, 4, qk_nope_head_dim=16, qk_rope_head_dim=8, kv_lora_rank=16, v_head_dim=16, **sizes)
            caches = [random(6, 4, 24)]
        else:
            made, caches = DFlash2AttentionBlock(64, 4, 2, 16, **sizes), [random(6, 4, 2, 16), random(6, 4, 2, 16)]
        where = AttentionBatch(**{k: v.to(x.device) if isinstance(v, torch.Tensor) else v for k, v in vars(batch(decode)).items()})
        cos, sin = step08.rope_tables(8 if mla else 16, 64, device=x.device)
        return tuple(made(x, None, cos, sin, where, *(cache.to(x.device) for cache in caches)))

    return call


def router_of_rows(x, residual, **arguments):
    return step08.fused_norm_router(x, residual, **arguments)


ENTRIES = {
    **{r.name: (r.attention, lambda: heads(4, 4)) for r in rungs.RUNGS},
    "step04 grouped": (rungs.find(4).attention, heads), "step04 varlen": (rungs.find(4).module.attention_varlen, packed),
    "step06 decode": (paged_decode, paged), "step07 varlen": (attention_varlen, packed), "step07 paged_prefill": (paged_prefill, chunk),
    "step07 decode": (paged_decode_07, paged), "step07 mla": (mla_decode, latent), "step07 grouped_matmul": (grouped_matmul, groups),
    "varlen": (step08.dflash2_varlen, packed), "paged_prefill": (step08.dflash2_paged_prefill, chunk),
    "decode": (step08.dflash2_decode, paged), "mla_decode": (step08.dflash2_mla_decode, latent),
    "append in one launch": (step08.fused_qkv_rope_append, lambda: append(True)), "append": (step08.fused_qkv_rope_append, lambda: append(False)),
    "mla_append in one launch": (step08.fused_mla_append, lambda: mla_append(True)), "mla_append": (step08.fused_mla_append, lambda: mla_append(False)),
    "router in one launch": (router_of_rows, lambda: route(True)), "router": (router_of_rows, lambda: route(False)),
    "add_norm": (step08.fused_add_norm, lambda: {k: v for k, v in route().items() if k in ("x", "residual", "norm_weight")}),
    "flash_attn": (fa.flash_attn_func, lambda: {k: v.transpose(1, 2) for k, v in heads().items()}),
    "flash_attn cached": (fa.flash_attn_with_kvcache, cached),
    "attention_mass": (step08.RangeWindows.sliding(3).attention_mass, lambda: {k: v for k, v in heads().items() if k != "v"}),
    **{f"{'mla ' * mla}block {'decode' if decode else 'prefill'}": (block(decode, mla), lambda decode=decode: dict(x=random(2 if decode else 5, 64)))
       for mla in (False, True) for decode in (False, True)},
}  # fmt: skip
FORWARD_ONLY = [name for name in ENTRIES if name[:6] not in ("step01", "step02", "step03", "step04") and not name.endswith("mass")]


def tensors_of(result, arguments):
    """Everything that a call returned or wrote, as one flat list."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in (*found, *arguments.values()) if isinstance(x, (torch.Tensor, float))]


@pytest.mark.parametrize("name", ENTRIES)
def test_autocast_changes_no_bit(name, path):
    """Float32 arguments give the float32 result, in the cache too, whatever precision the caller lets other layers take."""
    if path == "pytorch" and name.startswith(("step05", "step06", "step07")):
        pytest.skip("these rungs have kernels only")
    entry, make = ENTRIES[name]
    plain, cast = to(path, make()), to(path, make())
    want = tensors_of(entry(**plain), plain)
    with torch.autocast("cuda" if path == "gpu" else "cpu", dtype=torch.bfloat16):
        got = tensors_of(entry(**cast), cast)
    assert len(got) == len(want) > 0
    for one, other in zip(got, want):
        assert one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("name", ["step04_gqa", "step08_dflash2", "varlen", "paged_prefill", "decode", "mla_decode", "append", "router"])
def test_autocast_inside_a_compiled_function(name, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    entry, make = ENTRIES[name]
    plain, cast = make(), make()
    want = tensors_of(entry(**plain), plain)

    def call(**arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return entry(**arguments)

    got = tensors_of(torch.compile(call, backend="eager", fullgraph=True)(**cast), cast)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_autocast_stays_on_around_a_call():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step08.dflash2_attention(**heads())
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def first_tensor(arguments):
    return next(name for name, x in arguments.items() if isinstance(x, torch.Tensor))


@contextmanager
def spoiled(x, kind):
    """``x`` as a kernel cannot have it, and what is said of it."""
    if kind == "tangent":  # a kernel would drop it, which reads as a derivative of zero
        with forward_ad.dual_level():
            yield forward_ad.make_dual(x, torch.ones_like(x)), "has a forward-mode tangent; forward only"
    elif kind == "gradient":
        yield x.clone().requires_grad_(), "requires gradients; forward only"
    elif kind == "sparse_coo":
        yield x.to_sparse(), "is a sparse_coo tensor; want a dense one"
    else:
        layout = torch.jagged if kind == "jagged" else torch.strided
        yield torch.nested.nested_tensor(list(x), layout=layout), "is a nested tensor; want a dense one"


FIRST = [r.name for r in rungs.RUNGS if r.number < 5] + ["step04 varlen"]
OF_RUNGS = ["step05_fused", "step06 decode", "step07 decode", "step08_dflash2", "varlen", "decode", "mla_decode", "append", "router"]
NO_GRAPH = [name for name in FORWARD_ONLY if not name.startswith("flash_attn")]  # their backward says the same


@pytest.mark.parametrize("name, kind", [
    *((name, "tangent") for name in FORWARD_ONLY), *((name, "gradient") for name in NO_GRAPH),
    *((name, kind) for name in (*FIRST, *OF_RUNGS, "flash_attn") for kind in ("nested", "jagged", "sparse_coo")),
])  # fmt: skip
def test_what_no_kernel_can_read_is_refused(name, kind, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    entry, make = ENTRIES[name]
    floats = [n for n, x in make().items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for argument in floats if kind == "gradient" else ["k"] if name in FIRST else floats[:1]:
        arguments = make()
        with spoiled(arguments[argument], kind) as (x, words):
            with pytest.raises(ValueError if "dense" in words else NotImplementedError, match=f"{argument} {words}"):
                entry(**{**arguments, argument: x})


def test_without_gradients_a_kernel_runs():
    q, k, v = heads().values()
    with torch.no_grad():
        assert rungs.find(5).attention(q.requires_grad_(), k, v).shape == q.shape


def test_rows_that_want_gradients_are_not_permuted():
    ids = torch.zeros(5, 2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="x requires gradients"):
        permute_rows(random(5, 8).requires_grad_(), group_tokens(ids, 4))


@pytest.mark.parametrize("name", OF_RUNGS)
def test_transforms_are_refused(name, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    entry, make = ENTRIES[name]
    arguments = make()
    argument = first_tensor(arguments)
    x = arguments.pop(argument)

    def call(x):
        return entry(**{argument: x}, **arguments)

    with pytest.raises(NotImplementedError, match=f"{argument} is inside a torch.func transform"):
        torch.func.vmap(call)(x[None])
    with pytest.raises(NotImplementedError, match=f"{argument} (is inside a torch.func transform|requires gradients)"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))


def test_the_differentiable_rung_keeps_its_derivatives():
    """Step 04 is where the refusals point to: its gradients under autocast are those without."""
    grads = []
    for enabled in (False, True):
        arguments = {name: x.requires_grad_() for name, x in heads().items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = rungs.find(4).attention(**arguments)
        out.square().sum().backward()
        grads.append([x.grad for x in arguments.values()])
    for one, other in zip(*grads):
        assert one.abs().sum() > 0 and torch.equal(one, other)


@pytest.mark.parametrize("name", ["step08_dflash2", "varlen", "decode", "mla_decode", "append", "router", "add_norm", "flash_attn", "flash_attn cached"])
def test_a_compiled_function_refuses_them_too(name, monkeypatch):
    """There a derivative came out as zero, without a word."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    entry, make = ENTRIES[name]
    arguments = make()
    argument = first_tensor(arguments)
    x = arguments.pop(argument)

    def derivative(x):
        return torch.func.jvp(lambda x: tensors_of(entry(**{argument: x}, **arguments), {})[0], (x,), (torch.ones_like(x),))[1]

    with pytest.raises(NotImplementedError, match=f"{argument} is inside a torch.func transform"):
        torch.compile(derivative, backend="eager")(x)
    call = torch.compile(lambda x: tensors_of(entry(**{argument: x}, **arguments), {})[0], backend="eager")
    call(x)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"{argument} has a forward-mode tangent"):
        call(forward_ad.make_dual(x, torch.ones_like(x)))


def test_flash_attention_refuses_transforms_before_it_writes():
    arguments = cached()
    before = arguments["k_cache"].clone()
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: k is inside a torch.func transform"):
        torch.func.grad(lambda k: fa.flash_attn_with_kvcache(**{**arguments, "k": k}).sum())(arguments["k"])
    with pytest.raises(NotImplementedError, match="flash_attn_func: q is inside"):
        torch.func.grad(lambda q: fa.flash_attn_func(q, arguments["k_cache"], arguments["v_cache"]).sum())(arguments["q"])
    assert torch.equal(arguments["k_cache"], before)


def test_an_entry_may_stand_in_a_notebook():
    """Whose module has a name of one part, and no rung to name."""
    def mine(x):
        return x

    mine.__module__ = "__main__"
    entry = kernel_entry(mine)
    assert entry(torch.ones(1)) == 1
    with pytest.raises(NotImplementedError, match="^mine: x requires gradients"):
        entry(torch.ones(1, requires_grad=True))
