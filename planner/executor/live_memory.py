"""Bytes that tensors hold, counted where torch's allocator counts none: on a CPU, or of tensors without values.

torch's own ``MemTracker`` follows modules as well, and so cannot count steps of several micro-batches.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for which storage a tensor's is, nor for how DTensor finds out shapes.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts storages from their first use inside the context, or from ``note``, until they are freed or resized.

    ``peak_bytes`` is the most that was held at once. Whole tensors without values on which DTensor tries an operator to
    learn its result's shape are not counted. What is allocated below torch's operators, such as the buffers of
    a communication library, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self._propagate: Callable[..., Any] = ShardingPropagator._propagate_tensor_meta_non_cached
        self._is_paused = False

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts what is there already: parameters, buffers, states."""
        for tensor in tensors:
            self._count(tensor)

    def start_over(self) -> None:
        """From here on ``peak_bytes`` is counted anew, from what is held now."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> LiveMemory:
        """Begins to count."""
        resize, tracker = self._resize, self

        def resized(storage: torch.UntypedStorage, size: int) -> object:  # how FSDP frees and takes what it gathers
            result = resize(storage, size)
            tracker._take(storage._cdata, storage)
            return result

        def propagated(*args: object, **kwargs: object) -> object:
            before, tracker._is_paused = tracker._is_paused, True
            try:
                return tracker._propagate(*args, **kwargs)
            finally:
                tracker._is_paused = before

        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]
        ShardingPropagator._propagate_tensor_meta_non_cached = propagated  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stops."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._propagate_tensor_meta_non_cached = self._propagate

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator and counts what it returns; a DTensor's operators come again for its local tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for leaf in () if self._is_paused else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._free, storage._cdata).atexit = False
            self._take(storage._cdata, storage)

    def _take(self, key: int, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)
