"""A plan made on a cluster of the user's own carries it: no later command needs the file again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planner
from hardware_profiles.catalog import list_profiles, load_profile
from hardware_profiles.sanity import doubts
from hardware_profiles.schema import ClusterProfile
from planner.errors import HardwareError, PlanError
from planner.plan.plan_file import read_plan, write_plan
from planner.plan.schema import Plan
from planner.request import load_cluster


def planned(hardware: str) -> Plan:
    return planner.search("llama-tiny", gpus=8, hardware=hardware, global_batch_size=32, seq_len=64)


def own_profile(folder: Path, name: str = "my-hall", base: str = "dgx-h100-80gb", **device: float) -> Path:
    """A profile of the user's: a shipped one with a slow network and other numbers of its device."""
    profile: dict[str, Any] = load_profile(base).model_dump(mode="json", exclude_none=True) | {
        "name": name,
        "aliases": [],
    }
    profile["tiers"][-1]["num_devices"] = None
    profile["tiers"][-1]["bandwidth_bytes_per_s"]["value"] = 1.25e9
    for key, value in device.items():
        profile["device"][key]["value"] = value
    path = folder / f"{name}-file.json"
    path.write_text(json.dumps(profile))
    return path


def two_halls(folder: Path) -> Path:
    latency, rate = ({"value": value, "tag": "measured", "source": "iperf"} for value in (5e-5, 2.5e9))
    link = {"between": ["old", "new"], "latency_s": latency, "bandwidth_bytes_per_s": rate}
    groups = [
        {"name": "old", "hardware": "a100-80gb", "num_devices": 4},
        {"name": "new", "hardware": str(own_profile(folder)), "num_devices": 4},
    ]
    path = folder / "halls.json"
    path.write_text(json.dumps({"schema_version": 1, "name": "both halls", "groups": groups, "links": [link]}))
    return path


def moved(plan: Plan, folder: Path) -> Plan:
    """As it is read elsewhere, where the files of its hardware are not."""
    for path in folder.glob("*.json"):
        path.unlink()
    write_plan(plan, folder / "plan.json")
    return read_plan(folder / "plan.json")


@pytest.mark.parametrize("write", [own_profile, two_halls])
def test_a_plan_carries_the_cluster_that_no_name_finds(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    made = planned(str(write(tmp_path)))
    plan = moved(made, tmp_path)
    assert plan == made
    assert made.prediction is not None
    again = planner.estimate(plan)
    assert again.prediction is not None
    assert again.prediction.step_time_s == pytest.approx(made.prediction.step_time_s, rel=1e-12)
    assert again.hardware_profile == made.hardware_profile
    why = planner.explain(plan)
    assert why.plan.prediction is not None
    assert why.plan.prediction.step_time_s == pytest.approx(made.prediction.step_time_s, rel=1e-12)
    assert any("as the plan carries it" in note for note in why.notes)


def test_a_run_goes_on_over_fewer_devices_of_it(tmp_path: Path) -> None:
    from planner.api import replan

    plan = moved(planned(str(own_profile(tmp_path))), tmp_path)
    fewer = replan(plan, 4).plan
    assert (fewer.hardware, fewer.num_devices + fewer.idle_devices) == ("my-hall", 4)
    assert fewer.hardware_profile == plan.hardware_profile


def test_what_a_name_finds_is_not_carried(tmp_path: Path) -> None:
    assert planned("h100").hardware_profile is None
    listed = planned("a100-80gb:4,h100:4")
    assert listed.hardware_profile is None
    on_own = planned(str(own_profile(tmp_path)))
    assert on_own.hardware_profile is not None
    assert planner.estimate(on_own, hardware="h100").hardware_profile is None


def test_a_profile_of_the_name_of_a_shipped_one_is_carried(tmp_path: Path) -> None:
    """Or the plan would be priced again on another machine without a word."""
    path = own_profile(tmp_path, name="dgx-h100-80gb", usd_per_hour=1.0)
    made = planned(str(path))
    again = planner.estimate(moved(made, tmp_path))
    assert made.prediction is not None
    assert again.prediction is not None
    assert again.prediction.usd_per_step == pytest.approx(made.prediction.usd_per_step)


def test_what_anybody_wrote_in_its_place_is_refused(tmp_path: Path) -> None:
    made = planned(str(own_profile(tmp_path)))
    assert made.hardware_profile is not None
    document = json.loads(made.model_dump_json())
    document["hardware_profile"]["device"]["memory_bytes"]["value"] = 80.0
    with pytest.raises(HardwareError, match="device.memory_bytes: must be at least 100000, is 80"):
        planner.estimate(Plan.model_validate(document))
    document["hardware_profile"]["name"] = "another"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match="the name of hardware_profile is 'another'"):
        read_plan(tmp_path / "plan.json")


def test_bits_for_bytes_and_the_price_of_a_node_are_asked_about(tmp_path: Path) -> None:
    """400 Gb/s written as 400e9 bytes/s is no faster than the NVLink inside, so that nothing contradicts it."""
    path = own_profile(tmp_path, usd_per_hour=49.24)
    document = json.loads(path.read_text())
    document["tiers"][-1]["bandwidth_bytes_per_s"]["value"] = 400e9
    path.write_text(json.dumps(document))
    notes: list[str] = []
    load_cluster(str(path), 16, notes)
    assert notes == [
        "my-hall: a port of ndr-infiniband has 4e+11 bytes/s, which are 3,200 Gb/s: are these bits? 400 Gb/s are "
        "5e+10 bytes/s",
        "my-hall: $49.24 an hour is for each device: is it the price of a node of 8?",
    ]


@pytest.mark.parametrize("profile", list_profiles(), ids=lambda profile: profile.name)
def test_nothing_of_a_shipped_profile_is_doubted(profile: ClusterProfile) -> None:
    assert doubts(profile) == ()


def test_one_node_is_used_where_the_network_between_nodes_is_slow(tmp_path: Path) -> None:
    """8 of 12 GPUs were never tried: of 12 none was said to be faster than 37.1 s a step, where 8 take 29.6."""
    path = str(own_profile(tmp_path))
    asked: dict[str, Any] = {"hardware": path, "global_batch_size": 240, "seq_len": 1024}
    one_node = planner.search("gpt2-1.5b", gpus=8, **asked)
    more = planner.search("gpt2-1.5b", gpus=12, **asked)
    assert one_node.prediction is not None
    assert more.prediction is not None
    assert more.prediction.step_time_s <= one_node.prediction.step_time_s * 1.001
