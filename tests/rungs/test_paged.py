# ruff: noqa: E501  (rows of a table)
"""What every rung promises that attends over pages: the edge cases of decode, and the errors a user sees."""

from functools import partial

import numpy as np
import pytest
import torch
from support.decode_checks import DEVICE, LAYOUTS, PROBLEMS, SMALL, check_decode, inputs_of, latent_inputs

from ladder import contract
from ladder.lab.decode_problem import DecodeOracle, DecodeProblem, PagedInputs
from ladder.lab.parity import nan_allocations, poison
from ladder.rungs import find
from ladder.step06_paged.attention import workspace_elements
from ladder.step07_dflash1 import DecodeWorkspace, mla_decode, paged_prefill

ON_GPU = DEVICE.type == "cuda"
DECODE = {"step06_paged": find(6).module.paged_decode, "step07_dflash1": find(7).module.paged_decode}

decodes = pytest.mark.parametrize("decode", DECODE.values(), ids=DECODE)


@decodes
@pytest.mark.parametrize("name", PROBLEMS)
def test_edge(decode, name):
    check_decode(decode, inputs_of(PROBLEMS[name]), scale=PROBLEMS[name].scale)


@decodes
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_layouts(decode, layout):
    check_decode(decode, inputs_of(PROBLEMS["group of 3"], layout))


@decodes
@pytest.mark.parametrize("splits", (1, 2, 3, 7, 50))
def test_every_number_of_splits(decode, splits):
    """Also more splits than tiles: the empty ones neither count nor are read."""
    check_decode(decode, inputs_of(PROBLEMS["splits"]), num_kv_splits=splits)


@decodes
def test_a_fixed_number_of_splits_ignores_the_rest_of_the_batch(decode):
    q, k, v, table, lens = inputs_of(PROBLEMS["page edges"])
    together = decode(q, k, v, table, lens, num_kv_splits=np.int64(3))
    for b in range(len(lens)):
        alone = decode(q[b : b + 1], k, v, table[b : b + 1], lens[b : b + 1], num_kv_splits=3)
        assert torch.equal(alone[0], together[b])


@decodes
def test_pages_shared_between_sequences(decode):
    """Three sequences start with the same two pages; one of them is nothing but those."""
    inputs = inputs_of(DecodeProblem(B=3, lengths=(32, 40, 70), max_context=96, **SMALL))
    inputs.block_table[1:, :2] = inputs.block_table[0, :2]
    check_decode(decode, inputs)


@decodes
@pytest.mark.parametrize("scores", ("huge", "sunken"))
def test_logits_of_5e4(decode, scores):
    inputs = inputs_of(PROBLEMS["group of 3"].replace(lengths=(0, 70)))  # float16: a merge is as exact as a float32 lse near 5e4
    size = (5e4 / 32) ** 0.5
    if scores == "huge":
        inputs.q.copy_(inputs.q.sign() * size)
        inputs.k_cache.copy_(inputs.k_cache.sign() * size)
    else:  # all at -5e4: below any sentinel that is not -inf
        inputs.q.fill_(size)
        inputs.k_cache.copy_(torch.where(inputs.k_cache.isnan(), float("nan"), -size))
    check_decode(decode, inputs, scale=1.0, num_kv_splits=3)


@pytest.mark.parametrize("rung", DECODE)
def test_three_dimensional_q_out_and_workspace(rung):
    decode, (q, *rest) = DECODE[rung], inputs_of(PROBLEMS["group of 7"])
    want, want_lse = decode(q, *rest, return_lse=True, num_kv_splits=3)
    out = torch.full((2, 7, 32), float("nan"), dtype=q.dtype, device=DEVICE)
    if rung == "step06_paged":
        workspace = torch.full((workspace_elements(2, 1, 7, 32, 3),), float("nan"), device=DEVICE)
        with pytest.raises(ValueError, match=rf"workspace has 5 elements.*want {workspace.numel()}"):
            decode(q, *rest, num_kv_splits=3, workspace=workspace[:5])
    else:
        workspace = DecodeWorkspace(DEVICE)
    got, lse = decode(q[:, 0], *rest, return_lse=True, num_kv_splits=3, out=out, workspace=workspace)
    assert got.data_ptr() == out.data_ptr() and torch.equal(got, want[:, 0]) and torch.equal(lse, want_lse[:, :, 0])
    with pytest.raises(ValueError, match=rf"{rung}: out has shape \(2, 1, 7, 32\); want \(2, 7, 32\)"):
        decode(q[:, 0], *rest, out=out[:, None])


