"""The article's claims and what the records say, as a page: ``python -m ladder.chapters.claims`` writes it."""

import argparse
from pathlib import Path

from dspark_mini import baselines, bundled_trace
from ladder import step01_naive, step05_fused
from ladder.chapters.article import ARTICLE, ARTICLE_CONCURRENCY
from ladder.chapters.ch11_end_to_end import tables as end_to_end
from ladder.lab import results
from ladder.lab.problem import AttentionProblem

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "what_is_true.md"
LONG = AttentionProblem(Sq=16384, Sk=16384, Hq=16, Hkv=16, D=128, Dv=128, dtype="bfloat16")
OLD, NEW = "step07_dflash1", "step08_dflash2"
CHAPTERS = {
    0: "00_orientation", 1: "01_naive", 5: "05_fused", 6: "06_paged", 7: "07_dflash1", 8: "08_dflash2",
    9: "09_profiling", 10: "10_scheduling", 11: "11_end_to_end",
}  # fmt: skip
INTRODUCTION = """\
# What is true in the article

This project grew from one article of 2026 about serving mixture-of-experts models. The article describes two
attention kernels, "DFlash" and "DFlash2", and a scheduler of experts, "DSpark". It reports measurements of
DeepSeek-V2-Lite on two A100 under SGLang, and advises when to use which. It gives no source code, and nobody has
verified its numbers. The ladder builds what it describes and measures it on other hardware, an H200. Absolute numbers
therefore do not compare; ratios and mechanisms do.

Each row says what the article claims, whether it holds here, and why, with the chapter that shows it. The numbers come
from `notebooks/results/`; `python -m ladder.chapters.claims` writes this page from them.

| | the article says | here | because | chapter |
|--:|:--|:--|:--|:--|
"""


def ms(record, impl, **case):
    """Median milliseconds of one recorded row."""
    return results.one(results.load(record), impl, **case)["ms"]["median"]


def prefill(impl, length):
    """The recorded row of a causal prompt with 16 heads of 128, from the first record that has it."""
    case = dict(mode="prefill", Sq=length, Sk=length, Hq=16, Hkv=16, D=128, Dv=128, causal=True)
    for record in ("ladder", NEW):
        found = [row for row in results.select(results.load(record), impl, **case) if "ms" in row]
        if found:
            return found[0]
    raise LookupError(f"no record has {impl} on {length:,} tokens")


def fields(problem):
    """The fields of a problem that pick its recorded rows."""
    return {key: value for key, value in problem.case().items() if key != "mode"}


def four_way():
    """{"kernel", "scheduler", "both": output tokens/s over "neither"} on two GPUs with skewed routing."""
    rows = results.select(results.load("multi_gpu"), part="four_way")
    speed = {row["case"]["which"]: row["tok_s"] for row in rows if row["case"]["skew"].startswith("zipf")}
    return {which: value / speed["neither"] for which, value in speed.items()}


def counters(kind, impl):
    """Shares that Nsight Compute recorded of a rung's kernel, or None while they are not recorded."""
    try:
        return results.select(results.load("ncu"), impl, mode=f"ncu_{kind}")[0]["shares"]
    except (FileNotFoundError, IndexError):
        return None


