"""Mixed clusters are described by a list or a file, refused with every violation, and summed up by their weakest."""

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.communication import collective_time_s
from costmodels.compute import op_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass, OpWorkload
from hardware_profiles.catalog import HardwareProfileError, load_profile
from hardware_profiles.mixed import cluster_for, is_mixed, mixed_cluster
from hardware_profiles.schema import ClusterSpec

QUANTITY = {"value": 1e9, "tag": "datasheet", "source": "a test"}


def document() -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": "both halls",
        "groups": [
            {"name": "old", "hardware": "a100-80gb", "num_devices": 32},
            {"name": "new", "hardware": "h100", "num_devices": 16},
        ],
        "links": [
            {"between": ["old", "new"], "latency_s": {**QUANTITY, "value": 1e-5}, "bandwidth_bytes_per_s": QUANTITY}
        ],
    }


def write(folder: Path, content: object) -> str:
    path = folder / "groups.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_list_names_groups():
    mixed = mixed_cluster("a100-80gb:32, h100:32")
    assert [(g.cluster.profile.name, g.cluster.num_devices) for g in mixed.groups] == [
        ("dgx-a100-80gb", 32),
        ("dgx-h100-80gb", 32),
    ]
    assert mixed.num_devices == 64


def test_a_file_names_groups_and_links(tmp_path: Path):
    path = write(tmp_path, document())
    assert is_mixed(path)
    mixed = mixed_cluster(path)
    assert [group.name for group in mixed.groups] == ["old", "new"]
    assert mixed.links[0].bandwidth_bytes_per_s.value == 1e9


def test_every_violation_of_a_list_is_listed():
    with pytest.raises(HardwareProfileError, match="3 violations") as caught:
        mixed_cluster("a100-80gb:32,h100,:4,x:0")
    for part in ("'h100'", "':4'", "'x:0'"):
        assert part in caught.value.message
    with pytest.raises(HardwareProfileError, match=r"unknown hardware profile 'h10'"):
        mixed_cluster("a100-80gb:32,h10:8")


def test_every_violation_of_a_file_is_listed(tmp_path: Path):
    wrong = document()
    wrong["groups"].append({"name": "old", "hardware": "nothing-like-it", "num_devices": 1})
    wrong["links"].append({**wrong["links"][0], "between": ["new", "old"]})
    wrong["links"].append({**wrong["links"][0], "between": ["new", "attic"]})
    wrong["links"].append({**wrong["links"][0], "between": ["new", "new"]})
    with pytest.raises(HardwareProfileError, match="5 violations") as caught:
        mixed_cluster(write(tmp_path, wrong))
    for part in ("nothing-like-it", "'old' stands 2 times", "new and old stands twice", "'attic'", "to itself"):
        assert part in caught.value.message


def test_a_group_that_is_wrong_is_told_alone(tmp_path: Path):
    """Besides, there was said to be one group, not two; and a number of devices in words was taken."""
    wrong = document()
    wrong["groups"][0]["num_devices"] = "32"
    with pytest.raises(HardwareProfileError, match=r"1 violation:\n.*groups\.0\.num_devices") as caught:
        mixed_cluster(write(tmp_path, wrong))
    assert "at least 2 items" not in caught.value.message
    with pytest.raises(HardwareProfileError, match="at least 2 items"):
        mixed_cluster(write(tmp_path, {**document(), "groups": document()["groups"][:1], "links": []}))


@pytest.mark.parametrize("key", ["name", "groups", "schema_version"])
def test_a_file_that_lacks_something_is_refused(key: str, tmp_path: Path):
    wrong = document()
    wrong[key] = {"schema_version": 2, "groups": []}.get(key)
    path = write(tmp_path, wrong)
    with pytest.raises(HardwareProfileError, match=key):
        mixed_cluster(path)


@pytest.mark.parametrize("text", ["h100", "h100:8", "no/such/file.json", "\0", ""])
def test_one_kind_of_device_is_not_mixed(text: str):
    assert not is_mixed(text)


def test_a_kind_of_node_may_stand_twice_in_a_list():
    mixed = mixed_cluster("h100:8,h100:16")
    assert [group.name for group in mixed.groups] == ["dgx-h100-80gb", "dgx-h100-80gb#2"]


