"""``python -m ladder.lab.compile.matrix``: every Triton kernel of the ladder, compiled for every target under every
Triton version that the ladder supports, with no GPU; it fails where a kernel does not compile, spills registers or
wants more shared memory than the processor has.

Where the kernels come from: a rung that has Triton kernels has a module ``cases_stepNN.py`` here with a function

    compile_cases(shared_memory_bytes, capability, *, thorough=False)

that yields ``(name, kernel, args, kwargs)``: a name for the table, the ``triton.jit`` function, and
the arguments of a launch as the rung itself makes it on a processor with that much shared memory and
that compute capability. Tensors are made on the meta device, so shapes cost nothing. A rung that
gets such a module is found by itself. It may also have ``KNOWN_SPILLS``, rows (target, start of a
name, most bytes of stack, reason): kernels that spill under some compiler and ship all the same,
because what does not spill was measured to be slower. They are listed at the end, with the reason.

Each version of Triton is installed by pip into a folder of its own and used by a subprocess that has this folder at the
front of its path, so the environment stays as it is.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

from ladder import rungs
from ladder.lab import results

from .compiler import SHARED_MEMORY_LIMIT, capability, compile_for

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = ("3.6.0", "3.8.0", "3.9.0")
TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100")
FEW_BYTES = 160  # of stack, a thread
MATRIX_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")  # tensor cores of Ampere and Ada, Hopper, Blackwell


def cases_of(rung, target, *, thorough=False):
    """The compile cases (name, kernel, args, kwargs) of a rung for a target; none when it has no such module."""
    name = f"{__package__}.cases_{rung.name.partition('_')[0]}"
    if not util.find_spec(name):
        return []
    module = importlib.import_module(name)
    return module.compile_cases(SHARED_MEMORY_LIMIT[target], capability(target), thorough=thorough)


def known_spill(rung, target, case, stack_bytes):
    """Why the rung ships this case although it spills so many bytes, or None."""
    module = importlib.import_module(f"{__package__}.cases_{rung.name.partition('_')[0]}")
    for where, start, most, reason in getattr(module, "KNOWN_SPILLS", ()):
        if where == target and case.startswith(start) and stack_bytes <= most:
            return reason
    return None


def compile_rows(targets=TARGETS, chosen=None, *, thorough=False):
    """Compile and yield a dict a kernel: rung, case, target, registers, spills, shared, instructions, problem, known.

    ``problem`` is None, or why this kernel must not ship; ``known`` why one that spills does. Triton's interpreter has
    to be off in this process.
    """
    for rung in rungs.RUNGS if chosen is None else chosen:
        for target in targets:
            for name, kernel, args, kwargs in cases_of(rung, target, thorough=thorough):
                row = {"rung": rung.name, "case": name, "target": target}
                try:
                    code = compile_for(target, kernel, *args, **kwargs)
                except Exception as error:  # whatever the compiler raises is the finding
                    reason = str(error).strip() or type(error).__name__
                    yield {
                        **row,
                        "problem": f"does not compile: {type(error).__name__}: {reason.splitlines()[0][:200]}",
                    }
                    continue
                limit = SHARED_MEMORY_LIMIT[target]
                problem = known = None
                # A word or two spilled between tiles costs next to nothing; in the loop over whole tiles it costs all
                # the time.
                harmless = code.local <= FEW_BYTES and not code.hot_loop_spills
                if code.spills and not harmless:
                    known = known_spill(rung, target, name, code.local)
                    spills = f"spills: {code.spill_stores} stores, {code.spill_loads} loads, {code.local} bytes"
                    problem = None if known else spills
                if code.shared > limit:
                    problem = f"wants {code.shared} bytes of shared memory of {limit}"
                yield {
                    **row,
                    "kernel": code.name,
                    "registers": code.registers,
                    "spills": code.spills,
                    "shared": code.shared,
                    "num_warps": code.num_warps,
                    "serialized": code.serialized,
                    **{name: code.count(name) for name in MATRIX_INSTRUCTIONS},
                    "problem": problem,
                    "known": known,
                }


def compile_in_subprocess(target, *, triton_folder=None, chosen="all", thorough=False):
    """The rows of ``compile_rows`` for one target as a list, from a process without the interpreter.

    Args:
        target: "sm_90", ...
        triton_folder: folder with the Triton to use; None for the installed one.
        chosen: rungs, as on the command line.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    path = [str(p) for p in (triton_folder, ROOT, os.environ.get("PYTHONPATH")) if p]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "-m", "ladder.lab.compile.matrix", "--worker", "--targets", target, "--rungs", chosen]
    done = subprocess.run(
        command + ["--thorough"] * thorough, env=environment, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def install(version, cache):
    """The folder in ``cache`` with Triton of that version; installed with pip when it is not there yet.

    Raises:
        RuntimeError: pip could not install it; with what pip said.
    """
    folder = Path(cache).resolve() / f"triton-{version}"
    if not (folder / f"triton-{version}.dist-info").exists():
        partial = folder.with_name(f"{folder.name}.partial{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        done = subprocess.run([*command, f"triton=={version}"], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(partial, ignore_errors=True)
            raise RuntimeError(f"pip could not install triton {version}: {done.stderr.strip()[-1000:]}")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)  # it appears when it is whole
    return folder


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m ladder.lab.compile.matrix",
        description="Compile the ladder's kernels for GPUs that are not there, under several Triton versions.",
    )
    parser.add_argument("--triton", nargs="+", metavar="VERSION", help="versions to install and use, such as "
                        f"{' '.join(VERSIONS)}; the installed one when left out")  # fmt: skip
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=sorted(SHARED_MEMORY_LIMIT), metavar="sm_NN",
                        help="%(choices)s; %(default)s when left out")  # fmt: skip
    parser.add_argument("--rungs", default="all", help='"all", "5", "5-8", "step05_fused"')
    parser.add_argument("--thorough", action="store_true", help="every head size, dtype and mask, not a choice of them")
    parser.add_argument("--cache", default=ROOT / ".venv", help="where Triton versions are installed; %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time; %(default)s")
    parser.add_argument("--json", metavar="PATH", help="also write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        chosen = rungs.parse(options.rungs)
    except ValueError as error:
        parser.error(str(error))

    if options.worker:
        for row in compile_rows(options.targets, chosen, thorough=options.thorough):
            print(json.dumps(row), flush=True)
        return 0

    try:
        folders = {v: install(v, options.cache) for v in options.triton} if options.triton else {"installed": None}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    rows, failures = [], []
    print(f"{'triton':9} {'target':6} {'rung':13} {'kernel':46} {'regs':>4} {'spills':>6} {'shared':>6} "
          + " ".join(f"{name:>7}" for name in MATRIX_INSTRUCTIONS))  # fmt: skip
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        jobs = [
            (version, target, pool.submit(compile_in_subprocess, target, triton_folder=folder, chosen=options.rungs,
                                          thorough=options.thorough))
            for version, folder in folders.items() for target in options.targets
        ]  # fmt: skip
        for version, target, job in jobs:
            try:
                found = job.result()
            except RuntimeError as error:
                found = [{"rung": "", "case": "", "target": target, "problem": str(error)}]
            for row in found:
                row = {"triton": version, **row}
                rows.append(row)
                failures += [row] if row["problem"] else []
                print(_line(row), flush=True)
    if options.json:
        results.write_text(options.json, json.dumps(rows, indent=1) + "\n")
    known = [row for row in rows if row.get("known")]
    print(
        f"\n{len(rows)} kernels, {len(failures)} that must not ship"
        + f", {len(known)} that spill and ship" * bool(known)
    )
    for row in known:
        print(f"  Triton {row['triton']}, {row['target']}, {row['rung']} {row['case']}: {row['known']}")
    for row in failures:
        print(f"  Triton {row['triton']}, {row['target']}, {row['rung']} {row['case']}: {row['problem']}")
    return 1 if failures or not rows else 0


def _line(row):
    start = f"{row['triton']:9} {row['target']:6} {row['rung'].removesuffix('_kernel'):13} {row['case']:46}"
    if "registers" not in row:
        return f"{start} {row['problem']}"
    counts = " ".join(f"{row[name] or '':>7}" for name in MATRIX_INSTRUCTIONS)
    return f"{start} {row['registers']:>4} {row['spills']:>6} {row['shared']:>6} {counts}"


if __name__ == "__main__":
    sys.exit(main())
