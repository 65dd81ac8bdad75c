"""Time of one operator on one device: a roofline with launch cost.

    t = launch · num_kernels + max(t_arithmetic, t_memory)
    t_arithmetic = flops / (peak · efficiency(flops per kernel)),  efficiency(f) = fraction · f / (f + half_size)
    t_memory     = num_bytes / (memory_bandwidth · fraction of the memory-bound class)

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009. The launch term and the half size are the two
constants of a pipelined machine in Hockney's sense (r_inf, n_half: "The n_half method", 1985); all numbers come from
the profile. Since f / efficiency(f) = (f + half_size) / fraction, time grows with the work and falls with the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodels.vocabulary.workload import OpClass, OpWorkload
from hardware_profiles.schema import DeviceProfile, DTypeName, Efficiency, OpClassName

DTYPE_NAMES: dict[str, DTypeName] = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
}
FloatArray = npt.NDArray[np.float64]
# Only matrix products run in 8 bits; softmax, norms and the products inside attention stay in 16.
DTYPES_OUTSIDE_GEMM: dict[str, tuple[DTypeName, ...]] = {"fp8": ("bf16", "fp16")}
_CLASS_NAMES: dict[OpClass, OpClassName] = {
    OpClass.GEMM: "gemm",
    OpClass.GROUPED_GEMM: "grouped_gemm",
    OpClass.ATTENTION: "attention",
    OpClass.CONVOLUTION: "convolution",
    OpClass.MEMORY_BOUND: "memory_bound",
}
EIGHT_BIT_CLASSES = (OpClass.GEMM, OpClass.GROUPED_GEMM)
# Of the rate of 16-bit products on tensor cores, what is left where a row is no multiple of 16 bytes: cuBLAS leaves its
# kernels for others, which triples the time of a head with such a vocabulary (Netflix Technology Blog, "Scaling LLM
# Post-Training at Netflix", 2026). The head of GPT-2 1.5B with 50,257 entries took 13 ms on an H200, 2.3 times what its
# products take at the full rate (benchmarks/results/one_gpu_2026-11-24.md).
UNALIGNED_RATE = 1 / 3
UNALIGNED_DTYPES = ("fp16", "bf16", "fp8")  # rows of TF32 have another rule, which is not priced


@dataclass(frozen=True)
class Roofline:
    """One operator class on one device in one dtype, as four numbers that price any workload of the class."""

    launch_s: float
    seconds_per_flop: float
    seconds_per_byte: float
    half_size_flops: float

    def time_s(self, flops: float, num_bytes: float, num_kernels: int = 1) -> float:
        """Seconds of ``num_kernels`` equal kernels that do ``flops`` and move ``num_bytes`` together."""
        arithmetic_s = (flops + num_kernels * self.half_size_flops) * self.seconds_per_flop if flops > 0 else 0.0
        return self.launch_s * num_kernels + max(arithmetic_s, num_bytes * self.seconds_per_byte)

    def times_s(self, flops: FloatArray, num_bytes: FloatArray, num_kernels: FloatArray | int = 1) -> FloatArray:
        """``time_s`` of many workloads at once; arrays broadcast."""
        arithmetic_s = np.where(flops > 0, (flops + num_kernels * self.half_size_flops) * self.seconds_per_flop, 0.0)
        return self.launch_s * num_kernels + np.maximum(arithmetic_s, num_bytes * self.seconds_per_byte)


def peak_flops_per_s(device: DeviceProfile, dtype: str) -> float:
    """Peak arithmetic of ``device`` in ``dtype``; ValueError says what the device has instead.

    ``fp32`` falls back on ``tf32`` never: PyTorch keeps full precision unless told otherwise.
    """
    known = ", ".join(sorted(device.peak_flops_per_s))
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, got {dtype!r}")
    peak = device.peak_flops_per_s.get(DTYPE_NAMES[dtype])
    if peak is None or peak.value <= 0:
        raise ValueError(f"{device.name} has no {dtype} arithmetic; its profile has {known}")
    return peak.value


def roofline(device: DeviceProfile, op_class: OpClass, dtype: str) -> Roofline:
    """The numbers that price ``op_class`` on ``device``; ValueError where the profile lacks one of them."""
    memory = _efficiency(device, "memory_bound")
    bandwidth = device.memory_bandwidth_bytes_per_s.value * memory.fraction.value
    if bandwidth <= 0:
        raise ValueError(f"{device.name}: memory bandwidth times its efficiency must be above 0, got {bandwidth}")
    seconds_per_flop, half_size = _arithmetic(device, op_class, dtype)
    return Roofline(device.kernel_launch_s.value, seconds_per_flop, 1.0 / bandwidth, half_size)


def op_time_s(workload: OpWorkload, device: DeviceProfile, dtype: str) -> float:
    """Seconds that ``workload`` takes on ``device`` when its matrices are in ``dtype`` (fp32, bf16, fp16, fp8, ...)."""
    line = roofline(device, workload.op_class, dtype)
    return line.time_s(workload.flops, workload.num_bytes, workload.num_kernels)


def _arithmetic(device: DeviceProfile, op_class: OpClass, dtype: str) -> tuple[float, float]:
    if op_class is OpClass.MEMORY_BOUND:
        # A few FLOPs a byte, on the ordinary cores: where the profile knows those, they bound the time from below.
        fp32 = device.peak_flops_per_s.get("fp32")
        return (1.0 / fp32.value if fp32 is not None and fp32.value > 0 else 0.0), 0.0
    efficiency = _efficiency(device, _CLASS_NAMES[op_class])
    is_eight_bit = dtype in DTYPES_OUTSIDE_GEMM and op_class in EIGHT_BIT_CLASSES
    fraction = (efficiency.eight_bit_fraction if is_eight_bit else None) or efficiency.fraction
    if fraction.value <= 0:
        raise ValueError(f"{device.name}: efficiency of {op_class.value} must be above 0")
    peak = peak_of_class(device, op_class, dtype)
    half_size = efficiency.half_size_flops.value if efficiency.half_size_flops is not None else 0.0
    return 1.0 / (peak * fraction.value), half_size


def peak_of_class(device: DeviceProfile, op_class: OpClass, dtype: str) -> float:
    """Peak arithmetic for ``op_class`` where matrices are in ``dtype``; ValueError where the device has none."""
    peak = peak_flops_per_s(device, dtype)
    if dtype not in DTYPES_OUTSIDE_GEMM or op_class in EIGHT_BIT_CLASSES:
        return peak
    wider = [
        device.peak_flops_per_s[name].value for name in DTYPES_OUTSIDE_GEMM[dtype] if name in device.peak_flops_per_s
    ]
    if not wider:
        raise ValueError(f"{device.name} has {dtype} but no 16-bit dtype for {op_class.value}")
    return wider[0]


def _efficiency(device: DeviceProfile, op_class: OpClassName) -> Efficiency:
    efficiency = device.efficiency.get(op_class)
    if efficiency is None:
        known = ", ".join(sorted(device.efficiency))
        raise ValueError(f"{device.name} has no efficiency for {op_class} operators; its profile has {known}")
    return efficiency
