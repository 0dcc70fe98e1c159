"""``python -m ladder.bench NAME``: run a benchmark; without a NAME it lists them."""

import importlib
import sys

NAMES = {
    "step07": "rungs 06 and 07: decode, MLA, tokens in expert order",
    "step08": "rung 08 beside its peers",
    "fusion": "step 08's fusion beside the chains of launches that it replaces",
    "variants": "the ideas of the Hopper kernel, switched on one by one",
    "ncu": "hardware counters of the kernels, read by Nsight Compute",
    "multi_gpu": "what several GPUs add, beside what the simulator predicts",
}


def main(argv=None):
    name, *rest = (sys.argv[1:] if argv is None else argv) or [None]
    if name in NAMES:
        return importlib.import_module(f"ladder.bench.{name}").main(rest)
    wants_help = name in ("-h", "--help")
    print("usage: python -m ladder.bench NAME [options]", file=sys.stdout if wants_help else sys.stderr)
    for known, what in NAMES.items():
        print(f"  {known:10} {what}", file=sys.stdout if wants_help else sys.stderr)
    return 0 if wants_help else 2


if __name__ == "__main__":
    sys.exit(main())
