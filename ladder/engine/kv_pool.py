"""The paged KV pool: which request holds which page, and the tensors that the pages lie in.

The books are a stack of free pages and nothing else: no prefix is shared here, so taking and giving back a page is O(1)
(``dspark_mini.kv_pool`` has reference counts and shared prefixes). Page 0 belongs to nobody: the padding rows of a
captured decode step write there.
"""

import torch


class OutOfPages(RuntimeError):
    """Too few free pages; nothing was taken."""


class PagePool:
    """``num_pages`` pages of ``page_size`` tokens, of which page 0 is never given out."""

    def __init__(self, num_pages, page_size):
        if num_pages < 2 or page_size < 1:
            raise ValueError(f"kv pool: {num_pages} pages of {page_size} tokens; want at least 2 pages of 1 token")
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self.most_used = 0

    @property
    def free(self):
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self):
        return self.num_pages - 1 - len(self._free)

    @property
    def tokens(self):
        """Tokens that fit when nobody holds a page."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, tokens):
        return -(-tokens // self.page_size)

    def grow(self, pages, tokens):
        """Extend the list ``pages`` until it holds ``tokens`` tokens. All or nothing.

        Raises:
            OutOfPages: there are too few; the list is as it was.
        """
        missing = self.pages_for(tokens) - len(pages)
        if missing > len(self._free):
            raise OutOfPages(f"kv pool: {missing} more pages wanted, {len(self._free)} are free")
        for _ in range(missing):
            pages.append(self._free.pop())
        self.most_used = max(self.most_used, self.used)

    def release(self, pages):
        """Give back all of ``pages`` and empty the list."""
        self._free.extend(reversed(pages))
        pages.clear()


class KVCache:
    """The pages of all layers: one tensor for each row that a model caches.

    Args:
        rows: what a token caches in a layer, as shapes: ((Hkv, D),
        (Hkv, Dv)) for keys and values, ((576,),) for a latent.

    Attributes:
        parts: a tensor (layers, num_pages, page_size, *row) for each of ``rows``.
    """

    def __init__(self, rows, num_layers, num_pages, page_size, dtype, device):
        self.page_size = page_size
        # Zeros, not whatever memory held: nothing may read a dead slot, but a NaN in one would be hard to trace.
        self.parts = [torch.zeros(num_layers, num_pages, page_size, *row, dtype=dtype, device=device) for row in rows]

    def layer(self, layer):
        """The layer's part(s) of the cache: (num_pages, page_size, *row) each."""
        return [part[layer] for part in self.parts]

    def append(self, layer, slots, *rows):
        """Store new rows (T, *row) of a layer at ``slots`` (T,) int64, page * page_size + place."""
        for part, new in zip(self.layer(layer), rows):
            part.view(-1, *part.shape[2:]).index_copy_(0, slots, new)

    def gather(self, layer, slots):
        """Rows of a layer at ``slots`` as contiguous tensors, in that order."""
        return [part.view(-1, *part.shape[2:])[slots] for part in self.layer(layer)]

    @property
    def nbytes(self):
        return sum(part.nbytes for part in self.parts)
