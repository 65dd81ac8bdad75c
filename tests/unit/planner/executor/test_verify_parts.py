"""What `planner verify` takes from torch's profiler."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import DeviceType

from planner.executor.verify import seconds_of_parts


def _event(key: str, device: DeviceType, on_device_us: float, on_host_us: float = 0.0) -> Any:
    return SimpleNamespace(key=key, device_type=device, device_time_total=on_device_us, cpu_time_total=on_host_us)


def test_what_the_time_line_of_a_gpu_marks_again_is_counted_once() -> None:
    """On an H100 the optimiser came to 28 ms a step, about twice what its kernels take, and once to 80."""
    events = [
        _event("Optimizer.step#AdamW.step", DeviceType.CPU, 14e3, 2e3),
        _event("Optimizer.step#AdamW.step", DeviceType.CUDA, 15e3),
        _event("nccl:_all_gather_base", DeviceType.CPU, 4e3, 1e3),
        _event("nccl:_all_gather_base", DeviceType.CUDA, 5e3),
        _event("void multi_tensor_apply_kernel", DeviceType.CUDA, 14e3),
    ]
    optimizer_s, collectives_s = seconds_of_parts(events, on_gpu=True)
    assert optimizer_s == 14e-3
    assert {kind: value for kind, value in collectives_s.items() if value} == {"all_gather": 4e-3}


def test_on_a_cpu_the_seconds_are_those_of_the_host() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.AdamW([parameter])
    with torch.profiler.profile() as profiler:
        parameter.grad = torch.ones(1000)
        optimizer.step()
    optimizer_s, collectives_s = seconds_of_parts(profiler.key_averages(), on_gpu=False)
    assert 0 < optimizer_s < 60
    assert not any(collectives_s.values())
