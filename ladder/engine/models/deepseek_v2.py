"""``deepseek-v2-lite``: the true architecture, from the public checkpoint in a local folder or with random weights.

Multi-head latent attention caches 576 numbers a token instead of 16 heads of keys and values. Prefill expands them to
heads of 192 and 128 and runs ordinary attention; decode absorbs the expansion into the query and reads the latent
cache itself. The two shared experts are experts 64 and 65 of the stack, which every token chooses with weight 1: they
ride in the grouped product that the others need anyway.

Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from ladder.step08_dflash2 import rope_tables, yarn_mscale

from ..checks import check_sizes, read_json
from ..layers import linear, run_experts, serving_on_gpu, spread, swiglu

NAME = "deepseek-v2-lite"
MLP_TOKENS = 8192  # tokens that a dense layer takes at once when serving: its inner columns are five times the model's
YARN = dict(type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0,
            mscale=0.707,
            mscale_all_dim=0.707)  # fmt: skip

# What ``config.json`` calls a size, and what it is where the file does not say. The defaults are those of transformers.
FORMAT = dict(
    num_layers=("num_hidden_layers", 32), width=("hidden_size", 4096), num_heads=("num_attention_heads", 32),
    latent=("kv_lora_rank", 512), rope_dim=("qk_rope_head_dim", 64), nope_dim=("qk_nope_head_dim", 128),
    v_dim=("v_head_dim", 128),
    num_experts=("n_routed_experts", 64), top_k=("num_experts_per_tok", None), num_shared=("n_shared_experts", 2),
    expert_width=("moe_intermediate_size", 1407), dense_width=("intermediate_size", 11008),
    num_dense=("first_k_dense_replace", 0),
    vocab=("vocab_size", 102400), context=("max_position_embeddings", 2048), rope_theta=("rope_theta", None),
    eps=("rms_norm_eps", 1e-6), routed_scale=("routed_scaling_factor", 1.0),
)  # fmt: skip
# What this model has in one way only: what it is where the file does not say, and what it must be. ``norm_topk_prob``
# is here
# because transformers ignores it and the published code then leaves out ``routed_scaling_factor``: nobody knows what it
# means.
FIXED = dict(
    model_type=(None, "deepseek_v2"), q_lora_rank=(1536, None), scoring_func=("softmax", "softmax"),
    topk_method=("greedy", "greedy"),
    norm_topk_prob=(False, False), moe_layer_freq=(1, 1), hidden_act=("silu", "silu"), attention_bias=(False, False),
    mlp_bias=(False, False), tie_word_embeddings=(False, False), quantization_config=(None, None),
    partial_rotary_factor=(None, None),
    original_max_position_embeddings=(None, None),
)  # fmt: skip


@dataclass(frozen=True)
class DeepseekV2Config:
    """Sizes of DeepSeek-V2-Lite, under names of our own; ``from_json`` reads the checkpoint's ``config.json``.

    rope_theta, rope: ``theta`` and ``scaling`` of ``ladder.step08_dflash2.rope_tables``.
    """

    num_layers: int = 27
    width: int = 2048
    num_heads: int = 16
    latent: int = 512
    rope_dim: int = 64
    nope_dim: int = 128
    v_dim: int = 128
    num_experts: int = 64
    top_k: int = 6
    num_shared: int = 2
    expert_width: int = 1408
    dense_width: int = 10944
    num_dense: int = 1
    vocab: int = 102400
    context: int = 163840
    rope_theta: float | None = None
    eps: float = 1e-6
    renormalize: bool = False
    routed_scale: float = 1.0
    rope: dict | None = field(default_factory=YARN.copy, hash=False)

    def __post_init__(self):
        check_sizes(
            NAME, self, ("num_shared", "num_dense"),
            {ours: f"{theirs} in config.json" for ours, (theirs, _) in FORMAT.items()},
        )  # fmt: skip
        if self.top_k > self.num_experts:
            raise ValueError(f"{NAME}: top_k is {self.top_k}; want at most {self.num_experts}, the number of experts")
        try:
            rope_tables(self.rope_dim, 0, self.rope_theta, self.rope)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{NAME}: rotary positions: {error}") from error

    @property
    def qk_dim(self):
        return self.nope_dim + self.rope_dim

    @property
    def scale(self):
        """1/sqrt(192) times the square of YaRN's factor on the logits."""
        rope = self.rope or {}
        return self.qk_dim**-0.5 * yarn_mscale(rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0) ** 2

    @classmethod
    def from_json(cls, path):
        """The configuration of a checkpoint folder. What the file does not say is what it is in transformers.

        Raises:
            ValueError: it is another architecture, one with a feature that this model lacks, or no configuration.
        """
        c = read_json(NAME, path)
        for name, (missing, wanted) in FIXED.items():
            if c.get(name, missing) != wanted:
                given = f"{c[name]!r}" if name in c else f"missing, which means {missing!r}"
                raise ValueError(f"{NAME}: {name} in {path} is {given}; want {wanted!r}")
        sizes = {ours: c.get(theirs, default) for ours, (theirs, default) in FORMAT.items()}
        if c.get("num_key_value_heads") not in (None, sizes["num_heads"]):
            raise ValueError(
                f"{NAME}: num_key_value_heads in {path} is {c['num_key_value_heads']!r}; want that of "
                f"num_attention_heads"
            )
        old, new = c.get("rope_scaling"), c.get("rope_parameters")  # the second since transformers 5
        if old and new and old != new:
            raise ValueError(f"{NAME}: {path} has rope_scaling {old!r} and rope_parameters {new!r}; want one of them")
        try:
            return cls(**sizes, rope=old or new)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}; read from {path}") from error


