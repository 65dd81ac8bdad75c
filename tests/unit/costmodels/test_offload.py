"""Offloading: closed forms, what devices share, and the measured updates that the efficiency was not read off."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.offload import (
    HOST_EFFICIENCY,
    LINK_EFFICIENCY,
    HostWork,
    download_s,
    host_update_s,
    missing_facts,
)
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import NodeProfile, Quantity, Tag

WORK = HostWork(down_bytes=40e9, up_bytes=20e9, update_bytes=300e9)
factors = st.floats(1, 50)


def quantity(value: float, tag: Tag = "datasheet") -> Quantity:
    return Quantity(value=value, tag=tag, source="made up for tests")


def node(link: float = 32e9, host: float = 400e9, sharing: float | None = None, tag: Tag = "datasheet") -> NodeProfile:
    return NodeProfile(
        num_devices=8,
        ram_bytes=quantity(1e12),
        host_link_bytes_per_s=quantity(link, tag),
        devices_per_host_link=None if sharing is None else quantity(sharing),
        host_memory_bandwidth_bytes_per_s=quantity(host),
        nvme_bandwidth_bytes_per_s=quantity(20e9),
        nvme_bytes=quantity(10e12),
    )


def test_one_device_copies_as_fast_as_its_link() -> None:
    assert download_s(WORK, node(), 1) == pytest.approx(40e9 / (LINK_EFFICIENCY * 32e9))


def test_devices_share_a_link_and_the_hosts_memory() -> None:
    assert download_s(WORK, node(sharing=4), 8) == pytest.approx(40e9 / (LINK_EFFICIENCY * 32e9 / 4))
    assert download_s(WORK, node(sharing=4), 1) == pytest.approx(40e9 / (LINK_EFFICIENCY * 32e9))
    assert download_s(WORK, node(link=64e9), 8) == pytest.approx(40e9 / (HOST_EFFICIENCY * 400e9 / 8))


def test_a_measured_link_is_taken_as_it_was_measured() -> None:
    assert download_s(WORK, node(link=10e9, sharing=4, tag="measured"), 8) == pytest.approx(40e9 / 10e9)


def test_the_slowest_of_update_way_up_and_disks_counts() -> None:
    update_s = 300e9 / (HOST_EFFICIENCY * 400e9 / 8)
    assert host_update_s(WORK, node(), 8) == pytest.approx(update_s)
    assert host_update_s(WORK, node(link=1e9), 8) == pytest.approx(20e9 / (LINK_EFFICIENCY * 1e9))
    assert host_update_s(replace(WORK, streamed_bytes=240e9), node(), 8) == pytest.approx(240e9 / (20e9 / 8))


@pytest.mark.parametrize(("num_parameters", "measured_s"), [(1e9, 0.22), (4e9, 1.03), (10e9, 2.57)])
def test_zero_offloads_measured_updates(num_parameters: float, measured_s: float) -> None:
    """Table 4 of ZeRO-Offload; the efficiency is that of the last two, the first lies outside by a sixth."""
    work = HostWork(0.0, 2 * num_parameters, 30 * num_parameters)
    found = host_update_s(work, load_profile("dgx-2-v100-32gb").node, 1)
    assert found == pytest.approx(measured_s, rel=0.02 if num_parameters > 1e9 else 0.2)


@given(factors, factors, st.integers(1, 8))
def test_a_better_host_is_never_slower(link: float, host: float, num_devices: int) -> None:
    better = node(link=32e9 * link, host=400e9 * host, sharing=2)
    assert download_s(WORK, better, num_devices) <= download_s(WORK, node(sharing=2), num_devices)
    assert host_update_s(WORK, better, num_devices) <= host_update_s(WORK, node(sharing=2), num_devices)


@given(st.integers(1, 7))
def test_company_never_helps(num_devices: int) -> None:
    assert download_s(WORK, node(sharing=4), num_devices) <= download_s(WORK, node(sharing=4), num_devices + 1)
    assert host_update_s(WORK, node(), num_devices) <= host_update_s(WORK, node(), num_devices + 1)


def test_what_a_profile_does_not_say_is_named() -> None:
    bare = NodeProfile(num_devices=8, ram_bytes=quantity(1e12))
    needed = ("host_link_bytes_per_s", "host_memory_bandwidth_bytes_per_s")
    assert missing_facts(bare, uses_nvme=False) == needed
    assert missing_facts(bare, uses_nvme=True) == (*needed, "nvme_bandwidth_bytes_per_s", "nvme_bytes")
    assert missing_facts(node(), uses_nvme=True) == ()
    with pytest.raises(ValueError, match="host_link_bytes_per_s"):
        download_s(WORK, bare, 1)
