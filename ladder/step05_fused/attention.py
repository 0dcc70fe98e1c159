"""Launching the fused kernel: arguments checked, tile sizes chosen for the head size and the processor."""

import math

import torch

from ladder.contract import check_attention, kernel_entry

LOG2_E = 1.0 / math.log(2.0)


@kernel_entry
def attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    """softmax(scale * q k^T) v in one kernel launch.

    Args:
        q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). float16, bfloat16 or float32, any strides, on a
            CUDA device, or on the CPU when Triton's interpreter is on. D and Dv up to 256, powers of two or not.
            Hq is a multiple of Hkv; query head h reads KV head h // (Hq // Hkv).
        causal: query i sees keys j <= i + Sk - Sq (aligned to the bottom right).
        scale: factor on the scores; None is 1/sqrt(D).
        return_lse: also return the natural log-sum-exp of each row's scaled scores.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q; with return_lse also (B, Hq, Sq) float32.
        Rows that see no key are 0 with log-sum-exp -inf.

    Raises:
        TypeError, ValueError: see ``ladder.contract``; also bfloat16 in the interpreter, which multiplies it wrongly.
        NotImplementedError: head sizes above 256; gradients (step 04 is differentiable).

    Source: Dao, "FlashAttention-2", algorithm 1.
    """
    rung = "step05_fused"
    scale = check_attention(rung, q, k, v, causal=causal, scale=scale)
    kernel = _kernel(rung, q)

    (batch, num_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    head_dim_v = v.shape[3]
    out = q.new_empty(batch, num_heads, seqlen_q, head_dim_v)
    lse = q.new_empty(batch, num_heads, seqlen_q, dtype=torch.float32) if return_lse else None
    config = launch_config(head_dim, head_dim_v, q.element_size(), *processor(q.device))
    sign, scale_log2 = scale_factors(scale)
    num_programs = -(-seqlen_q // config["BLOCK_M"]) * num_heads * batch
    if num_programs:
        with torch.cuda.device_of(q):  # the launch goes to the current device
            kernel[(num_programs,)](
                q, k, v, out, lse, *q.stride(), *k.stride(), *v.stride(), *out.stride(),
                num_heads, num_heads // num_kv_heads, seqlen_q, seqlen_k, scale_log2,
                HEAD_DIM=head_dim, HEAD_DIM_V=head_dim_v, IS_CAUSAL=causal, SCALE_SIGN=sign, HAS_LSE=return_lse,
                **config,
            )  # fmt: skip
    return (out, lse) if return_lse else out


def scale_factors(scale):
    """Sign of the scale and factor of the kernel's base-2 exponent: 0 and 1 for a scale of zero, where q becomes 0."""
    sign = 0 if abs(scale) < 1e-37 else 1 if scale > 0 else -1  # below that, float32 rounds the scale to 0
    return sign, abs(scale) * LOG2_E if sign else 1.0


def launch_config(head_dim, head_dim_v, itemsize, shared_memory_bytes, capability=(9, 0)):
    """Tile sizes, warps and pipeline stages: the largest tiles that fit this processor's registers and shared memory.

    Args:
        head_dim, head_dim_v: sizes of a query/key and of a value head.
        itemsize: bytes of an element.
        shared_memory_bytes: of one program: 227 KiB on an H100 or H200, 163 on an A100, 99 on an RTX 3090/4090.
        capability: compute capability; a B200 (10, 0) has the shared memory of an H200 and other tensor cores.
    """
    # The next power of two; at least 32, since Triton 3.6 lets wgmma read past the end of a V tile 16 wide.
    block_d, block_dv = (max(32, 1 << (d - 1).bit_length()) for d in (head_dim, head_dim_v))
    widest = max(block_d, block_dv)
    hopper_sized = shared_memory_bytes >= 200 * 1024
    num_warps, num_stages = 8, 2
    if itemsize == 4:  # float32 goes through the ordinary multipliers, where small tiles keep registers free
        block_m, block_n = (64, 32) if widest <= 64 else (32, 32) if widest <= 128 else (32, 16)
        num_stages = 1
    elif widest > 64 and (head_dim % 16 or head_dim_v % 16):  # no wide loads: registers hold an address an element
        block_m, block_n = (64, 64 if hopper_sized else 32) if widest <= 128 else (32, 16)
    elif hopper_sized and capability[0] >= 10:  # Blackwell's accumulators live in tensor memory; larger tiles spill
        block_m, block_n = (128, 64) if widest <= 128 else (128, 32)
    elif hopper_sized:  # measured on an H200: a third stage wherever it fits
        block_m = 128
        block_n = 128 if head_dim == head_dim_v == 128 else 64
        num_stages = 3 if block_dv <= 128 else 2
    elif head_dim == head_dim_v == widest <= 128:
        block_m, block_n = 128, 64
    else:  # masks over the head size take registers
        block_m, block_n = 64, 32
        num_warps = 4 if widest <= 128 else 8
    return dict(
        BLOCK_D=block_d, BLOCK_DV=block_dv, BLOCK_M=block_m, BLOCK_N=block_n,
        PRECISION="ieee" if itemsize == 4 else "tf32",  # float32 in full; 16-bit operands do not care
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def processor(device):
    """(bytes of shared memory that one program may use, compute capability) of ``device``; an H200's on the CPU."""
    if device.type != "cuda":
        return 227 * 1024, (9, 0)
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, (properties.major, properties.minor)


def check_device(rung, q):
    """ImportError or ValueError unless Triton is there and its kernels can run on ``q``."""
    try:
        from triton.runtime.interpreter import InterpretedFunction
    except ImportError as error:
        raise ImportError(f"{rung}: needs Triton (pip install triton); steps 01 to 04 run without it") from error
    from .kernel import fused_attention_forward

    interpreted = isinstance(fused_attention_forward, InterpretedFunction)
    if q.device.type == "cpu" and not interpreted:
        raise ValueError(
            f"{rung}: q is on cpu; want a CUDA tensor, or Triton's interpreter: "
            "set TRITON_INTERPRET=1 before triton is first imported"
        )
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{rung}: q is on {q.device}; want a CUDA tensor")
    if interpreted and q.dtype == torch.bfloat16:
        wrong = "q has dtype bfloat16, which Triton's interpreter multiplies wrongly"
        raise ValueError(f"{rung}: {wrong}; want float16 or float32")


def _kernel(rung, q):
    """The kernel, imported on first use so that ``import ladder`` needs no Triton."""
    check_device(rung, q)
    from .kernel import fused_attention_forward

    return fused_attention_forward


def bytes_moved(problem):
    """Bytes that one call loads and stores outside the chip's registers and shared memory: Q and the output once, K and
    V once per query tile; L2 serves most of the repeats. Needs B, Hq, Hkv, Sq, Sk, D, Dv, itemsize, causal.
    """
    p, keys_loaded = problem, 0
    block_m = launch_config(p.D, p.Dv, p.itemsize, 227 * 1024)["BLOCK_M"]
    for q1 in range(block_m, p.Sq + block_m, block_m):
        keys_loaded += max(0, min(p.Sk, q1 + p.Sk - p.Sq)) if p.causal else p.Sk
    return p.itemsize * p.B * p.Hq * (p.Sq * (p.D + p.Dv) + keys_loaded * (p.D + p.Dv))
