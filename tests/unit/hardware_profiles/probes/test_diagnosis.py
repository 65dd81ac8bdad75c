from itertools import permutations

import pytest

from hardware_profiles.catalog import load_profile
from hardware_profiles.probes.diagnosis import diagnose
from hardware_profiles.probes.measurement import PairTiming, RdmaPort
from tests.unit.hardware_profiles.probes.measurements import device, host, host_pairs, measurement

LINK = 62.5e6


def rates(num_hosts: int) -> dict[tuple[int, int], float]:
    return dict.fromkeys(permutations(range(num_hosts), 2), LINK)


@pytest.mark.parametrize("num_hosts", [2, 3, 8])
def test_a_healthy_cluster_has_no_findings(num_hosts: int):
    hosts = [host(index, nic_bytes_per_s=LINK / 0.9) for index in range(num_hosts)]
    assert diagnose(measurement(hosts, pairs=host_pairs(rates(num_hosts)))) == ()


@pytest.mark.parametrize("num_hosts", [3, 4, 9])
@pytest.mark.parametrize("way", ["sends", "receives", "both"])
def test_a_host_with_a_fifth_of_the_bandwidth_is_named(num_hosts: int, way: str):
    known = rates(num_hosts)
    for source, target in known:
        if (source == 1 and way != "receives") or (target == 1 and way != "sends"):
            known[source, target] = LINK / 5
    found = diagnose(measurement([host(index) for index in range(num_hosts)], pairs=host_pairs(known)))
    assert len(found) == 1
    assert "host host1 is slow" in found[0]
    assert ("sends and receives" if way == "both" else way) in found[0]
    assert "0.1 Gb/s" in found[0]


@pytest.mark.parametrize(("num_hosts", "slow"), [(4, {1, 2}), (5, {0, 4}), (5, {0, 1, 2}), (9, {0, 1, 2, 3, 4, 5})])
def test_several_slow_hosts_are_each_named(num_hosts: int, slow: set[int]):
    known = {way: LINK / 5 if slow & {*way} else LINK for way in rates(num_hosts)}
    found = diagnose(measurement([host(index) for index in range(num_hosts)], pairs=host_pairs(known)))
    assert len(found) == len(slow)
    for line, index in zip(found, sorted(slow), strict=True):
        assert f"host host{index} is slow" in line
        assert "0.1 Gb/s" in line
        assert "others reach 0.5 Gb/s" in line


def test_one_fast_pair_makes_no_host_slow():
    """Two hosts that are one machine talk faster than any network."""
    known = {way: 20 * LINK if {*way} == {3, 4} else LINK for way in rates(8)}
    assert diagnose(measurement([host(index) for index in range(8)], pairs=host_pairs(known))) == ()


def test_where_one_host_alone_is_well_only_the_interfaces_tell():
    known = dict.fromkeys(permutations(range(3), 2), LINK / 5)
    assert diagnose(measurement([host(index) for index in range(3)], pairs=host_pairs(known))) == ()
    hosts = [host(0, shaper_bytes_per_s=LINK), *(host(index, shaper_bytes_per_s=LINK / 5) for index in (1, 2))]
    found = diagnose(measurement(hosts, pairs=host_pairs(known)))
    assert [line.split(":")[0] for line in found] == ["host host1 is slow", "host host2 is slow"]


def test_a_host_without_the_rdma_that_others_have_is_named():
    port = RdmaPort(name="mlx5_0", bytes_per_s=LINK)
    hosts = [host(0, rdma_ports=(port,)), host(1), host(2, rdma_ports=(port,))]
    (found,) = diagnose(measurement(hosts, pairs=host_pairs(rates(3))))
    assert "host host1 shows no active RDMA port, while 2 of 3 hosts do" in found


def test_of_two_hosts_the_direction_is_named():
    found = diagnose(measurement([host(0), host(1)], pairs=host_pairs({(0, 1): LINK, (1, 0): LINK / 5})))
    assert len(found) == 1
    assert "host1 sends to host0 at 0.1 Gb/s, but 0.5 Gb/s come back" in found[0]


@pytest.mark.parametrize("limit", ["nic_bytes_per_s", "shaper_bytes_per_s"])
def test_a_host_whose_interface_says_less_is_named_even_of_two(limit: str):
    hosts = [host(0, **{limit: LINK}), host(1, **{limit: LINK / 5})]
    found = diagnose(measurement(hosts, pairs=host_pairs(dict.fromkeys(((0, 1), (1, 0)), LINK / 5))))
    assert len(found) == 1
    assert "host host1 is slow: its eth0 has 0.1 Gb/s, where others have 0.5 Gb/s" in found[0]
    assert ("traffic control" if limit == "shaper_bytes_per_s" else "cable and port") in found[0]


def test_a_link_far_below_its_interface_is_told():
    hosts = [host(index, nic_bytes_per_s=20 * LINK) for index in range(2)]
    found = diagnose(measurement(hosts, pairs=host_pairs(rates(2))))
    assert len(found) == 2
    assert "5% of the 10 Gb/s" in found[0]


def test_rdma_that_is_there_but_not_used_is_told():
    port = RdmaPort(name="mlx5_0", bytes_per_s=50e9)
    hosts = [host(0, rdma_ports=(port,)), host(1, rdma_ports=(port,), settings={"NCCL_IB_DISABLE": "1"})]
    found = diagnose(measurement(hosts, pairs=host_pairs(rates(2))))
    assert len(found) == 2
    assert "RDMA is probably not used" in found[0]
    assert "mlx5_0" in found[0]
    assert "NCCL_IB_DISABLE turns them off" in found[1]
    fast = dict.fromkeys(rates(2), 45e9)
    assert diagnose(measurement([hosts[0], host(1, rdma_ports=(port,))], pairs=host_pairs(fast))) == ()


def test_a_slow_device_is_named():
    hosts = [host(index // 2) for index in range(4)]
    devices = (device(), device(), device(), device(flops_per_s=5e10))
    found = diagnose(measurement(hosts, devices=devices))
    assert len(found) == 1
    assert "rank 3 on host host1 computes slowly" in found[0]
    assert "clocks, power and temperature" in found[0]


def test_a_gpu_without_its_fast_links_is_told():
    nearest = load_profile("dgx-h100-80gb")
    slow = (PairTiming(source=0, target=1, latency_s=1e-5, bytes_per_s=20e9),)
    found = diagnose(measurement([host(0), host(0)], pairs=slow), nearest)
    assert len(found) == 1
    assert "nvidia-smi topo -m" in found[0]
    fast = (PairTiming(source=0, target=1, latency_s=1e-5, bytes_per_s=400e9),)
    assert diagnose(measurement([host(0), host(0)], pairs=fast), nearest) == ()


def test_more_processes_than_cores_are_told():
    hosts = [host(0), host(0)]
    found = diagnose(measurement(hosts, devices=(device(), device().model_copy(update={"core_share": 0.48}))))
    assert len(found) == 1
    assert "1 of 2 processes had a core for 48% to 48% of the time" in found[0]
