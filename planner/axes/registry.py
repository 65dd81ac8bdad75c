"""All axes in order, and what they say and do together."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

from planner.axes.base import Asked, Axis, Executed, undivided
from planner.axes.context import CONTEXT
from planner.axes.data import DATA
from planner.axes.expert import EXPERT
from planner.axes.framework import Framework
from planner.axes.fused_kernels import with_fused_activations, with_fused_projections
from planner.axes.lowered import Collective, RankStates, RankWork
from planner.axes.offload import OFFLOAD
from planner.axes.pipeline import PIPELINE
from planner.axes.placement import UnitPlacement
from planner.axes.recompute import RECOMPUTE
from planner.axes.tensor import TENSOR
from planner.axes.unlike_devices import UNLIKE_DEVICES
from planner.graph.trainable import changing_buffers, untrainable
from planner.layout.layout import Training
from planner.table.keys import DataKey, WorkKey

# The order of the passes does not matter to what they give, but to how often they run: those with fewest values first.
WORK_AXES: tuple[Axis[Any], ...] = (RECOMPUTE, TENSOR, EXPERT, CONTEXT)
STATE_AXES: tuple[Axis[Any], ...] = (TENSOR, EXPERT)
COLLECTIVE_AXES: tuple[Axis[Any], ...] = (DATA,)  # that move states in a step
AXES: tuple[Axis[Any], ...] = (PIPELINE, DATA, CONTEXT, TENSOR, EXPERT, RECOMPUTE, OFFLOAD, UNLIKE_DEVICES)

Own = tuple[Hashable, ...]


def work_fields(key: WorkKey) -> Own:
    """What the axes read of ``key``: units are lowered once for all keys for which this is the same."""
    return tuple(axis.work_fields(key) for axis in WORK_AXES)


def state_fields(key: DataKey) -> Own:
    """The same of states."""
    return tuple(axis.state_fields(key) for axis in STATE_AXES)


def collective_fields(key: DataKey) -> Own:
    """The same of what moves states."""
    return tuple(axis.state_fields(key) for axis in COLLECTIVE_AXES)


class WorkLowering:
    """The passes over one unit's work; what keys have in common is lowered once, and is then the same value."""

    def __init__(self, whole: RankWork, framework: Framework) -> None:
        if framework.recipe.fuses_kernels:
            whole = with_fused_projections(with_fused_activations(whole, in_experts=framework.recipe.fuses_experts))
        self._whole, self._framework = whole, framework
        self._lowered: dict[tuple[int, int, Hashable], RankWork] = {}

    def under(self, own: Own, placement: UnitPlacement) -> RankWork:
        """One rank's part under ``work_fields``; ``placement``: that of their tensor split."""
        work = self._whole
        for place, (axis, fields) in enumerate(zip(WORK_AXES, own, strict=True)):
            before = (id(work), place, fields)
            if before not in self._lowered:
                self._lowered[before] = axis.work(work, fields, placement, self._framework)
            work = self._lowered[before]
        return work


def lowered_states(whole: RankStates, own: Own, placement: UnitPlacement) -> RankStates:
    """One rank's part of a unit's states, under ``state_fields``."""
    states = whole
    for axis, fields in zip(STATE_AXES, own, strict=True):
        states = axis.states(states, fields, placement)
    return states


def state_collectives(own: Own, framework: Framework) -> tuple[Collective, ...]:
    """What moves the states of any unit in a step, under ``collective_fields``."""
    pairs = zip(COLLECTIVE_AXES, own, strict=True)
    return tuple(each for axis, fields in pairs for each in axis.state_collectives(fields, framework))


def violations(asked: Asked) -> list[str]:
    """Each rule that the pins break by themselves, with its values."""
    return [*(found for axis in AXES for found in axis.violations(asked)), *_product_violations(asked)]


def _product_violations(asked: Asked) -> list[str]:
    """Degrees that divide the devices one by one, and not together."""
    pins, n = asked.pins, asked.limits.num_devices
    degrees = {name: getattr(pins, name) for name in ("pp", "dp", "cp", "tp") if getattr(pins, name) is not None}
    product = prod(degrees.values())
    found: list[str] = []
    each_divides = not any(undivided(name, degree, n) for name, degree in degrees.items())
    if len(degrees) > 1 and each_divides and n % product:
        found.append(f"{' * '.join(degrees)} = {product} does not divide the {n} GPUs")
    if len(degrees) == 4 and product != n:
        found.append(f"pp * dp * cp * tp = {product}, but there are {n} GPUs")
    return found


def execution_warnings(run: Executed, training: Training) -> tuple[str, ...]:
    """What `planner run` would refuse in a layout, and the pin that avoids it; and what it would train otherwise."""
    found = [*untrainable(run.graph), *_changing_buffers(run)]
    found += [warning for axis in AXES for warning in axis.unexecuted(run)]
    if training.precision.value in ("fp16", "fp8"):
        found.append(f"planner run does not execute {training.precision.value} yet: bf16 and fp32 it does")
    return tuple(found)


def _changing_buffers(run: Executed) -> list[str]:
    """Where each rank would keep a copy of a buffer that the forward pass changes, or each micro-batch changes it."""
    mesh = run.layout.mesh
    degrees = ", ".join(f"{name}={n}" for name, n in (("dp", mesh.dp), ("cp", mesh.cp), ("tp", mesh.tp)) if n > 1)
    modules = changing_buffers(run.graph)
    number = run.layout.num_microbatches
    if not modules or (not degrees and number == 1):
        return []
    first, *others = modules
    more = f" and {len(others)} more" if others else ""
    if not degrees:
        return [
            f"the forward pass changes buffers in {first}{more} once for each of {number} micro-batches: batch "
            "normalisation, for one, has the statistics of each apart, and the model trains otherwise than in one "
            "process that takes the whole batch at once"
        ]
    return [
        f"planner run refuses this model with {degrees}: the forward pass changes buffers in {first}{more}, and "
        "each rank would keep its own: use a layer that looks at one sample at a time (GroupNorm, LayerNorm), or pin "
        f"--pp {mesh.world_size} --recompute none to train with it"
    ]
