"""Compute of large jobs is that of their slowest device; communication, memory and small jobs are as they were."""

import numpy as np
import pytest

from costmodels.stragglers import straggler_slowdown
from costmodels.vocabulary.terms import PLACE, Time
from hardware_profiles.catalog import list_profiles, load_profile
from hardware_profiles.schema import ClusterProfile, ClusterSpec, DeviceProfile
from planner.layout.layout import Pins
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from tests.planning import graph_of, training_of

COMPUTE = [PLACE[time] for time in (Time.COMPUTE_FORWARD, Time.COMPUTE_BACKWARD, Time.RECOMPUTE, Time.SPLIT_EXTRA)]
SENT = [PLACE[time] for time in (Time.TENSOR_FORWARD, Time.TENSOR_BACKWARD, Time.CONTEXT_FORWARD)]


def problem_on(device: DeviceProfile, num_devices: int) -> Problem:
    profile = load_profile("dgx-h100-80gb").model_copy(update={"device": device})
    target = PricingTarget(graph_of("gpt-tiny", 64), ClusterSpec(profile=profile, num_devices=num_devices), "bf16")
    return Problem.build(target, training_of(num_devices, 64), Pins(pp=1, tp=2, cp=1))


@pytest.mark.parametrize("num_devices", [512, 4096])
def test_compute_alone_is_slower_and_only_beyond_the_reference(num_devices: int) -> None:
    device = load_profile("dgx-h100-80gb").device
    alike = device.model_copy(update={"slowdown_spread": None, "slowdown_beyond_devices": None})
    with_them, without = problem_on(device, num_devices).table, problem_on(alike, num_devices).table
    assert device.slowdown_spread is not None
    factor = straggler_slowdown(num_devices, 512, device.slowdown_spread.value)
    assert (factor == 1.0) == (num_devices == 512)
    np.testing.assert_allclose(with_them.time_s[..., COMPUTE], factor * without.time_s[..., COMPUTE], rtol=1e-12)
    np.testing.assert_array_equal(with_them.time_s[..., SENT], without.time_s[..., SENT])
    np.testing.assert_array_equal(with_them.num_bytes, without.num_bytes)
    np.testing.assert_array_equal(with_them.data_s, without.data_s)


def test_a_step_of_the_same_share_a_gpu_grows_by_no_more_than_its_compute() -> None:
    device = load_profile("dgx-h100-80gb").device
    small, large = (problem_on(device, n).solved().best for n in (512, 32768))
    assert small is not None
    assert large is not None
    assert large.step_time_s > small.step_time_s


@pytest.mark.parametrize("profile", list_profiles(), ids=lambda profile: profile.name)
def test_every_gpu_says_how_unlike_its_kind_is_and_from_where(profile: ClusterProfile) -> None:
    spread, beyond = profile.device.slowdown_spread, profile.device.slowdown_beyond_devices
    if profile.backend != "nccl":
        assert spread is None
        return
    assert spread is not None
    assert spread.fit is not None
    assert beyond is not None
    assert beyond.tag == "specified"
