"""Step 08 as an attention backend of Hugging Face transformers.

    from ladder.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dflash2")    # or "dflash1": step 07

transformers takes every name with "flash" in it for a FlashAttention package or a kernel of its hub, and for gpt-oss
puts another in its place. So the backends are registered as "step08" and "step07", which work too and are what the
model's configuration then says, and ``register`` teaches ``PreTrainedModel`` that "dflash2" and "dflash1" mean these.

Causal, sliding-window and bidirectional layers build no (query, key) mask. What reaches a layer instead is a tensor
whose shape says which of the three it is, and a few integers: none, how many keys of a static cache are filled, where
each left-padded sequence starts, or which tokens of a batch are real. Only a layer whose model makes no mask is asked
whether it is causal. A padded prefill is packed and runs as a ragged batch; a left-padded decode reads the cache where
it lies, from each sequence's start. Windows, softcaps (Gemma 2), learned sinks (gpt-oss), grouped heads and unequal
head sizes (DeepSeek-V2) are the kernels' own. Padded queries get 0. Under ``torch.autocast`` a layer computes in the
autocast type, as ``scaled_dot_product_attention`` does.

Fallback rule: what the kernels do not compute runs in PyTorch, through ``scaled_dot_product_attention`` where there is
neither softcap nor sink, and warns once for each reason:

- gradients (call the model under ``torch.inference_mode()``), dropout, head sizes above 256, float64;
- any mask that is not causal, sliding or padding: 4-D masks given by the caller, packed ``position_ids``, bidirectional
  image blocks, chunked attention (Llama 4) once the context is longer than a chunk, two-sided windows, and holes in the
  padding under a sliding window, because transformers counts the window over the holes. Sliding windows too where
  torch.compile traces the making of the mask (``generate`` makes it outside of what it compiles);
- models with a layer that does more with its mask than hand it on, such as the indexers of sparse attention: they get
whole
  masks, in the form that transformers' own eager attention reads;
- dflash1: windows shorter than the context, softcaps and sinks.

torch.compile traces all of it in one graph. Where it traces the making of a mask
too, it cannot ask whether a batch has padding, so a 2-D ``attention_mask`` means
packing: leave it out when all tokens are real. No warning comes from a graph.

``register(fallback=False)`` raises ``NotImplementedError`` with the reason instead. Always
refused are continuous batching, whose cache the backend would have to write itself; what a
layer hands over in place of a mask or beside it (``UNREAD``); and models whose own
attention never asks for a backend: they would add a mask of integers to their scores.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from ladder.contract import FLOATS, check_flag, check_integer, outside_autocast
from ladder.rungs import MAX_HEAD_DIM

from .transformers_models import EDITED, look_at_model

MAX_DECODE_TOKENS = 16
SPLIT_KEYS = 1024  # from so many keys on, a few new tokens are worth a kernel that splits the keys
UNREAD = {  # arguments of a layer that change its result and that nothing here reads
    "block_table": "continuous batching", "read_index": "continuous batching", "indices": "sparse attention",
    "block_indices": "sparse attention", "sinks": "a sink logit of each token", "head_mask": "a factor of each head",
    "output_attentions": "weights that are never in memory",
}  # fmt: skip


NAMES = {"dflash2": "step08", "dflash1": "step07"}


def register(*, fallback=True):
    """Make ``attn_implementation="dflash2"`` and ``"dflash1"`` ("step08" and "step07") known to transformers.

    Args:
        fallback: run what the kernels do not compute in PyTorch, with a warning. False: NotImplementedError.

    Returns:
        The names that can be used. Calling it again replaces them.

    Raises:
        ImportError: transformers is missing or older than 4.57. TypeError: ``fallback`` is no bool.
    """
    check_flag("ladder.integrations.transformers", "fallback", fallback)
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise ImportError(
            "ladder.integrations.transformers: needs transformers >= 4.57 (pip install transformers)"
        ) from error
    for backend, name in NAMES.items():
        AttentionInterface.register(name, functools.partial(attention_forward, backend=backend, fallback=fallback))
        AttentionMaskInterface.register(name, key_mask)
    checked = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(checked, "_dflash"):

        @functools.wraps(checked)
        def check(self, attn_implementation, *args, **kwargs):
            if isinstance(attn_implementation, str):
                attn_implementation = NAMES.get(attn_implementation, attn_implementation)
                if attn_implementation in NAMES.values():
                    look_at_model(type(self), type(self.config), NAMES)
            return checked(self, attn_implementation, *args, **kwargs)

        check._dflash = True
        PreTrainedModel._check_and_adjust_attn_implementation = check
    return *NAMES, *NAMES.values()


def attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
    is_causal=None,
    s_aux=None, *, backend="dflash2", fallback=True, **kwargs,
):  # fmt: skip
    """One layer's attention, as transformers calls it.

    Args:
        query: (B, Hq, Sq, D). key: (B, Hkv, Sk, D). value: (B, Hkv, Sk, Dv). Any strides.
        attention_mask: what ``key_mask`` made, a caller's (B, 1, Sq, Sk) mask, or None where the model made none.
        s_aux: (Hq,) sink logits. softcap: None or 0 is off. sliding_window: keys that a query sees, itself included.
        is_causal: whether a layer without a mask is causal; None asks the module; a module that does not say is not. A
            mask says it itself.

    Returns:
        (B, Sq, Hq, Dv) contiguous, and None for the weights, which are never in memory.

    Raises:
        NotImplementedError: an argument of ``UNREAD``; without ``fallback`` what the kernels do not compute.
        TypeError, ValueError: naming the argument, what came and what is wanted.
    """
    if backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; want {' or '.join(NAMES)}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.ndim != 4:
            came = f"{tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise (ValueError if isinstance(x, torch.Tensor) else TypeError)(
                f"{backend}: {name} is {came}; want a torch.Tensor (B, H, S, D)"
            )
    return _forward(
        *_in_autocast_type(query, key, value), module, attention_mask, dropout, scaling, sliding_window, softcap,
        is_causal, s_aux,
        backend, fallback, kwargs,
    )  # fmt: skip


def _in_autocast_type(*tensors):
    """The tensors as ``scaled_dot_product_attention`` would take them under the autocast around it, if there is one."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    return [x.to(torch.get_autocast_dtype(device)) if x.dtype in FLOATS else x for x in tensors]


