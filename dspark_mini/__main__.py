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


def _number(kind, wanted):
    """A type for argparse: a finite number > 0 of `kind`."""

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return value

    return parse


_positive_int, _positive = _number(int, "a positive integer"), _number(float, "a finite number > 0")


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


def _option(flag, type=_positive_int, default=None, help=None, **more):
    return flag, {"type": type, "default": default, "help": help, **more}


OPTIONS = {
    "place": ("plan expert placement for measured counts", [
        ("counts", {"help": "counts or a trace: .json, .npy, .npz, .pt (SGLang), or a folder (ESFT)"}),
        _option("--gpus", default=8),
        _option("--slots", help="expert slots over all GPUs (default: one spare per GPU)"),
        _option("--nodes", default=1),
        _option("--groups", default=1, help="expert groups of group-limited routing"),
        _option("--output", _new_file, help="write the placement here, as JSON"),
    ]),
    "simulate": ("throughput with and without kernel and scheduler", [
        _option("--trace", str, help="token-level trace (default: a generated one)"),
        _option("--model", str, "v2-lite", choices=["v2-lite", "r1"]),
        _option("--gpus", default=8, help="GPUs in all"),
        _option("--nodes", default=1),
        _option("--slots", help="expert slots over all GPUs (default: two spare per GPU)"),
        _option("--mode", str, "chunk", choices=["chunk", "prefill", "decode"]),
        _option("--batch", default=4096, help="tokens of one step over all GPUs"),
        _option("--context", default=16384, help="prompt length, or median context of decode"),
        _option("--kernel-speedup", _positive, 2.0, "of the attention core"),
    ]),
    "run": ("a real MoE layer over ranks; start it with torchrun", [
        _option("--ranks", help="start this many CPU ranks here instead of using torchrun"),
        _option("--preset", str, "small", "widths", choices=["small", "v2-lite"]),
        _option("--dim"),
        _option("--hidden"),
        _option("--experts", default=64),
        _option("--top-k", default=6),
        _option("--layers", default=4),
        _option("--tokens", default=128, help="tokens per rank and step"),
        _option("--steps", default=3),
        _option("--slots-per-gpu"),
        _option("--trace", str, help="token-level trace (default: the generated one in the package)"),
        _option("--timeout", _positive, 60.0, "seconds before a silent peer counts as lost"),
    ]),
    "survive": ("lose a rank in the middle of a step and finish all requests", [
        _option("--ranks", default=4),
        _option("--lose", int, 2),
        _option("--how", str, "kill", choices=["kill", "freeze", "nap"]),
        _option("--timeout", _positive, 3.0),
    ]),
    "bench": ("measure every target beside its baselines", [
        _option("--traces", str, help="folder with real .npz traces (default: $DSPARK_TRACES, ../shared/data/traces)"),
        _option("--record", _new_file, help="write the JSON record here"),
    ]),
}  # fmt: skip


