"""A whole attention block in step 08's schedule: what a decoder layer does up to its experts, in five launches or six.

add and norm -> projection, rotation, cache -> attention -> output projection -> add, norm, router. Rows are few in
decode: there the first product, its epilogue and the append are one kernel, and so
are norm, gate, choice and counts behind it, as far as one kernel was measured to
be faster than two: see ``ONE_LAUNCH_TOKENS`` and ``REREAD_BYTES`` in ``launch``.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import nn

from ladder.contract import FLOATS, check_flag, check_integer, check_scale, outside_autocast

from ..api import dflash2_decode, dflash2_mla_decode, dflash2_paged_prefill, dflash2_varlen
from ..checks import check_options
from .append import fused_mla_append, fused_qkv_rope_append
from .checks import RUNG, check_number
from .router import fused_add_norm, fused_norm_router


@dataclass
class AttentionBatch:
    """What a step of a server says of its T tokens; all tensors stay on the device and are read there only.

    positions: (T,) int32 or int64. slot_mapping: (T,), the cache slot of each token; negative: not stored.
    block_table: (B, max_pages) int32. seq_lens: (B,) int32, keys of each sequence, its new tokens included.
    cu_seqlens_q: (B + 1,) int32, where each sequence's new tokens start: prefill, in chunks or whole. None: decode, the
        same number of new tokens for each sequence, one after another.
    max_seqlen_q: an upper bound of the new tokens of a sequence, or None.
    context_slots, cu_seqlens_k: for MLA's prefill on a cached context, which is projected again from the cache: the
    slots of
        all keys of all sequences, new ones included, (total_k,), and where each sequence starts in them, (B + 1,)
        int32. None: there is no context, the new tokens are all there is, and each of them has a slot.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    context_slots: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None


@dataclass(frozen=True)
class Router:
    """How a block chooses experts: num_experts, and the keywords of ``fused_norm_router``. gate_dtype None is the
    block's; correction_bias says whether there is one."""

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    correction_bias: bool = False
    num_groups: int | None = None
    topk_groups: int | None = None
    group_score: str | None = None
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    gate_dtype: torch.dtype | None = None

    def options(self):
        """The keywords as the call wants them."""
        own = ("num_experts", "correction_bias", "gate_dtype")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}


class BlockOutput(NamedTuple):
    """What the experts (or a dense MLP) take on: see
    ``fused_norm_router``. The last three are None without a router."""

    normed: torch.Tensor
    residual: torch.Tensor
    topk_weights: torch.Tensor | None
    topk_ids: torch.Tensor | None
    expert_counts: torch.Tensor | None


