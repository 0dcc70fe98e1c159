"""The list of rungs: number, name, the one idea of each, what it can do, and where its attention function is."""

import importlib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One rung. ``features`` says what it adds or keeps: grouped_heads, unequal_head_dims, ragged, lse, paged, ...

    The package is imported on first use only, so listing the rungs needs neither Triton nor a GPU.
    """

    number: int
    name: str
    title: str
    idea: str
    features: frozenset = frozenset()
    needs_triton: bool = False
    max_head_dim: int | None = None

    @property
    def module(self):
        return importlib.import_module(f"ladder.{self.name}")

    @property
    def attention(self):
        """``attention(q, k, v, *, causal=False, scale=None)``, the contract that every rung keeps."""
        return self.module.attention

    def bytes_moved(self, problem):
        """Bytes that this rung's kernels load and store for one call, counted from its algorithm."""
        return self.module.bytes_moved(problem)

    def story(self):
        """{"Changed": ..., "Why": ..., "Predict": ..., "Still slow because": ...} from the package's docstring."""
        paragraphs = re.split(r"\n\s*\n", self.module.__doc__.strip())[1:]
        return {head: " ".join(text.split()) for head, text in (p.split(":", 1) for p in paragraphs)}

    def why_not(self, problem):
        """Why this rung cannot compute ``problem``, or None."""
        return self.lacks(problem.Hq, problem.Hkv, problem.D, problem.Dv)

    def lacks(self, num_heads, num_kv_heads, head_dim, head_dim_v):
        """In words, what these heads need and this rung does not have; None if it computes them."""
        if num_heads != num_kv_heads and "grouped_heads" not in self.features:
            return f"grouped heads ({num_heads} query heads on {num_kv_heads} KV heads) arrive with step04_gqa"
        if head_dim != head_dim_v and "unequal_head_dims" not in self.features:
            return f"unequal head sizes (qk {head_dim}, v {head_dim_v}) arrive with step04_gqa"
        widest = max(head_dim, head_dim_v)
        if self.max_head_dim is not None and widest > self.max_head_dim:
            return f"head size {widest} is above {self.max_head_dim}; step04_gqa has no limit"
        return None


MAX_HEAD_DIM = 256  # columns that the kernels' tiles of a head hold; MLA's latent rows have tiles of their own
_MODEL_SHAPES = frozenset({"lse", "grouped_heads", "unequal_head_dims"})

RUNGS = (
    Rung(1, "step01_naive", "Naive", "the formula, with an S x S matrix in memory"),
    Rung(2, "step02_tiled", "Tiled", "tiles instead of the matrix: two passes over the keys"),
    Rung(3, "step03_online_softmax", "Online softmax", "one pass: a running maximum and sum", frozenset({"lse"})),
    Rung(4, "step04_gqa", "Grouped heads", "a group's heads share one tile; the shapes of real models",
         _MODEL_SHAPES | {"ragged"}),
    Rung(5, "step05_fused", "Fused", "one Triton kernel: no tile leaves the chip",
         _MODEL_SHAPES, needs_triton=True, max_head_dim=MAX_HEAD_DIM),
    Rung(6, "step06_paged", "Paged", "KV in pages; decode splits one sequence over the whole chip",
         _MODEL_SHAPES | {"paged"}, needs_triton=True, max_head_dim=MAX_HEAD_DIM),
    Rung(7, "step07_dflash1", "DFlash v1",
         "what an MoE server runs: packed groups, MLA, ragged chunks, tokens by expert",
         _MODEL_SHAPES | {"ragged", "paged", "mla", "expert_groups"}, needs_triton=True, max_head_dim=MAX_HEAD_DIM),
    Rung(8, "step08_dflash2", "DFlash v2",
         "each query range visits its own keys; fused with what surrounds it, for production",
         _MODEL_SHAPES | {"ragged", "paged", "mla", "windows", "fusion"}, needs_triton=True, max_head_dim=MAX_HEAD_DIM),
)  # fmt: skip

BY_NAME = {rung.name: rung for rung in RUNGS}


def find(name):
    """The rung of that number (5, "5", "05") or name ("step05_fused", "fused").

    Raises:
        ValueError: no such rung; the message lists them.
    """
    text = str(name)
    if text in BY_NAME:
        return BY_NAME[text]
    for rung in RUNGS:
        if text.isdigit() and int(text) == rung.number or text == rung.name.split("_", 1)[1]:
            return rung
    raise ValueError(f"rung is {name!r}; want one of {', '.join(r.name for r in RUNGS)} or its number")


def parse(text):
    """Rungs named by "1-5", "1,3,5", "step05_fused" or "all", in order.

    Raises:
        ValueError: naming the part that is no rung.
    """
    if text == "all":
        return list(RUNGS)
    chosen = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) == 2 and all(end.isdigit() for end in ends):
            first, last = find(ends[0]).number, find(ends[1]).number
            if first > last:
                raise ValueError(f"rungs are {part.strip()!r}; want the lower number first, {last}-{first}")
            chosen.update(range(first, last + 1))
        else:
            chosen.add(find(part.strip()).number)
    return [rung for rung in RUNGS if rung.number in chosen]
