"""Where tokens stand and who computes attention: what a model's forward asks instead of knowing it."""

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .layers import Parts, add_norm, choose_experts, rms_norm, rotate


class Context:
    """What training and serving have in common: norms and the router by plain operations, with gradients.

    sums_later: whether ``add_norm`` takes what experts made before it is summed.
    """

    sums_later = False

    def add_norm(self, x, residual, weight, eps):
        """RMS norm of x + residual (T, width), and the sum."""
        return add_norm(x, residual, weight, eps)

    def norm_route(self, moe, x, residual, norm_weight):
        """Add, norm and route: normed (T, width), the sum (T, width), weights (T, top_k) float32, ids (T, top_k)."""
        c = moe.config
        x, residual = self.add_norm(x, residual, norm_weight, c.eps)
        weights, ids, probs = choose_experts(
            F.linear(x.float(), moe.router.float()), c.top_k, c.renormalize, c.routed_scale, moe.bias
        )
        self.routed(moe.layer, ids, probs)
        return x, residual, weights, ids

    def routed(self, layer, ids, probs):
        """Told where the tokens of a layer went."""

    def attend(self, attention, x):
        """Causal attention of x (T, width) projected by a grouped-query ``attention``: (T, Hq, D)."""
        raise NotImplementedError

    def attend_latent(self, attention, x, rows=None):
        """Causal multi-head latent attention of x (T, width): (T, H,
        v_dim); of ``rows`` only, (n, H, v_dim), where given."""
        raise NotImplementedError


@dataclass
class Batch:
    """One step's tokens, packed, and where their keys are.

    tokens, positions, slots: (T,) int64; a slot is page * page_size + place.
    block_table: (B, pages) int32. seq_lens: (B,) int32, with the new tokens.
    cu_seqlens_q, cu_seqlens_k: (B + 1,) int32; max_q, max_k: the longest chunk and sequence, ints.
    key_slots: (total_k,) int64, the slots of all keys of all sequences, for those who gather pages. None: nobody does.
    lengths: [(new tokens, all tokens)] of the sequences, None inside a captured graph.
    schedule: what the layers of a decode step share, made by the backend.
    last: the same sequences with their last new token alone, for a
    layer whose other queries nobody asks for. None: no such layer.
    """

    decode: bool
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_q: int = 1
    max_k: int = 0
    key_slots: torch.Tensor | None = None
    lengths: list | None = None
    schedule: torch.Tensor | None = None
    last: "Batch | None" = None

    def only(self, rows, cu_seqlens_q):
        """The batch of ``rows`` (B,), the last new token of each sequence; what concerns keys stays."""
        return replace(
            self, tokens=self.tokens[rows], positions=self.positions[rows], slots=self.slots[rows],
            cu_seqlens_q=cu_seqlens_q, max_q=1, lengths=[(1, end) for _, end in self.lengths],
        )  # fmt: skip


