"""What stands for unlike devices follows the rule beside each field, and no field can be left without one."""

from itertools import permutations
from typing import Annotated

import pytest
from pydantic import BaseModel, ValidationError

from costmodels.compute import roofline
from costmodels.vocabulary.workload import OpClass
from hardware_profiles.catalog import load_profile
from hardware_profiles.mixed import mixed_cluster
from hardware_profiles.schema import DeviceProfile, Fit, NodeProfile, Quantity, SoftwareProfile, Weakest
from hardware_profiles.slowest import slowest_profile, weakest, weakest_rule

MODELS = (DeviceProfile, NodeProfile, SoftwareProfile)


def quantity(value: float) -> Quantity:
    return Quantity(value=value, tag="datasheet", source=f"a test of {value:g}")


@pytest.mark.parametrize("model", MODELS)
def test_every_field_has_a_rule(model: type[BaseModel]):
    assert all(isinstance(weakest_rule(model, name), Weakest) for name in model.model_fields)


def test_a_field_that_is_added_without_a_rule_fails():
    class Larger(NodeProfile):
        num_fans: int = 4

    with pytest.raises(TypeError, match=r"Larger.num_fans needs one rule of schema.Weakest"):
        weakest([Larger(num_devices=8), Larger(num_devices=8)], [8, 8])


def test_a_field_that_is_added_with_a_rule_is_kept():
    class Larger(NodeProfile):
        num_fans: Annotated[int, Weakest.MOST] = 4

    assert weakest([Larger(num_devices=8), Larger(num_devices=4, num_fans=6)], [8, 8]).num_fans == 6


def test_nothing_that_all_nodes_know_is_dropped():
    one = NodeProfile(
        num_devices=8, cpu_cores=96, num_numa_nodes=2, ram_bytes=quantity(1e12), host_link_bytes_per_s=quantity(2e10),
        devices_per_host_link=quantity(2), host_memory_bandwidth_bytes_per_s=quantity(3e11),
        nvme_bandwidth_bytes_per_s=quantity(1e10), nvme_bytes=quantity(1e13), host_s_per_kernel=quantity(1e-5),
    )  # fmt: skip
    other = one.model_copy(
        update={"cpu_cores": 64, "host_memory_bandwidth_bytes_per_s": quantity(2e11), "devices_per_host_link": None}
    )
    both = weakest([one, other], [8, 8])
    assert both.cpu_cores == 64
    assert both.host_memory_bandwidth_bytes_per_s == quantity(2e11)
    assert both.devices_per_host_link == quantity(2)  # None: each device has a link of its own
    assert all(getattr(both, name) is not None for name in NodeProfile.model_fields)
    assert weakest([one, other.model_copy(update={"ram_bytes": None})], [8, 8]).ram_bytes is None


def test_what_all_devices_know_is_kept_of_a_mixed_cluster():
    mixed = slowest_profile(mixed_cluster("a100-80gb:24,h100:8"))
    parts = [load_profile("a100-80gb"), load_profile("h100")]
    for name in NodeProfile.model_fields:
        if all(getattr(part.node, name) is not None for part in parts):
            assert getattr(mixed.node, name) is not None, name
    bandwidths = [part.node.host_memory_bandwidth_bytes_per_s for part in parts]
    assert mixed.node.host_memory_bandwidth_bytes_per_s in bandwidths
    assert mixed.software.plain_reserve_share == parts[0].software.plain_reserve_share
    prices = [part.device.usd_per_hour for part in parts]
    assert mixed.device.usd_per_hour is not None
    assert mixed.device.usd_per_hour.value == pytest.approx(
        sum(n * price.value for n, price in zip((24, 8), prices, strict=True) if price) / 32
    )
    assert mixed.device.detected_names == ()


def test_products_in_eight_bits_are_those_of_the_device_that_is_slowest_at_them():
    """An L40S has 733e12 FLOP/s in 8 bits, an H100 1979e12, of which it reaches a share of its own."""
    parts = [load_profile("h100").device, load_profile("l40s-x8").device]
    mixed = slowest_profile(mixed_cluster("h100:8,l40s-x8:8")).device

    def rate(device: DeviceProfile) -> float:
        return 1 / roofline(device, OpClass.GEMM, "fp8").seconds_per_flop

    assert parts[0].efficiency["gemm"].eight_bit_fraction is not None
    assert rate(mixed) == pytest.approx(min(map(rate, parts)))
    alike = slowest_profile(mixed_cluster("h100:8,h200:8")).device
    assert rate(alike) == pytest.approx(rate(parts[0]))


def test_a_fitted_number_says_its_fit_and_no_other_has_one():
    fit = Fit(to="timings of a test", num_rows=3)
    assert Quantity(value=1, tag="fitted", source="a test", fit=fit).fit == fit
    with pytest.raises(ValidationError, match="tagged fitted where, and only where"):
        Quantity(value=1, tag="fitted", source="a test")
    with pytest.raises(ValidationError, match="tagged fitted where, and only where"):
        Quantity(value=1, tag="measured", source="a test", fit=fit)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("a100-80gb:8,h100:8", [8, None]),
        ("a100-80gb:24,h100:8", [8, None]),
        ("a100-80gb:4,h100:12", [4, None]),  # ranks 4 to 11 are a node: eight ranks in a row are on two
        ("h100:12,a100-80gb:12", [4, None]),
        ("a100-80gb:3,h100:5", [None]),
        ("gb200-nvl72:36,gb200-nvl72:36", [36, None]),
        ("gb200-nvl72:64,h100:64", [8, 64, None]),
    ],
)
def test_nobody_reaches_beyond_a_node_that_a_group_fills_in_part(text: str, sizes: list[int | None]):
    mixed = mixed_cluster(text)
    assert [tier.num_devices for tier in slowest_profile(mixed).tiers] == sizes
    counts = [group.cluster.num_devices for group in mixed.groups]
    nodes = [group.cluster.profile.node.num_devices for group in mixed.groups]
    for order in permutations(zip(counts, nodes, strict=True)):
        host = [(group, rank // node) for group, (count, node) in enumerate(order) for rank in range(count)]
        inner = sizes[0] or 1
        assert all(len(set(host[first : first + inner])) == 1 for first in range(0, len(host), inner))
