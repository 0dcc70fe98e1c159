"""Step 08's fusion: projection, norm, rotation and cache; norm and router. Kernels interpreted, and the PyTorch path."""

import contextlib
import itertools

import pytest
import torch
from support.process import python

pytest.importorskip("triton")

from support.step08_fusion import (  # noqa: E402
    DEVICE,
    NAN,
    check_mla,
    check_qkv,
    check_router,
    mla_inputs,
    qkv_inputs,
    router_inputs,
)

from ladder.bench import fusion as chains  # noqa: E402
from ladder.lab import results  # noqa: E402
from ladder.lab.parity import inside_nan  # noqa: E402
from ladder.step07_dflash1 import DecodeWorkspace, group_tokens  # noqa: E402
from ladder.step08_dflash2 import fusion  # noqa: E402
from ladder.step08_dflash2.fusion import append, launch  # noqa: E402


@pytest.fixture
def on_torch(monkeypatch):
    """The path of CPU tensors without the interpreter."""
    monkeypatch.setattr(launch, "kernels", lambda x: None)


@pytest.fixture(params=["kernels", "torch"])
def path(request):
    """Each test on the kernels and on the PyTorch path."""
    if request.param == "torch":
        request.getfixturevalue("on_torch")
    return request.param


@contextlib.contextmanager
def launched_with(function, **parameters):
    """Launch parameters that small shapes would not get."""
    chosen = getattr(launch, function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, function, lambda *args: {**chosen(*args), **parameters})
        yield


# Projection, norm, rotation, cache

