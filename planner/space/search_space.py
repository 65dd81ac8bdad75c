"""The search space: every layout that the cluster, the model, the batch and the user's pins allow.

Each axis says its own degrees and rules (``planner.axes``); here they are crossed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.choices import ContextMethod
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.axes.base import Asked
from planner.axes.context import CONTEXT, methods
from planner.axes.data import DATA, micro_batches, replica_options, zero_stages
from planner.axes.expert import expert_degrees
from planner.axes.offload import activations_may_leave, offload_of
from planner.axes.pipeline import PIPELINE, schedules
from planner.axes.recompute import modes
from planner.axes.registry import violations
from planner.axes.tensor import TENSOR, sequence_parallel_options
from planner.errors import NoLayoutError, PinsError
from planner.layout.columns import Columns
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.layout.within import Within

Codes = NDArray[np.integer]


@dataclass(frozen=True)
class SearchSpace:
    """All layouts, and what they were made from."""

    training: Training
    pins: Pins
    limits: Limits
    layouts: Columns[Layout]
    shares: Columns[Layout] = field(default_factory=lambda: Columns.of(Layout, ()))  # what ``space.shares`` lists


def build_space(training: Training, pins: Pins, limits: Limits, deadline: Deadline | None = None) -> SearchSpace:
    """Every allowed layout. PinsError with every violated rule, NoLayoutError where none is violated and there is none.

    OutOfTimeError where the deadline is over before all are listed.
    """
    asked = Asked(training, pins, limits)
    found = violations(asked)
    if found:
        raise PinsError(found)
    layouts = _layouts(asked, deadline or Deadline.never())
    if not layouts:
        raise NoLayoutError(
            f"no layout satisfies {pins.describe() or 'the rules'} for global batch {training.global_batch_size} "
            f"on {limits.num_devices} GPUs",
            hint=("" if pins.etp is None else "etp must be 1, beside ep > 1, or tp itself; ")
            + "micro-batch * data-parallel degree must divide the global batch, and of the micro-batches that makes "
            "1F1B needs at least pp, DualPipeV at least twice pp, and the interleaved schedules rounds of equal size; "
            "ZeRO 1 to 3 need dp_shard * cp > 1, and ZeRO 0 leaves dp_shard 1: drop a pin or change --global-batch",
        )
    return SearchSpace(training, pins, limits, layouts)


def typical_space(training: Training, pins: Pins, limits: Limits) -> SearchSpace:
    """A small part of the space that most often has a fair plan, and is listed and priced in a part of a second.

    Micro-batches of one sequence, 1F1B, no replicas of shards and no context parallelism, but where ``pins`` say
    otherwise. Where that leaves none, for there are many devices for the sequences of a batch, with context
    parallelism. Of these, where there are any, the layouts that split along the sequence what they can, at ZeRO 0, 1 or
    3, with the experts of a layer within a node. It may be empty, as where a rule is violated.
    """
    asked = Asked(training, pins, limits)
    if violations(asked):
        return SearchSpace(training, pins, limits, Columns.of(Layout, ()))
    usual = replace(
        pins,
        cp=1 if pins.cp is None else pins.cp,
        micro_batch=1 if pins.micro_batch is None else pins.micro_batch,
        dp_replicate=1 if pins.dp_replicate is None else pins.dp_replicate,
        schedule=ScheduleName.ONE_F_ONE_B if pins.schedule is pins.virtual_stages is None else pins.schedule,
    )
    layouts = _layouts(Asked(training, usual, limits), Deadline.never())
    if not layouts:
        layouts = _layouts(Asked(training, replace(usual, cp=pins.cp), limits), Deadline.never())

    def is_usual(key: _UsualKey) -> bool:
        splits_sequence = sequence_parallel_options(asked, key.mesh)[-1]
        has_usual_states = key.zero_stage != 2 or pins.zero is not None
        is_within_node = key.mesh.ep <= limits.devices_per_node or pins.ep is not None
        return key.sequence_parallel == splits_sequence and has_usual_states and is_within_node

    return SearchSpace(training, pins, limits, layouts.where(_UsualKey, is_usual) or layouts)


class _UsualKey(NamedTuple):
    """What of a layout says whether it is a typical one."""

    mesh: Mesh
    sequence_parallel: bool
    zero_stage: int


def narrowed(space: SearchSpace, within: Within, *, may_be_empty: bool = False) -> SearchSpace:
    """The layouts that a framework can run; NoLayoutError where there is none."""
    layouts = within.of(space.layouts, space.training)
    if not layouts and not may_be_empty:
        reason, way_out = within.why_none(space.layouts, space.training)
        pinned = space.pins.describe()
        raise NoLayoutError(
            f"{within.framework} can run none of the {len(space.layouts)} layouts of {space.limits.num_devices} GPUs "
            f"with a global batch of {space.training.global_batch_size}{f' and {pinned}' if pinned else ''}: {reason}",
            hint=f"{way_out}; or give another --gpus or --global-batch, or take another framework",
        )
    return replace(space, layouts=layouts)


def num_meshes(asked: Asked) -> int:
    """Ways to lay pipeline, data, context and tensor parallelism over the devices that some micro-batch allows."""
    degrees = list(_degrees(asked))
    allowed = {dp for dp in {each.dp for each in degrees} if any(micro_batches(asked, dp))}
    return sum(each.dp in allowed and next(divided(asked, each), None) is not None for each in degrees)


def _layouts(asked: Asked, deadline: Deadline) -> Columns[Layout]:
    """Every layout; those of one mesh serve for all meshes that allow the same."""
    alike: dict[tuple[tuple[object, ...], tuple[ContextMethod, ...]], list[Mesh]] = defaultdict(list)
    for mesh in _meshes(asked):
        stages = tuple(zero_stages(asked, mesh))
        flags = tuple(sequence_parallel_options(asked, mesh))
        ways = tuple(methods(asked, mesh.tp, mesh.cp))
        alike[(mesh.pp, mesh.dp, stages, flags), ways].append(mesh)
    parts: list[Columns[Layout]] = []
    shapes: dict[tuple[int, int], Columns[Shape]] = {}
    for (_, ways), meshes in alike.items():
        deadline.check()
        first = meshes[0]
        if (first.pp, first.dp) not in shapes:
            shapes[first.pp, first.dp] = Columns.of(Shape, _shapes(asked, first.pp, first.dp))
        on_one = layouts_on(first, asked, shapes[first.pp, first.dp]).with_each("cp_method", ways)
        parts.append(on_one.with_each("mesh", meshes))
    return Columns.joined([Columns.of(Layout, ()), *parts])


class Shape(NamedTuple):
    """What of a layout the degrees of pipeline and data parallelism alone allow."""

    micro_batch_size: int
    num_microbatches: int
    schedule: ScheduleName
    virtual_stages: int


def _shapes(asked: Asked, pp: int, dp: int) -> Iterator[Shape]:
    for micro, num_micro in micro_batches(asked, dp):
        for schedule, virtual in schedules(asked, pp, num_micro):
            yield Shape(micro, num_micro, schedule, virtual)


def layouts_on(mesh: Mesh, asked: Asked, shapes: Columns[Shape]) -> Columns[Layout]:
    """Every ZeRO stage with the shapes that go with it, each split along the sequence or not, under all its modes."""
    stages, flags = zero_stages(asked, mesh), sequence_parallel_options(asked, mesh)
    names = [ScheduleName(name) for name in shapes.values_of("schedule")]
    of_schedule = shapes.codes_of("schedule")
    allowed = [modes(asked, name) for name in names]
    num_modes = np.array([len(each) for each in allowed], dtype=np.intp)
    any_mode = [mode for each in allowed for mode in each]  # those of one schedule behind those of the one before
    first_mode = np.cumsum(num_modes) - num_modes
    zeros, places = [np.zeros(0, dtype=np.intp)], [np.zeros(0, dtype=np.intp)]
    for zero, stage in enumerate(stages):
        goes = np.array([not name.rules.conflicts(zero_stage=stage, recomputation=()) for name in names], dtype=bool)
        places.append(np.flatnonzero(goes[of_schedule]))
        zeros.append(np.full(len(places[-1]), zero))
    shape = np.concatenate(places)
    times = num_modes[of_schedule[shape]] * len(flags)
    nth = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
    shape, schedule = np.repeat(shape, times), np.repeat(of_schedule[shape], times)
    same = np.zeros(len(shape), dtype=np.intp)
    columns: dict[str, tuple[Sequence[object], Codes]] = {
        name: (shapes.values_of(name), shapes.codes_of(name)[shape]) for name in Shape._fields
    }
    leaves = [activations_may_leave(asked, name) for name in names]
    columns |= {
        "zero_stage": (stages, np.repeat(np.concatenate(zeros), times)),
        "recompute": (any_mode, first_mode[schedule] + nth % num_modes[schedule]),
        "sequence_parallel": (flags, nth // num_modes[schedule]),
        "offloads_activations": ((False, True), np.array(leaves, dtype=np.intp)[schedule]),
    }
    rest = {"mesh": mesh, "offload": offload_of(asked), "cp_method": ContextMethod.ALL_GATHER}
    rest |= {"groups": (), "shares": ()}  # of alike devices
    columns |= {name: ((value,), same) for name, value in rest.items()}
    return Columns.from_codes(Layout, {name: columns[name] for name in Layout._fields})


class Degrees(NamedTuple):
    """Of the axes that ranks are first divided by."""

    pp: int
    dp: int
    cp: int
    tp: int


def _meshes(asked: Asked) -> Iterator[Mesh]:
    for degrees in _degrees(asked):
        yield from divided(asked, degrees)


def _degrees(asked: Asked) -> Iterator[Degrees]:
    left = asked.limits.num_devices
    for tp in TENSOR.degrees(asked, left):
        for pp in PIPELINE.degrees(asked, left // tp):
            for cp in CONTEXT.degrees(asked, left // tp // pp):
                for dp in DATA.degrees(asked, left // tp // pp // cp):
                    yield Degrees(pp, dp, cp, tp)


def divided(asked: Asked, degrees: Degrees) -> Iterator[Mesh]:
    """Meshes of these degrees, by replicas of shards and by the ranks of experts."""
    pp, dp, cp, tp = degrees
    for replicate in replica_options(asked, dp):
        yield from expert_degrees(asked, Mesh(pp=pp, dp_replicate=replicate, dp_shard=dp // replicate, cp=cp, tp=tp))
