"""Operators placed for every tensor-parallel degree of a search, and what a model on a cluster allows with that."""

from __future__ import annotations

from collections.abc import Iterable

from costmodels.recipe import OUR_RECIPE
from planner.axes.base import divisors
from planner.axes.pipeline import why_uncut
from planner.graph.experts import expert_counts, num_experts
from planner.graph.model_graph import OpClass
from planner.graph.node_operators import mixes_positions_outside_attention, num_heads
from planner.layout.deadline import Deadline
from planner.layout.decided import NOTHING, Decided
from planner.layout.layout import Limits, Pins
from planner.pricing.placements import Decision, Solve, decide
from planner.pricing.rows import Decisions
from planner.pricing.target import PricingTarget
from planner.table.keys import TensorSplit


def decided_for_degrees(
    target: PricingTarget,
    pins: Pins,
    solve: Solve,
    deadline: Deadline | None = None,
    known: Decisions | None = None,
    *,
    are_typical: bool = False,
) -> dict[TensorSplit, Decision]:
    """Placements for every tensor-parallel degree of the space, with and without sequence parallelism.

    ``known`` are taken as they are. Where the pinned degree splits nothing, those that do are found, to be named.
    ``are_typical``: with sequence parallelism alone, if that splits anything, as most typical layouts are: placements
    take most of the time before a first plan. OutOfTimeError where the deadline is over before that.
    """
    found = dict[TensorSplit, Decision]()

    def place(degrees: Iterable[int], flags: tuple[bool, ...] = (False, True)) -> None:
        for degree in sorted(degrees):
            for split in _splits(target, pins, degree, flags):
                if deadline is not None:
                    deadline.check()
                decision = (known or found).get(split) or decided(target, split, NOTHING, solve)
                if decision is not None:
                    found[split] = decision

    cluster = target.cluster
    degrees = {1, *(d for d in divisors(cluster.num_devices) if d <= cluster.devices_per_node)}
    pinned = pins.tp if pins.tp is not None and pins.tp >= 1 else None
    if are_typical and pinned is not None and pins.sequence_parallel is not False:
        place({1, pinned}, (True,))
        if _splitting(found):
            return found
    place(degrees if pinned is None else {1, pinned})
    if pinned is not None and pinned > 1 and all(split.tp != pinned for split in _splitting(found)):
        place(degrees - {1, pinned})
    return found


def usual_tensor_degree(target: PricingTarget, pins: Pins) -> int:
    """Of typical layouts with tensor parallelism: the largest that is possible up to eight."""
    if pins.tp is not None:
        return pins.tp
    cluster = target.cluster
    return max(d for d in divisors(cluster.num_devices) if d <= min(8, cluster.devices_per_node))


def decided(target: PricingTarget, split: TensorSplit, given: Decided, solve: Solve) -> Decision | None:
    """Placements for one degree, as ``given`` where that says something; None where there are none."""
    return decide(target.graph, split, given, target.machine, target.framework, solve)


def limits_of(target: PricingTarget, decisions: Decisions) -> Limits:
    """What this model on this cluster in this framework allows."""
    graph, cluster = target.graph, target.cluster
    has_attention = any(node.op_class is OpClass.ATTENTION for node in graph.nodes)
    splitting = _splitting(decisions)
    return Limits(
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        num_pipeline_units=len(graph.units),
        offers_pipelines=target.recipe.name != OUR_RECIPE or not why_uncut(graph),
        tensor_degrees=frozenset(split.tp for split in splitting),
        sequence_degrees=frozenset(split.tp for split in splitting if split.sequence_parallel),
        whole_expert_degrees=frozenset(split.tp for split in splitting if split.etp == 1),
        num_experts=num_experts(graph),
        expert_counts=expert_counts(graph),
        num_heads=num_heads(graph),
        cp_methods=target.cp_methods,
        context_splits=has_attention and not mixes_positions_outside_attention(graph),
    )


def _splitting(decisions: Decisions) -> list[TensorSplit]:
    """Those that split a weight."""
    return [split for split, units in decisions.items() if split.tp > 1 and any(unit.splits_weights for unit in units)]


def _splits(target: PricingTarget, pins: Pins, degree: int, flags: tuple[bool, ...]) -> list[TensorSplit]:
    """Ways to split operators over so many ranks; experts are whole where the framework can have that, or as pinned."""
    if degree == 1:
        return [TensorSplit(1, False)]
    found = [TensorSplit(degree, sequence_parallel) for sequence_parallel in flags]
    has_whole = target.recipe.has_whole_experts if pins.etp is None else pins.etp == 1
    return [*found, TensorSplit(degree, True, 1)] if has_whole and num_experts(target.graph) > 1 else found
