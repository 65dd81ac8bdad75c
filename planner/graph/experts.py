"""Expert layers, found by what their operators do: products of rows with one matrix of many, chosen by a router.

A grouped product takes rows sorted by expert, and one parameter (experts, in, out). Under expert parallelism a rank
holds some of the experts: rows travel to the rank of their expert before the first such product of a layer (dispatch)
and back behind the last (combine). Experts that a model computes one by one, or as one batch of equal shares, have no
grouped product and are not found.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.operators.record import Trait
from planner.operators.registry import operator_of


@dataclass(frozen=True)
class ExpertWork:
    """Operators of one unit whose rows are sorted by expert; node ids."""

    inside: tuple[int, ...]  # from the first grouped products to the last, these included
    dispatched: tuple[int, ...]  # tensors that enter: every token's row once for each expert that it chose
    combined: tuple[int, ...]  # tensors that leave, as many rows


def expert_weight(node: Node, graph: ModelGraph) -> str | None:
    """The parameter (experts, in, out) of a grouped product, also where it is used through views; None for others."""
    if node.op_class is not OpClass.GROUPED_GEMM or len(node.operands) < 2:
        return None
    operand = node.operands[1]
    while isinstance(operand, int):
        view = graph.nodes[operand]
        operand = view.operands[0] if view.op_class is OpClass.VIEW and view.operands else None
    return operand


def expert_parameters(graph: ModelGraph) -> dict[str, int]:
    """Every FQN of the parameters that hold one matrix an expert, and the number of experts."""
    used = {expert_weight(node, graph) for node in graph.nodes}
    found: dict[str, int] = {}
    for parameter in graph.parameters:
        if len(parameter.shape) == 3 and used.intersection(parameter.names):
            found.update(dict.fromkeys(parameter.names, parameter.shape[0]))
    return found


def used_otherwise(graph: ModelGraph) -> dict[str, str]:
    """Parameters of experts that others than grouped products take in, by FQN, with the first such operator."""
    views = {name: name for name in expert_parameters(graph)}
    reached: dict[int, str] = {}
    found: dict[str, str] = {}
    for node in graph.nodes:
        for place, operand in enumerate(node.operands):
            fqn = reached.get(operand) if isinstance(operand, int) else views.get(operand or "")
            if fqn is None or (node.op_class is OpClass.GROUPED_GEMM and place == 1):
                continue
            if node.op_class is OpClass.VIEW:
                reached[node.id] = fqn
            else:
                found.setdefault(fqn, node.op)
    return found


def expert_counts(graph: ModelGraph) -> tuple[int, ...]:
    """How many experts the layers that have any have, each number once, ascending."""
    return tuple(sorted(set(expert_parameters(graph).values())))


def num_experts(graph: ModelGraph) -> int:
    """The greatest number that divides the number of experts of every layer that has any; 1 where none has."""
    return gcd(*expert_counts(graph)) or 1


def expert_work(graph: ModelGraph, unit: Unit) -> ExpertWork | None:
    """The expert work of ``unit``; None where there is none."""
    products = {i for i in unit.nodes if expert_weight(graph.nodes[i], graph) is not None}
    if not products:
        return None
    num_rows = {graph.nodes[i].shape[0] for i in products}
    behind = set(products)
    entering: dict[int, None] = {}
    for i in unit.nodes:
        node = graph.nodes[i]
        follows = any(operand in behind for operand in node.operands)
        if i in products and not follows and isinstance(node.operands[0], int):
            entering[node.operands[0]] = None
        elif follows and _keeps_rows(node, num_rows):
            behind.add(i)
    before: set[int] = set()  # all that some later grouped product takes in
    for i in reversed(unit.nodes):
        if i in products or i in before:
            before.update(o for o in graph.nodes[i].operands if isinstance(o, int) and o in behind)
    return ExpertWork(
        inside=tuple(sorted(products | before)),
        dispatched=tuple(entering),
        combined=tuple(sorted(products - before)),
    )


def _keeps_rows(node: Node, num_rows: set[int]) -> bool:
    """Whether each row of the output is made of the same row of the input."""
    is_rowwise = not node.op_class.is_product and not operator_of(node.op).has(Trait.MOVES_ROWS)
    return is_rowwise and bool(node.shape) and node.shape[0] in num_rows
