"""The edge cases of the rung contract and how one is checked: shared by the matrix, the mutation and the GPU tests."""

import contextlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from ladder.lab.parity import Oracle, inside_nan, nan_allocations
from ladder.lab.problem import MINILM, AttentionProblem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# How q, k and v lie in memory. Each layout keeps the values, except the expanded ones, which repeat a head or a row.


def contiguous(q, k, v):
    return q, k, v


def bshd(q, k, v):
    """Views of (B, S, H, D) tensors, as models have them."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))


def in_nan(q, k, v):
    """Slices of larger buffers, NaN on all sides: any read out of bounds shows."""
    return tuple(inside_nan(x) for x in (q, k, v))


def _spread(x, dim, step):
    """Every ``step``-th place along ``dim`` of a buffer that is NaN elsewhere."""
    outer = x.new_full([n * step if i == dim else n for i, n in enumerate(x.shape)], float("nan"))
    places = (slice(None),) * dim + (slice(step - 1, None, step),)
    outer[places] = x
    return outer[places]


def every_other_token(q, k, v):
    """Every second token of a buffer whose other tokens are NaN."""
    return tuple(_spread(x, 2, 2) for x in (q, k, v))


def dims_first(q, k, v):
    """The last dimension is not the contiguous one."""
    return tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v))


def every_third_dim(q, k, v):
    """Elements of a row lie three apart, NaN between them."""
    return tuple(_spread(x, 3, 3) for x in (q, k, v))


def odd_offset(q, k, v):
    """Storage that starts one element after an aligned address, NaN before and after."""

    def shift(x):
        buffer = x.new_full((x.numel() + 2,), float("nan"))
        buffer[1:-1] = x.flatten()
        return buffer[1:-1].view(x.shape)

    return shift(q), shift(k), shift(v)


def packed_qkv(q, k, v):
    """q, k and v are slices of one (B, S, all heads, D) tensor, the output of a fused projection."""
    packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2)
    return tuple(x.transpose(1, 2) for x in packed.split([x.shape[1] for x in (q, k, v)], dim=2))


def expanded_heads(q, k, v):
    """K and V of one head, repeated by stride 0."""
    return q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)


def expanded_batch(q, k, v):
    """One prefix for all sequences, by stride 0."""
    return q, k[:1].expand_as(k), v[:1].expand_as(v)


def expanded_rows(q, k, v):
    """One query and one value for all positions, by stride 0."""
    return q[:, :, :1].expand_as(q), k, v[:, :, :1].expand_as(v)


def huge_logits(q, k, v):
    """Scores up to +-5e4 with scale 1: multiples of 2 * 56^2, exact in float16."""
    return 56 * q.sign(), 56 * k.sign(), v


def sunken_logits(q, k, v):
    """Every score of every row is -5e4 or a little more: below any sentinel that is not -inf."""
    k = torch.full_like(k, -56.0)
    k[:, :, ::3, 0] = -55.0
    return torch.full_like(q, 56.0), k, v


def rising_logits(q, k, v):
    """Row maxima that rise with the position of the key, so that every tile rescales all before it."""
    ramp = torch.linspace(0.0, 4.0, k.shape[2], device=k.device).to(k.dtype)[:, None].expand_as(k)
    return q.abs() + 0.5, ramp, v


def falling_logits(q, k, v):
    """The first key holds the maximum: later tiles must not disturb it."""
    q, k, v = rising_logits(q, k, v)
    return q, k.flip(2), v


@dataclass(frozen=True)
class Case:
    name: str
    problem: AttentionProblem
    layout: Callable = contiguous

    def tensors(self, device=DEVICE, dtype=None):
        problem = self.problem if dtype is None else self.problem.replace(dtype=dtype)
        return self.layout(*problem.make(device))


def _case(name, Sq, Sk, layout=contiguous, *, heads=(2, 2), dims=(16, 16), **fields):
    problem = AttentionProblem(Hq=heads[0], Hkv=heads[1], Sq=Sq, Sk=Sk, D=dims[0], Dv=dims[1], **fields)
    return Case(name, problem, layout)


def _cases():
    for Sq, Sk in ((1, 1), (1, 130), (15, 15), (17, 33), (33, 17), (64, 64), (129, 130), (70, 1)):
        for causal in (False, True):
            yield _case(f"{'causal' if causal else 'dense'} {Sq}x{Sk}", Sq, Sk, causal=causal)
    for Sq, Sk in ((33, 34), (33, 47), (34, 33)):  # the diagonal one key past a tile's corner, one before
        yield _case(f"causal {Sq}x{Sk}", Sq, Sk, causal=True)
    for Hq, Hkv in ((3, 1), (6, 2), (6, 1), (8, 1), (12, 2), (5, 5)):
        yield _case(f"{Hq} heads on {Hkv}", 19, 35, heads=(Hq, Hkv), causal=Hq != 6)
    for D in (1, 3, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256):
        yield _case(f"head size {D}", 18, 37, heads=(1, 1), dims=(D, D), causal=D % 3 == 0)
    for dims in ((192, 128), (64, 128), (40, 16), (8, 72)):
        yield _case(f"head sizes {dims[0]} and {dims[1]}", 18, 37, heads=(2, 1), dims=dims, causal=True)
    yield _case("head size 576 and 512", 5, 20, heads=(4, 1), dims=(576, 512))

    for layout in (bshd, in_nan, every_other_token, dims_first, every_third_dim, odd_offset, packed_qkv,
                   expanded_heads, expanded_rows):  # fmt: skip
        yield _case(layout.__name__, 37, 37, layout, causal=True)
    yield _case("in_nan dense", 21, 37, in_nan, dims=(24, 24))
    yield _case("in_nan grouped", 21, 37, in_nan, heads=(6, 2), dims=(24, 12))
    yield _case("bshd grouped", 21, 37, bshd, heads=(6, 2), causal=True)
    yield _case("expanded_batch", 20, 37, expanded_batch, B=3, causal=True)
    yield _case("batch of 3", 5, 37, B=3)
    yield _case("batch of 3 grouped", 18, 21, heads=(3, 1), dims=(16, 40), B=3, causal=True)

    yield _case("empty batch", 5, 7, B=0)
    yield _case("no queries", 0, 7)
    yield _case("no keys", 7, 0)
    yield _case("no keys causal", 7, 0, causal=True)
    yield _case("nothing", 0, 0, causal=True)
    yield _case("rows that see nothing", 50, 20, causal=True)
    yield _case("tiles that see nothing", 150, 3, causal=True)

    yield _case("huge logits", 40, 70, huge_logits, scale=1.0)
    yield _case("huge logits causal", 40, 70, huge_logits, scale=1.0, causal=True)
    yield _case("huge logits float32", 40, 70, huge_logits, scale=1.0, dtype="float32")
    yield _case("sunken logits", 40, 70, sunken_logits, scale=1.0)
    yield _case("sunken logits causal", 70, 50, sunken_logits, scale=1.0, causal=True, dtype="float32")
    yield _case("rising logits", 40, 70, rising_logits, dtype="float32")
    yield _case("rising logits causal", 70, 70, rising_logits, causal=True)
    yield _case("falling logits", 40, 70, falling_logits, dtype="float32")

    for scale in (-0.7, 0.0, 1.0, 3.0, 1e-3):
        yield _case(f"scale {scale}", 20, 40, scale=scale, causal=True)
    yield _case("scale of the third kind", 20, 40, scale=1 / 3, dims=(40, 40))
    yield _case("float32", 40, 70, dtype="float32")
    yield _case("float32 causal", 70, 40, dtype="float32", causal=True, dims=(24, 24))
    yield _case("bfloat16", 40, 70, dtype="bfloat16", causal=True)
    yield Case("minilm", MINILM.replace(B=1, Sq=80, Sk=80))
    yield Case("minilm causal", MINILM.replace(B=1, Sq=50, Sk=90, causal=True), bshd)


CASES = {case.name: case for case in _cases()}


def can(rung, problem):
    """Whether ``rung`` computes ``problem`` where the tests run."""
    if rung.why_not(problem) is not None:
        return False
    return not (rung.needs_triton and problem.dtype == "bfloat16" and DEVICE.type == "cpu")


@contextlib.contextmanager
def small_tiles(attention, rows=16, keys=16):
    """An attention function whose tiles are small, so that short sequences cross several of them."""
    if "tile_q" in inspect.signature(attention).parameters:
        yield lambda q, k, v, **options: attention(q, k, v, tile_q=rows, tile_k=keys, **options)
        return
    module = importlib.import_module(attention.__module__)
    with contextlib.suppress(ModuleNotFoundError):  # step 08 chooses its tiles apart from its entries, and keeps the choice
        module = importlib.import_module(f"{module.__package__}.decision")
    if not hasattr(module, "launch_config"):
        yield attention
        return
    chosen = module.launch_config
    decide = getattr(module, "_decide_prefill", None)

    def smaller(*args, **kwargs):
        return {**chosen(*args, **kwargs), "BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 1}

    with mock.patch.object(module, "launch_config", smaller), contextlib.ExitStack() as more:
        if decide is not None:
            more.enter_context(mock.patch.object(module, "_decide_prefill", decide.__wrapped__))
        yield attention


def has_lse(attention):
    return "return_lse" in inspect.signature(inspect.unwrap(attention)).parameters


def compute(attention, q, k, v, *, causal, scale, lse, small=False):
    """(out, lse or None), every allocation filled with NaN first."""
    with small_tiles(attention) if small else contextlib.nullcontext(attention) as run, nan_allocations():
        result = run(q, k, v, causal=causal, scale=scale, **({"return_lse": True} if lse else {}))
    return result if lse else (result, None)


def check(attention, case, *, small=False):
    """Assert that ``attention`` computes ``case`` within the budget, log-sum-exp included; return (out, oracle)."""
    q, k, v = case.tensors()
    options = dict(causal=case.problem.causal, scale=case.problem.scale)
    out, lse = compute(attention, q, k, v, **options, lse=has_lse(attention), small=small)
    oracle = Oracle(q, k, v, **options)
    parity = oracle.check(out, lse)
    assert parity, f"{case.name}: {parity.reason}"
    unseen = torch.isneginf(oracle.lse)
    assert (out[unseen] == 0).all(), f"{case.name}: rows that see no key are not 0"
    if lse is not None:
        assert torch.equal(torch.isneginf(lse), unseen), f"{case.name}: log-sum-exp is -inf in the wrong rows"
    return out, oracle
