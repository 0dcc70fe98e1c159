"""The models that the engine serves: what each weighs, what it caches
for a token, and how its weights and text are read."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ladder.contract import check_integer

from ..checks import check_number, read_json
from . import deepseek_v2, tiny_moe

NAMES = ("tiny-moe", "deepseek-v2-lite", "mla-dense")


@dataclass(frozen=True)
class Spec:
    """A model by name, before anything of it is in memory.

    source: file or folder of weights; None is random weights drawn with ``seed``.
    parallel: this rank's ``ladder.engine.parallel.Parallel``, None is a model in one piece. What is counted below is a
        rank's.
    router_bias: (MoE layers, experts) added to routers' probabilities for the choice of experts alone: skew that random
        weights lack. None is none.
    """

    name: str
    config: Any
    source: Path | None = None
    seed: int = 0
    std: float = 0.02
    parallel: Any = field(default=None, compare=False)
    router_bias: Any = field(default=None, compare=False)

    def __post_init__(self):
        if not isinstance(self.config, (deepseek_v2.DeepseekV2Config, tiny_moe.TinyMoEConfig)):
            raise TypeError(
                f"engine: config is a {type(self.config).__name__}; want a DeepseekV2Config or TinyMoEConfig"
            )
        if not isinstance(self.source, (str, Path, type(None))):
            raise TypeError(f"engine: source is {self.source!r}; want the path of weights, or None for random ones")
        object.__setattr__(self, "source", None if self.source is None else Path(self.source))
        check_integer("engine", "seed", self.seed, 0)
        check_number("engine", "std", self.std)
        wanted = (self.config.num_layers - getattr(self.config, "num_dense", 0), self.config.num_experts)
        if self.router_bias is not None and (found := tuple(torch.as_tensor(self.router_bias).shape)) != wanted:
            raise ValueError(f"engine: router_bias has shape {found}; want {wanted}, (MoE layers, experts), or None")

    @property
    def latent(self):
        """Whether it caches one latent row a token (MLA) instead of keys and values."""
        return isinstance(self.config, deepseek_v2.DeepseekV2Config)

    @property
    def local(self):
        """The configuration of what is here: all of it, or a rank's part."""
        return self.parallel.local(self.config) if self.parallel else self.config

    @property
    def cache_rows(self):
        """What a token caches in a layer, as shapes."""
        c = self.local
        return ((c.latent + c.rope_dim,),) if self.latent else ((c.num_kv_heads, c.head_dim),) * 2

    def token_bytes(self, dtype):
        """Bytes of cache for a token, all layers."""
        return self.config.num_layers * dtype.itemsize * sum(torch.Size(row).numel() for row in self.cache_rows)

    def key_bytes(self, dtype, gathers):
        """Bytes that a prefill holds for each key that it looks at: gathered rows, and heads made of latents."""
        c = self.local
        rows = dtype.itemsize * sum(torch.Size(row).numel() for row in self.cache_rows)
        if self.latent:
            return rows + dtype.itemsize * c.num_heads * (2 * c.nope_dim + c.rope_dim + c.v_dim)
        return rows * (1 + c.num_heads // c.num_kv_heads) if gathers else 0

    @property
    def parameters(self):
        """Number of weights."""
        with torch.device("meta"):
            model = (deepseek_v2.DeepseekV2 if self.latent else tiny_moe.TinyMoE)(self.config)
            model = self.parallel.shrink(model) if self.parallel else model
        return sum(p.numel() for p in model.parameters())

    def load(self, dtype, device, progress=None):
        """The model on ``device``; ``progress(n)`` is called as n more numbers have arrived."""
        model = self._load(dtype, device, progress)
        if self.router_bias is not None:
            for moe, bias in zip((m for m in model.modules() if hasattr(m, "router")), self.router_bias, strict=True):
                moe.bias = torch.as_tensor(bias, dtype=torch.float32, device=device)
        return model

    def _load(self, dtype, device, progress):
        if self.latent and self.source is None:
            return deepseek_v2.random(self.config, self.seed, dtype, device, self.std, progress, self.parallel)
        if self.latent:
            return deepseek_v2.load(self.source, dtype, device, progress, self.parallel)
        if self.source is None:
            with torch.device(device):
                model = tiny_moe.TinyMoE(self.config).initialise(self.seed, self.std)
            model = model.to(dtype).keep_table().requires_grad_(False).eval()
        else:
            model = tiny_moe.load(self.source, dtype, device)
        return self.parallel.shrink(model) if self.parallel else model

    @cached_property
    def end(self):
        """Token ids that end a text: those that generation_config.json names, else those of config.json."""
        if not self.latent:
            return (tiny_moe.END,)
        files = [self.source / name for name in ("generation_config.json", "config.json")] if self.source else []
        for path in files:
            ids = read_json(self.name, path).get("eos_token_id") if path.is_file() else None
            if ids is not None:
                found = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found):
                    raise ValueError(
                        f"{self.name}: eos_token_id in {path} is {ids!r}; want a token id, or a list of them"
                    )
                return tuple(found)
        return ()

    def tokenizer(self):
        """Something with ``encode(text)`` to ids and ``decode(ids)`` to text.

        Raises:
            ValueError: a checkpoint without ``tokenizer.json``, or the package ``tokenizers`` is missing.
        """
        if not self.latent:
            return Bytes()
        if self.source is None or not (self.source / "tokenizer.json").is_file():
            where = self.source or "random weights"
            raise ValueError(
                f"{self.name}: no tokenizer.json with {where}; give the prompt as numbers, --prompt-ids 1,2,3"
            )
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise ValueError(
                f"{self.name}: reading tokenizer.json needs the package tokenizers, or give --prompt-ids 1,2,3"
            ) from None
        tokenizer = Tokenizer.from_file(str(self.source / "tokenizer.json"))
        return _Tokenizer(tokenizer)


class Bytes:
    """Bytes as tokens."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


class _Tokenizer:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)


def find(name, checkpoint=None):
    """The ``Spec`` of a model by name; ``checkpoint`` is a folder (deepseek-v2-lite) or file (tiny-moe) of weights.

    Raises:
        ValueError: there is no such model, or its files say what it
        cannot be. FileNotFoundError: there are no such weights.
    """
    if name == "tiny-moe":
        path = Path(checkpoint or tiny_moe.WEIGHTS)
        return Spec(name, tiny_moe.read_config(path), path)
    if name == "mla-dense":  # the control: where no experts and few keys are, step 08 has little to gain
        if checkpoint is not None:
            raise ValueError(
                "mla-dense is deepseek-v2-lite with every layer dense and has random weights only; want no --checkpoint"
            )
        return Spec(name, deepseek_v2.DeepseekV2Config(num_dense=deepseek_v2.DeepseekV2Config.num_layers))
    if name == "deepseek-v2-lite":
        if checkpoint is None:
            return Spec(name, deepseek_v2.DeepseekV2Config())
        folder = Path(checkpoint)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{name}: no config.json in {folder}; want a folder with the public checkpoint")
        deepseek_v2.checkpoint_files(folder)
        spec = Spec(name, deepseek_v2.DeepseekV2Config.from_json(folder / "config.json"), folder)
        spec.end  # now, so that a broken file is told before anything is loaded
        return spec
    raise ValueError(f"model is {name!r}; want one of {', '.join(NAMES)}")
