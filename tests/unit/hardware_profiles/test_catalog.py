"""Profiles are found by name, alias and file, and damaged files are refused with everything that is wrong."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_profiles.catalog import (
    MAX_FILE_BYTES,
    HardwareProfileError,
    default_profile_name,
    list_profiles,
    load_profile,
    parse_profile,
    profile_for,
)


@pytest.fixture
def document() -> dict[str, Any]:
    return load_profile("dgx-a100-80gb").model_dump(mode="json")


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[object], str]:
    """The message with which a file is refused."""

    def refused(content: object) -> str:
        path = tmp_path / "profile.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(HardwareProfileError) as caught:
            load_profile(str(path))
        assert caught.value.hint
        return caught.value.message

    return refused


@pytest.mark.parametrize("name", ["dgx-h100-80gb", "DGX-H100-80GB", "h100", " nd-h100-v5 "])
def test_a_profile_is_found_by_name_and_alias_in_any_case(name: str):
    assert load_profile(name).name == "dgx-h100-80gb"


def test_the_default_is_shipped():
    assert load_profile(default_profile_name()).name == default_profile_name()


@pytest.mark.parametrize(
    ("wrong", "suggested"),
    [
        ("dgx-h10-80gb", "dgx-h100-80gb"),
        ("a10080gb", "dgx-a100-80gb"),
        ("mi30x", "mi300x-x8"),
        ("4090 box", "rtx-4090"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, suggested: str):
    with pytest.raises(HardwareProfileError) as caught:
        load_profile(wrong)
    assert repr(wrong) in caught.value.message
    assert suggested in caught.value.message
    assert "planner hardware list" in caught.value.hint


@pytest.mark.parametrize("wrong", ["", "zzzz", "../../etc/passwd", "no/such/file.json", "a\0b.json"])
def test_nonsense_is_refused_in_words(wrong: str):
    with pytest.raises(HardwareProfileError):
        load_profile(wrong)


@given(st.text(max_size=40))
def test_no_text_escapes_as_another_error(text: str):
    with contextlib.suppress(HardwareProfileError):
        profile = load_profile(text)
        assert text.strip().lower() in (profile.name, *profile.aliases)


@pytest.mark.parametrize("profile", list_profiles(), ids=lambda profile: profile.name)
def test_a_profile_survives_its_file(profile: Any, tmp_path: Path):
    path = tmp_path / "copy.json"
    path.write_text(profile.model_dump_json())
    assert load_profile(str(path)) == profile


def test_every_violation_is_listed_at_once(document: dict[str, Any], refusal: Callable[[object], str]):
    document["device"]["memory_bytes"]["value"] = -1
    document["device"]["peak_flops_per_s"]["bf15"] = document["device"]["peak_flops_per_s"]["bf16"]
    document["tiers"][0]["latency_s"]["tag"] = "guessed"
    document["node"]["sockets"] = 2
    del document["software"]
    message = refusal(document)
    assert "5 violations" in message
    for place in (
        "device.memory_bytes.value",
        "bf15",
        "tiers.0.latency_s.tag",
        "node.sockets: unknown key",
        "software",
    ):
        assert place in message


def test_contradictory_numbers_are_listed_at_once(document: dict[str, Any], refusal: Callable[[object], str]):
    document["device"]["efficiency"]["gemm"]["fraction"]["value"] = 1.2
    document["device"]["peak_flops_per_s"]["bf16"]["value"] = 1e12
    document["tiers"].reverse()
    document["tiers"][0]["efficiency"]["value"] = 0
    document["software"]["context_bytes"]["value"] = 1e12
    document["aliases"] = ["Has Space"]
    message = refusal(document)
    for place in (
        "device.efficiency.gemm.fraction: must be above 0 and at most 1, is 1.2",
        "bf16 (1e+12) is below fp32",
        "only the outermost tier may join all devices",
        "tiers.0.efficiency",
        "software.context_bytes",
        "'Has Space'",
    ):
        assert place in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "line 1, column 2"),
        (b"[]", "the file"),
        (b"null", "the file"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (MAX_FILE_BYTES + 1), "holds more than"),
        (b"1" * 5_000, "not JSON"),
        (b'{"name": "a", "name": "b"}', "key 'name' stands 2 times"),
        (b'{"schema_version": NaN}', "NaN is not a number"),
        (b'{"schema_version": 2}', "schema_version"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_in_words(content: bytes, words: str, refusal: Callable[[object], str]):
    assert words in refusal(content)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1e300", "-1", '"many"', "null", "true0"])
def test_a_value_that_is_no_quantity_is_refused(value: str, document: dict[str, Any], refusal: Callable[[object], str]):
    document["tiers"][1]["bandwidth_bytes_per_s"]["value"] = "HERE"
    refusal(json.dumps(document).replace('"HERE"', value).encode())


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("kernel_launch_s",), 6.5, "device.kernel_launch_s"),
        (("memory_bandwidth_bytes_per_s",), 2039, "memory_bandwidth_bytes_per_s: must be at least 100000, is 2039"),
        (("memory_bytes",), 81_920, "device.memory_bytes: must be at least 100000, is 81920; values are in base units"),
        (("memory_bytes",), 0, "device.memory_bytes: must be at least 100000, is 0"),
        (("slowdown_spread",), 2.6, "device.slowdown_spread: must be at most 1, is 2.6"),
        (("slowdown_beyond_devices",), 0.5, "device.slowdown_beyond_devices: must be at least 1, is 0.5"),
    ],
)
def test_slips_of_the_unit_are_refused(
    where: tuple[str], value: float, words: str, document: dict[str, Any], refusal: Callable[[object], str]
):
    document["device"][where[0]]["value"] = value
    assert words in refusal(document)


def test_a_bandwidth_in_gigabytes_is_refused(document: dict[str, Any], refusal: Callable[[object], str]) -> None:
    """25 was taken for 25 bytes a second, and plans kept off the network."""
    document["tiers"][1]["bandwidth_bytes_per_s"]["value"] = 25
    assert "tiers.1.bandwidth_bytes_per_s: must be at least 100000, is 25; values are in" in refusal(document)


def test_a_spread_of_slowdowns_without_its_reference_is_refused(
    document: dict[str, Any], refusal: Callable[[object], str]
):
    document["device"]["slowdown_beyond_devices"] = None
    assert "device.slowdown_spread: stands where, and only where" in refusal(document)


def test_a_folder_is_not_a_profile(tmp_path: Path):
    with pytest.raises(HardwareProfileError, match="not a regular file"):
        load_profile(str(tmp_path))


def test_the_source_names_the_file_in_the_message():
    with pytest.raises(HardwareProfileError, match=r"^mine\.json is not a valid hardware profile"):
        parse_profile(b"{}", source="mine.json")


def test_profile_for_gives_as_many_devices_as_asked_for():
    cluster = profile_for(64, "h100")
    assert (cluster.profile.name, cluster.num_devices, cluster.devices_per_node) == ("dgx-h100-80gb", 64, 8)
    assert profile_for(4, None).profile.name == default_profile_name()
    assert profile_for(4, None).devices_per_node == 4
    assert profile_for(16, "dgx-a100-80gb:16").profile.name == "dgx-a100-80gb"


@pytest.mark.parametrize("count", ["0", "", "x", "-1", "1.5", " 8"])
def test_a_count_that_is_none_is_told_by_itself(count: str):
    """And not as a profile of that name that nobody has."""
    with pytest.raises(HardwareProfileError, match="is no number of devices") as refused:
        profile_for(8, f"h100:{count}")
    assert refused.value.hint == "say how many there are, as in h100:8"


def test_a_file_that_is_not_there_is_told_before_its_count(tmp_path: Path):
    with pytest.raises(HardwareProfileError, match="cannot be read: No such file"):
        profile_for(8, f"{tmp_path}/none.json:16")


def test_a_network_that_ends_joins_no_more_devices(tmp_path: Path):
    """More were priced up to a collective between nodes, which ended in a ValueError."""
    profile = load_profile("dgx-h100-80gb")
    alone = profile.model_copy(update={"tiers": profile.tiers[:1], "name": "one-server"})
    path = tmp_path / "one.json"
    path.write_text(alone.model_dump_json())
    assert profile_for(8, str(path)).num_devices == 8
    with pytest.raises(HardwareProfileError, match="joins 8 devices, the run is for 16"):
        profile_for(16, str(path))


@pytest.mark.parametrize(("num_devices", "spec"), [(0, None), (-8, "h100"), (8, "h100:16"), (8, "h100:4,a100:4")])
def test_profile_for_refuses_counts_that_contradict(num_devices: int, spec: str | None):
    with pytest.raises(HardwareProfileError) as caught:
        profile_for(num_devices, spec)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("device.memory_bytes.value", True, "valid number"),
        ("device.memory_bytes.value", "8e10", "valid number"),
        ("device.memory_bytes.source", " ", "control characters"),
        ("device.memory_bytes.date", 0, "valid date"),
        ("device.memory_bytes.date", "2999-01-01", "2999-01-01 is yet to come"),
        ("device.name", "a\0b", "control characters"),
        ("device.sm_count", -5, "between 1 and 1,000,000"),
        ("device.efficiency.gemm.half_size_flops", {"value": 1e18, "tag": "measured", "source": "x"}, "s more"),
        ("device.efficiency.gemm.residual_spread", 1e9, "at most 1000"),
        ("device.usd_per_hour", {"value": 1e12, "tag": "measured", "source": "x"}, "at most 10000"),
        ("node.num_devices", 10**30, "between 1 and 1,000,000"),
        ("node.num_devices", 8.0, "valid integer"),
        ("description", "\x1b[2Jhello", "control characters"),
        ("name", "a" * 5000, "5,000 characters"),
        ("schema_version", True, "must be the number 1"),
        ("schema_version", 1.0, "must be the number 1"),
        ("tiers.0.num_devices", 3, "3 devices do not fit nodes of 8"),
        ("tiers.1.links_per_node", "8", "valid integer"),
        ("tiers.1.links_per_node", 10**400, "between 1 and 1,000,000"),
        ("tiers.1.oversubscription", 1e30, "at most 1000"),
        ("tiers.1.name", "nvlink", "names must differ"),
    ],
)
def test_what_only_looks_like_a_profile_is_refused(
    place: str, value: object, words: str, document: dict[str, Any], refusal: Callable[[object], str]
):
    *path, last = place.split(".")
    target: Any = document
    for part in path:
        target = target[int(part)] if part.isdigit() else target[part]
    target[last] = value
    message = refusal(document)
    assert words in message
    assert message.isprintable() or set(filter(lambda char: not char.isprintable(), message)) == {"\n"}


def test_numbers_too_large_for_a_float_are_refused_everywhere(
    document: dict[str, Any], refusal: Callable[[object], str]
):
    document["tiers"][0]["residual_spread"] = document["tiers"][1]["oversubscription"] = "HUGE"
    message = refusal(json.dumps(document).replace('"HUGE"', "1e999").encode())
    assert "2 violations" in message
    assert "finite" in message


def test_a_key_cannot_command_the_terminal(document: dict[str, Any], refusal: Callable[[object], str]):
    document["\x1b[2J"] = 1
    message = refusal(document)
    assert "\x1b" not in message
    assert "\\x1b[2J: unknown key" in message
