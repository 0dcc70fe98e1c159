"""One model on several GPUs: what each rank holds, and how the parts are added up.

Every rank runs the same scheduler on the same requests and holds a slice of every layer: its share of the attention
heads with their part of the cache (MLA's latent belongs to all heads, so all ranks keep it), its share of each dense
block's width, and its experts. A layer has two sums over ranks, one after attention and one after the experts.
Embedding and output matrix are whole everywhere, so every rank has the logits; the tokens are rank 0's, so that
rounding never parts the ranks.

Experts are split in one of two ways. "whole": a rank holds whole experts, by default in order, or those that a
placement gives it (``dspark_mini.place``), and the ranks are as evenly loaded as routing lets them be: expert parallel.
All ranks have all tokens after the sum, so nothing needs to be sent to an expert. "width": a rank holds a slice of
every expert, evenly loaded by construction, in products that are narrower.

    torchrun --nproc-per-node 2 -m ladder.engine bench --model deepseek-v2-lite --backend step07,step08
"""

import dataclasses
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from .layers import AWAY

TURNS = 64  # tokens after which the copies of an expert have had their shares
SPLITS = ("whole", "width")


class RankLost(RuntimeError):
    """A rank is gone or silent: no collective can end any more, so every rank stops."""


class Parallel:
    """This rank's place among ``size`` ranks, over the default process group.

    Args:
        rank, size: as in torch.distributed. device: of this rank. experts: "whole" or "width", see above.
        placement: with "whole", which experts are where: anything with ``slot_expert`` (MoE
            layers, slots), ``slot_gpu`` (slots,) and ``load`` (MoE layers, experts), such as
            ``dspark_mini.Placement``. None: experts in order. An expert on several ranks has its
            tokens dealt out, in turns, by the shares that ``dspark_mini.split_batch`` gives.
    """

    def __init__(self, rank, size, device, *, experts="whole", placement=None):
        if experts not in SPLITS:
            raise ValueError(f"engine: experts is {experts!r}; want one of {', '.join(SPLITS)}")
        if placement is not None and experts != "whole":
            raise ValueError("engine: a placement says where whole experts live; want experts 'whole' with it")
        if placement is not None and placement.num_gpus != size:
            raise ValueError(f"engine: placement is for {placement.num_gpus} GPUs; want one for {size} ranks")
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.experts, self.placement = experts, placement
        self._tables = {}

    # ------------------------------------------------------------ what a rank holds

    def check(self, config):
        """Raise ValueError when the sizes of a model do not divide among the ranks."""
        whole = self.experts == "whole"
        names = ["num_heads", "num_kv_heads", "dense_width", "shared_width"] + (
            ["num_shared"] if whole else ["expert_width"]
        )
        for name in names:
            if getattr(config, name, 0) % self.size:
                hint = "; with experts 'width' they are cut" if name == "num_shared" else ""
                value = getattr(config, name)
                raise ValueError(
                    f"engine: {name} is {value}; want a multiple of {self.size}, the number of ranks{hint}"
                )
        if whole and config.num_experts < self.size:
            raise ValueError(f"engine: {config.num_experts} experts; want at least one for each of {self.size} ranks")
        moe_layers = config.num_layers - getattr(config, "num_dense", 0)
        if self.placement is not None and self.placement.load.shape != (moe_layers, config.num_experts):
            raise ValueError(
                f"engine: placement is for {self.placement.load.shape} (layers, experts); want "
                f"{(moe_layers, config.num_experts)}"
            )

    def local(self, config):
        """The configuration of a rank's part: what forwards and memory plans count with."""
        names = ["num_heads", "num_kv_heads", "dense_width", "shared_width"]
        names.append("num_shared" if self.experts == "whole" else "expert_width")
        fields = {f.name for f in dataclasses.fields(config)}
        return dataclasses.replace(config, **{n: getattr(config, n) // self.size for n in names if n in fields})

    def held(self, config, layer):
        """The routed experts that this rank holds in a layer, in slot order."""
        if self.placement is None:
            first, last = (r * config.num_experts // self.size for r in (self.rank, self.rank + 1))
            return list(range(first, last))
        row = self.placement.slot_expert[layer - getattr(config, "num_dense", 0)]
        return row[self.placement.slot_gpu == self.rank].tolist()

    def cut(self, name, weight, config):
        """This rank's part of a parameter ``name`` of the whole model; ``config`` is the whole model's."""
        leaf = name.rpartition(".")[2]

        def part(x, dim=0):
            return x.tensor_split(self.size, dim)[self.rank]

        if leaf in ("k_up", "v_up"):
            return part(weight)
        if leaf == "q_kv":  # the latent's rows are everyone's
            q, latent = weight.split([config.num_heads * config.qk_dim, config.latent + config.rope_dim])
            return torch.cat([part(q), latent])
        if leaf == "qkv":
            heads = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
            return torch.cat([part(x) for x in weight.split(heads)])
        if leaf == "out":
            return part(weight, 1)
        if leaf in ("gate_up", "down") and weight.ndim == 3 and self.experts == "whole":
            layer, shared = int(name.split(".")[1]), weight.shape[0] - config.num_experts
            mine = shared // self.size  # shared experts side by side are one wide expert, cut by width
            rows = self.held(config, layer) + [config.num_experts + self.rank * mine + n for n in range(mine)]
            return weight[torch.tensor(rows, device=weight.device)]
        if leaf.endswith("gate_up"):
            return torch.cat([part(half, -2) for half in weight.chunk(2, dim=-2)], dim=-2)
        if leaf.endswith("down"):
            return part(weight, -1)
        return weight

    def shrink(self, model):
        """Cut a whole model, real or on the meta device, to this rank's part, and make its layers add up over ranks."""
        config = model.config
        self.check(config)
        local = self.local(config)
        for name, weight in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            part = self.cut(name, weight.detach(), config)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(part.clone().contiguous(), requires_grad=False))
        for module in model.modules():
            if hasattr(module, "config"):
                module.config = local
            if hasattr(module, "parallel"):
                module.parallel = self
        return model

    def table(self, moe, device):
        """Where tokens find the experts of a layer on this rank: (turns, experts) int32, see ``layers.run_experts``.

        None with experts cut by width: all are here.
        """
        if self.experts == "width":
            return None
        key = (moe.layer, device)
        if key not in self._tables:
            self._tables[key] = self._make_table(moe.config, moe.layer).to(device)
        return self._tables[key]

    def _make_table(self, config, layer):
        held = self.held(config, layer)
        copies = self.placement is not None and self.placement.slot_expert.shape[1] > config.num_experts
        table = torch.full((TURNS if copies else 1, config.num_experts), AWAY, dtype=torch.int32)
        if not copies:
            table[0, held] = torch.arange(len(held), dtype=torch.int32)
            return table
        from dspark_mini import split_batch

        plan, row = self.placement, layer - getattr(config, "num_dense", 0)
        load = plan.load[row]
        # Shares of a large batch that is routed like the load; every rank computes the same.
        shares = split_batch((load / max(load.sum(), 1) * 1e6).round().astype("int64"), plan, row)
        here = (plan.slot_gpu == self.rank).nonzero()[0].tolist()
        for expert, slots in enumerate(plan.slots_of(row)):
            weight = [int(shares[s]) for s in slots]
            weight = weight if sum(weight) else [1] * len(slots)
            given = [0] * len(slots)
            for turn in range(TURNS):  # to the copy that is furthest behind its share
                behind = [w * (turn + 1) - g * sum(weight) for w, g in zip(weight, given)]
                copy = behind.index(max(behind))
                given[copy] += 1
                if slots[copy] in here:  # each expert begins elsewhere, or all copies' turns would come together
                    table[(turn + 7 * expert) % TURNS, expert] = here.index(slots[copy])
        return table

    # ------------------------------------------------------------ what ranks tell each other

    def sum(self, x):
        """x summed over ranks, in place; the same bits on every rank."""
        return self._collective(dist.all_reduce, x)

    def agree(self, x):
        """x as rank 0 has it, in place."""
        return self._collective(dist.broadcast, x, 0)

    def least(self, number):
        """The smallest of the ranks' integers."""
        return int(self._collective(dist.all_reduce, torch.tensor([number], device=self.device), dist.ReduceOp.MIN))

    def most(self, number):
        """The largest of the ranks' integers."""
        return -self.least(-number)

    def _collective(self, call, x, *args):
        try:
            call(x, *args)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
            who = f"rank {self.rank} of {self.size}"
            raise RankLost(f"engine: {who} lost another rank ({reason}); start all ranks again") from error
        return x


def ranks():
    """How many ranks torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(device=None, *, store=None, rank=None, size=None, timeout_s=60.0, **options):
    """Join the other ranks; returns this rank's ``Parallel``.

    Args:
        device: "cuda", rank r of this machine on GPU r, or "cpu"; None is the GPU where there is one for each rank.
        store, rank, size: where ranks meet, and who this is; None is what torchrun announced.
        timeout_s: after which a silent rank counts as lost. options: of ``Parallel``.

    Raises:
        ValueError: fewer GPUs than ranks.
    """
    rank = int(os.environ["RANK"]) if rank is None else rank
    size = ranks() if size is None else size
    index = int(os.environ.get("LOCAL_RANK", rank))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device or ("cuda" if gpus >= here else "cpu")
    if kind == "cuda" and gpus < here:
        raise ValueError(
            f"engine: {here} ranks on a machine with {gpus} GPUs; want a GPU for each rank, or --device cpu"
        )
    if here == size:  # gloo would ask the host's name for an address, which may lead nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Multicast in the switch, and buffers that a captured graph registers with its peers: a decode's sums are too small
    # for either.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    if kind == "cuda":
        torch.cuda.set_device(index)
    meeting = {} if store is None else dict(store=store, rank=rank, world_size=size)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout_s), **meeting
    )
    return Parallel(rank, size, torch.device(kind, index) if kind == "cuda" else kind, **options)


def leave():
    """Wait for the others' last collective; the process should end next.

    NCCL's communicators are left to the end of the process: closing one waits for every captured graph that uses it.
    """
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))
        if not torch.cuda.is_available():
            dist.destroy_process_group()