@outside_autocast
def _forward(
    query, key, value, module, attention_mask, dropout, scaling, sliding_window, softcap, is_causal, s_aux, backend,
    fallback, kwargs,
):  # fmt: skip
    """``attention_forward`` in the types of its tensors: (out, None)."""
    if s_aux is not None and (not isinstance(s_aux, torch.Tensor) or s_aux.shape != query.shape[1:2]):
        came = f"{tuple(s_aux.shape)}" if isinstance(s_aux, torch.Tensor) else f"a {type(s_aux).__name__}"
        raise (ValueError if isinstance(s_aux, torch.Tensor) else TypeError)(
            f"{backend}: s_aux is {came}; want a torch.Tensor ({query.shape[1]},)"
        )
    if sliding_window is not None:
        sliding_window = check_integer(backend, "sliding_window", sliding_window, 0, optional=True)
    for name, what in UNREAD.items():
        if (given := kwargs.get(name)) is not None and given is not False:
            raise NotImplementedError(
                f"{backend}: {what} ({name}); want attn_implementation='eager' or 'sdpa' for this model"
            )
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    mask_causal, mask_window, attention_mask = _decode_mask(attention_mask, query, seqlen_k)
    if mask_causal is not None:
        causal = mask_causal
    else:
        causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if mask_window and sliding_window and mask_window != sliding_window:
        raise ValueError(
            f"{backend}: sliding_window is {sliding_window}, the mask was made for {mask_window}; want one window"
        )
    window = mask_window or sliding_window or None
    if window is not None and window >= seqlen_k:
        window = None
    softcap = float(softcap or 0.0)
    starts = tuple(kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    if (starts[0] is None) != (starts[1] is None):
        missing = "cu_seq_lens_q" if starts[0] is None else "cu_seq_lens_k"
        raise ValueError(f"{backend}: {missing} is None; want cu_seq_lens_q and cu_seq_lens_k, or neither")

    reason = _not_computed(backend, query, key, value, attention_mask, dropout, window, causal, softcap, s_aux, kwargs)
    if reason is not None:
        message = f"{backend}: {reason}"
        if not fallback:
            raise NotImplementedError(f"{message}; register(fallback=True) would run it in PyTorch")
        if not torch.compiler.is_compiling():  # a warning would break the graph
            warnings.warn(f"{message}: this layer runs in PyTorch", stacklevel=4)  # the layer
        bias = kwargs.get("position_bias")
        if starts[0] is not None and (attention_mask is None or attention_mask.dtype == torch.int32):
            q, k, v = (x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (query, key, value))
            visible = _visible_of_packed(*starts, q.shape[2], k.shape[2], causal, window)
            out = _in_pytorch(q, k, v, visible, bias, scaling, softcap, s_aux, dropout)
            return out[0].transpose(0, 1).unflatten(0, (-1, seqlen_q)).contiguous(), None
        visible = _visible(attention_mask, query, seqlen_k, causal, window)
        out = _in_pytorch(query, key, value, visible, bias, scaling, softcap, s_aux, dropout)
        return out.transpose(1, 2).contiguous(), None

    options = dict(scale=scaling)
    if backend == "dflash2":
        from ladder.step08_dflash2 import RangeWindows

        options |= dict(windows=None if window is None else RangeWindows.sliding(window), softcap=softcap, sinks=s_aux)
    entries = _entries(backend)
    if starts[0] is not None:  # sequences that a data collator has packed into one
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = entries.varlen(q, k, v, *(x.to(torch.int32) for x in starts), causal=causal, **options)
        return out.unflatten(0, (-1, seqlen_q)), None
    pages = None
    if attention_mask is not None and attention_mask.shape[3] == 1:
        pages = _pages_of_rows(key, value, attention_mask)
    elif (
        causal
        and seqlen_q <= MAX_DECODE_TOKENS
        and (seqlen_k >= SPLIT_KEYS if attention_mask is None else attention_mask.shape[3] == 2)
    ):
        pages = _pages_of_tokens(key, value, attention_mask)
    if pages is not None:
        return _cached(entries, query, *pages, options), None
    if attention_mask is not None:
        return _packed(entries, query, key, value, attention_mask, causal, options), None
    out = query.new_empty(query.shape[0], seqlen_q, query.shape[1], value.shape[3])
    entries.dense(query, key, value, causal=causal and seqlen_q > 1, out=out.transpose(1, 2), **options)
    return out, None


# Masks: how a model's mask travels to its layers.
#
# transformers hands on whatever a mask function returns, but in generate() with a static cache the masks of a step are
# made
# early and come by a second time, and only 4-D tensors pass there untouched. So a mask of this backend is an int32
# tensor
# (B, CAUSAL or BIDIRECTIONAL, 1 + window, n): window is the sliding window, 0 for none, and both dimensions have stride
# 0;
# n says what it holds:
#   0            nothing but the window
#   1            how many keys are filled; the queries are the newest of them
#   2            the same, and where each sequence starts: padding on the left
#   1 + Sk + Sq  the same, then a 1 for each real key, then for each real query

CAUSAL, BIDIRECTIONAL = 2, 3  # 1 are a caller's own integers


def key_mask(
    batch_size, kv_length, q_length=None, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None,
    local_size=None,
    cache_position=None, **kwargs,
):  # fmt: skip
    """What transformers calls in place of making a (B, 1, Sq, Sk) mask: the smallest tensor that says the same.

    Args:
        batch_size, q_length, kv_length: shape of the attention. q_offset, kv_offset: positions of its first query and
        key, as
            numbers or, with a static cache, tensors. cache_position: (Sq,) positions of the queries, before
            transformers 5.
        mask_function: transformers' predicate; anything but causal, sliding and bidirectional becomes the full mask.
        attention_mask: (B, tokens so far) bool, the padding, or None.
        local_size: the sliding window, or the chunk.
    """
    full = functools.partial(
        _full_mask, batch_size=batch_size, kv_length=kv_length, q_length=q_length, q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        cache_position=cache_position, **kwargs,
    )  # fmt: skip
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"attention_mask is {tuple(attention_mask.shape)}; want (B, tokens), or (B, 1, Sq, Sk)")
    tracing = torch.compiler.is_compiling()
    if cache_position is not None:
        q_length = cache_position.shape[0]
        q_offset = cache_position[0] if tracing else int(cache_position[0])
        kwargs.setdefault("device", cache_position.device)  # which transformers 4 does not name
    pattern = None if type(kwargs.get("config")) in EDITED else _pattern(mask_function)
    if pattern == "chunked" and _known(kv_offset) and kv_offset + kv_length <= local_size:
        pattern = "causal"  # no chunk ends yet
    if pattern not in ("causal", "sliding", "bidirectional"):
        return full()
    causal = pattern != "bidirectional"
    window = local_size if pattern == "sliding" and local_size < kv_length else 0
    filled = q_offset + q_length - kv_offset if causal else kv_length

    device = attention_mask.device if attention_mask is not None else kwargs.get("device") or "cpu"
    ends = torch.as_tensor(filled, device=device).to(torch.int32).expand(batch_size, 1)
    entries = ends[:, :0] if _known(filled) and filled == kv_length else ends
    if attention_mask is not None:
        if (
            attention_mask.shape[0] != batch_size
            or causal
            and _known(q_offset)
            and attention_mask.shape[1] < q_offset + q_length
        ):
            return full()  # tokens that the mask does not know: transformers says what they see
        if tracing and window:  # whether there are holes cannot be asked
            return full()
        keys, queries, starts, facts = _padding(attention_mask, causal, q_length, kv_length, q_offset, kv_offset, ends)
        everything, left, holes = (False, False, False) if tracing else torch.stack(facts).tolist()
        if holes and window:
            return full()
        if left and causal and not everything:
            entries = torch.cat((ends, starts), dim=1)
        elif not everything:
            entries = torch.cat((ends, keys, queries), dim=1)
    return entries[:, None, None].expand(-1, CAUSAL if causal else BIDIRECTIONAL, 1 + window, -1)


