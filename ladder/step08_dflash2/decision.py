"""Which kernel a call takes, how it is launched, and why no faster kernel takes it: launches, ``explain`` and
``warmup`` read it here."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import dispatch
from .hopper import decode as hopper_decode
from .hopper import mla as hopper_mla
from .hopper import prefill as hopper_prefill
from .hopper.descriptors import place
from .tiles import frozen, launch_config, layout_of, plan_decode, reach_of


@dataclass(frozen=True)
class Decision:
    """kernel: name of the device function. plan: how it is launched, as the kernel's own planning function returns it.
    why_not: why sm_90's kernel does not run on a machine that has it, else None.
    """

    kernel: str
    plan: object
    why_not: str | None = None


class PrefillCall(NamedTuple):
    """What the choice for a prefill depends on. Lengths that only the device knows are not part of it.

    q, k, v, out: ``place`` of each tensor. right: keys after its own position that a query sees, None for all.
    num_seqs: of packed sequences; None for (B, H, S, D). capacity: keys that a row of the block table can address; None
    without pages. longest: most queries of a sequence, where the host knows it.
    """

    dtype: torch.dtype
    q: tuple
    k: tuple
    v: tuple
    out: tuple
    right: int | None
    num_ranges: int
    softcap: bool
    zero_scale: bool
    num_seqs: int | None
    capacity: int | None
    longest: int | None


class DecodeCall(NamedTuple):
    """What the choice for a decode depends on.

    q (B, q_len, Hq, D), k, v (pages), out: ``place`` of each. latent: v is part of k.
    masked: there are windows. reach: most keys that the new tokens can see. scheduled:
    a schedule is given. config: of the caller's, as ``tiles.frozen`` makes it.
    """

    dtype: torch.dtype
    q: tuple
    k: tuple
    v: tuple
    out: tuple
    latent: bool
    capacity: int
    masked: bool
    reach: int
    softcap: bool
    zero_scale: bool
    scheduled: bool
    num_kv_splits: int | None
    config: tuple | None


def prefill_call(
    q, k, v, out, *, right=None, windows=None, softcap=0.0, scale=1.0, num_seqs=None, capacity=None, longest=None
):  # fmt: skip
    """The ``PrefillCall`` of checked arguments."""
    return PrefillCall(
        q.dtype, place(q), place(k), place(v), place(out), right, 0 if windows is None else len(windows), softcap > 0,
        abs(scale) < 1e-37, num_seqs, capacity, longest,
    )  # fmt: skip


def decode_call(
    q, k, v, out, capacity, *, latent=False, windows=None, softcap=0.0, scale=1.0, num_kv_splits=None, scheduled=False,
    config=None
):  # fmt: skip
    """The ``DecodeCall`` of checked arguments."""
    return DecodeCall(
        q.dtype, place(q), place(k), place(v), place(out), latent, capacity, windows is not None,
        reach_of(windows, q.shape[1]),
        softcap > 0, abs(scale) < 1e-37, scheduled, num_kv_splits, frozen(config),
    )  # fmt: skip


def decide(call, device):
    """The ``Decision`` about a ``PrefillCall`` or ``DecodeCall`` of
    tensors on ``device``, which Triton's kernels run on."""
    return (_decide_prefill if type(call) is PrefillCall else _decide_decode)(call, dispatch.machine(device))


@functools.lru_cache(maxsize=4096)
def _decide_prefill(call, machine):
    (q_shape, *_), (k_shape, k_strides, k_aligned), (v_shape, v_strides, v_aligned) = call.q, call.k, call.v
    ragged, paged, head_dim, head_dim_v = call.num_seqs is not None, call.capacity is not None, q_shape[-1], v_shape[-1]
    num_seqs, seqlen_q = (call.num_seqs, q_shape[0]) if ragged else (q_shape[0], q_shape[2])
    page_size, num_kv_heads = (k_shape[1], k_shape[2]) if paged else (0, k_shape[1])
    group = q_shape[1] // num_kv_heads
    why = hopper_prefill.supports_prefill(call) if machine.hopper else None
    if machine.hopper and why is None:
        seqlen_k = call.capacity if paged else k_shape[0] if ragged else k_shape[2]
        return Decision("dflash2_prefill_hopper", hopper_prefill.plan_prefill(
            num_seqs, q_shape[1], group, seqlen_q, seqlen_k, head_dim, head_dim_v, call.right, ragged, paged,
            call.longest,
            machine.processors, None, call.num_ranges > 0, None,
        ))  # fmt: skip
    tokens = most = seqlen_q
    if ragged:
        tokens, most = max(1, seqlen_q // num_seqs) if num_seqs else None, call.longest
        tokens = tokens if most is None else min(tokens or 0, most)
    config = launch_config(
        head_dim, head_dim_v, call.dtype.itemsize, machine.arch, page_size, ragged, group, tokens, most,
        call.num_ranges, call.softcap,
    )  # fmt: skip
    layout = layout_of(call.dtype, k_aligned and v_aligned, k_strides, v_strides, head_dim, head_dim_v)
    return Decision("dflash2_prefill", {**layout, **config}, why)


@functools.lru_cache(maxsize=4096)
def _decide_decode(call, machine):
    (batch, q_len, num_heads, head_dim), (_, page_size, num_kv_heads, _) = call.q[0], call.k[0]
    head_dim_v, rows, why = call.v[0][3], q_len * (num_heads // num_kv_heads), None
    if machine.hopper:
        if call.config is not None:
            why = "launch parameters are given"
        elif call.capacity == 0:
            # its memory is none, and sm_90's kernels look into it before they see that a length is beyond it
            why = "the block table has no page"
        else:
            why = (hopper_mla.supports_mla if call.latent else hopper_decode.supports_decode)(call)
        if why is None and call.latent:
            kind, tile = hopper_mla.mla_design(rows)
            plan = hopper_mla.plan_mla(batch, rows, call.capacity, machine.processors, call.num_kv_splits, tile)
            return Decision("dflash2_mla_few_hopper" if kind == "few" else "dflash2_mla_hopper", plan)
        if why is None:
            plan = hopper_decode.plan_decode(
                batch, rows, num_kv_heads, call.capacity, machine.processors, call.num_kv_splits
            )
            return Decision("dflash2_decode_hopper", plan)
    plan = plan_decode(
        batch, q_len, num_heads // num_kv_heads, num_kv_heads, head_dim, head_dim_v, page_size, call.capacity,
        call.dtype.itemsize,
        machine.arch, machine.processors, v_is_k(call.latent, head_dim_v), call.num_kv_splits, call.reach, call.config,
    )  # fmt: skip
    layout = layout_of(call.dtype, call.k[2] and call.v[2], call.k[1], call.v[1], head_dim, head_dim_v)
    return Decision("dflash2_decode", (plan, layout), why)


def v_is_k(latent, head_dim_v):
    """Whether the portable kernel takes the value out of the key's tile: 16 columns fill no tile of its own, of 32."""
    return latent and head_dim_v > 16
