"""``python -m ladder``: climb every rung: parity, speed, memory, share of this machine's limit, in one table."""

import argparse
import signal
import sys
import threading
from pathlib import Path

import torch

from . import rungs
from .lab import interpret

MASKS = {"dense": (False,), "causal": (True,), "both": (False, True)}


def parse_args(argv=None):
    from .lab.problem import DTYPES, SHAPES

    parser = argparse.ArgumentParser(
        prog="python -m ladder",
        description="Climb the ladder: run every rung on real and synthetic attention problems, check each against the "
        "rung before it and a float64 oracle, and compare its time and memory with the limits of this machine.",
    )
    add = parser.add_argument
    add("--rungs", default="all", metavar="1-8", help="rungs to climb: all, 3, 1-5, 1,5 or step05_fused")
    add("--shape", action="append", choices=["minilm", *SHAPES],
        help="head layout (repeatable): minilm is real captured input, the others are random numbers")  # fmt: skip
    add("--seqlen", type=int, nargs="+", metavar="N", help="sequence lengths of the random problems")
    add("--mask", choices=[*MASKS], default="both")
    add("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU, float16 on a CPU")
    add("--device", choices=["cuda", "cpu"], help="default: the GPU when there is one")
    add("--quick", action="store_true", help="the real input and one small random problem")
    add("--record", action="store_true", help="the published set of problems (needs a GPU, minutes)")
    add("--no-peers", action="store_true", help="leave out SDPA, FlashAttention and the like")
    add("--json", metavar="FILE", help="write the results as JSON; - is standard output")
    add("--keep", action="store_true",
        help="keep rows of that file for problems and rungs that this run does not measure")  # fmt: skip
    add("--plot", metavar="FILE", help="write a figure (.png, .svg or .pdf)")
    args = parser.parse_args(argv)
    for option, mistake in mistakes(args):
        parser.error(f"argument --{option}: {mistake}")
    try:
        args.rungs = rungs.parse(args.rungs)
    except ValueError as error:
        parser.error(f"argument --rungs: {error}")
    return args


def mistakes(args):
    """(option, what is wrong with it) of arguments that argparse lets through."""
    gpu = torch.cuda.is_available()
    if args.seqlen and min(args.seqlen) < 1:
        yield "seqlen", f"{min(args.seqlen)} is no length; want at least 1"
    for option, target in (("json", args.json), ("plot", args.plot)):
        if target and target != "-" and not Path(target).absolute().parent.is_dir():
            yield option, f"no folder {Path(target).parent} to write {Path(target).name} into"
        if target and target != "-" and Path(target).is_dir():
            yield option, f"{target} is a folder; want a file"
    if args.keep and args.json in (None, "-"):
        yield "keep", "wants --json FILE, the file whose rows it keeps"
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        yield "plot", f"{args.plot!r} ends in {Path(args.plot).suffix!r}; want .png, .svg or .pdf"
    for option, given in (("shape", args.shape), ("seqlen", args.seqlen), ("mask", args.mask != "both")):
        if (args.quick or args.record) and given:
            yield option, f"not with --{'quick' if args.quick else 'record'}, whose problems are fixed"
    if args.dtype == "bfloat16" and (args.device == "cpu" or not gpu):
        yield "dtype", "Triton's interpreter multiplies bfloat16 wrongly; want float16 or float32 on a CPU"
    if args.device == "cuda" and not gpu:
        yield "device", "cuda was asked for, and PyTorch sees no GPU"
    if args.record and not gpu:
        yield "record", "the published set needs a GPU"


