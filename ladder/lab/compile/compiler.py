"""Compile a kernel for a GPU that is not there, and read what the compiler made of it.

``warmup`` specialises a kernel exactly as a launch with the same arguments would. A stand-in for the driver names the
processor to compile for; ptxas and cuobjdump come with Triton's wheel.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

TARGETS = ("sm_80", "sm_90", "sm_100")
SHARED_MEMORY_LIMIT = {  # bytes one program may use
    "sm_80": 163 * 1024,  # A100
    "sm_86": 99 * 1024,  # RTX 3090, A10
    "sm_89": 99 * 1024,  # RTX 4090, L40
    "sm_90": 227 * 1024,  # H100, H200
    "sm_100": 227 * 1024,  # B200
    "sm_120": 99 * 1024,  # RTX 5090
}


def capability(target):
    """(9, 0) for "sm_90"; ValueError when ``target`` is no "sm_NN"."""
    match = re.fullmatch(r"sm_(\d+)(\d)a?", target)
    if not match:
        raise ValueError(f"target is {target!r}; want 'sm_90' or the like")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Compiled:
    """What ptxas reports of one compiled kernel. Registers are per thread, ``local`` and ``shared`` in bytes."""

    name: str
    target: str
    registers: int
    spill_stores: int
    spill_loads: int
    local: int
    shared: int
    num_warps: int
    ptx: str
    sass: str

    def count(self, instruction):
        """How often a machine instruction (``HGMMA``, ``HMMA``, ``LDL``, ...) stands in the code."""
        return len(re.findall(rf"\b{re.escape(instruction)}\b", self.sass))

    @property
    def serialized(self):
        """Whether ptxas makes every wgmma wait for the one before: it does when it cannot prove that nothing else
        touches the accumulators while one is in flight, and says so only in a log that nobody reads.
        """
        products = self.count("HGMMA")
        return products > 0 and self.count("WARPGROUP.DEPBAR") >= products

    @property
    def spills(self):
        return self.spill_stores + self.spill_loads + self.local

    @property
    def hot_loop_spills(self):
        """Spills in the shortest loops with products and exponentials,
        where no tile is masked: those cost all the time."""
        code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;\n]*);", self.sass)]
        place = {at: i for i, (at, _) in enumerate(code)}
        ends = ((re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text), i) for i, (_, text) in enumerate(code))
        loops = [
            (place[int(m[1], 16)], i) for m, i in ends if m and int(m[1], 16) in place and place[int(m[1], 16)] < i
        ]
        products = [i for i, (_, text) in enumerate(code) if "HGMMA" in text or "HMMA" in text]
        exponentials = [i for i, (_, text) in enumerate(code) if "MUFU.EX2" in text]
        loops = [
            (a, b)
            for a, b in loops
            if any(a <= i <= b for i in products) and sum(a <= i <= b for i in exponentials) >= 4
        ]
        hot = [(a, b) for a, b in loops if b - a <= 1.2 * min(d - c for c, d in loops)]
        return sum(1 for a, b in hot for _, text in code[a : b + 1] if re.search(r"\b(STL|LDL)\b", text))


class _StandInDriver:
    """Answers what compilation asks of a driver; anything that needs a real device raises AttributeError."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        # A kernel keeps one compiler per device number, the first target's for ever: each target needs a number of its
        # own.
        return self._target.arch

    def get_current_stream(self, device=0):
        return 0

    def get_active_torch_device(self):
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self):
        import torch

        return torch.cuda

    def map_python_to_cpp_type(self, ty):
        from triton.backends.nvidia import driver

        return driver.ty_to_cpp(ty)


def compile_for(target, kernel, *args, **kwargs):
    """Compile ``kernel`` for ``target`` as a launch with these arguments would, without a GPU.

    Args:
        target: "sm_80", "sm_90", "sm_100", ...
        kernel: a ``triton.jit`` function, imported while Triton's interpreter is off.
        args, kwargs: the launch's arguments. Tensors may live on the CPU or the meta device, only dtype and alignment
            count; options such as ``num_warps`` go by keyword.

    Returns:
        Compiled.

    Raises:
        ValueError: ``target`` is no "sm_NN", or the kernel was decorated for the interpreter.
    """
    import triton
    from triton.runtime.jit import MockTensor

    major, minor = capability(target)
    if not hasattr(kernel, "warmup") or type(kernel).__name__ == "InterpretedFunction":
        raise ValueError(f"kernel {kernel} runs in Triton's interpreter; want it imported with TRITON_INTERPRET unset")

    def stand_in(value):
        return MockTensor(value.dtype) if hasattr(value, "data_ptr") else value

    driver = triton.runtime.driver
    # The active driver is None where none was needed yet; asking for the default would fail without a GPU.
    # A kernel remembers the target that it met first, so each target gets caches of its own.
    before, caches = driver._active, kernel.device_caches
    driver.set_active(_StandInDriver(10 * major + minor))
    kernel.device_caches = defaultdict(kernel.create_binder)
    try:
        compiled = kernel.warmup(
            *(stand_in(a) for a in args), grid=(1,), **{name: stand_in(a) for name, a in kwargs.items()}
        )
        return inspect_cubin(
            compiled.metadata.name, target, compiled.asm["cubin"], compiled.asm["ptx"],
            shared=compiled.metadata.shared, num_warps=compiled.metadata.num_warps,
        )  # fmt: skip
    finally:
        kernel.device_caches = caches
        driver._active = before


def inspect_cubin(name, target, cubin, ptx="", *, shared=0, num_warps=0):
    """Read registers, spills and machine code out of a cubin (bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", path)
        sass = _run("cuobjdump", "--dump-sass", path)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    registers, stack, _, local = (int(n) for n in found.groups())
    code = Compiled(name, target, registers, 0, 0, stack + local, shared, num_warps, ptx, sass)
    return Compiled(**{**code.__dict__, "spill_stores": code.count("STL"), "spill_loads": code.count("LDL")})


def _run(tool, *args):
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run([folder / tool, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
