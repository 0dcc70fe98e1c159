"""DecodeProblem: a paged cache with everything dead in it poisoned,
its float64 answer, and implementations to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .parity import Oracle, band, distance
from .problem import DTYPES, reference

GARBAGE_PAGES = (2**31 - 1, -1, -(2**31), 123_456_789)  # what a block table may hold past the pages of a sequence


@dataclass(frozen=True)
class DecodeProblem:
    """Attention of the newest ``q_len`` tokens of ``B`` sequences over a paged cache.

    ``context`` keys in every sequence, or ``lengths``, one for each. ``max_context``:
    what a block-table row can address (None: the longest sequence). With ``latent``
    the cache is MLA's: one KV head of D = 576, V its first Dv = 512 columns.
    """

    B: int = 1
    Hq: int = 32
    Hkv: int = 8
    context: int = 4096
    D: int = 128
    Dv: int = 128
    q_len: int = 1
    page_size: int = 64
    dtype: str = "bfloat16"
    lengths: tuple | None = None
    max_context: int | None = None
    latent: bool = False
    scale: float | None = None
    seed: int = 0

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; want one of {', '.join(DTYPES)}")
        if self.lengths is not None and len(self.lengths) != self.B:
            raise ValueError(f"lengths has {len(self.lengths)} entries; want B = {self.B}")
        if self.latent and (self.Hkv != 1 or self.Dv > self.D):
            raise ValueError(
                f"a latent cache has Hkv = {self.Hkv}, D = {self.D}, Dv = {self.Dv}; want one head and Dv <= D"
            )

    @property
    def itemsize(self):
        return DTYPES[self.dtype].itemsize

    @property
    def seq_lens(self):
        """Keys of each sequence."""
        return self.lengths if self.lengths is not None else (self.context,) * self.B

    @property
    def keys(self):
        """Keys of all sequences."""
        return sum(self.seq_lens)

    @property
    def capacity(self):
        """Keys that one row of the block table can address."""
        longest = max(self.max_context or 0, *self.seq_lens, 1)
        return -(-longest // self.page_size) * self.page_size

    @property
    def kv_bytes(self):
        """Bytes of K and V that an answer depends on; a latent cache is read once for both."""
        width = self.D if self.latent else self.D + self.Dv
        return self.itemsize * self.Hkv * self.keys * width

    @property
    def min_bytes(self):
        """Fewest bytes through device memory: q and the live K and V read once, the output written once."""
        return self.kv_bytes + self.itemsize * self.B * self.q_len * self.Hq * (self.D + self.Dv)

    @property
    def flops(self):
        """Floating-point operations of the two products over visible pairs."""
        pairs = sum(max(0, n - self.q_len + 1 + i) for n in self.seq_lens for i in range(self.q_len))
        return 2 * self.Hq * pairs * (self.D + self.Dv)

    def case(self):
        """The ``case`` of a recorded result."""
        case = {"mode": "mla_decode" if self.latent else "decode", "B": self.B, "Hq": self.Hq, "Hkv": self.Hkv,
                "Sq": self.q_len, "Sk": max(self.seq_lens, default=0), "D": self.D, "Dv": self.Dv, "causal": True,
                "dtype": self.dtype, "page_size": self.page_size}  # fmt: skip
        if self.lengths is not None:
            case["keys"] = self.keys
        return case

    def label(self):
        """A short name for tables."""
        longest = max(self.seq_lens, default=0)
        length = f"{longest // 1024}k" if longest and longest % 1024 == 0 else str(longest)
        ragged = "ragged to " if self.lengths is not None else ""
        heads = f"{self.Hq}/{self.Hkv}h d{self.D}" + (f"/{self.Dv}" if self.D != self.Dv else "")
        return f"B{self.B} {ragged}{length} {heads} q{self.q_len} page {self.page_size} {self.dtype}"

    def replace(self, **changes):
        """A copy with some fields changed."""
        return replace(self, **changes)

    def make(self, device="cpu", copy=0, poison=True):
        """A PagedInputs: shuffled pages, NaN in every dead slot and unused page, garbage in the block table's tail."""
        lengths, size = self.seq_lens, self.page_size
        pages_of = [-(-n // size) for n in lengths]
        used, spare = sum(pages_of), 2
        elements = (used + spare) * size * self.Hkv * self.D
        source = torch.device(device) if elements > 1 << 22 else torch.device("cpu")
        generator = torch.Generator(source).manual_seed(self.seed * 1000 + copy)
        dtype = DTYPES[self.dtype]

        def draw(*shape):
            return torch.randn(
                *shape, generator=generator, device=source, dtype=dtype if source.type == "cuda" else None
            ).to(device, dtype)

        q = draw(self.B, self.q_len, self.Hq, self.D)
        k_cache = draw(used + spare, size, self.Hkv, self.D)
        v_cache = k_cache[..., : self.Dv] if self.latent else draw(used + spare, size, self.Hkv, self.Dv)

        shuffle = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(used + spare, generator=shuffle)[:used].tolist()
        width = self.capacity // size
        table = torch.tensor([GARBAGE_PAGES[(i * 7 + i // 3) % 4] for i in range(self.B * width)], dtype=torch.int32)
        table = table.view(self.B, width)
        live = torch.zeros(used + spare, size, dtype=torch.bool)
        at = 0
        for b, (length, count) in enumerate(zip(lengths, pages_of)):
            pages = torch.tensor(order[at : at + count], dtype=torch.int64)
            at += count
            table[b, :count] = pages.to(torch.int32)
            live[pages] = (torch.arange(count * size) < length).view(count, size)
        if poison:
            dead = ~live.to(device)
            for x in (k_cache,) if self.latent else (k_cache, v_cache):
                x[dead] = float("nan")
        lens = torch.tensor(lengths, dtype=torch.int32)
        return PagedInputs(q, k_cache, v_cache, table.to(device), lens.to(device))


@dataclass(frozen=True)
class PagedInputs:
    """q (B, q_len, Hq, D); k_cache, v_cache (num_pages, page_size,
    Hkv, D or Dv); block_table (B, max_pages); seq_lens (B,)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def __iter__(self):
        return iter((self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens))

    def sequence(self, b):
        """Keys and values of sequence b, gathered: k (1, Hkv, length, D), v (1, Hkv, length, Dv)."""
        length, size = int(self.seq_lens[b]), self.k_cache.shape[1]
        pages = self.block_table[b, : -(-length // size)].long()
        return tuple(x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in (self.k_cache, self.v_cache))

    def padded(self):
        """K and V without pages, (B, longest, Hkv, D or Dv), and zeros after a shorter sequence's end."""
        size, longest = self.k_cache.shape[1], int(self.seq_lens.max())
        pages = self.block_table[:, : -(-longest // size)].long().clamp(0, self.k_cache.shape[0] - 1)
        past = torch.arange(longest, device=pages.device) >= self.seq_lens[:, None]
        return tuple(
            x[pages].flatten(1, 2)[:, :longest].masked_fill(past[..., None, None], 0.0)
            for x in (self.k_cache, self.v_cache)
        )

    def contiguous(self):
        """K and V of a batch of equal lengths without pages: (B, Hkv, length, D or Dv) views of (B, length, Hkv, .)."""
        length, size = int(self.seq_lens[0]), self.k_cache.shape[1]
        pages = self.block_table[:, : -(-length // size)].long()
        return tuple(x[pages].flatten(1, 2)[:, :length].transpose(1, 2) for x in (self.k_cache, self.v_cache))


class DecodeOracle(Oracle):
    """The float64 answer for some or all sequences of a paged problem, with the error budget of ``parity.Oracle``."""

    def __init__(self, inputs, *, scale=None, most_sequences=4, chunk_bytes=1 << 28):
        q, batch = inputs.q, inputs.q.shape[0]
        last = {0, batch - 1} | set(range(0, batch, max(1, batch // most_sequences))) if batch else set()
        self.sequences = sorted(last)
        self.dtype, self.shape = q.dtype, (*q.shape[:3], inputs.v_cache.shape[3])
        self.lse_shape = (batch, q.shape[2], q.shape[1])
        self.out, self.lse, errors, bands, lse_errors, lse_bands = [], [], [0.0], [0.0], [0.0], [0.0]
        for b in self.sequences:
            k, v = inputs.sequence(b)
            args, options = (
                (q[b : b + 1].transpose(1, 2), k, v),
                dict(causal=True, scale=scale, chunk_bytes=chunk_bytes),
            )
            out, lse = reference(*args, **options)
            eager, eager_lse = reference(*args, compute=q.dtype, **options)
            self.out.append(out[0].transpose(0, 1))
            self.lse.append(lse[0])
            errors.append(distance(eager.double(), out))
            lse_errors.append(distance(eager_lse, lse))
            bands.append(band(out, q.dtype))
            lse_bands.append(band(lse, torch.float32))
        self.budget, self.lse_budget = 2 * max(errors) + max(bands), 2 * max(lse_errors) + max(lse_bands)

    def error(self, out):
        """max|out - oracle| over the sequences that the oracle computed; out (B, q_len, Hq, Dv)."""
        return max((distance(out[b].double(), o) for b, o in zip(self.sequences, self.out)), default=0.0)

    def lse_error(self, lse):
        """max|lse - oracle| over those sequences; lse (B, Hq, q_len)."""
        return max((distance(lse[b].double(), s) for b, s in zip(self.sequences, self.lse)), default=0.0)
