"""Tokens to experts and back, over torch.distributed.

One MoE layer on rank r (= GPU r): every token here has `top_k` experts, and an expert may live on several ranks.

1. *Counts first.* All ranks gather everybody's tokens per expert, together with what must agree: layer, widths, dtype,
   placement. Any disagreement raises the same `ExchangeError` on every rank, before a single row is sent. It must
   be so: when two ranks disagree on sizes, gloo returns wrong data without an error.
2. *Split.* From the summed counts every rank computes the same division over copies, and from that the same matrix of
   rows that each rank sends to each slot. No further negotiation; receivers know what arrives, in which order.
3. *Dispatch.* One all-to-all of token rows, sorted by slot. 4. *Experts.* Rows grouped by slot. 5. *Combine.*
   The all-to-all in reverse, and each token sums its experts' results in the order of its own top-k list.

A rank with no tokens, or with only cold experts, still joins all three collectives with empty buffers.

Step 5 fixes the order of summation, and `expert_mlp` makes a row's result independent of the rows beside it.
So in float32 the output is bit-identical to one process that holds all experts, however tokens were split. In
bfloat16 on a GPU speed comes first: all of a rank's experts are one grouped product where torch has it.

Rows travel once per (token, expert). Sending a token once per rank that needs it would save up to (top_k - 1) / top_k
of the dispatch bytes, but not of the combine bytes, at the price of indices in the payload; this is the simple form.

Counts travel on the CPU (gloo), rows on the device of `x` (gloo or NCCL): a group made with backend
"cpu:gloo,cuda:nccl" serves both.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .experts import weighted_sum
from .load import count_tokens
from .split import assign_sources, split_batch

__all__ = [
    "ExchangeError", "ExchangePlan", "combine", "dispatch", "exchange_rows", "migrate", "moe_forward",
    "plan_exchange",
]  # fmt: skip

HEADER = ("layer", "placement", "width", "dtype", "top_k", "pairs")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class ExchangeError(RuntimeError):
    """Ranks disagree about what they are about to exchange. Raised on all of them, before the payload."""


@dataclass(frozen=True)
class ExchangePlan:
    """What one layer's exchange does, equal on all ranks except `order`.

    sends       (ranks, slots) int64, rows from each rank to each slot
    order       (rows sent,) int64 on this rank: the (token, k) pairs, flattened, in the order they are sent
    counts      (experts,) int64, tokens per expert over all ranks
    """

    sends: np.ndarray
    order: np.ndarray
    counts: np.ndarray
    rank: int
    slot_gpu: np.ndarray

    @property
    def rank_tokens(self):
        """(ranks,) int64: rows that each rank's experts compute."""
        return np.bincount(self.slot_gpu, self.sends.sum(axis=0), len(self.sends)).astype(np.int64)

    @property
    def traffic(self):
        """(ranks, ranks) int64: rows from rank to rank, in dispatch; combine is its transpose."""
        first = np.searchsorted(self.slot_gpu, np.arange(len(self.sends)))
        return np.add.reduceat(self.sends, first, axis=1)

    @property
    def local(self):
        """(ranks, local slots) int64: rows that arrive here."""
        return self.sends[:, self.slot_gpu == self.rank]