class ServingContext(Context):
    """A batch on a paged cache, its attention by a backend; step 08's fused entries where the backend has them."""

    def __init__(self, model, backend, cache):
        self.config, self.backend, self.cache = model.config, backend, cache
        self.latent = len(cache.parts) == 1
        self.cos_sin = model.cos_sin
        self.cos, self.sin = (x.contiguous() for x in model.cos_sin.chunk(2, dim=-1))
        self.batch = self._rows = None

    def using(self, backend):
        """The same with another backend."""
        other = copy.copy(self)
        other.backend = backend
        return other

    def begin(self, batch):
        self.batch = batch
        self._rows = None
        if batch.decode:
            batch.schedule = self.backend.schedule(batch, self.config, self.cache, self.latent)

    @property
    def rows(self):
        """cos and sin at the positions of the batch, (T, rope_dim); the same for every layer."""
        if self._rows is None:
            self._rows = self.cos_sin[self.batch.positions]
        return self._rows

    @property
    def sums_later(self):
        return self.backend.fused is not None and self.batch.tokens.is_cuda

    def add_norm(self, x, residual, weight, eps):
        if isinstance(x, Parts):
            return x.add_norm(residual, weight, eps)
        if self.backend.fused:
            return self.backend.fused.add_norm(x, residual, weight, eps)
        return super().add_norm(x, residual, weight, eps)

    def norm_route(self, moe, x, residual, norm_weight):
        if self.backend.fused:
            return self.backend.fused.norm_route(x, residual, norm_weight, moe.router, moe.config, moe.bias)
        return super().norm_route(moe, x, residual, norm_weight)

    def attend(self, attention, x):
        batch, layer, scale = self.batch, attention.layer, self.config.scale
        k_cache, v_cache = self.cache.layer(layer)
        if self.backend.fused:
            q = self.backend.fused.append(x, attention, self.cos, self.sin, batch, k_cache, v_cache)
        else:
            q, k, v = attention.project(x, self.rows)
            self.cache.append(layer, batch.slots, k, v)
        if self.backend.gathers:  # the rung knows no pages: copy them into one piece
            return self.backend.varlen(q, *self.cache.gather(layer, batch.key_slots), batch, scale)
        attend = self.backend.decode if batch.decode else self.backend.prefill
        return attend(q, k_cache, v_cache, batch, scale)

    def attend_latent(self, attention, x, rows=None):
        batch, layer, c = self.batch, attention.layer, self.config
        (latents,) = self.cache.layer(layer)
        last = None if rows is None else batch.last
        q, latent = attention.split(x, None if last is None else rows)
        if batch.decode and self.backend.absorbs:
            query = self._append_latent(attention, q, latent, latents, attention.absorb(q))
            if self.backend.gathers:
                (gathered,) = self.cache.gather(layer, batch.key_slots)
                k = gathered[:, None]
                out = self.backend.varlen(query, k, k[..., : c.latent], batch, c.scale)
            else:
                out = self.backend.mla_decode(query, latents, batch, c.scale, c.latent)
            out = attention.values(out)
            return out if rows is None else out[rows]
        # Prefill, chunked too: heads are made from the cached latents, where this chunk's are by now.
        if last is None:
            query = self._append_latent(attention, q, latent, latents)
        else:  # everyone's latents with no query, then the queries that count, whose latents are stored once more
            self._append_latent(attention, q.new_empty(len(x), 0, c.qk_dim), latent, latents)
            query = self._append_latent(attention, q, latent[rows], latents, batch=last)
        (gathered,) = self.cache.gather(layer, batch.key_slots)
        out = self.backend.varlen(query, *attention.expand(gathered), last or batch, c.scale)
        return out if rows is None or last else out[rows]

    def _append_latent(self, attention, q, latent, cache, q_nope=None, batch=None):
        """Norm and rotate the latent into its cache; (T, H, n + rope_dim), ``q_nope`` and the rotated rest of q.

        q_nope: (T, H, n) to put in the place of q's own columns; None leaves those, and q may be rotated where it
            stands.
        batch: of these tokens, None is the step's.
        """
        c, given, batch = self.config, batch, batch or self.batch
        q_rope = q[..., c.nope_dim :]
        if self.backend.fused:
            args = (latent, attention, self.cos, self.sin, batch, cache, q_rope, q_nope)
            if q_nope is not None:
                return self.backend.fused.append_latent(*args)
            self.backend.fused.append_latent(*args, out=q_rope)
            return q
        turn = self.rows if given is None else self.cos_sin[batch.positions]
        compressed, rope = latent.split([c.latent, c.rope_dim], dim=-1)
        compressed = rms_norm(compressed, attention.latent_norm, attention.latent_eps)
        row = torch.cat([compressed, rotate(rope[:, None], turn)[:, 0]], dim=-1)
        self.cache.append(attention.layer, batch.slots, row)
        return torch.cat([q[..., : c.nope_dim] if q_nope is None else q_nope, rotate(q_rope, turn)], dim=-1)
