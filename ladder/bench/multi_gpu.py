"""Measure what several GPUs add, beside what the simulator predicts: ``python -m ladder.bench multi_gpu --json FILE``.

It starts a rank for each GPU by itself. The parts:

    dispatch   a MoE layer at DeepSeek-V2-Lite's widths over all ranks, experts in order against placed; the link; a
    migration survive    a rank is killed while it serves
    parity     the engine on all ranks gives the logits of the engine on one
    engine     DeepSeek-V2-Lite, tensor parallel, step 07 against step 08
    four_way   throughput of {neither, kernel, scheduler, both}: step 07 or 08, experts in order or placed

Rows are written as each part ends, so a part that fails or runs out of time costs only itself; ``failures`` names it.
Random weights route almost evenly, so ``four_way`` biases the routers: their choice then follows a Zipf law with the
hot experts first, the worst case for experts in order, or the popularity in the generated trace of ``dspark_mini``,
which has the statistics of DeepSeek-V2-Lite's real routing. ``--device cpu`` runs all parts small, over gloo: the code,
not the numbers.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from ladder.lab import results

PARTS = ("dispatch", "survive", "parity", "engine", "four_way")
# seconds of a start of all ranks; the last is shared by three parts
LIMITS = {"dispatch": 45, "survive": 40, "serve": 120}
SERVED = dict(input_len=4096, output_len=512, concurrency=8)
FOUR_WAY = dict(input_len=16384, output_len=64, concurrency=4)  # long prompts, so that attention is worth something
SPARE = 2  # slots of each rank for second copies
NAMES = {(0, 0): "neither", (1, 0): "kernel", (0, 1): "scheduler", (1, 1): "both"}
SMALL = dict(
    sizes=dict(dim=64, hidden=32, layers=2, steps=2, tokens=(64, 8)),
    served=dict(input_len=24, output_len=6, concurrency=2),
    options=dict(kv_tokens=512, page_size=16, chunk_tokens=64),
)


# ---------------------------------------------------------------- routing and predictions


def router_bias(rates, logit_std, top_k, *, tokens=4096, rounds=200, device="cpu", seed=0):
    """What to add to routers' probabilities so that experts are chosen about as often as wanted.

    Args:
        rates: (layers, experts), how often tokens choose each expert, in any unit; no more than 1 a token counts.
        logit_std: standard deviation of a random router's logits. top_k: experts of a token.

    Returns:
        (layers, experts) float32 on the CPU, found by raising the bias
        of experts that are chosen too seldom on random logits.
    """
    rates = torch.as_tensor(np.asarray(rates, dtype=np.float32), device=device)
    rates = rates / rates.sum(dim=1, keepdim=True)
    wanted = (rates * top_k).clamp_max(0.97)
    experts = rates.shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    probs = (logit_std * torch.randn(tokens, experts, generator=generator, device=device)).softmax(dim=-1)
    bias = torch.zeros_like(wanted)
    for turn in range(rounds):
        ids = (probs + bias[:, None]).topk(top_k, dim=-1).indices.flatten(1)
        found = torch.zeros_like(bias).scatter_add_(1, ids, torch.ones_like(ids, dtype=bias.dtype)) / tokens
        bias += 1.5 / experts * 0.985**turn * (wanted - found)
    return bias.cpu()


def kernel_speeds():
    """{backend: (prefill, decode)}: speed of attention alone as the
    simulator counts it, 3 is the roofline, from recorded files.

    Prefill from step 08's TFLOP/s on 192/128 heads at 4k and its mean gain over step 07; decode from MLA with 16 heads.
    """
    from dspark_mini.simulator import H200

    old, new = "step07_dflash1", "step08_dflash2"
    try:
        doc = results.load(new)
        best = results.select(doc, new, mode="prefill", D=192, Dv=128, Hq=16, Hkv=16, Sq=4096, causal=True)[0]
        gains = []
        for row in results.select(doc, old, mode="prefill", causal=True):
            gains += [row["ms"]["median"] / other["ms"]["median"] for other in results.select(doc, new, **row["case"])]
        gain = float(np.exp(np.mean(np.log(gains))))
        read = {impl: results.select(doc, impl, mode="mla_decode", Hq=16, B=64)[0]["tbs"] for impl in (old, new)}
    except (FileNotFoundError, LookupError):  # what they held when this was written
        return {"step07": (2.2, 2.3), "step08": (2.9, 2.0)}
    prefill = 3 * best["tflops"] * 1e12 / (H200.flops * H200.matmul_efficiency)
    decode = {impl: 3 * tbs * 1e12 / (H200.bytes_per_s * H200.memory_efficiency) for impl, tbs in read.items()}
    return {"step07": (prefill / gain, decode[old]), "step08": (prefill, decode[new])}


def predict(counts, placement, split, speeds, shape, *, ranks, chunk_tokens=8192, model="v2-lite"):
    """The simulator's TTFT, ITL (ms) and output tokens a second of a batch that starts together, and its balancedness.

    Args:
        counts: (MoE layers, experts), measured choices. placement, split: as ``dspark_mini.simulator.simulate`` wants
            them.
        speeds: (prefill, decode) of ``kernel_speeds``. shape: input_len, output_len, concurrency.

    The simulator's attention is data parallel and its exchange two all-to-alls; here attention is split by heads and
    the exchange is two sums. It knows no launches, no dense layer and no output matrix.
    """
    from dspark_mini import Topology, simulator

    ins, outs, many = shape["input_len"], shape["output_len"], shape["concurrency"]
    common = dict(topology=Topology(1, ranks), model=simulator.MODELS[model], split=split)
    rate = counts / counts.sum(axis=1, keepdims=True)
    top_k, rng = common["model"].top_k, np.random.default_rng(0)
    tokens = min(chunk_tokens, ins * many)
    chunk = np.floor(rate * tokens * top_k).astype(np.int64)
    # heads are split evenly: as if each rank had so many tokens
    half = np.full(ranks, tokens // ranks), np.full(ranks, ins // 2)
    prefill = simulator.simulate([chunk], placement, load=simulator.Load(*half), attention_speedup=speeds[0], **common)
    steps = [np.stack([rng.multinomial(many * top_k, p) for p in rate]) for _ in range(4)]
    each = np.ones(many, np.int64), np.full(many, ins + outs // 2)
    decode = simulator.simulate(steps, placement, load=simulator.Load(*each), attention_speedup=speeds[1], **common)
    ttft, itl = prefill.step_s * -(-ins * many // tokens), decode.step_s / len(steps)
    return {
        "ttft_ms": round(1e3 * ttft, 2), "itl_ms": round(1e3 * itl, 3),
        "tok_s": round(many * outs / (ttft + (outs - 1) * itl), 1),
        "balancedness": round(prefill.balancedness, 4),
    }  # fmt: skip


# ---------------------------------------------------------------- what the ranks of the engine do


def small_spec():
    """A model of the architecture that a CPU serves in a second."""
    from ladder.engine.models import Spec
    from ladder.engine.models.deepseek_v2 import YARN, DeepseekV2Config

    config = DeepseekV2Config(
        num_layers=3, width=32, num_heads=4, latent=32, rope_dim=16, nope_dim=16, v_dim=16, num_experts=8, top_k=2,
        num_shared=2,
        expert_width=16, dense_width=48, vocab=96, context=256,
        rope={**YARN, "factor": 4.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    return Spec("deepseek-v2-lite", config, seed=1, std=0.25)


def served_heads(device):
    """Heads of the model that ranks share."""
    from ladder.engine.models import find

    return (find("deepseek-v2-lite") if device == "cuda" else small_spec()).config.num_heads


def serve_rank(rank, num_ranks, port, device, parts, path, seconds):
    """Entry point of a rank: the parts of the engine, one job after
    the other. Rank 0 appends rows to the file ``path``."""
    import torch.distributed as dist

    from dspark_mini.launch import connect
    from ladder.engine import parallel

    end = time.monotonic() + seconds
    part = parallel.join(
        device, store=dist.PrefixStore("serve", connect(port)), rank=rank, size=num_ranks, timeout_s=100
    )

    def tell(row):
        if rank == 0:
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")

    for name in parts:
        for job in JOBS[name](part, device):
            if part.least(int(end - time.monotonic())) < (12 if device == "cuda" else 5):
                return tell({"failed": name, "error": "out of time before its end"})
            try:
                for row in job():
                    tell(row)
            except parallel.RankLost:
                raise
            except Exception as error:  # noqa: BLE001 - the other parts may still run
                tell({"failed": name, "error": short(error)})
                error.__traceback__ = None  # it holds the failed engine
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
    parallel.leave()


def short(error):
    """An error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1][:300]}"


