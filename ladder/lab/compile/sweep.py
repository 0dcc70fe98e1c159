"""Compile step 05 for Hopper at many tile sizes, without a GPU, and record what the compiler made of each.

``python -m ladder.lab.compile.sweep`` writes ``notebooks/results/step05_compile.json``; ``--lesson`` prints the
few settings that chapter 05 shows. Run it in a process of its own: where Triton's interpreter is on,
kernels are never compiled.
"""

import argparse
import importlib
import itertools
import json
import sys
from unittest import mock

import torch

from ladder.lab import results
from ladder.lab.problem import DTYPES

from .compiler import SHARED_MEMORY_LIMIT, compile_for

HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
GRID = dict(BLOCK_M=(64, 128), BLOCK_N=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3))


# What chapter 05 shows: target, element type, changes to the shipped configuration; head size 128.
LESSON = (
    ("sm_80", "bfloat16", {}),
    ("sm_90", "bfloat16", {}),
    ("sm_90", "bfloat16", {"num_warps": 4}),
    ("sm_90", "float32", {}),
    ("sm_90", "float32", {"PRECISION": "tf32"}),
    ("sm_90", "float32", {"PRECISION": "tf32", "BLOCK_M": 64, "BLOCK_N": 64}),
)


def compile_step05(head_dim, head_dim_v, *, target="sm_90", causal=False, dtype=torch.bfloat16, **changes):
    """Compile the kernel exactly as ``attention`` launches it, with some of its configuration changed.

    Returns:
        (configuration, ladder.lab.compile.compiler.Compiled).
    """
    step05 = importlib.import_module("ladder.step05_fused.attention")  # the package's attribute is the function
    from ladder.step05_fused.kernel import fused_attention_forward

    capability = divmod(int(target.removeprefix("sm_")), 10)
    launches = []

    class Recorder:
        """Stands where the kernel stands and keeps the arguments of a launch."""

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((args, kwargs))

    q, k = (torch.empty(1, 2, 256, head_dim, dtype=dtype) for _ in range(2))
    v = torch.empty(1, 2, 256, head_dim_v, dtype=dtype)
    with (
        mock.patch.object(step05, "_kernel", lambda *_: Recorder()),
        mock.patch.object(step05, "processor", lambda *_: (SHARED_MEMORY_LIMIT[target], capability)),
    ):
        step05.attention(q, k, v, causal=causal)
    args, config = launches[0]
    config = {**config, **changes}
    return config, compile_for(target, fused_attention_forward, *args, **config)


def describe(config, compiled, head_dim, head_dim_v, dtype):
    """One row of recorded results."""
    case = {
        "mode": "compile", "target": compiled.target, "D": head_dim, "Dv": head_dim_v, "causal": False,
        "dtype": str(dtype).removeprefix("torch."), "precision": config["PRECISION"],
        **{name: config[name] for name in GRID},
    }  # fmt: skip
    return results.row(
        case, "step05_fused", registers=compiled.registers, spill_stores=compiled.spill_stores,
        spill_loads=compiled.spill_loads, local=compiled.local, shared=compiled.shared,
        hgmma=compiled.count("HGMMA"), hmma=compiled.count("HMMA"), ffma=compiled.count("FFMA"),
    )  # fmt: skip


@results.names_what_it_cannot_write
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lesson", action="store_true", help="compile the settings of chapter 05 and print a JSON row each"
    )
    parser.add_argument("--output", default=str(results.FOLDER / "step05_compile.json"))
    args = parser.parse_args()
    if args.lesson:
        for target, name, changes in LESSON:
            config, compiled = compile_step05(128, 128, target=target, dtype=DTYPES[name], **changes)
            print(json.dumps(describe(config, compiled, 128, 128, DTYPES[name])))
        return
    rows = []
    for head_dim, head_dim_v in HEADS:
        for values in itertools.product(*GRID.values()):
            config, compiled = compile_step05(head_dim, head_dim_v, **dict(zip(GRID, values)))
            rows.append(describe(config, compiled, head_dim, head_dim_v, torch.bfloat16))
    results.write(results.document(rows, command="python -m ladder.lab.compile.sweep"), args.output)


if __name__ == "__main__":
    sys.exit(main())
