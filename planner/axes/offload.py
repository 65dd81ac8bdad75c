"""Offloading: optimiser states lie in host memory or on NVMe, and the host updates them.

Nothing of a unit's work changes; what the host holds and how long it takes follows from numbers of elements.
"""

from __future__ import annotations

from typing import ClassVar

from costmodels.vocabulary.choices import Offload
from planner.axes.base import Asked, Axis, Executed


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
