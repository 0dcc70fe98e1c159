"""Switch the ideas of the Hopper kernel on one by one: ``python -m ladder.bench variants --json FILE``.

Every variant is the kernel that ships, launched with some of its ideas off, on the same inputs, timed in turn with the
others and with FlashAttention-3, and checked before and after. Chapter 08 draws the file.
"""

import argparse
import math
import os
import subprocess
import sys
import time

import torch

from ladder.lab import results
from ladder.lab.parity import Oracle
from ladder.lab.peers import PEERS
from ladder.lab.problem import AttentionProblem
from ladder.lab.roofline import measure_limits

from .harness import Measure, Work

EVERY_HEAD = 1 << 20
PROCESSORS = 132
WORKERS = min(14, max(1, (os.cpu_count() or 2) - 2))
BASE = dict(DYNAMIC=False, section=EVERY_HEAD, K_AHEAD=False, TURNS=False, QBUF=1, CHAINS=False, HALVES=False, ALIGNED=False)
# name, what it switches on, predicted factor under the diagonal and without it, why
STEPS = (
    ("hopper_base", {}, None, None,
     "TMA, wgmma and warps with one job each; a program a processor, work by a fixed stride over all heads"),
    ("+ticket", dict(DYNAMIC=True), 1.10, 1.0,
     "work drawn from a counter: under the diagonal a fixed stride gives some programs more, without it all tiles weigh the same"),
    ("+sections", dict(section=None), 1.05, 1.05,
     "heads in sections whose K and V stay in the L2 cache, so that fewer tiles come from memory"),
    ("+k_ahead", dict(K_AHEAD=True), 1.01, 1.01,
     "the next K is asked for before this V, and the first K of the next work before its Q"),
    ("+two_q", dict(QBUF=2), 1.02, 1.01,
     "Q in two buffers: that of the next work comes while this one is computed"),
    ("+chains", dict(CHAINS=True, HALVES=True), 1.02, 1.02,
     "maxima in four chains of comparisons, at d64 exponentials in two halves: a chain that waits for itself leaves slots empty"),
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
    """[(name, launch parameters, whether the kernel that ships does it)] of the variants of a problem, each with the ideas before it
    that ship; an idea that the problem has no use for is left out.
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
        found.append((name, {key: value for key, value in tried.items() if value is not None}, bool(ships) or not change))
        config = {**config, **ships}
    return found


def work(problem, device):
    """The variants and FlashAttention-3 on one problem."""
    from ladder.step08_dflash2.hopper.prefill import launch_prefill

    q, k, v = problem.make(device)
    variants = [(name, config) for name, config, _ in configs(problem)]
    outs = {name: q.new_empty(*q.shape[:3], problem.Dv) for name, _ in variants}

    def run(name, config):
        launch_prefill(
            q, k, v, outs[name], None, causal=problem.causal, scale=problem.D**-0.5, num_splits=1, config=config
        )
        return outs[name]

    impls = {name: lambda name=name, config=config: run(name, config) for name, config in variants}
    for peer in PEERS:
        if peer.name == "fa3" and peer.why_not(problem, device) is None:
            impls[peer.name] = lambda call=peer.build(problem): call(q, k, v)
    rows = 512 if problem.Sq <= 4096 else 64
    return Work(problem.case(), impls, lambda: Oracle(q, k, v, causal=problem.causal, sample_rows=rows), outs, flops=problem.flops)


def annotate(row, kept):
    """Say in a row of a variant what was predicted of it and why, and where the kernel does without it (``kept``, by name)."""
    if kept.get(row["impl"]) is False:
        row["kept"] = False
    for name, _, causal, dense, why in STEPS:
        if row["impl"] == name:
            predicted = causal if row["case"]["causal"] else dense
            row["why"] = why
            if predicted:
                row["predicted"] = predicted
    return row


def warm(share, device):
    """Compile every WORKERS-th variant, from ``share`` on, for the process that measures."""
    every = [(AttentionProblem(**shape, dtype="bfloat16"), variant) for shape in CASES.values() for variant in range(len(STEPS))]
    for problem, variant in every[share::WORKERS]:
        if variant < len(configs(problem)):
            work(problem, device).impls[configs(problem)[variant][0]]()
    torch.cuda.synchronize()


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.bench variants", description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="bench_variants.json", help="file for the results")
    parser.add_argument("--minutes", type=float, default=3.0, help="start no new case after this long")
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs a GPU of compute capability 9.0, which the kernel is written for")
    start, device = time.time(), torch.device("cuda", torch.cuda.current_device())
    if args.warm is not None:
        return warm(args.warm, device)
    for process in [subprocess.Popen([sys.executable, "-m", "ladder.bench", "variants", "--warm", str(i)]) for i in range(WORKERS)]:
        process.wait()
    limits = measure_limits(device)
    bench = Measure(device, math.inf)
    for name, shape in CASES.items():
        if time.time() - start > 60 * args.minutes:
            print(f"out of time before {name}")
            break
        problem = AttentionProblem(**shape, dtype="bfloat16")
        before = len(bench.rows)
        bench.work(work(problem, device), name)
        kept = {variant: ships for variant, _, ships in configs(problem)}
        bench.rows[before:] = [annotate(row, kept) for row in bench.rows[before:]]
        results.write(results.document(bench.rows, device=device, limits=limits, failures=bench.failures), args.json)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
