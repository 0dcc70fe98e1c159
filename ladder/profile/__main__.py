"""``python -m ladder.profile``: is attention your bottleneck? Measure first, decide by rule, then look into the kernel.

    python -m ladder.profile --module mypackage.serve:run_one_batch --context 32768 --target-ms 40

runs your batch under torch.profiler, follows its memory, and says in words what the numbers mean: whether attention
takes enough of the time to be worth a better kernel, and the three questions to ask before changing one. It prints the
``ncu`` command to run next and reads what that wrote (``--ncu-csv``).
"""

import argparse
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

from ladder.lab import results

from .decide import decide, describe, next_command
from .measure import ATTENTION, ProfileError, load_step, measure
from .ncu import describe_ncu, read_ncu


@results.names_what_it_cannot_write
def main(argv=None):
    args = parse_args(argv)
    kernels = read_ncu(args.ncu_csv) if args.ncu_csv else None
    if args.module is None:
        print(describe_ncu(kernels))
        return 0
    try:
        step = load_step(args.module)
        found = measure(step, steps=args.steps, warmup=args.warmup, attention=args.attention)
    except (ProfileError, ImportError) as error:
        print(f"ladder.profile: {error}", file=sys.stderr)
        return 2
    if args.moe is not None:
        found.moe, found.moe_because = args.moe, "as you said"
    if args.context is not None:
        found.context, found.context_because = args.context, "as you said"
    answer = decide(found, args.target_ms)
    text = "\n".join([describe(found), "", *answer.lines, "", next_command(args.module)])
    print(
        text if kernels is None else f"{text}\n\n{describe_ncu(kernels)}",
        file=sys.stderr if args.json == "-" else sys.stdout,
    )
    if args.json:
        record = dict(measured=asdict(found), decision=answer.name, because=answer.lines, ncu=kernels)
        if args.json == "-":
            print(json.dumps(record, indent=1))
        else:
            results.write_text(args.json, json.dumps(record, indent=1) + "\n")
    return 0


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m ladder.profile",
        description="Measure where the time and the memory of a batch go, and decide whether a better attention kernel "
            "pays.",
    )
    parser.add_argument(
        "--module", metavar="PACKAGE:CALLABLE",
        help="what runs one batch; it may instead return a function that does, so that loading a model is not measured",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3, help="batches to time, and again to profile (default 3)")
    parser.add_argument("--warmup", type=int, default=2, help="batches to run before (default 2)")
    parser.add_argument(
        "--attention", default=ATTENTION, metavar="REGEX",
        help="names of kernels, operators and record_function ranges that are attention (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--target-ms", type=float, help="latency that a batch should have")
    parser.add_argument(
        "--context",
        type=int,
        help="tokens of a long request (default: the longest that scaled_dot_product_attention saw)",
    )
    parser.add_argument(
        "--moe",
        action=argparse.BooleanOptionalAction,
        help="whether the model is a mixture of experts (default: by its modules' names)",
    )
    parser.add_argument(
        "--ncu-csv", metavar="FILE", help="what ncu wrote with --csv: memory and compute use of each kernel"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers too; - is standard output")
    args = parser.parse_args(argv)
    if args.module is None and args.ncu_csv is None:
        parser.error("want --module PACKAGE:CALLABLE, --ncu-csv FILE, or both")
    for option in ("steps", "warmup", "context"):
        value, least = getattr(args, option), 0 if option == "warmup" else 1
        if value is not None and value < least:
            parser.error(f"argument --{option}: {value}; want at least {least}")
    if args.target_ms is not None and not 0 < args.target_ms < math.inf:
        parser.error(f"argument --target-ms: {args.target_ms}; want a positive number of milliseconds")
    try:
        re.compile(args.attention)
    except re.error as error:
        parser.error(f"argument --attention: {args.attention!r} is no regular expression: {error}")
    if args.ncu_csv and not Path(args.ncu_csv).is_file():
        parser.error(f"argument --ncu-csv: no file {args.ncu_csv}")
    if args.ncu_csv:
        try:
            read_ncu(args.ncu_csv)
        except ProfileError as error:
            parser.error(f"argument --ncu-csv: {error}")
    if args.json and args.json != "-" and not Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: no folder {Path(args.json).parent} to write {Path(args.json).name} into")
    if args.json and Path(args.json).is_dir():
        parser.error(f"argument --json: {args.json} is a folder; want a file")
    return args


if __name__ == "__main__":
    sys.exit(main())
