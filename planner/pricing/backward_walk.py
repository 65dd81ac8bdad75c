"""What a unit holds in its backward pass, operator by operator from its end, with the gradients it has made by then.

Autograd frees what an operator saved once its backward pass has run, the gradient of a tensor once all operators that
made something of the tensor and the one that made it have run. Gradients of parameters stay until the unit's pass is
over. So where parameters outweigh activations, as those of experts do, the fullest moment is not the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import numpy as np

from planner.axes.lowered import Kernel, RankUnit
from planner.layout.columns import Array

BytesOf = Callable[[Kernel], Array]  # fixed bytes, and bytes for each sequence


def held_in_backward(
    unit: RankUnit, saved_of: Callable[[int], Array], extras_of: BytesOf, passing_of: BytesOf
) -> Array:
    """[operators, 2]: bytes when each operator's backward pass ends, the last operator's first.

    ``saved_of``: of a tensor that autograd keeps; ``extras_of``: kept besides by an operator; ``passing_of``: needed
    while its backward pass runs.
    """
    backwards = unit.kernels[::-1]
    gradients = np.array([_weight_gradient_bytes(kernel) for kernel in backwards]) * np.array([[1.0], [0.0]])
    passing = np.array([passing_of(kernel) for kernel in backwards])
    saved = _kept_until(unit, saved_of, extras_of)
    return saved + np.cumsum(gradients, axis=1).T + passing + np.array([*_gradients_in_flight(unit)])


def _weight_gradient_bytes(kernel: Kernel) -> float:
    return kernel.forward.weight_bytes if kernel.weight_gradient_flops else 0.0


def _kept_until(unit: RankUnit, saved_of: Callable[[int], Array], extras_of: BytesOf) -> Array:
    """What autograd still keeps: of each tensor until the first operator that saves it has run."""
    seen = set[int]()
    kept: list[Array] = []
    for kernel in unit.kernels:
        new = [tensor for tensor in kernel.saves if tensor not in seen]
        seen.update(new)
        kept.append(sum((saved_of(tensor) for tensor in new), extras_of(kernel)))
    return np.array(list(accumulate(kept)))[::-1]


def _gradients_in_flight(unit: RankUnit) -> Iterator[Array]:
    """Of outputs and inputs of operators, those of parts of one memory counted once."""
    storage_of: Mapping[int, int] = {kernel.id: kernel.storage for kernel in unit.kernels}
    there: dict[int, float] = {}
    for kernel in reversed(unit.kernels):
        if kernel.id in there or unit.tensors[kernel.id].is_activation:
            there.setdefault(kernel.storage, _bytes(unit, kernel.storage))
            for tensor in kernel.inputs:
                if unit.tensors[tensor].is_activation:
                    storage = storage_of.get(tensor, tensor)
                    there.setdefault(storage, _bytes(unit, storage))
        yield np.array([0.0, sum(there.values())])
        if kernel.storage == kernel.id:
            there.pop(kernel.id, None)


def _bytes(unit: RankUnit, tensor: int) -> float:
    return unit.tensors[tensor].bytes if unit.tensors[tensor].is_activation else 0.0