def rope_table(config, length, device=None):
    """Cosines and sines (length, rope_dim) float32: the first half of a row is cos, the second sin."""
    return torch.cat(rope_tables(config.rope_dim, length, config.rope_theta, config.rope), dim=-1).to(device)


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention.

    q_kv: (H * 192 + 512 + 64, width), the queries' and the latent's projections as one product.
    k_up (H, 128, 512) and v_up (H, 128, 512): what makes a head's keys and values out of the latent.
    parallel: see ``ladder.engine.parallel``; None is all heads here.
    latent_eps: of the latent's norm, which does not follow ``rms_norm_eps``.
    """

    parallel, latent_eps = None, 1e-6

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer
        self.q_kv = nn.Parameter(torch.empty(c.num_heads * c.qk_dim + c.latent + c.rope_dim, c.width))
        self.latent_norm = nn.Parameter(torch.empty(c.latent))
        self.k_up = nn.Parameter(torch.empty(c.num_heads, c.nope_dim, c.latent))
        self.v_up = nn.Parameter(torch.empty(c.num_heads, c.v_dim, c.latent))
        self.out = nn.Parameter(torch.empty(c.width, c.num_heads * c.v_dim))

    def split(self, x, rows=None):
        """Views of x @ q_kv.T: q (T, H, 192), not yet rotated, and latent (T, 576), neither normed nor rotated.

        rows: q only of these, (n, H, 192).
        """
        c = self.config
        sizes = [c.num_heads * c.qk_dim, c.latent + c.rope_dim]
        if rows is None:
            q, latent = linear(x, self.q_kv).split(sizes, dim=-1)
        else:
            q, latent = (linear(part, weight) for part, weight in zip((x[rows], x), self.q_kv.split(sizes)))
        return q.unflatten(-1, (c.num_heads, c.qk_dim)), latent

    def absorb(self, q):
        """The first 128 columns of q (T, H, 192) against the latent instead of the keys: (T, H, 512)."""
        return torch.bmm(q[..., : self.config.nope_dim].transpose(0, 1), self.k_up).transpose(0, 1)

    def values(self, out):
        """Attention over latents (T, H, 512) as values (T, H, 128)."""
        # written in place: the next product wants tokens outermost
        values = out.new_empty(*out.shape[:2], self.config.v_dim)
        torch.bmm(out.transpose(0, 1), self.v_up.transpose(1, 2), out=values.transpose(0, 1))
        return values

    def expand(self, latent):
        """Keys (T, H, 192) and values (T, H, 128) of cached rows (T, 576)."""
        c = self.config
        compressed, rope = latent.split([c.latent, c.rope_dim], dim=-1)
        k = latent.new_empty(len(latent), c.num_heads, c.qk_dim)
        # A product for each head, so that it lands where the head's key is.
        torch.bmm(
            compressed.expand(c.num_heads, -1, -1), self.k_up.transpose(1, 2), out=k[..., : c.nope_dim].transpose(0, 1)
        )
        spread(rope, k[..., c.nope_dim :])
        return k, linear(compressed, self.v_up.flatten(0, 1)).unflatten(-1, (c.num_heads, c.v_dim))

    def forward(self, x, context, rows=None):
        out = linear(context.attend_latent(self, x, rows).flatten(1), self.out)
        return self.parallel.sum(out) if self.parallel else out


class MLP(nn.Module):
    parallel = None

    def __init__(self, width, hidden):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * hidden, width))
        self.down = nn.Parameter(torch.empty(width, hidden))

    def forward(self, x):
        if serving_on_gpu(x) and len(x) > MLP_TOKENS:
            out = torch.empty_like(x)
            for part, place in zip(x.split(MLP_TOKENS), out.split(MLP_TOKENS)):
                torch.mm(swiglu(linear(part, self.gate_up)), self.down.t(), out=place)
        else:
            out = linear(swiglu(linear(x, self.gate_up)), self.down)
        return self.parallel.sum(out) if self.parallel else out


class MoE(nn.Module):
    """Experts as two stacks; the last ``num_shared`` are everyone's.
    ``bias`` (experts,): on the choice of experts, or None."""

    parallel = bias = None

    def __init__(self, config, layer):
        super().__init__()
        c = self.config = config
        self.layer = layer
        total = c.num_experts + c.num_shared
        self.router = nn.Parameter(torch.empty(c.num_experts, c.width))
        self.gate_up = nn.Parameter(torch.empty(total, 2 * c.expert_width, c.width))
        self.down = nn.Parameter(torch.empty(total, c.width, c.expert_width))

    def forward(self, x, weights, ids, later=False):
        if self.parallel is None:
            return run_experts(x, ids, weights, self.gate_up, self.down, self.config.num_shared, later=later)
        table = self.parallel.table(self, x.device)
        return self.parallel.sum(run_experts(x, ids, weights, self.gate_up, self.down, self.config.num_shared, table))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.attention_norm = nn.Parameter(torch.empty(config.width))
        self.attention = LatentAttention(config, layer)
        self.mlp_norm = nn.Parameter(torch.empty(config.width))
        self.mlp = MLP(config.width, config.dense_width) if layer < config.num_dense else MoE(config, layer)

    def forward(self, x, residual, context, rows=None):
        """Attention, and what ``mlp`` takes: x, the stream, and the rest of its arguments. Whoever calls it lets go of
        the old stream before the experts, which need the memory.

        ``residual`` is the stream before ``x`` is added to it: the sum and its norm are one pass. Only ``rows`` attend
        and go on, where they are given; the others leave their keys.
        """
        c = self.config
        x, residual = context.add_norm(x, residual, self.attention_norm, c.eps)
        x = self.attention(x, context, rows)
        if rows is not None:
            residual = residual[rows]
        if isinstance(self.mlp, MLP):
            return *context.add_norm(x, residual, self.mlp_norm, c.eps), ()
        x, residual, weights, ids = context.norm_route(self.mlp, x, residual, self.mlp_norm)
        return x, residual, (weights, ids, context.sums_later)


class DeepseekV2(nn.Module):
    def __init__(self, config=DeepseekV2Config()):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.width))
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.width))
        self.head = nn.Parameter(torch.empty(config.vocab, config.width))

    def forward(self, tokens, context, rows=None):
        """The last hidden states (T, width), normed, of packed tokens (T,); only ``rows`` of them where given, (n,)
        int64: nobody asks for the others, so the last layer's queries and experts are spared them.
        """
        x, residual = self.embedding[tokens], None
        for block in self.blocks:
            x, residual, choice = block(x, residual, context, rows if block is self.blocks[-1] else None)
            x = block.mlp(x, *choice)
        return context.add_norm(x, residual, self.norm, self.config.eps)[0]

    def logits(self, hidden):
        """(rows, vocab) float32 of hidden states (rows, width)."""
        return linear(hidden, self.head).float()


def empty(config, dtype, device, parallel=None):
    """The model with uninitialised weights on ``device``, and its
    table of rotary positions; a rank's part with ``parallel``."""
    with torch.device("meta"):
        model = DeepseekV2(config)
    model = parallel.shrink(model) if parallel else model
    model = model.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    model.register_buffer("cos_sin", rope_table(config, config.context, device), persistent=False)
    return model