# What a user gets wrong. Each entry with a call that works: 40 keys of the second sequence, on pages of 16, end in column 2.


def decode_arguments():
    return dict(zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), inputs_of(PROBLEMS["group of 3"])))


def prefill_arguments():
    arguments = decode_arguments()
    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
    return {**arguments, "q": arguments["q"][:, 0], "cu_seqlens_q": starts, "config": dict(BLOCK_M=16, BLOCK_N=16)}


def latent_arguments():
    _, x = latent_inputs(lengths=(5, 40))
    return dict(q=x.q, latent_cache=x.k_cache[:, :, 0], block_table=x.block_table, seq_lens=x.seq_lens, scale=0.2, head_dim_v=32)


ENTRIES = {
    **{f"{rung} decode": (decode, decode_arguments) for rung, decode in DECODE.items()},
    "step07_dflash1 prefill": (paged_prefill, prefill_arguments), "step07_dflash1 mla": (mla_decode, latent_arguments),
}  # fmt: skip
CALLS = {name: partial(lambda entry, make: (entry, make()), *found) for name, found in ENTRIES.items()}
EVERY, SPLIT, CACHES, OURS = tuple(ENTRIES), tuple(ENTRIES)[:2] + ("step07_dflash1 mla",), tuple(ENTRIES)[:3], tuple(ENTRIES)[1:]

