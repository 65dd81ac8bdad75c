"""What was timed on a machine or cluster, as plain values: the profile and the diagnosis are made from these alone."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hardware_profiles.schema import CollectiveName, DTypeName, OpClassName


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OpTiming(_Value):
    """One operator at one size on one device."""

    op_class: OpClassName
    dtype: DTypeName
    shape: str
    flops: float
    num_bytes: float
    samples_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        """Median seconds of one call."""
        return statistics.median(self.samples_s)

    def slowed(self, share: float) -> OpTiming:
        """As it takes a process that has a core for this ``share`` of the time."""
        return self.model_copy(update={"samples_s": tuple(sample / share for sample in self.samples_s)})


class DeviceMeasurement(_Value):
    """One device, while all devices of the run were busy with the same."""

    device_name: str  # as the driver calls it; "cpu" for a process
    memory_bytes: int
    sm_count: int | None
    context_bytes: int | None  # held before any tensor; None: not known
    launch_samples_s: tuple[float, ...]
    operators: tuple[OpTiming, ...]
    issuing_samples_s: tuple[float, ...] = ()  # of the host, a kernel
    core_share: float = 1.0  # of the time for which a process of a CPU had a core
    host_link_samples_bytes_per_s: tuple[float, ...] = ()  # pinned copies, the slower direction

    def joined(self, later: DeviceMeasurement) -> DeviceMeasurement:
        """This and what was timed ``later`` on the same device: a machine is not as fast at all times."""
        samples = {(op.op_class, op.dtype, op.shape): op.samples_s for op in later.operators}
        again = [samples.pop((op.op_class, op.dtype, op.shape), ()) for op in self.operators]
        both = [
            op.model_copy(update={"samples_s": (*op.samples_s, *more)})
            for op, more in zip(self.operators, again, strict=True)
        ]
        alone = [op for op in later.operators if (op.op_class, op.dtype, op.shape) in samples]
        return self.model_copy(
            update={
                "operators": (*both, *alone),
                "launch_samples_s": (*self.launch_samples_s, *later.launch_samples_s),
                "issuing_samples_s": (*self.issuing_samples_s, *later.issuing_samples_s),
                "core_share": (self.core_share + later.core_share) / 2,
                "host_link_samples_bytes_per_s": (
                    *self.host_link_samples_bytes_per_s,
                    *later.host_link_samples_bytes_per_s,
                ),
            }
        )

    def best_flops_per_s(self, dtype: DTypeName) -> float:
        """Highest rate of any matrix product in ``dtype``; 0 where none was timed."""
        rates = [op.flops / min(op.samples_s) for op in self.operators if op.op_class == "gemm" and op.dtype == dtype]
        return max(rates, default=0.0)


class StorageMeasurement(_Value):
    """The disk under one folder."""

    folder: str
    free_bytes: int
    write_samples_bytes_per_s: tuple[float, ...]
    read_samples_bytes_per_s: tuple[float, ...]


class RdmaPort(_Value):
    """One active port of an RDMA adapter."""

    name: str
    bytes_per_s: float | None


class HostFacts(_Value):
    """What a host says about itself and its way to the others."""

    label: str  # how a person finds it
    key: str  # equal for processes that share a kernel and its network
    interface: str | None = None
    nic_bytes_per_s: float | None = None  # as the driver states it
    shaper_bytes_per_s: float | None = None  # a limit set by traffic control (tc)
    rdma_ports: tuple[RdmaPort, ...] = ()
    settings: dict[str, str] = {}  # NCCL_* and GLOO_* of the environment
    cpu_cores: int | None = None
    ram_bytes: int | None = None
    num_numa_nodes: int | None = None


class PairTiming(_Value):
    """One message from one rank to another, with nothing else on the way unless said."""

    source: int
    target: int
    latency_s: float
    bytes_per_s: float


class CollectiveTiming(_Value):
    """One collective at one size: all groups of the placement at work at once, the slowest counts.

    ``num_bytes`` as in the cost models: the whole reduced, gathered or exchanged tensor, or the message.
    """

    kind: CollectiveName
    num_ranks: int
    stride: int
    num_bytes: int
    samples_s: tuple[float, ...]

    @property
    def time_s(self) -> float:
        """Mean seconds from the last rank's start to the last rank's end, without the fastest and the slowest sample.

        A mean, as a step pays for many collectives: over gloo both directions of a link at once take as long as one or
        as long as two, from call to call, and a median would be either. A single disturbance does not count.
        """
        in_order = sorted(self.samples_s)
        return statistics.fmean(in_order[1:-1] if len(in_order) > 2 else in_order)


class OverlapTiming(_Value):
    """An all-reduce over all ranks beside products that take longer: each alone, and both at once; the slowest rank."""

    compute_samples_s: tuple[float, ...]
    communication_samples_s: tuple[float, ...]
    both_samples_s: tuple[float, ...]

    @property
    def slowdown(self) -> float:
        """Of a second that is hidden, what compute then takes longer; at most 1, where it might as well come first."""
        rounds = zip(self.compute_samples_s, self.communication_samples_s, self.both_samples_s, strict=True)
        return min(1.0, max(0.0, statistics.median((both - compute) / sent for compute, sent, both in rounds)))


class ClusterMeasurement(_Value):
    """All that one run of ``planner profile`` timed; rank by rank where lists are as long as the world."""

    date: datetime.date
    tool: str
    backend: str
    hosts: tuple[HostFacts, ...]  # rank by rank
    devices: tuple[DeviceMeasurement, ...]  # rank by rank
    storage: StorageMeasurement | None = None
    pairs: tuple[PairTiming, ...] = ()
    domains: tuple[int, ...] = ()  # devices of one domain of each tier, innermost first; the last is the world
    collectives: tuple[CollectiveTiming, ...] = ()
    overlap: OverlapTiming | None = None  # of one rank alone: nothing

    @property
    def num_ranks(self) -> int:
        """Ranks that took part."""
        return len(self.hosts)

    @property
    def devices_per_node(self) -> int:
        """Ranks on one host."""
        return devices_per_host([host.key for host in self.hosts])


def devices_per_host(keys: Sequence[str]) -> int:
    """Ranks on one host; ValueError where hosts differ or their ranks are not neighbours."""
    count = keys.count(keys[0])
    for start in range(0, len(keys), count):
        if len(set(keys[start : start + count])) != 1 or keys.count(keys[start]) != count:
            counts = sorted({keys.count(key) for key in keys})
            raise ValueError(
                f"ranks must stand host by host, as many on each: {len(set(keys))} hosts with {counts} ranks; "
                "start torchrun with the same --nproc-per-node on every host"
            )
    return count
