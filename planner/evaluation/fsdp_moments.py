"""What FSDP2 holds besides states and kept activations, moment by moment of a stage's backward pass.

After torch 2.13, ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` and ``_fsdp_state.py``; ``planner check``
runs that code and counts the same. The pass goes over the units of a stage from its end:

- While the loss is at work nothing is gathered: the root's forward pass frees the last gathered unit, and the head's
  hook gathers it again once there is a gradient of the logits.
- A unit begins with its own parameters and those gathered for the next one, and with the gradients of the unit behind
  it in the buffer from which they are reduced. There is one such buffer (``reduce_scatter_max_input_buffers``).
- In a pipeline the buffer of the pass before, of another micro-batch or stage, is held until the first unit's gradients
  follow (ZeRO 2 and 3), unless that was its stage's last pass, which waits; stages of a rank have one buffer together
  (``planner/executor/pipeline.py``).
- A unit makes its gradients in the dtype of compute, operator by operator: they are there beside all of the above and
  what the operators before still need, at last with what the unit kept freed. After its parameters are freed as well
  they are copied into the next buffer. Of the step's only micro-batch shards of what was reduced are added one by one.
- Parameters that several units use, such as tied ones, are the root's: they stay gathered from the loss to the pass's
  end, and so do their gradients from the last unit that uses them. At the end autograd adds the first unit's gradient
  to that, out of place. (``planner/translate/to_plan.py`` shards no such module by itself.)
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
    with_gradients: Number = 0.0  # at the fullest moment at which it has made gradients, which these bytes contain
    shards: Number = 0.0  # elements of its gradients that stay on the rank once they are reduced

    @property
    def besides_loss(self) -> Number:
        """Working set where the loss is not what needs most of it."""
        return self.working * (self.working > self.loss)


@dataclass(frozen=True)
class Sharding:
    """How the states are sharded, and the bytes of an element."""

    gathers_units: Number  # whether: ZeRO 3
    reduces_each: Number  # whether: the gradients of every micro-batch, not those of the last alone
    compute_bytes: Number  # of its gradient, or of the copy that is kept of its parameter, in the dtype of compute
    buffer_bytes: Number  # where it is reduced, and added up
    shared_elements: Number = 0.0  # that several units use
    leaves_shards: bool = False  # whether gradients that are reduced are not there yet: of the step's only micro-batch

    @property
    def gradient_bytes(self) -> Number:
        """Of the gradient that a micro-batch makes: nothing where it is added at once to what is there."""
        is_added = (1 - self.reduces_each) * (self.compute_bytes == self.buffer_bytes)
        return self.compute_bytes * (1 - is_added)


class Moment(NamedTuple):
    """Bytes besides states and all kept activations."""

    working: Number
    gathered: Number
    reduced: Number
    gradients: Number = 0.0  # that are made in this pass, and stay

    @property
    def passing(self) -> Number:
        """What comes and goes."""
        return self.working + self.gathered + self.reduced

    @property
    def total(self) -> Number:
        """All of it together."""
        return self.passing + self.gradients

    def of_rows(self) -> Moment:
        """The same in rows that are not negative: freed activations and gradients make room for what comes."""
        room = min(0.0, self.working)
        reduced = max(0.0, self.reduced + room)
        room = min(0.0, room + self.reduced)
        return Moment(max(0.0, self.working), self.gathered, reduced, max(0.0, self.gradients + room))


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
    buffer, gradient = sharding.buffer_bytes * sharding.reduces_each, sharding.gradient_bytes
    copy_bytes = sharding.compute_bytes * sharding.gathers_units
    shared, of_shared = copy_bytes * sharding.shared_elements, gradient * sharding.shared_elements
    shard_bytes = sharding.buffer_bytes * sharding.leaves_shards
    yield Moment(0.0, 0.0, buffer * before)
    turns = _from_the_end(stage, before)
    for turn in turns:
        unit, freed, left, waits = turn.unit, turn.freed, shard_bytes * turn.shards, buffer * turn.behind
        own, both = copy_bytes * unit.elements, copy_bytes * (unit.elements + turn.next_elements) + shared
        made = of_shared * (not turn.is_first)
        yield Moment(unit.loss - freed, shared * (not turn.is_first), made + waits, left)
        yield Moment(-freed, 2 * own + shared, made + waits, left)  # as gathered, and copied out of that
        yield Moment(_working(unit, gradient) - freed, both, made + waits, left)
        # All gradients are there before the unit's parameters are freed.
        yield Moment(-freed - unit.kept, both, of_shared + gradient * unit.elements + waits, left)
        reduced = of_shared + (gradient + buffer) * unit.elements
        yield Moment(-freed - unit.kept, both - own, reduced, left + shard_bytes * unit.shards)
    end = turns[-1]
    freed, left = end.freed + end.unit.kept, shard_bytes * (end.shards + end.unit.shards)
    yield Moment(-freed, shared, _summed(sharding) + buffer * end.behind, shard_bytes * end.shards)
    yield Moment(-freed, 0.0, of_shared + buffer * sharding.shared_elements, left)


def _last_moments(stage: Runs, sharding: Sharding) -> Iterator[Moment]:
    """Beside whole gradients, and whole copies of parameters; of units that are done only shards are left."""
    whole_bytes = sharding.buffer_bytes + sharding.compute_bytes
    gradient, copied = sharding.gradient_bytes, sharding.buffer_bytes - sharding.compute_bytes
    of_shared = gradient * sharding.shared_elements
    yield Moment(0.0, 0.0, 0.0)
    turns = _from_the_end(stage)
    for turn in turns:
        unit, freed = turn.unit, turn.freed
        reduced = whole_bytes * turn.done - sharding.buffer_bytes * turn.shards
        made = of_shared * (not turn.is_first) + sharding.buffer_bytes * turn.behind
        if unit.loss:
            yield Moment(unit.loss - freed, 0.0, 0.0)
        yield Moment(_working(unit, gradient) - freed, 0.0, made - reduced)
        yield Moment(-freed - unit.kept, 0.0, of_shared + copied * unit.elements - reduced)
    end = turns[-1]
    freed, reduced = end.freed + end.unit.kept, whole_bytes * end.done - sharding.buffer_bytes * end.shards
    yield Moment(-freed, 0.0, _summed(sharding) + sharding.buffer_bytes * end.behind - reduced)
    reduced += whole_bytes * end.unit.elements - sharding.buffer_bytes * end.unit.shards
    yield Moment(-freed, 0.0, copied * sharding.shared_elements - reduced)


def _summed(sharding: Sharding) -> Number:
    """Gradients of shared parameters from two units, beside the sum that autograd makes of them."""
    return 3 * sharding.compute_bytes * sharding.shared_elements


def _working(unit: UnitAtWork, gradient_bytes: Number) -> Number:
    """Of a unit at work, where elements have gradients of so many bytes."""
    usual, more = unit.besides_loss, unit.with_gradients * (gradient_bytes > 0)
    return usual + (more - usual) * (more > usual)


class _Turn(NamedTuple):
    """A unit whose turn it is, and what its backward pass finds."""

    unit: UnitAtWork
    is_first: bool  # of the pass
    behind: Number  # elements of the unit behind
    next_elements: Number  # and of the one that comes next
    freed: Number  # bytes that the units behind kept
    done: Number  # their elements
    shards: Number  # and those that stay of their gradients


def _from_the_end(stage: Runs, before: Number = 0.0) -> list[_Turn]:
    """Units whose turn may be the fullest moment.

    Of equal units in a row only the first two and the last two are looked at: in between nothing changes but that each
    frees as much and leaves as much. ``before``: elements behind the last unit.
    """
    found: list[_Turn] = []
    behind, freed, done, shards = before, 0.0, 0.0, 0.0
    for place in reversed(range(len(stage))):
        unit, count = stage[place]
        following = stage[place - 1][0].elements if place else 0.0
        for turn in sorted({0, min(1, count - 1), max(0, count - 2), count - 1}):
            next_elements = following if turn == count - 1 else unit.elements
            behind = unit.elements if turn else behind
            is_first = turn == 0 and place == len(stage) - 1
            passed = freed + turn * unit.kept, done + turn * unit.elements, shards + turn * unit.shards
            found.append(_Turn(unit, is_first, behind, next_elements, *passed))
        behind = unit.elements
        freed, done, shards = freed + count * unit.kept, done + count * unit.elements, shards + count * unit.shards
    return found


def _needed(moment: Moment) -> float:
    """The total of its rows."""
    room = min(0.0, moment.working)
    return moment.working - room + moment.gathered + max(0.0, moment.reduced + moment.gradients + room)


def _needed_of_many(moment: Moment) -> NDArray[np.float64]:
    room = np.minimum(0.0, moment.working)
    rest = np.maximum(0.0, moment.reduced + moment.gradients + room)
    return moment.working - room + moment.gathered + rest
