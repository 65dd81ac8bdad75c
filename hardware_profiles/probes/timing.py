"""Times a call on a CPU or a GPU: repeated in batches, so that neither the clock nor a launch queue is what is seen.

On a GPU the calls of a batch are captured once and replayed, so that a call takes what its kernels take: how fast a
host can issue them, from Python and through autograd, is a matter of the software that trains, not of the device.

A process that shares its core with others runs in slices of several milliseconds, and a short call seldom sees the
other slices pass. A process of one thread is therefore timed by the seconds that it had a core, and ``core_share`` says
which part of all seconds that was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

BATCH_S = 2e-3  # far above the clocks' resolution (perf_counter: ns, CUDA events: 0.5 us)
MAX_CALLS_PER_BATCH = 1000
CACHE_BYTES = 2**26  # more than a core's share of the caches of today's CPUs


def synchronize(device: torch.device) -> None:
    """Waits for all work on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds that this thread had a core, where it alone works for ``device``; else seconds that passed."""
    return time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


class CoreShare:
    """Which part of the seconds since it was made a process had a core; 1 where its work is not timed by those."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._start_s, self._start_clock_s = time.perf_counter(), self._clock()

    def value(self) -> float:
        """Above 0, at most 1."""
        passed_s = time.perf_counter() - self._start_s
        return min(1.0, max((self._clock() - self._start_clock_s) / passed_s, 1e-3))


def seconds_per_call(
    call: Callable[[], object], device: torch.device, *, budget_s: float, num_samples: int = 7
) -> tuple[float, ...]:
    """Samples of the time of one call: ``num_samples``, or as few as fit the budget, but at least 2."""
    call()  # the first one allocates, and may compile
    first_s = _batch_s(call, device)
    num_calls = max(1, min(MAX_CALLS_PER_BATCH, int(BATCH_S / max(first_s, 1e-7))))
    batch = _replayed(call, num_calls) if device.type == "cuda" else _repeated(call, num_calls)
    affordable = int(budget_s / max(first_s * num_calls, 1e-7))
    return tuple(_batch_s(batch, device) / num_calls for _ in range(max(2, min(num_samples, affordable))))


def _repeated(call: Callable[[], object], num_calls: int) -> Callable[[], object]:
    def batch() -> None:
        for _ in range(num_calls):
            call()

    return batch


def _replayed(call: Callable[[], object], num_calls: int) -> Callable[[], object]:
    """``num_calls`` calls as one CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # libraries choose their kernels, and allocate, before anything is captured
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            call()
    graph.replay()
    return graph.replay


def seconds_per_cold_call(call: Callable[[], object], *, budget_s: float, num_samples: int = 7) -> tuple[float, ...]:
    """The same on a CPU whose caches hold nothing of the call's operands, as in a training step."""
    other = torch.zeros(CACHE_BYTES // 4)
    cpu, end_s = torch.device("cpu"), time.perf_counter() + budget_s
    call()  # the first one allocates
    samples: list[float] = []
    while len(samples) < 2 or (len(samples) < num_samples and time.perf_counter() < end_s):
        other.add_(1.0)
        samples.append(_batch_s(call, cpu))
    return tuple(samples)


def _batch_s(batch: Callable[[], object], device: torch.device) -> float:
    """Seconds of a batch of calls."""
    synchronize(device)
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        batch()
        end.record()
        torch.cuda.synchronize(device)
        return max(start.elapsed_time(end) * 1e-3, 1e-9)
    clock = clock_of(device)
    start_s = clock()
    batch()
    return max(clock() - start_s, 1e-9)
