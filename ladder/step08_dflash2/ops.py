"""torch custom operators of step 08's prefill: what ``torch.compile`` and ``torch.export`` see instead of the Python.

``ladder::dflash2_attention``, ``ladder::dflash2_varlen`` and ``ladder::dflash2_paged_prefill`` return the output and the
log-sum-exp (of no elements when it is not asked for); those that end in ``_out`` write ``out`` and return the log-sum-exp.
Windows travel as ``RangeWindows.flat``. The entries call them while they are being compiled, and nobody else has to.
"""

import torch

from .windows import RangeWindows

RUNG = "step08_dflash2"
_INPUTS = {
    "attention": "Tensor q, Tensor k, Tensor v",
    "varlen": "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt? max_seqlen_q",
    "paged_prefill": "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
                     "SymInt? max_seqlen_q",
}  # fmt: skip
_OPTIONS = "bool causal, float? scale, int[] windows, float softcap, Tensor? sinks, bool return_lse, SymInt? right"


def dense(q, k, v, causal, scale, windows, softcap, sinks, return_lse, out, right):
    """``attention.dense`` through the operators."""
    inputs = (q, k, v)
    options = _options(causal, scale, windows, softcap, sinks, return_lse, right)
    if out is None:
        out, lse = torch.ops.ladder.dflash2_attention(*inputs, *options)
    else:
        lse = torch.ops.ladder.dflash2_attention_out(*inputs, *options, out)
    return (out, lse) if return_lse else out


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal, scale, windows, softcap, sinks, return_lse, out, right):
    """``attention.varlen`` through the operators."""
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
    """``attention.paged_prefill`` through the operators."""
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


def _entry(name):
    from .attention import dense, paged_prefill, varlen

    return {"attention": dense, "varlen": varlen, "paged_prefill": paged_prefill}[name]


def _call(name, inputs, options, out):
    causal, scale, windows, softcap, sinks, return_lse, right = options
    extra = () if name == "attention" else (inputs[-1],)
    tensors = inputs[:-1] if extra else inputs
    windows = RangeWindows.from_flat(tuple(windows)) if windows else None
    keywords = dict(max_seqlen_q=extra[0]) if extra else {}
    result = _entry(name)(
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


for _name in _INPUTS:
    if not hasattr(torch.ops.ladder, f"dflash2_{_name}"):  # once a process, also when this module is loaded again
        _register(_name)