def _setting(part, device):
    """(spec, backends, engine options) of a device."""
    from ladder.engine.models import find

    if device == "cpu":
        return small_spec(), ("sdpa", "step08"), SMALL["options"]
    return find("deepseek-v2-lite"), ("step07", "step08"), {"fit": True}


def _case(part, name, **fields):
    return {"mode": "multi_gpu", "part": name, "gpus": part.size, **fields}


def parity_jobs(part, device):
    """The logits of a few layers on all ranks against those of one rank, for every split of the experts."""
    from dspark_mini import place
    from ladder.engine import bench, parallel
    from ladder.engine.engine import Engine
    from ladder.engine.sampling import SamplingParams
    from ladder.engine.scheduler import Request

    spec, backends, _ = _setting(part, device)
    layers = 3
    spec = dataclasses.replace(spec, config=dataclasses.replace(spec.config, num_layers=layers))
    c = spec.config
    load = (
        torch.rand(layers - c.num_dense, c.num_experts, generator=torch.Generator().manual_seed(3)).numpy() ** 3 * 1000
    )
    ways = {
        "whole": {}, "width": {"experts": "width"},
        "placed": {"placement": place(load, num_gpus=part.size, num_slots=c.num_experts + SPARE * part.size)},
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, c.vocab, (n,), generator=generator).tolist() for n in (70, 200, 3)]

    def logits(spec, backend):
        """(2 * prompts, vocab): after each prompt, and after one more token."""
        engine = Engine(
            spec, backend, device=None if spec.parallel else str(part.device), kv_tokens=1024, max_len=256, max_seqs=4
        )
        requests, rows = [], []
        for n, prompt in enumerate(prompts):
            request = Request(n, prompt, SamplingParams())
            engine.pool.grow(request.pages, len(prompt) + 1)
            rows.append(engine.runner.prefill([(request, len(prompt))]).float().cpu())
            request.computed = len(prompt)
            request.output.append(7)
            requests.append(request)
        rows.append(engine.runner.decode(requests)[0].float().cpu())
        tokens, captured = engine.generate(prompts, SamplingParams(max_tokens=4)), engine.runner.captures
        bench.release(engine)
        return torch.cat(rows), tokens, captured

    def job(backend):
        want = logits(spec, backend)  # every rank by itself, so that nobody waits in a sum while another compiles
        for way in ways if backend == backends[-1] else ["placed"]:
            several = parallel.Parallel(part.rank, part.size, part.device, **ways[way])
            got, tokens, captured = logits(dataclasses.replace(spec, parallel=several), backend)
            error = float((got - want[0]).norm() / want[0].norm())
            if part.rank == 0:
                same = sum(a == b for x, y in zip(tokens, want[1]) for a, b in zip(x, y)) / sum(map(len, tokens))
                yield {
                    "case": _case(part, "parity", backend=backend, experts=way, layers=layers), "impl": backend,
                    "error": error,
                    "same_tokens": round(same, 3), "cuda_graphs": captured,
                    "ok": error < (1e-4 if device == "cpu" else 0.05),
                }  # fmt: skip

    for backend in backends:
        yield lambda backend=backend: job(backend)


