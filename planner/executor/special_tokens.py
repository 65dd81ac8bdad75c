"""Tokens that a model treats unlike others, as one that ends a document: the numbers that it holds tokens against.

What it does at them alone shows nowhere else. They are found by a forward pass that is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.overrides import TorchFunctionMode

from planner.executor.integers import integers_in, is_integer
from planner.executor.stage_trace import Inputs, leaves_of


class Compared(TorchFunctionMode):
    """Notes the integers that meet what is of tokens' shape, and the rows of tables that tokens are looked up in."""

    def __init__(self, tokens: Inputs) -> None:
        super().__init__()
        self._shapes = {value.shape for value in tokens.values()}
        self._memory = {value.data_ptr() for value in tokens.values()}  # of views of them, too
        self._numbers: dict[int, None] = {}
        self._num_rows: set[int] = set()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        leaves = leaves_of((tuple(args), kwargs or {}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if any(is_integer(tensor) and tensor.shape in self._shapes for tensor in tensors):
            self._numbers.update(dict.fromkeys(integers_in(leaves)))
        if any(tensor.data_ptr() in self._memory for tensor in tensors):
            self._num_rows |= {len(tensor) for tensor in tensors if tensor.ndim == 2 and tensor.is_floating_point()}
        return result

    def special(self, least: int) -> list[int]:
        """Those of ``least`` or more that every table has a row for, and those behind them: what is more is another."""
        most = min(self._num_rows, default=0)
        both = dict.fromkeys(each for number in self._numbers for each in (number, number + 1))
        return [number for number in both if least <= number < most]


def with_special(tokens: Inputs, special: Sequence[int]) -> Inputs:
    """``tokens`` (samples, length) with ``special`` ones in turn at every other place of the first sample."""
    if not special:
        return tokens
    found = {name: value.clone() for name, value in tokens.items()}
    for value in found.values():
        places = value[0, ::2]
        places.copy_(torch.tensor(special)[torch.arange(len(places)) % len(special)])
    return found
