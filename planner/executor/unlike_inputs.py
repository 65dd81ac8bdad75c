"""Made-up batches whose halves differ in each input, from inputs that may be alike in every row.

A loss that divides by what an input says, such as the number of positions that a mask keeps, is a mean over that, and
what it returns of parts does not add up by sequences or labels. On rows that are all alike nobody sees that. So some of
an input's values are made zero in the first half of the batch, or the input's own least and greatest stand in one half
each: nothing is invented that an index, a probability or a mask could not be, as far as one can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import InputError
from planner.executor.loss import SAY_HOW_PARTS_ADD_UP
from planner.models.loss import IGNORED

_UNKNOWN = -1  # of classes that nobody knows, as data of images and of several labels have it


def unlike_halves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies of ``tensor``, samples first, in which halves differ: no two are zero at the same places of a sample.

    Each changes every other value, and of the next sample those between. Labels that are ignored stay so.
    """
    changed = [_changed(tensor, offset, tensor.new_zeros(()), None) for offset in range(2)]
    if not tensor.is_complex():  # which have no order
        changed.append(_changed(tensor, 0, *_ends(tensor)))
    yield from (each for each in changed if not bool(((each == tensor) | (each != each)).all()))


def partly_missing(tensor: torch.Tensor) -> Sequence[tuple[float, torch.Tensor]]:
    """What stands for a value that data lack, each with a copy that has it in the first half.

    Not a number, of integers -100; and -1.
    """
    if tensor.dtype == torch.bool:
        return ()
    missing = _usual(tensor), _UNKNOWN
    return [(each, _changed(tensor, 1, torch.full((), each, dtype=tensor.dtype), None)) for each in missing]


def check_none_missing(name: str, tensor: torch.Tensor, missing: float | None = None) -> None:
    """InputError where ``tensor``, read by a loss that is no mean over what is left, has what is ``missing``."""
    if isinstance(tensor, FakeTensor):
        return
    missing = _usual(tensor) if missing is None else missing
    if bool((tensor.isnan() if math.isnan(missing) else tensor == missing).any()):
        raise InputError(
            f"the batch has {name} that are {'not a number' if math.isnan(missing) else f'{missing:g}'}, and with them "
            "what loss_fn returns of a part of a batch is neither a mean over sequences nor one over the other labels: "
            "how the parts add up is not known",
            hint=SAY_HOW_PARTS_ADD_UP,
        )


def _usual(tensor: torch.Tensor) -> float:
    """What most often stands for a missing value."""
    return math.nan if _has_nan(tensor) else IGNORED


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _ends(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of its values; where all are one, half of it and itself, or 0 and 1."""
    known = tensor[tensor.isfinite() & (tensor != IGNORED)].double()
    low, high = known.aminmax() if known.numel() else (torch.zeros(()), torch.zeros(()))
    if not bool(low != high):
        low, high = (low / 2, high) if bool(high) else (low, torch.ones(()))
    return low.to(tensor.dtype), high.to(tensor.dtype)


def _changed(tensor: torch.Tensor, offset: int, first: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor:
    """``tensor`` with ``first`` at every other place of the first half, and ``second``, if any, of the second."""
    rows = tensor.detach().clone().view(len(tensor), -1)
    places = (torch.arange(rows.shape[0])[:, None] + torch.arange(rows.shape[1])) % 2 == offset
    if tensor.dtype != torch.bool:
        places &= rows != IGNORED
    is_first = (torch.arange(len(rows)) < len(rows) // 2)[:, None]
    rows[places & is_first] = first
    if second is not None:
        rows[places & ~is_first] = second
    return rows.view(tensor.shape)
