"""``python -m ladder``: climb every rung: parity, speed, memory, share of this machine's limit, in one table."""

import argparse
import signal
import sys
import threading
from pathlib import Path

import torch

from .lab import interpret


def parse_args(argv=None):
    from .lab.problem import DTYPES, SHAPES

    parser = argparse.ArgumentParser(
        prog="python -m ladder",
        description="Climb the ladder: run every rung on real and synthetic attention problems, check each against the "
        "rung before it and a float64 oracle, and compare its time and memory with the limits of this machine.",
    )
    parser.add_argument("--rungs", default="all", metavar="1-8", help="rungs to climb: all, 3, 1-5, 1,5 or step05_fused")
    parser.add_argument(
        "--shape", action="append", choices=["minilm", *SHAPES],
        help="head layout (repeatable): minilm is real captured input, the others are random numbers",
    )  # fmt: skip
    parser.add_argument("--seqlen", type=int, nargs="+", metavar="N", help="sequence lengths of the random problems")
    parser.add_argument("--mask", choices=["dense", "causal", "both"], default="both")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU, float16 on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU when there is one")
    parser.add_argument("--quick", action="store_true", help="the real input and one small random problem")
    parser.add_argument("--record", action="store_true", help="the published set of problems (needs a GPU, minutes)")
    parser.add_argument("--no-peers", action="store_true", help="leave out SDPA, FlashAttention and the like")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - is standard output")
    parser.add_argument("--keep", action="store_true", help="keep rows of that file for problems and rungs that this run does not measure")
    parser.add_argument("--plot", metavar="FILE", help="write a figure (.png, .svg or .pdf)")
    args = parser.parse_args(argv)

    if args.seqlen and min(args.seqlen) < 1:
        parser.error(f"argument --seqlen: {min(args.seqlen)} is no length; want at least 1")
    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target and target != "-" and not Path(target).absolute().parent.is_dir():
            parser.error(f"argument {option}: no folder {Path(target).parent} to write {Path(target).name} into")
        if target and target != "-" and Path(target).is_dir():
            parser.error(f"argument {option}: {target} is a folder; want a file")
    if args.keep and args.json in (None, "-"):
        parser.error("argument --keep: wants --json FILE, the file whose rows it keeps")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"argument --plot: {args.plot!r} ends in {Path(args.plot).suffix!r}; want .png, .svg or .pdf")
    for option in ("shape", "seqlen"):
        if (args.quick or args.record) and getattr(args, option):
            parser.error(f"argument --{option}: not with --{'quick' if args.quick else 'record'}, whose problems are fixed")
    if (args.quick or args.record) and args.mask != "both":
        parser.error(f"argument --mask: not with --{'quick' if args.quick else 'record'}, whose problems are fixed")
    if args.dtype == "bfloat16" and (args.device == "cpu" or not torch.cuda.is_available()):
        parser.error("argument --dtype: Triton's interpreter multiplies bfloat16 wrongly; want float16 or float32 on a CPU")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda was asked for, and PyTorch sees no GPU")
    if args.record and not torch.cuda.is_available():
        parser.error("argument --record: the published set needs a GPU")
    from . import rungs

    try:
        args.rungs = rungs.parse(args.rungs)
    except ValueError as error:
        parser.error(f"argument --rungs: {error}")
    return args


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

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from . import climb
    from .lab import results, roofline

    climb.quiet()
    console = climb.console(to_stderr=args.json == "-")
    masks = {"dense": (False,), "causal": (True,), "both": (False, True)}[args.mask]
    chosen = climb.problems(
        device, shapes=args.shape, lengths=args.seqlen, masks=masks, dtype=args.dtype, quick=args.quick, record=args.record
    )

    if args.keep:  # a file that cannot be added to is refused before anything is measured
        try:
            results.kept_rows(args.json, [], results.machine(device))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2

    rows, all_ok, left = [], True, list(chosen)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    listens = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if listens else None  # stopped either way, what is measured is kept
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("measuring this machine's limits", total=len(chosen) * len(args.rungs) + 1)
            limits = roofline.measure_limits(device, quick=not args.record)
            machine = results.machine(device)
            console.print(
                f"{machine['gpu'] or 'CPU ' + machine['cpu']}, torch {machine['torch']}, triton {machine['triton']}: "
                f"matrix product {_rate(limits.matmul_tflops * 1e12, 'FLOP/s')}, read {_rate(limits.read_tbs * 1e12, 'B/s')}, "
                f"copy {_rate(limits.copy_tbs * 1e12, 'B/s')}"
            )
            progress.advance(task)
            for problem in chosen:
                progress.update(task, description=problem.label())
                steps = climb.climb(
                    problem, args.rungs, device, with_peers=not args.no_peers,
                    budget_ms=300.0 if device.type == "cuda" else 100.0,
                    on_step=lambda step: progress.advance(task) if step.is_rung else None,
                )  # fmt: skip
                console.print()
                console.print(climb.table(problem, steps, limits))
                rows += [step.row for step in steps]
                all_ok &= all(step.ok for step in steps if step.is_rung)
                del left[0]
    except KeyboardInterrupt:
        print(f"interrupted: {len(left)} of {len(chosen)} problems are not measured", file=sys.stderr)
        if not rows:
            return 130
    finally:
        if listens:
            signal.signal(signal.SIGTERM, before)

    try:
        kept = results.kept_rows(args.json, rows, machine, by_impl=True) if args.keep else []
    except ValueError as error:  # the file has changed since it was looked at: what was measured is not lost with it
        args.json, args.keep, kept = str(Path(args.json).with_suffix(".new.json")), False, []
        print(f"{error}; this run alone goes to {args.json}", file=sys.stderr)
    known = [row["case"] for row in kept]
    missing = [problem.label() for problem in left if problem.case() not in known]
    if args.keep:
        missing = results.still_not_run(args.json, missing, [problem.label() for problem in chosen if problem not in left])
    partial = {"complete": False, "not_run": missing} if missing else {}
    note = results.kept_note(args.json) if kept else {}
    doc = results.document(rows + kept, device=device, limits=limits, **partial, **note)
    try:
        if args.json:
            results.write(doc, args.json)
        if args.plot:
            from .chapters import readme as report

            results.write_figure(args.plot, report.climb_figure(doc), dpi=150)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not all_ok:
        print("some rung failed parity; see FAIL above", file=sys.stderr)
    return 130 if left else 0 if all_ok else 1


def _rate(value, unit):
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
