"""The limits of this machine, measured, and how close a result comes to the one that binds it."""

from dataclasses import asdict, dataclass

import torch

from .timing import measure


@dataclass(frozen=True)
class Limits:
    """Measured ceilings: matrix product in TFLOP/s, reading and copying memory in TB/s (copy counts read + write)."""

    matmul_tflops: float
    read_tbs: float
    copy_tbs: float

    def as_dict(self):
        return {name: round(value, 5) for name, value in asdict(self).items()}

    @property
    def ridge(self):
        """FLOPs per byte at which arithmetic and reading take equally long."""
        return self.matmul_tflops / self.read_tbs

    def bound(self, flops, num_bytes):
        """Shortest possible milliseconds for this work, and which limit sets it: "compute" or "memory"."""
        compute_ms = flops / (self.matmul_tflops * 1e12) * 1e3
        memory_ms = num_bytes / (self.read_tbs * 1e12) * 1e3
        return (compute_ms, "compute") if compute_ms >= memory_ms else (memory_ms, "memory")


def measure_limits(device="cuda", dtype=None, *, quick=False):
    """Measure this machine's limits.

    Args:
        device: where. On CUDA the product is 8192^3; on a CPU it is small and multi-threaded.
        dtype: element type of the product; bfloat16 on CUDA and float32 on a CPU when None.
        quick: smaller products and buffers, for a first look.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    dtype = dtype or (torch.bfloat16 if on_gpu else torch.float32)
    side = (4096 if quick else 8192) if on_gpu else (512 if quick else 1024)
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    # A short burst: under a longer load the power limit pulls the clock down, and a limit should be a ceiling.
    product = measure(torch.matmul, [(a, b), (b, a)], device=device, budget_ms=40, max_runs=20, flush=False)
    budget = 100 if quick else 300
    del a, b

    count = ((1 << 30) if quick else (1 << 32)) if on_gpu else ((1 << 25) if quick else (1 << 27))  # bytes
    source = torch.ones(count // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    copy = measure(target.copy_, [(source,)], device=device, budget_ms=budget, flush=False)
    del target
    # No single PyTorch reduction reads fastest everywhere: the best of three is the limit.
    reads = [
        measure(fn, [()], device=device, budget_ms=budget / 2, flush=False)
        for fn in (source.sum, lambda: source.view(-1, 8192).sum(dim=1), lambda: source.view(-1, 1 << 20).amax(dim=1))
    ]
    read_tbs = count / min(r.median for r in reads) / 1e9
    copy_tbs = 2 * count / copy.median / 1e9
    return Limits(2 * side**3 / product.median / 1e9, max(read_tbs, copy_tbs), copy_tbs)  # whatever copies also reads
