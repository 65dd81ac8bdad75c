"""From a graph, decided placements and layouts to the cost table: every row that some layout needs, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from costmodels.communication import line_between
from costmodels.memory import Division, KeptStates, state_bytes
from costmodels.vocabulary.choices import Offload, Recompute
from costmodels.vocabulary.mesh import ZERO_STAGES, Group, Mesh
from costmodels.vocabulary.terms import PLACE, Data, Holding, Term, Time
from costmodels.vocabulary.workload import CollectiveKind
from hardware_profiles.schema import ClusterSpec
from planner.axes.traced import representatives
from planner.graph.model_graph import ModelGraph
from planner.layout.columns import Array, Columns, Positions
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout, Training
from planner.pricing.facts import cluster_facts, framework_facts
from planner.pricing.machine import Machine
from planner.pricing.rows import Decisions, data_rows, element_rows, work_rows
from planner.pricing.target import PricingTarget
from planner.table.cost_table import CostTable
from planner.table.facts import UnitRow
from planner.table.keys import DataKey, SendKey, StateKey, WorkKey

# Blocks are alike where that of most FLOPs has at most so many times those of the one of fewest: stages of as many are
# about alike then. Blocks of a mixture have as many as the dense ones between them, for as many parameters are at work.
MOST_OF_ALIKE = 1.5
# What the slowest device makes slower: every time but those of communication.
_COMPUTE = [PLACE[time] for time in Time if time.term in (Term.COMPUTE, Term.RECOMPUTE, None)]


class _GroupsKey(NamedTuple):
    groups: tuple[str, ...]
    pp: int


def unit_row(graph: ModelGraph) -> UnitRow:
    """The units of ``graph``, kinds numbered in order of appearance."""
    order: dict[int, int] = {}
    for unit in graph.units:
        order.setdefault(unit.kind, len(order))
    work = [sum(graph.nodes[node].flops for node in unit.nodes) for unit in graph.units if unit.is_block]
    return UnitRow(
        kinds=tuple(order[unit.kind] for unit in graph.units),
        names=tuple(unit.name for unit in graph.units),
        is_block=tuple(unit.is_block for unit in graph.units),
        has_alike_blocks=max(work, default=0) <= MOST_OF_ALIKE * min(work, default=0),
    )


def build_table(
    target: PricingTarget,
    training: Training,
    decisions: Decisions,
    layouts: Sequence[Layout],
    deadline: Deadline | None = None,
) -> CostTable:
    """Prices every unit kind under every key that ``layouts`` need, in a mixed cluster also on each group's devices.

    OutOfTimeError where the deadline is over before that.
    """
    deadline = deadline or Deadline.never()
    listed = Columns.of(Layout, layouts)
    over_groups = listed.where(_GroupsKey, lambda key: bool(key.groups))
    splits = tuple(sorted(decisions, key=lambda split: (split.tp, split.sequence_parallel, split.etp or 0)))
    work, data, states = listed.keys(WorkKey), listed.keys(DataKey), _with_states_on_devices(listed.keys(StateKey))
    sends = listed.keys(SendKey)
    deadline.check()
    time_s, num_bytes = _work(target, decisions, work, over_groups.keys(WorkKey), deadline)
    deadline.check()
    across = over_groups.where(_GroupsKey, lambda key: key.pp == 1)  # replicas on one group, reduced with all others
    data_s = _data(target, decisions, data, over_groups.keys(DataKey), across.keys(DataKey))
    deadline.check()
    return CostTable(
        units=unit_row(target.graph),
        cluster=cluster_facts(target, training),
        framework=framework_facts(target),
        work_keys=tuple(work),
        data_keys=tuple(data),
        splits=splits,
        state_keys=states,
        send_keys=tuple(sends),
        time_s=time_s,
        num_bytes=num_bytes,
        data_s=data_s,
        elements=element_rows(target.graph, decisions, splits),
        state_bytes=np.array([_state_row(key, target, training) for key in states]),
        sends=tuple(np.array(_send_lines(key, target)).reshape(-1, 2) for key in sends),
    )


def slowed(table: CostTable, factor: float) -> CostTable:
    """The same with all compute ``factor`` times as long."""
    time_s = table.time_s.copy()
    time_s[..., _COMPUTE] *= factor
    return replace(table, time_s=time_s)


def _clusters(target: PricingTarget) -> list[ClusterSpec]:
    """All devices, as the weakest where they differ; then each group."""
    mixed = target.cluster.mixed
    return [target.cluster, *(group.cluster for group in (() if mixed is None else mixed.groups))]


def _work(
    target: PricingTarget,
    decisions: Decisions,
    keys: Sequence[WorkKey],
    over_groups: Sequence[WorkKey],
    deadline: Deadline,
) -> tuple[Array, Array]:
    """``time_s`` and ``num_bytes``; NaN where no layout needs a time."""
    graph, clusters = target.graph, _clusters(target)
    num_kinds = len(representatives(graph))
    time_s = np.full((len(clusters), len(keys), len(Recompute), num_kinds, len(Time)), np.nan)
    num_bytes = np.zeros((len(keys), len(Recompute), num_kinds, len(Holding)))
    for place, cluster in enumerate(clusters):
        needed = keys if place == 0 else over_groups
        machine = target.machine_on(cluster)
        if place == 0:
            for each in decisions:  # they are known from then on
                deadline.check()
                target.known_work.priced(decisions, [key for key in keys if key.tensor == each])
            prices = target.known_work.priced(decisions, keys)
            num_bytes[:] = prices.num_bytes
        else:
            prices = work_rows(graph, decisions, needed, machine, target.framework)
        time_s[place, _places(keys, needed)] = prices.time_s
        time_s[place, ..., _COMPUTE] *= machine.straggler_slowdown(target.cluster.num_devices)
    return time_s, num_bytes


def _data(
    target: PricingTarget,
    decisions: Decisions,
    keys: Sequence[DataKey],
    over_groups: Sequence[DataKey],
    across: Sequence[DataKey],
) -> Array:
    """``data_s``; NaN where no layout needs a time. ``across``: keys of ranks on all groups, whose links all share."""
    graph, clusters = target.graph, _clusters(target)
    found = np.full((len(clusters), len(keys), len(representatives(graph)), len(Data)), np.nan)
    for place, cluster in enumerate(clusters):
        needed = keys if place == 0 else over_groups
        found[place, _places(keys, needed)] = data_rows(
            graph, decisions, needed, target.machine_on(cluster), target.framework
        )
    rows, moved = _places(keys, across), [PLACE[each] for each in Data if each is not Data.ACCUMULATE]
    of_groups = found[1:, rows]
    of_groups[..., moved] = found[0, rows][..., moved]
    found[1:, rows] = of_groups
    return found


def _places(keys: Sequence[tuple[object, ...]], some: Sequence[tuple[object, ...]]) -> Positions:
    place_of = {key: place for place, key in enumerate(keys)}
    return np.array([place_of[key] for key in some], dtype=np.intp)


def _with_states_on_devices(keys: Sequence[StateKey]) -> tuple[StateKey, ...]:
    """And those of the same states on the devices: what is offloaded is what would lie there."""
    return tuple(dict.fromkeys([*keys, *(key._replace(offload=Offload.NONE) for key in keys)]))


def _state_row(key: StateKey, target: PricingTarget, training: Training) -> list[list[float]]:
    """Bytes of one element: of a dense parameter, of a frozen one, and of an expert's on one of ``ep`` ranks."""
    kept = KeptStates(training.precision.value, training.optimizer.value, target.recipe.state)
    shards = key.num_shards if ZERO_STAGES[key.zero_stage].shards_optimizer else 1
    division = Division(key.zero_stage, shards, key.is_replicated, on_host=key.offload is not Offload.NONE)
    dense, frozen = _states(1.0, 0.0, kept, division), _states(0.0, 1.0, kept, division)
    if key.ep == 1:
        return [dense, frozen, dense]
    expert_shards = key.num_expert_ranks // key.ep if shards > 1 else 1
    of_experts = replace(division, num_shards=expert_shards, is_replicated=key.experts_are_replicated)
    return [dense, frozen, _states(1 / key.expert_parts, 0.0, kept, of_experts)]


