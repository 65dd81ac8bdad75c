"""What the cost models price: operator workloads and collectives, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hardware_profiles.vocabulary import CollectiveKind, OpClass


@dataclass(frozen=True)
class OpWorkload:
    """One or more kernels on one device. ``num_bytes`` counts reads and writes of device memory."""

    op_class: OpClass
    flops: float
    num_bytes: float
    num_kernels: int = 1


@dataclass(frozen=True)
class GroupPlacement:
    """Where the ranks of one communication group sit.

    ``stride`` is the distance in device numbers between neighbouring ranks of the group: 1 for
    the innermost mesh axis. Every group along the same axis communicates at the same time.
    """

    num_ranks: int
    stride: int


@dataclass(frozen=True)
class Collective:
    """One collective over one group.

    ``num_bytes`` is the size of the whole tensor: the reduced tensor for all-reduce, the gathered
    one for all-gather, the input of reduce-scatter, one rank's full send buffer for all-to-all,
    the message for send-recv and a ring shift.
    """

    kind: CollectiveKind
    num_bytes: float
    group: GroupPlacement
