"""From a graph and placements to the CostTable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from planner.graph.experts import expert_work
from planner.graph.model_graph import ModelGraph, Unit
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Training
from planner.parallelism import Placement
from planner.pricing.cost_table import KEY_FIELDS, CostKey, CostTable, UnitRow
from planner.pricing.expert_parallel import on_one_rank
from planner.pricing.operator_time import PricingTarget
from planner.pricing.sharded_unit import PlacementModel, ShardedUnit
from planner.pricing.unit_costs import UnitCosts, UnitWork, batch_scale, unit_states
from planner.problems import PlacementProblem, PlacementSolution

ShardKey = tuple[int, bool]  # tensor-parallel degree, sequence parallelism
Sharding = tuple[ShardedUnit, ...]  # one a unit kind, in the table's column order


def unit_row(graph: ModelGraph) -> UnitRow:
    """The units of ``graph``, kinds numbered in order of appearance."""
    order: dict[int, int] = {}
    for unit in graph.units:
        order.setdefault(unit.kind, len(order))
    return UnitRow(
        kinds=tuple(order[u.kind] for u in graph.units),
        names=tuple(u.name for u in graph.units),
        is_block=tuple(u.is_block for u in graph.units),
    )


def representatives(graph: ModelGraph) -> list[Unit]:
    """The first unit of each kind, in column order."""
    seen: dict[int, Unit] = {}
    for unit in graph.units:
        seen.setdefault(unit.kind, unit)
    return list(seen.values())


def shard_units(
    target: PricingTarget,
    key: ShardKey,
    fixed: Mapping[str, Placement],
    solve: Callable[[PlacementProblem], PlacementSolution | None],
) -> Sharding | None:
    """Solves the placement program of every unit kind; None where one has no solution.

    Goes from the last kind to the first, so that the head decides for an embedding tied to it.
    ``fixed``: placements of parameters, by any FQN, that are decided already.
    """
    degree, sequence_parallel = key
    graph = target.graph
    decided = dict(fixed)
    found: list[ShardedUnit] = []
    for unit in reversed(representatives(graph)):
        model = PlacementModel(target, unit, degree, sequence_parallel, decided)
        solution = solve(model.problem()) if model.is_possible else None
        if solution is None:
            return None
        sharded = model.read(solution)
        found.append(sharded)
        for fqn, placement in sharded.parameters.items():
            parameter = graph.parameter_of[fqn]
            if parameter.aliases:
                decided.update(dict.fromkeys(parameter.names, placement))
    return tuple(reversed(found))


def build_table(
    target: PricingTarget, training: Training, shardings: Mapping[ShardKey, Sharding], layouts: Sequence[Layout]
) -> CostTable:
    """Prices every unit kind under every key that ``layouts`` need, in a mixed cluster also on each group's devices."""
    graph = target.graph
    kinds = representatives(graph)
    mixed = target.cluster.mixed
    layouts = Columns.of(Layout, layouts)
    over_groups = layouts.where(lambda layout: bool(layout.groups), "groups")
    return CostTable(
        training=training,
        cluster=target.cluster,
        units=unit_row(graph),
        costs=_costs(target, kinds, shardings, layouts),
        states={
            key: tuple(unit_states(graph, unit, sharded) for unit, sharded in zip(kinds, sharding, strict=True))
            for key, sharding in shardings.items()
        },
        flops_per_sequence=(graph.forward_flops + graph.backward_flops) / graph.batch_size,
        recipe=target.recipe,
        groups={
            group.name: build_table(replace(target, cluster=group.cluster), training, shardings, over_groups)
            for group in (() if mixed is None else mixed.groups)
        },
    )


def _costs(
    target: PricingTarget, kinds: Sequence[Unit], shardings: Mapping[ShardKey, Sharding], layouts: Columns[Layout]
) -> dict[CostKey, tuple[UnitCosts, ...]]:
    """Every unit kind under every key of ``layouts``; what keys have in common once, of units without experts for all
    ``ep``.
    """
    keys = [CostKey.of(layouts[i]) for i in layouts.distinct(*KEY_FIELDS)[0]]
    targets = {ep: on_one_rank(target, ep) for ep in {1, *(key.ep for key in keys)}}
    has_experts = [expert_work(target.graph, unit) is not None for unit in kinds]
    work: dict[tuple[object, ...], UnitWork] = {}
    found: dict[tuple[int, CostKey], UnitCosts] = {}

    def cost(column: int, key: CostKey) -> UnitCosts:
        own = key if has_experts[column] else replace(key, ep=1)
        if (column, own) not in found:
            scale, shard_key = batch_scale(target.graph, own.micro_batch_size, own.cp), (own.tp, own.sequence_parallel)
            place = (column, shard_key, scale, own.ep)
            if place not in work:
                work[place] = UnitWork(targets[own.ep], kinds[column], shardings[shard_key][column], scale, own.ep)
            found[column, own] = work[place].costs(own.recompute, own.cp)
        return found[column, own]

    return {key: tuple(cost(column, key) for column in range(len(kinds))) for key in keys}
