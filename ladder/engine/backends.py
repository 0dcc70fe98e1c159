"""The rungs as attention backends: thin adapters from a batch on a paged cache to what each rung offers.

Rungs 01 to 05 know no pages: the engine gathers a sequence's pages into contiguous tensors and calls their
``attention``. Rung 06 decodes on pages. Rungs 07 and 08 do everything on pages; 08 brings its fused entries along.
"""

import copy
import importlib
import re

import torch
import torch.nn.functional as F

from ladder import rungs
from ladder.lab import interpret

NAMES = ("sdpa", *(f"step{n:02d}" for n in range(1, 9)))


class Backend:
    """What the engine asks of attention.

    Attributes:
        name: as the log shows it. gathers: reads contiguous tensors, not pages.
        absorbs: computes MLA decode on the latents (576 columns for the query, 512 for the value).
        captures: decode can be captured in a CUDA graph: no lengths on the host.
        fused: step 08's fused entries, or None.
    """

    name = ""
    gathers, absorbs, captures, fused = True, True, False, None
    needs_triton = False

    def schedule(self, batch, config, cache, latent):
        """What a decode step's layers share, kept as ``batch.schedule``."""
        return None

    def varlen(self, q, k, v, batch, scale):
        """Causal attention, aligned to the bottom right, of packed q
        (T, Hq, D) over k (total_k, Hkv, D) and v: (T, Hq, Dv)."""
        raise NotImplementedError

    def prefill(self, q, k_cache, v_cache, batch, scale):
        """A chunk of new tokens of each sequence over its pages: (T, Hq, Dv)."""
        raise NotImplementedError

    def decode(self, q, k_cache, v_cache, batch, scale):
        """One new token of each sequence over its pages: q (B, Hq, D) to (B, Hq, Dv)."""
        raise NotImplementedError

    def mla_decode(self, q, latents, batch, scale, value_dim):
        """One new token of each sequence over its latents: q (B, H, 576) to (B, H, 512)."""
        raise NotImplementedError

    def with_workspace(self, workspace):
        """This backend with scratch memory of its own, as each
        captured graph needs; None where it has no such memory."""
        return self

    def scratch_bytes(self, tokens, keys, num_heads, itemsize):
        """Bytes of intermediate results of attention beyond tensors of the inputs' size, for the memory plan."""
        return 0

    def check(self, device, dtype):
        """Raise ValueError when this backend cannot run on ``device`` in ``dtype``, before anything is allocated."""
        if device.type == "cuda" or not self.needs_triton:
            return
        if not interpret.has_triton():
            raise ValueError(
                f"backend {self.name} is written in Triton, which is not installed; want sdpa, step01 to step04, or "
                f"step08"
            )
        if not interpret.is_enabled():
            raise ValueError(
                f"backend {self.name} has no path on the CPU but Triton's interpreter, which takes seconds for a token "
                f"of tiny-moe: "
                "set TRITON_INTERPRET=1 to try a few tokens, or take sdpa, step01 to step04 or step08, which run real "
                "text"
            )
        if dtype == torch.bfloat16:
            raise ValueError(
                f"backend {self.name}: Triton's interpreter multiplies bfloat16 wrongly; want float32 or float16"
            )


class Dense(Backend):
    """A rung without pages: one call of ``attention`` for each sequence."""

    def __init__(self, rung):
        self.rung, self.name, self.needs_triton = rung, rung.name, rung.needs_triton
        self.absorbs = rung.max_head_dim is None or rung.max_head_dim >= 576

    def varlen(self, q, k, v, batch, scale):
        out, q0, k0 = [], 0, 0
        for new, length in batch.lengths:
            out.append(self._one(q[q0 : q0 + new], k[k0 : k0 + length], v[k0 : k0 + length], scale))
            q0, k0 = q0 + new, k0 + length
        return torch.cat(out)

    def _one(self, q, k, v, scale):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        head_dim, head_dim_v = q.shape[-1], v.shape[-1]
        features = self.rung.features
        if "grouped_heads" not in features and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        if "unequal_head_dims" not in features and head_dim != head_dim_v:
            v = F.pad(v, (0, head_dim - head_dim_v))
        return self.attention(q, k, v, scale)[0, :, :, :head_dim_v].transpose(0, 1)

    def attention(self, q, k, v, scale):
        return self.rung.attention(q, k, v, causal=True, scale=scale)

    def scratch_bytes(self, tokens, keys, num_heads, itemsize):
        if self.rung is not None and self.rung.number >= 5:
            return 0
        per_score = {1: 3 * itemsize + 1, 2: 16, 3: 16, 4: 16}.get(self.rung.number if self.rung else 0, 0)
        width = keys if self.rung and self.rung.number == 1 else min(keys, 512)  # the others hold a tile
        return per_score * num_heads * tokens * width


