"""Peak memory as a measurement sees it: only of tensors, of all that the allocator holds, or of the whole device.

A run that was measured stayed within its device. Before PyTorch's allocator fails it waits for what collectives still
use and gives all that it holds unused back (c10/cuda/CUDACachingAllocator.cpp, ``release_cached_blocks``). So it never
holds more than the device has besides, unless tensors alone need more.
"""

from __future__ import annotations

from costmodels.ledger import MemoryLedger
from planner.evaluation.evaluator import Evaluated


def memory_as_measured(priced: Evaluated, kind: str, of: str) -> float:
    """Peak of the ``first``, ``last`` or ``worst`` rank, as a measurement of ``kind`` sees it; all where not known."""

    def seen(ledger: MemoryLedger, room: float) -> float:
        allocated, outside = ledger.allocated_bytes, ledger.total_bytes - ledger.reserved_bytes
        reserved = max(allocated, min(ledger.reserved_bytes, room - outside))
        return {"allocated": allocated, "reserved": reserved}.get(kind, reserved + outside)

    ranks = list(zip(priced.memory, priced.capacity_bytes, strict=True))
    measured = {"first": ranks[:1], "last": ranks[-1:]}.get(of, ranks)
    return max(seen(ledger, room) for rank, room in measured for _, ledger in rank.phases)
