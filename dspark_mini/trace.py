"""Routing traces: which experts every token chose, in order. Real ones are read, and stand-ins are generated.

Readers, all by content: `read_trace` for token-level traces, `read_counts` for anything that holds expert counts.

* our own `.npz`: `topk_ids` (layers, tokens, top_k), `seq_offsets` (sequences + 1,), optional `num_experts`,
  `generated`
* a folder of ESFT text files, `expert_weights_<layer>.txt` (github.com/deepseek-ai/ESFT, results/expert_scores/<task>):
  one line per sequence; tab-separated expert ids, top_k per token, an empty field, then as many gate weights
* SGLang's expert-distribution dump, a `.pt` file with `logical_count` (layers, experts) or (steps, layers,
  experts); a folder of them is summed
* `.json`: a (layers, experts) or (experts,) list, or an object with such a list under "counts" or "load"; `.npy`

Generated traces say so (`Trace.generated`). Their parameters were fitted to the statistics of DeepSeek-V2-Lite's
routing in ESFT: how far the hottest expert is above the mean, per layer and per 64 or 256 tokens, how much of it
persists from one half of a task to the other, and how many experts neighbouring tokens share.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checks import check_load
from .files import write_whole

__all__ = ["Trace", "bundled_trace", "generate_trace", "r1_like_load", "read_counts", "read_trace", "shift_load"]


@dataclass(frozen=True, eq=False)
class Trace:
    """topk_ids (layers, tokens, top_k) integers; seq_offsets (sequences + 1,) int64; where it came from."""

    topk_ids: np.ndarray
    seq_offsets: np.ndarray
    num_experts: int
    source: str = ""
    generated: bool = False

    def __post_init__(self):
        ids, offsets = self.topk_ids, self.seq_offsets
        _check_ids(ids, "topk_ids")
        if ids.min() < 0 or ids.max() >= self.num_experts:
            raise ValueError(f"topk_ids must lie in 0 .. {self.num_experts - 1}, got {ids.min()} .. {ids.max()}")
        if offsets.ndim != 1 or offsets[0] != 0 or offsets[-1] != ids.shape[1] or (np.diff(offsets) < 0).any():
            raise ValueError(f"seq_offsets must rise from 0 to the number of tokens ({ids.shape[1]})")

    num_layers = property(lambda self: self.topk_ids.shape[0])
    num_tokens = property(lambda self: self.topk_ids.shape[1])
    top_k = property(lambda self: self.topk_ids.shape[2])

    def counts(self, start=0, stop=None):
        """(layers, experts) int64: how often tokens start .. stop chose each expert."""
        ids = self.topk_ids[:, start:stop].reshape(self.num_layers, -1).astype(np.int64)
        flat = (ids + np.arange(self.num_layers)[:, None] * self.num_experts).ravel()
        return np.bincount(flat, minlength=self.num_layers * self.num_experts).reshape(self.num_layers, -1)

    def batches(self, size, start=0, stop=None):
        """Counts (layers, experts) of consecutive batches of `size` tokens; an incomplete last one is left out."""
        stop = self.num_tokens if stop is None else stop
        for begin in range(start, stop - size + 1, size):
            yield self.counts(begin, begin + size)

    def save(self, path):
        """Write a .npz file, which the name gets where it lacks it."""
        arrays = dict(
            topk_ids=self.topk_ids, seq_offsets=self.seq_offsets, num_experts=self.num_experts, generated=self.generated
        )
        path = str(path) if str(path).endswith(".npz") else f"{path}.npz"  # as NumPy names it
        write_whole(path, lambda file: np.savez_compressed(file, **arrays))


def bundled_trace():
    """The generated trace that comes with the package: 26 layers, 64 experts, top 6, 1,536 tokens."""
    return read_trace(Path(__file__).parent / "data" / "generated_v2lite.npz")


@contextmanager
def _reading(path, wanted):
    """Turn whatever a parser raises into a ValueError with the file's name; a missing file stays OSError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise
        reason = str(error).partition("\n")[0][:120]
        raise ValueError(
            f"{path.name} must be {wanted}, but cannot be read as one ({type(error).__name__}: {reason})"
        ) from None


