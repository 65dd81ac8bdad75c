"""What an axis of parallelism is: a choice that a layout makes, and what it does to every rank's part of the model."""

from __future__ import annotations

from abc import ABC
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

from hardware_profiles.schema import ClusterSpec
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, RankStates, RankWork
from planner.graph.model_graph import ModelGraph
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.table.keys import DataKey, WorkKey

if TYPE_CHECKING:
    from planner.axes.placement import UnitPlacement

OwnT = TypeVar("OwnT", bound=Hashable)


class Asked(NamedTuple):
    """What is trained, what the user fixed, and what model and cluster allow."""

    training: Training
    pins: Pins
    limits: Limits


class Executed(NamedTuple):
    """A layout that shall be executed, and what besides it decides whether it can be."""

    layout: Layout
    graph: ModelGraph
    cluster: ClusterSpec


class Axis(ABC, Generic[OwnT]):
    """One axis of parallelism. A method that it does not override changes nothing.

    ``work_fields`` and ``state_fields`` pick the fields of a key that the passes read. The passes are given these and
    nothing else of the key, so one result serves all keys in which these fields are equal.
    """

    name: ClassVar[str]

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """Degrees that divide the ``left`` devices, or ranks, which axes chosen before leave; [1]: none of its own."""
        return [1]

    def violations(self, asked: Asked) -> list[str]:
        """Each rule that the pins of this axis break by themselves, with its values."""
        return []

    def work_fields(self, key: WorkKey) -> OwnT | None:
        """What the pass over work reads of ``key``; None where it leaves everything as it is."""
        return None

    def state_fields(self, key: DataKey) -> OwnT | None:
        """What the pass over states, and their collectives, read of ``key``; None where there are neither."""
        return None

    def work(self, work: RankWork, own: OwnT, placement: UnitPlacement, framework: Framework) -> RankWork:
        """One rank's part of ``work``."""
        return work

    def states(self, states: RankStates, own: OwnT, placement: UnitPlacement) -> RankStates:
        """One rank's part of ``states``."""
        return states

    def state_collectives(self, own: OwnT, framework: Framework) -> tuple[Collective, ...]:
        """What moves states between ranks in a step, the same for every unit."""
        return ()

    def unexecuted(self, run: Executed) -> list[str]:
        """Why ``planner run`` would refuse the layout, and the pin that avoids it; or what to heed."""
        return []


def divisors(n: int) -> list[int]:
    """Divisors of ``n``, ascending."""
    return list(_divisors(n))


@lru_cache(maxsize=4096)
def _divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def pinned_degrees(left: int, pin: int | None, allowed: list[int]) -> list[int]:
    """The pin where it divides ``left``, or else the degrees that are allowed."""
    if pin is not None:
        return [pin] if pin >= 1 and left % pin == 0 else []
    return allowed


def undivided(name: str, pin: int | None, num_devices: int) -> list[str]:
    """What is wrong with a pinned degree that must divide the devices."""
    if pin is None or (pin >= 1 and num_devices % pin == 0):
        return []
    return [f"{name}={pin} does not divide the {num_devices} GPUs; allowed: {listed(divisors(num_devices))}"]


def listed(degrees: list[int]) -> str:
    """``1, 2, 4`` for messages."""
    return ", ".join(map(str, degrees))
