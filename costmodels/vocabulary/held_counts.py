"""What a pipeline rank holds before each of its backward passes, counted along its actions."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.action import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Kind
from costmodels.vocabulary.schedules import ScheduleName

# What an action of each kind adds to the micro-batches in flight, and to those that wait for their weight gradients.
_HELD: Mapping[Kind, int] = {FORWARD: 1, BACKWARD: -1, INPUT_GRADIENT: 0, WEIGHT_GRADIENT: -1}
_WAITING: Mapping[Kind, int] = {FORWARD: 0, BACKWARD: 0, INPUT_GRADIENT: 1, WEIGHT_GRADIENT: -1}
_ADDS = np.array([[_HELD[kind], _WAITING[kind]] for kind in KINDS])


class BackwardPass(NamedTuple):
    """A backward pass that begins, among those of a rank. Stages are places among the rank's, the lowest first.

    ``before``: the stage of the pass before it, whose last gradients may still be on their way. None where there is
    none, where that was its stage's last pass, which waits for all gradients of the stage, and where passes are split:
    gradients then stay whole until the last micro-batch (ZeRO 0 and 1).
    ``made``: the stages that have gradients, which those of earlier passes and of this one have; all of them where
    passes are split, whose second halves make them.
    """

    stage: int
    before: int | None = None
    made: tuple[int, ...] = (0,)


FIRST, LATER = BackwardPass(0), BackwardPass(0, 0)  # the only ones of a rank's only stage
_NONE = -1  # in place of ``before``, where passes are numbers


class Passes(tuple[BackwardPass, ...]):
    """The kinds of backward passes of a rank. They are keys so often that their hash is worked out once."""

    _hash: int

    def __new__(cls, passes: Iterable[BackwardPass]) -> Passes:
        """These passes, in this order."""
        found = super().__new__(cls, passes)
        found._hash = tuple.__hash__(found)
        return found

    def __hash__(self) -> int:
        return self._hash


class OfPasses(NamedTuple):
    """A number for each kind of backward pass."""

    passes: Passes
    numbers: tuple[float, ...]


ONLY_FIRST, FIRST_AND_LATER = Passes([FIRST]), Passes([FIRST, LATER])


class HeldCounts(NamedTuple):
    """What a rank holds before each action of a backward pass, moments that are equal but for their order left out."""

    # [moments, 2 v]: micro-batches in flight at each of its stages, lowest first; those waiting for weight gradients.
    counts: NDArray[np.float64]
    passes: Passes  # the kinds of backward passes that there are
    first: NDArray[np.intp]  # [passes]: the first of the moments before one of each kind, which follow each other

    @property
    def key(self) -> Hashable:
        """Equal for ranks that hold as many at every moment."""
        return self.counts.tobytes(), self.passes, self.first.tobytes()

    def most_of_each(self, bytes_of: Sequence[float]) -> OfPasses:
        """The most bytes before a pass of each kind. ``bytes_of``: those of one micro-batch, [2 v] as ``counts``.

        The largest of them is what ``peak_in_flight`` finds: what a rank holds grows until a backward pass begins.
        """
        most = np.maximum.reduceat(self.counts @ np.array(bytes_of), self.first)
        return OfPasses(self.passes, tuple(most.tolist()))


@lru_cache(maxsize=256)
def held_counts(name: ScheduleName, p: int, v: int, m: int) -> tuple[HeldCounts, ...]:
    """What each rank holds at every moment at which a backward pass goes on."""
    found: list[HeldCounts] = []
    columns = name.rules.columns(p, v, m)
    for start, end in columns.spans:
        kinds, place = columns.kind[start:end], np.unique(columns.stage[start:end], return_inverse=True)[1]
        every, changes = np.arange(len(kinds)), np.zeros((len(kinds), 2 * v), dtype=np.intp)
        changes[every, place], changes[every, v + place] = _ADDS[kinds].T
        held = np.cumsum(changes, axis=0) - changes
        is_backward = kinds != KINDS.index(FORWARD)
        is_whole = is_backward & (not name.rules.splits_backward)
        begun = list(dict.fromkeys(place[is_whole].tolist()))  # stages in the order of their first passes
        num_made = np.maximum.accumulate(np.where(is_whole, np.argsort(begun)[place] + 1, 0)) if begun else place * 0
        of_pass = np.stack([place, _before(place, is_whole) - _NONE, num_made], axis=1)
        moments = _unlike_rows(np.concatenate([of_pass, held], axis=1)[is_backward])
        first = np.flatnonzero([True, *(moments[1:, :3] != moments[:-1, :3]).any(axis=1)])
        each = [
            BackwardPass(stage, before + _NONE if before else None, tuple(sorted(begun[:number]) or range(v)))
            for stage, before, number in moments[first, :3].astype(np.intp).tolist()
        ]
        found.append(HeldCounts(moments[:, 3:].astype(np.float64), Passes(each), first))
    return tuple(found)


def _unlike_rows(numbers: NDArray[np.intp]) -> NDArray[np.integer]:
    """Each row of whole numbers from 0 on once, sorted: bytes of big-endian numbers lie in the order of the numbers."""
    rows = np.ascontiguousarray(numbers, dtype=">u4")
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    whole.sort()
    is_new = np.concatenate([[True], whole[1:] != whole[:-1]])[: len(whole)]
    found: NDArray[np.integer] = whole[is_new].view(">u4").reshape(-1, rows.shape[1])
    return found


def _before(place: NDArray[np.intp], is_whole: NDArray[np.bool]) -> NDArray[np.intp]:
    """For each action the stage that ``BackwardPass.before`` says. ``is_whole``: whether it is a whole backward."""
    every, left = np.arange(len(place)), place.copy()
    for stage in sorted(set(place[is_whole].tolist())):
        left[np.flatnonzero(is_whole & (place == stage))[-1]] = _NONE
    latest = np.maximum.accumulate(np.where(is_whole, every, _NONE))
    earlier = np.concatenate([[_NONE], latest[:-1]])
    return np.where(earlier == _NONE, _NONE, left[earlier])


def of_one_stage(in_flight: int, m: int) -> OfPasses:
    """The most micro-batches in flight before the first pass of a rank's only stage, and before a later one.

    ``in_flight``: at once, of ``m``. Where there are more, the next forward pass takes the place of each that is done.
    """
    if m == 1:
        return OfPasses(ONLY_FIRST, (in_flight,))
    return OfPasses(FIRST_AND_LATER, (in_flight, min(in_flight, m - 1)))
