"""A measured profile, given to the cost models, predicts what was measured."""

import json
import statistics
from pathlib import Path

import pytest

from costmodels.communication import collective_time_s
from costmodels.compute import op_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass, OpWorkload
from hardware_profiles.catalog import load_profile, parse_profile
from hardware_profiles.probes.measurement import ClusterMeasurement, OverlapTiming, PairTiming, devices_per_host
from hardware_profiles.schema import ClusterSpec
from planner.calibration.network import steps_and_share, tiers_of
from planner.calibration.profile import profile_of
from planner.output_file import write_text
from tests.unit.costmodels.toy_cluster import make_cluster, make_tiers
from tests.unit.hardware_profiles.probes.measurements import host, measurement, timed_as_modelled

NEAREST = load_profile("cpu-gloo")


def cluster_measurement(num_links: int, latency_s: float = 1e-5) -> tuple[ClusterSpec, ClusterMeasurement]:
    """Two hosts of 8 that obey the toy cluster, and the measurement of them."""
    cluster = make_cluster(16, make_tiers(latency_s=latency_s, num_links=num_links))
    cluster = cluster.model_copy(update={"profile": cluster.profile.model_copy(update={"backend": "gloo"})})
    inside, outside = cluster.profile.tiers
    pairs = [
        PairTiming(
            source=0, target=target, latency_s=tier.latency_s.value, bytes_per_s=tier.bandwidth_bytes_per_s.value
        )
        for target, tier in ((1, inside), (8, outside))
    ]
    more = {"pairs": tuple(pairs), "domains": (8, 16), "collectives": timed_as_modelled(cluster, (8, 16))}
    return cluster, measurement([host(rank // 8) for rank in range(16)], **more)


@pytest.mark.parametrize("num_links", [1, 2, 4, 8])
def test_links_bandwidth_and_latency_are_recovered(num_links: int):
    cluster, timed = cluster_measurement(num_links)
    tiers = tiers_of(timed, cluster.profile.device.kernel_launch_s.value)
    assert [tier.num_devices for tier in tiers] == [8, None]
    assert [tier.links_per_node for tier in tiers] == [8, num_links]
    for found, true, placement in zip(tiers, cluster.profile.tiers, ((8, 1), (2, 8)), strict=True):
        assert found.bandwidth_bytes_per_s.value == pytest.approx(true.bandwidth_bytes_per_s.value, rel=0.05)
        assert found.latency_s.value == pytest.approx(true.latency_s.value, rel=0.02)
        assert found.latency_s.tag == "fitted"
        assert found.latency_s.fit is not None
        assert found.latency_s.fit.num_rows == sum((t.num_ranks, t.stride) == placement for t in timed.collectives)
        assert found.bandwidth_bytes_per_s.tag == "measured"
        assert str(found.latency_s.date) == "2026-01-02"


@pytest.mark.parametrize("num_links", [1, 4])
def test_the_cost_model_predicts_every_measured_collective(num_links: int):
    _, timed = cluster_measurement(num_links)
    spec = ClusterSpec(profile=profile_of(timed, NEAREST), num_devices=16)
    errors: list[float] = []
    for timing in timed.collectives:
        group = GroupPlacement(timing.num_ranks, timing.stride)
        predicted_s = collective_time_s(Collective(CollectiveKind(timing.kind), timing.num_bytes, group), spec)
        errors.append(abs(predicted_s / timing.time_s - 1))
    assert statistics.median(errors) < 0.01
    assert max(errors) < 0.15  # all ranks in one group: over both tiers, not fitted itself


def test_collectives_that_are_slower_than_their_wire_are_kept_apart():
    cluster, timed = cluster_measurement(8)
    halved = tuple(
        t.model_copy(update={"samples_s": tuple(2 * s for s in t.samples_s)}) if t.kind == "reduce_scatter" else t
        for t in timed.collectives
    )
    profile = profile_of(timed.model_copy(update={"collectives": halved}), NEAREST)
    rates = profile.tiers[1].collectives
    assert rates["reduce_scatter"].efficiency.value == pytest.approx(rates["all_gather"].efficiency.value / 2, rel=0.05)
    spec = ClusterSpec(profile=profile, num_devices=cluster.num_devices)
    group = GroupPlacement(2, 8)
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    times = [collective_time_s(Collective(kind, 2**26, group), spec) for kind in kinds]
    assert times[1] == pytest.approx(2 * times[0], rel=0.05)


def test_operators_are_predicted_as_measured():
    timed = measurement([host(0)])
    profile = profile_of(timed, NEAREST)
    for op in timed.devices[0].operators:
        workload = OpWorkload(OpClass(op.op_class), op.flops, op.num_bytes if op.op_class == "memory_bound" else 0.0)
        assert op_time_s(workload, profile.device, "fp32") == pytest.approx(op.time_s, rel=0.02)


def test_one_rank_measures_a_device_and_takes_over_the_network():
    profile = profile_of(measurement([host(0)]), NEAREST)
    assert profile.tiers == NEAREST.tiers
    assert "network taken over from cpu-gloo" in profile.description
    assert profile.device.kernel_launch_s.tag == "measured"
    assert profile.software.context_bytes.value == 2**28


@pytest.mark.parametrize(("both_s", "slowdown"), [(3.2, 0.2 / 2), (2.9, 0.0), (7.0, 1.0)])
def test_what_runs_beside_compute_slows_it_as_measured(both_s: float, slowdown: float):
    """3 s of products and 2 s of an all-reduce together; faster than the products alone is noise, slower than one after
    the other is no reason to overlap."""
    timed = OverlapTiming(
        compute_samples_s=(3.0, 3.0, 3.0),
        communication_samples_s=(2.0, 2.0, 2.0),
        both_samples_s=(both_s, both_s, 99.0),
    )
    profile = profile_of(cluster_measurement(2)[1].model_copy(update={"overlap": timed}), NEAREST)
    assert NEAREST.software.overlappable_fraction.value == 0
    assert profile.software.overlap_slowdown.value == pytest.approx(slowdown)
    assert profile.software.overlap_slowdown.tag == "measured"
    assert profile.software.overlappable_fraction.value > 0


def test_the_hosts_time_of_a_kernel_is_that_of_the_middle_rank():
    _, timed = cluster_measurement(2)
    assert profile_of(timed, NEAREST).node.host_s_per_kernel is None
    devices = tuple(
        device.model_copy(update={"issuing_samples_s": (rank * 1e-6, (rank + 1) * 1e-6, 1.0)})
        for rank, device in enumerate(timed.devices)
    )
    found = profile_of(timed.model_copy(update={"devices": devices}), NEAREST).node.host_s_per_kernel
    assert found is not None
    assert found.value == pytest.approx(8.5e-6)  # of 1 to 16


def test_a_measured_profile_survives_its_file(tmp_path: Path):
    profile = profile_of(cluster_measurement(2)[1], NEAREST, name="mine")
    write_text(tmp_path / "p.json", profile.model_dump_json())
    assert load_profile(str(tmp_path / "p.json")) == profile
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "p.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \udc00")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize("keys", [["a", "a", "b"], ["a", "b", "a", "b"], ["a", "a", "b", "c"]])
def test_irregular_hosts_are_refused(keys: list[str]):
    with pytest.raises(ValueError, match="nproc-per-node"):
        devices_per_host(keys)


def test_steps_and_shares_are_those_of_rings():
    assert steps_and_share("all_reduce", 4) == (6, 1.5)
    assert steps_and_share("all_to_all", 4) == (3, 0.75)
    assert steps_and_share("send_recv", 4) == (1, 1)


def test_a_collective_faster_than_its_wire_is_refused():
    document = profile_of(cluster_measurement(2)[1], NEAREST).model_dump(mode="json")
    document["tiers"][0]["collectives"]["all_gather"]["efficiency"]["value"] = 1.2
    document["tiers"][1]["collectives"]["all_to_all"]["latency_s"]["value"] = 5
    document["tiers"][1]["name"] = document["tiers"][0]["name"]
    with pytest.raises(ValueError, match="3 violations") as caught:
        parse_profile(json.dumps(document).encode(), source="a file")
    assert "tiers.0.collectives.all_gather.efficiency" in str(caught.value)