def _parser():
    parser = argparse.ArgumentParser(prog="python -m dspark_mini", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (about, options) in OPTIONS.items():
        command = commands.add_parser(name, help=about)
        for flag, keywords in options:
            command.add_argument(flag, **keywords)
        command.add_argument("--json", action="store_true", help="print JSON instead of tables")
        if name in ("place", "simulate", "run"):
            command.add_argument("--plot", type=_new_file, help="write a PNG here")
    return parser


def main(arguments=None):
    parser = _parser()
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


def _table(title, columns, rows):
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _utilisation_table(layer, before, after):
    """`before` and `after` (gpus,): utilisation in 0 .. 1."""
    rows = [(g, f"{b:.0%}", f"{a:.0%}") for g, (b, a) in enumerate(zip(before, after))]
    _table(f"Utilisation per GPU in layer {layer}, the least balanced one", ["GPU", "before", "after"], rows)


def _plot(args, figure, *values, **keywords):
    """Write the figure that the function named `figure` of `plots` draws, where --plot asks for it."""
    if args.plot:
        from . import plots

        with _writing("--plot"):
            files.write_figure(args.plot, getattr(plots, figure)(*values, **keywords))
        print(f"wrote {args.plot}", file=sys.stderr)


def _place(args):
    counts = read_counts(args.counts)
    slots = args.slots or -(-(counts.shape[1] + args.gpus) // args.gpus) * args.gpus
    size = {"num_gpus": args.gpus, "num_slots": slots}
    nodes = {"num_nodes": args.nodes, "num_groups": args.groups}
    plan, unplaced = place(counts, **size, **nodes), baselines.contiguous(counts, num_gpus=args.gpus)
    rivals = {
        "none (experts in order)": unplaced,
        "round robin": baselines.round_robin(counts, **size),
        "least loaded": baselines.least_loaded(counts, **size),
        "greedy replicate and pack": baselines.replicate_and_pack(counts, **size, **nodes),
        "place": plan,
    }
    values = {name: p.balancedness for name, p in rivals.items()} | {"upper bound": plan.bound}
    if args.output:
        with _writing("--output"):
            files.write_text(args.output, json.dumps(plan.to_json()))
    worst = int(unplaced.balancedness.argmin())
    before, after = (load / load.max() for load in (unplaced.gpu_load[worst], plan.gpu_load[worst]))
    if args.json:
        report = {"layers": plan.num_layers, "experts": plan.num_experts, "gpus": args.gpus, "slots": slots}
        report["balancedness"] = {n: {"median": float(np.median(v)), "min": float(v.min())} for n, v in values.items()}
        print(json.dumps({**report, "placement": plan.to_json()}))
    else:
        title = f"Balancedness (mean / max GPU load) of {plan.num_layers} layers, {plan.num_experts} experts, "
        rows = [(n, f"{np.median(v):.4f}", f"{v.min():.4f}") for n, v in values.items()]
        _table(f"{title}{args.gpus} GPUs, {slots} slots", ["placement", "median", "worst layer"], rows)
        _utilisation_table(worst, before, after)
    _plot(args, "utilisation_figure", before, after, f"layer {worst}")


def _simulate(args):
    from . import simulator

    if args.gpus % args.nodes:
        raise ValueError(f"--nodes must divide --gpus ({args.gpus}), got {args.nodes}")
    model = simulator.MODELS[args.model]
    trace, load = _simulated_trace(args, model), _simulated_load(args)
    slots = args.slots or max(-(-trace.num_experts // args.gpus) + 2, 2) * args.gpus
    results = simulator.four_way(
        trace,
        topology=Topology(args.nodes, args.gpus // args.nodes),
        model=model,
        num_slots=slots,
        load=load,
        kernel_speedup=args.kernel_speedup,
    )
    speedups = {name: results["neither"].step_s / r.step_s for name, r in results.items()}
    product = speedups["kernel"] * speedups["scheduler"]
    worst = int(results["neither"].layer_utilisation.min(axis=1).argmin())
    before, after = (results[name].layer_utilisation[worst] for name in ("neither", "both"))
    if args.json:
        report = {"trace": trace.source, "generated": trace.generated, "gpus": args.gpus, "nodes": args.nodes}
        report |= {"slots": slots, "mode": args.mode, "batch": load.tokens, "kernel_speedup": args.kernel_speedup}
        report |= {"speedup": speedups, "product": product}
        for key, name in (("tokens_per_s", "tokens_per_s"), ("balancedness", "balancedness"), ("phases_s", "phases")):
            report[key] = {n: getattr(r, name) for n, r in results.items()}
        utilisation = {"before": before.tolist(), "after": after.tolist()}
        print(json.dumps({**report, "layer": worst, "utilisation": utilisation}))
    else:
        kind = "generated" if trace.generated else "real"
        about = f"{kind} routing, {load.tokens} tokens per step ({args.mode})"
        phases = ("attention", "exchange", "experts")
        rows = [
            (
                name,
                f"{speedups[name]:.3f}",
                f"{r.step_s / len(r.gpu_tokens) * 1e3:.2f}",
                *(f"{r.phases[p] / r.step_s:.0%}" for p in phases),
                f"{r.balancedness:.3f} (bound {r.bound:.3f})",
            )
            for name, r in results.items()
        ]
        columns = ["", "throughput", "step, ms", *phases, "balancedness"]
        _table(f"{model.name} on {args.gpus} simulated GPUs, {about}", columns, rows)
        print(f"product of the single gains {product:.3f}, both {speedups['both']:.3f}")
        _utilisation_table(worst, before[:16], after[:16])
    _plot(args, "four_way_figure", speedups)


def _simulated_trace(args, model):
    """The trace of --trace; else the package's own where it fits the model and is long enough; else a new one."""
    if args.trace:
        return read_trace(args.trace)
    if args.model == "v2-lite" and 2 * args.batch <= bundled_trace().num_tokens:
        return bundled_trace()
    shape = {"num_experts": model.num_experts, "top_k": model.top_k}
    return generate_trace(num_layers=min(model.num_layers, 26), num_tokens=max(2 * args.batch, 1536), seed=1, **shape)


def _simulated_load(args):
    from . import simulator

    if args.mode == "chunk":
        return simulator.chunk_load(args.batch, args.context, max(32, 4 * args.gpus))
    if args.mode == "prefill":
        return simulator.prefill_load(args.batch, requests=max(1, args.batch // args.context))
    return simulator.decode_load(args.batch, median=args.context)


def _run(args):
    from . import demo
    from .launch import run_ranks

    if args.top_k > args.experts:
        raise ValueError(f"--top-k must not exceed --experts ({args.experts}), got {args.top_k}")
    if args.ranks and "RANK" in os.environ:
        started = f"torchrun has started {os.environ.get('WORLD_SIZE')} already"
        raise ValueError(f"--ranks {args.ranks} starts ranks here, and {started}; want one of the two")
    dim, hidden = demo.WIDTHS[args.preset]
    settings = {"dim": args.dim or dim, "hidden": args.hidden or hidden, "timeout_s": args.timeout}
    for name in ("experts", "top_k", "layers", "tokens", "steps", "slots_per_gpu", "trace"):
        settings[name] = getattr(args, name)
    if args.ranks:
        report = run_ranks(demo.layer_rank, args.ranks, settings, timeout_s=600)[0]
    else:
        report = demo.layer_demo(settings)
    if report is None:  # not rank 0
        return
    cases = [report["before"], report["after"]]
    use = [np.array(c["rank_tokens"]) / np.array(c["layer_rank_tokens"]).max(axis=1).sum() for c in cases]
    if args.json:
        print(json.dumps(report))
    else:
        _run_tables(report, cases, use)
    _plot(args, "utilisation_figure", *use, unit="rank")


def _run_tables(report, cases, use):
    """What rank 0 reports of `run`: cases and use are those before and after."""
    kind = "generated" if report["generated"] else "real"
    experts = f"{report['experts']} experts, top {report['top_k']}, {report['layers']} layers"
    where = f"width {report['dim']} -> {report['hidden']}, {report['ranks']} ranks on {report['device']}"
    columns = [name for when in ("before", "after") for name in (f"tokens {when}", "utilisation", "compute, ms")]
    rows = []
    for r in range(report["ranks"]):
        cells = [(c["rank_tokens"][r], f"{u[r]:.0%}", f"{c['compute_s'][r] * 1e3:.1f}") for c, u in zip(cases, use)]
        rows.append((r, *cells[0], *cells[1]))
    _table(f"{experts}, {where}, {kind} routing", ["rank", *columns], rows)
    critical, mean = [c["critical_rows"] for c in cases], sum(cases[0]["rank_tokens"]) / report["ranks"]
    print(
        f"rows on the critical path: {critical[0]} -> {critical[1]} (bound {mean:.0f}); "
        f"output {'bit-identical to' if report['identical'] else 'differs from'} one process"
        + ("" if report["identical"] else f" by at most {report['max_error']:.2g}")
    )


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
    _table(f"{args.ranks} ranks, one lost in the middle of a step", ["", ""], rows)


def _bench(args):
    from .bench import bench

    record = bench(args.traces, progress=not args.json)
    if args.record:
        with _writing("--record"):
            files.write_text(args.record, json.dumps(record, indent=1) + "\n")
    if args.json:
        print(json.dumps(record))
        return
    rows = []
    for r in record["rows"]:
        case, ok = ", ".join(f"{v}" for v in r["case"].values()), {True: "yes", False: "NO", None: ""}[r["ok"]]
        rows.append((r["target_no"], case, r["impl"], r["metric"], f"{r['value']:.4g}", r["target"] or "", ok))
    _table("Targets and baselines", ["", "case", "impl", "metric", "value", "target", "ok"], rows)


COMMANDS = {"place": _place, "simulate": _simulate, "run": _run, "survive": _survive, "bench": _bench}

if __name__ == "__main__":
    sys.exit(main())
