"""Pipeline parallelism: ranks hold consecutive units of the model, and micro-batches pass through them in turn.

Nothing of a unit changes: which units a rank holds is cut later, from the prices of all of them.
"""

from __future__ import annotations

from typing import ClassVar

from planner.axes.base import Asked, Axis, Complexity, Executed, pinned_degrees, undivided
from planner.graph.model_graph import ModelGraph
from planner.parallelism import Recompute, ScheduleName
from planner.space.search_space import MAX_VIRTUAL_STAGES, Choice, Pins, divisors

_PLAINEST = (ScheduleName.ONE_F_ONE_B, *(name for name in ScheduleName if name is not ScheduleName.ONE_F_ONE_B))
_SCHEDULES = {name: place for place, name in enumerate(_PLAINEST)}


class PipelineAxis(Axis[None]):
    """The outermost axis, with its schedule and the stages that a rank holds."""

    name: ClassVar[str] = "pp"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """As many stages as there are blocks at most."""
        allowed = [d for d in divisors(left) if d <= asked.limits.num_pipeline_units]
        return pinned_degrees(left, asked.pins.pp, allowed)

    def violations(self, asked: Asked) -> list[str]:
        """Of the number of stages, and of the schedule."""
        pins, limits = asked.pins, asked.limits
        found = undivided("pp", pins.pp, limits.num_devices)
        pp, virtual = pins.pp or 1, 1 if pins.virtual_stages is None else pins.virtual_stages
        if virtual < 1:
            found.append(f"virtual stages must be at least 1, got {virtual}")
        if pp * virtual > limits.num_pipeline_units:
            found.append(
                f"pp {pp} * virtual stages {virtual} exceeds the {limits.num_pipeline_units} blocks of the model"
            )
        if pins.schedule is not None:
            found += _schedule_violations(pins.schedule, pins)
        if virtual > 1 and pins.pp == 1:
            found.append(f"{virtual} virtual stages need pp > 1")
        return found

    def unexecuted(self, run: Executed) -> list[str]:
        """Models that cannot be cut, and schedules that torch does not have."""
        found: list[str] = []
        between = reads_between_units(run.graph)
        if run.layout.mesh.pp > 1 and between:
            found.append(
                f"planner run cannot cut this model into stages: between its blocks {between[0] or 'its forward'} "
                "reads values of tensors: pin --pp 1 to train with it"
            )
        if run.layout.schedule is ScheduleName.ZB_2P:
            found.append("planner run does not execute ZB-2P, which torch does not have: pin --schedule ZBVZeroBubble")
        return found

    def complexity(self, layout: Choice) -> Complexity:
        """The degree, the stages a rank and the schedule."""
        pp = layout.mesh.pp
        return Complexity(
            num_axes=int(pp > 1),
            pp=pp,
            stages_a_rank=layout.virtual_stages,
            schedule=_SCHEDULES[layout.schedule],
        )


PIPELINE = PipelineAxis()


def schedules(asked: Asked, pp: int, num_microbatches: int) -> list[tuple[ScheduleName, int]]:
    """Schedules that so many micro-batches allow, each with the stages that a rank holds."""
    pins, limits = asked.pins, asked.limits
    if pp == 1:
        is_possible = pins.virtual_stages in (None, 1) and (pins.schedule is None or pins.schedule.is_cut_freely)
        return [(pins.schedule or ScheduleName.ONE_F_ONE_B, 1)] if is_possible else []
    most = min(pins.virtual_stages or MAX_VIRTUAL_STAGES, limits.num_pipeline_units // pp)
    found = [(ScheduleName.GPIPE, 1)]
    if num_microbatches >= pp:  # torch's 1F1B needs a micro-batch for every stage
        found.insert(0, (ScheduleName.ONE_F_ONE_B, 1))
    if num_microbatches % pp == 0:  # torch's interleaved schedules work in rounds of pp micro-batches
        found += [(ScheduleName.INTERLEAVED_1F1B, v) for v in range(2, most + 1)]
        found += [(ScheduleName.INTERLEAVED_ZERO_BUBBLE, v) for v in range(1, most + 1)]
    if most >= 2 and num_microbatches >= 2 * pp:  # DualPipeV needs as many as stages, and ZBV that many to fill
        found += [(ScheduleName.ZBV_ZERO_BUBBLE, 2), (ScheduleName.DUAL_PIPE_V, 2)]
    # Priced where it is asked for: torch cannot run it.
    if pins.schedule is ScheduleName.ZB_2P and num_microbatches >= pp:
        found.append((ScheduleName.ZB_2P, 1))
    return [
        (schedule, virtual)
        for schedule, virtual in found
        if pins.schedule in (None, schedule) and pins.virtual_stages in (None, virtual)
    ]


def goes_with_zero(schedule: ScheduleName, zero_stage: int) -> bool:
    """A backward pass that is split would gather and reduce again for every group of weights."""
    return not (schedule.splits_backward and zero_stage > 1)


def reads_between_units(graph: ModelGraph) -> tuple[str, ...]:
    """Modules that read values of tensors and lie in no module that a stage runs as a whole."""
    whole = [module for unit in graph.units for module in unit.modules]
    return tuple(
        name
        for name in graph.reads_values
        if not any(not module or name == module or name.startswith(module + ".") for module in whole)
    )


def _schedule_violations(schedule: ScheduleName, pins: Pins) -> list[str]:
    found: list[str] = []
    fewest, most = schedule.stages_a_rank
    virtual = pins.virtual_stages
    if virtual is not None and most is not None and virtual > most:
        able = ", ".join(s.value for s in ScheduleName if s.stages_a_rank[1] is None)
        found.append(f"{virtual} virtual stages need one of the schedules {able}, not {schedule}")
    if virtual is not None and virtual < fewest:
        found.append(f"{schedule} needs at least {fewest} virtual stages, got {virtual}")
    if pins.pp == 1 and not schedule.is_cut_freely:
        found.append(f"{schedule} needs pp > 1")
    if schedule.splits_backward:
        found += _split_violations(schedule, pins)
    return found


def _split_violations(schedule: ScheduleName, pins: Pins) -> list[str]:
    found: list[str] = []
    if pins.zero is not None and not goes_with_zero(schedule, pins.zero):
        found.append(f"{schedule} splits backward passes, so the ZeRO stage is 0 or 1, got {pins.zero}")
    if pins.recompute not in (None, Recompute.NONE):
        found.append(f"{schedule} splits backward passes, so nothing can be recomputed, got {pins.recompute}")
    return found
