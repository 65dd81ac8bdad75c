"""The fastest of many choices that fits, where choices are in an order: some need no less memory than others.

A choice says in which mode every block of a rank is. Blocks of one kind have their places, and the modes theirs: those
that hold least come first in both. So of two choices the one in which each of the first modes ends no later keeps no
less, of all blocks and of those up to any: what does not fit rules out all that keep no less. The block at work holds
more than what it keeps, and may hold a little less in a mode that keeps more: where too little is lacking for that to
make no difference, nothing else is ruled out, and other orders of the same modes may fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.layout.columns import Array, Positions


@dataclass(frozen=True)
class Choices:
    """Choices of the modes of a rank's blocks.

    ``extra_s``, ``needed_bytes`` [choices]: what each takes, and about what it needs but for a number that all share.
    ``ends`` [choices, steps]: of each kind of blocks, and each mode but the last, how many blocks are in it or in those
    before it. ``is_ordered`` [steps]: whether blocks need no less in the mode behind that step, but for what they hold
    at work. ``spread_bytes``: from mode to mode a block at work holds so much less at most.
    """

    extra_s: Array
    needed_bytes: Array
    ends: Positions
    is_ordered: NDArray[np.bool]
    spread_bytes: float

    def __len__(self) -> int:
        return len(self.extra_s)

    def at(self, places: Positions) -> Choices:
        """Some of them."""
        of = self.extra_s[places], self.needed_bytes[places], self.ends[places]
        return Choices(*of, self.is_ordered, self.spread_bytes)

    def need_no_less(self, than: int) -> NDArray[np.bool]:
        """Which of them need no less than one of them does, but for ``spread_bytes``."""
        ends, other = self.ends, self.ends[than]
        return np.where(self.is_ordered, ends <= other, ends == other).all(axis=1)


@dataclass(frozen=True)
class Fastest:
    """A choice that fits, and what no choice that fits takes less than, in whatever order its modes are."""

    place: int
    least_s: float


def fastest_that_fits(choices: Choices, excess: Callable[[int], float]) -> Fastest | None:
    """The fastest choice that fits; None where none does in its own order of modes.

    ``excess(place)``: bytes that it needs too many.
    What is likely to fit is asked for first, the fastest of it; otherwise what needs least. What one choice needs
    besides ``needed_bytes`` is about what the others need.
    """
    best: int | None = None
    left, shared_bytes, least_s = np.arange(len(choices)), np.inf, np.inf
    while len(left):
        those = choices.at(left)
        likely = np.flatnonzero(those.needed_bytes + shared_bytes <= 0)
        asked = int(likely[np.argmin(those.extra_s[likely])]) if len(likely) else int(np.argmin(those.needed_bytes))
        over, asked_s = excess(int(left[asked])), float(those.extra_s[asked])
        shared_bytes = over - float(those.needed_bytes[asked])
        if over <= 0:
            best = int(left[asked])
            left = left[those.extra_s < asked_s]
        elif over > choices.spread_bytes:
            left = left[~those.need_no_less(asked)]
        else:
            left, least_s = np.delete(left, asked), min(least_s, asked_s)
    return None if best is None else Fastest(best, min(least_s, float(choices.extra_s[best])))