def _known(number):
    return not isinstance(number, torch.Tensor)


def _padding(attention_mask, causal, q_length, kv_length, q_offset, kv_offset, ends):
    """Real keys (B, Sk) and queries (B, Sq), starts (B, 1), all int32; and whether all filled keys are real, whether
    those of each sequence are the newest, whether some lie apart.
    """
    attention_mask = attention_mask.bool()
    slots = torch.arange(kv_length, device=ends.device)
    live = slots < ends
    keys = _columns(attention_mask, slots + kv_offset) & live
    queries = torch.ones(len(keys), q_length, dtype=torch.bool, device=ends.device)
    if causal:
        queries = _columns(attention_mask, torch.arange(q_length, device=ends.device) + q_offset)
    starts = ends - keys.sum(1, keepdim=True)
    rises = keys.clone()
    rises[:, 1:] &= ~keys[:, :-1]
    facts = (keys | ~live).all(), (keys == (live & (slots >= starts))).all(), (rises.sum(1) > 1).any()
    return *(x.to(torch.int32) for x in (keys, queries, starts)), facts


def _columns(mask, index):
    """mask[:, index], False beyond the end."""
    inside = index < mask.shape[1]
    return mask[:, index.clamp(max=mask.shape[1] - 1)] & inside


def _pattern(mask_function):
    """The name of a mask that transformers composed, None for any other; while compiling only of those it did not
    compose, because a closure made in the graph cannot be looked into.
    """
    if torch.compiler.is_compiling():
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function is causal_mask_function:
            return "causal"
        return "bidirectional" if mask_function is bidirectional_mask_function else None
    names = set()
    todo = [mask_function]
    while todo:
        function = todo.pop()
        name = getattr(function, "__qualname__", None)
        if getattr(function, "__module__", None) != "transformers.masking_utils" or name is None:
            return None
        if name == "and_masks.<locals>.and_mask":
            todo.extend(dict(zip(function.__code__.co_freevars, function.__closure__))["mask_functions"].cell_contents)
        else:
            names.add(name.removesuffix(".<locals>.inner_mask"))
    return {
        frozenset({"causal_mask_function"}): "causal",
        frozenset({"causal_mask_function", "sliding_window_overlay"}): "sliding",
        frozenset({"causal_mask_function", "chunked_overlay"}): "chunked",
        frozenset({"bidirectional_mask_function"}): "bidirectional",
    }.get(frozenset(names))


