"""What a window policy costs in quality: bits per byte of ``tiny-moe`` on held-out text at its full context."""

import math

import torch
import torch.nn.functional as F

from ladder.contract import check_integer
from ladder.lab import results

from . import corpus
from .bench import Interrupted
from .context import Context
from .models import tiny_moe


class WindowedContext(Context):
    """One sequence of dense causal attention, by step 08 with a ``RangeWindows`` policy (None: exact)."""

    def __init__(self, model, windows):
        self.cos_sin, self.windows, self.scale = model.cos_sin, windows, model.config.scale
        self.visible = 0

    def attend(self, attention, x):
        from ladder.step08_dflash2 import dflash2_attention

        q, k, v = (t.transpose(0, 1)[None] for t in attention.project(x, self.cos_sin[: len(x)]))
        out = dflash2_attention(q, k, v, causal=True, scale=self.scale, windows=self.windows)
        return out[0].transpose(0, 1)


def policies(context):
    """{name: RangeWindows or None} that the table compares: windows of several sizes, with sinks and without."""
    from ladder.step08_dflash2 import RangeWindows

    found = {"exact": None}
    for window in (256, 512, 1024, 2048):
        if window < context:
            found[f"sliding {window}"] = RangeWindows.sliding(window)
            found[f"sink 4 + window {window - 4}"] = RangeWindows.sink_window(4, window - 4)
    found["last quarter exact, before it window 512"] = RangeWindows.prefix_local(-context // 4, 4, 508)
    return found


@torch.inference_mode()
def bits_per_byte(model, windows_of_text, policy, second_half=True):
    """Mean bits per byte over rows (n, S + 1) of tokens; over the
    second half of each, where a window can hide something."""
    total, count = 0.0, 0
    for row in windows_of_text:
        hidden = model(row[:-1], WindowedContext(model, policy))
        start = (len(row) - 1) // 2 if second_half else 0
        total += F.cross_entropy(model.logits(hidden[start:]), row[1 + start :], reduction="sum").item()
        count += len(row) - 1 - start
    return total / count / math.log(2)


def table(
    *, weights=tiny_moe.WEIGHTS, context=None, sequences=16, device="cpu", dtype=None, root=None, names=None,
    progress=None,
):  # fmt: skip
    """Results rows: ``bits_per_byte`` of every policy on the same held-out sequences, and ``visible_pairs``, the share
    of the causal mask's pairs that it sees.

    Args:
        context: tokens of a sequence; None is the model's. sequences: how many, spread over the held-out text.
        root: folder of Python sources, None is the running Python's library. names: policies to run, None for all.

    Raises:
        TypeError, ValueError: naming the argument, what came and what is wanted. As ``tiny_moe.load``.
        Interrupted: by Ctrl-C, with the rows of the policies that are done.
    """
    device = torch.device(device)
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    model = tiny_moe.load(weights, dtype, device)
    context = model.config.context if context is None else check_integer("quality", "context", context, 2)
    sequences = check_integer("quality", "sequences", sequences, 1)
    if context > model.config.context:
        raise ValueError(f"quality: context is {context}; want at most {model.config.context}, that of the model")
    docs = corpus.documents(root)
    text = torch.frombuffer(bytearray(corpus.join([d for d in docs if d[2]])), dtype=torch.uint8)
    if len(text) < context + 1:
        raise ValueError(f"quality: the held-out text has {len(text)} bytes; want more than the context, {context}")
    sequences = min(sequences, (len(text) - 1) // context)
    starts = torch.linspace(0, len(text) - context - 1, sequences).long()
    rows = torch.stack([text[s : s + context + 1] for s in starts.tolist()]).long().to(device)
    found = []
    chosen = {n: p for n, p in policies(context).items() if names is None or n in names}
    for number, (name, policy) in enumerate(chosen.items()):
        try:
            bits = bits_per_byte(model, rows, policy)
        except KeyboardInterrupt:
            raise Interrupted(found) from None
        visible = (
            1.0
            if policy is None
            else float(policy.visible(context, context, True).sum()) / (context * (context + 1) / 2)
        )
        found.append(results.row(
            {"mode": "engine", "model": "tiny-moe", "task": "quality", "policy": name, "context": context,
             "sequences": sequences,
             "dtype": str(dtype).removeprefix("torch.")},
            "step08_dflash2", bits_per_byte=round(bits, 4), visible_pairs=round(visible, 4),
        ))  # fmt: skip
        if progress:
            progress((number + 1) / len(chosen))
    return found
