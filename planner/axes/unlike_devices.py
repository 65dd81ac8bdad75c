"""Pipelines over groups of unlike devices: each group holds whole pipeline ranks, in some order of the groups.

Nothing of a unit changes: it is priced on each group's devices.
"""

from __future__ import annotations

from itertools import groupby, islice, permutations
from typing import ClassVar, NamedTuple

from hardware_profiles.schema import ClusterSpec, DeviceGroup
from planner.axes.base import Axis, Executed
from planner.layout.columns import Columns
from planner.layout.layout import Layout

MAX_ORDERS = 24  # every order of four groups; of more, the first ones


class _PipelineKey(NamedTuple):
    pp: int


class UnlikeDevicesAxis(Axis[None]):
    """The order of the groups along the pipeline."""

    name: ClassVar[str] = "groups"

    def unexecuted(self, run: Executed) -> list[str]:
        """It is executed where nodes are started in the order of the pipeline."""
        layout, cluster = run.layout, run.cluster
        if not layout.groups:
            return []
        each = cluster.num_devices // layout.mesh.pp
        places = enumerate(group_of_ranks(layout, cluster))
        ranks = {name: [rank for rank, _ in found] for name, found in groupby(places, key=lambda place: place[1])}
        order = ", ".join(f"ranks {r[0] * each} to {(r[-1] + 1) * each - 1} on {name}" for name, r in ranks.items())
        return [f"nodes must be started in the order of the pipeline: {order}"]


UNLIKE_DEVICES = UnlikeDevicesAxis()


def over_groups(layouts: Columns[Layout], groups: tuple[DeviceGroup, ...]) -> Columns[Layout]:
    """Those of ``layouts`` whose pipeline ranks each lie in one group, over every order of the groups.

    All ranks of a pipeline have the same number of devices, so each group must hold a whole number of them.
    """
    counts = [group.cluster.num_devices for group in groups]

    def fits(key: _PipelineKey) -> bool:
        return key.pp > 1 and all(count % (sum(counts) // key.pp) == 0 for count in counts)

    orders = islice(permutations(group.name for group in groups), MAX_ORDERS)
    return layouts.where(_PipelineKey, fits).with_each("groups", list(orders))


def group_of_ranks(layout: Layout, cluster: ClusterSpec) -> tuple[str | None, ...]:
    """The group of unlike devices of each pipeline rank; None where all count as alike."""
    pp = layout.mesh.pp
    if not layout.groups or cluster.mixed is None:
        return (None,) * pp
    each = cluster.num_devices // pp
    sizes = {group.name: group.cluster.num_devices // each for group in cluster.mixed.groups}
    return tuple(name for name in layout.groups for _ in range(sizes[name]))
