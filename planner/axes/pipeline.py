"""Pipeline parallelism: ranks hold consecutive units of the model, and micro-batches pass through them in turn.

Nothing of a unit changes: which units a rank holds is cut later, from the prices of all of them.
"""

from __future__ import annotations

from typing import ClassVar

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.axes.base import Asked, Axis, Executed, divisors, pinned_degrees, undivided
from planner.graph.blocks import ancestors
from planner.graph.model_graph import ModelGraph
from planner.layout.layout import Pins

MAX_VIRTUAL_STAGES = 8


class PipelineAxis(Axis[None]):
    """The outermost axis, with its schedule and the stages that a rank holds."""

    name: ClassVar[str] = "pp"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """As many stages as the model has pieces at most: blocks, and what stands before and behind them."""
        most = asked.limits.num_pipeline_units if asked.limits.offers_pipelines else 1
        allowed = [d for d in divisors(left) if d <= most]
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
                f"pp {pp} * virtual stages {virtual} exceeds the {limits.num_pipeline_units} pieces of the model that "
                "stages can hold: its blocks, and what stands before and behind them"
            )
        if pins.schedule is not None:
            found += _schedule_violations(pins.schedule, pins)
        if virtual > 1 and pins.pp == 1:
            found.append(f"{virtual} virtual stages need pp > 1")
        return found

    def unexecuted(self, run: Executed) -> list[str]:
        """Models that cannot be cut, and schedules that torch does not have."""
        found: list[str] = []
        why = why_uncut(run.graph) if run.layout.mesh.pp > 1 else ""
        if why:
            found.append(f"planner run cannot cut this model into stages: {why}: pin --pp 1 to train with it")
        if not run.layout.schedule.rules.in_torch:
            found.append(
                f"planner run does not execute {run.layout.schedule}, which torch does not have: "
                "pin --schedule ZBVZeroBubble"
            )
        return found


PIPELINE = PipelineAxis()


def schedules(asked: Asked, pp: int, num_microbatches: int) -> list[tuple[ScheduleName, int]]:
    """Schedules that so many micro-batches allow, each with the stages that a rank holds."""
    pins, limits = asked.pins, asked.limits
    if pp == 1:
        has_one_stage = pins.schedule is None or pins.schedule.rules.has_one_stage
        is_possible = pins.virtual_stages in (None, 1) and has_one_stage
        return [(pins.schedule or ScheduleName.ONE_F_ONE_B, 1)] if is_possible else []
    most = min(pins.virtual_stages or MAX_VIRTUAL_STAGES, limits.num_pipeline_units // pp)
    return [
        (name, virtual)
        for name, rules in SCHEDULES.items()
        # What torch cannot run is priced where it is asked for.
        if pins.schedule is name or (pins.schedule is None and rules.in_torch)
        for virtual in range(rules.min_stages, min(most, rules.max_stages or most) + 1)
        if pins.virtual_stages in (None, virtual) and not rules.violations(pp, virtual, num_microbatches)
    ]


def why_uncut(graph: ModelGraph) -> str:
    """Why ``planner run`` cannot put parts of this model on several pipeline ranks; "" where it can."""
    between, repeated = reads_between_units(graph), _called_again(graph)
    if between:
        return f"between its blocks {between[0] or 'its forward'} reads values of tensors"
    return f"{repeated} is called again on what later modules made of it" if repeated else ""


def _called_again(graph: ModelGraph) -> str:
    """A module of one unit that runs once more in a later one, on what units between computed; "" where none does."""
    unit_of = {node: place for place, unit in enumerate(graph.units) for node in unit.nodes}
    owner = {module: place for place, unit in enumerate(graph.units) for module in unit.modules}
    computed: dict[int, int] = {}  # the latest unit that had a part in a value, parameters' users and those behind them
    for node in graph.nodes:
        before = [computed[operand] for operand in node.operands if isinstance(operand, int) and operand in computed]
        whole = next((module for module in ancestors(node.module) if module in owner), None)
        if whole is not None and max(before, default=0) > owner[whole]:
            return whole
        if before or any(isinstance(operand, str) for operand in node.operands):
            computed[node.id] = max([*before, unit_of[node.id]])
    return ""


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
    rules, virtual = schedule.rules, pins.virtual_stages
    if virtual is not None and rules.max_stages is not None and virtual > rules.max_stages:
        able = ", ".join(name for name, other in SCHEDULES.items() if other.max_stages is None)
        found.append(f"{virtual} virtual stages need one of the schedules {able}, not {schedule}")
    if virtual is not None and virtual < rules.min_stages:
        found.append(f"{schedule} needs at least {rules.min_stages} virtual stages, got {virtual}")
    if pins.pp == 1 and not rules.has_one_stage:
        found.append(f"{schedule} needs pp > 1")
    modes = [] if pins.recompute in (None, Recompute.NONE) else [pins.recompute.value]
    return [*found, *rules.conflicts(zero_stage=pins.zero, recomputation=modes)]
