"""The structure of a piece of the graph as a value: equal for pieces with the same operators and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph.model_graph import Node, Parameter
from planner.operators.call import AttributeValue

Signature = tuple[object, ...]
# Arguments of operators that are numbers to compute with, whole ones too: others are places, sizes and counts.
FACTORS = frozenset(("other", "alpha", "beta", "value"))


def signature_of(
    node_ids: Sequence[int], nodes: Sequence[Node], parameters: Mapping[str, Parameter], prefix: str
) -> Signature:
    """Operators, shapes and wiring of ``node_ids``; names count only relative to module ``prefix``."""
    position = {node_id: index for index, node_id in enumerate(node_ids)}
    outside: dict[int, int] = {}

    def operand(value: int | str | None) -> object:
        if isinstance(value, str):
            parameter = parameters[value]
            return relative(value, prefix), parameter.shape, parameter.dtype, parameter.trainable
        if value is None or value in position:
            return value if value is None else position[value]
        ordinal = outside.setdefault(value, len(outside))
        return "outside", ordinal, nodes[value].shape, nodes[value].dtype, nodes[value].requires_grad

    return tuple(
        (
            nodes[node_id].op,
            relative(nodes[node_id].module, prefix),
            nodes[node_id].shape,
            nodes[node_id].dtype,
            nodes[node_id].requires_grad,
            nodes[node_id].saved_extra_bytes,
            tuple((name, _as_priced(name, value)) for name, value in nodes[node_id].attributes.items()),
            tuple(operand(value) for value in nodes[node_id].operands),
        )
        for node_id in node_ids
    )


def _as_priced(name: str, value: AttributeValue) -> object:
    """An argument as far as an operator's work may depend on it: numbers it computes with are as good as each other.

    So blocks that scale by their number, as GPT-2 and differential attention may, are blocks of one kind. What is
    nothing stays apart: a dropout of 0 drops nothing.
    """
    is_factor = isinstance(value, float) or (name in FACTORS and isinstance(value, int) and not isinstance(value, bool))
    return (type(value), value == 0) if is_factor else value


def relative(name: str, prefix: str) -> str:
    """``name`` as seen from module ``prefix``, or as it is where it lies outside."""
    if prefix and (name == prefix or name.startswith(prefix + ".")):
        return "." + name[len(prefix) :]
    return name
