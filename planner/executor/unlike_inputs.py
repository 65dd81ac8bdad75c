"""Made-up batches whose halves differ in each input, from inputs that may be alike in every row.

A loss that divides by what an input says, such as the number of positions that a mask keeps, is a mean over that, and
what it returns of parts does not add up by sequences or labels. On rows that are all alike nobody sees that. So some of
an input's values are made zero in the first half of the batch, or the input's own least and greatest stand in one half
each: nothing is invented that an index, a probability or a mask could not be, as far as one can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import InputError
from planner.executor.loss import SAY_HOW_PARTS_ADD_UP
from planner.models.loss import IGNORED


def unlike_halves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies of ``tensor``, samples first, in which halves differ: no two are zero at the same places of a sample.

    Each changes every other value, and of the next sample those between. Labels that are ignored stay so.
    """
    changed = [_changed(tensor, offset, tensor.new_zeros(()), None) for offset in range(2)]
    if not tensor.is_complex():  # which have no order
        changed.append(_changed(tensor, 0, *_ends(tensor)))
    yield from (each for each in changed if not bool(((each == tensor) | (each != each)).all()))


def partly_missing(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A copy with missing values in the first half, as data have them: not a number, of integers -100."""
    if tensor.dtype == torch.bool:
        return ()
    missing = torch.nan if _has_nan(tensor) else IGNORED
    return (_changed(tensor, 1, torch.full((), missing, dtype=tensor.dtype), None),)


def check_none_missing(name: str, tensor: torch.Tensor) -> None:
    """InputError where ``tensor``, read by a loss that is no mean over what is left, has missing values."""
    if isinstance(tensor, FakeTensor):
        return
    if bool((tensor.isnan() if _has_nan(tensor) else tensor == IGNORED).any()):
        raise InputError(
            f"the batch has {name} that are {'not a number' if _has_nan(tensor) else IGNORED}, and with them what "
            "loss_fn returns of a part of a batch is neither a mean over sequences nor one over the other labels: how "
            "the parts add up is not known",
            hint=SAY_HOW_PARTS_ADD_UP,
        )


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