def _check_ids(ids, name):
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise ValueError(f"{name} must be integers of shape (layers, tokens, top_k), got {ids.dtype} {ids.shape}")


def _load_npz(path):
    with np.load(path) as data:
        return dict(data)


def _load_pt(path):
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


FORMATS = {
    ".json": ("a JSON file", lambda path: json.loads(path.read_text())),
    ".npy": ("an .npy file of one plain array (numpy.save)", np.load),
    ".npz": ("an .npz file of plain arrays (numpy.savez)", _load_npz),
    ".pt": ("a file of torch.save with 'logical_count' (an SGLang expert-distribution dump)", _load_pt),
}


def _load(path):
    """What a file of one of FORMATS holds."""
    wanted, load = FORMATS[path.suffix]
    with _reading(path, wanted):
        return load(path)


def read_trace(path, num_experts=None):
    """Read a token-level trace: our `.npz`, or a folder of ESFT text files. `num_experts` overrides what is inferred.

    Without it, an ESFT trace gets the smallest power of two above its largest id. Raises ValueError for other files.
    """
    path = Path(path)
    if path.is_dir():
        return _read_esft(path, num_experts)
    if path.suffix != ".npz":
        raise ValueError(
            f"a token-level trace is an .npz file or a folder of expert_weights_<layer>.txt, got {path.name}"
        )
    data = _load(path)
    if "topk_ids" not in data:
        raise ValueError(f"{path.name} must hold topk_ids, got {sorted(data)}")
    ids = data["topk_ids"]
    _check_ids(ids, f"topk_ids in {path.name}")
    if num_experts is None and "num_experts" in data:
        num_experts = int(data["num_experts"])
    elif num_experts is None and "counts" in data:
        num_experts = int(data["counts"].shape[1])
    offsets = data["seq_offsets"] if "seq_offsets" in data else np.array([0, ids.shape[1]])
    generated = bool(data["generated"]) if "generated" in data else False
    return Trace(ids, offsets.astype(np.int64), num_experts or _round_up(ids.max()), path.name, generated)


def _round_up(largest):
    return 1 << int(largest).bit_length()


