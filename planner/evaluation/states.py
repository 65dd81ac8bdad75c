"""Elements that a rank works with and updates, and the bytes of their states."""

from __future__ import annotations

from typing import overload

from costmodels.ledger import StateBytes
from costmodels.vocabulary.mesh import ZERO_STAGES
from planner.layout.columns import Array
from planner.layout.layout import Layout
from planner.table.cost_table import KindOfElement


@overload
def held_elements(elements: float, experts: float, parts: float) -> float: ...


@overload
def held_elements(elements: Array, experts: Array, parts: Array) -> Array: ...


def held_elements(elements: float | Array, experts: float | Array, parts: float | Array) -> float | Array:
    """Of ``elements`` with all ``experts`` among them, those that a rank with one of so many parts works with."""
    return elements - experts * (1 - 1 / parts)


@overload
def num_updated(layout: Layout, trainable: float, experts: float) -> float: ...


@overload
def num_updated(layout: Layout, trainable: Array, experts: Array) -> Array: ...


def num_updated(layout: Layout, trainable: float | Array, experts: float | Array) -> float | Array:
    """Elements that one rank's optimiser updates, of so many that a tp rank trains, experts' among them.

    ZeRO divides dense ones over all its ranks, and a rank's experts over those with the same: each rank gets as many.
    """
    if ZERO_STAGES[layout.zero_stage].shards_optimizer:
        return trainable / layout.mesh.num_shards
    return trainable - experts * (1 - 1 / layout.mesh.expert_parts)


def state_bytes(row: Array, trainable: float, frozen: float, experts: float) -> StateBytes:
    """Bytes of states that one rank holds for so many elements of a tp rank; ``row``: of the table's ``state_bytes``.

    ``experts``: of the trainable ones, those that expert parallelism divides.
    """
    kinds = KindOfElement
    total = (trainable - experts) * row[kinds.DENSE] + frozen * row[kinds.FROZEN] + experts * row[kinds.EXPERT]
    return StateBytes(*total.tolist())
