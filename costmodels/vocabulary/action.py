"""What a pipeline rank does on one micro-batch, and the lists of it, one a rank.

A backward pass is one action B, or two: I makes the gradient that goes to the stage before, W those of the weights,
which nobody waits for (Qi et al., "Zero bubble pipeline parallelism", 2024). Letters are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["F", "B", "I", "W"]
FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"
INPUT_GRADIENT: Literal["I"] = "I"
WEIGHT_GRADIENT: Literal["W"] = "W"
KINDS: tuple[Kind, ...] = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)

Positions = NDArray[np.intp]


class Action(NamedTuple):
    """One rank's work on one micro-batch in one stage."""

    kind: Kind
    stage: int
    microbatch: int


class Transfer(StrEnum):
    """When what a rank has made goes to the rank that needs it."""

    AHEAD = "ahead"  # once it is made: the receiver has asked for it
    BLOCKING = "blocking"  # the same, and its maker goes on when it has arrived
    ON_DEMAND = "on_demand"  # once it is made and the receiver has ended all before it, which then stands and waits

    @property
    def sends_beside(self) -> bool:
        """Whether the maker works on while it sends."""
        return self is not Transfer.BLOCKING

    @property
    def receives_beside(self) -> bool:
        """Whether the receiver works on while it receives."""
        return self is Transfer.AHEAD


ActionLists = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """The same in columns: long schedules have a million actions. Those of a rank stand behind those of ranks before.

    Equal to itself alone, so that what is worked out of a schedule can be looked up by it.
    """

    kind: Positions  # place in ``KINDS``
    stage: Positions
    microbatch: Positions
    ends: tuple[int, ...]  # of each rank's actions

    @staticmethod
    def of(lists: ActionLists) -> ActionColumns:
        """Those of lists."""
        actions = list(chain.from_iterable(lists))
        kinds, stages, microbatches = zip(*actions, strict=True) if actions else ((), (), ())
        place = np.zeros(128, dtype=np.intp)
        place[[ord(kind) for kind in KINDS]] = np.arange(len(KINDS))
        letters = np.frombuffer("".join(kinds).encode(), dtype=np.uint8)
        ends = tuple(accumulate(map(len, lists)))
        return ActionColumns(place[letters], np.array(stages, np.intp), np.array(microbatches, np.intp), ends)

    @cached_property
    def lists(self) -> ActionLists:
        """The actions one by one."""
        kinds = np.array(KINDS, dtype=object)[self.kind].tolist()
        fields = zip(kinds, self.stage.tolist(), self.microbatch.tolist(), strict=True)
        actions = list(map(partial(tuple.__new__, Action), fields))  # without a call of Python for each
        return tuple(tuple(actions[start:end]) for start, end in self.spans)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the actions of each rank begin and end."""
        return list(zip((0, *self.ends), self.ends, strict=False))

    def of_ranks(self, numbers: Positions) -> tuple[tuple[int, ...], ...]:
        """A number of every action, rank by rank."""
        each = numbers.tolist()
        return tuple(tuple(each[start:end]) for start, end in self.spans)
