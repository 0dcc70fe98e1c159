"""A step loop that keeps serving: dispatch, rebalancing, weight migration, and the loss of a rank.

Every rank serves its own requests; the experts are shared. In each step a rank advances all its requests by
one token through all layers, and joins every collective even when it has nothing to do. The state of a
request is committed only after the last layer, so a step that breaks off has done nothing.

When a peer dies, gloo raises in all ranks that talk to it; when it hangs, they raise at the timeout. Then:

1. *Leave.* Close the group. That closes the connections of ranks that still wait, and they raise too.
2. *Meet.* Sign up in the store under the next epoch, wait for the others or for `settle_s`, propose the list
   of those who came. The store keeps the first proposal (compare-and-set), so all read the same list. A rank
   that is not on it, because it woke up too late, leaves for good.
3. *Repair.* Form the new group, tell each other which experts are really in memory (a migration may have been
   cut off half-way), complete the placement, and fetch what is missing from a survivor or from storage.
4. *Resume.* Finished requests have been delivered already; those of the lost rank start again on the survivors.

Decisions are made on rank 0 of the group and broadcast: after a broken step, counters may differ between
ranks. All else is deterministic, and a token's result does not depend on where it is computed, so the outputs
are those of an undisturbed run.

The model is the smallest thing with real routing: embedding, MoE layers with a residual and a norm, and a head whose
arg-max is the next token. The hidden state carries over from token to token; there is no attention.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import traceback
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from .checks import check_integer
from .dispatch import ExchangeError, gather_rows, migrate, moe_forward
from .experts import Experts, by_rows, moe_reference, row_matmul
from .launch import connect, join_group
from .load import LoadTracker
from .placement import Placement, moves_between
from .placing import place
from .planner import Request, Worker, plan_batch
from .rebalancing import rebalance, rebuild
from .topology import Topology

__all__ = ["Job", "Model", "ModelConfig", "Options", "Runtime", "reference_outputs", "serve"]


@dataclass(frozen=True)
class ModelConfig:
    """Widths of the model. `skew` is the standard deviation of the routers' biases: 0 routes evenly."""

    dim: int = 64
    hidden: int = 32
    num_experts: int = 64
    top_k: int = 6
    num_layers: int = 2
    vocab: int = 256
    skew: float = 1.0
    seed: int = 0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if name not in ("skew", "seed"):
                check_integer(value, name, 1)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must not exceed num_experts ({self.num_experts}), got {self.top_k}")


@dataclass(frozen=True)
class Job:
    """A request to generate `steps` tokens after `prompt`, a tuple of token ids (at least one)."""

    prompt: tuple
    steps: int

    def __post_init__(self):
        if len(self.prompt) < 1 or self.steps < 1:
            raise ValueError(f"a job needs at least one prompt token and one step, got {self}")


@dataclass(frozen=True)
class Options:
    """How to run: expert slots per GPU and layer, tokens per rank and step, when to rebalance, and how long
    to wait. `device` "cuda" gives rank r the GPU r, with counts over gloo and rows over NCCL.

    `faults` maps a rank to (step, layer, "kill", "freeze" or "nap"):
    it does that to itself there. For tests and demonstrations.
    """

    slots_per_gpu: int | None = None
    max_batch: int = 32
    rebalance_every: int = 4
    move_cost: float = 0.0
    timeout_s: float = 30.0
    settle_s: float = 1.0
    device: str = "cpu"
    faults: tuple = ()


class Model:
    """What every rank holds in full: embedding, routers, head."""

    def __init__(self, config, device="cpu"):
        self.config, self.device = config, device
        generator = torch.Generator().manual_seed(config.seed + 12345)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)
        self.embedding = draw(config.vocab, config.dim)
        self.router = draw(config.num_layers, config.dim, config.num_experts) * config.dim**-0.5
        self.bias = draw(config.num_layers, config.num_experts) * config.skew
        self.head = draw(config.dim, config.vocab) * config.dim**-0.5

    def enter(self, batch):
        """The hidden states (tokens, dim) with which a batch (a list of `_Progress`) enters the first layer."""
        if not batch:
            return torch.zeros(0, self.config.dim, device=self.device)
        tokens = torch.tensor([p.next_token for p in batch], device=self.device)
        return _norm(0.5 * torch.stack([p.state for p in batch]) + self.embedding[tokens])

    def route(self, state, layer):
        """(topk_ids, topk_weights), both (tokens, top_k)."""
        scores = row_matmul(state, self.router[layer]) + self.bias[layer]
        top = scores.topk(self.config.top_k, dim=-1)
        return top.indices, top.values.softmax(dim=-1)

    def leave(self, batch, state):
        """Commit each request's state after the last layer, and its next token."""
        for progress, row, token in zip(batch, state, row_matmul(state, self.head).argmax(dim=-1)):
            progress.commit(row, token)