def main(argv=None):
    args = parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        interpret.enable()
    if not interpret.has_triton():
        skipped = [r.name for r in args.rungs if r.needs_triton]
        args.rungs = [r for r in args.rungs if not r.needs_triton]
        if skipped:
            print(f"Triton is not installed: leaving out {', '.join(skipped)}", file=sys.stderr)

    from . import climb
    from .lab import results

    climb.quiet()
    problems = climb.problems(
        device, shapes=args.shape, lengths=args.seqlen, masks=MASKS[args.mask], dtype=args.dtype,
        quick=args.quick, record=args.record,
    )  # fmt: skip
    machine = results.machine(device)
    try:
        if args.keep:  # a file that cannot be added to is refused before anything is measured
            results.kept_rows(args.json, [], machine)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    steps, limits = measure(args, device, machine, problems)
    left = [problem for problem in problems if problem not in steps]
    if left:
        print(f"interrupted: {len(left)} of {len(problems)} problems are not measured", file=sys.stderr)
    if not steps:
        return 130
    try:
        write(args, device, machine, limits, steps, left)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    all_ok = all(step.ok for found in steps.values() for step in found if step.is_rung)
    if not all_ok:
        print("some rung failed parity; see FAIL above", file=sys.stderr)
    return 130 if left else 0 if all_ok else 1


def measure(args, device, machine, problems):
    """({problem: its steps}, limits of this machine); each problem is shown when done. An interrupt ends it early."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import climb
    from .lab import roofline

    console, steps, limits = climb.console(to_stderr=args.json == "-"), {}, None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    listens = threading.current_thread() is threading.main_thread()
    # Stopped by SIGINT or SIGTERM, what is measured is kept.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if listens else None
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("measuring this machine's limits", total=len(problems) * len(args.rungs) + 1)
            limits = roofline.measure_limits(device, quick=not args.record)
            console.print(
                f"{machine['gpu'] or 'CPU ' + machine['cpu']}, torch {machine['torch']}, triton {machine['triton']}: "
                f"matrix product {_rate(limits.matmul_tflops, 'FLOP/s')}, read {_rate(limits.read_tbs, 'B/s')}, "
                f"copy {_rate(limits.copy_tbs, 'B/s')}"
            )
            progress.advance(task)
            for problem in problems:
                progress.update(task, description=problem.label())
                found = climb.climb(
                    problem, args.rungs, device, with_peers=not args.no_peers,
                    budget_ms=300.0 if device.type == "cuda" else 100.0,
                    on_step=lambda step: progress.advance(task) if step.is_rung else None,
                )  # fmt: skip
                console.print()
                console.print(climb.table(problem, found, limits))
                steps[problem] = found
    except KeyboardInterrupt:
        pass
    finally:
        if listens:
            signal.signal(signal.SIGTERM, before)
    return steps, limits


def write(args, device, machine, limits, steps, left):
    """Write the record and the figure that were asked for. ValueError: a file cannot be written."""
    from .lab import results

    rows = [step.row for found in steps.values() for step in found]
    kept, missing = [], [problem.label() for problem in left]
    if args.keep:
        try:
            kept = results.kept_rows(args.json, rows, machine, by_impl=True)
            known = [row["case"] for row in kept]
            missing = [problem.label() for problem in left if problem.case() not in known]
            missing = results.still_not_run(args.json, missing, [problem.label() for problem in steps])
        except ValueError as error:  # the file has changed since it was looked at; what was measured is kept
            args.json = str(Path(args.json).with_suffix(".new.json"))
            print(f"{error}; this run alone goes to {args.json}", file=sys.stderr)
    extra = results.kept_note(args.json) if kept else {}
    if missing:
        extra |= {"complete": False, "not_run": missing}
    doc = results.document(rows + kept, device=device, limits=limits, **extra)
    if args.json:
        results.write(doc, args.json)
    if args.plot:
        from .chapters import readme

        results.write_figure(args.plot, readme.climb_figure(doc), dpi=150)


def _rate(tera, unit):
    """12.3 T, G or M of ``unit``, from ``tera`` 1e12 of them."""
    for prefix, factor in (("T", 1), ("G", 1e-3), ("M", 1e-6)):
        if tera >= factor:
            return f"{tera / factor:.3g} {prefix}{unit}"
    return f"{tera * 1e12:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
