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
        """Everything is, but not all as it is priced."""
        layout, found = run.layout, list[str]()
        if layout.offload is not Offload.NONE and layout.zero_stage == 3:
            found.append(
                "planner run keeps the shards of parameters in host memory too and copies them to the device "
                "whenever it gathers them: it needs less device memory than predicted, and more time"
            )
        if layout.offload is Offload.NVME:
            found.append(
                "planner run keeps moments on NVMe and the master copy in host memory, which needs more of that than "
                "predicted"
            )
        if run.layout.offloads_activations:
            found.append(
                "planner run copies activations to the host and back in turn with the computation, not beside it as "
                "predicted: where blocks offload it is slower by the time of these copies"
            )
        return found


OFFLOAD = OffloadAxis()


def activations_may_leave(asked: Asked, schedule: ScheduleName) -> bool:
    """Whether blocks may keep activations in host memory: where it is asked for, under whole backward passes."""
    return bool(asked.pins.offload_activations) and not schedule.rules.splits_backward


def offload_of(asked: Asked) -> Offload:
    """The user's choice: without one, states stay on the devices."""
    return asked.pins.offload or Offload.NONE
