"""The experts of a rank: their weights, their product with rows, and the layer in one process to compare with.

`expert_mlp` makes a row's result independent of the rows beside it, so that tokens may be split over copies in
any way and the output in float32 stays bit-identical. In bfloat16 on a GPU speed comes first: all of a rank's
experts are one grouped product where torch has it.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["Experts", "by_rows", "expert_mlp", "make_expert", "moe_reference", "row_matmul"]

ROWS = 16  # rows of one exact product: with one fixed shape, BLAS computes every row in the same way
GROUPED_MM = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def make_expert(layer, expert, *, dim, hidden, seed=0, dtype=torch.float32, device="cpu"):
    """The weights of one expert, made from its name alone: (w_in (dim, 2 * hidden), w_out (hidden, dim)).

    Stands for a checkpoint: any rank can load any expert at any time and get the same bits, if its device is of
    the same kind.
    """
    generator = torch.Generator(device).manual_seed((seed * 1_000_003 + layer) * 1_000_003 + expert)
    w_in = torch.randn(dim, 2 * hidden, generator=generator, device=device) * dim**-0.5
    w_out = torch.randn(hidden, dim, generator=generator, device=device) * hidden**-0.5
    return w_in.to(dtype), w_out.to(dtype)


def by_rows(function, x):
    """function(x) for x (rows, n), every row computed as if it were alone.

    It is done ROWS rows at a time, the last block padded with zeros. Libraries pick other kernels for other row
    counts, and with them other orders of summation; one shape means one order. On a GPU in 16 bits it is done at
    once: a product of 16 rows would leave most of the GPU idle.
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return function(x)
    blocks = []
    for start in range(0, max(len(x), 1), ROWS):
        block = x[start : start + ROWS]
        n = len(block)
        if n < ROWS:
            block = torch.cat([block, x.new_zeros(ROWS - n, x.shape[1])])
        blocks.append(function(block)[:n])
    return torch.cat(blocks)


def row_matmul(x, weight):
    """x (rows, n) @ weight (n, m), every row computed as if it were alone; see `by_rows`."""
    return by_rows(lambda block: block @ weight, x)


def expert_mlp(x, w_in, w_out):
    """SwiGLU: (silu(x w_gate) * (x w_up)) w_out for x (rows, dim); w_in (dim, 2 * hidden) holds gate and up."""
    gate, up = row_matmul(x, w_in).chunk(2, dim=-1)
    return row_matmul(torch.nn.functional.silu(gate) * up, w_out)