def _norm(x):
    """x (rows, dim) over its root mean square. A GPU's sum over a row depends on how many rows there are."""
    norm = lambda block: block * torch.rsqrt((block * block).mean(dim=-1, keepdim=True) + 1e-6)
    return by_rows(norm, x) if x.is_cuda else norm(x)


class _Progress:
    """One request being served: its hidden state, the tokens fed so far, and those generated."""

    def __init__(self, job, dim, device="cpu"):
        self.job, self.state, self.fed, self.output = job, torch.zeros(dim, device=device), 0, []

    @property
    def next_token(self):
        prompt = self.job.prompt
        return prompt[self.fed] if self.fed < len(prompt) else self.output[self.fed - len(prompt)]

    @property
    def left(self):
        """Tokens that are still to be fed."""
        return len(self.job.prompt) + self.job.steps - 1 - self.fed

    def commit(self, state, token):
        """Take over the state after the last layer; once the prompt is fed, the token belongs to the output."""
        self.state = state
        self.fed += 1
        if self.fed >= len(self.job.prompt):
            self.output.append(int(token))


def reference_outputs(config, jobs, device="cpu"):
    """The outputs of `jobs` in one process with all experts, on a device of the ranks' kind: a list of token lists."""
    model = Model(config, device)
    progress = [_Progress(job, config.dim, device) for job in jobs]
    while True:
        batch = [p for p in progress if p.left]
        if not batch:
            return [p.output for p in progress]
        state = model.enter(batch)
        for layer in range(config.num_layers):
            ids, weights = model.route(state, layer)
            widths = {"num_experts": config.num_experts, "hidden": config.hidden, "seed": config.seed}
            state = _norm(state + moe_reference(state, ids, weights, layer, **widths))
        model.leave(batch, state)


def abandon_group(cuda):
    """Close a group whose other ranks may be gone. NCCL would wait for the dead; aborting also frees its kernels."""
    try:
        if cuda:
            dist.distributed_c10d._abort_process_group()
    except (RuntimeError, AttributeError):  # this function of torch is private and may change; the ordinary way is left
        pass
    if dist.is_initialized():
        dist.destroy_process_group()


class _Evicted(Exception):
    """The others went on without this rank."""


