"""Expert placement, batch splitting, request planning and token dispatch for mixture-of-experts serving.

Four decisions, each usable alone, each with its bound beside its result:

    place, rebalance   which expert copies live on which GPU, and which to move when the load shifts
    split_batch        which copy serves how many tokens of this batch
    plan_batch         which worker runs each request of the next step
    KVPool             which page of KV memory belongs to whom

`dispatch` moves tokens to their `experts` over torch.distributed, `runtime` keeps serving while ranks come and go,
`simulator` runs the same decisions on clusters we do not own, `bench_multi_gpu` puts them to several GPUs, `trace`
reads real routing. Importing this package does not import torch; `python -m dspark_mini` is the command line.
"""

from .kv_pool import KVPool, OutOfPages, PoolStats
from .load import LoadTracker, balancedness, count_tokens
from .placement import Move, Placement
from .placing import place
from .planner import Plan, Request, Worker, plan_batch
from .rebalancing import rebalance, shrink
from .split import assign_sources, gpu_tokens, split_batch, split_bound
from .topology import Link, Topology
from .trace import Trace, bundled_trace, generate_trace, read_counts, read_trace

__all__ = [
    "KVPool", "Link", "LoadTracker", "Move", "OutOfPages", "Placement", "Plan", "PoolStats", "Request", "Topology",
    "Trace", "Worker", "assign_sources", "balancedness", "bundled_trace", "count_tokens", "generate_trace",
    "gpu_tokens", "place", "plan_batch", "read_counts", "read_trace", "rebalance", "shrink", "split_batch",
    "split_bound",
]  # fmt: skip
