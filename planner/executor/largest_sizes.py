"""On tensors without values: what a mask selects is as large as it can be."""

# pyright: reportPrivateUsage=false
# torch has no public way to say what an operator makes of tensors without values.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
SELECTS_ALL = "a mask selects all there is: memory is counted for the most that values may select"


@contextlib.contextmanager
def largest_sizes() -> Generator[list[str]]:
    """Within the context, masks select everything; gives the notes to say of it, which are there at its end."""
    notes: list[str] = []

    def said(result: torch.Tensor) -> torch.Tensor:
        if SELECTS_ALL not in notes:
            notes.append(SELECTS_ALL)
        return result

    def nonzero(mode: FakeTensorMode, operator: OpOverload, mask: torch.Tensor) -> torch.Tensor:
        size = mask.numel()
        return said(mask.new_empty_strided((size, mask.ndim), (1, size), dtype=torch.int64))

    def masked_select(
        mode: FakeTensorMode, operator: OpOverload, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return said(values.new_empty(math.prod(torch.broadcast_shapes(values.shape, mask.shape))))

    aten = torch.ops.aten
    with _made_by(nonzero, aten.nonzero.default), _made_by(masked_select, aten.masked_select.default):
        yield notes


@contextlib.contextmanager
def _made_by(stand_in: Callable[..., torch.Tensor], operator: OpOverload) -> Generator[None]:
    before = op_implementations_dict[operator]
    op_implementations_dict[operator] = stand_in
    try:
        yield
    finally:
        op_implementations_dict[operator] = before
