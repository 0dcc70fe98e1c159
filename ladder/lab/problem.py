"""AttentionProblem: what to compute, on which numbers, what it must cost, and what the answer is in float64."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from importlib import resources

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
MINILM_LAYERS = (0, 3, 5)
# Inputs captured from trained models, see data/README.md: heads of q and of k/v, head size, tokens, file, layers as
# batch.
CAPTURED = {
    "minilm": (12, 12, 32, 512, "minilm_l6_v2_qkv.safetensors", MINILM_LAYERS),
    "tiny-moe": (8, 2, 64, 1024, "tiny_moe_qkv.safetensors", (0, 3, 5)),
}


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call: shapes, mask, element type and where its numbers come from.

    B, Hq, Hkv: batch, query heads, KV heads. Sq, Sk: lengths in tokens. D, Dv:
    head sizes of q/k and of v. ``input`` is "randn" (``seed`` says which), or
    "minilm" or "tiny-moe" (captured from trained models, see ``data/README.md``).
    """

    B: int = 1
    Hq: int = 16
    Hkv: int = 16
    Sq: int = 1024
    Sk: int = 1024
    D: int = 128
    Dv: int = 128
    causal: bool = False
    dtype: str = "float16"
    scale: float | None = None
    seed: int = 0
    input: str = "randn"

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; want one of {', '.join(DTYPES)}")
        if self.input not in ("randn", *CAPTURED):
            raise ValueError(f"input is {self.input!r}; want 'randn' or {' or '.join(map(repr, CAPTURED))}")
        if self.Hkv < 1 or self.Hq % self.Hkv:
            raise ValueError(f"Hq is {self.Hq}; want a multiple of Hkv = {self.Hkv}")

    @property
    def itemsize(self):
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def visible_pairs(self):
        """How many (query, key) pairs one head may see."""
        if not self.causal:
            return self.Sq * self.Sk
        offset = self.Sk - self.Sq
        blind = min(self.Sq, max(0, -offset))  # rows before the first key
        first = max(0, offset + 1 + blind)  # keys that the first seeing row sees
        rows = self.Sq - blind
        return rows * first + rows * (rows - 1) // 2 if self.Sk else 0

    @property
    def flops(self):
        """Floating-point operations of the two products; the softmax is not counted, as everywhere in the field."""
        return 2 * self.B * self.Hq * self.visible_pairs * (self.D + self.Dv)

    @property
    def min_bytes(self):
        """Fewest bytes through device memory: Q, K, V read once, the output written once."""
        queries = self.B * self.Hq * self.Sq * (self.D + self.Dv)
        keys = self.B * self.Hkv * self.Sk * (self.D + self.Dv)
        return self.itemsize * (queries + keys)

    def case(self):
        """The ``case`` of a recorded result: shapes, mask, element type and the input when it is real."""
        case = {"mode": "prefill", **{k: v for k, v in asdict(self).items() if k not in ("scale", "seed", "input")}}
        if self.scale is not None:
            case["scale"] = self.scale
        if self.input != "randn":
            case["input"] = self.input
        return case

    def label(self):
        """A short name for tables."""
        heads = f"{self.Hq}h" if self.Hq == self.Hkv else f"{self.Hq}/{self.Hkv}h"
        dims = f"d{self.D}" if self.D == self.Dv else f"d{self.D}/{self.Dv}"
        length = _tokens(self.Sq) if self.Sq == self.Sk else f"{_tokens(self.Sq)}x{_tokens(self.Sk)}"
        mask = "causal" if self.causal else "dense"
        batch = f"B{self.B} " if self.B != 1 else ""
        source = f"{self.input} " if self.input != "randn" else ""
        return f"{source}{batch}{length} {heads} {dims} {mask} {self.dtype}"

    def replace(self, **changes):
        """A copy with some fields changed."""
        return replace(self, **changes)

    def make(self, device="cpu", copy=0):
        """The tensors q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), contiguous, on ``device``.

        ``copy`` gives other random numbers for the same problem, so that a timing loop can rotate its inputs.
        """
        if self.input in CAPTURED:
            return self._make_captured(device)
        # The CPU generator makes the same numbers on every machine; large problems are drawn where they are used.
        large = self.B * max(self.Hq * self.Sq, self.Hkv * self.Sk) * self.D > 1 << 24
        source = torch.device(device) if large else torch.device("cpu")
        generator = torch.Generator(source).manual_seed(self.seed * 1000 + copy)

        def draw(heads, length, dim):
            x = torch.randn(self.B, heads, length, dim, generator=generator, device=source, dtype=torch.float32)
            return x.to(device=device, dtype=DTYPES[self.dtype])

        return draw(self.Hq, self.Sq, self.D), draw(self.Hkv, self.Sk, self.D), draw(self.Hkv, self.Sk, self.Dv)

    def empty(self, device):
        """Zeros in the shapes of ``make``: what a kernel is compiled for."""
        shapes = (self.Hq, self.Sq, self.D), (self.Hkv, self.Sk, self.D), (self.Hkv, self.Sk, self.Dv)
        return [torch.zeros(self.B, *shape, dtype=DTYPES[self.dtype], device=device) for shape in shapes]

    def _make_captured(self, device):
        from safetensors import safe_open

        num_heads, num_kv_heads, dim, tokens, name, layers = CAPTURED[self.input]
        if (self.Hq, self.Hkv, self.D, self.Dv) != (num_heads, num_kv_heads, dim, dim) or not 1 <= self.B <= len(
            layers
        ):
            heads = (
                f"{num_heads} heads" if num_heads == num_kv_heads else f"{num_heads} query and {num_kv_heads} KV heads"
            )
            raise ValueError(
                f"input {self.input!r} has {heads} of size {dim} and up to {len(layers)} layers as batch; want those "
                f"shapes"
            )
        if max(self.Sq, self.Sk) > tokens:
            raise ValueError(f"input {self.input!r} has {tokens} tokens; Sq = {self.Sq}, Sk = {self.Sk} is more")
        path = resources.files("ladder.lab") / "data" / name
        with resources.as_file(path) as file, safe_open(file, framework="pt") as tensors:
            def stack(part, length):
                chosen = [tensors.get_tensor(f"layer{n}.{part}")[:, :length] for n in layers[: self.B]]
                return torch.stack(chosen).to(device=device, dtype=DTYPES[self.dtype]).contiguous()

            return stack("q", self.Sq), stack("k", self.Sk), stack("v", self.Sk)