def engine_jobs(part, device):
    """The article's table on this machine: steps 07 and 08 on all ranks."""
    from dspark_mini import baselines
    from ladder.engine import bench

    spec, backends, options = _setting(part, device)
    shape = SERVED if device == "cuda" else SMALL["served"]
    even = np.ones((26, 64))
    speeds = kernel_speeds()

    def job(backend):
        row = bench.throughput(dataclasses.replace(spec, parallel=part), backend, device=device, **shape, **options)
        if part.rank == 0:
            row["case"] = {**row["case"], "part": "engine", "gpus": part.size}
            plan = baselines.contiguous(even, num_gpus=part.size)
            fast = speeds.get(backend, speeds["step07"])
            row["predicted"] = predict(even, plan, baselines.equal_split, fast, shape, ranks=part.size)
            yield row

    for backend in backends:
        yield lambda backend=backend: job(backend)


def four_way_jobs(part, device):
    """Throughput of {neither, kernel, scheduler, both} under each
    skew; what is placed for is counted on the running engine."""
    from dspark_mini import baselines, bundled_trace, place, split_batch
    from ladder.engine import bench, parallel

    spec, backends, options = _setting(part, device)
    shape = FOUR_WAY if device == "cuda" else SMALL["served"]
    c = spec.config
    layers = c.num_layers - c.num_dense
    zipf = 1.0 / np.arange(1, c.num_experts + 1) ** 0.8
    rates = {"zipf 0.8, hot experts first": np.tile(zipf, (layers, 1))}
    trace = bundled_trace()
    if (layers, c.num_experts) == (trace.num_layers, trace.num_experts):
        rates[f"popularity of {trace.source}"] = trace.counts()
    speeds = kernel_speeds()

    def throughput(spec, backend):
        return bench.throughput(spec, backend, device=device, **shape, **options)

    def job(skew, wanted):
        bias = router_bias(wanted, spec.std * c.width**0.5, c.top_k, device=part.device)
        skewed = dataclasses.replace(spec, router_bias=bias.numpy())
        counts = count_routing(dataclasses.replace(skewed, parallel=part), backends[0], shape, device, options)
        placement = place(counts, num_gpus=part.size, num_slots=c.num_experts + SPARE * part.size)
        plans = {
            0: (part, baselines.contiguous(counts, num_gpus=part.size), baselines.equal_split),
            1: (parallel.Parallel(part.rank, part.size, part.device, placement=placement), placement, split_batch),
        }
        found = {}
        for scheduled, (several, plan, split) in plans.items():
            for fast, backend in enumerate(backends):
                name = NAMES[fast, scheduled]
                row = throughput(dataclasses.replace(skewed, parallel=several), backend)
                predicted = None
                if counts.shape == (26, 64):  # the model that the simulator knows
                    predicted = predict(
                        counts, plan, split, speeds.get(backend, speeds["step07"]), shape, ranks=part.size
                    )
                found[name] = row, predicted
                if part.rank == 0:
                    gains = {} if name == "neither" else {"gain": round(row["tok_s"] / found["neither"][0]["tok_s"], 4)}
                    if predicted and gains:
                        predicted["gain"] = round(predicted["tok_s"] / found["neither"][1]["tok_s"], 4)
                    row["case"] = {**row["case"], "part": "four_way", "gpus": part.size, "skew": skew, "which": name}
                    extra = {"balancedness": round(float(plan.balancedness.mean()), 4), "predicted": predicted, **gains}
                    yield {**row, **extra}

    for skew, wanted in rates.items():
        yield lambda skew=skew, wanted=wanted: job(skew, wanted)


