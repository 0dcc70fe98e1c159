"""The cluster: nodes, GPUs, and what a transfer between two of them costs.

A link is described by two numbers (the alpha-beta model of Hockney, 1994): a message of n bytes takes alpha +
n / beta seconds. Two kinds of link are enough to place experts well: inside a node, and between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import check_integer, check_number

__all__ = ["Link", "Topology"]


@dataclass(frozen=True)
class Link:
    """`latency_s` seconds before the first byte, then `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self):
        check_number(self.latency_s, "latency_s of a link")
        check_number(self.bytes_per_s, "bytes_per_s of a link", positive=True)

    def seconds(self, num_bytes):
        """How long a message of `num_bytes` takes (a number or an array)."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Topology:
    """`num_nodes` nodes of `gpus_per_node` GPUs; GPU g lives on node g // gpus_per_node.

    The default links are one direction of an H200's NVLink (450 GB/s) and of one 400 Gbit/s network port per
    GPU (50 GB/s), data-sheet figures, with latencies of the order that collectives show.
    """

    num_nodes: int = 1
    gpus_per_node: int = 8
    intra: Link = Link(5e-6, 450e9)
    inter: Link = Link(15e-6, 50e9)

    def __post_init__(self):
        check_integer(self.num_nodes, "num_nodes", low=1)
        check_integer(self.gpus_per_node, "gpus_per_node", low=1)
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), Link):
                raise ValueError(f"{name} must be a Link, got {getattr(self, name)!r}")

    @property
    def num_gpus(self):
        return self.num_nodes * self.gpus_per_node

    def node_of(self, gpu):
        """Node of GPU `gpu` (an int or an array of ints)."""
        return gpu // self.gpus_per_node

    def link(self, source, target):
        """The kind of link between two GPUs."""
        return self.intra if self.node_of(source) == self.node_of(target) else self.inter
