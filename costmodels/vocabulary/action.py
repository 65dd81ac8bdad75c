"""What a pipeline rank does on one micro-batch, and the lists of it, one a rank.

A backward pass is one action B, or two: I makes the gradient that goes to the stage before, W those of the weights,
which nobody waits for (Qi et al., "Zero bubble pipeline parallelism", 2024). Letters are torch's.
"""

from __future__ import annotations

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


ActionLists = tuple[tuple[Action, ...], ...]
