"""What the engine measures: time to first token, inter-token latency, throughput, peak memory, concurrency."""

import contextlib
import gc
import inspect
import random
import statistics
import time

import torch

from ladder.lab import results

from .engine import Engine
from .sampling import SamplingParams

FRACTIONS = (0.85, 0.90, 0.95)


class Interrupted(Exception):
    """Ctrl-C during a measurement; ``partial`` is the row so far, None when there is nothing to say."""

    def __init__(self, partial):
        self.partial = partial


def case(spec, **fields):
    """The ``case`` of an engine row; of several ranks it says how many, and how the experts are split."""
    part = spec.parallel
    several = (
        {"tensor_parallel": part.size, "experts": part.experts if part.placement is None else "placed"} if part else {}
    )
    return {"mode": "engine", "model": spec.name, **fields, **several}


def peak_bytes(engine):
    """The most that PyTorch held at once on the device, of ranks the largest; None on a CPU."""
    if engine.device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated()
    return engine.parallel.most(peak) if engine.parallel else peak


def random_prompts(count, length, vocab, seed=0):
    """``count`` prompts of ``length`` random tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(1, vocab) for _ in range(length)] for _ in range(count)]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(requests, began):
    """TTFT of the whole batch and the median request, ITL p50 and p99 in ms, output tokens a second."""
    firsts = [r.times[0] for r in requests if r.times]
    if not firsts:
        return {}
    gaps = [1e3 * (b - a) for r in requests for a, b in zip(r.times, r.times[1:])]
    tokens, last = sum(len(r.times) for r in requests), max(r.times[-1] for r in requests if r.times)
    found = {
        "ttft_ms": round(1e3 * (max(firsts) - began), 2),
        "ttft_p50_ms": round(1e3 * (statistics.median(firsts) - began), 2),
    }
    if gaps:
        found |= {"itl_ms": round(statistics.median(gaps), 3), "itl_p99_ms": round(percentile(gaps, 0.99), 3)}
    return found | {"tok_s": round(tokens / (last - began), 1), "output_tokens": tokens}


def throughput(spec, backend, *, input_len, output_len, concurrency, fit=False, repeats=1, progress=None, **options):
    """Serve ``concurrency`` requests of random tokens, all there at once, after a warm-up of the same shapes.

    Args:
        fit: size the KV pool for exactly these requests, so that ``peak_bytes`` is what the work needs.
        repeats: measure so often; each number is the median of the runs, ``repeats`` in the row says of how many.
        progress: called with the share of output tokens that are done.
        options: of ``Engine``.

    Returns:
        A results row. ``peak_bytes`` is all that PyTorch held at once
        on the device, weights and the whole pool included.

    Raises:
        Interrupted: by Ctrl-C, with a row of what was measured until then, marked ``"partial": true``.
    """
    options.setdefault("max_len", input_len + output_len)
    options.setdefault("max_seqs", concurrency)
    if fit:
        page = options.get("page_size", 64)
        options["kv_tokens"] = concurrency * -(-(input_len + output_len) // page) * page
    engine = Engine(spec, backend, **options)
    cuda = engine.device.type == "cuda"
    prompts = random_prompts(concurrency, input_len, spec.config.vocab)
    engine.generate(prompts, SamplingParams(max_tokens=min(output_len, 4)))  # compiles and captures
    params = SamplingParams(max_tokens=output_len)
    runs, interrupted = [], False
    for repeat in range(repeats):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, preempted, began, done = set(engine.requests), engine.scheduler.preemptions, time.perf_counter(), 0
        try:
            for event in engine.stream(prompts, params):
                done += 1
                if progress and done % 64 == 0:
                    progress((repeat + done / (concurrency * output_len)) / repeats)
        except KeyboardInterrupt:
            interrupted = True
        found = summary([r for n, r in engine.requests.items() if n not in before], began)
        if found:
            found["preemptions"] = engine.scheduler.preemptions - preempted
        if found and (not interrupted or not runs):  # a run cut short counts when there is no other
            runs.append(found)
        if interrupted:
            break
    measured = runs[0] if runs else {}
    if len(runs) > 1:
        measured = {
            name: round(statistics.median(run[name] for run in runs), 3) for name in measured if name != "output_tokens"
        }
        measured |= {"output_tokens": runs[0]["output_tokens"], "repeats": len(runs)}
    row = results.row(
        case(spec, input_len=input_len, output_len=output_len, concurrency=concurrency,
             dtype=str(engine.dtype).removeprefix("torch."),
             weights="checkpoint" if spec.source else "random"),
        engine.backend.name,
        peak_bytes=peak_bytes(engine),
        mem_fraction=engine.config.mem_fraction, kv_pool_tokens=engine.pool.tokens,
        kv_pool_bytes=engine.runner.cache.nbytes,
        kv_used_tokens=engine.pool.most_used * engine.pool.page_size,
        cuda_graphs=engine.runner.captures, chunk_tokens=engine.scheduler.chunk_tokens, **measured,
    )  # fmt: skip
    release(engine)
    if interrupted:
        raise Interrupted({**row, "partial": True} if runs else None)
    return row


def memory_table(
    spec, backend, *, input_len, output_len, fractions=FRACTIONS, requests=0, max_seqs=256, progress=None, **options
):
    """Most requests that run at the same time at each memory fraction, and with ``requests`` a run of mixed ones that
    must not fail.

    The mixed requests have prompts of 1 .. 4 * input_len tokens, so that the pool overflows and requests wait, are
    preempted and resumed.

    Returns:
        Results rows: ``concurrency`` is how many requests of input_len + output_len tokens the pool holds at once.
    """
    rows = []
    try:
        for number, fraction in enumerate(fractions):
            engine = Engine(
                spec, backend, mem_fraction=fraction, max_len=4 * input_len + output_len, max_seqs=max_seqs, **options
            )
            size = engine.pool.pages_for(input_len + output_len)
            most = max_seqs * engine.pool.pages_for(4 * input_len + output_len) + 1
            held = (engine.pool.num_pages - 1) // size
            extra = {}
            if requests:
                extra = _mixed(
                    engine, requests, input_len, output_len,
                    lambda share: progress and progress((number + share) / len(fractions)),
                )  # fmt: skip
            rows.append(results.row(
                case(spec, input_len=input_len, output_len=output_len, mem_fraction=fraction,
                     dtype=str(engine.dtype).removeprefix("torch."),
                     weights="checkpoint" if spec.source else "random"),
                engine.backend.name, peak_bytes=peak_bytes(engine),
                concurrency=held, limited_by="memory" if engine.pool.num_pages < most else "max_seqs",
                kv_pool_tokens=engine.pool.tokens, kv_pool_bytes=engine.runner.cache.nbytes, **extra,
            ))  # fmt: skip
            release(engine)
            del engine
    except KeyboardInterrupt:
        raise Interrupted(rows) from None
    return rows


def _mixed(engine, count, input_len, output_len, progress):
    """Serve mixed requests to the end; says how many finished and how often one was preempted."""
    generator = random.Random(0)
    began = time.perf_counter()
    numbers = []
    for _ in range(count):
        length = generator.randint(1, 4 * input_len)
        prompt = [generator.randrange(1, engine.spec.config.vocab) for _ in range(length)]
        numbers.append(engine.submit(prompt, SamplingParams(max_tokens=generator.randint(1, output_len))))
    done = 0
    while engine.busy:
        done += sum(1 for event in engine.step() if event.finished)
        progress(done / count)
    finished = sum(engine.requests[n].finished == "length" for n in numbers)
    if finished != count or engine.pool.used:
        raise RuntimeError(
            f"bench: {finished} of {count} requests finished and {engine.pool.used} pages are still held"
        )
    return {"mixed_requests": finished, "mixed_seconds": round(time.perf_counter() - began, 2),
            "preemptions": engine.scheduler.preemptions, "out_of_memory": 0}  # fmt: skip


def release(engine):
    """Give back an engine's memory, captured graphs first."""
    engine.runner.graphs.clear()
    engine.runner.replayed = None
    engine.runner.cache = engine.runner.context = engine.runner.model = None
    gc.collect()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


