"""Implementations to measure ourselves against: whichever of them can be imported on this machine."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


@dataclass(frozen=True)
class Peer:
    """``why_not(problem, device)`` returns why it cannot run a
    problem, or None; ``build(problem)`` a function of q, k, v."""

    name: str
    title: str
    why_not: Callable
    build: Callable


def peers_for(problem, device):
    """The peers that can run ``problem`` on ``device``, as a list of Peer."""
    device = torch.device(device)
    return [peer for peer in PEERS if peer.why_not(problem, device) is None]


def _sdpa_why_not(backend):
    def why_not(problem, device):
        if backend is None:
            return None if device.type == "cpu" else "the flash and cuDNN backends are measured by name on CUDA"
        if device.type != "cuda":
            return "needs a CUDA device"
        if problem.dtype == "float32":
            return "computes 16-bit types only"
        if backend == SDPBackend.FLASH_ATTENTION and problem.D != problem.Dv:
            return "wants equal head sizes"
        if max(problem.D, problem.Dv) > 256:
            return "wants head sizes up to 256"
        return None

    return why_not


def _sdpa_build(backend):
    def build(problem):
        bias = None
        if problem.causal and problem.Sq != problem.Sk:
            bias = causal_lower_right(problem.Sq, problem.Sk)  # is_causal alone aligns to the top left
        options = dict(scale=problem.scale, enable_gqa=problem.Hq != problem.Hkv)
        if bias is None:
            options["is_causal"] = problem.causal

        def run(q, k, v):
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, **options)

        return run

    return build


def _flex_why_not(problem, device):
    if device.type != "cuda":
        return "needs a CUDA device"
    if problem.D != problem.Dv and (problem.D & (problem.D - 1) or problem.Dv & (problem.Dv - 1)):
        return "wants power-of-two head sizes"
    return None if util.find_spec("triton") else "needs Triton"


def _flex_build(problem):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # one compilation per shape; past dynamo's limit flex silently runs unfused
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if problem.causal:
        offset = problem.Sk - problem.Sq
        mask = create_block_mask(lambda b, h, i, j: j <= i + offset, None, None, problem.Sq, problem.Sk, device="cuda")
    grouped = problem.Hq != problem.Hkv
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=grouped)


def _fa3_module():
    return next((name for name in ("fa3_fwd_interface", "flash_attn_interface") if util.find_spec(name)), None)


def on_hopper(device):
    """Whether a device is a GPU of compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _fa3_why_not(problem, device):
    if not on_hopper(device):
        return "needs a Hopper GPU"
    if _fa3_module() is None:
        return "not installed (pip install fa3-fwd)"
    if problem.dtype == "float32" or (problem.dtype == "float16" and _fa3_module() == "fa3_fwd_interface"):
        return "its wheel computes bfloat16"
    return None


def _flash(function, **options):
    """A FlashAttention function as one of q, k, v in this package's
    layout: transposed views of its (B, S, H, D), no copies."""

    def run(q, k, v):
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def fa3_function(**options):
    """FlashAttention-3 with some of its options, as a function of q, k, v (B, H, S, D)."""
    return _flash(__import__(_fa3_module()).flash_attn_func, **options)


def _fa3_build(problem):
    return fa3_function(softmax_scale=problem.scale, causal=problem.causal)


def _module_why_not(module, install):
    def why_not(problem, device):
        if device.type != "cuda":
            return "needs a CUDA device"
        if problem.dtype == "float32":
            return "computes 16-bit types only"
        try:
            found = util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        return None if found else f"not installed ({install})"

    return why_not


def _fa4_build(problem):
    from flash_attn.cute import flash_attn_func

    return _flash(flash_attn_func, softmax_scale=problem.scale, causal=problem.causal)


def _flashinfer_build(problem):
    from flashinfer import single_prefill_with_kv_cache

    def run(q, k, v):  # (S, H, D), one sequence a call
        outs = [
            single_prefill_with_kv_cache(
                *(x[b].transpose(0, 1).contiguous() for x in (q, k, v)), causal=problem.causal, sm_scale=problem.scale
            )
            for b in range(q.shape[0])
        ]
        return torch.stack(outs).transpose(1, 2)

    return run