def claims():
    """[(claim, verdict, reason, chapter number)] with the numbers of the records."""
    served = {impl: end_to_end.served(results.load("engine"), impl) for impl in (OLD, NEW)}
    gain = {name: served[OLD][name] / served[NEW][name] for name in ("ttft_ms", "itl_ms")}
    dense = {
        row["impl"]: row for row in results.select(results.load("engine"), model="mla-dense") if "ttft_ms" in row
    }  # fmt: skip
    article = {name: old / new for name, (_, _, old, new) in ARTICLE.items()}
    naive, fused = (results.one(results.load("ladder"), r, **fields(LONG)) for r in ("step01_naive", "step05_fused"))
    short = {"B": 16, **{key: fields(LONG)[key] for key in ("Hq", "D", "causal")}, "Sq": 1024}
    eager = ms("ladder", "step01_naive", **short) / ms("ladder", "step05_fused", **short)
    quality = {row["case"]["policy"]: row["bits_per_byte"] for row in results.load("engine_quality")["rows"]}
    placed = baselines.contiguous(bundled_trace().counts(), num_gpus=8)
    loads = placed.gpu_load[int(placed.balancedness.argmin())]
    groups = results.select(results.load(OLD), mode="groups", task="law", layer=0)
    groups = {row["impl"]: row["ms"]["median"] for row in groups}
    long = {impl: {n: prefill(impl, n) for n in (4096, 131072)} for impl in (OLD, NEW)}
    ratio = {n: long[OLD][n]["ms"]["median"] / long[NEW][n]["ms"]["median"] for n in long[OLD]}
    speed = {n: f"{row['tflops']:.0f} TFLOP/s" for n, row in long[OLD].items()}
    mixed = [row for row in results.load("engine")["rows"] if "mixed_requests" in row]
    several = four_way()
    decode, prompt = counters("decode", NEW), counters("prefill", NEW)
    both = "Nsight Compute's counters are not recorded yet"
    if decode and prompt:
        both = (
            f"step 08's prefill uses {prompt['compute']:.0%} of the compute and {prompt['memory']:.0%} of the memory "
            f"throughput, its decode {decode['compute']:.0%} and {decode['memory']:.0%}: each is limited by one of "
            "the "
            "two, as its arithmetic says"
        )
    held = end_to_end.concurrency(end_to_end.memory_plan(80e9, 0.90), 4608)
    return [
        ("The weights of a 671B model take about 1.34 TB in bf16, although 37B parameters are active", "true",
         f"671 · 10⁹ x 2 bytes = {671e9 * 2 / 1e12:.2f} TB, and every expert must be loaded", 0),
        ("Attention is limited by memory traffic, not by FLOPs", "depends",
         "decode does about 1 FLOP for each byte of cache and is limited by memory; a prompt of 16k tokens does "
         f"{LONG.flops / LONG.min_bytes:,.0f} per byte and is limited by arithmetic once its scores stay on the "
         "chip", 0),
        ("Tiles reduce the memory traffic of attention from O(N²) to O(N)", "depends",
         f"loads fall from {step01_naive.bytes_moved(LONG) / 1e9:.0f} GB to "
         f"{step05_fused.bytes_moved(LONG) / 1e9:.0f} GB "
         "at 16k tokens, and still grow with N², because each tile of queries loads K and V again; the L2 cache "
         "serves "
         "most of these loads, so that device memory sees O(N)", 5),
        ("One fused kernel is much faster than eager PyTorch, even for short prompts", "true",
         f"{eager:.1f} x at 1,024 tokens and {naive['ms']['median'] / fused['ms']['median']:.1f} x at 16,384, "
         "without a "
         "mask", 5),
        ("The kernel lowers the peak memory of a 32k prefill by almost 20 %", "depends",
         f"against eager attention it saves far more ({naive['peak_bytes'] / 1e9:.1f} GB fall to "
         f"{fused['peak_bytes'] / 1e9:.2f} GB at 16k tokens); against another fused kernel there is nothing left "
         "to save", 5),
        ("The kernel exploits a model's sparsity by grouping tokens by their experts in attention", "false",
         "attention is dense, and the order of tokens does not change its work; grouping by expert pays in the "
         "experts' "
         f"products, where it makes a padded product {groups['padded'] / groups['compact']:.1f} x as fast", 7),
        ("The sparser the model, the more an attention kernel gains", "false",
         "in prefill attention's share is the same for a mixture and for a dense model with as many active "
         "parameters; "
         "in decode a mixture reads more weights, so attention's share is smaller", 11),
        ("The first generation slows down beyond 64k tokens, because of its mask and tiles", "false",
         f"step 07 does {speed[4096]} at 4k tokens and {speed[131072]} at 128k", 8),
        ("The second generation prefills 128k tokens almost 40 % faster", "depends",
         f"step 08 is {ratio[131072]:.2f} x as fast as step 07 there and {ratio[4096]:.2f} x at 4k; the gain comes "
         "from "
         "TMA, wgmma and specialised warps, and not from a schedule for long contexts", 8),
        ("Windows that differ by range are very effective for long documents", "depends",
         f"they save time in proportion to what they hide; on the small model a window of 512 costs "
         f"{quality['sliding 512'] - quality['exact']:.3f} bits per byte and one of 1,024 "
         f"{quality['sliding 1024'] - quality['exact']:+.3f}; another model may lose more", 11),
        ("Fusing RoPE, projections and routing with attention lowers latency further", "true",
         f"tokens follow each other {gain['itl_ms']:.2f} x as fast from step 07 to step 08, where attention takes "
         "a small "
         "share of a decode step: most of it comes from fewer launches", 11),
        ("Multi-token prediction has nothing to do with the kernel", "true",
         "one is a training objective and the other a kernel; a kernel only has to take several query tokens per "
         "sequence, which decode does from rung 06 on", 6),
        (f"TTFT falls by {article['ttft_ms']:.2f} x, ITL by {article['itl_ms']:.2f} x, and throughput grows by "
         f"{1 / article['tok_s']:.2f} x", "depends",
         f"ours on one H200, 8 requests of 4,096 + 512 tokens: TTFT {gain['ttft_ms']:.2f} x, ITL "
         f"{gain['itl_ms']:.2f} x, "
         f"throughput {served[NEW]['tok_s'] / served[OLD]['tok_s']:.2f} x", 11),
        ("Its table: TTFT 580 ms, ITL 17 ms and 430 tokens/s", "true",
         f"the three agree with each other: eight requests imply {end_to_end.implied_throughput(580.0, 17.0):.0f} "
         "tokens/s", 11),
        ("One A100 of 80 GB holds 48, 56 and 64 requests at memory fractions of .85, .90 and .95", "depends",
         f"the arithmetic of a latent cache gives {held:,} requests of 4,608 tokens at .90; its "
         f"{ARTICLE_CONCURRENCY[0.90]} fit if requests were longer or keys and values were cached per head", 11),
        ("A memory fraction of .95 runs out of memory now and then", "depends",
         f"a server that measures its largest step first does not: {sum(row['mixed_requests'] for row in mixed):,} "
         "mixed "
         f"requests at fractions of {', '.join(str(row['case']['mem_fraction']) for row in mixed)} ended without an "
         f"out-of-memory error ({sum(row['out_of_memory'] for row in mixed)})", 11),
        ("The kernel lets the same hardware serve almost twice as many requests", "false",
         "no fused kernel changes the size of the cache, and step 07's own buffers are already small", 11),
        ("Some GPUs are 90 % busy while others are 20 % busy", "true",
         f"in the generated trace, with experts in order on 8 GPUs, the idlest GPU of the worst layer has "
         f"{loads.min() / loads.max():.0%} of the busiest one's tokens", 10),
        ("Dynamic planning assigns the work of a batch to GPUs", "depends",
         "the recurrence exists and is exact for a few requests; for a thousand of them a list schedule with a "
         "proven "
         "bound takes its place", 10),
        ("Kernel and scheduler each add 20 to 30 % throughput, and together almost the product", "depends",
         f"on two GPUs with skewed routing: kernel {several['kernel']:.2f} x, scheduler {several['scheduler']:.2f} "
         "x, both "
         f"{several['both']:.2f} x, where the product is {several['kernel'] * several['scheduler']:.2f} x; with "
         "the routing "
         "of a real model two GPUs are even by themselves, and the scheduler adds nothing", 10),
        ("The scheduler is useless on one GPU", "true", "there is nothing to balance", 10),
        ("A dense model with prompts of 512 tokens gains nothing", "depends",
         f"attention gains nothing there; step 08 still shortens the time between tokens by "
         f"{dense[OLD]['itl_ms'] / dense[NEW]['itl_ms']:.2f} x, because it spares launches around attention", 11),
        ("Take the kernel if attention has more than 30 % of the time, otherwise look at scheduling first", "true",
         "it follows from Amdahl's law for a kernel that replaces attention alone; a kernel that also replaces what "
         "surrounds attention is not bound by attention's share", 9),
        ("In a good kernel both throughputs of Nsight Compute are high", "false", both, 9),
        ("The kernel's name in a profile shows whether it runs", "true",
         "a flag on a command line shows nothing; every kernel of rungs 07 and 08 has its rung in its name", 9),
        ("SGLang has a flag `--enable-dflash`, and early versions of it failed with grouped heads", "not testable "
         "here",
         "we found no such flag; `ladder.integrations` connects step 08 to transformers and to FlashAttention's "
         "interface", 11),
        ("Results on an A100 do not carry over to an H20", "not testable here",
         "all our records are of one H200; the live cells measure yours", 0),
    ]  # fmt: skip


def page():
    """The whole page."""
    lines = []
    for number, (claim, verdict, reason, chapter) in enumerate(claims(), 1):
        link = f"[{chapter:02d}]({CHAPTERS[chapter]}.ipynb)"
        lines.append(f"| {number} | {claim} | **{verdict}** | {reason} | {link} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder.chapters.claims", description=__doc__.splitlines()[0])
    parser.parse_args(argv)
    results.write_text(PAGE, page())


if __name__ == "__main__":
    main()