class _Block(nn.Module):
    """What both kinds of block share: parameters without gradients,
    the norm before, the projection and router behind."""

    def __init__(
        self, hidden, attended, num_heads, *, norm_eps, scale, windows, softcap, sinks, router, dtype, device, **flags
    ):
        super().__init__()
        self.hidden, self.num_heads = check_integer(RUNG, "hidden", hidden, 1), num_heads
        self.norm_eps = check_number("norm_eps", norm_eps)
        for name, value in dict(sinks=sinks, **flags).items():
            check_flag(RUNG, name, value)
        if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
            wrong = ValueError if isinstance(dtype, torch.dtype) else TypeError
            raise wrong(f"{RUNG}: dtype is {dtype!r}; want float16, bfloat16 or float32")
        self.scale = None if scale is None else check_scale(RUNG, scale, 1)
        nothing = torch.empty(0, device="meta")  # whose device and dtype no check below asks for
        windows, softcap, _ = check_options((nothing,), num_heads, True, windows, softcap, None, False, None)
        self.windows, self.softcap, self.router = windows, softcap, router
        self._make = dict(dtype=dtype, device=device)
        if router is not None and not isinstance(router, Router):
            raise TypeError(f"{RUNG}: router is a {type(router).__name__}; want a Router, or None")
        self.input_norm, self.post_norm = self._ones(hidden), self._ones(hidden)
        self.weight_o = self._matrix(hidden, attended)
        self.sinks = self._parameter(torch.zeros(num_heads, dtype=torch.float32, device=device)) if sinks else None
        self.gate = self.correction_bias = None
        if router is not None:
            self.gate = self._matrix(router.num_experts, hidden, dtype=router.gate_dtype or dtype)
            if router.correction_bias:
                self.correction_bias = self._parameter(
                    torch.zeros(router.num_experts, dtype=torch.float32, device=device)
                )

    def _parameter(self, x):
        return nn.Parameter(x, requires_grad=False)

    def _ones(self, n):
        return self._parameter(torch.ones(n, **self._make))

    def _matrix(self, rows, columns, dtype=None):
        x = torch.empty(rows, columns, **{**self._make, "dtype": dtype or self._make["dtype"]})
        return self._parameter(nn.init.normal_(x, std=columns**-0.5))

    def _check_batch(self, batch):
        if not isinstance(batch, AttentionBatch):
            raise TypeError(f"{RUNG}: batch is a {type(batch).__name__}; want an AttentionBatch")

    def _finish(self, attended, residual, workspace):
        """Output projection, residual add, norm, router."""
        x = nn.functional.linear(attended, self.weight_o)
        if self.router is None:
            return BlockOutput(*fused_add_norm(x, residual, self.post_norm, eps=self.norm_eps), None, None, None)
        return BlockOutput(
            *fused_norm_router(
                x, residual, self.post_norm, self.gate, eps=self.norm_eps, correction_bias=self.correction_bias,
                workspace=workspace, **self.router.options(),
            )
        )  # fmt: skip

    def _q_len(self, batch, tokens):
        """New tokens of each sequence in decode."""
        if not isinstance(batch.seq_lens, torch.Tensor) or batch.seq_lens.ndim != 1:
            raise TypeError(f"{RUNG}: batch.seq_lens is {batch.seq_lens!r}; want a torch.Tensor (B,)")
        sequences = batch.seq_lens.shape[0]
        if (tokens % sequences if sequences else tokens) != 0:
            raise ValueError(
                f"{RUNG}: x has {tokens} tokens for {sequences} sequences; want as many for each in decode, or "
                f"cu_seqlens_q"
            )
        return tokens // sequences if sequences else 1


class DFlash2AttentionBlock(_Block):
    """A block with grouped heads (Llama, Qwen, Mixtral, GLM, gpt-oss): weights, and one call for prefill and decode.

    Args:
        hidden, num_heads, num_kv_heads, head_dim: sizes.
        qkv_bias: the projection has one (Qwen2). qk_norm: each query and key head is normed (Qwen3).
        interleaved: which columns are rotary pairs; see ``fused_qkv_rope_append``.
        scale, windows, softcap: of attention; see ``dflash2_decode``. sinks: heads have a sink logit (gpt-oss).
        norm_eps: of every norm. router: ``Router``, or None for a dense model.
        dtype, device: of the parameters.

    Parameters, to be loaded or assigned; none wants gradients:
        input_norm, post_norm: (hidden,). weight_qkv: ((Hq + 2 Hkv) * D, hidden). weight_o: (hidden, Hq * D). bias_qkv,
        q_norm, k_norm, sinks, gate (E, hidden), correction_bias (E,) as asked for, else None.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """

    def __init__(
        self, hidden, num_heads, num_kv_heads, head_dim, *, qkv_bias=False, qk_norm=False, interleaved=False,
        scale=None,
        windows=None, softcap=0.0, sinks=False, norm_eps=1e-6, router=None, dtype=torch.bfloat16, device="cpu",
    ):  # fmt: skip
        num_heads, num_kv_heads, head_dim = (
            check_integer(RUNG, name, value, 1)
            for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim))
        )
        super().__init__(
            hidden, num_heads * head_dim, num_heads, norm_eps=norm_eps, scale=scale, windows=windows, softcap=softcap,
            sinks=sinks,
            router=router, dtype=dtype, device=device, interleaved=interleaved, qkv_bias=qkv_bias, qk_norm=qk_norm,
        )  # fmt: skip
        if num_heads % num_kv_heads:
            raise ValueError(f"{RUNG}: num_heads is {num_heads}; want a multiple of num_kv_heads, {num_kv_heads}")
        self.num_kv_heads, self.head_dim, self.interleaved = num_kv_heads, head_dim, interleaved
        columns = (num_heads + 2 * num_kv_heads) * head_dim
        self.weight_qkv = self._matrix(columns, hidden)
        self.bias_qkv = self._parameter(torch.zeros(columns, **self._make)) if qkv_bias else None
        self.q_norm, self.k_norm = (self._ones(head_dim), self._ones(head_dim)) if qk_norm else (None, None)

    @outside_autocast
    def forward(self, x, residual, cos, sin, batch, k_cache, v_cache, *, workspace=None):
        """Run the block on T tokens.

        Args:
            x: (T, hidden), the output of the layer before. residual: (T, hidden) to add to it, or None in the first
            layer. cos, sin: from ``rope_tables``.
            batch: ``AttentionBatch``.
            k_cache, v_cache: (num_pages, page_size, Hkv, D); the new keys and values are written into their slots.
            workspace: a ``DecodeWorkspace``, which the calls of one stream may share. None allocates. With one, and
                after one call with the largest shapes, a CUDA graph may capture this; nothing waits for the device.

        Returns:
            BlockOutput.

        Raises:
            As the functions that it calls.
        """
        self._check_batch(batch)
        normed, residual = fused_add_norm(x, residual, self.input_norm, eps=self.norm_eps)
        q = fused_qkv_rope_append(
            normed, self.weight_qkv, cos, sin, batch.positions, k_cache, v_cache, batch.slot_mapping,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, bias=self.bias_qkv,
            q_norm_weight=self.q_norm, k_norm_weight=self.k_norm, norm_eps=self.norm_eps, interleaved=self.interleaved,
            workspace=workspace,
        )  # fmt: skip
        options = dict(scale=self.scale, windows=self.windows, softcap=self.softcap, sinks=self.sinks)
        if batch.cu_seqlens_q is not None:
            attended = dflash2_paged_prefill(
                q,
                k_cache,
                v_cache,
                batch.block_table,
                batch.seq_lens,
                batch.cu_seqlens_q,
                batch.max_seqlen_q,
                **options,
            )
        else:
            q_len = self._q_len(batch, x.shape[0])
            q = q.view(len(batch.seq_lens), q_len, self.num_heads, self.head_dim)
            attended = dflash2_decode(
                q, k_cache, v_cache, batch.block_table, batch.seq_lens, workspace=workspace, **options
            )
        return self._finish(attended.reshape(len(x), self.num_heads * self.head_dim), residual, workspace)