class Experts:
    """The expert copies that one rank holds: weights (layers, slots, ...) on one device, and which expert is where.

    `held` (layers, slots) int64 tells what is really in memory; it changes together with the weights and nothing else.
    """

    def __init__(self, held, *, dim, hidden, seed=0, dtype=torch.float32, device="cpu"):
        self.held = np.array(held, dtype=np.int64)
        self.dim, self.hidden, self.seed, self.dtype, self.device = dim, hidden, seed, dtype, torch.device(device)
        layers, slots = self.held.shape
        # One row per slot, so that a copy moves as one row of `exchange_rows`.
        self.weights = torch.zeros(layers, slots, 3 * dim * hidden, dtype=dtype, device=self.device)
        for layer, slot in np.ndindex(layers, slots):
            if self.held[layer, slot] >= 0:
                self.load(layer, slot, int(self.held[layer, slot]))

    def load(self, layer, slot, expert):
        """Fetch an expert from storage into a slot."""
        self.weights[layer, slot] = self.stored(layer, expert)
        self.held[layer, slot] = expert

    def stored(self, layer, expert):
        """The weights of an expert as one row (3 * dim * hidden,), from storage."""
        w_in, w_out = make_expert(
            layer, expert, dim=self.dim, hidden=self.hidden, seed=self.seed, dtype=self.dtype, device=self.device
        )
        return torch.cat([w_in.flatten(), w_out.flatten()])

    def matrices(self, layer, slot):
        """(w_in (dim, 2 * hidden), w_out (hidden, dim)) of a slot, as views."""
        row, cut = self.weights[layer, slot], 2 * self.dim * self.hidden
        return row[:cut].view(self.dim, 2 * self.hidden), row[cut:].view(self.hidden, self.dim)

    def run(self, layer, rows, counts):
        """The experts of a layer on rows (sum of counts, dim) that stand in slot order, `counts` of each slot."""
        if _grouped_works(rows):
            cut, slots = 2 * self.dim * self.hidden, len(counts)
            weights = self.weights[layer, :slots]
            ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
            gate, up = GROUPED_MM(rows, weights[:, :cut].unflatten(1, (self.dim, -1)), offs=ends).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            return GROUPED_MM(inner, weights[:, cut:].unflatten(1, (self.hidden, -1)), offs=ends)
        return self.run_one_by_one(layer, rows, counts)

    def run_one_by_one(self, layer, rows, counts):
        """`run` without the library's grouped product."""
        results, begin = torch.empty_like(rows), 0
        for slot, n in enumerate(counts):
            if n:
                results[begin : begin + n] = expert_mlp(rows[begin : begin + n], *self.matrices(layer, slot))
            begin += n
        return results

    def resize(self, slots):
        """Have room for `slots` slots per layer; new ones are empty (-1)."""
        layers, old = self.held.shape
        if slots > old:
            self.weights = torch.cat(
                [self.weights, self.weights.new_zeros(layers, slots - old, self.weights.shape[2])], 1
            )
            self.held = np.concatenate([self.held, np.full((layers, slots - old), -1)], axis=1)


_grouped_checked = {}


def _grouped_works(rows):
    """Whether torch's grouped product serves `rows` and agrees with one product at a time; tried once a device.

    The trial has the layout of `Experts.weights`: the matrices of a slot are not neighbours of the next slot's.
    """
    if GROUPED_MM is None or not rows.is_cuda or rows.dtype != torch.bfloat16 or not len(rows):
        return False
    if rows.device not in _grouped_checked:
        trial = Experts([[0, 1, 2, 3]], dim=128, hidden=64, dtype=rows.dtype, device=rows.device)
        x, counts = torch.randn(100, 128, device=rows.device, dtype=rows.dtype), [3, 0, 40, 57]
        want = trial.run_one_by_one(0, x, counts)
        _grouped_checked[rows.device] = True
        try:
            works = bool((trial.run(0, x, counts) - want).norm() < 0.02 * want.norm())
        except RuntimeError as error:
            works = False
            print(f"grouped_mm does not run here, experts run one by one: {str(error).splitlines()[0]}")
        _grouped_checked[rows.device] = works
    return _grouped_checked[rows.device]


def moe_reference(x, topk_ids, topk_weights, layer, *, num_experts, hidden, seed=0):
    """The layer in one process: x (tokens, dim), topk_ids and topk_weights (tokens, top_k), -1 for no expert."""
    flat = topk_ids.flatten()
    results = x.new_zeros(len(flat), x.shape[1])
    token = torch.arange(len(flat), device=x.device) // topk_ids.shape[1]
    for expert in range(num_experts):
        pair = (flat == expert).nonzero().flatten()
        if len(pair):
            weights = make_expert(
                layer, expert, dim=x.shape[1], hidden=hidden, seed=seed, dtype=x.dtype, device=x.device
            )
            results[pair] = expert_mlp(x[token[pair]], *weights)
    return weighted_sum(results.view(*topk_ids.shape, x.shape[1]), topk_ids, topk_weights)


def weighted_sum(results, topk_ids, topk_weights):
    """sum_k weight_k * result_k per token, in the order of k; padding counts as zero."""
    weights = torch.where(topk_ids >= 0, topk_weights, 0).to(results.dtype)
    out = torch.zeros_like(results[:, 0])
    for k in range(topk_ids.shape[1]):
        out = out + weights[:, k, None] * results[:, k]
    return out
