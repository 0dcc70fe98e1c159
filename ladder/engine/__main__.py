"""``python -m ladder.engine``: generate text, measure, and weigh window policies, by any rung."""

import argparse
import codecs
import dataclasses
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch

from ladder.lab import results

from . import backends, bench, parallel
from .engine import Engine, check_prompt
from .models import NAMES, Bytes, find
from .sampling import SamplingParams

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build_parser():
    """The options of the three commands."""
    parser = argparse.ArgumentParser(
        prog="python -m ladder.engine", description="A small MoE serving engine on any rung of the ladder."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def common(name, text):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--model", choices=NAMES, default="tiny-moe")
        sub.add_argument("--checkpoint", metavar="PATH", help="folder of the public checkpoint (deepseek-v2-lite) or "
            "file of weights (tiny-moe); "
                         "without one deepseek-v2-lite has random weights")  # fmt: skip
        sub.add_argument(
            "--backend",
            default="step08",
            help=f"who computes attention: {', '.join(backends.NAMES)} (default step08); bench takes several, with "
                f"commas",
        )
        sub.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU when there is one")
        sub.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
        sub.add_argument(
            "--mem-fraction", type=float, default=0.9,
            help="share of the device's memory for weights, activations and KV pool (default 0.9)",
        )  # fmt: skip
        sub.add_argument("--chunk-tokens", type=int, default=8192, help="most prompt tokens of a step")
        sub.add_argument("--page-size", type=int, default=64, help="tokens of a page")
        sub.add_argument(
            "--experts", choices=parallel.SPLITS, default="whole",
            help="on several ranks: whole experts on each, or a slice of each (default whole)",
        )  # fmt: skip
        sub.add_argument(
            "--placement",
            metavar="FILE",
            help="on several ranks: where whole experts live, as python -m dspark_mini place --output wrote it",
        )
        sub.add_argument("--no-cuda-graphs", action="store_true", help="launch every kernel of a decode step by itself")
        return sub

    generate = common("generate", "Answer prompts, streaming.")
    generate.add_argument("--prompt", action="append", help="text (repeatable: prompts are answered together)")
    generate.add_argument(
        "--prompt-ids", action="append", metavar="1,2,3", help="token ids instead of text (repeatable)"
    )
    generate.add_argument("--max-tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--window",
        metavar="SINK,WINDOW",
        help="let every token see the first SINK and the newest WINDOW tokens only (step08)",
    )

    measure = common(
        "bench", "Measure time to first token, inter-token latency, throughput and memory with random prompts."
    )
    measure.add_argument("--input-len", type=int, default=4096)
    measure.add_argument("--output-len", type=int, default=512)
    measure.add_argument("--concurrency", type=int, default=8)
    measure.add_argument("--repeats", type=int, default=1, help="measure so often and take the median of each number")
    measure.add_argument(
        "--fit",
        action="store_true",
        help="size the KV pool for exactly these requests: peak memory is then what they need",
    )
    measure.add_argument(
        "--with-transformers", action="store_true", help="also measure Hugging Face transformers in this run"
    )
    measure.add_argument("--memory-table", action="store_true", help="most concurrent requests at memory fractions")
    measure.add_argument("--fractions", type=float, nargs="+", default=list(bench.FRACTIONS), help="of --memory-table")
    measure.add_argument(
        "--requests", type=int, default=0, help="with --memory-table: serve so many mixed requests at each fraction"
    )
    measure.add_argument("--json", metavar="FILE", help="write the results as JSON; - is standard output")
    measure.add_argument(
        "--keep",
        action="store_true",
        help="keep rows of that file for cases and backends that this run does not measure",
    )

    quality = commands.add_parser("quality", help="Bits per byte of tiny-moe against window policy, on held-out text.")
    quality.add_argument("--checkpoint", metavar="FILE", help="weights of tiny-moe (default: those of the repository)")
    quality.add_argument("--device", choices=["cuda", "cpu"])
    quality.add_argument("--dtype", choices=list(DTYPES))
    quality.add_argument("--context", type=int, help="tokens of a sequence (default: the model's context)")
    quality.add_argument("--sequences", type=int, default=16)
    quality.add_argument("--json", metavar="FILE", help="write the results as JSON; - is standard output")

    return parser


def parse_args(argv=None):
    """The arguments of a command; what argparse cannot tell from one
    option alone is refused here, naming the option."""
    parser = build_parser()
    args = parser.parse_args(argv)
    several = parallel.ranks() > 1
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda was asked for, and PyTorch sees no GPU")
    target = getattr(args, "json", None)
    if target and target != "-" and (not Path(target).absolute().parent.is_dir() or Path(target).is_dir()):
        parser.error(f"argument --json: cannot write {target}; want a file in a folder that exists")
    if getattr(args, "placement", None):
        if not several:
            parser.error(
                "argument --placement: one rank holds every expert; start several with torchrun --nproc-per-node"
            )
        if not Path(args.placement).is_file():
            parser.error(f"argument --placement: there is no {args.placement}")
    if args.command == "generate":
        _check_generate(parser, args)
    elif args.command == "bench":
        _check_bench(parser, args, several)
    else:
        if several:
            parser.error("quality runs on one rank; start it without torchrun")
        _at_least(parser, args, context=2, sequences=1)
    return args


def _at_least(parser, args, **least):
    for option, number in least.items():
        value = getattr(args, option)
        if value is not None and value < number:
            parser.error(f"argument --{option.replace('_', '-')}: {value}; want at least {number}")


def _check_generate(parser, args):
    if bool(args.prompt) == bool(args.prompt_ids):
        parser.error("argument --prompt: want prompts as text or as --prompt-ids")
    if args.window:
        try:
            sink, window = (int(n) for n in args.window.split(","))
        except ValueError:
            parser.error(f"argument --window: {args.window!r} is not SINK,WINDOW; want two integers such as 4,1020")
        args.window = sink, window


def _check_bench(parser, args, several):
    if args.with_transformers and several:
        parser.error("argument --with-transformers: measures one rank; start it without torchrun")
    _at_least(
        parser, args, input_len=1, output_len=1, concurrency=1, repeats=1, chunk_tokens=1, page_size=1, requests=0
    )
    for fraction in args.fractions:
        if not 0 < fraction <= 1:
            parser.error(f"argument --fractions: {fraction}; want above 0, at most 1")
    if args.with_transformers and args.model == "tiny-moe":
        parser.error("argument --with-transformers: transformers has no tiny-moe; want --model deepseek-v2-lite")
    if args.with_transformers and importlib.util.find_spec("transformers") is None:
        parser.error("argument --with-transformers: needs the package transformers (pip install transformers)")


class Progress:
    """A progress bar on standard error while something long runs;
    silent where that is no terminal, and on ranks but the first."""

    def __init__(self, text):
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.bar = Bar(*columns, console=Console(stderr=True), transient=True, disable=not first_rank())
        self.task = self.bar.add_task(text, total=1.0)
        self.done = 0.0

    def share(self, share):
        self.bar.update(self.task, completed=share)

    def numbers(self, total):
        """A callback that is told how many of ``total`` more numbers have arrived."""

        def advance(count):
            self.done += count / total
            self.share(self.done)

        return advance

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *error):
        self.bar.stop()


