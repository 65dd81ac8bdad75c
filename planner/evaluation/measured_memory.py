"""Peak memory as a measurement sees it: only of tensors, of all that the allocator holds, or of the whole device."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.ledger import MemoryLedger, RankMemory


def memory_as_measured(ranks: Sequence[RankMemory], kind: str, of: str) -> float:
    """Peak of the ``first``, ``last`` or ``worst`` rank, as a measurement of ``kind`` sees it; all where not known."""

    def seen(ledger: MemoryLedger) -> float:
        by_kind = {"allocated": ledger.allocated_bytes, "reserved": ledger.reserved_bytes}
        return by_kind.get(kind, ledger.total_bytes)

    measured = {"first": ranks[:1], "last": ranks[-1:]}.get(of, ranks)
    return max(seen(ledger) for rank in measured for _, ledger in rank.phases)
