"""Offloading: optimiser states lie in host memory or on NVMe, and the host updates them; activations in host memory.

Nothing of a unit's work changes. What the host holds of states, and how long it takes, follows from numbers of
elements; what it holds of a block's activations is what the block keeps on the device otherwise.
"""

from __future__ import annotations

from typing import ClassVar

from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import ScheduleName
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


def activations_may_leave(asked: Asked, schedule: ScheduleName) -> bool:
    """Whether blocks may keep activations in host memory: where it is asked for, under whole backward passes."""
    return bool(asked.pins.offload_activations) and not schedule.rules.splits_backward


def offload_of(asked: Asked) -> Offload:
    """The user's choice: without one, states stay on the devices."""
    return asked.pins.offload or Offload.NONE
