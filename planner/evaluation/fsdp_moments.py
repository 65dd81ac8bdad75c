"""What FSDP2 holds besides states and kept activations, moment by moment of a stage's backward pass.

After torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` and ``_fsdp_state.py``; ``planner check``
runs that code and counts the same. The pass goes over the units of a stage from its end:

- While the loss is at work nothing is gathered: the root's forward pass frees the last gathered unit, and the head's
  hook gathers it again once there is a gradient of the logits.
- A unit begins with its own parameters and those gathered for the next one, and with the gradients of the unit behind
  it in the buffer from which they are reduced. There is one such buffer (``reduce_scatter_max_input_buffers``).
- In a pipeline the buffer of the pass before, of another micro-batch or stage, is held until the first unit's gradients
  follow (ZeRO 2 and 3); stages of a rank have one buffer together (``planner/executor/pipeline.py``).
- A unit ends with its gradients in the dtype of compute: first beside all of the above but what it kept, which is
  freed by then, and after its parameters are freed as well copied into the next buffer, and with what it kept freed.
- Where gradients stay whole until the last micro-batch (ZeRO 0 and 1) buffers are needed only there. Each unit frees
  its copy of the parameters before its gradients are reduced, and of these leaves nothing but its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Number: TypeAlias = Any
"""A number; where many stages are looked at together, an array with one for each of them."""


class UnitAtWork(NamedTuple):
    """Of one unit the bytes of one micro-batch, and its elements when it is gathered."""

    working: Number
    loss: Number
    kept: Number
    elements: Number

    @property
    def besides_loss(self) -> Number:
        """Working set where the loss is not what needs most of it."""
        return self.working * (self.working > self.loss)


@dataclass(frozen=True)
class Sharding:
    """How the states are sharded, and the bytes of an element."""

    gathers_units: Number  # whether: ZeRO 3
    reduces_each: Number  # whether: the gradients of every micro-batch, not those of the last alone
    num_shards: int
    compute_bytes: Number  # of its gradient, or of the copy that is kept of its parameter, in the dtype of compute
    buffer_bytes: Number  # where it is reduced, and added up


class Moment(NamedTuple):
    """Bytes besides states and all kept activations."""

    working: Number
    gathered: Number
    reduced: Number

    @property
    def total(self) -> Number:
        """All three together."""
        return self.working + self.gathered + self.reduced

    def of_rows(self) -> Moment:
        """The same in rows that are not negative: freed activations and gradients make room for what comes."""
        rest = max(0.0, self.reduced + min(0.0, self.working))
        return Moment(max(0.0, self.working), self.gathered, rest)


# The units of a stage in order: equal ones that follow each other, and how many.
Runs = Sequence[tuple[UnitAtWork, int]]


def fullest_moment(stage: Runs, sharding: Sharding, before: float = 0.0) -> Moment:
    """The fullest of a micro-batch that finds gradients of earlier ones.

    ``before``: elements whose gradients are still in the buffer when it begins.
    """
    return max(_moments(stage, sharding, before), key=_needed).of_rows()


def most_bytes(stage: Runs, sharding: Sharding, before: Number) -> NDArray[np.float64]:
    """The total of ``fullest_moment`` of many stages of as many units each."""
    return reduce(np.maximum, map(_needed_of_many, _moments(stage, sharding, before)))


def fullest_last_moment(stage: Runs, sharding: Sharding) -> Moment:
    """The fullest of the last micro-batch of a stage, when no other is in flight."""
    return max(_last_moments(stage, sharding), key=_needed).of_rows()


def _moments(stage: Runs, sharding: Sharding, before: Number) -> Iterator[Moment]:
    buffer = sharding.buffer_bytes * sharding.reduces_each
    yield Moment(0.0, 0.0, buffer * before)
    copy_bytes = sharding.compute_bytes * sharding.gathers_units
    for unit, behind, next_elements, freed, _ in _from_the_end(stage, before):
        own, following = copy_bytes * unit.elements, copy_bytes * next_elements
        yield Moment(unit.loss - freed, 0.0, buffer * behind)
        yield Moment(-freed, 2 * own, buffer * behind)  # as gathered, and copied out of that
        yield Moment(unit.besides_loss - freed, own + following, buffer * behind)
        gradients = sharding.compute_bytes * unit.elements  # all there before the unit's parameters are freed
        yield Moment(-freed - unit.kept, own + following, gradients + buffer * behind)
        yield Moment(-freed - unit.kept, following, (sharding.compute_bytes + buffer) * unit.elements)


def _last_moments(stage: Runs, sharding: Sharding) -> Iterator[Moment]:
    """Beside whole gradients, and whole copies of parameters; of units that are done only shards are left."""
    gone_bytes = sharding.buffer_bytes * (1 - 1 / sharding.num_shards) + sharding.compute_bytes
    yield Moment(0.0, 0.0, 0.0)
    for unit, behind, _, freed, done in _from_the_end(stage):
        reduced = gone_bytes * done
        if unit.loss:
            yield Moment(unit.loss - freed, 0.0, 0.0)
        yield Moment(unit.besides_loss - freed, 0.0, sharding.buffer_bytes * behind - reduced)
        copied = (sharding.buffer_bytes - sharding.compute_bytes) * unit.elements
        yield Moment(-freed - unit.kept, 0.0, copied - reduced)


def _from_the_end(stage: Runs, before: Number = 0.0) -> Iterator[tuple[UnitAtWork, Number, Number, Number, Number]]:
    """Units whose turn may be the fullest moment, with what their backward pass finds.

    That is: elements of the unit behind and of the one that comes next, bytes that the units behind kept and have
    freed, and their elements. Of equal units in a row only the first two and the last are looked at: from the second to
    the last but one nothing changes but that more has been freed. ``before``: elements behind the last unit.
    """
    behind, freed, done = before, 0.0, 0.0
    for place in reversed(range(len(stage))):
        unit, count = stage[place]
        following = stage[place - 1][0].elements if place else 0.0
        for turn in sorted({0, min(1, count - 1), count - 1}):
            next_elements = following if turn == count - 1 else unit.elements
            behind = unit.elements if turn else behind
            yield unit, behind, next_elements, freed + turn * unit.kept, done + turn * unit.elements
        behind, freed, done = unit.elements, freed + count * unit.kept, done + count * unit.elements


def _needed(moment: Moment) -> float:
    """The total of its rows."""
    room = min(0.0, moment.working)
    return moment.working - room + moment.gathered + max(0.0, moment.reduced + room)


def _needed_of_many(moment: Moment) -> NDArray[np.float64]:
    room = np.minimum(0.0, moment.working)
    return moment.working - room + moment.gathered + np.maximum(0.0, moment.reduced + room)
