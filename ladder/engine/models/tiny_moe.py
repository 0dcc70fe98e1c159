"""``tiny-moe``: a byte-level mixture-of-experts model small enough to live in the repository, trained by this project.

Six layers of grouped-query attention and 16 experts of which two and a shared one run for every token. The forward
works on packed tokens and leaves attention to a context, so training (dense causal attention) and serving (a paged
cache, any rung) are the same code.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from ..checks import check_sizes
from ..layers import linear, rotary_table, rotate, run_experts, swiglu

WEIGHTS = Path(__file__).resolve().parents[1] / "data" / "tiny_moe.safetensors"
END = 0  # the byte that ends a document; no text holds it


@dataclass(frozen=True)
class TinyMoEConfig:
    """Sizes. ``vocab`` is the number of byte values; ``context`` the longest sequence it was trained on."""

    num_layers: int = 6
    width: int = 256
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    num_experts: int = 16
    top_k: int = 2
    expert_width: int = 64
    shared_width: int = 64
    vocab: int = 256
    context: int = 4096
    rope_theta: float = 10000.0
    eps: float = 1e-6
    renormalize: bool = True
    routed_scale: float = 1.0

    def __post_init__(self):
        check_sizes("tiny-moe", self)

    @property
    def scale(self):
        return self.head_dim**-0.5


class Attention(nn.Module):
    """Projections of grouped-query attention; ``qkv`` holds query, key and value heads one after another. ``parallel``:
    see ``ladder.engine.parallel``; None is all heads here.
    """

    parallel = None

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Parameter(torch.empty(heads * config.head_dim, config.width))
        self.out = nn.Parameter(torch.empty(config.width, config.num_heads * config.head_dim))

    def project(self, x, cos_sin):
        """q (T, Hq, D), k and v (T, Hkv, D) of x (T, width), q and k rotated to their positions."""
        c = self.config
        heads = linear(x, self.qkv).view(len(x), -1, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        return rotate(q, cos_sin), rotate(k, cos_sin), v

    def forward(self, x, context):
        out = linear(context.attend(self, x).flatten(1), self.out)
        return self.parallel.sum(out) if self.parallel else out


class MoE(nn.Module):
    """A router, its experts and one expert that every token uses.
    ``bias`` (experts,): on the choice of experts, or None."""

    parallel = bias = None

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        c = config
        self.router = nn.Parameter(torch.empty(c.num_experts, c.width))
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * c.expert_width, c.width))
        self.down = nn.Parameter(torch.empty(c.num_experts, c.width, c.expert_width))
        self.shared_gate_up = nn.Parameter(torch.empty(2 * c.shared_width, c.width))
        self.shared_down = nn.Parameter(torch.empty(c.width, c.shared_width))

    def forward(self, x, weights, ids):
        shared = linear(swiglu(linear(x, self.shared_gate_up)), self.shared_down)
        if self.parallel is None:
            return shared + run_experts(x, ids, weights, self.gate_up, self.down)
        return self.parallel.sum(
            shared + run_experts(x, ids, weights, self.gate_up, self.down, 0, self.parallel.table(self, x.device))
        )


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.attention_norm = nn.Parameter(torch.ones(config.width))
        self.attention = Attention(config, layer)
        self.moe_norm = nn.Parameter(torch.ones(config.width))
        self.moe = MoE(config, layer)

    def forward(self, x, residual, context, rows=None):
        """``residual`` is the stream before ``x`` is added to it: the sum and its norm are one pass. After attention
        only ``rows`` go on, where they are given.
        """
        x, residual = context.add_norm(x, residual, self.attention_norm, self.config.eps)
        x = self.attention(x, context)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x, residual, weights, ids = context.norm_route(self.moe, x, residual, self.moe_norm)
        return self.moe(x, weights, ids), residual


class TinyMoE(nn.Module):
    """Bytes in, logits of the next byte out. The embedding is also the output matrix."""

    def __init__(self, config=TinyMoEConfig()):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab, config.width))
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        self.register_buffer(
            "cos_sin", rotary_table(config.head_dim, config.context, config.rope_theta), persistent=False
        )

    def keep_table(self):
        """The table of rotary positions in float32, whatever the weights were cast to."""
        c = self.config
        self.cos_sin = rotary_table(c.head_dim, c.context, c.rope_theta, self.embedding.device)
        return self

    def initialise(self, seed, std=0.02):
        """Normal weights of standard deviation ``std``; what writes into the residual stream is smaller with depth."""
        generator = torch.Generator(self.embedding.device).manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                deep = name.endswith(("attention.out", "down"))
                nn.init.normal_(
                    weight, std=std / (2 * self.config.num_layers) ** 0.5 if deep else std, generator=generator
                )
        return self

    def forward(self, tokens, context, rows=None, dtype=None):
        """The last hidden states (T, width), normed, of packed tokens (T,); ``logits`` turns rows of them into logits.

        Args:
            context: what knows where the tokens stand and who computes attention, see ``ladder.engine.context``.
            rows: (n,) int64: those that are asked for, None for all.
            dtype: to compute in; None is that of the weights.
        """
        x, residual = self.embedding[tokens].to(dtype or self.embedding.dtype), None
        for block in self.blocks:
            x, residual = block(x, residual, context, rows if block is self.blocks[-1] else None)
        return context.add_norm(x, residual, self.norm, self.config.eps)[0]

    def logits(self, hidden):
        """(rows, vocab) float32 of hidden states (rows, width)."""
        return linear(hidden, self.embedding).float()


def save(model, path, dtype=torch.float16, **metadata):
    """Write weights as safetensors, the configuration in its metadata."""
    from safetensors.torch import save_file

    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in model.state_dict().items()}
    save_file(tensors, str(path), {"config": json.dumps(asdict(model.config)), **metadata})


def read_config(path=WEIGHTS):
    """The configuration in a file that ``save`` wrote.

    Raises:
        FileNotFoundError: there is no such file; the message says how to train it.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"tiny-moe: no weights at {path}; train them with python -m ladder.engine.train_tiny_moe --out DIR"
        )
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"tiny-moe: {path} is no safetensors file ({error}); want a file that train_tiny_moe wrote"
        ) from error
    if "config" not in metadata:
        raise ValueError(f"tiny-moe: {path} holds no configuration; want a file that train_tiny_moe wrote")
    try:
        return TinyMoEConfig(**json.loads(metadata["config"]))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"tiny-moe: {path} holds no configuration of it ({error}); want a file that train_tiny_moe wrote"
        ) from error


def load(path=WEIGHTS, dtype=torch.float32, device="cpu"):
    """The model of a file that ``save`` wrote; raises as ``read_config``."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = TinyMoE(read_config(path))
    model.load_state_dict({k: v.to(device=device, dtype=dtype) for k, v in load_file(str(path)).items()}, assign=True)
    return model.keep_table().requires_grad_(False).eval()
