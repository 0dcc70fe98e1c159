"""Hardware counters of the ladder's kernels, read by Nsight Compute: ``python -m ladder.bench ncu --json FILE``.

Each case is one call on an H100 or H200 under ``ncu``, which replays its kernels until all counters are read. The
clocks are left as they are, so that the shares belong to the times that the other benchmarks measure. Reading counters
may need an administrator's permission (ERR_NVGPUCTRPERM).
"""

import argparse
import csv
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from ladder.lab import results
from ladder.lab.decode_problem import DecodeProblem
from ladder.lab.problem import AttentionProblem
from ladder.rungs import find

PREFILL = AttentionProblem(Sq=16384, Sk=16384, Hq=16, Hkv=16, D=128, Dv=128, dtype="bfloat16")
DECODE = DecodeProblem(B=8, context=32768)
CASES = {"prefill": (PREFILL, (5, 7, 8)), "decode": (DECODE, (6, 7, 8))}
SHARES = {  # field of a row -> counter, in per cent of what the unit could do over the whole kernel
    "tensor_cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponentials": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "instructions": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "device_memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "compute": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
}
REGISTERS = "launch__registers_per_thread"
# The loads and stores of spilled registers.
LOCAL = ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum")
DURATION = "gpu__time_duration.sum"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip


def call(kind, rung):
    """The call of ``rung`` that is profiled, as a function without arguments."""
    problem, module = CASES[kind][0], rung.module
    inputs = tuple(problem.make("cuda"))
    if kind == "prefill":
        return functools.partial(module.attention, *inputs)
    return functools.partial(module.dflash2_decode if "windows" in rung.features else module.paged_decode, *inputs)


def child(kind, rung):
    """Run one call between the two marks that tell ncu where to look."""
    run = call(kind, rung)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def command(ncu, kind, rung):
    """The command line that reads the counters of one case."""
    wanted = [DURATION, *SHARES.values(), REGISTERS, *LOCAL, *map(STALL.format, STALLS)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    program = [sys.executable, "-m", "ladder.bench.ncu", "--child", f"{kind}:{rung.number}"]
    return [ncu, *options, "--metrics", ",".join(wanted), *program]


def read(text):
    """[(kernel, {counter: number})] of what ``ncu --csv --page raw`` printed, in the order of the launches.

    Raises:
        ValueError: there is no table in the text.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        said = [line for line in text.splitlines() if "ERROR" in line] or text.strip().splitlines()[-1:]
        raise ValueError(f"ncu: no counters were read: {'; '.join(said) or 'it printed nothing'}")
    names, units, *launches = rows
    found = []
    for launch in launches:
        numbers = {}
        for name, unit, value in zip(names, units, launch):
            value = value.replace(",", "")
            if re.fullmatch(r"-?\d+(\.\d+)?", value):
                numbers[name] = float(value) * {"us": 1e3, "ms": 1e6, "s": 1e9}.get(unit, 1.0)
        found.append((launch[names.index("Kernel Name")].split("(")[0], numbers))
    return found


def row(kind, rung, launches):
    """The results row of one call: its longest kernel's counters, and the time of all its kernels.

    ``shares`` are 0 .. 1 of what a unit could do; ``stalls`` says of the time of an average warp which part it waited
    for what ("selected" is the part in which it issued an instruction).
    """
    name, counters = max(launches, key=lambda launch: launch[1][DURATION])
    cycles = {reason: counters.get(STALL.format(reason), 0.0) for reason in STALLS}
    whole = sum(cycles.values()) or 1.0
    stalls = {reason: round(n / whole, 4) for reason, n in sorted(cycles.items(), key=lambda item: -item[1])}
    return results.row(
        {**CASES[kind][0].case(), "mode": f"ncu_{kind}"}, rung.name,
        kernel=name, us=round(counters[DURATION] / 1e3, 2), launches=len(launches),
        us_all=round(sum(numbers[DURATION] for _, numbers in launches) / 1e3, 2),
        shares={field: round(counters[counter] / 100, 4) for field, counter in SHARES.items() if counter in counters},
        registers=int(counters.get(REGISTERS, 0)), spill_instructions=int(sum(counters.get(name, 0) for name in LOCAL)),
        stalls={reason: share for reason, share in stalls.items() if share >= 0.001},
    )  # fmt: skip


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.bench ncu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--ncu", default="ncu", metavar="PATH", help="the program (default: %(default)s)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        kind, _, number = args.child.partition(":")
        child(kind, find(int(number)))
        return 0
    ncu = shutil.which(args.ncu) or shutil.which("/usr/local/cuda/bin/ncu")
    if not torch.cuda.is_available() or ncu is None:
        parser.error("want a CUDA device and Nsight Compute (--ncu PATH)")
    rows = []
    for kind, (_, numbers) in CASES.items():
        for rung in map(find, numbers):
            done = subprocess.run(command(ncu, kind, rung), capture_output=True, text=True)
            try:
                rows.append(row(kind, rung, read(done.stdout)))
            except ValueError as error:
                print(f"{kind} {rung.name}: {error}\n{done.stderr[-2000:]}", file=sys.stderr)
                return 1
            busy = ", ".join(f"{field} {share:.0%}" for field, share in rows[-1]["shares"].items())
            print(f"{kind} {rung.name}: {rows[-1]['kernel']}, {rows[-1]['us']:,.0f} us, {busy}", flush=True)
    if args.json:
        results.write(results.document(rows, device="cuda", ncu=version(ncu)), args.json)
    return 0


def version(ncu):
    """What the program says of itself."""
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version ([\d.]+)", said)
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(main())
