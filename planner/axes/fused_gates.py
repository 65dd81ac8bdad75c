"""Columns of experts whose gate and up projection are one parameter, one behind the other in its last dim.

A rank then has its part of both: the output of the product is split within each of two pieces, and what ``chunk`` makes
of it is split as any columns are. Hugging Face's mixtures hold their experts so (``gate_up_proj``), and split them so
(``packed_rowwise`` of their tensor-parallel plans).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodels.vocabulary.choices import Replicate, Shard
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.operators.placement_rules import OpStrategy
from planner.operators.registry import op_name
from planner.table.keys import TensorSplit

PIECES = 2  # gate and up


def fused_gate_strategies(graph: ModelGraph, unit: Unit, split: TensorSplit) -> dict[int, list[OpStrategy]]:
    """Strategies besides those of their rules, of grouped products and of what lies around them, by node id."""
    found: dict[int, list[OpStrategy]] = {}
    if split.tp == 1:
        return found
    users: dict[int, list[int]] = {}
    for i in unit.nodes:
        for operand in graph.nodes[i].operands:
            if isinstance(operand, int):
                users.setdefault(operand, []).append(i)
    for i in unit.nodes:
        product = graph.nodes[i]
        chunk = _halves(product, graph, users)
        if chunk is None or product.shape[-1] % (PIECES * split.tp):
            continue
        weight = _transposed_parameter(product, graph)
        if weight is not None:
            found.setdefault(weight.id, []).append(_one(Shard(1, PIECES), Shard(2, PIECES), split))
        ends = (Replicate(),) * (len(product.operands) - 2)
        summed = (True, *(False,) * (len(product.operands) - 1))  # the rows' gradient is a partial sum
        columns = (Replicate(), Shard(2, PIECES), *ends)
        found.setdefault(i, []).append(OpStrategy(columns, Shard(1, PIECES), 1 / split.tp, summed))
        found.setdefault(chunk.id, []).append(_one(Shard(1, PIECES), Shard(1), split))
        for half in users[chunk.id]:
            found.setdefault(half, []).append(_one(Shard(1), Shard(1), split))
    return found


def _one(operand: Shard, output: Shard, split: TensorSplit) -> OpStrategy:
    return OpStrategy((operand,), output, 1 / split.tp, (False,))


def _halves(product: Node, graph: ModelGraph, users: Mapping[int, Sequence[int]]) -> Node | None:
    """What cuts the output of a grouped product, and nothing else takes, into two halves of each row."""
    if product.op_class is not OpClass.GROUPED_GEMM or len(users.get(product.id, ())) != 1:
        return None
    (user,) = (graph.nodes[i] for i in users[product.id])
    is_chunk = op_name(user.op) == "chunk" and user.attributes.get("chunks") == PIECES
    return user if is_chunk and user.attributes.get("dim") in (1, -1) and user.id in users else None


def _transposed_parameter(product: Node, graph: ModelGraph) -> Node | None:
    """The transposition of the parameter (experts, out, in) that ``product`` takes; None where it takes another."""
    operand = product.operands[1] if len(product.operands) > 1 else None
    if not isinstance(operand, int):
        return None
    node = graph.nodes[operand]
    is_parameter = len(node.operands) == 1 and isinstance(node.operands[0], str)
    swapped = {node.attributes.get("dim0"), node.attributes.get("dim1")}
    return node if op_name(node.op) == "transpose" and is_parameter and swapped in ({-2, -1}, {1, 2}) else None