def first_rank():
    """Whether this process speaks for all ranks."""
    return int(os.environ.get("RANK", "0")) == 0


def log(line):
    if first_rank():
        print(f"[engine] {line}", file=sys.stderr, flush=True)


def engine_options(args):
    return dict(
        device=args.device, dtype=DTYPES.get(args.dtype), mem_fraction=args.mem_fraction,
        chunk_tokens=args.chunk_tokens,
        page_size=args.page_size, cuda_graphs=not args.no_cuda_graphs, log=log,
    )  # fmt: skip


def find_part(args):
    """The model that was asked for; among several ranks this rank's part, after joining them."""
    spec = find(args.model, args.checkpoint)
    if parallel.ranks() == 1:
        return spec
    options = {"experts": args.experts}
    if args.placement:
        from dspark_mini import Placement

        try:
            options["placement"] = Placement.from_json(json.loads(Path(args.placement).read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"--placement {args.placement} is no placement of dspark_mini place --output: {error}"
            ) from None
    return dataclasses.replace(spec, parallel=parallel.join(args.device, **options))


def run_generate(args):
    spec = find_part(args)
    on_cpu = args.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and args.model == "tiny-moe" and "OMP_NUM_THREADS" not in os.environ:
        # products this small: threads wait for one another longer than they work, on a busy machine ten times
        torch.set_num_threads(1)
    tokenizer = spec.tokenizer() if args.prompt else Bytes() if not spec.latent else None
    if args.prompt:
        prompts = [tokenizer.encode(text) for text in args.prompt]
    else:
        try:
            prompts = [[int(part) for part in text.split(",")] for text in args.prompt_ids]
        except ValueError:
            raise ValueError(f"--prompt-ids is {args.prompt_ids}; want integers with commas between them") from None
    prompts = [check_prompt(prompt, spec.config.vocab) for prompt in prompts]
    windows = None
    if args.window:
        from ladder.step08_dflash2 import RangeWindows

        windows = RangeWindows.sink_window(*args.window)
    params = [
        SamplingParams(args.max_tokens, args.temperature, args.top_p, args.seed + n, spec.end)
        for n in range(len(prompts))
    ]
    need = max(len(p) for p in prompts) + args.max_tokens
    if need > spec.config.context:
        raise ValueError(
            f"prompt and --max-tokens are {need} tokens; want at most {spec.config.context}, the context of {spec.name}"
        )
    try:
        with Progress(f"loading {spec.name}") as progress:
            engine = Engine(spec, args.backend, max_len=need, max_seqs=len(prompts), windows=windows,
                            progress=progress.numbers(spec.parameters),
                            **engine_options(args))  # fmt: skip
    except KeyboardInterrupt:
        log("interrupted before there was an answer")
        return 130
    began, tokens, interrupted = time.perf_counter(), 0, False
    show = Streams(args.prompt or args.prompt_ids, tokenizer)
    try:
        for event in engine.stream(prompts, params):
            tokens += event.token is not None
            show.event(event, spec.end)
    except KeyboardInterrupt:
        interrupted = True
    show.close()
    seconds = time.perf_counter() - began
    log(f"{tokens} tokens in {seconds:.2f} s" + (", interrupted: the answers above are partial" if interrupted else ""))
    return 130 if interrupted else 0


class Streams:
    """Answers on standard output as they come: one prompt directly, several after they ended, in order."""

    def __init__(self, prompts, tokenizer):
        self.prompts, self.tokenizer = prompts, tokenizer
        self.silent = not first_rank()
        self.live = len(prompts) == 1 and not self.silent
        self.answers, self.order = {}, []
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = self.shown = ""
        if self.live:
            print(prompts[0], end="" if tokenizer else ":", flush=True)

    def event(self, event, end):
        ids = self.answers.setdefault(event.request, [])
        if event.token is None or event.token in end:
            return
        ids.append(event.token)
        if not self.live:
            return
        if self.tokenizer is None:
            print(f" {event.token}", end="", flush=True)
        elif isinstance(self.tokenizer, Bytes):
            print(self.decoder.decode(bytes([event.token])), end="", flush=True)
        else:
            self.text = self.tokenizer.decode(ids)
            if not self.text.endswith("\ufffd"):  # a character of several tokens is still under way
                self.show_rest()

    def show_rest(self):
        print(self.text[len(self.shown) :], end="", flush=True)
        self.shown = self.text

    def close(self):
        if self.silent:
            return
        if self.live:  # with what was held back for a character that never became whole
            print(self.decoder.decode(b"", final=True), end="")
            self.show_rest()
            print()
            return
        for number, prompt in enumerate(self.prompts):
            ids = self.answers.get(number, [])
            text = self.tokenizer.decode(ids) if self.tokenizer else " " + " ".join(map(str, ids))
            print(f"--- {number}\n{prompt}{text}")


def show(row):
    """A row of a benchmark as one line."""
    names = (("ttft_ms", "TTFT {:,.1f} ms"), ("itl_ms", "ITL {:.2f} ms"), ("itl_p99_ms", "p99 {:.2f} ms"),
             ("tok_s", "{:,.0f} tok/s"),
             ("concurrency", "{:,} at once"), ("kv_pool_tokens", "KV pool {:,} tokens"),
             ("preemptions", "{} preemptions"),
             ("bits_per_byte", "{:.4f} bits per byte"), ("visible_pairs", "{:.0%} of pairs visible"))  # fmt: skip
    parts = [text.format(row[name]) for name, text in names if name in row]
    if row.get("peak_bytes"):
        parts.append(f"peak {row['peak_bytes'] / 2**30:.2f} GiB")
    label = row["case"].get("policy") or " ".join(
        [row["impl"], *(str(row["case"][k]) for k in ("mem_fraction",) if k in row["case"])]
    )
    return f"{label}: {', '.join(parts)}" + (" (partial: interrupted)" if row.get("partial") else "")


def run_bench(args):
    if args.keep and args.json in (None, "-"):
        raise ValueError("--keep keeps the rows of a file; want --json FILE with it")
    if args.keep:  # a file that cannot be added to is refused before anything is measured
        results.kept_rows(
            args.json, [], results.machine(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        )
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # a name or a device that does not fit is refused before another backend is measured
    for name in args.backend.split(","):
        backends.make(name, device).check(
            device, DTYPES.get(args.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        )
    spec = find_part(args)
    options = engine_options(args)
    shape = dict(input_len=args.input_len, output_len=args.output_len)
    rows, interrupted = [], False
    try:
        if args.memory_table:
            options.pop("mem_fraction")
            for backend in args.backend.split(","):
                for fraction in args.fractions:  # one by one: where one does not fit, those before it are kept
                    with Progress(f"{fraction:g} of the memory on {backend}") as progress:
                        rows += bench.memory_table(
                            spec, backend, requests=args.requests, fractions=[fraction], progress=progress.share,
                            **shape, **options,
                        )  # fmt: skip
        else:
            for backend in args.backend.split(","):
                with Progress(f"{spec.name} on {backend}") as progress:
                    rows.append(bench.throughput(spec, backend, concurrency=args.concurrency, repeats=args.repeats,
                                                 fit=args.fit,
                                                 progress=progress.share, **shape, **options))  # fmt: skip
        if args.with_transformers:
            log("measuring transformers")
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = DTYPES.get(args.dtype) or (torch.bfloat16 if device == "cuda" else torch.float32)
            rows.append(
                bench.transformers_peer(spec, concurrency=args.concurrency, device=device, dtype=dtype, **shape)
            )
    except bench.Interrupted as stop:
        interrupted = True
        rows += stop.partial if isinstance(stop.partial, list) else [stop.partial] if stop.partial else []
    except KeyboardInterrupt:
        interrupted = True
    except (parallel.RankLost, ValueError, NotImplementedError, RuntimeError):
        if rows:  # what is whole is kept
            finish(rows, args, True)
        raise
    return finish(rows, args, interrupted)


def run_quality(args):
    from . import quality
    from .models import tiny_moe

    rows, interrupted = [], False
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with Progress("window policies") as progress:
            rows = quality.table(weights=args.checkpoint or tiny_moe.WEIGHTS, context=args.context,
                                 sequences=args.sequences,
                                 device=device, dtype=DTYPES.get(args.dtype), progress=progress.share)  # fmt: skip
    except bench.Interrupted as stop:
        rows, interrupted = stop.partial, True
    except KeyboardInterrupt:
        interrupted = True
    return finish(rows, args, interrupted)


def finish(rows, args, interrupted):
    """Print rows, write them where asked, and say so when Ctrl-C cut them short; the first rank does."""
    if not first_rank():
        return 130 if interrupted else 0
    for row in rows:
        print(show(row), file=sys.stderr if args.json == "-" else sys.stdout)
    if args.json not in (None, "-") and not rows:
        log(f"nothing was measured: {args.json} is left as it is")
    elif args.json:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        extra = {"partial": True} if interrupted else {}
        doc = results.document(rows, device=device, **extra)
        if getattr(args, "keep", False) and args.json != "-":
            kept = results.kept_rows(args.json, doc["rows"], doc["machine"], by_impl=True)
            if not doc["rows"]:
                log(f"{args.json} keeps the whole rows that it has")
                return 130 if interrupted else 0
            doc["rows"] += kept
            doc |= results.kept_note(args.json) if kept else {}
        results.write(doc, args.json)
    if interrupted:
        log("interrupted: the results are partial" if rows else "interrupted before there was a result")
    return 130 if interrupted else 0


def main(argv=None):
    args = parse_args(argv)
    try:
        code = {"generate": run_generate, "bench": run_bench, "quality": run_quality}[args.command](args)
    except (ValueError, FileNotFoundError, NotImplementedError) as error:
        print(f"python -m ladder.engine {args.command}: {error}", file=sys.stderr)
        code = 2
    except parallel.RankLost as error:
        print(f"python -m ladder.engine {args.command}: {error}", file=sys.stderr)
        code = 1
    if parallel.ranks() > 1:  # destructors of groups can wait for ranks that are gone: no rank leaves through them
        if code == 0:
            parallel.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
