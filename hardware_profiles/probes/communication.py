"""Times messages between pairs of ranks, and collectives by kind, size and placement, on ranks that already run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import TypeVar, get_args

import torch
import torch.distributed as dist

from hardware_profiles.probes.measurement import CollectiveTiming, OverlapTiming, PairTiming
from hardware_profiles.probes.timing import synchronize
from hardware_profiles.schema import CollectiveName

_Value = TypeVar("_Value")

KINDS: tuple[CollectiveName, ...] = get_args(CollectiveName)
SMALLEST_BYTES = 4096
LARGEST_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
# Above this many hosts, pairs of hosts are timed several at once, each host in one pair, so that the time stays short.
HOSTS_ONE_PAIR_AT_A_TIME = 8
_PAIR_BYTES = (2**18, 2**28)  # sizes of messages, from the first tried to the largest
_NUM_LATENCY_SAMPLES, _NUM_PAIR_SAMPLES = 20, 5
_BATCH_S, _MAX_CALLS = 0.02, 20
_NUM_SLOW_SAMPLES = 4  # of calls that take more than half a batch
# Products that an all-reduce runs beside take so many times as long as it does: all of it can hide.
_COMPUTE_OVER_COMMUNICATION = 1.5
_PRODUCT_SIZE = {"cpu": 256, "cuda": 4096}
_NUM_OVERLAP_SAMPLES = 15


@dataclass(frozen=True)
class Effort:
    """How much time the measurement of communication may take."""

    pair_message_s: float  # messages grow until one takes this long
    longest_call_s: float  # sizes grow until one call takes this long
    size_factor: int  # between one size and the next
    num_samples: int


FULL = Effort(pair_message_s=0.05, longest_call_s=0.2, size_factor=2, num_samples=11)
QUICK = Effort(pair_message_s=0.02, longest_call_s=0.1, size_factor=4, num_samples=5)


@dataclass(frozen=True)
class Placement:
    """Groups of ``num_ranks`` at distance ``stride`` that fill the world; all of them communicate at once."""

    num_ranks: int
    stride: int

    def groups(self, world_size: int) -> list[list[int]]:
        """The ranks of every group."""
        span = self.num_ranks * self.stride
        return [
            list(range(start + offset, start + offset + span, self.stride))
            for start in range(0, world_size, span)
            for offset in range(self.stride)
        ]


def placements_of(domains: Sequence[int]) -> tuple[Placement, ...]:
    """One placement for each tier, one rank in each inner domain; and, over several tiers, all ranks in one group."""
    inner = [1, *domains]
    single = [Placement(domain // stride, stride) for stride, domain in zip(inner, domains, strict=False)]
    return (*single, *([Placement(domains[-1], 1)] if len(domains) > 1 else []))


def pair_rounds(keys: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Rounds of ordered pairs (source, target): within a round no rank or host-to-host way is used twice.

    Inside hosts every pair is timed, on all hosts at once; between hosts their first ranks speak for them.
    """
    hosts = [[rank for rank, key in enumerate(keys) if key == wanted] for wanted in dict.fromkeys(keys)]
    rounds: list[list[tuple[int, int]]] = []
    for first, second in permutations(range(max(len(ranks) for ranks in hosts)), 2):
        rounds.append([(ranks[first], ranks[second]) for ranks in hosts if max(first, second) < len(ranks)])
    first_ranks = [ranks[0] for ranks in hosts]
    if len(hosts) <= HOSTS_ONE_PAIR_AT_A_TIME:
        return rounds + [[pair] for pair in permutations(first_ranks, 2)]
    return rounds + _tournament(first_ranks)


def time_pairs(
    rounds: Sequence[Sequence[tuple[int, int]]], device: torch.device, effort: Effort, say: Callable[[str], None]
) -> tuple[PairTiming, ...]:
    """Latency and bandwidth of every pair, on every rank alike."""
    mine: list[PairTiming] = []
    for index, pairs in enumerate(rounds):
        say(f"pairs, round {index + 1} of {len(rounds)}")
        dist.barrier()
        for source, target in pairs:
            if dist.get_rank() == source:
                mine.append(_send_timed(source, target, device, effort))
            elif dist.get_rank() == target:
                _receive_timed(source, device)
    return tuple(timing for part in gathered(tuple(mine)) for timing in part)


