"""Every operator that planning knows, and the one way to find its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from planner.operators.collectives import COLLECTIVES
from planner.operators.elementwise import ELEMENTWISE, ELEMENTWISE_REPLICATED
from planner.operators.moves import MOVES, ROWS, VIEWS
from planner.operators.products import PRODUCTS
from planner.operators.record import UNKNOWN, Operator, Trait
from planner.operators.reductions import LOSSES, NORMS, REDUCTIONS
from planner.operators.sources import CONSTANTS, QUESTIONS

OPERATORS: tuple[Operator, ...] = (
    *PRODUCTS,
    *ELEMENTWISE,
    *ELEMENTWISE_REPLICATED,
    *VIEWS,
    *MOVES,
    *ROWS,
    *REDUCTIONS,
    *NORMS,
    *LOSSES,
    *CONSTANTS,
    *QUESTIONS,
    *COLLECTIVES,
)


def operator_called(name: str) -> Operator:
    """The record of ``linear`` or ``relu``; ``UNKNOWN`` where there is none."""
    return _BY_NAME.get(name, UNKNOWN)


@cache
def operator_of(op: str) -> Operator:
    """The record of ``aten.relu_.default``, as nodes of a graph name it."""
    return operator_called(base_of(op_name(op)))


def op_name(op: str) -> str:
    """``aten.linear.default`` -> ``linear``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def base_of(name: str) -> str:
    """``relu`` for ``relu_``: the operator, whether it writes to an operand or not."""
    is_mutating = name.endswith("_") and not name.endswith("__") and name != "detach_"
    return name[:-1] if is_mutating else name


def names_with(trait: Trait) -> frozenset[str]:
    """Names of all operators that are that."""
    return frozenset(name for operator in OPERATORS if operator.has(trait) for name in operator.names)


def kept_by_selective_recomputation() -> frozenset[str]:
    """Torch operators (``aten.mm``, whatever the overload) whose results a selective checkpoint keeps."""
    return frozenset(name for operator in OPERATORS for name in operator.kept_as)


def _by_name(operators: Iterable[Operator]) -> Mapping[str, Operator]:
    found: dict[str, Operator] = {}
    for operator in operators:
        for name in operator.names:
            assert name not in found, f"{name} has two records"
            found[name] = operator
    return found


_BY_NAME = _by_name(OPERATORS)
