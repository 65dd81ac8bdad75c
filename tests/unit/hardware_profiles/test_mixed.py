"""Mixed clusters are described by a list or a file, refused with every violation, and not planned for yet."""

import json
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles.catalog import HardwareProfileError, profile_for
from hardware_profiles.mixed import is_mixed, mixed_cluster

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
    with pytest.raises(HardwareProfileError, match="stands 2 times"):
        mixed_cluster("h100:8,h100:8")


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


def test_planning_refuses_mixed_clusters_plainly(tmp_path: Path):
    for text in ("a100-80gb:32,h100:32", write(tmp_path, document())):
        with pytest.raises(HardwareProfileError, match="names a mixed cluster; planning takes one kind of device"):
            profile_for(64, text)
