"""Counts the collectives that really run, and the bytes they are given."""

from __future__ import annotations

from collections import Counter

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {
    "c10d.allreduce_": "all_reduce",
    "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter",
    "_c10d_functional.all_reduce": "all_reduce",
    "_c10d_functional.all_reduce_coalesced_": "all_reduce",
    "_c10d_functional.all_to_all_single": "all_to_all",
    "_c10d_functional.all_gather_into_tensor": "all_gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce_scatter",
}
SMALL_BYTES = 4096  # norms' weight gradients and a loss's statistics; activations of the toys are larger


class CollectiveCounter(TorchDispatchMode):
    """Collectives of more than ``SMALL_BYTES``, by kind; the small ones together."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if isinstance(types, tuple | list) and any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor comes back with what it does to its local tensors
        kind = NAMES.get(str(func).rpartition(".")[0])
        if kind is not None:
            num_bytes = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            self.counts[kind if num_bytes > SMALL_BYTES else "small"] += 1
        return func(*args, **(kwargs or {}))