def random(config, seed=0, dtype=torch.bfloat16, device="cpu", std=0.02, progress=None, parallel=None):
    """Weights from N(0, 0.02), norms of 1: what the benchmark runs, for speed does not depend on what weights say.
    Ranks cut their parts from the same numbers.
    """
    model = empty(config, dtype, device, parallel)
    generator = torch.Generator(device).manual_seed(seed)
    for (name, weight), shape in zip(model.named_parameters(), whole_shapes(config)):
        whole = weight if parallel is None else torch.empty(shape, dtype=dtype, device=device)
        whole.fill_(1.0) if weight.ndim == 1 else whole.normal_(0.0, std, generator=generator)
        if whole is not weight:
            weight.copy_(parallel.cut(name, whole, config))
        if progress:
            progress(weight.numel())
    return model


def whole_shapes(config):
    """The shapes of the whole model's parameters, in their order."""
    with torch.device("meta"):
        return [weight.shape for weight in DeepseekV2(config).parameters()]


def load(folder, dtype=torch.bfloat16, device="cpu", progress=None, parallel=None):
    """The model of a checkpoint folder: ``config.json``, and one safetensors file or shards with an index.

    Raises:
        FileNotFoundError: a file of the checkpoint is missing. ValueError: a tensor is missing, unknown or misshapen.
    """
    from safetensors import safe_open

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"deepseek-v2-lite: no config.json in {folder}; want a folder with the public checkpoint"
        )
    config = DeepseekV2Config.from_json(folder / "config.json")
    files = checkpoint_files(folder)
    model = empty(config, dtype, device, parallel)
    targets = dict(model.named_parameters())
    parts = dict(targets) if parallel else {}  # of a rank: a parameter is put together whole in main memory, then cut
    shapes = dict(zip(targets, whole_shapes(config)))
    missing = {name: 0 for name in targets}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():
                for target, part, arrange in _places(name, config):
                    source = arrange(tensors.get_tensor(name))
                    if target in parts and not missing[target]:
                        targets[target] = torch.empty(shapes[target], dtype=dtype)
                    view = targets[target][part]
                    if view.shape != source.shape:
                        raise ValueError(
                            f"deepseek-v2-lite: {name} in {file.name} has shape {tuple(source.shape)}; want "
                            f"{tuple(view.shape)}"
                        )
                    view.copy_(source)
                    missing[target] += source.numel()
                    if target in parts and missing[target] == shapes[target].numel():
                        parts[target].copy_(parallel.cut(target, targets[target], config))
                        targets[target] = parts[target]
                    if progress:
                        progress(source.numel())
    short = [name for name, count in missing.items() if count != shapes[name].numel()]
    if short:
        raise ValueError(
            f"deepseek-v2-lite: {folder} lacks all or part of {', '.join(short[:4])}{' ...' if len(short) > 4 else ''}"
        )
    return model