def _full_mask(**arguments):
    """transformers' own (B, 1, Sq, Sk) mask. Boolean and never skipped, for None would mean something else here.

    A model that edits its masks gets those that its eager attention
    adds to the scores, and None where that sees everything.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    dropped = ("q_length", "q_offset") if arguments["cache_position"] is not None else ("cache_position",)
    if type(arguments.get("config")) in EDITED:
        make = eager_mask
    else:
        make = sdpa_mask
        arguments |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return make(**{name: value for name, value in arguments.items() if name not in dropped})


def _decode_mask(mask, query, seqlen_k):
    """(causal, window, mask) of what came as attention_mask; a
    caller's own mask comes back as it is, with causal None."""
    if mask is None:
        return None, 0, None
    if mask.ndim != 4:
        raise ValueError(
            f"attention_mask of a layer is {tuple(mask.shape)}; want what ladder.integrations.transformers.key_mask "
            f"made, "
            "or (B, 1, Sq, Sk)"
        )
    if mask.dtype == torch.bool or mask.is_floating_point():
        return None, 0, mask
    if mask.dtype != torch.int32 or mask.shape[1] not in (CAUSAL, BIDIRECTIONAL):
        raise ValueError(
            f"attention_mask of a layer is {tuple(mask.shape)} {mask.dtype}; want bool, or floating point to add"
        )
    window, entries = mask.shape[2] - 1, mask.shape[3]
    if entries not in (0, 1, 2, 1 + seqlen_k + query.shape[2]):
        raise ValueError(
            f"attention_mask was made for {entries - 1} keys and queries; the layer has {seqlen_k} and "
            f"{query.shape[2]}; "
            "want attn_implementation='eager' or 'sdpa' for this model"
        )
    return mask.shape[1] == CAUSAL, window, mask if entries else None