class SDPA(Dense):
    """torch's scaled_dot_product_attention, the yardstick."""

    name, needs_triton, absorbs = "sdpa", False, True

    def __init__(self):
        self.rung = None

    def _one(self, q, k, v, scale):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        if seqlen_q == seqlen_k or seqlen_q == 1:
            mask = dict(is_causal=seqlen_q > 1)
        else:
            from torch.nn.attention.bias import causal_lower_right

            mask = dict(attn_mask=causal_lower_right(seqlen_q, seqlen_k))
        grouped = q.shape[1] != k.shape[1]
        if grouped:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **mask)[0].transpose(0, 1)


class Paged(Dense):
    """Rung 06: paged decode; prefill gathers."""

    gathers = False

    def __init__(self, rung):
        super().__init__(rung)
        self.captures = True

    def prefill(self, q, k_cache, v_cache, batch, scale):
        k, v = (x.reshape(-1, *x.shape[2:])[batch.key_slots] for x in (k_cache, v_cache))
        return self.varlen(q, k, v, batch, scale)

    def decode(self, q, k_cache, v_cache, batch, scale):
        return self.rung.module.paged_decode(q, k_cache, v_cache, batch.block_table, batch.seq_lens, scale=scale)


class DFlash1(Backend):
    """Rung 07: everything on pages, lengths on the device."""

    gathers, captures, needs_triton = False, True, True

    def __init__(self, rung, device):
        self.rung, self.name, self.module = rung, rung.name, rung.module
        self.workspace = self.module.DecodeWorkspace(device)

    def with_workspace(self, workspace):
        clone = copy.copy(self)
        clone.workspace = workspace
        return clone

    def varlen(self, q, k, v, batch, scale):
        return self.module.attention_varlen(q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, causal=True, scale=scale)

    def prefill(self, q, k_cache, v_cache, batch, scale):
        return self.module.paged_prefill(
            q, k_cache, v_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, scale=scale
        )

    def decode(self, q, k_cache, v_cache, batch, scale):
        return self.module.paged_decode(
            q, k_cache, v_cache, batch.block_table, batch.seq_lens, scale=scale, workspace=self.workspace
        )

    def mla_decode(self, q, latents, batch, scale, value_dim):
        return self.module.mla_decode(
            q, latents, batch.block_table, batch.seq_lens, scale=scale, head_dim_v=value_dim, workspace=self.workspace
        )


