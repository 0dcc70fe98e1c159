"""compute-sanitizer's memcheck over one case of every kernel of step 08: no access outside an allocation, no misaligned one.

Each case runs in a process of its own (this file, as a program) where PyTorch gives every tensor its own allocation, so that a
byte read past one is seen. ``python tests/gpu/test_memcheck.py NAME`` runs one by hand; without the tool on this machine the
tests are skipped.
"""

import os
import shutil
import subprocess
import sys

import pytest
from support import ROOT

pytestmark = pytest.mark.gpu

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
RAGGED = dict(B=3, lengths=(700, 1, 333), max_context=1024)
LATENT = dict(Hkv=1, D=576, Dv=512, latent=True, scale=192**-0.5)
SPLIT = "dflash2_merge_splits"
# name: (kernels that must have run, on sm_90 only?)
CASES = {
    "prefill": ({"dflash2_prefill_hopper"}, True),
    "prefill 192/128 with windows": ({"dflash2_prefill_hopper"}, True),
    "prefill from pages, split": ({"dflash2_prefill_hopper", SPLIT}, True),
    "prefill with ranges that overlap": ({"dflash2_prefill_hopper"}, True),
    "portable prefill": ({"dflash2_prefill"}, False),
    "decode": ({"dflash2_decode_hopper"}, True),
    "decode, 4 tokens": ({"dflash2_decode_hopper"}, True),
    "portable decode": ({"dflash2_decode"}, False),
    "portable decode, own schedule": ({"dflash2_decode", "dflash2_schedule"}, False),
    "MLA of 16 heads": ({"dflash2_mla_few_hopper", "dflash2_mla_merge_parts"}, True),
    "MLA of 128 heads": ({"dflash2_mla_hopper"}, True),
    "QKV, rotary, append": ({"dflash2_qkv_rope_append"}, False),
    "QKV, rotary, append in two": ({"dflash2_rope_append"}, False),
    "MLA append": ({"dflash2_mla_append"}, False),
    "router": ({"dflash2_norm_router"}, False),
    "add and norm": ({"dflash2_add_norm"}, False),
    "appending past the page table": ({"dflash2_decode_hopper"}, True),
}


def run_case(name):
    """Call the case's entry once on inputs whose lengths fill no tile; returns the names of the kernels that were launched."""
    import torch
    import triton

    from ladder.bench import fusion as bench_fusion
    from ladder.integrations.flash_attn import flash_attn_with_kvcache
    from ladder.lab.decode_problem import DecodeProblem
    from ladder.step08_dflash2 import Range, RangeWindows, api, dflash2_attention, fusion, get_decode_schedule
    from ladder.step08_dflash2.hopper import prefill as hopper

    launched = set()
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    device, dtype = torch.device("cuda"), torch.bfloat16

    def rows(heads, tokens, width, dtype=dtype):
        return torch.randn(1, heads, tokens, width, device=device, dtype=dtype)

    def paged(**changes):
        problem = DecodeProblem(**{**RAGGED, **changes})
        return problem, problem.make(device)

    def fused(op, hidden, tokens, **shape):
        return bench_fusion.Case(op, name, tokens, hidden, shape).make(device, dtype)

    if name == "prefill":
        dflash2_attention(rows(4, 333, 128), rows(2, 517, 128), rows(2, 517, 128), causal=True, return_lse=True)
    elif name == "prefill 192/128 with windows":
        windows = RangeWindows.sink_window(20, 130)
        dflash2_attention(rows(4, 400, 192), rows(4, 400, 192), rows(4, 400, 128), causal=True, windows=windows)
    elif name == "prefill with ranges that overlap":
        windows = RangeWindows([Range(0, 90, 20, 30), Range(-400, -333, 3, 4), Range(-300, -20, 0, 77)])
        dflash2_attention(rows(4, 333, 128), rows(2, 333, 128), rows(2, 333, 128), causal=True, windows=windows)
    elif name == "prefill from pages, split":
        problem, inputs = paged(q_len=40)
        q = inputs.q.flatten(0, 1)
        cu = torch.tensor([0, 40, 80, 120], device=device, dtype=torch.int32)
        out, options = torch.empty_like(q), dict(cu_seqlens_q=cu, block_table=inputs.block_table, seq_lens=inputs.seq_lens)
        hopper.launch_prefill(q, inputs.k_cache, inputs.v_cache, out, None, causal=True, scale=0.1, num_splits=3, **options)
    elif name == "portable prefill":
        half = torch.float16
        q, k, v = rows(4, 333, 72, half), rows(2, 517, 73, half)[..., :72], rows(2, 517, 73, half)[..., 1:]
        dflash2_attention(q, k, v, causal=True, softcap=20.0)
    elif "decode" in name:
        problem, inputs = paged(q_len=4 if "tokens" in name else 1, D=72 if "portable" in name else 128, Dv=72 if "portable" in name else 128)
        args, schedule = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.block_table, inputs.seq_lens), None
        if "schedule" in name:
            sizes = dict(num_heads=32, num_kv_heads=8, head_dim=72, page_size=64, max_seq_len=problem.capacity)
            schedule = get_decode_schedule(inputs.seq_lens, **sizes)
        api.dflash2_decode(*args, schedule=schedule)
    elif name.startswith("MLA of"):
        problem, inputs = paged(Hq=int(name.split()[2]), **LATENT)
        api.dflash2_mla_decode(inputs.q, inputs.k_cache[:, :, 0], inputs.block_table, inputs.seq_lens, scale=problem.scale)
    elif name.startswith("QKV"):
        args, options = fused("qkv", 1000, 33, Hq=6, Hkv=2, D=80, rot_dim=20, norms=True)
        fusion.fused_qkv_rope_append(*args, **options, fused="two" not in name)
    elif name == "MLA append":
        args, options = fused("mla", 1000, 33, H=6, rank=512, rot_dim=64)
        fusion.fused_mla_append(*args, **options, fused=True)
    elif name == "router":
        args, options = fused("router", 1000, 33, E=72, top_k=6)
        fusion.fused_norm_router(*args, **options, fused=True)
    elif name == "appending past the page table":
        problem, inputs = paged()
        lens = torch.tensor([problem.capacity, 7, 2**31 - 1], device=device, dtype=torch.int32)
        new = [torch.randn(3, 2, 8, 128, device=device, dtype=dtype) for _ in range(2)]
        q, page_table = torch.randn(3, 2, 32, 128, device=device, dtype=dtype), inputs.block_table
        flash_attn_with_kvcache(q, inputs.k_cache, inputs.v_cache, *new, cache_seqlens=lens, page_table=page_table, causal=True)
    else:
        x = torch.randn(33, 1000, device=device, dtype=dtype)
        fusion.fused_add_norm(x, torch.randn_like(x), torch.ones(1000, device=device, dtype=dtype))
    torch.cuda.synchronize()
    return launched


@pytest.mark.parametrize("name", CASES)
def test_memcheck(name):
    import torch

    kernels, only_90 = CASES[name]
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not on this machine")
    if only_90 and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for compute capability 9.0")

    paths = os.pathsep.join(p for p in (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and "ERROR SUMMARY: 0 errors" in told, told[-4000:]
    launched = set(told.split("launched: ")[1].splitlines()[0].split())
    assert kernels <= launched, launched


if __name__ == "__main__":
    print("launched:", *sorted(run_case(sys.argv[1])))
