"""Offloading: optimiser states lie in host memory or on NVMe, and the host updates them.

Nothing of a unit's work changes; what the host holds and how long it takes follows from numbers of elements.
"""

from __future__ import annotations

from typing import ClassVar

from costmodels.offload import missing_facts
from hardware_profiles.schema import ClusterSpec
from planner.axes.base import Asked, Axis, Executed
from planner.parallelism import Offload


class OffloadAxis(Axis[None]):
    """Only where it is asked for."""

    name: ClassVar[str] = "offload"

    def unexecuted(self, run: Executed) -> list[str]:
        """Only planned for, as yet."""
        offload = run.layout.offload
        if offload is Offload.NONE:
            return []
        return [
            f"planner run does not execute offloading yet (offload={offload.value}): pin --offload none to "
            "train with it"
        ]


OFFLOAD = OffloadAxis()


def offload_of(asked: Asked) -> Offload:
    """The user's choice: without one, states stay on the devices."""
    return asked.pins.offload or Offload.NONE


def unpriced_offload(cluster: ClusterSpec, offload: Offload) -> str | None:
    """Why ``offload`` has no price on ``cluster``; None where it has one."""
    if offload is Offload.NONE:
        return None
    if cluster.mixed is not None:
        return "offloading has no price on clusters of several kinds of nodes"
    missing = missing_facts(cluster.profile.node, uses_nvme=offload is Offload.NVME)
    names = ", ".join(f"node.{name}" for name in missing)
    return f"the profile of {cluster.profile.name} does not say {names}" if missing else None