# the entries, the exception, what its message says, what is changed in the arguments of a good call
BAD = (
    (EVERY, TypeError, r"q is a list; want a torch.Tensor \(", lambda a: dict(q=[1])),
    (EVERY, ValueError, r"q has shape \(2, 6\); want \(", lambda a: dict(q=a["q"].new_zeros(2, 6))),
    (EVERY, ValueError, "q has dtype torch.int32; want float16 or", lambda a: dict(q=a["q"].int())),
    (CACHES, ValueError, "q has 5 heads; want a multiple of the 2 heads of the cache", lambda a: dict(q=a["q"][..., :5, :])),
    (CACHES, ValueError, "k_cache has dtype torch.float32; want torch.float16, the dtype of q", lambda a: dict(k_cache=a["k_cache"].float())),
    (CACHES, ValueError, r"k_cache has shape .*, 16\); want \(num_pages, page_size, Hkv, 32\)", lambda a: dict(k_cache=a["k_cache"][..., :16])),
    (CACHES, ValueError, "k_cache has shape .*; want pages of at least one token and one head",
     lambda a: dict(k_cache=a["k_cache"][:, :0], v_cache=a["v_cache"][:, :0])),
    (CACHES, ValueError, "v_cache has shape .*; want", lambda a: dict(v_cache=a["v_cache"][1:])),
    (CACHES, NotImplementedError, "head size 257 is above 256; step04_gqa has no limit",
     lambda a: {n: a[n][..., :1].expand(*a[n].shape[:-1], 257) for n in ("q", "k_cache")}),
    (EVERY, ValueError, r"block_table has shape .*; want \(2, max_pages\)", lambda a: dict(block_table=a["block_table"][0])),
    (EVERY, ValueError, r"block_table has shape \(1, .*; want \(2, max_pages\)", lambda a: dict(block_table=a["block_table"][:1])),
    (EVERY, ValueError, "block_table has dtype torch.int64; want int32", lambda a: dict(block_table=a["block_table"].long())),
    (EVERY, ValueError, "seq_lens has dtype torch.float32; want int32", lambda a: dict(seq_lens=a["seq_lens"].float())),
    (EVERY, TypeError, "seq_lens is a list; want a torch.Tensor", lambda a: dict(seq_lens=[5, 40])),
    (EVERY, ValueError, "seq_lens has strides .*; want a contiguous", lambda a: dict(seq_lens=a["seq_lens"].repeat_interleave(2)[::2])),
    (EVERY, ValueError, "scale is nan; want a finite number", lambda a: dict(scale=float("nan"))),
    (EVERY, TypeError, "return_lse is 'no'; want True or False", lambda a: dict(return_lse="no")),
    (EVERY, TypeError, "out is a list; want a torch.Tensor", lambda a: dict(out=[1])),
    (CACHES, ValueError, "out has dtype torch.float32; want torch.float16, the dtype of q", lambda a: dict(out=a["q"].float())),
    (CACHES, ValueError, "out has shape .*; want memory of its own", lambda a: dict(out=a["q"][..., :1, :].expand_as(a["q"]))),
    (SPLIT, ValueError, "num_kv_splits is 0; want an integer of at least 1, or None", lambda a: dict(num_kv_splits=0)),
    (SPLIT, TypeError, "num_kv_splits is 1.5; want an integer of at least 1, or None", lambda a: dict(num_kv_splits=1.5)),
    (SPLIT, TypeError, "workspace is a int; want a", lambda a: dict(workspace=3, num_kv_splits=1)),
    (OURS, TypeError, "config is a list; want a dict of launch parameters, or None", lambda a: dict(config=[1])),
    (OURS[1:2], ValueError, "cu_seqlens_q has 1 sequences; want 2, those of seq_lens",
     lambda a: dict(cu_seqlens_q=a["cu_seqlens_q"][::2].contiguous())),
    (OURS[2:], TypeError, "latent_cache is a list; want a torch.Tensor", lambda a: dict(latent_cache=[1])),
    (OURS[2:], ValueError, r"latent_cache has shape .*; want \(num_pages, page_size, D\)", lambda a: dict(latent_cache=a["latent_cache"][0])),
    (OURS[2:], TypeError, r"scale is None; want the model's, 1/sqrt\(192\)", lambda a: dict(scale=None)),
    *((OURS[2:], TypeError, "head_dim_v is .*; want an integer", lambda a, bad=bad: dict(head_dim_v=bad)) for bad in ("32", 32.0, True)),
    (OURS[2:], ValueError, "head_dim_v is 512; want a power of two, 16 .. 48", lambda a: dict(head_dim_v=512)),
    (OURS[2:], NotImplementedError, "D = 48 is above twice head_dim_v = 16", lambda a: dict(head_dim_v=16)),
)  # fmt: skip


@pytest.mark.parametrize(
    "name, error, words, change",
    [pytest.param(name, *bad, id=f"{name}-{bad[1][:40]}") for names, *bad in BAD for name in names],
)
def test_bad_argument(name, error, words, change):
    call, arguments = CALLS[name]()
    with pytest.raises(error, match=f"^{name.split()[0]}: .*{words}"):
        call(**{**arguments, **change(arguments)})


reads = pytest.mark.skipif(ON_GPU, reason="on a GPU lengths and tables are not read by the host")


@reads
@pytest.mark.parametrize("length", (-1, 97))
@pytest.mark.parametrize("name", CACHES)
def test_a_length_beyond_the_table_is_an_error(name, length):
    call, arguments = CALLS[name]()
    arguments["seq_lens"][1] = length
    with pytest.raises(ValueError, match=f"{name.split()[0]}: seq_lens holds {length}; want 0 .. 96"):
        call(**arguments)


@reads
@pytest.mark.parametrize("entry", (10**7, -1, None), ids=("far", "negative", "the page after the last"))
@pytest.mark.parametrize("name", EVERY)
def test_a_live_entry_that_is_no_page_is_an_error(name, entry):
    call, arguments = CALLS[name]()
    pages = len(arguments.get("k_cache", arguments.get("latent_cache")))
    entry, want = pages if entry is None else entry, call(**arguments)
    arguments["block_table"][1, 3:] = entry
    assert torch.equal(call(**arguments), want)
    arguments["block_table"][1, 2] = entry
    words = rf": block_table\[1, 2\] is {entry}, and seq_lens\[1\] = 40 reaches it; want 0 .. {pages - 1}"
    with pytest.raises(ValueError, match=name.split()[0] + words):
        call(**arguments)


