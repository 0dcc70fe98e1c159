"""The paged KV cache: a pool of pages, and a block table for each sequence."""

import numbers
from collections.abc import Iterable

import torch

from ladder.contract import FLOATS, check_integer, expect

NAME = "PagedKVCache"  # in messages


class PagedKVCache:
    """Keys and values of many sequences in one pool of pages; no sequence reserves more than it uses, up to one page.

    Args:
        num_pages: pages in the pool. page_size: tokens a page holds, at least 1.
        num_kv_heads, head_dim, head_dim_v: heads of K and V and their sizes; head_dim_v None is head_dim.
        max_seqs: sequences the cache can hold at a time. max_seq_len: tokens one of them may have.
        dtype, device: of the pages.

    Attributes:
        k_pages: (num_pages, page_size, Hkv, D). v_pages: (num_pages, page_size, Hkv, Dv): the layout of FlashAttention.
        block_table: (max_seqs, ceil(max_seq_len / page_size)) int32. Entry [s, i] is the page of tokens
            i * page_size .. of sequence s. Entries past a sequence's pages are -1 and must never be followed.
        seq_lens: (max_seqs,) int32, tokens stored.

    The three tensors stay where they are, so a captured CUDA graph sees every later append. The page of a token is
    chosen on the host, which knows all lengths without asking the device. What changes them runs in inference mode:
    outside, torch would refuse to write into a cache that was made inside, when the write has happened.

    Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention".
    """

    def __init__(
        self, num_pages, page_size=64, *, num_kv_heads, head_dim, head_dim_v=None, max_seqs, max_seq_len,
        dtype=torch.bfloat16, device="cpu",
    ):  # fmt: skip
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = dict(num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim,
                     head_dim_v=head_dim_v, max_seqs=max_seqs, max_seq_len=max_seq_len)  # fmt: skip
        sizes = [check_integer(NAME, name, value, 1) for name, value in sizes.items()]
        num_pages, page_size, num_kv_heads, head_dim, head_dim_v, max_seqs, max_seq_len = sizes
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{NAME}: dtype is {dtype!r}; want a torch.dtype: float16, bfloat16 or float32")
        if dtype not in FLOATS:
            raise ValueError(f"{NAME}: dtype is {dtype}; want float16, bfloat16 or float32")
        self.page_size, self.max_seq_len = page_size, max_seq_len
        self.k_pages = torch.empty(num_pages, page_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.v_pages = torch.empty(num_pages, page_size, num_kv_heads, head_dim_v, dtype=dtype, device=device)
        self.block_table = torch.full((max_seqs, -(-max_seq_len // page_size)), -1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_seqs, dtype=torch.int32, device=device)
        self._free = list(range(num_pages - 1, -1, -1))
        self._pages = [[] for _ in range(max_seqs)]
        self._lengths = [0] * max_seqs

    @property
    def free_pages(self):
        """Pages that no sequence holds."""
        return len(self._free)

    def length(self, seq):
        """Tokens of sequence ``seq`` for which slots are taken, from the host's books: no synchronisation."""
        return self._lengths[self._check_seq(seq)]

    @torch.inference_mode()
    def allocate(self, seq, num_tokens):
        """Take the pages that ``num_tokens`` more tokens of sequence ``seq`` need. All or nothing.

        Raises:
            TypeError: ``seq`` or ``num_tokens`` is no integer.
            ValueError: the sequence would be longer than the block table can hold.
            MemoryError: the pool has too few free pages.
        """
        seq, num_tokens = self._check_seq(seq), check_integer(NAME, "num_tokens", num_tokens, 0)
        length, held = self._lengths[seq] + num_tokens, len(self._pages[seq])
        if length > (most := self.max_seq_len):
            row = "its row of the block table"
            raise ValueError(f"{NAME}: sequence {seq} would have {length} tokens; {row} holds {most}")
        missing = -(-length // self.page_size) - held
        if missing > (free := len(self._free)):
            raise MemoryError(f"{NAME}: sequence {seq} needs {missing} more pages; {free} are free")
        if missing > 0:
            pages = self._free[: -missing - 1 : -1]
            entries = torch.tensor(pages, dtype=torch.int32)
            self.block_table[seq, held : held + missing] = entries.to(self.block_table.device)
            self._pages[seq] += pages  # the books last: an error above leaves them as they were
            del self._free[-missing:]
        self._lengths[seq] = length

    @torch.inference_mode()
    def append(self, k, v, seqs=None):
        """Store new tokens behind the ones that the sequences have, in place; takes pages as needed.

        Args:
            k: (n, t, Hkv, D), t new tokens for each of n sequences. v: (n, t, Hkv, Dv).
            seqs: n different sequence numbers; None is 0 .. n-1.

        Raises:
            TypeError: ``k`` or ``v`` is no tensor, or a sequence number no integer.
            ValueError: shapes, dtypes or sequence numbers that do not fit, or a sequence longer than its table row.
            MemoryError: the pool has too few free pages.

        After any exception the sequences are as they were before.
        """
        expect(NAME, "k", k, ("n", "t", *self.k_pages.shape[2:]), None)
        seqs, new = self._check_seqs(seqs, k.shape[0]), k.shape[1]
        for name, x, pages in (("k", k, self.k_pages), ("v", v, self.v_pages)):
            expect(NAME, name, x, (len(seqs), new, *pages.shape[2:]), pages.dtype, pages.device, owner="the cache")
        if len(set(seqs)) != len(seqs):
            raise ValueError(f"{NAME}: seqs is {seqs}; want every sequence once")
        before, written = [(s, self._lengths[s], len(self._pages[s])) for s in seqs], self.seq_lens.clone()
        try:
            for s in seqs:
                self.allocate(s, new)
            self.write(k, v, seqs)
        except BaseException:
            for s, length, held in reversed(before):
                self._give_back(s, length, held)
            for s, _, held in before:  # the device last: it may be what failed
                self.block_table[s, held:].fill_(-1)
            self.seq_lens.copy_(written)
            raise

    @torch.inference_mode()
    def write(self, k, v, seqs):
        """The device half of ``append``: store into slots taken before, and advance ``seq_lens``.

        Reads lengths and pages on the device only, so a CUDA graph may capture it (with ``seqs`` a tensor).
        """
        index = torch.as_tensor(seqs, dtype=torch.int64, device=self.seq_lens.device)
        position = self.seq_lens[index].long()[:, None] + torch.arange(k.shape[1], device=index.device)
        page = self.block_table[index[:, None], position // self.page_size].long()
        slot = (page * self.page_size + position % self.page_size).flatten()
        self.k_pages.view(-1, *k.shape[2:]).index_copy_(0, slot, k.flatten(0, 1))
        self.v_pages.view(-1, *v.shape[2:]).index_copy_(0, slot, v.flatten(0, 1))
        self.seq_lens.index_add_(0, index, torch.full_like(index, k.shape[1], dtype=torch.int32))

    @torch.inference_mode()
    def free(self, seq):
        """Forget sequence ``seq`` and give its pages back."""
        seq = self._check_seq(seq)
        self.seq_lens[seq] = 0
        self.block_table[seq].fill_(-1)
        self._give_back(seq, 0, 0)  # the books last: after an error above the pages can be freed again

    def read(self, seq):
        """Sequence ``seq`` as contiguous k (length, Hkv, D) and v (length, Hkv, Dv), for tests and lessons."""
        seq = self._check_seq(seq)
        pages = torch.tensor(self._pages[seq], dtype=torch.int64, device=self.k_pages.device)
        return tuple(x[pages].flatten(0, 1)[: self._lengths[seq]] for x in (self.k_pages, self.v_pages))

    def _give_back(self, seq, length, held):
        """In the books alone: sequence ``seq`` has ``length`` tokens and its first ``held`` pages."""
        self._free += reversed(self._pages[seq][held:])
        del self._pages[seq][held:]
        self._lengths[seq] = length

    def _check_seq(self, seq):
        wanted = f"0 .. {len(self._pages) - 1}"
        if isinstance(seq, bool) or not isinstance(seq, numbers.Integral):
            raise TypeError(f"{NAME}: seq is {seq!r}; want an integer, {wanted}")
        if not 0 <= seq < len(self._pages):
            raise ValueError(f"{NAME}: seq is {seq}; want {wanted}")
        return int(seq)

    def _check_seqs(self, seqs, count):
        if seqs is None:
            if count > (most := len(self._pages)):
                raise ValueError(f"{NAME}: k has {count} sequences; want {most} at most, max_seqs of the cache")
            return list(range(count))
        seqs = seqs.tolist() if hasattr(seqs, "tolist") else seqs  # a tensor's or an array's
        if not isinstance(seqs, Iterable):
            raise TypeError(f"{NAME}: seqs is {seqs!r}; want a sequence of integers, or None")
        return [self._check_seq(s) for s in seqs]
