"""What a rank takes besides tensors: the allocator's reserve, communicators and the context."""

from __future__ import annotations

from dataclasses import replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from costmodels.ledger import MemoryLedger, SoftwareBytes
from costmodels.vocabulary.mesh import Group, Mesh
from planner.layout.columns import Array
from planner.table.cost_table import CostTable


@overload
def reserve_fraction(table: CostTable, mixes_lifetimes: bool) -> float: ...


@overload
def reserve_fraction(table: CostTable, mixes_lifetimes: NDArray[np.bool]) -> Array: ...


def reserve_fraction(table: CostTable, mixes_lifetimes: bool | NDArray[np.bool]) -> float | Array:
    """Share of the tensors that come and go which the allocator loses to gaps between them.

    It is smaller where every micro-batch allocates and frees the same tensors in the same order: no pipeline keeps
    several micro-batches in flight, and no collective splits or gathers activations.
    """
    share = np.where(mixes_lifetimes, 1.0, table.framework.plain_reserve)
    found = table.cluster.software.reserve_fraction * share
    return found if found.ndim else float(found)


def outside_bytes(table: CostTable, mesh: Mesh, mixes_lifetimes: bool) -> float:
    """What a rank of a mesh takes that holds nothing: communicators and the context."""
    ledger = MemoryLedger().with_reserve(software_bytes(table, mixes_lifetimes), num_communicators(table, mesh))
    return ledger.total_bytes


def num_communicators(table: CostTable, mesh: Mesh) -> float:
    """Process groups of more than one rank."""
    groups = [Group.PIPELINE, Group.REPLICATE, Group.SHARD, Group.CONTEXT, Group.TENSOR]
    if mesh.ep > 1:
        groups += [Group.EXPERT, Group.EXPERT_SHARD]
    axes = sum(mesh.group(group).num_ranks > 1 for group in groups)
    return axes + table.framework.extra_communicators * (axes > 0)


def software_bytes(table: CostTable, mixes_lifetimes: bool) -> SoftwareBytes:
    """What the software takes, its allocator's reserve as a layout makes it."""
    return replace(table.cluster.software, reserve_fraction=reserve_fraction(table, mixes_lifetimes))