MINILM = AttentionProblem(B=3, Hq=12, Hkv=12, Sq=512, Sk=512, D=32, Dv=32, input="minilm")
TINY_MOE = AttentionProblem(B=3, Hq=8, Hkv=2, Sq=1024, Sk=1024, D=64, Dv=64, causal=True, input="tiny-moe")
# Head layouts of models that people serve; lengths and mask come from the caller.
SHAPES = {
    "plain": dict(Hq=16, Hkv=16, D=128, Dv=128),
    "qwen3-moe": dict(Hq=32, Hkv=4, D=128, Dv=128),  # Qwen3-30B-A3B
    "deepseek-v2-lite": dict(Hq=16, Hkv=16, D=192, Dv=128),  # MLA prefill: 128 + 64 rotary for q and k, 128 for v
}


def reference(q, k, v, *, causal=False, scale=None, compute=torch.float64, rows=None, chunk_bytes=1 << 30):
    """Attention by its formula, every intermediate in ``compute``, in chunks of query rows.

    Args:
        q, k, v, causal, scale: as in the rung contract, any head ratio and head sizes.
        compute: torch.float64 for the oracle; the dtype of q for eager low precision, which every error is measured by.
        rows: (n,) int64 query positions to compute; None for all.
        chunk_bytes: most bytes of scores at a time.

    Returns:
        out (B, Hq, n, Dv) in ``compute``, lse (B, Hq, n) float64, natural log. Rows that see no key: 0 and -inf.
    """
    (batch, num_heads, seqlen_q, head_dim), (_, num_kv_heads, seqlen_k, _) = q.shape, k.shape
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    rows = torch.arange(seqlen_q, device=q.device) if rows is None else rows.to(q.device)
    group = num_heads // num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1).to(compute) for x in (k, v))
    out = q.new_empty(batch, num_heads, len(rows), v.shape[3], dtype=compute)
    lse = q.new_empty(batch, num_heads, len(rows), dtype=torch.float64)
    step = max(1, chunk_bytes // max(1, batch * num_heads * seqlen_k * max(8, compute.itemsize)))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        scores = (q[:, :, chunk].to(compute) * scale) @ k.transpose(-2, -1)
        if causal:
            key = torch.arange(seqlen_k, device=q.device)
            scores = scores.masked_fill(key > chunk[:, None] + seqlen_k - seqlen_q, float("-inf"))
        lse[:, :, start : start + step] = torch.logsumexp(scores.double(), dim=-1)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill((scores == float("-inf")).all(dim=-1, keepdim=True), 0.0)
        out[:, :, start : start + step] = probs @ v
    return out, lse


def _tokens(n):
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
