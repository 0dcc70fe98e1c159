"""Switch the ideas of the Hopper kernel on one by one: ``python -m ladder.bench variants --json FILE``.

Every variant is the kernel that ships, launched with some of its ideas off, on the same inputs, timed in turn with the
others and with FlashAttention-3, and checked before and after. Chapter 08 draws the file.
"""

import functools
import sys

import torch

from ladder.lab.parity import Oracle
from ladder.lab.peers import PEERS
from ladder.lab.problem import AttentionProblem

from . import harness
from .harness import Cell, Suite, Work

EVERY_HEAD = 1 << 20
PROCESSORS = 132
BASE = dict(
    DYNAMIC=False, section=EVERY_HEAD, K_AHEAD=False, TURNS=False, QBUF=1, CHAINS=False, HALVES=False, ALIGNED=False
)
# name, what it switches on, predicted factor under the diagonal and without it, why
STEPS = (
    ("hopper_base", {}, None, None,
     "TMA, wgmma and warps with one job each; a program a processor, work by a fixed stride over all heads"),
    ("+ticket", dict(DYNAMIC=True), 1.10, 1.0,
     "work drawn from a counter: under the diagonal a fixed stride gives some programs more, without it all tiles "
     "weigh the same"),
    ("+sections", dict(section=None), 1.05, 1.05,
     "heads in sections whose K and V stay in the L2 cache, so that fewer tiles come from memory"),
    ("+k_ahead", dict(K_AHEAD=True), 1.01, 1.01,
     "the next K is asked for before this V, and the first K of the next work before its Q"),
    ("+two_q", dict(QBUF=2), 1.02, 1.01,
     "Q in two buffers: that of the next work comes while this one is computed"),
    ("+chains", dict(CHAINS=True, HALVES=True), 1.02, 1.02,
     "maxima in four chains of comparisons, at d64 exponentials in two halves: a chain that waits for itself leaves "
     "slots empty"),
    ("+aligned", dict(ALIGNED=True), 1.02, None,
     "the diagonal runs through the corners of the tiles: one masked tile a work, and no code for masks in the loop"),
    ("+turns", dict(TURNS=True), 1.03, 1.05,
     "the warp groups take turns: one fills the tensor cores while another does its exponentials"),
)  # fmt: skip
CASES = {
    "d128 causal 16k": dict(B=1, Hq=16, Sq=16384, Sk=16384, D=128, causal=True),
    "d128 dense 16k": dict(B=1, Hq=16, Sq=16384, Sk=16384, D=128, causal=False),
    "d128 causal 1k": dict(B=16, Hq=16, Sq=1024, Sk=1024, D=128, causal=True),
    "d64 causal 16k": dict(B=1, Hq=32, Sq=16384, Sk=16384, D=64, Dv=64, causal=True),
}


def configs(problem):
    """[(name, launch parameters, whether the kernel that ships does it)] of the variants of a problem, each with the
    ideas before it that ship; an idea that the problem has no use for is left out.
    """
    from ladder.step08_dflash2.hopper.prefill import plan_prefill

    p, right = problem, 0 if problem.causal else None
    shipped = plan_prefill(p.B, p.Hq, p.Hq // p.Hkv, p.Sq, p.Sk, p.D, p.Dv, right, False, False, None, PROCESSORS, 1)[0]
    config, found = dict(BASE), []
    for name, change, *_ in STEPS:
        ships = {key: value for key, value in change.items() if key == "section" or shipped[key] == value}
        tried = {**config, **(ships or change)}
        if name == "+aligned" and not ships:  # asked for, it would be refused: the kernel needs corners to run through
            continue
        found.append(
            (name, {key: value for key, value in tried.items() if value is not None}, bool(ships) or not change)
        )
        config = {**config, **ships}
    return found


def work(problem, device, peers=True):
    """The variants and FlashAttention-3 on one problem."""
    from ladder.step08_dflash2.hopper.prefill import launch_prefill

    q, k, v = problem.make(device) if peers else problem.empty(device)
    variants = configs(problem)
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name, *_ in variants}

    def run(name, config):
        launch_prefill(
            q, k, v, outs[name], None, causal=problem.causal, scale=problem.D**-0.5, num_splits=1, config=config
        )
        return outs[name]

    impls = {name: functools.partial(run, name, config) for name, config, _ in variants}
    for peer in PEERS if peers else ():
        if peer.name == "fa3" and peer.why_not(problem, device) is None:
            impls[peer.name] = functools.partial(peer.build(problem), q, k, v)
    rows = 512 if problem.Sq <= 4096 else 64
    oracle = lambda: Oracle(q, k, v, causal=problem.causal, sample_rows=rows)  # noqa: E731
    kept = {name: ships for name, _, ships in variants}
    said = lambda name, fn: about(name, problem.causal, kept.get(name))  # noqa: E731
    return [
        Work(
            problem.case(), impls, oracle, {name: [out] for name, out in outs.items()}, flops=problem.flops, about=said
        )
    ]


def about(variant, causal, kept):
    """Fields of a variant's row: what was predicted of it and why, and whether the kernel does without it."""
    for name, _, with_diagonal, without, why in STEPS:
        if name == variant:
            predicted = with_diagonal if causal else without
            return {
                **({"kept": False} if kept is False else {}),
                "why": why,
                **({"predicted": predicted} if predicted else {}),
            }
    return {}


def cells(args):
    """A cell a problem."""
    problems = {name: AttentionProblem(**shape, dtype="bfloat16") for name, shape in CASES.items()}
    return [Cell("prefill", name, functools.partial(work, problem)) for name, problem in problems.items()]


def why_not():
    """Why this GPU cannot run the kernel, or None."""
    fits = torch.cuda.get_device_capability() == (9, 0)
    return None if fits else "needs a GPU of compute capability 9.0, which the kernel is written for"


main = functools.partial(harness.main, Suite(
    "variants", __doc__, "bench_variants.json", 3.0, ("prefill",), cells, why_not=why_not, strict=True,
))  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
