"""Where partial sums of experts pass through a unit: from products of rows to where they are reduced.

Only units with grouped products are looked at. Elsewhere a partial sum is reduced where its module ends, which is as
good: nothing between a product of rows and the end of its module shrinks what is reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from costmodels.vocabulary.choices import Partial
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.operators.partial_sums import passes_gradients, passing
from planner.operators.placement_rules import OpStrategy
from planner.operators.registry import operator_of


@dataclass(frozen=True)
class PartialSums:
    """Nodes of one unit, by id."""

    values: frozenset[int] = frozenset()  # whose output may be a partial sum
    gradients: frozenset[int] = frozenset()  # behind which a gradient that is one stays one
    weighing: frozenset[int] = frozenset()  # where such gradients of what weighs rows end: they are reduced there

    def strategies(self, node: Node) -> list[OpStrategy]:
        """Ways to run ``node`` on partial sums."""
        return _passing(node, self.values) if node.id in self.values else []


def partial_sums(
    graph: ModelGraph,
    unit: Unit,
    rules: Callable[[Node], list[OpStrategy]],
    ends_module: Callable[[Node], bool],
) -> PartialSums:
    """Of ``unit``, whose operators can be split by ``rules``; gradients go no further than the end of a module."""
    nodes = [graph.nodes[i] for i in unit.nodes]
    if not any(node.op_class is OpClass.GROUPED_GEMM for node in nodes):
        return PartialSums()
    values: set[int] = set()
    for node in nodes:
        made = node.op_class.is_product and any(isinstance(rule.output, Partial) for rule in rules(node))
        viewed = node.op_class is OpClass.VIEW and node.operands[:1] and node.operands[0] in values
        if made or viewed or _passing(node, values):
            values.add(node.id)
    rows = {node.shape[0] for node in nodes if node.op_class is OpClass.GROUPED_GEMM}
    behind: set[int | str | None] = set()  # made of what experts made of their rows
    for node in nodes:
        follows = any(operand in behind for operand in node.operands) and node.shape[:1] and node.shape[0] in rows
        if node.op_class is OpClass.GROUPED_GEMM or follows:
            behind.add(node.id)
    entering: set[int | str | None] = set()
    weighing: set[int | str | None] = set()
    for node in nodes:
        met = {operand for operand in node.operands if operand not in behind}
        if node.op_class is OpClass.GROUPED_GEMM:
            entering |= met
        elif node.id in behind:
            weighing |= met
    passed, _ = _passed_by_gradients(nodes, entering, ends_module)
    also, ends = _passed_by_gradients(nodes, weighing, ends_module)
    return PartialSums(frozenset(values), frozenset(passed | also), frozenset(ends))


def _passing(node: Node, values: set[int] | frozenset[int]) -> list[OpStrategy]:
    if node.op_class.is_product or node.op_class is OpClass.VIEW:
        return []  # their own rules say it
    return passing(operator_of(node.op), [operand in values for operand in node.operands])


def _passed_by_gradients(
    nodes: list[Node], arriving: set[int | str | None], ends_module: Callable[[Node], bool]
) -> tuple[set[int], set[int]]:
    """Back from gradients that arrive as partial sums: what they pass through, and where that ends."""
    passed: set[int] = set()
    ends: set[int] = set()
    for node in reversed(nodes):
        if node.id not in arriving:
            continue
        if (node.op_class is OpClass.VIEW or passes_gradients(operator_of(node.op))) and not ends_module(node):
            passed.add(node.id)
            arriving = arriving.union(node.operands)
        else:
            ends.add(node.id)
    return passed, ends