def transformers_peer(spec, *, input_len, output_len, concurrency, dtype=torch.bfloat16, device="cuda"):
    """The same work by Hugging Face transformers (SDPA, ``grouped_mm`` experts), random weights, in this process.

    Raises:
        RuntimeError: transformers is not importable, or the model is not ours.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise RuntimeError("bench: --with-transformers needs the package transformers") from error
    if not spec.latent:
        raise RuntimeError(f"bench: transformers has no {spec.name}")
    config = transformers.DeepseekV2Config(**huggingface_config(spec.config))
    experts = "grouped_mm"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    try:
        model.set_experts_implementation(experts)
    except (AttributeError, ValueError):
        experts = "eager"
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0.0, spec.std, generator=generator)
    for module in model.modules():  # buffers that to_empty left without values
        if hasattr(module, "rope_init_fn") or hasattr(module, "compute_default_rope_parameters"):
            module.__init__(config)
            module.to(device)
    ids = torch.tensor(random_prompts(concurrency, input_len, spec.config.vocab), device=device)

    # Newer versions of transformers call it "cache", and warn at the old name.
    kept = next(
        n
        for n in ("cache", "past_key_values")
        if n in inspect.signature(inspect.unwrap(type(model).forward)).parameters
    )

    @torch.inference_mode()
    def run(model, steps):
        times, began = [], time.perf_counter()
        out = model(ids, use_cache=True, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out[kept]
        token.tolist()
        times.append(time.perf_counter())
        for _ in range(steps - 1):
            out = model(token, **{kept: cache}, use_cache=True)
            token, cache = out.logits[:, -1:].argmax(-1), out[kept]
            token.tolist()
            times.append(time.perf_counter())
        return began, times

    run(model, 3)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    # Latency is the same at every step but for the growing cache: 128 steps say what 512 would.
    steps = min(output_len, 128)
    began, times = run(model, steps)
    gaps = [1e3 * (b - a) for a, b in zip(times, times[1:])]
    row = results.row(
        case(spec, input_len=input_len, output_len=output_len, concurrency=concurrency, dtype=str(dtype).removeprefix("torch."), weights="random"),  # noqa: E501
        f"transformers_{'grouped_mm' if experts == 'grouped_mm' else 'eager'}",
        peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None,
        ttft_ms=round(1e3 * (times[0] - began), 2), itl_ms=round(statistics.median(gaps), 3),
        itl_p99_ms=round(percentile(gaps, 0.99), 3),
        tok_s=round(concurrency * steps / (times[-1] - began), 1), measured_steps=steps,
        version=transformers.__version__,
    )  # fmt: skip
    del model
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()
    return row


def huggingface_config(c):
    """Our configuration under the names of the public checkpoint's ``config.json``."""
    return dict(
        vocab_size=c.vocab, hidden_size=c.width, intermediate_size=c.dense_width, moe_intermediate_size=c.expert_width,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_heads,
        n_shared_experts=c.num_shared, n_routed_experts=c.num_experts, num_experts_per_tok=c.top_k,
        kv_lora_rank=c.latent,
        q_lora_rank=None, qk_rope_head_dim=c.rope_dim, qk_nope_head_dim=c.nope_dim, v_head_dim=c.v_dim, n_group=1,
        topk_group=1,
        topk_method="greedy", norm_topk_prob=c.renormalize, first_k_dense_replace=c.num_dense, moe_layer_freq=1,
        max_position_embeddings=c.context, rms_norm_eps=c.eps, routed_scaling_factor=c.routed_scale,
        rope_scaling=c.rope,
        scoring_func="softmax", tie_word_embeddings=False, attention_bias=False, hidden_act="silu",
        model_type="deepseek_v2",
        **({} if c.rope_theta is None else {"rope_theta": c.rope_theta}),
    )  # fmt: skip
