"""What the records of operators say of the nodes of a graph."""

from __future__ import annotations

from math import gcd, prod

from hardware_profiles.vocabulary import OpClass
from planner.graph.model_graph import ModelGraph, Node
from planner.operators.call import FLOATING
from planner.operators.placement_rules import Applied, Operand, OpStrategy, replicated
from planner.operators.record import Trait
from planner.operators.registry import operator_of

# Tensor cores multiply 16-bit matrices whose rows are multiples of 16 bytes (NVIDIA, "Matrix Multiplication Background
# User's Guide", section "Requirements to Use Tensor Cores").
TENSOR_CORE_ELEMENTS = 8


def strategies(node: Node, graph: ModelGraph, degree: int) -> list[OpStrategy]:
    """Every strategy of ``node`` on an axis of ``degree`` ranks, replication first."""
    found = [replicated(len(node.operands))]
    rule = operator_of(node.op).placements
    if rule is not None:
        operands = tuple(_operand(operand, graph) for operand in node.operands)
        applied = Applied(operands, node.shape, node.attributes, node.batch_dependent)
        found += [strategy for strategy in rule(applied, degree) if strategy not in found]
    return found


def has_placement_rule(node: Node) -> bool:
    """Whether the operator can be anything but replicated."""
    return operator_of(node.op).placements is not None


def is_redistributed(node: Node) -> bool:
    """Whether DTensor brings operands to where the operator wants them; of most views it refuses."""
    return node.op_class is not OpClass.VIEW or operator_of(node.op).has(Trait.FOLLOWS_AS_VIEW)


def is_norm(node: Node) -> bool:
    """Whether the operator is a layer norm or an RMS norm."""
    return operator_of(node.op).has(Trait.NORM)


def is_loss(node: Node) -> bool:
    """Whether the operator turns logits into a loss."""
    return operator_of(node.op).has(Trait.LOSS)


def is_cast(node: Node) -> bool:
    """Whether the operator only changes a tensor's dtype."""
    return operator_of(node.op).has(Trait.CAST)


def is_kept_by_selective_recomputation(node: Node) -> bool:
    """Whether the node's output is that of a product which a selective checkpoint keeps."""
    return node.op_class.is_product and bool(operator_of(node.op).kept_as)


def runs_in_eight_bits(node: Node) -> bool:
    """Whether the node's products run in 8 bits where the precision is fp8."""
    is_matrix_product = node.op_class in (OpClass.GEMM, OpClass.GROUPED_GEMM)
    return is_matrix_product and operator_of(node.op).has(Trait.EIGHT_BIT)


def is_causal(node: Node) -> bool:
    """Whether an attention says that no query looks at what follows it; a mask that is a tensor says nothing."""
    return node.attributes.get("is_causal") is True or operator_of(node.op).has(Trait.CAUSAL)


def are_heads_aligned(node: Node, graph: ModelGraph) -> bool:
    """Whether queries and values of an attention are as wide as products on tensor cores want it."""
    widths = (graph.nodes[o].shape[-1] for o in node.operands[:3] if isinstance(o, int))
    return all(width % TENSOR_CORE_ELEMENTS == 0 for width in widths)


def are_sides_aligned(node: Node, graph: ModelGraph) -> bool:
    """Whether a matrix product takes and makes only rows as wide as tensor cores want them; True of other operators.

    Rows are those of whole tensors, however they are split later.
    """
    if node.op_class not in (OpClass.GEMM, OpClass.GROUPED_GEMM):
        return True
    shapes = (node.shape, *(_operand(operand, graph).shape for operand in node.operands))
    return all(shape[-1] % TENSOR_CORE_ELEMENTS == 0 for shape in shapes if len(shape) > 1)


def num_scores(node: Node, graph: ModelGraph) -> float:
    """Elements of the score matrix of an attention operator: batch · heads · queries · keys."""
    keys = next((graph.nodes[o].shape[-2] for o in node.operands[1:2] if isinstance(o, int)), node.shape[-2])
    return prod(node.shape[:-1]) * keys


def num_heads(graph: ModelGraph) -> int:
    """The greatest number that divides the heads of queries, keys and values of every attention; 1 without any."""
    operands = [
        graph.nodes[operand].shape
        for node in graph.nodes
        if node.op_class is OpClass.ATTENTION
        for operand in node.operands[:3]
        if isinstance(operand, int)
    ]
    heads = [shape[-3] if len(shape) > 3 else 1 for shape in operands]  # (batch, heads, positions, width)
    return gcd(*heads) if heads else 1


def mixes_positions_outside_attention(graph: ModelGraph) -> bool:
    """Whether an operator besides attention looks along the sequence, so that the sequence cannot be split."""
    return any(
        node.batch_dependent and node.dtype in FLOATING and operator_of(node.op).has(Trait.MIXES_POSITIONS)
        for node in graph.nodes
    )


def _operand(operand: int | str | None, graph: ModelGraph) -> Operand:
    if operand is None:
        return Operand((), is_parameter=False)
    if isinstance(operand, str):
        parameter = graph.parameter_of.get(operand)
        return Operand(() if parameter is None else parameter.shape, is_parameter=True)
    return Operand(graph.nodes[operand].shape, is_parameter=False)