def rank_in(group):
    """(rank, ranks) of this process in `group`; alone where no group was made."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def plan_exchange(
    topk_ids, placement, layer, *, width, dtype=torch.float32, group=None, split=split_batch, refuse=None
):
    """Exchange counts, check that all ranks agree, and plan who sends what where (steps 1 and 2).

    topk_ids (tokens, top_k) integers, -1 for padding. `split` is the division rule, `split_batch` or a
    baseline with its signature. Collective: every rank calls it, with zero tokens if it has none. Raises
    ExchangeError on all ranks if they disagree, ValueError (on this rank) for bad ids. `refuse` is an error to
    raise instead of going on, once the other ranks, who wait for our counts, have been told.
    """
    rank, ranks = rank_in(group)
    ids = topk_ids.detach().cpu().numpy() if isinstance(topk_ids, Tensor) else np.asarray(topk_ids)
    mine, bad = np.zeros(placement.num_experts, dtype=np.int64), refuse
    try:
        mine = count_tokens(ids, placement.num_experts)
    except ValueError as error:  # the others wait for our counts, so they are told before this rank leaves
        bad = error
    top_k = ids.shape[1] if ids.ndim == 2 else 0
    header = [layer, placement.digest(), width, DTYPES.get(dtype, -1), top_k, -1 if bad else int(mine.sum())]
    everyone = gather_rows(np.concatenate([header, mine]), group, ranks)
    heads, rank_counts = everyone[:, : len(HEADER)], everyone[:, len(HEADER) :]
    if bad is not None:
        raise bad
    _check_heads(heads, rank_counts, placement, ranks)
    counts = rank_counts.sum(axis=0)
    sends = assign_sources(rank_counts, split(counts, placement, layer), placement, layer)

    # Pairs sorted by expert line up with slots sorted by expert: the first sends[slot] pairs go to the first slot.
    flat = ids.ravel()
    by_expert = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
    slots = np.concatenate([np.array(s) for s in placement.slots_of(layer)])
    slot_of_pair = np.repeat(slots, sends[rank, slots])
    order = by_expert[np.argsort(slot_of_pair, kind="stable")]
    plan = ExchangePlan(sends, order, counts, rank, placement.slot_gpu)
    if ranks > 1:  # all ranks must have planned the same, whatever their versions and hardware
        marks = gather_rows(np.array([fingerprint(sends)]), group, ranks).ravel()
        if (marks != marks[0]).any():
            raise ExchangeError(
                f"ranks {np.flatnonzero(marks != marks[0]).tolist()} planned another exchange than rank 0"
            )
    return plan


def gather_rows(row, group, ranks):
    """All-gather one int64 row per rank: (ranks, n). On the CPU, unless the group speaks nothing but NCCL."""
    if ranks == 1:
        return row[None].astype(np.int64)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.from_numpy(np.ascontiguousarray(row, dtype=np.int64)).to(device)
    rows = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).cpu().numpy()


def _check_heads(heads, rank_counts, placement, ranks):
    if ranks != placement.num_gpus:
        raise ExchangeError(f"the group has {ranks} ranks, but the placement is for {placement.num_gpus} GPUs")
    column = dict(zip(HEADER, heads.T))
    if (column["pairs"] < 0).any():
        raise ExchangeError(
            f"ranks {np.flatnonzero(column['pairs'] < 0).tolist()} have invalid expert ids, or not their experts"
        )
    for name in ("layer", "placement", "width", "dtype", "top_k"):
        values = column[name]
        if (values != values[0]).any():
            raise ExchangeError(f"ranks disagree on {name}: {values.tolist()}, one value per rank")
    wrong = (rank_counts.sum(axis=1) != column["pairs"]) | (rank_counts < 0).any(axis=1)
    if wrong.any():
        raise ExchangeError(f"ranks {np.flatnonzero(wrong).tolist()} sent counts that do not add up")


def fingerprint(sends):
    """A fingerprint of an integer matrix, computed with wrap-around arithmetic."""
    flat = sends.ravel().astype(np.uint64)
    factor = np.arange(1, len(flat) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return int((flat * (factor | np.uint64(1))).sum() >> np.uint64(1))


def exchange_rows(rows, send, receive, group=None, out=None):
    """All-to-all of rows: send[r] rows to rank r, in order; receive[r] rows come from rank r.

    rows (sum of send, ...) any strides; send and receive: a whole number per rank. Returns (sum of receive,
    ...), or fills `out`, which may have any strides. With more than one rank the counts are compared with the
    other side's before the payload: every rank of a group that disagrees raises ExchangeError.
    """
    ranks = rank_in(group)[1]
    send, receive = [int(n) for n in send], [int(n) for n in receive]
    shape = (sum(receive), *rows.shape[1:])
    problem = ""
    if len(send) != ranks or len(receive) != ranks or min(send + receive) < 0:
        problem = f"send and receive must hold {ranks} counts >= 0, got {send} and {receive}"
    elif sum(send) != len(rows):
        problem = f"send must add up to the {len(rows)} rows, got {send}"
    elif out is not None and (tuple(out.shape) != shape or out.dtype != rows.dtype):
        problem = f"out must be {rows.dtype} of shape {shape}, got {out.dtype} {tuple(out.shape)}"
    if ranks > 1:
        width = rows[0:1].numel() if len(rows) else int(np.prod(rows.shape[1:]))
        asked = [*send, *receive] if not problem else [0] * 2 * ranks
        report = [bool(problem), width, DTYPES.get(rows.dtype, -1), *asked]
        table = gather_rows(np.array(report), group, ranks)
        sends, receives = table[:, 3 : 3 + ranks], table[:, 3 + ranks :]
        if problem:
            raise ValueError(problem)
        if table[:, 0].any():
            raise ExchangeError(f"ranks {np.flatnonzero(table[:, 0]).tolist()} refused to exchange")
        if (table[:, 1:3] != table[0, 1:3]).any():
            raise ExchangeError(f"ranks disagree on (row width, dtype): {table[:, 1:3].tolist()}")
        if (sends != receives.T).any():
            a, b = np.argwhere(sends != receives.T)[0]
            raise ExchangeError(f"rank {a} sends {sends[a, b]} rows to rank {b}, which expects {receives[b, a]}")
    elif problem:
        raise ValueError(problem)
    return all_to_all(rows, send, receive, group, out)


def all_to_all(rows, send, receive, group, out=None):
    """The bare collective on contiguous buffers: a strided output would be filled wrongly by gloo, without a word."""
    rows = rows.contiguous()
    shape = (sum(receive), *rows.shape[1:])
    buffer = out if out is not None and out.is_contiguous() else rows.new_empty(shape)
    if rank_in(group)[1] > 1:
        dist.all_to_all_single(buffer, rows, list(receive), list(send), group=group)
    else:
        buffer.copy_(rows)
    if out is not None and buffer is not out:
        out.copy_(buffer)
        return out
    return buffer


def dispatch(x, topk_ids, plan, group=None):
    """Send the rows of x (tokens, dim) to the slots of `plan`; returns
    the rows for this rank, grouped by local slot."""
    pair = torch.from_numpy(plan.order).to(x.device)
    rows = x.index_select(0, pair // topk_ids.shape[1])
    received = all_to_all(rows, plan.traffic[plan.rank].tolist(), plan.traffic[:, plan.rank].tolist(), group)
    return received.index_select(0, torch.from_numpy(_by_slot(plan.local)).to(x.device))


def combine(results, topk_ids, topk_weights, plan, group=None):
    """Send the results, grouped by local slot, back to their tokens and sum them: (tokens, dim)."""
    undo = np.argsort(_by_slot(plan.local), kind="stable")
    rows = results.index_select(0, torch.from_numpy(undo).to(results.device))
    back = all_to_all(rows, plan.traffic[:, plan.rank].tolist(), plan.traffic[plan.rank].tolist(), group)
    pairs = results.new_zeros(topk_ids.numel(), results.shape[1])
    pairs[torch.from_numpy(plan.order).to(results.device)] = back
    return weighted_sum(pairs.view(*topk_ids.shape, results.shape[1]), topk_ids, topk_weights)


def _by_slot(local):
    """Rows arrive by (rank, slot); the permutation that groups them by (slot, rank)."""
    ranks, slots = local.shape
    start = np.concatenate([[0], np.cumsum(local.ravel())[:-1]]).reshape(ranks, slots)
    blocks = [np.arange(start[r, s], start[r, s] + local[r, s]) for s in range(slots) for r in range(ranks)]
    return np.concatenate(blocks).astype(np.int64) if blocks else np.zeros(0, dtype=np.int64)


def moe_forward(x, topk_ids, topk_weights, experts, placement, layer, *, group=None, split=split_batch, stats=None):
    """One MoE layer over all ranks of `group`.

    x (tokens, dim), topk_ids (tokens, top_k) integers with -1 for padding, topk_weights like topk_ids;
    `experts` is this rank's `Experts`, which must hold what `placement` says. Returns (tokens, dim).
    Collective. `stats`, a dict, receives the ExchangePlan as "plan" and the seconds of "compute" and
    "exchange" on this rank; of the exchange, "planning" is what passed before the first row was sent.
    """
    # Ranks that share cores must not count each other's time, so on a CPU the compute clock is this thread's own.
    clock = time.perf_counter if x.is_cuda else time.thread_time
    start = time.perf_counter()
    rank = rank_in(group)[0]
    wanted = placement.slot_expert[layer, placement.slot_gpu == rank]
    held = experts.held[layer, : len(wanted)]
    refuse = None
    if held.shape != wanted.shape or (held != wanted).any():
        refuse = ValueError(f"experts must hold {wanted.tolist()} in layer {layer}, got {held.tolist()}")
    plan = plan_exchange(
        topk_ids, placement, layer, width=x.shape[1], dtype=x.dtype, group=group, split=split, refuse=refuse
    )
    planned = time.perf_counter()
    rows = dispatch(x, topk_ids, plan, group)
    _finish(x)
    middle, compute = time.perf_counter(), clock()
    results = experts.run(layer, rows, plan.local.sum(axis=0).tolist())
    _finish(x)
    end, compute = time.perf_counter(), clock() - compute
    out = combine(results, topk_ids, topk_weights, plan, group)
    if stats is not None:
        _finish(x)
        exchange = middle - start + time.perf_counter() - end
        stats.update(plan=plan, compute=compute, exchange=exchange, planning=planned - start)
    return out


def _finish(x):
    """Wait for the GPU, so that the two clocks of `moe_forward` mean something."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def migrate(experts, moves, placement, *, group=None):
    """Carry out `moves` (list of `Move`, slots numbered in
    `placement`): fetch copies from their ranks, or from storage.

    Layer by layer, so that memory for one layer's copies is enough. All copies arrive in a buffer before any slot of
    that layer is overwritten, since the moves are simultaneous. Collective; returns the bytes this rank received.
    """
    rank, ranks = rank_in(group)
    gpu = placement.slot_gpu
    first = np.searchsorted(gpu, np.arange(placement.num_gpus))
    received = 0
    for layer in sorted({move.layer for move in moves}):
        here = [move for move in moves if move.layer == layer]
        fetched = [m for m in here if m.source >= 0]
        sent = sorted((m for m in fetched if gpu[m.source] == rank), key=lambda m: (gpu[m.target], m.target))
        wanted = sorted((m for m in fetched if gpu[m.target] == rank), key=lambda m: (gpu[m.source], m.target))
        stored = [(m, experts.stored(layer, m.expert)) for m in here if m.source < 0 and gpu[m.target] == rank]
        rows = experts.weights[layer, [int(m.source - first[rank]) for m in sent]]
        send = np.bincount([gpu[m.target] for m in sent], minlength=ranks)
        receive = np.bincount([gpu[m.source] for m in wanted], minlength=ranks)
        arrived = exchange_rows(rows, send, receive, group)
        received += arrived.numel() * arrived.element_size()
        for move, row in [*zip(wanted, arrived), *stored]:
            slot = int(move.target - first[rank])
            experts.weights[layer, slot] = row
            experts.held[layer, slot] = move.expert
    return received
