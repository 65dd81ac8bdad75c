"""Groups of unlike devices: pipelines over them, each of which holds whole pipeline ranks, in some order of the groups.

Nothing of a unit changes: it is priced on each group's devices. So it is where the groups have shares of the batch,
which ``space.shares`` lists.
"""

from __future__ import annotations

from itertools import accumulate, islice, permutations
from typing import ClassVar, NamedTuple

from hardware_profiles.schema import ClusterSpec, DeviceGroup
from planner.axes.base import Axis, Executed
from planner.layout.columns import Columns
from planner.layout.layout import Layout

MAX_ORDERS = 24  # every order of four groups; of more, the first ones
ORDER_WARNING = "nodes must be started in the order of the"


class _PipelineKey(NamedTuple):
    pp: int


class UnlikeDevicesAxis(Axis[None]):
    """The order of the groups along the ranks."""

    name: ClassVar[str] = "groups"

    def unexecuted(self, run: Executed) -> list[str]:
        """It is executed where nodes are started in the order of the groups."""
        layout, cluster = run.layout, run.cluster
        if not layout.groups or cluster.mixed is None:
            return []
        sizes = {group.name: group.cluster.num_devices for group in cluster.mixed.groups}
        ends = list(accumulate(sizes[name] for name in layout.groups))
        spans = zip(layout.groups, [0, *ends], ends, strict=False)
        order = ", ".join(f"ranks {start} to {end - 1} on {name}" for name, start, end in spans)
        of = "shares of the batch" if layout.shares else "pipeline"
        return [f"{ORDER_WARNING} {of}: {order}"]


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
    if not layout.groups or cluster.mixed is None or pp == 1:
        return (None,) * pp
    each = cluster.num_devices // pp
    sizes = {group.name: group.cluster.num_devices // each for group in cluster.mixed.groups}
    return tuple(name for name in layout.groups for _ in range(sizes[name]))
