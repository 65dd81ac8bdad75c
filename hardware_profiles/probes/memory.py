"""Times what moves bytes on one device: element-wise operators, launches, and pinned copies to the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import torch
import torch.nn.functional as F  # noqa: N812 torch's own name for it

from hardware_profiles.probes.measurement import OpTiming
from hardware_profiles.probes.timing import seconds_per_call
from hardware_profiles.schema import DTypeName

_BUDGET_S_PER_SIZE = 0.15
_GPU_SIZES = tuple(2**power for power in (16, 20, 22, 24, 26, 28, 30))  # bytes of one operand, beyond every cache
_CPU_SIZES = tuple(2**power for power in (14, 18, 20, 22, 24, 26))
_PINNED_BYTES = 2**28
_FEWEST_BYTES = 2**20  # of a stream; smaller ones alone show caches and launches only


def time_element_wise(
    device: torch.device, dtype: DTypeName, torch_dtype: torch.dtype, deadline_s: float
) -> tuple[OpTiming, ...]:
    """Addition, copy, GELU and layer norm over sizes from a cache to the whole memory."""
    found: list[OpTiming] = []
    for size in _GPU_SIZES if device.type == "cuda" else _CPU_SIZES:
        count = size // (torch.finfo(torch_dtype).bits // 8)
        for name, num_streams, call in _element_wise(torch.randn(count, device=device).to(torch_dtype)):
            if time.monotonic() > deadline_s and found and found[-1].num_bytes >= _FEWEST_BYTES:
                break
            found.append(
                OpTiming(
                    op_class="memory_bound",
                    dtype=dtype,
                    shape=f"{name} of {count}",
                    flops=0.0,
                    num_bytes=float(num_streams * size),
                    samples_s=seconds_per_call(call, device, budget_s=_BUDGET_S_PER_SIZE),
                )
            )
    return tuple(found)


def time_launches(device: torch.device) -> tuple[float, ...]:
    """Seconds of a kernel that has next to nothing to do, many in a row."""
    few = torch.ones(8, device=device)
    return seconds_per_call(lambda: few.add_(1.0), device, budget_s=0.5)


def pinned_copy_bytes_per_s(device: torch.device) -> tuple[float, ...]:
    """Bytes per second between the device and pinned host memory, the slower direction; none on a CPU."""
    if device.type != "cuda":
        return ()
    host = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, device=device)
    up = seconds_per_call(lambda: there.copy_(host, non_blocking=True), device, budget_s=0.5)
    down = seconds_per_call(lambda: host.copy_(there, non_blocking=True), device, budget_s=0.5)
    return tuple(_PINNED_BYTES / max(pair) for pair in zip(sorted(up), sorted(down), strict=False))


def context_bytes(device: torch.device) -> int | None:
    """Memory that the driver and libraries hold before any tensor: all that is used, less torch's own reserve.

    Other processes on the same GPU count in, so it is only asked before the first measurement. On a CPU it is the
    resident memory of this process.
    """
    if device.type != "cuda":
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _element_wise(x: torch.Tensor) -> tuple[tuple[str, int, Callable[[], object]], ...]:
    """(name, operands read and written, call)."""
    y, out = x.clone(), torch.empty_like(x)
    rows = x.view(-1, 1024)
    return (
        ("add", 3, lambda: torch.add(x, y, out=out)),
        ("copy", 2, lambda: out.copy_(x)),
        ("gelu", 2, lambda: F.gelu(x)),
        ("layer_norm", 2, lambda: F.layer_norm(rows, (1024,))),
    )
