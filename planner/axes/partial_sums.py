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

    def strategies(self, node: Node) -> list[OpStrategy]:
        """Ways to run ``node`` on partial sums."""
        return _passing(node, self.values) if node.id in self.values else []


def partial_sums(graph: ModelGraph, unit: Unit, rules: Callable[[Node], list[OpStrategy]]) -> PartialSums:
    """Of ``unit``, whose operators can be split by ``rules``."""
    nodes = [graph.nodes[i] for i in unit.nodes]
    if not any(node.op_class is OpClass.GROUPED_GEMM for node in nodes):
        return PartialSums()
    values: set[int] = set()
    for node in nodes:
        made = node.op_class.is_product and any(isinstance(rule.output, Partial) for rule in rules(node))
        viewed = node.op_class is OpClass.VIEW and node.operands[:1] and node.operands[0] in values
        if made or viewed or _passing(node, values):
            values.add(node.id)
    return PartialSums(frozenset(values), frozenset(_passed_by_gradients(nodes, values)))


def _passing(node: Node, values: set[int] | frozenset[int]) -> list[OpStrategy]:
    if node.op_class.is_product or node.op_class is OpClass.VIEW:
        return []  # their own rules say it
    return passing(operator_of(node.op), [operand in values for operand in node.operands])


def _passed_by_gradients(nodes: list[Node], values: set[int]) -> set[int]:
    """Backward from what is split and from what partial sums meet."""
    arriving: set[int | str | None] = set()
    found: set[int] = set()
    for node in reversed(nodes):
        passes = node.op_class is OpClass.VIEW or passes_gradients(operator_of(node.op))
        if node.op_class is OpClass.GROUPED_GEMM or node.id in values:
            arriving.update(operand for operand in node.operands if operand not in values)
        elif node.id in arriving and passes:
            found.add(node.id)
            arriving.update(node.operands)
    return found
