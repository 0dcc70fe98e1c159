"""The paged KV cache's allocator: who owns which page, and how much memory is lost to what.

KV memory is cut into pages of `page_size` tokens. A sequence owns a list of pages, in any order, so no free page is
ever too small or in the wrong place: there is no *external* fragmentation, free memory that nobody can use. What
remains is *internal*: the unused rest of every sequence's last page.

Pages are reference-counted. A prompt prefix that many requests share is stored once; when its last user ends it stays
cached until the memory is wanted, least recently used first. Writing into a shared page copies it first.

The pool moves no data itself. It returns what to copy, as (source page, target page) pairs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

from .checks import check_integer

__all__ = ["KVPool", "OutOfPages", "PoolStats"]


class OutOfPages(RuntimeError):
    """Not enough free pages; nothing was changed."""


@dataclass(frozen=True)
class PoolStats:
    """Memory of a pool, in pages and tokens.

    used, cached, free  pages in use by sequences, held only for a prefix, and free; they add up to the pool
    tokens              distinct tokens stored in used pages
    internal            token places in used pages that hold nothing
    """

    pages: int
    page_size: int
    used: int
    cached: int
    free: int
    tokens: int
    internal: int

    @property
    def utilisation(self):
        """Stored tokens / token places that are not free."""
        return self.tokens / (self.used * self.page_size) if self.used else 1.0


class KVPool:
    """A pool of `num_pages` pages of `page_size` tokens. Sequences and prefixes are named by any hashable id."""

    def __init__(self, num_pages, page_size=16):
        self.num_pages = num_pages = check_integer(num_pages, "num_pages", 1)
        self.page_size = check_integer(page_size, "page_size", 1)
        self._free = list(range(num_pages))  # a heap: the lowest page first keeps the pool dense
        self._refs = [0] * num_pages
        self._fill = [0] * num_pages  # tokens written in a page
        self._pages = {}  # sequence -> pages
        self._length = {}  # sequence -> tokens
        self._prefixes = OrderedDict()  # prefix -> (pages, tokens), least recently used first

    def allocate(self, sequence, tokens, prefix=None):
        """Give a new `sequence` room for `tokens` tokens, the first of them shared with a cached `prefix` if there.

        Returns (pages, hit): its page ids in order, and how many tokens the prefix already holds. Only full
        pages of a prefix are shared. Raises ValueError for a known sequence or tokens < 1, OutOfPages when
        memory is short. Nothing has changed then.
        """
        if sequence in self._pages:
            raise ValueError(f"sequence {sequence!r} is already in the pool")
        tokens = check_integer(tokens, "tokens", 1)
        shared, hit, known = [], 0, prefix is not None and prefix in self._prefixes
        if known:
            pages, length = self._prefixes[prefix]
            count = min(length, tokens) // self.page_size
            shared, hit = pages[:count], count * self.page_size
        wanted = -(-tokens // self.page_size) - len(shared)
        self._check_room(wanted, shared)
        if known:
            self._prefixes.move_to_end(prefix)
        for page in shared:  # they are counted first, so that eviction cannot take them
            self._refs[page] += 1
        own = self._take(wanted, shared)
        for i, page in enumerate(own):
            self._fill[page] = min(self.page_size, tokens - hit - i * self.page_size)
        self._pages[sequence], self._length[sequence] = shared + own, tokens
        return list(self._pages[sequence]), hit

    def append(self, sequence, tokens=1):
        """Make room for more tokens at the end; returns (new pages, copies).

        `copies` is a list of (source, target) pages to copy before writing: the last page was shared.
        """
        pages, length = self._get(sequence), self._length[sequence]
        tokens = check_integer(tokens, "tokens", 1)
        inside = length % self.page_size  # tokens in an unfinished last page
        split = inside > 0 and self._refs[pages[-1]] > 1
        more = -(-(length + tokens) // self.page_size) - len(pages)
        own = self._take(more + split)
        copies = []
        if split:
            copies.append((pages[-1], own[0]))
            self._drop([pages[-1]])
            pages[-1] = own[0]
        new = own[split:]
        pages.extend(new)
        self._length[sequence] = length + tokens
        for i in range(len(pages)):
            if i >= length // self.page_size:
                self._fill[pages[i]] = min(self.page_size, length + tokens - i * self.page_size)
        return new, copies

    def fork(self, sequence, child):
        """Let `child` share all pages of `sequence` (parallel sampling); a page is copied when one of them writes."""
        pages = self._get(sequence)
        if child in self._pages:
            raise ValueError(f"sequence {child!r} is already in the pool")
        for page in pages:
            self._refs[page] += 1
        self._pages[child], self._length[child] = list(pages), self._length[sequence]

    def cache_prefix(self, prefix, sequence, tokens):
        """Keep the full pages of the first `tokens` tokens of `sequence` as `prefix`, also after it ends."""
        pages = self._get(sequence)
        tokens = check_integer(tokens, "tokens", 1, self._length[sequence])
        if prefix in self._prefixes:
            self._drop(self._prefixes.pop(prefix)[0])
        kept = pages[: tokens // self.page_size]
        for page in kept:
            self._refs[page] += 1
        self._prefixes[prefix] = (kept, len(kept) * self.page_size)

    def free(self, sequence):
        """Return the pages of `sequence`; shared ones live on with their other users."""
        self._drop(self._get(sequence))
        del self._pages[sequence], self._length[sequence]

    def pages(self, sequence):
        """Page ids of `sequence`, in token order."""
        return list(self._get(sequence))

    def available(self):
        """Tokens that a new sequence could get: free pages, and those held only for prefixes."""
        return (len(self._free) + self._cached()) * self.page_size

    def stats(self):
        """A `PoolStats` of the pool as it stands."""
        used = {page for pages in self._pages.values() for page in pages}
        tokens = sum(self._fill[page] for page in used)
        unused = len(used) * self.page_size - tokens
        pages = len(used), self._cached(), len(self._free)
        return PoolStats(self.num_pages, self.page_size, *pages, tokens, unused)

    def compaction(self):
        """Fewest page copies after which all live pages are the lowest ones: [(source, target), ...].

        Every live page at or above the number of live pages has to move, and no other has to: that is the minimum.
        Needed to give memory back (the tail becomes free as one run), not to keep allocating. `apply` carries it out.
        """
        live = sorted(page for page in range(self.num_pages) if self._refs[page])
        limit = len(live)
        holes = sorted(set(range(limit)) - set(live))
        return list(zip([page for page in live if page >= limit], holes))

    def apply(self, moves):
        """Renumber pages after their data was copied according to `moves` from `compaction`."""
        moves = list(moves)
        to, known = dict(moves), range(self.num_pages)
        if not len(to) == len(set(to.values())) == len(moves) or any(
            a not in known or b not in known or not self._refs[a] or self._refs[b] for a, b in moves
        ):
            raise ValueError("moves must lead from distinct live pages to distinct free pages")
        for source, target in moves:
            self._refs[target], self._refs[source] = self._refs[source], 0
            self._fill[target], self._fill[source] = self._fill[source], 0
        for pages in [*self._pages.values(), *(pages for pages, _ in self._prefixes.values())]:
            pages[:] = [to.get(page, page) for page in pages]
        self._free = sorted(page for page in range(self.num_pages) if not self._refs[page])

    def _get(self, sequence):
        if sequence not in self._pages:
            raise ValueError(f"sequence {sequence!r} is not in the pool")
        return self._pages[sequence]

    def _cached(self, held=()):
        """How many pages would become free if every prefix went, with the pages of sequences and ``held`` in use."""
        used = {page for pages in self._pages.values() for page in pages}.union(held)
        return len({page for pages, _ in self._prefixes.values() for page in pages} - used)

    def _check_room(self, count, held=()):
        """Raise OutOfPages unless `_take` can have its pages."""
        if count > len(self._free) + self._cached(held):
            raise OutOfPages(
                f"{count} pages wanted, {len(self._free)} free and {self._cached(held)} held for unused prefixes"
            )

    def _take(self, count, held=()):
        """Pop `count` free pages, evicting prefixes that nobody uses if needed; all or nothing.

        held: pages of a sequence that is not there yet, which no eviction frees.
        """
        self._check_room(count, held)
        while count > len(self._free):
            used = {page for pages in self._pages.values() for page in pages}.union(held)
            victim = next(p for p, (pages, _) in self._prefixes.items() if not pages or not used >= set(pages))
            self._drop(self._prefixes.pop(victim)[0])
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def _drop(self, pages):
        for page in pages:
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._fill[page] = 0
                heapq.heappush(self._free, page)