def count_routing(spec, backend, shape, device, options):
    """(MoE layers, experts) int64: choices of experts in the prompts
    of the benchmark, counted on the running engine."""
    from ladder.engine import bench
    from ladder.engine.engine import Engine
    from ladder.engine.sampling import SamplingParams

    options = {k: v for k, v in options.items() if k != "fit"}
    options = {"kv_tokens": shape["concurrency"] * (shape["input_len"] + 64), **options}
    engine = Engine(
        spec,
        backend,
        device=device,
        max_len=shape["input_len"] + 64,
        max_seqs=shape["concurrency"],
        cuda_graphs=False,
        **options,
    )
    moes = [m for m in engine.runner.model.modules() if hasattr(m, "router")]
    counts = torch.zeros(len(moes), spec.config.num_experts, dtype=torch.int64, device=engine.device)

    def count(row):
        def hook(module, inputs):
            counts[row] += torch.bincount(inputs[2].flatten().long(), minlength=counts.shape[1])

        return hook

    for row, moe in enumerate(moes):
        moe.register_forward_pre_hook(count(row))
    engine.generate(
        bench.random_prompts(shape["concurrency"], shape["input_len"], spec.config.vocab), SamplingParams(max_tokens=1)
    )
    found = spec.parallel.agree(counts).cpu().numpy()  # rank 0's, or ranks could place differently
    bench.release(engine)
    return found