@reads
@pytest.mark.parametrize("name", EVERY)
def test_a_cache_without_pages(name):
    call, arguments = CALLS[name]()
    arguments.update({n: x[:0] for n, x in arguments.items() if n.endswith("_cache")})
    with pytest.raises(ValueError, match=rf"{name.split()[0]}: block_table\[0, 0\] is .*; want no live entry: the cache has no page"):
        call(**arguments)
    arguments["seq_lens"].zero_()
    assert (call(**arguments) == 0).all()


@pytest.mark.parametrize("splits", (1, 3))
@pytest.mark.parametrize("name", EVERY)
def test_a_length_beyond_the_table_is_nan_in_the_kernel(name, splits, monkeypatch):
    """What a GPU does, where the host cannot look: loud in that sequence's rows, right in the others."""
    call, arguments = CALLS[name]()
    if name in SPLIT:
        arguments["num_kv_splits"] = splits
    want = call(**arguments)
    monkeypatch.setattr(contract, "_check_pages", lambda *arguments: None)
    for length in (-1, arguments["block_table"].shape[1] * 16 + 1):
        arguments["seq_lens"][1] = length
        with nan_allocations():
            out, lse = call(**arguments, return_lse=True)
        lse = lse if len(lse) == 2 else lse.T
        assert out[1].isnan().all() and lse[1].isnan().all() and torch.equal(out[0], want[0])


# On a GPU


@pytest.mark.gpu
@decodes
@pytest.mark.parametrize("page_size", (1, 16, 64, 256))
def test_bfloat16_at_size(decode, page_size):
    problem = DecodeProblem(B=5, lengths=(1, 4097, 63, 20000, 0), page_size=page_size, max_context=32768)
    check_decode(decode, problem.make(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", (None, 8, 40))
@pytest.mark.parametrize("rung", DECODE)
def test_same_bits_on_every_run(rung, splits):
    """Splits finish in another order every time; the merge adds them in theirs."""
    decode = DECODE[rung]
    for problem in (DecodeProblem(B=3, lengths=(9000, 1, 4097), max_context=16384), DecodeProblem(B=64, context=4096)):
        inputs, workspace = problem.make(DEVICE), DecodeWorkspace(DEVICE) if rung == "step07_dflash1" else None
        first = decode(*inputs, workspace=workspace, num_kv_splits=splits)
        assert DecodeOracle(inputs).check(first)
        assert all(torch.equal(decode(*inputs, workspace=workspace, num_kv_splits=splits), first) for _ in range(100))
        assert workspace is None or not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPLIT)
def test_graph_captured_short_replayed_long(name):
    shape = dict(Hq=16, Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5) if name.endswith("mla") else {}
    problem = DecodeProblem(B=3, lengths=(32000, 1, 4097), max_context=32768, **shape)
    inputs = problem.make(DEVICE)
    out = torch.empty(*inputs.q.shape[:3], problem.Dv, dtype=inputs.q.dtype, device=DEVICE)
    lens, options = torch.ones_like(inputs.seq_lens), dict(out=out)
    if name.startswith("step07"):
        options["workspace"] = DecodeWorkspace(DEVICE)

    def run():
        if shape:
            mla_decode(inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, lens, scale=problem.scale, **options)
        else:
            DECODE[name.split()[0]](*list(inputs)[:4], lens, **options)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in (inputs.seq_lens, torch.ones_like(lens), inputs.seq_lens):
        lens.copy_(lengths)
        poison(out)
        graph.replay()
        parity = DecodeOracle(PagedInputs(*list(inputs)[:4], lengths), scale=problem.scale).check(out)
        assert parity, parity.reason
