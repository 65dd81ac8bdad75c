"""The modes of a block: what it recomputes, and whether what it keeps lies in host memory between its two passes.

The cost table knows modes of recomputation alone. On the host a block holds, of the same mode, nothing from forward to
backward; what it would have kept is copied away and back. Units that are no blocks are the same in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.choices import BlockMode, KeptOnHost, Recompute
from costmodels.vocabulary.terms import PLACE, Holding
from planner.layout.columns import Array, Positions
from planner.table.cost_table import CostTable

ALL_MODES: Sequence[BlockMode] = (*Recompute, *KeptOnHost)
MODES: Mapping[BlockMode, int] = {mode: place for place, mode in enumerate(ALL_MODES)}
"""The place of each mode: first those of recomputation, as on the axis of the cost table's arrays."""


def places_of_modes(recompute: Recompute | None, *, offloads_activations: bool) -> list[int]:
    """Modes that every block may take, the one of least time first; ``recompute``: what all recompute, None: any."""
    kept = list(Recompute) if recompute is None else [recompute]
    on_host = [KeptOnHost[mode.name] for mode in kept] if offloads_activations else []
    return [MODES[mode] for mode in (*kept, *on_host)]


def in_table(places: Positions) -> Positions:
    """Places of the same recomputation on the cost table's axis of modes."""
    return places % len(Recompute)


def is_on_host(places: Positions) -> NDArray[np.bool]:
    """Which of the modes keep activations in host memory."""
    return places >= len(Recompute)


def held_bytes(table: CostTable, work: Positions, places: Positions) -> Array:
    """What kinds of units hold on the device, [rows, kinds, Holding]: of rows of work and a mode for each."""
    found = table.num_bytes[work, in_table(places)]
    offloads = is_on_host(places)
    if offloads.any():
        found[..., PLACE[Holding.KEPT]] *= ~(offloads[:, None] & _of_blocks(table))
    return found


def bytes_on_host(table: CostTable, work: Positions, places: Positions) -> Array:
    """What kinds of units keep of one micro-batch in host memory, [rows, kinds]."""
    kept = table.num_bytes[work, in_table(places)][..., PLACE[Holding.KEPT]]
    return kept * (is_on_host(places)[:, None] & _of_blocks(table))


def _of_blocks(table: CostTable) -> NDArray[np.bool]:
    """Which kinds of units are blocks."""
    found = np.zeros(len(table.counts), dtype=bool)
    found[list(table.units.kinds)] = table.units.is_block
    return found