PEERS = (
    Peer("sdpa", "PyTorch SDPA (CPU)", _sdpa_why_not(None), _sdpa_build(None)),
    Peer("sdpa_flash", "PyTorch SDPA, FlashAttention-2", _sdpa_why_not(SDPBackend.FLASH_ATTENTION), _sdpa_build(SDPBackend.FLASH_ATTENTION)),  # noqa: E501
    Peer("sdpa_cudnn", "PyTorch SDPA, cuDNN", _sdpa_why_not(SDPBackend.CUDNN_ATTENTION), _sdpa_build(SDPBackend.CUDNN_ATTENTION)),  # noqa: E501
    Peer("flex", "PyTorch flex_attention, compiled", _flex_why_not, _flex_build),
    Peer("fa3", "FlashAttention-3", _fa3_why_not, _fa3_build),
    Peer("fa4", "FlashAttention-4 (CuTe)", _module_why_not("flash_attn.cute", "pip install flash-attn"), _fa4_build),
    Peer("flashinfer", "FlashInfer", _module_why_not("flashinfer", "pip install flashinfer-python"), _flashinfer_build),
)  # fmt: skip


def decode_peers(problem, inputs):
    """{name: function of no arguments}: other implementations that can run this problem here; all lengths equal.

    The SDPA backends read the same numbers from a contiguous copy (no pages); FlashAttention-3 reads the pages.
    Outputs are (B, q_len, Hq, Dv).
    """
    q, k_cache, v_cache, table, seq_lens = inputs
    device, peers = q.device, {}
    if device.type != "cuda" or problem.dtype == "float32" or problem.lengths is not None:
        return peers
    if problem.q_len == 1 and not problem.latent:
        k, v = inputs.contiguous()
        q_bhsd, grouped = q.transpose(1, 2), problem.Hq != problem.Hkv

        def sdpa(backend):
            def run():
                with sdpa_kernel(backend):
                    out = F.scaled_dot_product_attention(q_bhsd, k, v, scale=problem.scale, enable_gqa=grouped)
                return out.transpose(1, 2)

            return run

        peers["sdpa_cudnn"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        peers["sdpa_flash"] = sdpa(SDPBackend.FLASH_ATTENTION)
    if problem.dtype == "bfloat16" and _fa3_module() and on_hopper(device):
        pages = dict(page_table=table.clamp(0, k_cache.shape[0] - 1))
        peers["fa3"] = _fa3_with_kvcache(problem, q, k_cache, v_cache, cache_seqlens=seq_lens, **pages)
    return peers


def contiguous_peers(problem, inputs):
    """{"fa3": function of no arguments} over K and V without pages, lengths ragged or not; {} where it cannot run.

    The FlashAttention-3 wheel ``fa3-fwd`` is built without pages. It chooses its number of splits itself.
    Outputs are (B, q_len, Hq, Dv).
    """
    if _fa3_module() is None or not on_hopper(inputs.q.device) or problem.dtype != "bfloat16":
        return {}
    return {"fa3": _fa3_with_kvcache(problem, inputs.q, *inputs.padded(), cache_seqlens=inputs.seq_lens)}


def _fa3_with_kvcache(problem, q, k, v, **options):
    """FlashAttention-3's decode on some keys and values. A latent cache goes in as the rotary part q, k and the latent
    part qv, v."""
    interface = __import__(_fa3_module())
    if problem.latent:
        rope = problem.D - problem.Dv
        options["qv"] = q[..., :-rope].contiguous()
        q, k, v = q[..., -rope:].contiguous(), k[..., -rope:].contiguous(), k[..., :-rope].contiguous()

    def fa3():
        out = interface.flash_attn_with_kvcache(q, k, v, softmax_scale=problem.scale, causal=True, **options)
        return out[0] if isinstance(out, tuple) else out

    return fa3