def _read_esft(folder, num_experts):
    files = {}
    for file in folder.glob("expert_weights_*.txt"):
        if match := re.fullmatch(r"expert_weights_(\d+)\.txt", file.name):
            files[int(match[1])] = file
    if not files:
        raise ValueError(f"{folder.name} holds no expert_weights_<layer>.txt")
    layers, offsets, top_k = [], None, None
    for number in sorted(files):
        sequences = []
        for at, line in enumerate(files[number].read_text().splitlines(), 1):
            ids, separator, weights = line.rstrip().partition("\t\t")
            ids, weights = ids.split("\t"), weights.split("\t")
            if not separator or len(ids) != len(weights):
                raise ValueError(
                    f"{files[number].name}, line {at}: wanted as many gate weights as expert ids after an empty field, "
                    f"got {len(ids)} ids and {len(weights) if separator else 0} weights"
                )
            with _reading(files[number], f"a table of whole expert ids in line {at}"):
                sequences.append(np.array(ids, dtype=np.int64))
        lengths = [len(s) for s in sequences]
        if offsets is None:
            # The experts of a token are distinct, so the longest run of distinct ids is top_k.
            top_k = _infer_top_k(sequences)
            offsets = np.concatenate([[0], np.cumsum(lengths) // top_k])
        flat = np.concatenate(sequences)
        if len(flat) != offsets[-1] * top_k:
            raise ValueError(
                f"{files[number].name} has {len(flat)} ids, wanted {offsets[-1] * top_k} as in the first layer"
            )
        layers.append(flat.reshape(-1, top_k))
    ids = np.stack(layers)
    size = num_experts or _round_up(ids.max())
    return Trace(ids.astype(np.uint8 if size <= 256 else np.int32), offsets, size, folder.name)


def _infer_top_k(sequences):
    """The largest k <= 16 that divides every sequence and makes every group of k ids distinct."""
    for k in range(16, 0, -1):
        if all(len(s) % k == 0 for s in sequences):
            groups = np.sort(np.concatenate(sequences).reshape(-1, k), axis=1)
            if k == 1 or (groups[:, 1:] != groups[:, :-1]).all():
                return k
    raise ValueError("expert ids must come in groups of distinct ids, one group per token")


def read_counts(path):
    """Expert counts (layers, experts) from any supported file or folder, as non-negative numbers."""
    path = Path(path)
    if path.is_dir():
        dumps = sorted(path.glob("*.pt"))
        return sum(read_counts(dump) for dump in dumps) if dumps else read_trace(path).counts()
    if path.suffix not in FORMATS:
        raise ValueError(f"counts come as .json, .npy, .npz, .pt or a folder, got {path.name}")
    data, name = _load(path), f"counts in {path.name}"
    if path.suffix == ".npz" and "counts" not in data:
        return read_trace(path).counts()
    if path.suffix == ".pt":
        return check_load(_logical_count(data, path.name), name).astype(np.int64)
    if isinstance(data, dict):
        key = next((key for key in ("counts", "load", "logical_count") if key in data), None)
        if key is None:
            raise ValueError(f"{path.name} must hold a list, or an object with 'counts', 'load' or 'logical_count'")
        data = data[key]
    return check_load(data, name)


def _logical_count(dump, name):
    """(layers, experts) int64 tensor of an SGLang dump, summed over its steps."""
    if not isinstance(dump, dict) or "logical_count" not in dump:
        raise ValueError(f"{name} must be a dict with 'logical_count' (an SGLang expert-distribution dump)")
    counts = dump["logical_count"]
    if not hasattr(counts, "detach"):
        raise ValueError(f"logical_count in {name} must be a tensor, got {type(counts).__name__}")
    return counts.long().sum(dim=0) if counts.ndim == 3 else counts.long()


# ------------------------------------------------------------------------------------------------- stand-ins


def generate_trace(
    *,
    num_layers=26,
    num_tokens=1536,
    num_experts=64,
    top_k=6,
    sequence=192,
    seed=0,
    popularity=0.8,
    topic=0.2,
    memory=0.75,
):
    """A routing trace drawn from a model with three sources of skew.

    A token's score for an expert is the sum of the expert's `popularity` in the layer (normal; its standard
    deviation varies from layer to layer), a `topic` term that lasts for one sequence, a slowly changing part
    (`memory` is its correlation from token to token), and Gumbel noise. The `top_k` best scores are chosen.
    """
    rng = np.random.default_rng(seed)
    spread = popularity * np.exp(0.35 * rng.standard_normal((num_layers, 1)))
    base = spread * rng.standard_normal((num_layers, num_experts))
    ids = np.empty((num_layers, num_tokens, top_k), dtype=np.uint8 if num_experts <= 256 else np.int32)
    for token in range(num_tokens):
        if token % sequence == 0:
            mood = base + topic * rng.standard_normal(base.shape)
            drift = rng.standard_normal(base.shape)
        drift = memory * drift + (1 - memory**2) ** 0.5 * rng.standard_normal(base.shape)
        score = mood + drift + rng.gumbel(size=base.shape)
        ids[:, token] = np.argsort(-score, axis=1, kind="stable")[:, :top_k]
    offsets = np.append(np.arange(0, num_tokens, sequence), num_tokens)
    return Trace(ids, offsets, num_experts, f"generated, seed {seed}", generated=True)


def r1_like_load(seed=0, num_layers=58, num_experts=256):
    """Loads (layers, experts) of the skew that DeepSeek-R1 shows: log-normal, the spread varying over layers.

    Fitted to the balancedness of its unplaced experts on 32 GPUs, .40 in the median layer and .145 in the worst.
    """
    rng = np.random.default_rng(seed)
    spread = 1.1 * np.exp(0.2 * rng.standard_normal((num_layers, 1)))
    return 1e6 / num_experts * np.exp(spread * rng.standard_normal((num_layers, num_experts)) - spread**2 / 2)


def shift_load(load, seed=1, spread=0.5):
    """The load after the traffic has changed: every expert's load times exp(spread * normal)."""
    load = check_load(load)
    return load * np.exp(spread * np.random.default_rng(seed).standard_normal(load.shape))