class DFlash2(Backend):
    """Rung 08: as 07, with range windows, its fused entries, and an eager path for CPU tensors."""

    gathers, captures = False, True

    def __init__(self, device, windows=None):
        import ladder.step08_dflash2 as step08

        if not isinstance(windows, (step08.RangeWindows, type(None))):
            raise TypeError(f"backend step08: windows is {windows!r}; want RangeWindows, or None for every key")
        self.name, self.module, self.windows = "step08_dflash2", step08, windows
        self.workspace = step08.DecodeWorkspace(device)
        self.finds = torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self.get_schedule = importlib.import_module("ladder.step08_dflash2.schedule").get_decode_schedule
        self.fused = Fused(step08, self.workspace)

    def with_workspace(self, workspace):
        clone = copy.copy(self)
        clone.workspace, clone.fused = workspace, Fused(self.module, workspace)
        return clone

    def schedule(self, batch, config, cache, latent):
        if self.finds and self.windows is None:  # the kernels of this GPU find their work themselves
            return None
        c = config
        heads = (1, c.latent + c.rope_dim, c.latent) if latent else (c.num_kv_heads, c.head_dim, c.head_dim)
        return self.get_schedule(
            batch.seq_lens, num_heads=c.num_heads, num_kv_heads=heads[0], head_dim=heads[1], head_dim_v=heads[2],
            page_size=cache.page_size, max_seq_len=batch.block_table.shape[1] * cache.page_size,
            dtype=cache.parts[0].dtype, windows=self.windows,
        )  # fmt: skip

    def varlen(self, q, k, v, batch, scale):
        return self.module.dflash2_varlen(
            q, k, v, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_q, batch.max_k, causal=True, scale=scale,
            windows=self.windows,
        )  # fmt: skip

    def prefill(self, q, k_cache, v_cache, batch, scale):
        return self.module.dflash2_paged_prefill(
            q, k_cache, v_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.max_q, scale=scale,
            windows=self.windows,
        )  # fmt: skip

    def decode(self, q, k_cache, v_cache, batch, scale):
        return self.module.dflash2_decode(
            q, k_cache, v_cache, batch.block_table, batch.seq_lens, scale=scale, windows=self.windows,
            workspace=self.workspace,
            schedule=batch.schedule,
        )  # fmt: skip

    def mla_decode(self, q, latents, batch, scale, value_dim):
        return self.module.dflash2_mla_decode(
            q, latents, batch.block_table, batch.seq_lens, scale=scale, head_dim_v=value_dim, windows=self.windows,
            workspace=self.workspace, schedule=batch.schedule,
        )  # fmt: skip


class Fused:
    """Step 08's coarse fusion: what stands before attention and after it."""

    def __init__(self, step08, workspace):
        self.step08, self.workspace = step08, workspace
        self.fused_add_norm = importlib.import_module("ladder.step08_dflash2.fusion").fused_add_norm

    def add_norm(self, x, residual, weight, eps):
        return self.fused_add_norm(x, residual, weight, eps=eps)

    def norm_route(self, x, residual, norm_weight, router, config, bias=None):
        normed, residual, weights, ids, _ = self.step08.fused_norm_router(
            x, residual, norm_weight, router, top_k=config.top_k, eps=config.eps, renormalize=config.renormalize,
            routed_scaling_factor=config.routed_scale, correction_bias=bias, workspace=self.workspace,
        )  # fmt: skip
        return normed, residual, weights, ids

    def append(self, x, attention, cos, sin, batch, k_cache, v_cache):
        c = attention.config
        return self.step08.fused_qkv_rope_append(
            x, attention.qkv, cos, sin, batch.positions, k_cache, v_cache, batch.slots,
            num_heads=c.num_heads, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, workspace=self.workspace,
        )  # fmt: skip

    def append_latent(self, latent, attention, cos, sin, batch, cache, q_rope, q_nope, out=None):
        return self.step08.fused_mla_append(
            latent, attention.latent_norm, cos, sin, batch.positions, cache, batch.slots, q_rope, q_nope=q_nope,
            norm_eps=attention.latent_eps, interleaved=False, out=out, workspace=self.workspace,
        )  # fmt: skip


def make(name, device, windows=None):
    """The backend of that name: "sdpa", or a rung as "step07", "7" or "step07_dflash1".

    Raises:
        ValueError: there is no such backend, or it has no range windows and some are asked for.
    """
    match = re.fullmatch(r"(?:step)?0?(\d)(_.*)?", str(name))
    number = int(match[1]) if match else None
    if match and match[2] and (not number or number > 8 or f"step{number:02d}{match[2]}" != rungs.find(number).name):
        number = None
    if name != "sdpa" and (number is None or f"step{number:02d}" not in NAMES):
        raise ValueError(f"backend is {name!r}; want one of {', '.join(NAMES)}")
    if windows is not None and number != 8:
        raise ValueError(f"backend {name} sees every key; range windows arrive with step08")
    if number is None:
        return SDPA()
    if number == 8:
        return DFlash2(device, windows)
    rung = rungs.find(number)
    return Dense(rung) if number <= 5 else Paged(rung) if number == 6 else DFlash1(rung, device)