class Runtime:
    """One rank of the loop. `me` is its name for life (its first rank); `members` are the names still in the group."""

    def __init__(self, me, num_ranks, store, config, jobs, options):
        self.me, self.store, self.config, self.jobs, self.options = me, store, config, jobs, options
        self.members, self.epoch = list(range(num_ranks)), 0
        # Every rank of a machine has its own GPU. A lost rank takes the number of its GPU with it.
        self.device = options.device if options.device == "cpu" else f"{options.device}:{me}"
        self.model = Model(config, self.device)
        self.tracker = LoadTracker(config.num_layers, config.num_experts, half_life=20_000)
        self.step, self.events, self.history = 0, [], []
        self.progress, self.owner = {}, np.full(len(jobs), -1, dtype=np.int64)
        self.failure = None
        self.faults = {rank: fault for rank, *fault in options.faults}

    # ------------------------------------------------------------------------------------------- life

    def run(self):
        """Serve all jobs; returns a report (dict). Outputs are in the store, under "result/<job>"."""
        try:
            self._join()
            self._first_plan()
            while True:
                try:
                    if not self._one_step():
                        break
                except ExchangeError:
                    raise  # ranks disagree: that is a mistake, and no new group would mend it
                except RuntimeError as error:
                    self._recover(error)
        except _Evicted:
            return {"rank": self.me, "evicted": True, "events": self.events}
        balance = self.placement.balancedness.tolist()
        report = {"rank": self.me, "evicted": False, "members": self.members, "steps": self.step}
        return {**report, "events": self.events, "history": self.history, "balancedness": balance}

    def _event(self, kind, **what):
        self.events.append({"kind": kind, "step": self.step, "time": time.time(), **what})

    def _join(self):
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
            # This loop decides who is lost; the watchdog of NCCL would end the process.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        rank, ranks, timeout_s = self.members.index(self.me), len(self.members), self.options.timeout_s
        name = f"group/{self.epoch}"
        join_group(self.store, name, rank, ranks, timeout_s=timeout_s, cuda=self.device != "cpu")

    def _first_plan(self):
        """Nothing is known about the load yet: place for an even one."""
        ranks, experts = len(self.members), self.config.num_experts
        slots = self.options.slots_per_gpu or -(-experts // ranks) + 1
        load = np.ones((self.config.num_layers, experts))
        self.placement = place(load, num_gpus=ranks, num_slots=slots * ranks)
        held = self.placement.slot_expert.reshape(self.config.num_layers, ranks, slots)[:, self.me]
        self.experts = Experts(
            held, dim=self.config.dim, hidden=self.config.hidden, seed=self.config.seed, device=self.device
        )
        self._assign(range(len(self.jobs)))

    # ------------------------------------------------------------------------------------------- a step

    def _one_step(self):
        """Advance every request of this rank by a token; False when no rank has work left."""
        active = [j for j in sorted(self.progress) if self.progress[j].left]
        if not gather_rows(np.array([len(active)]), None, len(self.members)).any():
            return False
        batch = [self.progress[j] for j in active[: self.options.max_batch]]
        state = self.model.enter(batch)
        counts, tokens = [], np.zeros(len(self.members), dtype=np.int64)
        for layer in range(self.config.num_layers):
            self._maybe_fail(layer)
            ids, weights = self.model.route(state, layer)
            stats = {}
            moe = moe_forward(state, ids, weights, self.experts, self.placement, layer, stats=stats)
            state = _norm(state + moe)
            counts.append(stats["plan"].counts)
            tokens += stats["plan"].rank_tokens
        self.model.leave(batch, state)
        for j in active:
            if not self.progress[j].left:
                self.store.set(f"result/{j}", json.dumps(self.progress.pop(j).output))
        self.tracker.update(np.stack(counts))
        self.history.append({"step": self.step, "members": list(self.members), "rank_tokens": tokens.tolist()})
        self.step += 1
        if self.options.rebalance_every and self.step % self.options.rebalance_every == 0:
            self._rebalance()
        return True

    def _maybe_fail(self, layer):
        step, where, how = self.faults.get(self.me, (None, None, None))
        if (step, where) == (self.step, layer):
            self.store.set(f"fault/{self.me}", repr(time.time()))
            if how == "nap":  # to the others it looks frozen, but it wakes up
                time.sleep(2 * self.options.timeout_s + self.options.settle_s)
                return
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def _rebalance(self):
        plan = None
        if self.members[0] == self.me:
            plan, _ = rebalance(self.placement, self.tracker.load, move_cost=self.options.move_cost)
        self._install(self._broadcast_plan(plan), self.placement.slot_expert)

    def _broadcast_plan(self, plan):
        """Everybody gets rank 0's placement, as bits."""
        layers, slots = self.config.num_layers, len(self.members) * self.experts.held.shape[1]
        slot_expert = torch.zeros(layers, slots, dtype=torch.int64)
        load = torch.zeros(layers, self.config.num_experts, dtype=torch.float64)
        if plan is not None:
            slot_expert.copy_(torch.tensor(plan.slot_expert))
            load.copy_(torch.tensor(plan.load))
        dist.broadcast(slot_expert, 0)
        dist.broadcast(load, 0)
        return Placement(slot_expert.numpy(), load.numpy(), len(self.members))

    def _install(self, plan, held):
        moves = moves_between(held, plan)
        received = migrate(self.experts, moves, plan)
        self.placement = plan
        if moves:
            reloaded = sum(move.source < 0 for move in moves)
            self._event("moved", copies=len(moves), reloaded=reloaded, bytes_here=received)

    # ------------------------------------------------------------------------------------------- recovery

    def _recover(self, error):
        """Steps 1 to 4 of the module's docstring; tried again if another rank is lost meanwhile."""
        while True:
            failure = (self.step, tuple(self.members))
            if failure == self.failure:
                raise error  # nobody was lost last time, and it failed again: the cause is not a lost peer
            self.failure = failure
            self._event("noticed", error=f"{type(error).__name__}: {error}"[:200])
            # The traceback's frames hold the group, and with it the connections that others wait on.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            if dist.is_initialized():
                abandon_group(self.device != "cpu")
            gc.collect()
            try:
                self._meet()
                self._join()
                self._repair()
                return
            except RuntimeError as again:
                if isinstance(again, ExchangeError):
                    raise
                error = again

    def _meet(self):
        self.epoch += 1
        before = self.members
        sign = f"epoch/{self.epoch}/"
        self.store.set(f"{sign}{self.me}", "here")
        end = time.monotonic() + self.options.settle_s
        while time.monotonic() < end and not self.store.check([f"{sign}members"]):
            if all(self.store.check([f"{sign}{m}"]) or self.store.check([f"dead/{m}"]) for m in before):
                break
            time.sleep(0.005)
        came = [m for m in before if self.store.check([f"{sign}{m}"])]
        decided = self.store.compare_set(f"{sign}members", "", json.dumps(came))
        self.members = json.loads(decided)
        if self.me not in self.members:
            raise _Evicted
        self._event("regrouped", members=list(self.members), lost=sorted(set(before) - set(self.members)))

    def _repair(self):
        ranks, layers, experts = len(self.members), self.config.num_layers, self.config.num_experts
        needed = max(self.experts.held.shape[1], -(-experts // ranks))
        slots = int(gather_rows(np.array([needed]), None, ranks).max())
        self.experts.resize(slots)
        held = gather_rows(self.experts.held.ravel(), None, ranks).reshape(ranks, layers, slots).transpose(1, 0, 2)
        plan = None
        if self.members[0] == self.me:
            load = self.tracker.load if self.tracker.counts.any() else np.ones((layers, experts))
            plan, _ = rebuild(np.ascontiguousarray(held), load)
        self._install(self._broadcast_plan(plan), held.reshape(layers, ranks * slots))
        orphans = np.zeros(len(self.jobs), dtype=np.int64)
        if self.members[0] == self.me:
            for j in np.flatnonzero(~np.isin(self.owner, self.members)):
                orphans[j] = not self.store.check([f"result/{j}"])
        orphans = torch.from_numpy(orphans)
        dist.broadcast(orphans, 0)
        self._assign(np.flatnonzero(orphans.numpy()).tolist())
        self._event("resumed", restarted=int(orphans.sum()))

    def _assign(self, jobs):
        """Give `jobs` to members by the planner, given what each still has to do; the same on every rank."""
        jobs = list(jobs)
        todo = [sum(p.left for p in self.progress.values())]
        todo = gather_rows(np.array(todo), None, len(self.members)).ravel().tolist()
        cost = {j: len(self.jobs[j].prompt) + self.jobs[j].steps - 1 for j in jobs}
        workers = [Worker(free_tokens=10**9, load_s=float(t), token_s=1.0) for t in todo]
        plan = plan_batch([Request(tokens=cost[j]) for j in jobs], workers, Topology(1, max(1, len(self.members))))
        for j, worker in zip(jobs, plan.worker.tolist()):
            self.owner[j] = self.members[worker]
            if self.members[worker] == self.me:
                self.progress[j] = _Progress(self.jobs[j], self.config.dim, self.device)


def serve(rank, num_ranks, port, config, jobs, options):
    """Entry point of a rank started by `launch.run_ranks`."""
    store = connect(port)
    report = Runtime(rank, num_ranks, store, config, jobs, options).run()
    if not report["evicted"] and report["members"][0] == rank:
        report["outputs"] = [json.loads(store.get(f"result/{j}")) for j in range(len(jobs))]
        faults = {r: float(store.get(f"fault/{r}")) for r, *_ in options.faults if store.check([f"fault/{r}"])}
        report["faults"] = faults
    return report
