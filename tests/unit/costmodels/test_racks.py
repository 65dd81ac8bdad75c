"""Racks of 72 devices in jobs of powers of two: as many devices of each rack, the others idle."""

import pytest

from costmodels.communication import collective_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.catalog import profile_for

RACK = "gb200-nvl72"


@pytest.mark.parametrize(
    ("num_devices", "of_each"),
    [(64, 64), (72, 72), (96, 48), (128, 64), (144, 72), (256, 64), (1024, 64), (131_072, 64), (576, 72), (145, 72)],
)
def test_as_many_devices_of_each_rack_are_used(num_devices: int, of_each: int) -> None:
    assert profile_for(num_devices, RACK).devices_per_node == of_each


@pytest.mark.parametrize("num_devices", [12, 20])
def test_other_nodes_are_filled(num_devices: int) -> None:
    assert profile_for(num_devices, "dgx-h100-80gb").devices_per_node == 8


@pytest.mark.parametrize("group", [GroupPlacement(8, 1), GroupPlacement(64, 1), GroupPlacement(8, 8)])
def test_groups_of_64_lie_inside_a_rack(group: GroupPlacement) -> None:
    """On 64, 128 or 1,024 devices alike; where full racks are used, every ninth group of 64 straddles two."""
    exchange = Collective(CollectiveKind.ALL_TO_ALL, 1e9, group)
    inside, *others = (collective_time_s(exchange, profile_for(n, RACK)) for n in (64, 128, 1024))
    assert others == [inside, inside]
    straddling = collective_time_s(exchange, profile_for(576, RACK))
    run = group.num_ranks * group.stride
    assert straddling == inside if run == 8 else straddling > 3 * inside
