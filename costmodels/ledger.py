"""The ledger of everything that one rank holds, term by term, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.vocabulary.terms import Counted, MemoryTerm, Phase

Rows = tuple[tuple[MemoryTerm, float], ...]


@dataclass(frozen=True)
class SoftwareBytes:
    """Memory that the software takes besides tensors."""

    reserve_fraction: float  # of tensors that come and go in a step, lost to gaps between them
    communicator_bytes: float  # each
    context_bytes: float
    workspace_bytes: float = 0.0  # tensors of libraries and framework, whatever the layout


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank; ``optimizer`` holds the fp32 master copy and, from the first step on, the moments."""

    parameters: float
    gradients: float
    optimizer: float
    moments: float = 0.0  # of ``optimizer``

    @property
    def before_first_step(self) -> StateBytes:
        """The same before the optimiser has made its moments."""
        return replace(self, optimizer=self.optimizer - self.moments, moments=0.0)

    def plus(self, other: StateBytes) -> StateBytes:
        """Both together."""
        return StateBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.moments + other.moments,
        )

    @property
    def total(self) -> float:
        """All three together."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class MemoryLedger:
    """What one rank holds at one moment: one row a term, in bytes, in the order they were added."""

    rows: Rows = ()

    @property
    def total_bytes(self) -> float:
        """Sum of all rows: what the device has to have."""
        return sum([num_bytes for _, num_bytes in self.rows])

    @property
    def reserved_bytes(self) -> float:
        """What the caching allocator holds."""
        return sum(num_bytes for name, num_bytes in self.rows if name.counted is not Counted.OUTSIDE)

    @property
    def allocated_bytes(self) -> float:
        """What lies in tensors."""
        return sum(num_bytes for name, num_bytes in self.rows if name.counted is Counted.ALLOCATED)

    def bytes_of(self, name: MemoryTerm) -> float:
        """The row ``name``; 0 if there is none."""
        return sum(num_bytes for row, num_bytes in self.rows if row == name)

    def plus(self, name: MemoryTerm, num_bytes: float) -> MemoryLedger:
        """This ledger and one more row. ValueError if the row exists or is negative."""
        return self._with((name, num_bytes))

    def with_reserve(
        self, software: SoftwareBytes, num_communicators: float, *, waiting: float = 0.0, stranded: float = 0.0
    ) -> MemoryLedger:
        """This ledger and what the software takes besides tensors.

        ``waiting`` and ``stranded``: bytes that were freed, yet cannot be reused now: those that collectives are not
        done with, and those too small for what is allocated next. ``allocator_reserve`` is a share of the tensors that
        come and go in a step (other fragmentation of the caching allocator); ``communicators`` and ``context`` are
        allocated outside it.
        """
        passing = sum([num_bytes for name, num_bytes in self.rows if not name.is_lasting])
        rows = (
            (MemoryTerm.WAITING_COLLECTIVES, waiting),
            (MemoryTerm.STRANDED_COPIES, stranded),
            (MemoryTerm.ALLOCATOR_RESERVE, passing * software.reserve_fraction),
            (MemoryTerm.COMMUNICATORS, num_communicators * software.communicator_bytes),
            (MemoryTerm.CONTEXT, software.context_bytes),
        )
        workspace = (MemoryTerm.WORKSPACE, software.workspace_bytes)
        return self._with(*rows, *([workspace] if software.workspace_bytes else []))

    def _with(self, *more: tuple[MemoryTerm, float]) -> MemoryLedger:
        names = [name for name, _ in self.rows]
        for name, num_bytes in more:
            if num_bytes < 0:
                raise ValueError(f"memory of {name} must not be negative, got {num_bytes}")
            if name in names:
                raise ValueError(f"the ledger already has a row {name}")
            names.append(name)
        return MemoryLedger((*self.rows, *more))


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank in every phase of training."""

    phases: tuple[tuple[Phase, MemoryLedger], ...]

    @property
    def peak(self) -> MemoryLedger:
        """The ledger of the phase that needs most of the device."""
        return max((ledger for _, ledger in self.phases), key=lambda ledger: ledger.total_bytes)

    def ledger(self, phase: Phase) -> MemoryLedger:
        """The ledger of ``phase``."""
        return dict(self.phases)[phase]