def test_the_number_of_devices_is_the_sum(tmp_path: Path):
    for text, number in (("a100-80gb:32,h100:32", 64), (write(tmp_path, document()), 48)):
        assert cluster_for(None, text).num_devices == number == cluster_for(number, text).num_devices
        with pytest.raises(HardwareProfileError, match=f"= {number} devices, the run is for 8"):
            cluster_for(8, text)
    path = write(tmp_path, document())
    assert cluster_for(None, f"{path}:48").num_devices == cluster_for(48, f"{path}:48").num_devices == 48
    for count, asked in (("16", 16), ("x", 0)):
        with pytest.raises(HardwareProfileError, match=f"= 48 devices, the run is for {asked}"):
            cluster_for(None, f"{path}:{count}")
    assert cluster_for(None, "h100:16").num_devices == cluster_for(16, "h100").num_devices == 16
    with pytest.raises(HardwareProfileError, match="how many devices"):
        cluster_for(None, "h100")


@pytest.mark.parametrize("text", ["a100-80gb:32,h100:32", "v100-32gb:16,a100-40gb:8,h100:24", "h100:4,a100-80gb:8"])
def test_together_no_device_is_faster_than_the_weakest(text: str):
    cluster = cluster_for(None, text)
    assert cluster.mixed is not None
    dtype = "fp16"
    for num_ranks, stride in ((2, 1), (4, 1), (2, 8), (4, 4)):
        placement = GroupPlacement(num_ranks, stride)
        for kind in CollectiveKind:
            together = collective_time_s(Collective(kind, 2**28, placement), cluster)
            for group in cluster.mixed.groups:
                own = ClusterSpec(profile=group.cluster.profile, num_devices=cluster.num_devices)
                assert together >= collective_time_s(Collective(kind, 2**28, placement), own) * (1 - 1e-9)
    for workload in (
        OpWorkload(OpClass.GEMM, 1e9, 1e6),
        OpWorkload(OpClass.GEMM, 1e13, 1e9),
        OpWorkload(OpClass.ATTENTION, 1e12, 1e8),
        OpWorkload(OpClass.MEMORY_BOUND, 0.0, 1e9),
    ):
        together = op_time_s(workload, cluster.profile.device, dtype)
        alone = [op_time_s(workload, group.cluster.profile.device, dtype) for group in cluster.mixed.groups]
        assert together >= max(alone) * (1 - 1e-9)
    devices = [group.cluster.profile.device for group in cluster.mixed.groups]
    assert cluster.profile.device.memory_bytes.value == min(device.memory_bytes.value for device in devices)


def test_equal_groups_are_together_what_each_is_alone():
    together, alone = cluster_for(None, "h100:16,h100:16").profile, load_profile("h100")
    assert together.tiers == alone.tiers
    assert together.device.peak_flops_per_s == alone.device.peak_flops_per_s
    for name, efficiency in alone.device.efficiency.items():
        assert together.device.efficiency[name].fraction.value == pytest.approx(efficiency.fraction.value)


def test_a_slow_link_between_groups_slows_what_crosses_it(tmp_path: Path):
    cluster = cluster_for(None, write(tmp_path, document()))
    inside = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, 2**28, GroupPlacement(16, 1)), cluster)
    across = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, 2**28, GroupPlacement(48, 1)), cluster)
    # 1 GB/s a node, blocks of two nodes: a ring of all devices passes nearly twice the bytes over 2 GB/s.
    assert across == pytest.approx(2 * 2**28 * 47 / 48 / 2e9, rel=0.1)
    assert inside < across / 10


def test_groups_without_a_dtype_in_common_are_refused(tmp_path: Path):
    eight_bit = load_profile("h100").model_dump(mode="json")
    eight_bit["device"]["peak_flops_per_s"] = {"fp8": eight_bit["device"]["peak_flops_per_s"]["fp8"]}
    path = tmp_path / "eight-bit.json"
    path.write_text(json.dumps(eight_bit))
    with pytest.raises(HardwareProfileError, match="no dtype in common"):
        cluster_for(None, f"a100-80gb:8,{path}:8")
