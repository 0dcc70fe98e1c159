"""torch custom operators of step 08's prefill and decode: what
``torch.compile`` and ``torch.export`` see instead of the Python.

``ladder::dflash2_attention``, ``dflash2_varlen`` and ``dflash2_paged_prefill`` return the output and the log-sum-exp;
those that end in ``_out``, ``dflash2_decode`` and ``dflash2_mla_decode`` write ``out`` and return the log-sum-exp. It
has no elements unless it is asked for. Windows travel as ``RangeWindows.flat``, and a workspace as its two tensors. The
functions of this module call the operators while an entry is being compiled; nobody else has to.
"""

import torch

from ladder.contract import kernel_entry
from ladder.step07_dflash1.decode import DecodeWorkspace

from . import decode as decoding
from . import prefill
from .checks import check_windows
from .dispatch import RUNG
from .windows import RangeWindows

_PREFILL = "bool causal, float? scale, SymInt[]? windows, float softcap, Tensor? sinks, bool return_lse, SymInt? right"
_DECODE = (
    "bool causal, SymInt[]? windows, float softcap, Tensor? sinks, SymInt? num_kv_splits, bool return_lse, Tensor(a!) "
    "out, "
    "Tensor(b!)? partials, Tensor(c!)? counters, Tensor? schedule"
)
_PACKED = "SymInt? max_seqlen_q"
# name: (what it computes, its arguments)
_OPERATORS = {
    "attention": (prefill.dense, f"Tensor q, Tensor k, Tensor v, {_PREFILL}"),
    "varlen": (
        prefill.varlen,
        f"Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, {_PACKED}, {_PREFILL}",
    ),
    "paged_prefill": (
        prefill.paged_prefill,
        f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        f"{_PACKED}, {_PREFILL}",
    ),
    "decode": (
        decoding.paged_decode,
        f"Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
        f"{_DECODE.replace(', ', ', float? scale, ', 1)}",
    ),
    "mla_decode": (
        decoding.mla_decode,
        f"Tensor q, Tensor latent_cache, Tensor block_table, Tensor seq_lens, float scale, SymInt head_dim_v, "
        f"{_DECODE}",
    ),
}
for _name in ("attention", "varlen", "paged_prefill"):
    _OPERATORS[f"{_name}_out"] = (_OPERATORS[_name][0], f"{_OPERATORS[_name][1]}, Tensor(a!) out")
_NAMES = {name: [argument.split()[-1] for argument in schema.split(", ")] for name, (_, schema) in _OPERATORS.items()}


def _lse_shape(name, q):
    """Shape of the log-sum-exp that an operator returns when it is asked for."""
    if name.startswith("attention"):
        return q.shape[:3]
    if "decode" not in name:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[1]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def _borrowed(partials, counters):
    """A workspace of the tensors of another; what it grows by lasts for one call."""
    if partials is None:
        return None
    workspace = DecodeWorkspace(partials.device)
    workspace.partials, workspace.counters = partials, counters
    return workspace


def _call(name, **given):
    """Call ``ladder::dflash2_<name>``. Dynamo refuses an ``out=`` with gaps, so what is known by name goes by place."""
    return getattr(torch.ops.ladder, f"dflash2_{name}")(*(given[argument] for argument in _NAMES[name]))


def _define(name, run, schema):
    """Define ``ladder::dflash2_<name>``, which gives ``run`` its arguments by name."""
    names = _NAMES[name]
    writes_out = "out" in names
    run = kernel_entry(run)  # an operator may be called by hand, so it is an entry too

    def compute(*args):
        given = dict(zip(names, args))
        q, windows = given["q"], given.pop("windows")
        if "partials" in given:
            given["workspace"] = _borrowed(given.pop("partials"), given.pop("counters"))
        result = run(**given, windows=RangeWindows.from_flat(windows) if windows else None)
        out, lse = result if given["return_lse"] else (result, q.new_empty(0, dtype=torch.float32))
        return lse if writes_out else (out, lse)

    def fake(*args):
        given = dict(zip(names, args))
        q = given["q"]
        lse = q.new_empty(_lse_shape(name, q) if given["return_lse"] else 0, dtype=torch.float32)
        return (
            lse
            if writes_out
            else (q.new_empty(*q.shape[:-1], given["v" if "v" in given else "v_cache"].shape[-1]), lse)
        )

    written = [n for n in ("out", "partials", "counters") if n in names]
    results = "Tensor" if writes_out else "(Tensor, Tensor)"
    torch.library.custom_op(
        f"ladder::dflash2_{name}", compute, mutates_args=written, schema=f"({schema}) -> {results}"
    ).register_fake(fake)


for _name, (_run, _schema) in _OPERATORS.items():
    if not hasattr(torch.ops.ladder, f"dflash2_{_name}"):  # once a process, also when this module is loaded again
        _define(_name, _run, _schema)


# What an entry calls while it is compiled: an operator checks its arguments when it runs, these refuse what it cannot
# be told.


def _flat(windows):
    windows = check_windows(windows)
    return None if windows is None else list(windows.flat)


def _prefill(name, *, out, windows, return_lse, **given):
    given.update(windows=_flat(windows), return_lse=return_lse)
    if out is None:
        out, lse = _call(name, **given)
    else:
        lse = _call(f"{name}_out", **given, out=out)
    return (out, lse) if return_lse else out


def attention(q, k, v, **options):
    """``prefill.dense`` through its operators."""
    return _prefill("attention", q=q, k=k, v=v, **options)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """``prefill.varlen`` through its operators."""
    lengths = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q)
    return _prefill("varlen", q=q, k=k, v=v, **lengths, **options)


def paged_prefill(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, **options):
    """``prefill.paged_prefill`` through its operators."""
    return _prefill(
        "paged_prefill", q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, **options,
    )  # fmt: skip


def _decode(name, *, q, columns, out, windows, workspace, return_lse, config, **given):
    if config is not None:
        raise NotImplementedError(f"{RUNG}: config is for tuning outside torch.compile; want None")
    lse_shape = _lse_shape(name, q)
    out = q.new_empty(*q.shape[:-1], columns) if out is None else out
    partials, counters = (None, None) if workspace is None else (workspace.partials, workspace.counters)
    lse = _call(
        name, q=q, windows=_flat(windows), return_lse=return_lse, out=out, partials=partials, counters=counters, **given
    )
    return (out, lse.view(lse_shape)) if return_lse else out


def decode(q, k_cache, v_cache, block_table, seq_lens, **options):
    """``decode.paged_decode`` through its operator."""
    tensors = dict(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    return _decode("decode", **tensors, columns=v_cache.shape[-1], **options)


def mla_decode(q, latent_cache, block_table, seq_lens, *, head_dim_v, **options):
    """``decode.mla_decode`` through its operator."""
    tensors = dict(q=q, latent_cache=latent_cache, block_table=block_table, seq_lens=seq_lens)
    return _decode("mla_decode", **tensors, columns=head_dim_v, head_dim_v=head_dim_v, **options)