def _states(trainable: float, frozen: float, kept: KeptStates, division: Division) -> list[float]:
    found = state_bytes(trainable, frozen, kept, division)
    return [found.parameters, found.gradients, found.optimizer, found.moments]


def _send_lines(key: SendKey, target: PricingTarget) -> list[tuple[float, float]]:
    """Latency and seconds per byte from each pipeline rank to the next, over unlike devices also from the last back."""
    pp, cluster, mixed = key.pp, target.cluster, target.cluster.mixed
    if pp == 1:
        return []
    if not key.groups or mixed is None:
        return [_send_line(pp, target.machine)] * (pp - 1)
    each = cluster.num_devices // pp
    clusters = {group.name: group.cluster for group in mixed.groups}
    lines: list[tuple[float, float]] = []
    for place, name in enumerate(key.groups):
        if place > 0:
            before = key.groups[place - 1]
            lines.append(line_between(clusters[before], clusters[name], mixed.link(before, name), each))
        num_ranks = clusters[name].num_devices // each
        lines += [_send_line(num_ranks, target.machine_on(clusters[name]))] * (num_ranks - 1) if num_ranks > 1 else []
    first, last = key.groups[0], key.groups[-1]
    return [*lines, line_between(clusters[last], clusters[first], mixed.link(last, first), each)]


def _send_line(pp: int, machine: Machine) -> tuple[float, float]:
    """From one of ``pp`` pipeline ranks that fill a cluster to the next."""
    mesh = Mesh(pp=pp, dp_replicate=machine.cluster.num_devices // pp)
    (line,) = machine.lines(CollectiveKind.SEND_RECV, mesh.group(Group.PIPELINE))
    return line
