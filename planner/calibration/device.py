"""Turns operator timings into the device of a profile: peaks, efficiencies, launch cost and how far timings scatter.

What is fitted is the record with which ``costmodels.compute`` predicts, ``Roofline``: its seconds per FLOP and half
size to matrix products and attention, its seconds per byte to element-wise operators.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from costmodels.compute import Roofline
from hardware_profiles.probes.measurement import ClusterMeasurement, DeviceMeasurement, OpTiming
from hardware_profiles.schema import ClusterProfile, DeviceProfile, DTypeName, Efficiency, OpClassName, Quantity
from planner.calibration.fitting import fit_line, spread
from planner.calibration.provenance import fitted, measured

# Element-wise operators on less than this many bytes may run from a cache (50 MB of L2 on H100, 32 MB of L3 on CPUs).
SMALLEST_STREAM_BYTES = {"cpu": 2**24, "cuda": 2**28}
PRIMARY_DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")  # the efficiency is of the first that was timed


def device_of(measurement: ClusterMeasurement, nearest: ClusterProfile) -> DeviceProfile:
    """The device as measured; peaks, price and what was not timed are ``nearest``'s where it is the same GPU.

    On an unknown device the best that was measured stands for the peak.
    """
    first = measurement.devices[0]
    operators = median_over_ranks(measurement.devices)
    launch_s = _launch_s(measurement)
    is_known = first.device_name in nearest.device.detected_names
    is_cpu = first.device_name == "cpu"
    gemms: dict[DTypeName, list[OpTiming]] = {
        dtype: _of(operators, "gemm", dtype) for dtype in PRIMARY_DTYPES if _of(operators, "gemm", dtype)
    }
    known_peaks = nearest.device.peak_flops_per_s
    primary: DTypeName = "fp32" if is_cpu else next(dtype for dtype in gemms if not is_known or dtype in known_peaks)
    rates: dict[DTypeName, float] = {
        dtype: 1.0 / _fitted_roofline(timings, launch_s).seconds_per_flop for dtype, timings in gemms.items()
    }
    fastest = max(rates[primary], max(op.flops / min(op.samples_s) for op in gemms[primary]))
    peak = nearest.device.peak_flops_per_s[primary].value if is_known else fastest
    fraction = rates[primary] / peak
    peaks: dict[DTypeName, Quantity] = {
        dtype: measured(measurement, rate / fraction, f"sustained rate over the {primary} fraction")
        for dtype, rate in rates.items()
    }
    peaks[primary] = measured(measurement, peak, "best matrix product")
    gemm = _efficiency(measurement, gemms[primary], peak, launch_s)
    alike = gemm.model_copy(
        update={"fraction": gemm.fraction.model_copy(update={"source": f"not timed itself: {gemm.fraction.source}"})}
    )
    efficiency: dict[OpClassName, Efficiency] = {"gemm": gemm, "grouped_gemm": alike, "convolution": alike}
    attention = _of(operators, "attention", primary)
    efficiency["attention"] = _efficiency(measurement, attention, peak, launch_s) if attention else alike
    memory = _memory_efficiency(measurement, operators, nearest if is_known else None, launch_s)
    efficiency["memory_bound"] = memory[1]
    return DeviceProfile(
        name=nearest.device.name if is_known or is_cpu else first.device_name,
        vendor=nearest.device.vendor,
        memory_bytes=measured(measurement, _memory_bytes(measurement, nearest), "as the driver or kernel states it"),
        memory_bandwidth_bytes_per_s=memory[0],
        peak_flops_per_s=dict(nearest.device.peak_flops_per_s) if is_known else peaks,
        kernel_launch_s=measured(measurement, launch_s, "median time of kernels with next to nothing to do"),
        efficiency=efficiency,
        sm_count=first.sm_count,
        usd_per_hour=nearest.device.usd_per_hour if is_known else None,
        watts=nearest.device.watts if is_known else None,
        slowdown_spread=nearest.device.slowdown_spread if is_known else None,
        slowdown_beyond_devices=nearest.device.slowdown_beyond_devices if is_known else None,
        detected_names=() if is_cpu else (first.device_name,),
    )  # fmt: skip


def median_over_ranks(devices: Sequence[DeviceMeasurement]) -> tuple[OpTiming, ...]:
    """Each operator once, with the median time of each rank that timed it as its samples."""
    by_shape: dict[tuple[str, str, str], list[OpTiming]] = {}
    for device in devices:
        for op in device.operators:
            by_shape.setdefault((op.op_class, op.dtype, op.shape), []).append(op)
    return tuple(ops[0].model_copy(update={"samples_s": tuple(op.time_s for op in ops)}) for ops in by_shape.values())


def _of(operators: Sequence[OpTiming], op_class: OpClassName, dtype: DTypeName) -> list[OpTiming]:
    return [op for op in operators if op.op_class == op_class and op.dtype == dtype]


def _launch_s(measurement: ClusterMeasurement) -> float:
    return statistics.median(statistics.median(device.launch_samples_s) for device in measurement.devices)


def _fitted_roofline(timings: Sequence[OpTiming], launch_s: float) -> Roofline:
    """The roofline of large operands, whose bytes cost nothing: t = launch + (flops + half size) · seconds per FLOP.

    The rate is at most the best that any size reached.
    """
    times_s = [max(op.time_s - launch_s, 0.1 * op.time_s) for op in timings]
    lowest = min(time_s / op.flops for op, time_s in zip(timings, times_s, strict=True))
    line = fit_line([op.flops for op in timings], times_s, lowest_slope=lowest)
    return Roofline(launch_s, line.slope, 0.0, line.intercept_s / line.slope)


def _efficiency(
    measurement: ClusterMeasurement, timings: Sequence[OpTiming], peak: float, launch_s: float
) -> Efficiency:
    found = _fitted_roofline(timings, launch_s)
    line = Roofline(launch_s, max(found.seconds_per_flop, 1.0 / peak), 0.0, found.half_size_flops)
    what = "t = launch + (FLOPs + half size)/(fraction peak)"
    return Efficiency(
        fraction=fitted(measurement, 1.0 / line.seconds_per_flop / peak, what, len(timings)),
        half_size_flops=fitted(measurement, line.half_size_flops, what, len(timings)),
        residual_spread=spread([op.time_s for op in timings], [line.time_s(op.flops, 0.0) for op in timings]),
    )


def _memory_efficiency(
    measurement: ClusterMeasurement, operators: Sequence[OpTiming], known: ClusterProfile | None, launch_s: float
) -> tuple[Quantity, Efficiency]:
    """Memory bandwidth, and the fraction of it that large element-wise operators reach."""
    smallest = SMALLEST_STREAM_BYTES["cpu" if measurement.devices[0].device_name == "cpu" else "cuda"]
    element_wise = [op for op in operators if op.op_class == "memory_bound"]
    large = [op for op in element_wise if op.num_bytes >= smallest] or element_wise
    rates = [op.num_bytes / max(op.time_s - launch_s, 0.1 * op.time_s) for op in large]
    best = measured(measurement, max(rates), f"best of {len(large)} large element-wise operators")
    bandwidth = known.device.memory_bandwidth_bytes_per_s if known is not None else best
    fraction = min(1.0, statistics.median(rates) / bandwidth.value)
    line = Roofline(launch_s, 0.0, 1.0 / (bandwidth.value * fraction), 0.0)
    return bandwidth, Efficiency(
        fraction=measured(measurement, fraction, f"median of {len(large)} large element-wise operators"),
        residual_spread=spread([op.time_s for op in large], [line.time_s(0.0, op.num_bytes) for op in large]),
    )


def _memory_bytes(measurement: ClusterMeasurement, nearest: ClusterProfile) -> float:
    """A GPU's own memory; for processes on a CPU an equal share of the host's."""
    first = measurement.devices[0]
    if first.device_name != "cpu":
        return first.memory_bytes
    processes = measurement.devices_per_node if measurement.num_ranks > 1 else nearest.node.num_devices
    return first.memory_bytes // processes