def checkpoint_files(folder):
    """The safetensors files of a checkpoint, by its index where it has one.

    Raises:
        FileNotFoundError: naming the file that is not there. ValueError: the index is none.
    """
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(NAME, index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(
                f"{NAME}: weight_map in {index} is {weight_map!r}; want an object of tensors and their files"
            )
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (Path(folder) / name).is_file():
            raise FileNotFoundError(
                f"deepseek-v2-lite: no {name} in {folder}" + ("; its index names it" if index.is_file() else "")
            )
    return [Path(folder) / name for name in names]


def _places(name, c):
    """Where a checkpoint's tensor goes: [(parameter, index into it, what is done to the tensor first)]."""
    whole, same = (), lambda x: x
    if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        return [({"model.e": "embedding", "model.n": "norm", "lm_head": "head"}[name[:7]], whole, same)]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if not match:
        raise ValueError(f"deepseek-v2-lite: the checkpoint holds {name}, which this architecture has no place for")
    layer, rest = f"blocks.{match[1]}.", match[2]
    queries, up = c.num_heads * c.qk_dim, (c.num_heads, c.nope_dim + c.v_dim, c.latent)

    # The checkpoint's rotary pairs are neighbours; ours are the two halves. Scores see the same permutation twice.
    def halves(x):
        return torch.cat([x[..., 0::2, :], x[..., 1::2, :]], dim=-2)

    def q(x):
        x = x.unflatten(0, (c.num_heads, c.qk_dim))
        return torch.cat([x[:, : c.nope_dim], halves(x[:, c.nope_dim :])], dim=1).flatten(0, 1)

    simple = {
        "input_layernorm": ("attention_norm", whole, same),
        "post_attention_layernorm": ("mlp_norm", whole, same),
        "self_attn.q_proj": ("attention.q_kv", slice(0, queries), q),
        "self_attn.kv_a_proj_with_mqa": (
            "attention.q_kv",
            slice(queries, None),
            lambda x: torch.cat([x[: c.latent], halves(x[c.latent :])]),
        ),
        "self_attn.kv_a_layernorm": ("attention.latent_norm", whole, same),
        "self_attn.o_proj": ("attention.out", whole, same),
        "mlp.gate": ("mlp.router", whole, same),
        "mlp.gate_proj": ("mlp.gate_up", slice(0, c.dense_width), same),
        "mlp.up_proj": ("mlp.gate_up", slice(c.dense_width, None), same),
        "mlp.down_proj": ("mlp.down", whole, same),
    }
    if rest in simple:
        target, part, arrange = simple[rest]
        return [(layer + target, part, arrange)]
    if rest == "self_attn.kv_b_proj":
        return [(layer + "attention.k_up", whole, lambda x: x.view(up)[:, : c.nope_dim]),
                (layer + "attention.v_up", whole, lambda x: x.view(up)[:, c.nope_dim :])]  # fmt: skip
    hidden = c.expert_width
    half = {"gate_proj": slice(0, hidden), "up_proj": slice(hidden, None)}
    if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj", rest):
        expert, kind = int(match[1]), match[2] + "_proj"
        return (
            [(layer + "mlp.down", expert, same)]
            if kind == "down_proj"
            else [(layer + "mlp.gate_up", (expert, half[kind]), same)]
        )
    if match := re.fullmatch(r"mlp\.shared_experts\.(gate|up|down)_proj", rest):
        places, kind = [], match[1] + "_proj"
        for n in range(c.num_shared):  # a shared MLP of n * 1408 columns is n experts of 1408
            part = slice(n * hidden, (n + 1) * hidden)
            if kind == "down_proj":
                places.append((layer + "mlp.down", c.num_experts + n, lambda x, part=part: x[:, part]))
            else:
                places.append((layer + "mlp.gate_up", (c.num_experts + n, half[kind]), lambda x, part=part: x[part]))
        return places
    raise ValueError(f"deepseek-v2-lite: the checkpoint holds {name}, which this architecture has no place for")