JOBS = {"parity": parity_jobs, "engine": engine_jobs, "four_way": four_way_jobs}


# ---------------------------------------------------------------- the parent, which is no rank


def dispatch(ranks, device, path, seconds):
    """Rows of part ``dispatch``."""
    from dspark_mini.bench_multi_gpu import dispatch_rank
    from dspark_mini.launch import run_ranks

    sizes = SMALL["sizes"] if device == "cpu" else {}
    run_ranks(dispatch_rank, ranks, device, sizes, path, timeout_s=seconds)


def dispatch_row(report, ranks):
    """A report of ``dspark_mini.bench_multi_gpu`` as a results row."""
    what = report["what"]
    impl = {"link": "all_to_all", "layer": report.get("impl"), "migration": "migrate"}[what]
    names = ("what", "routing", "source", "impl", "layers", "slots", "tokens_per_rank", "kind")
    case = {k: report[k] for k in names if k in report and k != "impl"}
    return {"case": {"mode": "multi_gpu", "part": "dispatch", "gpus": ranks, **case}, "impl": impl,
            **{k: v for k, v in report.items() if k not in names}}  # fmt: skip


def survive(ranks, device, path, seconds):
    """One row of part ``survive``, written to ``path``."""
    from dspark_mini.demo import survive_demo

    widths = dict(dim=2048, hidden=1408) if device == "cuda" else {}
    report = survive_demo(
        ranks=ranks, lose=ranks - 1, timeout_s=30.0, device=device, limit_s=seconds, jobs=12, **widths
    )
    kept = ("noticed_s", "resumed_s", "restarted", "copies_fetched", "from_storage", "finished", "jobs", "identical")
    row = {"case": {"mode": "multi_gpu", "part": "survive", "gpus": ranks, "how": "kill", **widths}, "impl": "dspark",
           **{k: report[k] for k in kept},
           "ok": report["identical"] and report["finished"] == report["jobs"]}  # fmt: skip
    results.write_text(path, json.dumps(row) + "\n")


def serve(ranks, device, path, seconds, parts):
    """Rows of the parts of the engine."""
    from dspark_mini.launch import run_ranks

    run_ranks(serve_rank, ranks, device, parts, path, seconds - 8, timeout_s=seconds)


def show(row):
    """A row as one line."""
    case = row["case"]
    which = ("what", "kind", "routing", "experts", "which", "tokens_per_rank", "skew")
    shown = ("gb_s", "step_s", "experts_s", "exchange_s", "utilisation", "resumed_s", "error", "same_tokens", "ttft_ms",
             "itl_ms", "tok_s",
             "gain", "ok")  # fmt: skip

    def text(value):
        if isinstance(value, list):
            return "[" + " ".join(map(text, value)) + "]"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    words = [case["part"], row["impl"], *(str(case[k]) for k in which if k in case)]
    return f"{' '.join(words)}: " + ", ".join(
        f"{name} {text(row[name])}" for name in shown if row.get(name) is not None
    )


