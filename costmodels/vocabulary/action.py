"""What a pipeline rank does on one micro-batch, and the lists of it, one a rank.

A backward pass is one action B, or two: I makes the gradient that goes to the stage before, W those of the weights,
which nobody waits for (Qi et al., "Zero bubble pipeline parallelism", 2024). Letters are torch's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
FORWARD: Literal["F"] = "F"
BACKWARD: Literal["B"] = "B"
INPUT_GRADIENT: Literal["I"] = "I"
WEIGHT_GRADIENT: Literal["W"] = "W"


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
