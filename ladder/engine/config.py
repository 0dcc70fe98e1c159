"""What an engine is asked for: its options, checked before anything is allocated."""

from dataclasses import dataclass

import torch

from ladder.contract import FLOATS, check_flag, check_integer

from .checks import check_number


@dataclass(frozen=True)
class EngineConfig:
    """The options of an ``Engine``, which says what each means; ``device`` and ``dtype`` are found where they are None.

    Raises:
        TypeError, ValueError: an option is none; the message names it, what came and what is wanted.
    """

    backend: str = "step08"
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    mem_fraction: float = 0.9
    kv_tokens: int | None = None
    max_len: int | None = None
    max_seqs: int = 64
    chunk_tokens: int = 8192
    chunk_keys: int = 65536
    decode_every: int = 4
    page_size: int = 64
    cuda_graphs: bool = True
    windows: object = None

    def __post_init__(self):
        for name in ("max_seqs", "chunk_tokens", "chunk_keys", "decode_every", "page_size"):
            self._set(name, check_integer("engine", name, getattr(self, name), 1))
        for name in ("kv_tokens", "max_len"):
            if getattr(self, name) is not None:
                self._set(name, check_integer("engine", name, getattr(self, name), 1, optional=True))
        self._set("mem_fraction", check_number("engine", "mem_fraction", self.mem_fraction, most=1.0, above=True))
        check_flag("engine", "cuda_graphs", self.cuda_graphs)
        device = check_device(self.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._set("device", device)
        if self.dtype is None:
            self._set("dtype", torch.bfloat16 if device.type == "cuda" else torch.float32)
        if self.dtype not in FLOATS:
            floats = "torch.float16, torch.bfloat16 or torch.float32"
            raise ValueError(f"engine: dtype is {self.dtype!r}; want {floats}, or None")

    def _set(self, name, value):
        object.__setattr__(self, name, value)


def check_device(device):
    """``device`` as a ``torch.device`` of this machine, None as its GPU or else its CPU; ValueError when it is none."""
    kinds = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    try:
        found = torch.device(kinds[0] if device is None else device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in kinds:
        raise ValueError(f"engine: device is {device!r}; want {' or '.join(kinds)}, which this machine has, or None")
    return found
