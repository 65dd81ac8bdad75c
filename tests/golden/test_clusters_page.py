"""docs/clusters.md: its files are read and planned with, and every key of a profile stands in it."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

import planner
from costmodels.communication import collective_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles import mixed, schema
from hardware_profiles.catalog import profile_for

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"<!-- (\S+) -->\n```json\n(.*?)```", PAGE, re.DOTALL))
BY_HAND = (  # what a user writes; a calibration is written by a command
    schema.ClusterProfile,
    schema.DeviceProfile,
    schema.NodeProfile,
    schema.NetworkTier,
    schema.SoftwareProfile,
    schema.Efficiency,
    schema.EfficiencyAtScale,
    schema.GroupShare,
    schema.CollectiveRate,
    schema.Quantity,
    schema.Fit,
    schema.GroupLink,
    mixed._GroupFile,  # pyright: ignore[reportPrivateUsage]
    mixed._GroupEntry,  # pyright: ignore[reportPrivateUsage]
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", BY_HAND, ids=lambda model: model.__name__)
def test_every_key_stands_in_the_page(model: type[BaseModel]) -> None:
    named = set(re.findall(r"`(?:\w+\.)?(\w+)`", PAGE))
    assert set(model.model_fields) <= named


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("hardware", "num_devices"), [("hall.json:64", 64), ("halls.json", 32), ("halls.json:32", 32)])
def test_its_files_are_planned_with(hardware: str, num_devices: int) -> None:
    plan = planner.search("llama-tiny", hardware=hardware, global_batch_size=64, seq_len=64)
    assert plan.num_devices + plan.idle_devices == num_devices


@pytest.mark.usefixtures("here")
def test_the_profile_has_no_more_than_it_must() -> None:
    """Without any of its keys, but the processors and the price, it is refused."""
    document = json.loads(FILES["hall.json"])
    optional = {"sm_count", "usd_per_hour", "oversubscription", "fp32"}

    def parts(value: object) -> list[dict[str, object]]:
        if isinstance(value, list):
            return [part for each in value for part in parts(each)]
        if not isinstance(value, dict):
            return []
        return [value, *(part for each in value.values() for part in parts(each))]

    for part in parts(document):
        for key in list(part):
            if key in optional or (part is document["device"]["peak_flops_per_s"]):
                continue
            kept = part.pop(key)
            Path("without.json").write_text(json.dumps(document))
            with pytest.raises(ValueError, match=key):
                profile_for(8, "without.json")
            part[key] = kept


@pytest.mark.usefixtures("here")
def test_its_network_is_as_the_page_says() -> None:
    """All-gathers of 1 GB, closed forms: what leaves a GPU, a node and an island over the links that carry it."""
    cluster, num_bytes = profile_for(64, "hall.json"), 1e9
    rates = {
        GroupPlacement(4, 1): 450e9 * 0.6,  # each GPU's own NVLink
        GroupPlacement(64, 1): 2 * 25e9 * 0.9,  # one ring goes in and out of each node, over both of its ports
        GroupPlacement(16, 4): 2 * 25e9 * 0.9 / 4,  # four rings share these
        GroupPlacement(2, 32): 8 * 2 * 25e9 * 0.9 / 4 / 32,  # 32 rings share what the spine leaves an island's 8 nodes
    }
    for group, bytes_per_s in rates.items():
        took_s = collective_time_s(Collective(CollectiveKind.ALL_GATHER, num_bytes, group), cluster)
        latency_s = 20e-6 * group.num_ranks + 6.5e-6
        least_s = (group.num_ranks - 1) / group.num_ranks * num_bytes / bytes_per_s
        assert least_s <= took_s <= least_s + latency_s