def _real(mask, seqlen_q, seqlen_k):
    """Real keys (B, Sk) and queries (B, Sq), bool, of any mask with entries."""
    entries = mask[:, 0, 0]
    if entries.shape[1] > 2:
        return entries[:, 1 : 1 + seqlen_k] != 0, entries[:, 1 + seqlen_k :] != 0
    ends, starts = entries[:, :1], entries[:, 1:] if entries.shape[1] == 2 else 0
    keys = torch.arange(seqlen_k, device=mask.device)
    queries = torch.arange(seqlen_q, device=mask.device) + ends - seqlen_q
    return (keys >= starts) & (keys < ends), queries >= starts


def _visible(mask, query, seqlen_k, causal, window):
    """The full mask of ``mask``: bool, or a caller's float to add, (B or 1, 1, Sq, Sk)."""
    if mask is not None and mask.dtype != torch.int32:
        return mask
    seqlen_q, key = query.shape[2], torch.arange(seqlen_k, device=query.device)
    end = seqlen_k if mask is None else mask[:, :1, :1, :1]
    position = end - seqlen_q + torch.arange(seqlen_q, device=query.device)[:, None]
    visible = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if causal:
        visible = visible & (key <= position)
    if window is not None:
        visible = visible & (key > position - window)
    return visible if mask is None else visible & _real(mask, seqlen_q, seqlen_k)[0][:, None, None]


