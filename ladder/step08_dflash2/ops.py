"""torch custom operators of step 08's prefill and decode: what ``torch.compile`` and ``torch.export`` see instead of the Python.

``ladder::dflash2_attention``, ``ladder::dflash2_varlen`` and ``ladder::dflash2_paged_prefill`` return the output and the
log-sum-exp (of no elements when it is not asked for); those that end in ``_out`` write ``out`` and return the log-sum-exp.
``ladder::dflash2_decode`` and ``ladder::dflash2_mla_decode`` write ``out`` too.
Windows travel as ``RangeWindows.flat``. The entries call them while they are being compiled, and nobody else has to.
"""

import torch

from ladder.contract import kernel_entry
from ladder.step07_dflash1.decode import DecodeWorkspace

from . import decode, prefill
from .checks import check_windows
from .dispatch import RUNG
from .windows import RangeWindows

_INPUTS = {
    "attention": "Tensor q, Tensor k, Tensor v",
    "varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q",
    "paged_prefill": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
                     "SymInt? max_seqlen_q",
}  # fmt: skip
_OPTIONS = "bool causal, float? scale, int[] windows, float softcap, Tensor? sinks, bool return_lse, SymInt? right"


def dense(q, k, v, causal, scale, windows, softcap, sinks, return_lse, out, right):
    """``prefill.dense`` through the operators."""
    inputs = (q, k, v)
    options = _options(causal, scale, windows, softcap, sinks, return_lse, right)
    if out is None:
        out, lse = torch.ops.ladder.dflash2_attention(*inputs, *options)
    else:
        lse = torch.ops.ladder.dflash2_attention_out(*inputs, *options, out)
    return (out, lse) if return_lse else out


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal, scale, windows, softcap, sinks, return_lse, out, right):
    """``prefill.varlen`` through the operators."""
    inputs = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    options = _options(causal, scale, windows, softcap, sinks, return_lse, right)
    if out is None:
        out, lse = torch.ops.ladder.dflash2_varlen(*inputs, *options)
    else:
        lse = torch.ops.ladder.dflash2_varlen_out(*inputs, *options, out)
    return (out, lse) if return_lse else out


def paged_prefill(
    q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
    causal, scale, windows, softcap, sinks, return_lse, out, right,
):  # fmt: skip
    """``prefill.paged_prefill`` through the operators."""
    inputs = (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q)
    options = _options(causal, scale, windows, softcap, sinks, return_lse, right)
    if out is None:
        out, lse = torch.ops.ladder.dflash2_paged_prefill(*inputs, *options)
    else:
        lse = torch.ops.ladder.dflash2_paged_prefill_out(*inputs, *options, out)
    return (out, lse) if return_lse else out


def _options(causal, scale, windows, softcap, sinks, return_lse, right):
    """The options as the schema has them; what cannot travel is refused here, all else by the operator when it runs."""
    if windows is not None and not isinstance(windows, RangeWindows):
        raise TypeError(f"{RUNG}: windows is a {type(windows).__name__}; want a RangeWindows, or None")
    flat = [] if windows is None else list(windows.flat)
    return causal, scale, flat, softcap, sinks, return_lse, right


# What the operators compute: an operator may be called by hand, so it is an entry too.
_RUNS = {
    name: kernel_entry(run) for name, run in (
        ("attention", prefill.dense), ("varlen", prefill.varlen), ("paged_prefill", prefill.paged_prefill),
        ("decode", decode.paged_decode), ("mla_decode", decode.mla_decode),
    )
}  # fmt: skip


def _call(name, inputs, options, out):
    causal, scale, windows, softcap, sinks, return_lse, right = options
    extra = () if name == "attention" else (inputs[-1],)
    tensors = inputs[:-1] if extra else inputs
    windows = RangeWindows.from_flat(tuple(windows)) if windows else None
    keywords = dict(max_seqlen_q=extra[0]) if extra else {}
    result = _RUNS[name](
        *tensors, **keywords, causal=causal, scale=scale, windows=windows, softcap=softcap, sinks=sinks,
        return_lse=return_lse, out=out, right=right,
    )  # fmt: skip
    return result if return_lse else (result, inputs[0].new_empty(0, dtype=torch.float32))


def _fake_lse(name, q, return_lse):
    if not return_lse:
        shape = (0,)
    elif name == "attention":
        shape = q.shape[:3]
    else:
        shape = (q.shape[1], q.shape[0])
    return q.new_empty(shape, dtype=torch.float32)