class DFlash2MLABlock(_Block):
    """A block with multi-head latent attention (DeepSeek-V2, V3): decode on the latent cache with the projections
    absorbed, prefill with keys and values projected from it, which costs a third of the products there.

    Args:
        hidden, num_heads: sizes.
        qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank, v_head_dim: as in the models' config.json.
        q_lora_rank: rank of the queries' projection (V2, V3), or None for one matrix (V2-Lite).
        scale: None is 1/sqrt(qk_nope_head_dim + qk_rope_head_dim); times ``yarn_mscale(...)**2`` where the model scales
            so.
        interleaved: which columns are rotary pairs; see ``fused_mla_append``.
        windows, softcap, sinks, norm_eps, router, dtype, device: as in ``DFlash2AttentionBlock``.

    Parameters, to be loaded or assigned; none wants gradients:
        input_norm, post_norm: (hidden,). weight_q: (H * (nope + rope), hidden or q_lora_rank). weight_q_a:
        (q_lora_rank, hidden) and q_a_norm: (q_lora_rank,), or None. weight_kv_a: (kv_lora_rank + rope, hidden).
        kv_a_norm: (kv_lora_rank,). weight_kv_b: (H * (nope + v), kv_lora_rank). weight_o: (hidden, H * v). gate,
        correction_bias, sinks as asked for.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted.

    Source: DeepSeek-AI, "DeepSeek-V2", section 2.1.
    """

    def __init__(
        self, hidden, num_heads, *, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, v_head_dim=128,
        q_lora_rank=None, scale=None, interleaved=True, windows=None, softcap=0.0, sinks=False, norm_eps=1e-6,
        router=None,
        dtype=torch.bfloat16, device="cpu",
    ):  # fmt: skip
        num_heads, v_head_dim, nope, rope, rank = (
            check_integer(RUNG, name, value, 1)
            for name, value in (("num_heads", num_heads), ("v_head_dim", v_head_dim),
                                ("qk_nope_head_dim", qk_nope_head_dim),
                                ("qk_rope_head_dim", qk_rope_head_dim), ("kv_lora_rank", kv_lora_rank))
        )  # fmt: skip
        super().__init__(
            hidden, num_heads * v_head_dim, num_heads, norm_eps=norm_eps,
            scale=(nope + rope) ** -0.5 if scale is None else scale,
            windows=windows, softcap=softcap, sinks=sinks, router=router, dtype=dtype, device=device,
            interleaved=interleaved,
        )  # fmt: skip
        self.nope, self.rope, self.rank, self.v_head_dim, self.interleaved = nope, rope, rank, v_head_dim, interleaved
        self.weight_q_a = self.q_a_norm = None
        if q_lora_rank is not None:
            q_lora_rank = check_integer(RUNG, "q_lora_rank", q_lora_rank, 1, optional=True)
            self.weight_q_a, self.q_a_norm = self._matrix(q_lora_rank, hidden), self._ones(q_lora_rank)
        self.weight_q = self._matrix(num_heads * (nope + rope), q_lora_rank or hidden)
        self.weight_kv_a, self.kv_a_norm = self._matrix(rank + rope, hidden), self._ones(rank)
        self.weight_kv_b = self._matrix(num_heads * (nope + v_head_dim), rank)

    @outside_autocast
    def forward(self, x, residual, cos, sin, batch, latent_cache, *, workspace=None):
        """Run the block on T tokens; arguments and results as in ``DFlash2AttentionBlock.forward``, with

        latent_cache: (num_pages, page_size, kv_lora_rank + qk_rope_head_dim).
        """
        self._check_batch(batch)
        normed, residual = fused_add_norm(x, residual, self.input_norm, eps=self.norm_eps)
        tokens = x.shape[0]
        q = normed
        if self.weight_q_a is not None:
            q, _ = fused_add_norm(nn.functional.linear(q, self.weight_q_a), None, self.q_a_norm, eps=self.norm_eps)
        q = nn.functional.linear(q, self.weight_q).view(tokens, self.num_heads, self.nope + self.rope)
        q_nope, q_pe = q[..., : self.nope], q[..., self.nope :]
        up = self.weight_kv_b.view(self.num_heads, self.nope + self.v_head_dim, self.rank)
        decode = batch.cu_seqlens_q is None
        if decode:  # q . (W k) = (q W) . k: the head's projection moves to the side that has one token
            q_nope = torch.bmm(q_nope.transpose(0, 1), up[:, : self.nope]).transpose(0, 1)
        q = fused_mla_append(
            normed, self.kv_a_norm, cos, sin, batch.positions, latent_cache, batch.slot_mapping, q_pe,
            weight=self.weight_kv_a, q_nope=q_nope, norm_eps=self.norm_eps, interleaved=self.interleaved,
            workspace=workspace,
        )  # fmt: skip
        options = dict(scale=self.scale, windows=self.windows, softcap=self.softcap, sinks=self.sinks)
        if decode:
            q_len = self._q_len(batch, tokens)
            q = q.view(len(batch.seq_lens), q_len, self.num_heads, self.rank + self.rope)
            latent = dflash2_mla_decode(
                q, latent_cache, batch.block_table, batch.seq_lens, head_dim_v=self.rank, workspace=workspace, **options
            ).reshape(tokens, self.num_heads, self.rank)
            attended = torch.bmm(latent.transpose(0, 1), up[:, self.nope :].transpose(1, 2)).transpose(0, 1)
        else:
            attended = self._prefill(q, batch, latent_cache, options)
        return self._finish(attended.reshape(tokens, self.num_heads * self.v_head_dim), residual, workspace)

    def _prefill(self, q, batch, latent_cache, options):
        """Attention of new tokens over keys and values projected from the cache."""
        if (batch.context_slots is None) != (batch.cu_seqlens_k is None):
            raise ValueError(f"{RUNG}: one of context_slots and cu_seqlens_k is None; want both, or neither")
        slots = batch.slot_mapping if batch.context_slots is None else batch.context_slots
        cu_seqlens_k = batch.cu_seqlens_q if batch.cu_seqlens_k is None else batch.cu_seqlens_k
        # padding behind the last sequence has no slot
        slots, page_size = slots.long().clamp(min=0), latent_cache.shape[1]
        rows = latent_cache[slots // page_size, slots % page_size]
        kv = nn.functional.linear(rows[:, : self.rank], self.weight_kv_b)
        k_nope, v = kv.view(len(rows), self.num_heads, self.nope + self.v_head_dim).split(
            [self.nope, self.v_head_dim], dim=2
        )
        k = torch.cat((k_nope, rows[:, None, self.rank :].expand(-1, self.num_heads, -1)), dim=2)
        return dflash2_varlen(
            q, k, v, batch.cu_seqlens_q, cu_seqlens_k, batch.max_seqlen_q, None, causal=True, **options
        )