def _visible_of_packed(starts_q, starts_k, rows, keys, causal, window):
    """The full mask (1, 1, rows, keys) of sequences that lie one after another."""
    row, key = torch.arange(rows, device=starts_q.device), torch.arange(keys, device=starts_q.device)
    starts_q, starts_k = starts_q.long(), starts_k.long()
    of_row, of_key = (torch.searchsorted(s, x, right=True) for s, x in ((starts_q, row), (starts_k, key)))
    visible = of_row[:, None] == of_key
    shift = (starts_k - starts_q)[of_row.clamp(max=len(starts_q) - 1)]  # each sequence's ends, which are aligned
    position = (row + shift)[:, None]
    if causal:
        visible = visible & (key <= position)
    if window is not None:
        visible = visible & (key > position - window)
    return visible[None, None]


# Computing


def _not_computed(backend, query, key, value, mask, dropout, window, causal, softcap, sinks, kwargs):
    """Why the kernels do not compute this, or None."""
    tensors = [x for x in (query, key, value, sinks) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "gradients are recorded, and the kernels are forward only (use torch.inference_mode())"
    if dropout:
        return f"dropout is {dropout}"
    if mask is not None and mask.dtype != torch.int32:
        return "the mask is neither causal, nor a sliding window, nor padding"
    if kwargs.get("position_bias") is not None:
        return "position_bias is given"
    if window is not None and not causal:
        return f"a window of {window} without a causal mask"
    if max(query.shape[3], value.shape[3]) > MAX_HEAD_DIM:
        return f"head size {max(query.shape[3], value.shape[3])} is above {MAX_HEAD_DIM}"
    if query.dtype not in FLOATS:
        return f"dtype {query.dtype}"
    if backend == "dflash1":
        for what, given in (
            ("a sliding window", window),
            ("a softcap", softcap),
            ("attention sinks", sinks is not None),
        ):
            if given:
                return f"{what}, which dflash2 has"
    return None


class _Entries(NamedTuple):
    """The functions of a step."""

    dense: Callable
    varlen: Callable
    paged_prefill: Callable
    decode: Callable


def _entries(backend):
    """The functions of a step, imported when a layer needs them."""
    if backend == "dflash2":
        from ladder.step08_dflash2 import (
            dflash2_attention,
            dflash2_decode,
            dflash2_paged_prefill,
            dflash2_varlen,
        )

        return _Entries(dflash2_attention, dflash2_varlen, dflash2_paged_prefill, dflash2_decode)
    from ladder.step07_dflash1 import attention, attention_varlen, paged_decode, paged_prefill

    return _Entries(attention, attention_varlen, paged_prefill, paged_decode)


def _cached(entries, query, k_cache, v_cache, table, lengths, options):
    """The newest tokens of every sequence over a cache (pages, page_size, Hkv, D); lengths (B,) stay on the device."""
    batch, _, seqlen_q, _ = query.shape
    query = query.transpose(1, 2)
    if seqlen_q <= MAX_DECODE_TOKENS:
        return entries.decode(query, k_cache, v_cache, table, lengths, **options)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device) * seqlen_q
    out = entries.paged_prefill(query.flatten(0, 1), k_cache, v_cache, table, lengths, starts, **options)
    return out.unflatten(0, (batch, seqlen_q))


def _pages_of_rows(key, value, mask):
    """(k_cache, v_cache, table, lengths) of a static cache: one page for each sequence, as long as the cache."""
    table = torch.arange(key.shape[0], dtype=torch.int32, device=key.device)[:, None]
    return key.transpose(1, 2), value.transpose(1, 2), table, mask[:, 0, 0, 0].contiguous()


