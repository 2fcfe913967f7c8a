"""How much memory a call takes at its peak, beyond what there was before."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .timing import synchronise


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """
    The most bytes of tensors that were there at once because of a call, its result included.

    On CUDA this is the allocator's own figure. Elsewhere storages are counted from the operation that returns them
    until they are let go of; what an operation allocates and frees within itself, such as a block of attention scores
    or a library's scratch memory, isn't seen.

    Args:
        call (`Callable`): what is measured; it runs once.
        device (`torch.device`): what it runs on.
    """
    if device.type == "cuda":
        synchronise(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        synchronise(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with _Storages() as storages:
            kept = call()
        peak = storages.peak
    del kept
    return peak


class _Storages(TorchDispatchMode):
    """Counts the bytes of all storages that operations return and that are still in use."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._known.add(storage)  # what is given to an operation and isn't known was there before
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._let_go, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _let_go(self, size: int) -> None:
        self._now -= size


def _storages(tree: Any) -> list[Any]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
