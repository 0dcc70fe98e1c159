"""The edge cases of paged decode and how one is checked: shared by the tests of rungs 06, 07 and 08."""

import torch

from ladder.lab import interpret

interpret.enable_without_gpu()  # before any test module imports triton

from ladder.lab.decode_problem import DecodeOracle, DecodeProblem, PagedInputs  # noqa: E402
from ladder.lab.parity import nan_allocations  # noqa: E402
from support import checks  # noqa: E402
from support.checks import DEVICE  # noqa: E402

SMALL = dict(Hq=4, Hkv=2, D=32, Dv=32, page_size=16, dtype="float16")


def _problem(**changes):
    lengths = changes.get("lengths", (0, 1, 15, 16, 17, 70))
    return DecodeProblem(**{**SMALL, "B": len(lengths), "lengths": lengths, "max_context": 96, **changes})


PROBLEMS = {
    "page edges": _problem(), "page edges, float32": _problem(dtype="float32"),
    "splits": _problem(Hq=2, Hkv=1, lengths=(0, 17, 90)),
    "pages of 1": _problem(page_size=1, lengths=(0, 1, 2, 37)),
    "pages of 3": _problem(page_size=3, lengths=(2, 3, 4, 40)),
    "pages of 48": _problem(page_size=48, lengths=(47, 48, 49, 95)),
    "pages of 64": _problem(page_size=64, lengths=(63, 64, 65, 128, 129), max_context=192),
    "pages of 256": _problem(page_size=256, lengths=(255, 257), max_context=512),
    "one head": _problem(Hq=1, Hkv=1, lengths=(33,)), "MHA": _problem(Hq=3, Hkv=3, lengths=(5, 40)),
    "MQA of 71": _problem(Hq=71, Hkv=1, lengths=(20,)), "group of 3": _problem(Hq=6, Hkv=2, lengths=(5, 40)),
    "group of 6": _problem(Hq=12, Hkv=2, lengths=(5, 40)), "group of 7": _problem(Hq=7, Hkv=1, lengths=(5, 40)),
    "2 new tokens": _problem(q_len=2, lengths=(0, 1, 2, 40)),
    "5 new tokens, some without keys": _problem(q_len=5, Hq=6, lengths=(1, 5, 40)),
    "20 new tokens of a group of 7": _problem(q_len=20, Hq=7, Hkv=1, lengths=(3, 40)),
    **{f"d{d}": _problem(D=d, Dv=d, lengths=(50 if d < 160 else 20,)) for d in (40, 72, 80, 96, 128, 160, 256)},
    "d192/128": _problem(D=192, Dv=128, lengths=(50,)), "d16/64": _problem(D=16, Dv=64, lengths=(50,)),
    "d75, an odd stride": _problem(D=75, Dv=33, lengths=(50,)),
    "negative scale": _problem(scale=-0.4, lengths=(50, 3)), "zero scale": _problem(scale=0.0, lengths=(50, 3)),
    "empty batch": _problem(lengths=()),
}  # fmt: skip


def inputs_of(problem, layout=None):
    """The problem's tensors on the test device, laid out differently when asked."""
    inputs = problem.make(DEVICE)
    return layout(inputs) if layout else inputs


def latent_inputs(**changes):
    """A problem of MLA and its tensors."""
    small = dict(B=2, Hq=5, Hkv=1, D=48, Dv=32, page_size=16, lengths=(0, 40), max_context=64, scale=0.2)
    problem = DecodeProblem(**{**small, "latent": True, "dtype": "float16", **changes})
    return problem, problem.make(DEVICE)


# Ways the same numbers can lie in memory.


def heads_first(inputs):
    """Caches stored as (pages, Hkv, page_size, D), q as (B, Hq, q_len, D)."""
    q, k, v, table, lens = inputs
    return PagedInputs(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), table, lens)


def dims_first(inputs):
    """The last dimension is not the contiguous one."""
    q, k, v, table, lens = inputs
    return PagedInputs(*(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)), table, lens)


def one_buffer(inputs):
    """K and V of a page beside each other in one tensor, as vLLM stores them."""
    q, k, v, table, lens = inputs
    both = torch.stack((k, v), dim=1)
    return PagedInputs(q, both[:, 0], both[:, 1], table, lens)


def wide_table(inputs):
    """The block table is a slice of a larger one, and transposed in memory."""
    q, k, v, table, lens = inputs
    outer = torch.full((table.shape[1] + 3, table.shape[0] + 2), 2**31 - 1, dtype=torch.int32, device=table.device)
    outer[: table.shape[1], 1 : 1 + table.shape[0]] = table.T
    return PagedInputs(q, k, v, outer[: table.shape[1], 1 : 1 + table.shape[0]].T, lens)


def odd_offset(inputs):
    """Storage that starts one element after an aligned address, NaN before and after."""
    q, k, v, table, lens = inputs
    return PagedInputs(*checks.odd_offset(q, k, v), table, lens)


def expanded(inputs):
    """One query for all heads and one KV head for all, by stride 0."""
    q, k, v, table, lens = inputs
    return PagedInputs(q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), table, lens)


LAYOUTS = (heads_first, dims_first, one_buffer, wide_table, odd_offset, expanded)


def check_decode(decode, inputs, *, scale=None, **options):
    """Run ``decode`` with NaN in whatever it allocates; assert output and log-sum-exp; return the output and oracle."""
    oracle = DecodeOracle(inputs, scale=scale, most_sequences=99)
    with nan_allocations():
        out, lse = decode(*inputs, scale=scale, return_lse=True, **options)
    parity = oracle.check(out, lse)
    assert parity, parity.reason
    for b, length in enumerate(inputs.seq_lens.tolist()):  # rows without a key: exactly 0 and -inf
        blind = max(0, min(inputs.q.shape[1], inputs.q.shape[1] - length))
        assert (out[b, :blind] == 0).all() and (lse[b, :, :blind] == float("-inf")).all()
    return out, oracle