def time_collectives(
    placements: Sequence[Placement], device: torch.device, effort: Effort, say: Callable[[str], None]
) -> tuple[CollectiveTiming, ...]:
    """Every kind of collective on every placement, sizes growing until a call takes too long; equal on all ranks."""
    found: list[CollectiveTiming] = []
    for placement in placements:
        group = _own_group(placement, device)
        for kind in KINDS:
            say(f"{kind.replace('_', '-')} of {placement.num_ranks} ranks at distance {placement.stride}")
            for num_bytes, samples in _sweep(kind, group, device, effort).items():
                found.append(
                    CollectiveTiming(
                        kind=kind,
                        num_ranks=placement.num_ranks,
                        stride=placement.stride,
                        num_bytes=num_bytes,
                        samples_s=tuple(samples),
                    )
                )
        dist.destroy_process_group(group.handle)
    return tuple(found)


def time_overlap(device: torch.device, effort: Effort) -> OverlapTiming:
    """An all-reduce over all ranks, products, and both at once; on every rank alike."""
    sent, sent_s = torch.zeros(SMALLEST_BYTES // 4, device=device), 0.0
    while sent_s < effort.pair_message_s and 4 * len(sent) < LARGEST_BYTES[device.type]:
        sent = torch.zeros(4 * len(sent), device=device)
        sent_s = min(_batch_s(partial(dist.all_reduce, sent), device, 1) for _ in range(2))
    size = _PRODUCT_SIZE[device.type]
    left, right, out = (torch.ones(size, size, device=device) for _ in range(3))
    product_s = min(_batch_s(partial(torch.mm, left, right, out=out), device, _MAX_CALLS) for _ in range(3))
    num_products = math.ceil(_COMPUTE_OVER_COMMUNICATION * sent_s / product_s)

    def compute() -> None:
        for _ in range(num_products):
            torch.mm(left, right, out=out)

    def both() -> None:
        work = dist.all_reduce(sent, async_op=True)
        compute()
        assert work is not None
        work.wait()

    calls = (compute, partial(dist.all_reduce, sent), both)
    rounds = [[_batch_s(call, device, 1) for call in calls] for _ in range(_NUM_OVERLAP_SAMPLES)]
    computed, communicated, together = zip(*rounds, strict=True)
    return OverlapTiming(compute_samples_s=computed, communication_samples_s=communicated, both_samples_s=together)


def gathered(value: _Value) -> list[_Value]:
    """The value of every rank, rank by rank."""
    parts: list[_Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return [part for part in parts if part is not None]


def _own_group(placement: Placement, device: torch.device) -> _Group:
    """Makes every group of the placement, as all ranks must, and returns this rank's."""
    own: _Group | None = None
    for ranks in placement.groups(dist.get_world_size()):
        handle = dist.new_group(ranks)
        if isinstance(handle, dist.ProcessGroup):  # else this rank is no member
            first, second = (torch.empty(LARGEST_BYTES[device.type] // 4, device=device).zero_() for _ in range(2))
            own = _Group(ranks, handle, first, second)
    assert own is not None, f"rank {dist.get_rank()} is in no group of {placement}"
    return own


def _tournament(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Rounds in which everyone meets someone, until all have met both ways (circle method)."""
    seats: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds: list[list[tuple[int, int]]] = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = list(zip(seats[:half], reversed(seats[half:]), strict=True))
        met = [(a, b) for a, b in facing if a is not None and b is not None]
        rounds += [met, [(b, a) for a, b in met]]
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _send_timed(source: int, target: int, device: torch.device, effort: Effort) -> PairTiming:
    """The sending side: the target answers each message, so that the clock stops when it has arrived."""
    latency_s = statistics.median(_trips_s(2, target, device, _NUM_LATENCY_SAMPLES)) / 2
    count, largest = _PAIR_BYTES[0] // 4, _PAIR_BYTES[1] // 4
    while True:
        trip_s = min(_trips_s(count, target, device, _NUM_PAIR_SAMPLES))  # other work only ever slows a message
        if trip_s >= effort.pair_message_s or count >= largest:
            break
        count = min(largest, 4 * count)
    _trips_s(0, target, device, 0)
    transfer_s = max(trip_s - 2 * latency_s, 1e-9)
    return PairTiming(source=source, target=target, latency_s=latency_s, bytes_per_s=4 * count / transfer_s)


def _receive_timed(source: int, device: torch.device) -> None:
    """The receiving side of ``_send_timed``: answers as many messages as are announced, until none are."""
    answer = torch.ones(2, device=device)
    announced = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        dist.recv(announced, source)
        count, num_messages = int(announced[0].item()), int(announced[1].item())
        if num_messages == 0:
            return
        message = torch.empty(count, device=device)
        for _ in range(num_messages):
            dist.recv(message, source)
            dist.send(answer, source)


def _trips_s(count: int, target: int, device: torch.device, num_messages: int) -> list[float]:
    """Announces messages of ``count`` numbers, and times each until its answer is here."""
    dist.send(torch.tensor([count, num_messages], device=device), target)
    message, answer = torch.ones(count, device=device), torch.ones(2, device=device)
    return [_trip_s(message, answer, target, device) for _ in range(num_messages)]


def _trip_s(message: torch.Tensor, answer: torch.Tensor, target: int, device: torch.device) -> float:
    synchronize(device)
    start_s = time.perf_counter()
    dist.send(message, target)
    dist.recv(answer, target)
    synchronize(device)
    return time.perf_counter() - start_s


@dataclass(frozen=True)
class _Group:
    """This rank's group, with memory that was touched before anything is timed in it."""

    ranks: list[int]
    handle: dist.ProcessGroup
    first: torch.Tensor
    second: torch.Tensor


def _collective(kind: CollectiveName, group: _Group, num_bytes: int) -> tuple[Callable[[], object], int]:
    """One collective on fp32 tensors, and the exact bytes that it counts."""
    num_ranks = len(group.ranks)
    count = max(1, num_bytes // 4 // num_ranks) * num_ranks
    whole, other, part = group.first[:count], group.second[:count], group.second[: count // num_ranks]
    handle = group.handle
    calls: dict[CollectiveName, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=handle),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=handle),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=handle),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=handle),
        "send_recv": lambda: _shift(whole, other, group.ranks),
        "ring_shift": lambda: _shift(whole, other, group.ranks, is_ring=True),
    }
    return calls[kind], 4 * count


def _shift(message: torch.Tensor, buffer: torch.Tensor, ranks: Sequence[int], *, is_ring: bool = False) -> None:
    """Every rank of the group sends to the next one, as pipeline stages do; the last sends in a ring alone."""
    place = ranks.index(dist.get_rank())
    operations: list[dist.P2POp] = []
    if is_ring or place > 0:  # first what comes, as the executor posts them: gloo moves both ways at once then
        operations.append(dist.P2POp(dist.irecv, buffer, ranks[place - 1]))
    if is_ring or place + 1 < len(ranks):
        operations.append(dist.P2POp(dist.isend, message, ranks[(place + 1) % len(ranks)]))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _sweep(kind: CollectiveName, group: _Group, device: torch.device, effort: Effort) -> dict[int, list[float]]:
    """Samples by size. Every round goes through all sizes, so that a disturbance costs each of them one sample."""
    samples: dict[int, list[float]] = {}
    num_calls: dict[int, int] = {}
    num_bytes = SMALLEST_BYTES
    first_s = 0.0
    while num_bytes <= LARGEST_BYTES[device.type] and first_s <= effort.longest_call_s:
        call, exact_bytes = _collective(kind, group, num_bytes)
        call()
        first_s = _batch_s(call, device, 1)
        num_calls[exact_bytes] = max(1, min(_MAX_CALLS, int(_BATCH_S / first_s)))
        samples[exact_bytes] = [] if num_calls[exact_bytes] > 1 else [first_s]
        num_bytes *= effort.size_factor
    for index in range(effort.num_samples):
        for size, calls in num_calls.items():
            if calls > 1 or index < _NUM_SLOW_SAMPLES:
                call, _ = _collective(kind, group, size)
                samples[size].append(_batch_s(call, device, calls))
    return samples


def _batch_s(call: Callable[[], object], device: torch.device, num_calls: int) -> float:
    """Seconds a call, ``num_calls`` in a row, of the slowest rank; equal on all ranks."""
    dist.barrier()
    synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    synchronize(device)
    elapsed = torch.tensor([(time.perf_counter() - start_s) / num_calls], dtype=torch.float64, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return max(float(elapsed.item()), 1e-9)
