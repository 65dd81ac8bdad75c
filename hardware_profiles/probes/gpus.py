"""Lists the GPUs of this host from NVML (nvidia-ml-py), or from torch's CUDA or HIP runtime."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

from pydantic import BaseModel, ConfigDict


class DetectedGpu(BaseModel):
    """One GPU of this host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    name: str
    memory_bytes: int
    sm_count: int | None
    driver: str | None
    known_from: Literal["nvml", "torch"]


def gpus_from_nvml() -> tuple[tuple[DetectedGpu, ...], str]:
    """The GPUs that NVIDIA's management library lists, or none and the reason in words."""
    if importlib.util.find_spec("pynvml") is None:
        return (), "the package nvidia-ml-py is not installed"
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer ({error})"
    try:
        driver = _as_text(nvml.nvmlSystemGetDriverVersion())
        found: list[DetectedGpu] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                DetectedGpu(
                    index=index,
                    name=_as_text(nvml.nvmlDeviceGetName(handle)),
                    memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
                    sm_count=None,
                    driver=driver,
                    known_from="nvml",
                )
            )
        return tuple(found), "" if found else "the driver lists no GPU"
    except nvml.NVMLError as error:
        return (), f"the NVIDIA driver does not answer ({error})"
    finally:
        nvml.nvmlShutdown()


def gpus_from_torch() -> tuple[tuple[DetectedGpu, ...], str]:
    """The GPUs that torch sees, or none and the reason in words."""
    if importlib.util.find_spec("torch") is None:
        return (), "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return (), "torch sees no CUDA or HIP device"
    found: list[DetectedGpu] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            DetectedGpu(
                index=index,
                name=properties.name,
                memory_bytes=properties.total_memory,
                sm_count=properties.multi_processor_count,
                driver=None,
                known_from="torch",
            )
        )
    return tuple(found), ""


def _as_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
