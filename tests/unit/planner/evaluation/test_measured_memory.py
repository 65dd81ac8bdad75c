from types import SimpleNamespace
from typing import Any, cast

import pytest

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.vocabulary.terms import MemoryTerm, Phase
from planner.evaluation.measured_memory import memory_as_measured

LEDGER = MemoryLedger(
    ((MemoryTerm.ACTIVATIONS, 40.0), (MemoryTerm.WAITING_COLLECTIVES, 50.0), (MemoryTerm.CONTEXT, 2.0))
)


def seen(kind: str, room: float) -> float:
    """What a measurement of ``kind`` sees of LEDGER on a device of ``room``."""
    ranks = (RankMemory(((Phase.BACKWARD, LEDGER),)),)
    return memory_as_measured(cast(Any, SimpleNamespace(memory=ranks, capacity_bytes=(room,))), kind, "worst")


@pytest.mark.parametrize(
    ("room", "allocated", "reserved", "device"),
    [
        (100.0, 40, 90, 92),  # all of it fits
        (80.0, 40, 78, 80),  # of 50 that wait 12 are given back
        (30.0, 40, 40, 42),  # tensors alone need more than there is
    ],
)
def test_the_allocator_gives_unused_memory_back_before_the_device_is_full(
    room: float, allocated: float, reserved: float, device: float
) -> None:
    assert [seen(kind, room) for kind in ("allocated", "reserved", "device")] == [allocated, reserved, device]