QKV = {
    "llama": dict(),
    "float16": dict(dtype=torch.float16),
    "qwen3": dict(norms=True),
    "qwen2": dict(bias=True, heads=3, kv_heads=1),
    "glm": dict(dim=32, rot=16, interleaved=True, bias=True, dtype=torch.float16),
    "neox": dict(dim=24, rot=8, heads=2),
    "odd sizes": dict(dim=20, rot=6, hidden=37, norms=True, interleaved=True),
    "odd pairs": dict(dim=24, rot=24, hidden=50, norms=True),
    "one pair": dict(rot=2, interleaved=True, heads=1, kv_heads=1),
    "one pair of halves": dict(rot=2, heads=1, kv_heads=1, norms=True),
    "one token": dict(T=1),
    "everything": dict(dim=24, rot=12, norms=True, bias=True, interleaved=True, dtype=torch.float16),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", QKV)
def test_qkv(name, fused, path):
    check_qkv(*qkv_inputs(**QKV[name]), fused=fused)


@pytest.mark.parametrize("splits, tiles, finish, tokens", [(2, 1, 16, 18), (4, 2, 4, 18), (8, 1, 2, 3)])
def test_qkv_partial_sums(splits, tiles, finish, tokens):
    """Splits of the inner dimension, some of them empty, several tiles to a head, rows finished in turn, two row tiles."""
    parameters = dict(splits=splits, TILES=tiles, BLOCK_N=32 // tiles, BLOCK_K=16, BLOCK_T=16, FINISH_T=finish, EVEN=False)
    with launched_with("projection_config", **parameters):
        check_qkv(*qkv_inputs(T=tokens, hidden=70, heads=1, kv_heads=1, dim=32, rot=32, norms=True), fused=True)


@pytest.mark.parametrize("fused", [True, False])
def test_qkv_more_rows_than_a_tile(fused):
    with launched_with("pass_config", BLOCK_T=4, heads_in_turn=3):
        check_qkv(*qkv_inputs(T=18, hidden=16, heads=2, kv_heads=1), fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_qkv_negative_slots_are_not_written(fused, path):
    args, options = qkv_inputs(T=6, heads=1, kv_heads=1)
    args[7][::2] = torch.tensor([-1, -7, -(2**40)], device=DEVICE)
    check_qkv(args, options, fused=fused)
    args[7][:] = -1
    for cache in args[5:7]:
        cache.fill_(NAN)
    check_qkv(args, options, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_qkv_leaves_the_rest_of_the_cache(fused, path):
    args, options = qkv_inputs()
    for cache in args[5:7]:
        cache.copy_(torch.randn_like(cache))
    before = [cache.clone() for cache in args[5:7]]
    fusion.fused_qkv_rope_append(*args, **options, fused=fused)
    for cache, old in zip(args[5:7], before):
        same = (cache == old).flatten(2).all(-1).flatten()
        assert not same[args[7]].any() and same.sum() == same.numel() - len(args[7])


@pytest.mark.parametrize("fused", [True, False])
def test_qkv_any_strides(fused, path):
    args, options = qkv_inputs(heads=2, kv_heads=1, norms=True, bias=True)
    plain = fusion.fused_qkv_rope_append(*[x.clone() for x in args], **options, fused=fused)
    args[0] = inside_nan(args[0].T.contiguous()).T  # columns of x far apart
    args[1] = inside_nan(args[1])
    args[4], args[7] = args[4].int(), args[7].int()
    for i in (5, 6):
        args[i] = torch.full((4, 4, 3, 40), NAN, device=DEVICE).transpose(0, 1)[:, :, 1:2, 3:35:2]
    out = torch.full((2, 5, 32), NAN, device=DEVICE).transpose(0, 1)[..., 1::2]
    result = check_qkv(args, options, fused=fused, out=out)
    assert result is out
    torch.testing.assert_close(out, plain)


def test_qkv_no_tokens(path):
    for fused in (True, False, None):
        args, options = qkv_inputs(T=0)
        assert fusion.fused_qkv_rope_append(*args, **options, fused=fused).shape == (0, 4, 16)


@pytest.mark.parametrize("fused", [True, False])
def test_qkv_repeats_its_bits_in_a_dirty_workspace(fused):
    workspace = DecodeWorkspace(DEVICE)
    with launched_with("projection_config", splits=4, BLOCK_K=16, EVEN=True):
        args, options = qkv_inputs(hidden=64, heads=1, kv_heads=1)
        first = fusion.fused_qkv_rope_append(*args, **options, workspace=workspace, fused=fused)
        workspace.partials.fill_(NAN)
        held = workspace.nbytes
        second = fusion.fused_qkv_rope_append(*args, **options, workspace=workspace, fused=fused)
        assert torch.equal(first, second) and workspace.nbytes == held and not workspace.counters.any()
        assert torch.equal(first, fusion.fused_qkv_rope_append(*args, **options, fused=fused))


def test_qkv_rotates_by_position_and_keeps_values():
    """At position 0 nothing turns; the score of a query and a key depends on their distance alone."""
    args, options = qkv_inputs(T=4, heads=1, kv_heads=1)
    args[0] = args[0][:1].expand(4, -1)  # the same token four times
    args[4] = torch.tensor([0, 7, 20, 27], device=DEVICE)
    q = fusion.fused_qkv_rope_append(*args, **options)[:, 0]
    plain = torch.nn.functional.linear(args[0], args[1])
    k, v = (cache.flatten(0, 1)[args[7], 0] for cache in args[5:7])
    torch.testing.assert_close(q[0], plain[0, :16])
    torch.testing.assert_close(v, plain[:, 32:])
    torch.testing.assert_close(q[1] @ k[0], q[3] @ k[2])
    assert abs(float(q[1] @ k[0] - q[0] @ k[0])) > 1e-3


# MLA

MLA = {
    "projected": dict(weight=False),
    "projected, rotated only": dict(weight=False, nope=False),
    "product": dict(),
    "product, rotated only": dict(nope=False),
    "halves": dict(interleaved=False),
    "float16": dict(dtype=torch.float16),
    "odd sizes": dict(rank=24, rot=6, hidden=37, heads=5),
    "one token": dict(T=1),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MLA)
def test_mla(name, fused, path):
    check_mla(*mla_inputs(**MLA[name]), fused=fused)


def test_mla_partial_sums():
    parameters = dict(splits=4, TILES=3, BLOCK_N=16, BLOCK_K=16, BLOCK_T=16, FINISH_T=4, EVEN=False)
    with launched_with("projection_config", **parameters):
        check_mla(*mla_inputs(T=18, hidden=70), fused=True)


@pytest.mark.parametrize("weight", [True, False])
def test_mla_negative_slots_and_strides(weight, path):
    args, options = mla_inputs(T=6, weight=weight)
    args[6][1::2] = -1
    args[0] = inside_nan(args[0].T.contiguous()).T
    args[5] = torch.full((*args[5].shape[:2], 100), NAN, device=DEVICE)[..., 2:98:2]
    args[7] = inside_nan(args[7])
    options["q_nope"] = inside_nan(options["q_nope"].transpose(0, 1).contiguous()).transpose(0, 1)
    out = torch.full((6, 48, 3), NAN, device=DEVICE).transpose(1, 2)
    assert check_mla(args, options, out=out) is out


def test_mla_no_tokens_no_heads(path):
    args, options = mla_inputs(T=0)
    assert fusion.fused_mla_append(*args, **options).shape == (0, 3, 48)
    args, options = mla_inputs(heads=0)
    assert check_mla(args, options).shape == (5, 0, 48)


def test_mla_query_is_what_mla_decode_takes():
    """Absorbed columns first, as in the cache: the score is the sum over both parts."""
    args, options = mla_inputs(T=2, heads=1)
    args[4][:] = 9  # the same position: the rotations cancel
    q = fusion.fused_mla_append(*args, **options)
    keys = args[5].flatten(0, 1)[args[6]]
    kv = torch.nn.functional.linear(args[0], options["weight"])
    want = options["q_nope"][:, 0] @ keys[:, :32].T + args[7][:, 0] @ kv[:, 32:].T
    torch.testing.assert_close(q[:, 0] @ keys.T, want)


# Router

ROUTER = {
    "mixtral": dict(experts=8, top_k=2),
    "v2 lite": dict(renormalize=False),
    "v2": dict(experts=20, num_groups=4, topk_groups=2, renormalize=False, routed_scaling_factor=16.0),
    "v3": dict(num_groups=4, topk_groups=2, scoring="sigmoid", bias=True, routed_scaling_factor=2.5),
    "sigmoid": dict(scoring="sigmoid"),
    "bias on softmax": dict(bias=True),
    "all groups": dict(num_groups=4, topk_groups=4),
    "groups of one": dict(experts=6, num_groups=6, topk_groups=3),
    "no residual": dict(residual=False),
    "one expert": dict(experts=1, top_k=1),
    "every expert": dict(experts=5, top_k=5),
    "odd sizes": dict(hidden=37, experts=13, top_k=4),
    "float16": dict(dtype=torch.float16),
    "float16, gate in float32": dict(dtype=torch.float16, gate_dtype=torch.float32, bias=True, scoring="sigmoid"),
    "one token": dict(T=1),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ROUTER)
def test_router(name, fused, path):
    args, options = router_inputs(**ROUTER[name])
    result = check_router(args, options, fused=fused)
    assert args[1] is not None or result[1] is args[0]


@pytest.mark.parametrize("fused", [True, False])
def test_router_partial_sums(fused):
    """Splits of the hidden columns, tiles of experts, tokens finished in turn, and row tiles that add their counts."""
    parameters = dict(splits=4, TILES=2, BLOCK_E=16, BLOCK_K=16, FINISH_T=4, **({} if fused else {"BLOCK_T": 16}))
    with launched_with("router_config", **parameters):
        check_router(*router_inputs(T=19, hidden=70, experts=30, num_groups=3, topk_groups=2), fused=fused)


@pytest.mark.parametrize("group_score, want", [("max", 0), ("top2", 2), (None, 0)])
def test_router_top2_against_max(group_score, want, path):
    """A group with the best expert loses to the group with the best pair, if pairs are what counts."""
    x, norm = torch.ones(1, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    gate = torch.tensor([3.0, 0.0, 2.0, 1.9, -1.0, -1.0], device=DEVICE)[:, None].expand(6, 4).contiguous() / 4
    groups = dict(num_groups=3, topk_groups=1, group_score=group_score)
    assert fusion.fused_norm_router(x, None, norm, gate, top_k=1, scoring="sigmoid", **groups)[3].tolist() == [[want]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("grouped", [False, True])
def test_router_ties_go_to_the_lowest_expert(scoring, grouped, path):
    args, options = router_inputs(experts=12, top_k=4, scoring=scoring, **(dict(num_groups=3, topk_groups=2) if grouped else {}))
    args[3][:] = args[3][:1]  # all gates alike
    ids, counts = check_router(args, options)[3:]
    assert ids.tolist() == [[0, 1, 2, 3]] * 5 and counts.tolist() == [5] * 4 + [0] * 8


def test_router_tells_saturated_scores_apart(path):
    """Where softmax is 0 and sigmoid 1 for several experts, their logits still order them."""
    x, norm = torch.ones(1, 1, device=DEVICE), torch.ones(1, device=DEVICE)
    for scoring, logits, want in (("softmax", [-300.0, 500.0, -200.0, -250.0], [1, 2, 3]), ("sigmoid", [30.0, 90.0, 40.0, 5.0], [1, 2, 0])):
        gate = torch.tensor(logits, device=DEVICE)[:, None]
        weights, ids = fusion.fused_norm_router(x, None, norm, gate, top_k=3, scoring=scoring)[2:4]
        assert ids.tolist() == [want] and weights.isfinite().all()


def test_router_shows_nan(path):
    """A token of NaN gets NaN weights and experts that exist; the other tokens do not notice."""
    args, options = router_inputs(T=3, num_groups=4, topk_groups=2, scoring="sigmoid", bias=True)
    clean = fusion.fused_norm_router(*args, **options)
    args[0][1, 5] = NAN
    normed, _, weights, ids, counts = fusion.fused_norm_router(*args, **options)
    assert weights[1].isnan().all() and normed[1].isnan().all()
    assert ((ids >= 0) & (ids < 16)).all() and len(set(ids[1].tolist())) == 3 and counts.sum() == 9
    for i in (0, 2):
        assert torch.equal(weights[i], clean[2][i]) and torch.equal(ids[i], clean[3][i])


def test_router_no_tokens(path):
    for fused in (True, False, None):
        args, options = router_inputs(T=0)
        normed, residual, weights, ids, counts = fusion.fused_norm_router(*args, **options, fused=fused)
        assert normed.shape == residual.shape == (0, 48) and weights.shape == ids.shape == (0, 3)
        assert counts.tolist() == [0] * 16


def test_router_any_strides(path):
    args, options = router_inputs(T=6)
    plain = fusion.fused_norm_router(*args, **options)
    args[0], args[1] = inside_nan(args[0].T.contiguous()).T, inside_nan(args[1])
    args[3] = inside_nan(args[3].T.contiguous()).T
    for fused in (True, False):
        for got, want in zip(check_router(args, options, fused=fused), plain):
            torch.testing.assert_close(got, want)


def test_router_choice_feeds_group_tokens():
    args, options = router_inputs(T=20, experts=6, top_k=2)
    ids, counts = fusion.fused_norm_router(*args, **options)[3:]
    groups = group_tokens(ids, 6)
    assert groups.offsets.diff().tolist() == counts.tolist()
    assert sorted(ids.flatten()[groups.order.long()].tolist()) == ids.flatten()[groups.order.long()].tolist()


def test_router_repeats_its_bits_in_a_dirty_workspace():
    workspace = DecodeWorkspace(DEVICE)
    args, options = router_inputs(hidden=70)
    with launched_with("router_config", splits=4, BLOCK_K=16):
        for fused in (True, False):
            first = fusion.fused_norm_router(*args, **options, workspace=workspace, fused=fused)
            workspace.partials.fill_(NAN)
            second = fusion.fused_norm_router(*args, **options, workspace=workspace, fused=fused)
            assert all(torch.equal(a, b) for a, b in zip(first, second)) and not workspace.counters.any()


def test_add_norm(path):
    for T, residual, hidden in itertools.product((0, 1, 5), (True, False), (37, 64)):
        (x, other, norm, _), _ = router_inputs(T=T, hidden=hidden, residual=residual)
        normed, total = fusion.fused_add_norm(x, other, norm, eps=1e-5)
        assert total is x if other is None else torch.equal(total, x + other)
        torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (hidden,), norm, 1e-5))


# What is refused


def replaced(args, options, **changes):
    """Arguments with some of them changed, by position number (as _N) or name."""
    args, options = list(args), dict(options)
    for name, change in changes.items():
        if name.startswith("_"):
            args[int(name[1:])] = change(args[int(name[1:])]) if callable(change) else change
        else:
            options[name] = change
    return args, options


QKV_REFUSES = [
    (dict(_0=lambda x: x[0]), r"x has shape \(48,\); want \(T, hidden\)"),
    (dict(_0=lambda x: x.double()), "x has dtype torch.float64; want float16 or bfloat16 or float32"),
    (dict(_0=None), "x is a NoneType; want a torch.Tensor"),
    (dict(_1=lambda w: w[:-1]), r"weight_qkv has shape \(127, 48\); want \(128, 48\)"),
    (dict(_1=lambda w: w.half()), "weight_qkv has dtype torch.float16; want float32"),
    (dict(_1=lambda w: w.to("meta")), "weight_qkv is on meta; want"),
    (dict(_2=lambda c: c[:, ::2]), "cos has strides .*; want a contiguous tensor"),
    (dict(_2=lambda c: torch.cat([c, c], 1), _3=lambda c: torch.cat([c, c], 1)),
     "cos has 16 columns; want 1 to 8, pairs of the 16 columns of D"),
    (dict(_3=lambda c: c[1:].contiguous()), r"sin has shape \(59, 8\); want \(60, 8\)"),
    (dict(_4=lambda p: p[:4]), r"positions has shape \(4,\); want \(5,\)"),
    (dict(_4=lambda p: p.float()), "positions has dtype torch.float32; want int32 or int64"),
    (dict(_5=lambda c: c[:, :, :1]), r"k_cache has shape \(4, 4, 1, 16\); want \(num_pages, page_size, 2, 16\)"),
    (dict(_5=lambda c: c[:1].expand(4, -1, -1, -1)), "k_cache has shape .* elements on top of each other"),
    (dict(_5=lambda c: c[:, :0], _6=lambda c: c[:, :0]), r"k_cache has shape \(4, 0, 2, 16\), pages of no tokens; want at least 1"),
    (dict(_6=lambda c: c[1:]), r"v_cache has shape \(3, 4, 2, 16\); want \(4, 4, 2, 16\), that of k_cache"),
    (dict(_7=lambda s: s.int().repeat(2)[::2]), "slot_mapping has strides"),
    (dict(num_heads=3), "num_heads is 3; want a multiple of num_kv_heads, 2"),
    (dict(num_heads=4.0), "num_heads is 4.0; want an integer of at least 1"),
    (dict(bias=torch.zeros(3)), r"bias has shape \(3,\); want \(128,\)"),
    (dict(k_norm_weight=torch.ones(8)), r"k_norm_weight has shape \(8,\); want \(16,\)"),
    (dict(norm_eps=-1.0), "norm_eps is -1.0; want a finite number, 0 or more"),
    (dict(norm_eps="1"), "norm_eps is '1'; want"),
    (dict(interleaved=1), "interleaved is 1; want True or False"),
    (dict(fused="yes"), "fused is 'yes'; want True or False"),
    (dict(out=torch.zeros(5, 4, 8)), r"out has shape \(5, 4, 8\); want \(5, 4, 16\)"),
    (dict(out=torch.zeros(5, 1, 16).expand(5, 4, 16)), "out has shape .* elements on top of each other"),
    (dict(workspace=torch.zeros(9)), "workspace is a Tensor; want a DecodeWorkspace"),
    (dict(_4=lambda p: p + 60), r"positions holds \d+; want 0 .. 59, the rows of cos"),
    (dict(_4=lambda p: p - 60), r"positions holds -\d+; want 0 .. 59, the rows of cos"),
    (dict(_7=lambda s: s + 16), r"slot_mapping holds \d+; want at most 15, the last slot of the cache"),
]  # fmt: skip

MLA_REFUSES = [
    (dict(_0=lambda x: x[:, :-1]), r"weight has shape \(48, 48\); want \(48, 47\)"),
    (dict(_0=lambda x: x[:, :-1], weight=None), r"x has shape \(5, 47\); want \(5, 48\)"),
    (dict(_1=lambda w: w[:31]), "latent_cache has 48 columns, kv_norm_weight 31; want an even number more, rot_dim"),
    (dict(_2=lambda c: c[:, :4].contiguous(), _3=lambda c: c[:, :4].contiguous()),
     "cos has 4 columns; want 8, pairs of the 16 columns of rot_dim"),
    (dict(_5=lambda c: c[0]), r"latent_cache has shape \(4, 48\); want \(num_pages, page_size, rank \+ rot_dim\)"),
    (dict(_7=lambda q: q[..., :8]), r"q_pe has shape \(5, 3, 8\); want \(5, H, 16\)"),
    (dict(q_nope=torch.zeros(5, 2, 32)), r"q_nope has shape \(5, 2, 32\); want \(5, 3, n\)"),
    (dict(out=torch.zeros(5, 3, 16)), r"out has shape \(5, 3, 16\); want \(5, 3, 48\)"),
    (dict(_6=lambda s: s + 99), "slot_mapping holds"),
]  # fmt: skip

ROUTER_REFUSES = [
    (dict(_1=lambda r: r[:4]), r"residual has shape \(4, 48\); want \(5, 48\)"),
    (dict(_2=lambda w: w[:4]), r"norm_weight has shape \(4,\); want \(48,\)"),
    (dict(_3=lambda g: g.half()), "gate_weight has dtype torch.float16; want float32"),
    (dict(_3=lambda g: g[:, :4]), r"gate_weight has shape \(16, 4\); want \(E, 48\)"),
    (dict(top_k=17), "top_k is 17; want at most 16, the experts that may be chosen"),
    (dict(top_k=5, num_groups=4, topk_groups=1), "top_k is 5; want at most 4, the experts that may be chosen"),
    (dict(top_k=0), "top_k is 0; want an integer of at least 1"),
    (dict(num_groups=3, topk_groups=1), "gate_weight has 16 experts; want a multiple of num_groups, 3"),
    (dict(num_groups=4), "num_groups is 4, topk_groups None; want both, or None for both"),
    (dict(num_groups=4, topk_groups=5), "topk_groups is 5; want at most num_groups, 4"),
    (dict(num_groups=16, topk_groups=8, group_score="top2"), "num_groups is 16, one expert each; want two experts or more"),
    (dict(scoring="relu"), "scoring is 'relu'; want 'softmax' or 'sigmoid'"),
    (dict(group_score="sum"), "group_score is 'sum'; want 'max', 'top2' or None"),
    (dict(correction_bias=torch.zeros(4)), r"correction_bias has shape \(4,\); want \(16,\)"),
    (dict(routed_scaling_factor=float("inf")), "routed_scaling_factor is inf; want a finite number"),
    (dict(renormalize=None), "renormalize is None; want True or False"),
    (dict(eps=True), "eps is True; want a finite number, 0 or more"),
]  # fmt: skip


REFUSALS = [
    *((fusion.fused_qkv_rope_append, qkv_inputs, *case) for case in QKV_REFUSES),
    *((fusion.fused_mla_append, mla_inputs, *case) for case in MLA_REFUSES),
    *((fusion.fused_norm_router, router_inputs, *case) for case in ROUTER_REFUSES),
]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="CPU tensors in the table")
@pytest.mark.parametrize("call, inputs, changes, words", REFUSALS)
def test_refusals(call, inputs, changes, words):
    args, options = replaced(*inputs(), **changes)
    with pytest.raises((TypeError, ValueError), match=f"step08_dflash2: {words}"):
        call(*args, **options)


def test_what_is_not_there_says_so():
    args, options = router_inputs(T=65)
    with pytest.raises(ValueError, match="fused is True for 65 tokens; want at most 64, or None"):
        fusion.fused_norm_router(*args, **options, fused=True)
    wide = torch.zeros(1, 40000, device=DEVICE)
    with pytest.raises(NotImplementedError, match="x has 40000 columns; the norm holds up to 32768"):
        fusion.fused_add_norm(wide, None, wide[0])
    with pytest.raises(NotImplementedError, match="gate_weight has 1025 experts; the router holds up to 1024"):
        fusion.fused_norm_router(args[0], None, args[2], torch.zeros(1025, 48, device=DEVICE), top_k=2)
    args[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="forward only"):
        fusion.fused_norm_router(*args, **options)
    with torch.no_grad():
        fusion.fused_norm_router(*args, **options)


def test_bfloat16():
    """On a CPU PyTorch computes it, interpreter or not: the interpreter multiplies it wrongly."""
    check_qkv(*qkv_inputs(dtype=torch.bfloat16, norms=True))
    check_mla(*mla_inputs(dtype=torch.bfloat16))
    check_router(*router_inputs(dtype=torch.bfloat16, gate_dtype=torch.float32))


def test_slots_and_positions_outside_show_as_nan(monkeypatch):
    """As on a GPU, where nobody reads them beforehand: q is NaN, the cache stays as it is, other tokens do not notice."""
    monkeypatch.setattr(append, "check_values", lambda *_: None)
    for fused in (True, False):
        args, options = qkv_inputs()
        clean = fusion.fused_qkv_rope_append(*args, **options, fused=fused)
        for cache in args[5:7]:
            cache.fill_(NAN)
        args[4][1], args[7][3] = 60, 16
        q = fusion.fused_qkv_rope_append(*args, **options, fused=fused)
        assert q[1].isnan().all() and q[3].isnan().all() and torch.equal(q[::2], clean[::2])
        k, v = (cache.flatten(0, 1) for cache in args[5:7])
        assert k[args[7][1]].isnan().all() and not v[args[7][1]].isnan().any() and int((~v[:, 0, 0].isnan()).sum()) == 4
        args, options = mla_inputs()
        args[4][1], args[6][3] = -1, 16
        q = fusion.fused_mla_append(*args, **options, fused=fused)[..., 32:]
        assert q[1].isnan().all() and q[3].isnan().all() and not q[::2].isnan().any()


# Operators


def everything(args, options, mla_args, mla_options, router_args, router_options):
    q = fusion.fused_qkv_rope_append(*args, **options)
    latent_q = fusion.fused_mla_append(*mla_args, **mla_options)
    return q, latent_q, *fusion.fused_norm_router(*router_args, **router_options), *fusion.fused_add_norm(*router_args[:3])


@pytest.mark.parametrize("residual", [True, False])
def test_torch_compile_sees_one_graph(residual, on_torch):
    inputs = [*qkv_inputs(norms=True), *mla_inputs(), *router_inputs(residual=residual, num_groups=4, topk_groups=2)]
    plain = everything(*inputs)
    caches = [inputs[0][5].clone(), inputs[0][6].clone(), inputs[2][5].clone()]
    for cache in (*inputs[0][5:7], inputs[2][5]):
        cache.fill_(NAN)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")(*inputs)
    for a, b in zip(plain, compiled, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(caches, (*inputs[0][5:7], inputs[2][5])):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_operators_keep_torchs_rules(on_torch):
    args, options = qkv_inputs(norms=True)
    out = torch.empty(5, 4, 16, device=DEVICE)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x, weight, cos, sin, positions, k_cache, v_cache, slots = args
    for cache in (k_cache, v_cache, out):
        cache.fill_(0)
    norms = options["q_norm_weight"], options["k_norm_weight"]
    operands = (x, weight, None, *norms, cos, sin, positions, slots, k_cache, v_cache, out, 4, 1e-6, False, None)
    torch.library.opcheck(torch.ops.ladder.dflash2_qkv_rope_append, operands, test_utils=tests)
    (x, norm, cos, sin, positions, cache, slots, q_pe), options = mla_inputs()
    operands = (x, options["weight"], norm, cos, sin, positions, slots, cache.fill_(0), q_pe, options["q_nope"])
    torch.library.opcheck(
        torch.ops.ladder.dflash2_mla_append, (*operands, torch.zeros(5, 3, 48, device=DEVICE), 1e-6, True, None), test_utils=tests
    )
    args, _ = router_inputs()
    operands = (*args, None, 3, 1e-6, False, 1, 1, False, True, 1.0, None)
    torch.library.opcheck(torch.ops.ladder.dflash2_norm_router, operands, test_utils=tests)
    torch.library.opcheck(torch.ops.ladder.dflash2_add_norm, (*args[:3], 1e-6), test_utils=tests)


def test_fake_tensors_go_through():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        args, options = router_inputs()
        args = [mode.from_tensor(torch.empty(x.shape)) if x is not None else None for x in args]
        normed, total, weights, ids, counts = fusion.fused_norm_router(*args, **{**options, "correction_bias": None})
    assert weights.shape == ids.shape == (5, 3) and counts.shape == (16,) and normed.shape == total.shape == (5, 48)


# Choice of launch, and the instruments of the benchmark


@pytest.mark.parametrize("itemsize", [2, 4])
def test_launch_parameters_cover_the_work(itemsize):
    sizes = (1, 8, 16, 17, 64, 500), (16, 20, 64, 80, 96, 128, 256, 576), (1, 100, 2048, 7168), (1, 48)
    for tokens, dim, inner, units in itertools.product(*sizes):
        c = launch.projection_config(tokens, units, dim, inner, itemsize, 132)
        assert c["TILES"] * c["BLOCK_N"] >= dim > (c["TILES"] - 1) * c["BLOCK_N"]
        per_split = launch.per_split(inner, c["splits"], c)
        assert per_split * c["splits"] >= inner and per_split % c["BLOCK_K"] == 0
        assert not c["EVEN"] or inner % c["BLOCK_K"] == 0
        assert all(c[k] & (c[k] - 1) == 0 and c[k] > 0 for k in ("splits", "BLOCK_T", "BLOCK_N", "BLOCK_K", "FINISH_T"))
        shared = itemsize * c["num_stages"] * c["BLOCK_K"] * (c["BLOCK_N"] + c["BLOCK_T"])
        assert shared <= 99 * 1024
    sizes = (1, 16, 64, 65, 4096), (1, 8, 64, 160, 256, 384, 1024), (7, 2048, 7168), (1, 8)
    for tokens, experts, hidden, groups in itertools.product(*sizes):
        if experts % groups:
            continue
        for same, one in itertools.product((True, False), (True, False)):
            c = launch.router_config(tokens, experts, hidden, groups, itemsize, same, one and tokens <= 64, 132)
            assert c["TILES"] * c["BLOCK_E"] >= experts and c["BLOCK_G"] * c["BLOCK_P"] >= experts
            assert c["BLOCK_T"] >= tokens or not (one and tokens <= 64)
            assert launch.per_split(hidden, c["splits"], c) * c["splits"] >= hidden


def test_a_decode_projection_fills_the_chip():
    """Enough programs read the weight, and none of them is shorter than two tiles."""
    c = launch.projection_config(8, 48, 128, 4096, 2, 132)
    assert c["TILES"] * 48 * c["splits"] >= 2 * 132 and 4096 // c["splits"] >= 2 * c["BLOCK_K"] and c["BLOCK_T"] == 16


def test_check_choice_sees_every_mistake():
    args, options = router_inputs(T=6, num_groups=4, topk_groups=2, scoring="sigmoid", bias=True)
    normed, _, weights, ids, counts = fusion.fused_norm_router(*args, **options)
    del options["top_k"]

    def judged(weights=weights, ids=ids, counts=counts):
        return chains.check_choice(normed, args[3], weights, ids, counts, **options)

    assert judged()
    assert not judged(weights=weights * 1.001)
    assert not judged(ids=ids.flip(1), weights=weights.flip(1))
    assert "twice" in judged(ids=ids[:, [0, 0, 1]]).reason
    assert not judged(counts=counts.flip(0))
    other = ids.clone()
    other[2, 2] = next(e for e in range(16) if e not in ids[2].tolist())
    assert not judged(ids=other)
    other[2, 2] = 16
    assert "no expert" in judged(ids=other).reason


def test_check_budget_sees_an_error():
    exact = torch.randn(50, dtype=torch.float64)
    low = exact.half()
    assert chains.check_budget([low], [exact], [low])
    assert not chains.check_budget([low + 0.01], [exact], [low])
    assert not chains.check_budget([torch.where(exact == exact[3], NAN, low)], [exact], [low])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts operations, not kernels")
def test_launches_and_bytes():
    """The chain is a dozen operations or more, the call is one; bytes are of tensors that operations touch."""
    args, options = qkv_inputs(norms=True)
    assert chains.launches(lambda: fusion.fused_qkv_rope_append(*args, **options, out=torch.empty(5, 4, 16)), DEVICE) == 1
    assert chains.launches(lambda: chains.chain_qkv(*args, **options), DEVICE) >= 12
    x = torch.zeros(8, 16)
    with chains.Traffic() as traffic:
        (x.T + x.T)[0]
    assert traffic.operations == 1 and traffic.bytes == 3 * 8 * 16 * 4
    with chains.Traffic() as traffic:
        x.index_copy_(0, torch.tensor([1, 2]), torch.ones(1, 16).expand(2, 16))
    assert traffic.bytes < 8 * 16 * 4 + 100


def test_every_case_of_the_benchmark_runs_small(on_torch):
    """The benchmark's own inputs and checks, at a size for the interpreter, on the PyTorch path."""
    small = {"Hq": 4, "Hkv": 2, "D": 16, "rot_dim": 16, "H": 2, "rank": 32, "E": 16}
    for case in chains.cases():
        case.tokens, case.hidden = 6, 64
        case.shape = {k: min(v, small[k]) if k in small else v for k, v in case.shape.items()}
        args, options = case.make(torch.device("cpu"), torch.float32)
        exact_args = [x.double() if x.is_floating_point() else x for x in args]
        exact_options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        reference = case.outputs(case.chain(*exact_args, **exact_options), exact_args)
        outputs = case.outputs(case.call(*args, **options), args)
        for got, want in zip(outputs, reference, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        assert case.bytes_moved(args, options) > sum(x.numel() * x.element_size() for x in outputs)


def test_torch_compile_once_for_all_lengths(on_torch):
    torch.compiler.reset()
    compiled = torch.compile(fusion.fused_norm_router, fullgraph=True, dynamic=True, backend="aot_eager")
    for T in (5, 7, 12):
        args, options = router_inputs(T=T)
        for a, b in zip(compiled(*args, **options), fusion.fused_norm_router(*args, **options)):
            assert torch.equal(a, b)


def test_an_empty_cache_takes_nothing(path):
    """No pages, and no slot asked for: queries are computed all the same."""
    args, options = qkv_inputs()
    want = fusion.fused_qkv_rope_append(*args, **options)
    args[5:7], args[7] = [cache[:0] for cache in args[5:7]], torch.full_like(args[7], -1)
    assert torch.equal(fusion.fused_qkv_rope_append(*args, **options), want)


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    """One of each kernel without a GPU: nothing spills, products are on the tensor cores, loads are 16 bytes wide."""
    pytest.importorskip("triton.backends.nvidia")
    code = """
from ladder.lab.compile.compiler import SHARED_MEMORY_LIMIT, compile_for
from ladder.lab.compile.cases_step08_fusion import compile_cases

for name, kernel, args, kwargs in compile_cases(SHARED_MEMORY_LIMIT["sm_90"], (9, 0)):
    if any(name.startswith(start) for start in STARTS):
        c = compile_for("sm_90", kernel, *args, **kwargs)
        wide = c.count("LDG.E.128") + c.count("LDGSTS.E.BYPASS.128")
        print(kernel.__name__, c.spills, c.shared <= SHARED_MEMORY_LIMIT["sm_90"], c.count("HMMA") + c.count("HGMMA") > 0, wide > 0)
"""
    starts = ("qkv_rope_append T8 4096 32/8", "rope_append T4096 4096 32/8", "mla_append T8 2048 heads 16 absorbed 512 bf",
              "add_norm T4096 2048 top 6 of 64 bf", "norm_router T8 7168 top 8 of 256 groups 4 of 8 bfloat16 gate bf")  # fmt: skip
    lines = [line.split() for line in python(code.replace("STARTS", repr(starts))).splitlines()]
    assert len(lines) == len(starts)
    for kernel, spills, fits, tensor_cores, wide in lines:
        assert (spills, fits, wide) == ("0", "True", "True"), kernel
        assert tensor_cores == str(kernel not in ("dflash2_rope_append", "dflash2_add_norm")), kernel


def test_compile_cases_cover_every_kernel():
    from ladder.lab.compile.cases_step08_fusion import compile_cases
    from ladder.step08_dflash2.fusion import kernel as fusion_kernel

    found = list(compile_cases(227 * 1024, (9, 0)))
    names = [name for name, *_ in found]
    assert len(set(names)) == len(names)
    launched = {kernel.__name__ for _, kernel, _, _ in found}
    assert launched == {"dflash2_qkv_rope_append", "dflash2_rope_append", "dflash2_mla_append", "dflash2_add_norm", "dflash2_norm_router"}
    assert launched <= set(vars(fusion_kernel))


# One launch or two


def test_a_call_takes_the_way_that_was_measured_to_be_faster():
    """Per case of the record: the way that the code chooses today, and the one it chose then, within 5 % of the faster one."""
    cases = {}
    for row in results.load("step08_fusion")["rows"]:
        cases.setdefault(tuple(row["case"][name] for name in ("op", "model", "T", "hidden")), {})[row["impl"]] = row
    compared = 0
    for (op, model, tokens, hidden), ways in cases.items():
        if "one_launch" not in ways:
            continue
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device="meta")
        one = fusion.few_rows_to_route(x, x) if op == "router" else tokens <= fusion.ONE_LAUNCH_TOKENS
        chosen, other = ("one_launch", "two_launches") if one else ("two_launches", "one_launch")
        assert ways[chosen]["ms"]["median"] <= 1.05 * ways[other]["ms"]["median"], (op, model, tokens, chosen)
        assert ways["step08_dflash2"]["launches"] == ways[chosen]["launches"], (op, model, tokens)
        compared += 1
    assert compared >= 8
