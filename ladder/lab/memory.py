"""How much memory does it take: the peak of what a call allocates on top of its inputs."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(fn, *args):
    """Most bytes that ``fn(*args)`` held at once, its result included, its arguments not.

    On CUDA from the caching allocator; on the CPU by following every storage that a PyTorch operation returns.
    What Triton's interpreter keeps in numpy is not counted.
    """
    tensors = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
    if tensors and tensors[0].is_cuda:
        device = tensors[0].device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = fn(*args)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del result
        return peak
    with _StorageTracker(tensors) as tracker:
        result = fn(*args)
    del result
    return tracker.peak


class _StorageTracker(TorchDispatchMode):
    """Counts the bytes of all storages alive that operations under it have created."""

    def __init__(self, ignored):
        super().__init__()
        self.held = self.peak = 0
        self._alive = {x.untyped_storage()._cdata: 0 for x in ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._release, key)

    def _release(self, key):
        self.held -= self._alive.pop(key, 0)
