"""Sizes of a model that tensor cores do not take well, in words for its owner.

Tensor cores multiply 16-bit matrices whose rows are multiples of 16 bytes, so of 8 elements; others are slower (NVIDIA,
"Matrix Multiplication Background User's Guide", section "Requirements to Use Tensor Cores").
"""

from __future__ import annotations

from collections.abc import Iterator

from hardware_profiles.vocabulary import OpClass
from planner.graph.model_graph import ModelGraph
from planner.graph.node_operators import TENSOR_CORE_ELEMENTS, are_heads_aligned

MOST_NAMES = 3  # of parameters in one sentence
LEAST_SHARE = 0.01  # of all multiplied weights: a router or a small head is not worth a word


def alignment_warnings(graph: ModelGraph, *, are_products_priced: bool = True) -> tuple[str, ...]:
    """One sentence a size: widths of attention heads, and sides of weights where these cost something."""
    return (*_of_heads(graph), *(_of_weights(graph) if are_products_priced else ()))


def _of_heads(graph: ModelGraph) -> Iterator[str]:
    attention = [node for node in graph.nodes if node.op_class is OpClass.ATTENTION]
    unaligned = (node.shape[-1] for node in attention if not are_heads_aligned(node, graph))
    for width in sorted(set(unaligned)):
        yield (
            f"attention heads are {width} wide, which is no multiple of {TENSOR_CORE_ELEMENTS}: without a fused kernel "
            f"their products run without tensor cores, and are priced so; {_next(width)} would be quicker"
        )


def _of_weights(graph: ModelGraph) -> Iterator[str]:
    names: dict[int, list[str]] = {}
    multiplied = {
        operand
        for node in graph.nodes
        if node.op_class in (OpClass.GEMM, OpClass.GROUPED_GEMM)
        for operand in node.operands
        if isinstance(operand, str)
    }
    weights = [
        parameter
        for parameter in graph.parameters
        if len(parameter.shape) > 1 and multiplied.intersection(parameter.names)
    ]
    least = LEAST_SHARE * sum(parameter.num_elements for parameter in weights)
    for parameter in weights:
        if parameter.num_elements >= least:
            sides = parameter.shape[-2:]  # what is before them counts matrices, as those of experts
            for side in {size for size in sides if size % TENSOR_CORE_ELEMENTS}:
                names.setdefault(side, []).append(parameter.fqn)
    for side, owners in sorted(names.items()):
        more = f" and {len(owners) - MOST_NAMES} more" if len(owners) > MOST_NAMES else ""
        yield (
            f"{', '.join(owners[:MOST_NAMES])}{more}: a side of {side} is no multiple of {TENSOR_CORE_ELEMENTS}; "
            f"16-bit products take three times as long for it, and are priced so; pad it to {_next(side)}"
        )


def _next(size: int) -> int:
    return -(-size // TENSOR_CORE_ELEMENTS) * TENSOR_CORE_ELEMENTS
