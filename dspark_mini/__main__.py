"""Command line: python -m dspark_mini {place, simulate, run, survive, bench}; each explains itself with --help."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from . import baselines, files
from .placing import place
from .topology import Topology
from .trace import bundled_trace, generate_trace, read_counts, read_trace


def _positive_int(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


def _positive(text):
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r}")
    return value


def _new_file(text):
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in an existing folder, got {text!r}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, got the folder {text!r}")
    return text


@contextmanager
def _writing(option):
    """Name the argument in the error of a file that cannot be written."""
    try:
        yield
    except files.CannotWrite as error:
        raise ValueError(f"argument {option}: {error}") from error


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m dspark_mini", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    add = commands.add_parser("place", help="plan expert placement for measured counts")
    add.add_argument("counts", help="counts or a trace: .json, .npy, .npz, .pt (SGLang), or a folder (ESFT)")
    add.add_argument("--gpus", type=_positive_int, default=8)
    add.add_argument("--slots", type=_positive_int, help="expert slots over all GPUs (default: one spare per GPU)")
    add.add_argument("--nodes", type=_positive_int, default=1)
    add.add_argument("--groups", type=_positive_int, default=1, help="expert groups of group-limited routing")
    add.add_argument("--output", type=_new_file, help="write the placement here, as JSON")

    add_simulate = commands.add_parser("simulate", help="throughput with and without kernel and scheduler")
    add_simulate.add_argument("--trace", help="token-level trace (default: a generated one)")
    add_simulate.add_argument("--model", default="v2-lite", choices=["v2-lite", "r1"])
    add_simulate.add_argument("--gpus", type=_positive_int, default=8, help="GPUs in all")
    add_simulate.add_argument("--nodes", type=_positive_int, default=1)
    add_simulate.add_argument(
        "--slots", type=_positive_int, help="expert slots over all GPUs (default: two spare per GPU)"
    )
    add_simulate.add_argument("--mode", default="chunk", choices=["chunk", "prefill", "decode"])
    add_simulate.add_argument("--batch", type=_positive_int, default=4096, help="tokens of one step over all GPUs")
    add_simulate.add_argument(
        "--context", type=_positive_int, default=16384, help="prompt length, or median context of decode"
    )
    add_simulate.add_argument("--kernel-speedup", type=_positive, default=2.0, help="of the attention core")

    add_run = commands.add_parser("run", help="a real MoE layer over ranks; start it with torchrun")
    add_run.add_argument("--ranks", type=_positive_int, help="start this many CPU ranks here instead of using torchrun")
    add_run.add_argument("--preset", default="small", choices=["small", "v2-lite"], help="widths")
    add_run.add_argument("--dim", type=_positive_int)
    add_run.add_argument("--hidden", type=_positive_int)
    add_run.add_argument("--experts", type=_positive_int, default=64)
    add_run.add_argument("--top-k", type=_positive_int, default=6)
    add_run.add_argument("--layers", type=_positive_int, default=4)
    add_run.add_argument("--tokens", type=_positive_int, default=128, help="tokens per rank and step")
    add_run.add_argument("--steps", type=_positive_int, default=3)
    add_run.add_argument("--slots-per-gpu", type=_positive_int)
    add_run.add_argument("--trace", help="token-level trace (default: the generated one in the package)")
    add_run.add_argument("--timeout", type=_positive, default=60.0, help="seconds before a silent peer counts as lost")

    add_survive = commands.add_parser("survive", help="lose a rank in the middle of a step and finish all requests")
    add_survive.add_argument("--ranks", type=_positive_int, default=4)
    add_survive.add_argument("--lose", type=int, default=2)
    add_survive.add_argument("--how", default="kill", choices=["kill", "freeze", "nap"])
    add_survive.add_argument("--timeout", type=_positive, default=3.0)

    add_bench = commands.add_parser("bench", help="measure every target beside its baselines")
    add_bench.add_argument(
        "--traces", help="folder with real .npz traces (default: $DSPARK_TRACES, ../shared/data/traces)"
    )
    add_bench.add_argument("--record", type=_new_file, help="write the JSON record here")

    for sub in (add, add_simulate, add_run, add_survive, add_bench):
        sub.add_argument("--json", action="store_true", help="print JSON instead of tables")
    for sub in (add, add_simulate, add_run):
        sub.add_argument("--plot", type=_new_file, help="write a PNG here")
    args = parser.parse_args(arguments)
    try:
        done = COMMANDS[args.command](args)
        if "RANK" in os.environ:  # started by torchrun: destructors of a group can wait for ranks that have gone
            sys.stdout.flush()
            os._exit(0)
        return done
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog} {args.command}: {error}\n")
    except KeyboardInterrupt:
        print(f"{parser.prog} {args.command}: interrupted", file=sys.stderr, flush=True)
        if "RANK" in os.environ:
            os._exit(130)
        return 130


def _table(title, columns, rows, args):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _plot(figure, path):
    if path:
        with _writing("--plot"):
            files.write_figure(path, figure)
        print(f"wrote {path}", file=sys.stderr)


def _place(args):
    counts = read_counts(args.counts)
    slots = args.slots or -(-(counts.shape[1] + args.gpus) // args.gpus) * args.gpus
    plan = place(counts, num_gpus=args.gpus, num_slots=slots, num_nodes=args.nodes, num_groups=args.groups)
    rivals = {
        "none (experts in order)": baselines.contiguous(counts, num_gpus=args.gpus),
        "round robin": baselines.round_robin(counts, num_gpus=args.gpus, num_slots=slots),
        "least loaded": baselines.least_loaded(counts, num_gpus=args.gpus, num_slots=slots),
        "greedy replicate and pack": baselines.replicate_and_pack(
            counts, num_gpus=args.gpus, num_slots=slots, num_nodes=args.nodes, num_groups=args.groups
        ),
        "place": plan,
    }
    values = {name: p.balancedness for name, p in rivals.items()} | {"upper bound": plan.bound}
    if args.output:
        with _writing("--output"):
            files.write_text(args.output, json.dumps(plan.to_json()))
    worst = int(values["none (experts in order)"].argmin())
    before = rivals["none (experts in order)"].gpu_load[worst]
    after = plan.gpu_load[worst]
    if args.json:
        summary = {n: {"median": float(np.median(v)), "min": float(v.min())} for n, v in values.items()}
        print(
            json.dumps(
                {
                    "layers": plan.num_layers,
                    "experts": plan.num_experts,
                    "gpus": args.gpus,
                    "slots": slots,
                    "balancedness": summary,
                    "placement": plan.to_json(),
                }
            )
        )
    else:
        _table(
            f"Balancedness (mean / max GPU load) of {plan.num_layers} layers, {plan.num_experts} experts, "
            f"{args.gpus} GPUs, {slots} slots",
            ["placement", "median", "worst layer"],
            [(n, f"{np.median(v):.4f}", f"{v.min():.4f}") for n, v in values.items()],
            args,
        )
        _table(
            f"Utilisation per GPU in layer {worst}, the least balanced one",
            ["GPU", "before", "after"],
            [(g, f"{b / before.max():.0%}", f"{a / after.max():.0%}") for g, (b, a) in enumerate(zip(before, after))],
            args,
        )
    if args.plot:
        from .plots import utilisation_figure

        _plot(utilisation_figure(before / before.max(), after / after.max(), f"layer {worst}"), args.plot)


def _simulate(args):
    from . import simulator

    if args.gpus % args.nodes:
        raise ValueError(f"--nodes must divide --gpus ({args.gpus}), got {args.nodes}")
    model = simulator.MODELS[args.model]
    if args.trace:
        trace = read_trace(args.trace)
    elif args.model == "v2-lite" and 2 * args.batch <= bundled_trace().num_tokens:
        trace = bundled_trace()
    else:
        trace = generate_trace(
            num_layers=min(model.num_layers, 26),
            num_tokens=max(2 * args.batch, 1536),
            num_experts=model.num_experts,
            top_k=model.top_k,
            seed=1,
        )
    load = {
        "chunk": lambda: simulator.chunk_load(args.batch, args.context, max(32, 4 * args.gpus)),
        "prefill": lambda: simulator.prefill_load(args.batch, requests=max(1, args.batch // args.context)),
        "decode": lambda: simulator.decode_load(args.batch, median=args.context),
    }[args.mode]()
    slots = args.slots or max(-(-trace.num_experts // args.gpus) + 2, 2) * args.gpus
    results = simulator.four_way(
        trace,
        topology=Topology(args.nodes, args.gpus // args.nodes),
        model=model,
        num_slots=slots,
        load=load,
        kernel_speedup=args.kernel_speedup,
    )
    base = results["neither"]
    speedups = {name: base.step_s / r.step_s for name, r in results.items()}
    worst = int(base.layer_utilisation.min(axis=1).argmin())
    before, after = base.layer_utilisation[worst], results["both"].layer_utilisation[worst]
    if args.json:
        print(
            json.dumps(
                {
                    "trace": trace.source,
                    "generated": trace.generated,
                    "gpus": args.gpus,
                    "nodes": args.nodes,
                    "slots": slots,
                    "mode": args.mode,
                    "batch": load.tokens,
                    "kernel_speedup": args.kernel_speedup,
                    "speedup": speedups,
                    "product": speedups["kernel"] * speedups["scheduler"],
                    "tokens_per_s": {n: r.tokens_per_s for n, r in results.items()},
                    "balancedness": {n: r.balancedness for n, r in results.items()},
                    "phases_s": {n: r.phases for n, r in results.items()},
                    "layer": worst,
                    "utilisation": {"before": before.tolist(), "after": after.tolist()},
                }
            )
        )
    else:
        kind = "generated" if trace.generated else "real"
        _table(
            f"{model.name} on {args.gpus} simulated GPUs, {kind} routing, {load.tokens} tokens per step ({args.mode})",
            ["", "throughput", "step, ms", "attention", "exchange", "experts", "balancedness"],
            [
                (
                    name,
                    f"{speedups[name]:.3f}",
                    f"{r.step_s / len(r.gpu_tokens) * 1e3:.2f}",
                    *(f"{r.phases[p] / r.step_s:.0%}" for p in ("attention", "exchange", "experts")),
                    f"{r.balancedness:.3f} (bound {r.bound:.3f})",
                )
                for name, r in results.items()
            ],
            args,
        )
        print(
            f"product of the single gains {speedups['kernel'] * speedups['scheduler']:.3f}, both {speedups['both']:.3f}"
        )
        _table(
            f"Utilisation per GPU in layer {worst}, the least balanced one",
            ["GPU", "before", "after"],
            [(g, f"{b:.0%}", f"{a:.0%}") for g, (b, a) in list(enumerate(zip(before, after)))[:16]],
            args,
        )
    if args.plot:
        from .plots import four_way_figure

        _plot(four_way_figure(speedups), args.plot)


def _run(args):
    from . import demo
    from .launch import run_ranks

    if args.top_k > args.experts:
        raise ValueError(f"--top-k must not exceed --experts ({args.experts}), got {args.top_k}")
    if args.ranks and "RANK" in os.environ:
        raise ValueError(
            f"--ranks {args.ranks} starts ranks here, and torchrun has started {os.environ.get('WORLD_SIZE')} already; want one of the two"
        )
    dim, hidden = demo.WIDTHS[args.preset]
    settings = {
        "dim": args.dim or dim,
        "hidden": args.hidden or hidden,
        "experts": args.experts,
        "top_k": args.top_k,
        "layers": args.layers,
        "tokens": args.tokens,
        "steps": args.steps,
        "slots_per_gpu": args.slots_per_gpu,
        "trace": args.trace,
        "timeout_s": args.timeout,
    }
    if args.ranks:
        report = run_ranks(demo.layer_rank, args.ranks, settings, timeout_s=600)[0]
    else:
        report = demo.layer_demo(settings)
    if report is None:  # not rank 0
        return
    before, after = report["before"], report["after"]
    peak = {n: np.array(report[n]["layer_rank_tokens"]).max(axis=1).sum() for n in ("before", "after")}
    use = {n: np.array(report[n]["rank_tokens"]) / peak[n] for n in ("before", "after")}
    if args.json:
        print(json.dumps(report))
    else:
        kind = "generated" if report["generated"] else "real"
        _table(
            f"{report['experts']} experts, top {report['top_k']}, {report['layers']} layers, width {report['dim']} -> "
            f"{report['hidden']}, {report['ranks']} ranks on {report['device']}, {kind} routing",
            ["rank", "tokens before", "utilisation", "compute, ms", "tokens after", "utilisation", "compute, ms"],
            [
                (r, b, f"{ub:.0%}", f"{cb * 1e3:.1f}", a, f"{ua:.0%}", f"{ca * 1e3:.1f}")
                for r, (b, ub, cb, a, ua, ca) in enumerate(
                    zip(
                        before["rank_tokens"],
                        use["before"],
                        before["compute_s"],
                        after["rank_tokens"],
                        use["after"],
                        after["compute_s"],
                    )
                )
            ],
            args,
        )
        mean = sum(before["rank_tokens"]) / report["ranks"]
        print(
            f"rows on the critical path: {before['critical_rows']} -> {after['critical_rows']} (bound {mean:.0f}); "
            f"output {'bit-identical to' if report['identical'] else 'differs from'} one process"
            + ("" if report["identical"] else f" by at most {report['max_error']:.2g}")
        )
    if args.plot:
        from .plots import utilisation_figure

        _plot(utilisation_figure(use["before"], use["after"], unit="rank"), args.plot)


def _survive(args):
    from .demo import survive_demo

    if not 0 <= args.lose < args.ranks or args.ranks < 2:
        raise ValueError(f"--lose must be a rank of at least two, got {args.lose} of {args.ranks}")
    report = survive_demo(ranks=args.ranks, lose=args.lose, how=args.how, timeout_s=args.timeout)
    if args.json:
        print(json.dumps(report))
        return
    rows = [
        ("rank lost", f"{report['lost']} ({report['how']})"),
        ("survivors noticed after, s", ", ".join(f"{r}: {t:.3f}" for r, t in report["noticed_s"].items())),
        ("serving again after, s", f"{report['resumed_s']:.3f}"),
        ("expert copies fetched", f"{report['copies_fetched']}, {report['from_storage']} of them from storage"),
        ("requests restarted", report["restarted"]),
        ("requests finished", f"{report['finished']} of {report['jobs']}"),
        ("outputs as in an undisturbed run", "yes" if report["identical"] else "NO"),
    ]
    _table(f"{args.ranks} ranks, one lost in the middle of a step", ["", ""], rows, args)


def _bench(args):
    from .bench import bench

    record = bench(args.traces, progress=not args.json)
    if args.record:
        with _writing("--record"):
            files.write_text(args.record, json.dumps(record, indent=1) + "\n")
    if args.json:
        print(json.dumps(record))
    else:
        shown = [
            (
                r["target_no"],
                ", ".join(f"{v}" for v in r["case"].values()),
                r["impl"],
                r["metric"],
                f"{r['value']:.4g}",
                r["target"] or "",
                {True: "yes", False: "NO", None: ""}[r["ok"]],
            )
            for r in record["rows"]
        ]
        _table("Targets and baselines", ["", "case", "impl", "metric", "value", "target", "ok"], shown, args)


COMMANDS = {"place": _place, "simulate": _simulate, "run": _run, "survive": _survive, "bench": _bench}

if __name__ == "__main__":
    sys.exit(main())
