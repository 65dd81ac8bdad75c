"""Peak memory as a measurement sees it: only of tensors, of all that the allocator holds, or of the whole device."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.ledger import MemoryLedger, RankMemory


def memory_as_measured(ranks: Sequence[RankMemory], kind: str, *, on_first_rank: bool) -> float:
    """Peak of the first rank or else of the worst, as a measurement of ``kind`` sees it; all of it where not known."""

    def seen(ledger: MemoryLedger) -> float:
        by_kind = {"allocated": ledger.allocated_bytes, "reserved": ledger.reserved_bytes}
        return by_kind.get(kind, ledger.total_bytes)

    measured = ranks[:1] if on_first_rank else ranks
    return max(seen(ledger) for rank in measured for _, ledger in rank.phases)
