"""Which operators and units of a plan take its compute, and how far each is from the roofline.

Counted is one GPU of every pipeline rank: what one copy of the model computes in a step, forward and backward, without
what is recomputed. With no pipeline that is the plan's term ``compute``. Where replicas have unlike shares of the
batch, those that take longest are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from costmodels.vocabulary.terms import Pass, Term
from planner.api import PlannedLayout
from planner.evaluation.unit_times import MODES, LayoutRows, unit_times
from planner.layout.columns import key_of
from planner.pricing.machine import Machine
from planner.pricing.operator_costs import Limit, OperatorCost, operator_costs
from planner.table.keys import WorkKey
from planner.translate import to_plan


@dataclass(frozen=True)
class Reached:
    """What some operators take, and what they reach of the machine.

    ``roofline`` is the share of their time that their FLOPs and bytes would take at the peaks of the device.
    """

    seconds: float
    share: float  # of all compute
    roofline: float
    flops_per_s: float
    bytes_per_s: float
    limit: Limit  # of most of this time


@dataclass(frozen=True)
class OperatorRow:
    """One operator, in all blocks that have it: ``module`` has a * where these differ."""

    module: str
    operator: str
    reached: Reached


@dataclass(frozen=True)
class UnitRow:
    """One kind of unit. ``other_s``: time that no operator takes: waiting for the host, adding gradients."""

    name: str
    count: int
    reached: Reached
    other_s: float


@dataclass(frozen=True)
class ComputeShares:
    """Compute of one step on one GPU of every pipeline rank. Operators: those that take most first."""

    seconds: float
    operators: tuple[OperatorRow, ...]
    units: tuple[UnitRow, ...]
    limits: Mapping[Limit, float]  # seconds of operators by what limits them
    other_s: float
    peak_flops_per_s: float  # of a device by its data sheet
    peak_bytes_per_s: float
    peaks_are_means: bool = False  # of unlike devices


class _Held(NamedTuple):
    """One unit of the model on the devices of its rank, in all micro-batches of a step."""

    place: int  # in the model
    kind: int
    name: str
    seconds: float
    operators: tuple[OperatorCost, ...]

    @property
    def other_s(self) -> float:
        return self.seconds - sum(each.seconds for each in self.operators)


def compute_shares(planned: PlannedLayout) -> ComputeShares:
    """Where the compute of a plan goes."""
    held = sorted(_held(planned), key=lambda unit: unit.place)  # ranks of several stages hold what is far apart
    total_s = sum(unit.seconds for unit in held)
    by_operator: defaultdict[tuple[str, str], list[OperatorCost]] = defaultdict(list)
    by_kind: defaultdict[int, list[_Held]] = defaultdict(list)
    limits = dict.fromkeys(Limit, 0.0)
    for unit in held:
        by_kind[unit.kind].append(unit)
        for each in unit.operators:
            by_operator[each.module, each.operator].append(each)
            limits[each.limit] += each.seconds
    rows = [OperatorRow(*name, _reached(costs, total_s)) for name, costs in by_operator.items()]
    cluster = planned.target.cluster
    return ComputeShares(
        seconds=total_s,
        operators=tuple(sorted(rows, key=lambda row: -row.reached.seconds)),
        units=tuple(_unit_row(units, total_s) for units in by_kind.values()),
        limits=limits,
        other_s=sum(unit.other_s for unit in held),
        peak_flops_per_s=to_plan.mean_peak_flops_per_s(cluster, planned.training.precision.value),
        peak_bytes_per_s=to_plan.mean_memory_bytes_per_s(cluster),
        peaks_are_means=cluster.mixed is not None,
    )


def _held(planned: PlannedLayout) -> Iterable[_Held]:
    """Every unit, with its operators under their names in the whole model."""
    evaluator, target = planned.evaluator.slowest(planned.starts), planned.target
    layout, table, units = evaluator.layout, evaluator.table, target.graph.units
    rows = LayoutRows.of_one(table, layout)
    costs: dict[int, list[tuple[OperatorCost, ...]]] = {}
    kinds, names = table.units.kinds, _names_of_kinds(planned)
    for rank, stages in enumerate(evaluator.stages_of_ranks(planned.starts)):
        place = evaluator.place_of(rank)
        times = unit_times(table, rows, place)
        if place not in costs:
            key = key_of(WorkKey, layout)
            costs[place] = operator_costs(target, key, planned.decision, _machine_at(planned, place))
        for unit in (each for stage in stages.values() for each in stage):
            kind, mode = kinds[unit], MODES[evaluator.modes[unit]]
            seconds = sum(float(times.term_s(Term.COMPUTE, run)[mode, kind]) for run in Pass)
            m = layout.num_microbatches
            first, starred = names[kind]
            operators = tuple(_renamed(each.times(m), first, starred) for each in costs[place][kind])
            yield _Held(unit, kind, units[unit].name, seconds * m, operators)


def _machine_at(planned: PlannedLayout, place: int) -> Machine:
    """The devices at a place of the table's axis of devices: the first is all of them, then come the groups."""
    target = planned.target
    if place == 0 or target.cluster.mixed is None:
        return target.machine
    return target.machine_on(target.cluster.mixed.groups[place - 1].cluster)


def _names_of_kinds(planned: PlannedLayout) -> Mapping[int, tuple[str, str]]:
    """For each kind of unit the name of its first unit, and the same with a * where the names of blocks differ."""
    found: dict[int, tuple[str, str]] = {}
    for kind, unit in zip(planned.evaluator.table.units.kinds, planned.target.graph.units, strict=True):
        found.setdefault(kind, (unit.name, starred(unit.name) if unit.is_block else unit.name))
    return found


def starred(name: str) -> str:
    """``layers.*`` of ``layers.3``: the name of a block with the place among its like left out."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _renamed(cost: OperatorCost, first: str, pattern: str) -> OperatorCost:
    inside = cost.module == first or cost.module.startswith(first + ".")
    return replace(cost, module=pattern + cost.module[len(first) :]) if inside else cost


def _unit_row(units: Sequence[_Held], total_s: float) -> UnitRow:
    first, last = units[0].name, units[-1].name
    name = first if len(units) == 1 else f"{first} to {last}"
    seconds, other_s = sum(unit.seconds for unit in units), sum(unit.other_s for unit in units)
    reached = _reached([each for unit in units for each in unit.operators], total_s)
    whole = replace(
        reached, seconds=seconds, share=seconds / total_s, roofline=reached.roofline * (seconds - other_s) / seconds
    )
    return UnitRow(name, len(units), whole, other_s)


def _reached(costs: Sequence[OperatorCost], total_s: float) -> Reached:
    seconds = sum(each.seconds for each in costs)
    if seconds == 0:
        return Reached(0.0, 0.0, 0.0, 0.0, 0.0, Limit.LAUNCH)
    limits = dict.fromkeys(Limit, 0.0)
    for each in costs:
        limits[each.limit] += each.seconds
    return Reached(
        seconds=seconds,
        share=seconds / total_s,
        roofline=sum(each.roofline_s for each in costs) / seconds,
        flops_per_s=sum(each.flops for each in costs) / seconds,
        bytes_per_s=sum(each.num_bytes for each in costs) / seconds,
        limit=max(limits, key=lambda limit: limits[limit]),
    )
