"""The vocabulary's layers shared by all pipeline stages, in place of the embedding on the first, the head on the last.

Each of p stages holds 1 / p of the embedding, the head and the loss, and works on its part in every micro-batch, so all
stages do the same. What lies before, between and behind the blocks becomes one unit, a p-th part of which stands behind
the blocks of every stage. The stages exchange a micro-batch's last activations and the gradients of these. Beside
other micro-batches' passes that costs no time, but as many more micro-batches are in flight as there are barriers.
Interlaced passes wait for it, and hold half as many again.

Source: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism" (2024), sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from costmodels.vocabulary.terms import PLACE, Holding, Time
from planner.layout.columns import Array
from planner.table.cost_table import CostTable


class VocabularySharing(StrEnum):
    """Who holds the vocabulary's layers."""

    ENDS = "none"  # the embedding on the first stage, the head on the last
    TWO_BARRIERS = "vocab-1"
    ONE_BARRIER = "vocab-2"
    INTERLACED = "interlaced"

    def in_flight(self, num_stages: int) -> float:
        """Micro-batches in flight on the first of ``num_stages`` stages under 1F1B, over those without sharing."""
        match self:
            case VocabularySharing.ENDS:
                return 1.0
            case VocabularySharing.TWO_BARRIERS:
                return (num_stages + 2) / num_stages
            case VocabularySharing.ONE_BARRIER:
                return (num_stages + 1) / num_stages
            case VocabularySharing.INTERLACED:
                return 1.5


def with_shared_vocabulary(
    table: CostTable, num_stages: int, sharing: VocabularySharing, exchange_s: float
) -> tuple[CostTable, tuple[int, ...]]:
    """``table`` with the units of stages that share the vocabulary, and the first unit of each stage.

    ``exchange_s``: of one exchange among the stages, forward or backward, which only interlaced passes wait for.
    ValueError where the blocks cannot be divided evenly.
    """
    blocks = [unit for unit, is_block in enumerate(table.units.is_block) if is_block]
    if len(blocks) % num_stages:
        raise ValueError(f"{len(blocks)} blocks cannot be divided evenly over {num_stages} stages")
    each = len(blocks) // num_stages
    shared = table.counts.size  # the place of the new kind
    order = [unit for start in range(0, len(blocks), each) for unit in (*blocks[start : start + each], None)]
    units = replace(
        table.units,
        kinds=tuple(shared if unit is None else table.units.kinds[unit] for unit in order),
        names=tuple("vocabulary" if unit is None else table.units.names[unit] for unit in order),
        is_block=tuple(unit is not None for unit in order),
    )
    ends = [table.units.kinds[unit] for unit, is_block in enumerate(table.units.is_block) if not is_block]

    def with_part(array: Array) -> Array:
        """One stage's part of the ends, added on the axis of kinds, the last but one."""
        part = array[..., ends, :].sum(axis=-2, keepdims=True) / num_stages
        return np.concatenate([array, part], axis=-2)

    time_s, num_bytes = with_part(table.time_s), with_part(table.num_bytes)
    if sharing is VocabularySharing.INTERLACED:
        time_s[..., shared, [PLACE[Time.TENSOR_FORWARD], PLACE[Time.TENSOR_BACKWARD]]] += exchange_s
    num_bytes[..., PLACE[Holding.KEPT]] *= sharing.in_flight(num_stages)
    found = replace(
        table,
        units=units,
        time_s=time_s,
        num_bytes=num_bytes,
        data_s=with_part(table.data_s),
        elements=with_part(table.elements),
    )
    return found, tuple(range(0, len(order), each + 1))