def _register(name):
    """Define ``ladder::dflash2_<name>`` and its ``_out``, with what they compute and what shapes come out."""
    num_inputs = _INPUTS[name].count(",") + 1

    def compute(*args):
        return _call(name, args[:num_inputs], args[num_inputs:], None)

    def fake(*args):
        q, v, return_lse = args[0], args[2], args[num_inputs + 5]
        return q.new_empty(*q.shape[:-1], v.shape[-1]), _fake_lse(name, q, return_lse)

    def compute_out(*args):
        return _call(name, args[:num_inputs], args[num_inputs:-1], args[-1])[1]

    def fake_out(*args):
        return _fake_lse(name, args[0], args[num_inputs + 5])

    schema = f"({_INPUTS[name]}, {_OPTIONS}"
    torch.library.custom_op(
        f"ladder::dflash2_{name}", compute, mutates_args=(), schema=f"{schema}) -> (Tensor, Tensor)"
    ).register_fake(fake)
    torch.library.custom_op(
        f"ladder::dflash2_{name}_out", compute_out, mutates_args=("out",), schema=f"{schema}, Tensor(a!) out) -> Tensor"
    ).register_fake(fake_out)


# Decode's operators write ``out``, and return the log-sum-exp, (B, Hq, q_len), of no element unless it is asked for.




def refuse_under_compile(config):
    """Refuse what the operator cannot be told; all else it checks when it runs."""
    if config is not None:
        raise NotImplementedError(f"{RUNG}: config is for tuning outside torch.compile; want None")


def flat_windows(windows):
    windows = check_windows(windows)
    return None if windows is None else list(windows.flat)


def workspace_tensors(workspace):
    return (None, None) if workspace is None else (workspace.partials, workspace.counters)


def lse_shape(q):
    return (q.shape[0], q.shape[1]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def _borrowed(partials, counters):
    """A workspace of the tensors of another; what it grows by lasts for one call."""
    if partials is None:
        return None
    workspace = DecodeWorkspace(partials.device)
    workspace.partials, workspace.counters = partials, counters
    return workspace


def _decode_op(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    causal: bool, scale: float | None, windows: list[int] | None, softcap: float, sinks: torch.Tensor | None,
    num_kv_splits: int | None, return_lse: bool, out: torch.Tensor, partials: torch.Tensor | None,
    counters: torch.Tensor | None, schedule: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    result = _RUNS["decode"](
        q, k_cache, v_cache, block_table, seq_lens, causal=causal, scale=scale,
        windows=None if windows is None else RangeWindows.from_flat(windows), softcap=softcap, sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=_borrowed(partials, counters), schedule=schedule,
    )  # fmt: skip
    return result[1] if return_lse else q.new_empty(0, dtype=torch.float32)


def _mla_decode_op(
    q: torch.Tensor, latent_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, scale: float,
    head_dim_v: int, causal: bool, windows: list[int] | None, softcap: float, sinks: torch.Tensor | None,
    num_kv_splits: int | None, return_lse: bool, out: torch.Tensor, partials: torch.Tensor | None,
    counters: torch.Tensor | None, schedule: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    result = _RUNS["mla_decode"](
        q, latent_cache, block_table, seq_lens, scale=scale, head_dim_v=head_dim_v, causal=causal,
        windows=None if windows is None else RangeWindows.from_flat(windows), softcap=softcap, sinks=sinks,
        num_kv_splits=num_kv_splits, return_lse=return_lse, out=out, workspace=_borrowed(partials, counters), schedule=schedule,
    )  # fmt: skip
    return result[1] if return_lse else q.new_empty(0, dtype=torch.float32)


def _fake_decode(q, k_cache, v_cache, block_table, seq_lens, causal, scale, windows, softcap, sinks, num_kv_splits, return_lse, *tensors):
    return q.new_empty(lse_shape(q) if return_lse else 0, dtype=torch.float32)


def _fake_mla_decode(
    q, latent_cache, block_table, seq_lens, scale, head_dim_v, causal, windows, softcap, sinks, num_kv_splits, return_lse, *tensors
):  # fmt: skip
    return q.new_empty(lse_shape(q) if return_lse else 0, dtype=torch.float32)


for _name in _INPUTS:  # once a process, also when this module is loaded again
    if not hasattr(torch.ops.ladder, f"dflash2_{_name}"):
        _register(_name)
if not hasattr(torch.ops.ladder, "dflash2_decode"):
    for _name, _run, _fake in (("decode", _decode_op, _fake_decode), ("mla_decode", _mla_decode_op, _fake_mla_decode)):
        torch.library.custom_op(f"ladder::dflash2_{_name}", _run, mutates_args=("out", "partials", "counters")).register_fake(_fake)
