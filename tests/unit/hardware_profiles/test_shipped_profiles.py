"""Every shipped profile is sound: it loads, keeps the rules, states its sources and beats no wire."""

import importlib.resources

import pytest

from hardware_profiles.catalog import list_profiles, load_profile
from hardware_profiles.sanity import quantities, violations
from hardware_profiles.schema import ClusterProfile

NAMES_OTHERS_RELY_ON = (
    "dgx-a100-80gb",
    "dgx-a100-40gb",
    "dgx-h100-80gb",
    "dgx-h200",
    "dgx-b200",
    "dgx-2-v100-32gb",
    "cpu-gloo",
)

every_profile = pytest.mark.parametrize("profile", list_profiles(), ids=lambda profile: profile.name)


def test_every_file_in_the_folder_is_listed_under_its_own_name():
    files = {f.name for f in (importlib.resources.files("hardware_profiles") / "data").iterdir()}
    assert files == {f"{profile.name}.json" for profile in list_profiles()}


@pytest.mark.parametrize("name", NAMES_OTHERS_RELY_ON)
def test_the_names_that_others_rely_on_are_shipped(name: str):
    assert load_profile(name).name == name


def test_no_name_or_alias_stands_twice():
    names = [name for profile in list_profiles() for name in (profile.name, *profile.aliases)]
    assert sorted(names) == sorted(set(names))


@every_profile
def test_a_shipped_profile_keeps_every_rule(profile: ClusterProfile):
    assert violations(profile) == ()


@every_profile
def test_every_number_states_a_source_that_can_be_looked_up(profile: ClusterProfile):
    found = list(quantities(profile))
    assert len(found) > 20
    for place, quantity in found:
        assert len(quantity.source.split()) >= 3, f"{place}: {quantity.source!r}"
        assert "assumed" not in quantity.source, place


@every_profile
def test_a_number_that_was_fitted_says_to_what(profile: ClusterProfile):
    for place, quantity in quantities(profile):
        source = quantity.source.lower()
        speaks_of_a_fit = any(words in source for words in ("fitted", "fit t =", "same fit", "fit over", "fit of"))
        assert quantity.tag == "fitted" or not speaks_of_a_fit, f"{place}: {quantity.source}"
    reserve = profile.software.allocator_reserve_fraction
    assert reserve.tag == ("published" if profile.device.vendor == "Google" else "fitted")  # XLA's is its own report
    for quantity in (profile.software.plain_reserve_share, profile.software.launch_queue_kernels):
        assert quantity is not None


@every_profile
def test_no_collective_is_faster_than_its_wire_and_no_kernel_than_the_peak(profile: ClusterProfile):
    for tier in profile.tiers:
        for share in (tier.efficiency, tier.all_reduce_efficiency, tier.all_to_all_efficiency):
            assert share is None or share.value * tier.bandwidth_bytes_per_s.value <= tier.bandwidth_bytes_per_s.value
    for name, efficiency in profile.device.efficiency.items():
        assert 0 < efficiency.fraction.value <= (2 if name == "attention" else 1)  # causal kernels skip half of it


@every_profile
def test_a_datasheet_tag_is_never_put_on_an_efficiency(profile: ClusterProfile):
    for place, quantity in quantities(profile):
        if ".efficiency" in place or place.startswith("software."):
            assert quantity.tag != "datasheet", place


@pytest.mark.parametrize(
    ("name", "devices", "memory_gib", "bf16_tflops", "nvlink_gbytes", "ports", "port_gbit"),
    [
        ("dgx-a100-80gb", 8, (79, 80), 312, 300, 8, 200),
        ("dgx-a100-40gb", 8, (39, 40), 312, 300, 8, 200),
        ("dgx-h100-80gb", 8, (79, 80), 989, 450, 8, 400),
        ("dgx-h200", 8, (139, 141), 989, 450, 8, 400),
        ("dgx-b200", 8, (178, 180), 2250, 900, 8, 400),
        ("dgx-2-v100-32gb", 16, (31, 32), None, 150, 8, 100),
    ],
)
def test_the_dgx_profiles_state_what_the_datasheets_state(
    name: str,
    devices: int,
    memory_gib: tuple[float, float],
    bf16_tflops: float | None,
    nvlink_gbytes: float,
    ports: int,
    port_gbit: float,
):
    profile = load_profile(name)
    inside, between = profile.tiers
    peak = profile.device.peak_flops_per_s.get("bf16")
    assert profile.node.num_devices == devices
    assert memory_gib[0] <= profile.device.memory_bytes.value / 2**30 < memory_gib[1]
    assert (None if peak is None else peak.value / 1e12) == bf16_tflops
    assert inside.num_devices == devices
    assert inside.bandwidth_bytes_per_s.value == nvlink_gbytes * 1e9
    assert between.num_devices is None
    assert between.links_per_node == ports
    assert between.bandwidth_bytes_per_s.value == port_gbit * 1e9 / 8


def test_the_v100_has_no_bf16():
    assert "bf16" not in load_profile("v100").device.peak_flops_per_s
    assert "fp16" in load_profile("v100").device.peak_flops_per_s


def test_tpus_are_for_planning_only():
    assert {p.backend for p in list_profiles() if p.device.vendor == "Google"} == {"none"}
