"""What an engine takes of a device's memory: weights, activations, and the KV pool in what is left."""

import os
from dataclasses import dataclass

import torch

GRAPH_RESERVE = 512 << 20  # bytes kept back for captured graphs and what the allocator cannot use


@dataclass(frozen=True)
class MemoryPlan:
    """Where the bytes go. ``total`` of the device, ``fraction`` of it ours, ``others`` taken before we came."""

    total: int
    fraction: float
    others: int
    weights: int
    activations: int
    reserve: int
    page_bytes: int

    @property
    def pool(self):
        """Bytes left for the KV pool."""
        return int(self.total * self.fraction) - self.others - self.weights - self.activations - self.reserve

    @property
    def pages(self):
        return max(0, self.pool // self.page_bytes)


def device_memory(device):
    """(total, taken) bytes of a device; of a CPU, what the system could give now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"), 0


@dataclass(frozen=True)
class Needs:
    """What an engine will ask of the memory, known before its model is loaded: see ``plan_memory``.

    ``plan`` has the activations by arithmetic, which on a CPU are those of the engine. ``longest`` is the longest
    sequence in tokens, ``chunk_tokens`` and ``chunk_keys`` are as the scheduler gets them. ``unmeasured`` bytes of a
    step are not in what ``Runner.measure`` sees. ``pages`` of ``page_size`` tokens make the pool, page 0 included:
    those that ``kv_tokens`` asks for, or where that is None, all that ``max_seqs`` longest sequences could fill.
    """

    plan: MemoryPlan
    longest: int
    chunk_tokens: int
    chunk_keys: int
    unmeasured: int
    pages: int
    page_size: int
    kv_tokens: int | None

    def pool_pages(self, room, activations):
        """Pages of the pool, page 0 included, where memory has ``room`` for so many beside ``activations`` bytes.

        Raises:
            ValueError: ``kv_tokens`` asks for more, or there is no room for one page that holds tokens.
        """
        pages = self.pages
        if pages > room:
            if self.kv_tokens is not None:
                most = (room - 1) * self.page_size
                raise ValueError(f"engine: kv_tokens is {self.kv_tokens}; want at most {most}, what memory leaves")
            pages = room
        if pages < 2:
            raise ValueError(
                f"engine: {gib(activations)} of activations leave no memory for the KV pool; want a smaller "
                f"--chunk-tokens"
            )
        return pages


def plan_memory(spec, attention, config):
    """The ``Needs`` of an engine, by arithmetic alone; nothing is allocated.

    Args:
        spec, attention: the model and its attention backend. config: the ``EngineConfig``.

    Raises:
        ValueError: weights, a prefill step and the pool do not fit together.
    """
    device, dtype, page_size, kv_tokens = config.device, config.dtype, config.page_size, config.kv_tokens
    longest = config.max_len or spec.config.context
    if kv_tokens is not None and config.max_len is None:
        longest = min(longest, kv_tokens)
    chunk_tokens = min(config.chunk_tokens, config.max_seqs * longest)
    # Who reads contiguous keys copies a layer's pages of a whole decode batch, which may be all there are.
    gathers = attention.gathers or spec.latent and not attention.absorbs
    page_bytes = page_size * (spec.token_bytes(dtype) + (spec.key_bytes(dtype, True) if gathers else 0))
    total, others = device_memory(device)
    chunk_keys = max(config.chunk_keys, chunk_tokens)
    most_keys, key_bytes = max(chunk_keys, longest), spec.key_bytes(dtype, attention.gathers)
    scratch, measured_scratch = (
        attention.scratch_bytes(chunk_tokens, n, spec.local.num_heads, dtype.itemsize)
        for n in (longest, min(longest, chunk_tokens))
    )
    transient = most_keys * key_bytes + scratch
    weights = spec.parameters * dtype.itemsize
    reserve = GRAPH_RESERVE if device.type == "cuda" else 0
    plan = MemoryPlan(total, config.mem_fraction, others, weights, transient, reserve, page_bytes)
    wanted = 2 if kv_tokens is None else -(-kv_tokens // page_size) + 1
    if plan.pages < wanted:
        raise ValueError(
            f"engine: {spec.name} needs {gib(weights)} for weights, {gib(transient)} for a prefill step of "
            f"{chunk_tokens} tokens "
            f"on {longest} keys and {gib(wanted * page_bytes)} for the KV pool; {config.mem_fraction:g} of "
            f"{gib(total)} without the "
            f"{gib(others)} in use leaves {gib(max(0, total * config.mem_fraction - others))}. "
            "Want a larger --mem-fraction, a smaller --max-len or --chunk-tokens, or more memory"
        )
    # A step looks at more keys than the measured one when its prompts are partly cached.
    unmeasured = max(0, most_keys - chunk_tokens) * key_bytes + scratch - measured_scratch
    pages = wanted if kv_tokens is not None else config.max_seqs * -(-longest // page_size) + 1
    return Needs(plan, longest, chunk_tokens, chunk_keys, unmeasured, pages, page_size, kv_tokens)


def gib(number):
    return f"{number / 2**30:,.2f} GiB"
