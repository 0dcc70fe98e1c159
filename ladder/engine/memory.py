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