@results.names_what_it_cannot_write
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.bench multi_gpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", default="multi_gpu.json", metavar="FILE", help="file for the results; --only leaves its other parts"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default all)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, a GPU for each (default 2)")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu runs all parts small over gloo, to try the code"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="for all parts together (default 150)")
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error(f"argument --ranks: {args.ranks}; want at least 2")
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    if args.device == "cuda" and gpus < args.ranks:
        parser.error(f"argument --ranks: {args.ranks}; want at most {gpus}, the GPUs here, or --device cpu")
    if set(args.only) & set(JOBS) and (heads := served_heads(args.device)) % args.ranks:
        parser.error(
            f"argument --ranks: {args.ranks}; want a divisor of {heads}, the heads of the served model, or --only "
            f"dispatch survive"
        )
    if not 0 < args.seconds < math.inf:
        parser.error(f"argument --seconds: {args.seconds}; want a positive number")
    if not Path(args.json).absolute().parent.is_dir():
        parser.error(f"argument --json: cannot write {args.json}; want a file in a folder that exists")
    for name, value in (("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")):
        os.environ[name] = value  # the switch's multicast: nothing here needs it, and its faults reach beyond a program
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    end, failures, taken = time.monotonic() + args.seconds, [], {}
    try:
        old = earlier_document(args.json, args.device)
    except (ValueError, OSError) as error:
        parser.error(f"argument --json: {error}")
    rows = []
    served = [p for p in PARTS if p in JOBS and p in args.only]
    starts = [("dispatch", dispatch), ("survive", survive)]
    starts = [(name, run, ()) for name, run in starts if name in args.only] + (
        [("serve", serve, (served,))] if served else []
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, run, more in starts:
            path, began = f"{folder}/{name}", time.monotonic()
            seconds = min(LIMITS[name] if args.device == "cuda" else 120, end - began)
            try:
                if seconds < 10:
                    raise TimeoutError("no time is left for it")
                run(args.ranks, args.device, path, seconds, *more)
            except KeyboardInterrupt:
                failures.append({"part": name, "error": "interrupted"})
                break
            except Exception as error:  # noqa: BLE001 - the parts do not depend on each other
                failures.append({"part": name, "error": short(error)})
            finally:
                taken[name] = round(time.monotonic() - began, 1)
                for line in Path(path).read_text().splitlines() if Path(path).exists() else ():
                    found = json.loads(line)
                    if "failed" in found:
                        failures.append({"part": found["failed"], "error": found["error"]})
                        continue
                    rows.append(dispatch_row(found, args.ranks) if "what" in found else found)
                    print(show(rows[-1]), flush=True)
                kept, extra = kept_rows(old, {r["case"]["part"] for r in rows})
                partial = {"partial": True} if name != starts[-1][0] else {}  # also of a run that is stopped later on
                doc = results.document(
                    rows + kept, device=args.device, failures=failures, seconds=taken, **extra, **partial
                )
                results.write(doc, args.json)
    for failure in failures:
        print(f"{failure['part']} failed: {failure['error']}", file=sys.stderr)
    return 1 if failures else 0


def earlier_document(path, device):
    """The document that ``path`` holds already, or None.

    Raises:
        ValueError: it holds something else, or what another machine measured; OSError: it cannot be read.
    """
    if not Path(path).exists():
        return None
    try:
        doc = json.loads(Path(path).read_text())
        results.validate(doc)
    except ValueError as error:
        raise ValueError(f"{path} holds no results ({error}); want another file") from None
    now = results.machine(device)
    if any(doc["machine"].get(k) != now.get(k) for k in ("gpu", "torch")):
        raise ValueError(
            f"{path} was recorded on {doc['machine'].get('gpu')}, torch {doc['machine'].get('torch')}; want another "
            f"file for this machine"
        )
    return doc


def kept_rows(old, measured):
    """Rows of an earlier document of parts that have no new ones, and
    what is to be said of them: where they come from."""
    kept = [r for r in old["rows"] if r["case"]["part"] not in measured] if old else []
    if not kept:
        return [], {}
    source = {k: old[k] for k in ("recorded", "commit", "command", "machine")}
    parts = sorted({r["case"]["part"] for r in kept})
    said = {"note": old["note"]} if "note" in old else {}
    return kept, {"earlier": {part: old.get("earlier", {}).get(part, source) for part in parts}, **said}


if __name__ == "__main__":
    sys.exit(main())
