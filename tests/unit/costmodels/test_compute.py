import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.compute import Roofline, op_time_s, peak_flops_per_s, roofline
from costmodels.vocabulary.workload import OpClass, OpWorkload
from hardware_profiles.schema import DeviceProfile
from tests.unit.costmodels.toy_cluster import BANDWIDTH, PEAK_BF16, make_device, quantity

work = st.floats(min_value=0, max_value=1e18)


def test_a_large_product_runs_at_its_fraction_of_the_peak() -> None:
    workload = OpWorkload(OpClass.GEMM, flops=1e13, num_bytes=1e6)
    assert op_time_s(workload, make_device(), "bf16") == pytest.approx(1e13 / (PEAK_BF16 * 0.5))


def test_a_product_of_few_rows_waits_for_memory() -> None:
    workload = OpWorkload(OpClass.GEMM, flops=1e6, num_bytes=1e9)
    assert op_time_s(workload, make_device(), "bf16") == pytest.approx(1e9 / (BANDWIDTH * 0.8))


def test_attention_has_its_own_efficiency() -> None:
    workload = OpWorkload(OpClass.ATTENTION, flops=1e13, num_bytes=0)
    assert op_time_s(workload, make_device(), "bf16") == pytest.approx(1e13 / (PEAK_BF16 * 0.25))


def test_every_kernel_is_launched() -> None:
    device = make_device().model_copy(update={"kernel_launch_s": quantity(5e-6)})
    assert op_time_s(OpWorkload(OpClass.MEMORY_BOUND, 0, 0, num_kernels=3), device, "bf16") == pytest.approx(15e-6)


def test_work_is_one_kernel_unless_it_says_otherwise() -> None:
    line = Roofline(launch_s=2.0, seconds_per_flop=1.0, seconds_per_byte=1.0, half_size_flops=3.0)
    assert line.time_s(10.0, 0.0) == 2.0 + 10.0 + 3.0
    assert line.times_s(np.array([10.0]), np.zeros(1)).tolist() == [2.0 + 10.0 + 3.0]


def test_at_the_half_size_half_of_the_efficiency_is_reached() -> None:
    device = make_device(half_size=1e10)
    seconds = op_time_s(OpWorkload(OpClass.GEMM, flops=1e10, num_bytes=0), device, "bf16")
    assert seconds == pytest.approx(2 * 1e10 / (PEAK_BF16 * 0.5))


def test_splitting_work_into_kernels_never_makes_it_faster() -> None:
    device = make_device(half_size=1e10)
    one = op_time_s(OpWorkload(OpClass.GEMM, 1e12, 0, num_kernels=1), device, "bf16")
    many = op_time_s(OpWorkload(OpClass.GEMM, 1e12, 0, num_kernels=10), device, "bf16")
    assert many > one


@given(flops=work, more=work, num_bytes=work)
def test_more_work_is_never_faster(flops: float, more: float, num_bytes: float) -> None:
    device = make_device(half_size=1e9)
    base = op_time_s(OpWorkload(OpClass.GEMM, flops, num_bytes), device, "bf16")
    assert op_time_s(OpWorkload(OpClass.GEMM, flops + more, num_bytes), device, "bf16") >= base
    assert op_time_s(OpWorkload(OpClass.GEMM, flops, num_bytes + more), device, "bf16") >= base


@given(flops=work, num_bytes=work, factor=st.floats(min_value=1, max_value=100))
def test_a_faster_device_is_never_slower(flops: float, num_bytes: float, factor: float) -> None:
    workload = OpWorkload(OpClass.GEMM, flops, num_bytes)
    base = op_time_s(workload, make_device(), "bf16")
    assert op_time_s(workload, make_device(peak=PEAK_BF16 * factor), "bf16") <= base
    assert op_time_s(workload, make_device(bandwidth=BANDWIDTH * factor), "bf16") <= base


@given(flops=work, num_bytes=work, op_class=st.sampled_from([OpClass.GEMM, OpClass.ATTENTION, OpClass.MEMORY_BOUND]))
def test_nothing_beats_the_roofline(flops: float, num_bytes: float, op_class: OpClass) -> None:
    seconds = op_time_s(OpWorkload(op_class, flops, num_bytes), make_device(), "bf16")
    assert seconds >= num_bytes / BANDWIDTH
    assert op_class is OpClass.MEMORY_BOUND or seconds >= flops / PEAK_BF16


def test_a_device_without_the_dtype_is_named_with_what_it_has() -> None:
    volta = without_bf16(make_device())
    with pytest.raises(ValueError, match="toy has no bf16 arithmetic; its profile has fp16, fp32"):
        op_time_s(OpWorkload(OpClass.GEMM, 1, 1), volta, "bf16")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'int4'"):
        peak_flops_per_s(make_device(), "int4")


def test_attention_does_not_run_in_eight_bits() -> None:
    device = make_device()
    peaks = {**device.peak_flops_per_s, "fp8": quantity(2 * PEAK_BF16)}
    device = device.model_copy(update={"peak_flops_per_s": peaks})
    assert roofline(device, OpClass.ATTENTION, "fp8") == roofline(device, OpClass.ATTENTION, "bf16")
    gemm_in_8, gemm_in_16 = (roofline(device, OpClass.GEMM, dtype).seconds_per_flop for dtype in ("fp8", "bf16"))
    assert gemm_in_8 == pytest.approx(gemm_in_16 / 2)


def test_products_of_eight_bits_may_reach_another_share_of_their_peak() -> None:
    device = make_device()
    peaks = {**device.peak_flops_per_s, "fp8": quantity(2 * PEAK_BF16)}
    own = device.efficiency["gemm"].model_copy(update={"eight_bit_fraction": quantity(0.25)})
    device = device.model_copy(update={"peak_flops_per_s": peaks, "efficiency": {**device.efficiency, "gemm": own}})
    assert 1 / roofline(device, OpClass.GEMM, "fp8").seconds_per_flop == pytest.approx(0.25 * 2 * PEAK_BF16)
    in_sixteen = own.fraction.value * PEAK_BF16
    assert 1 / roofline(device, OpClass.GEMM, "bf16").seconds_per_flop == pytest.approx(in_sixteen)


def test_a_missing_efficiency_is_named() -> None:
    with pytest.raises(ValueError, match="toy has no efficiency for convolution operators"):
        op_time_s(OpWorkload(OpClass.CONVOLUTION, 1, 1), make_device(), "bf16")


def without_bf16(device: DeviceProfile) -> DeviceProfile:
    peaks = {"fp16": quantity(125e12), "fp32": quantity(15e12)}
    return device.model_copy(update={"peak_flops_per_s": peaks})