def _pages_of_tokens(key, value, mask):
    """(k_cache, v_cache, table, lengths) that read key and value (B, Hkv, Sk, D) as pages of one token, without a copy.

    A dynamic cache is one token longer each step; pages as long as the cache would compile a kernel for each length.
    Pages of a token also let a left-padded sequence start where it starts. None when the sequences do not lie a whole
    number of tokens apart, the same in both.
    """
    batch, _, seqlen_k, _ = key.shape
    steps = {seqlen_k}
    if batch > 1:
        steps = {
            x.stride(0) // x.stride(2) if x.stride(2) and x.stride(0) % x.stride(2) == 0 else None for x in (key, value)
        }
    if len(steps) != 1 or None in steps:
        return None
    step = steps.pop()
    num_pages = (batch - 1) * step + seqlen_k
    if step < 0 or num_pages >= 1 << 31:
        return None
    caches = (
        x.as_strided((num_pages, 1, x.shape[1], x.shape[3]), (x.stride(2), x.stride(2), x.stride(1), x.stride(3)))
        for x in (key, value)
    )
    token = torch.arange(seqlen_k, dtype=torch.int32, device=key.device)
    table = torch.arange(batch, dtype=torch.int32, device=key.device)[:, None] * step + token
    if mask is None:
        return *caches, table, torch.full((batch,), seqlen_k, dtype=torch.int32, device=key.device)
    ends, starts = mask[:, 0, 0, :1], mask[:, 0, 0, 1:]
    return *caches, table + starts, (ends - starts)[:, 0].contiguous()  # entries past the end are not followed


def _packed(entries, query, key, value, mask, causal, options):
    """A padded batch as a ragged one: real tokens packed, the result put back, 0 at padded queries."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    compiling = torch.compiler.is_compiling()
    packing = None if compiling else getattr(mask, "_dflash_packing", None)
    if packing is None:
        keys, queries = _real(mask, seqlen_q, seqlen_k)
        packing = *_rows(queries), *_rows(keys)
        if not compiling:
            mask._dflash_packing = packing  # for all layers with this mask
    rows_q, starts_q, rows_k, starts_k = packing
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1).index_select(0, rows)
        for x, rows in ((query, rows_q), (key, rows_k), (value, rows_k))
    )
    out = entries.varlen(q, k, v, starts_q, starts_k, causal=causal, **options)
    if compiling:
        out = out.masked_fill((torch.arange(len(rows_q), device=out.device) >= starts_q[-2])[:, None, None], 0)
    padded = out.new_zeros(query.shape[0] * seqlen_q, *out.shape[1:]).index_copy(0, rows_q, out)
    return padded.unflatten(0, (-1, seqlen_q))


def _rows(real):
    """(indices of the real tokens of (B, S) in order, where each sequence starts among them (B + 1,) int32).

    While compiling how many are real cannot be asked: all indices, and the padding is one more sequence at the end.
    """
    starts = torch.cat((real.new_zeros(1, dtype=torch.int32), real.sum(1).cumsum(0).to(torch.int32)))
    rows = torch.argsort((~real).flatten().to(torch.uint8), stable=True)
    if torch.compiler.is_compiling():
        return rows, torch.cat((starts, starts.new_full((1,), real.numel())))
    return rows[: int(starts[-1])], starts


def _in_pytorch(query, key, value, visible, bias, scale, softcap, sinks, dropout):
    """Attention with any mask, differentiable: (B, Hq, Sq, Dv). visible: bool, or float to add."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (key, value))
    if bias is not None:
        hidden = torch.zeros((), dtype=query.dtype, device=query.device)
        if visible is not None:
            hidden = (
                visible
                if visible.dtype != torch.bool
                else hidden.expand(visible.shape).masked_fill(~visible, -math.inf)
            )
        visible = bias + hidden
    if not softcap and sinks is None:
        if visible is not None and visible.dtype != torch.bool:
            visible = visible.to(query.dtype)
        return scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=dropout, scale=scale)
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf) if visible.dtype == torch.bool else scores + visible
    nothing = (scores == -math.inf).all(-1, keepdim=True) if sinks is None else None
    if sinks is not None:
        sinks = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return torch.nn.functional.dropout(weights.to(query.dtype), dropout) @ value
