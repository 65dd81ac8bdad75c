"""Finds a hardware profile by name, alias or file, and refuses a damaged one with everything that is wrong with it."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
import os
import stat
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from hardware_profiles.calibrated import calibrated
from hardware_profiles.sanity import violations
from hardware_profiles.schema import SCHEMA_VERSION, ClusterProfile, ClusterSpec

MAX_FILE_BYTES = 1_000_000
MAX_NUM_DEVICES = 1_000_000
_NUM_SUGGESTIONS = 5


class HardwareProfileError(ValueError):
    """A profile is unknown or invalid: the rule and the values in ``message``, the way out in ``hint``."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


_DATA = importlib.resources.files("hardware_profiles") / "data"


def default_profile_name() -> str:
    """The shipped profile that is planned for where no GPU is in sight and none is named."""
    return "dgx-h100-80gb"


@functools.cache
def list_profiles() -> tuple[ClusterProfile, ...]:
    """Every shipped profile, by name."""
    return tuple(map(_shipped, _shipped_names()))


@functools.cache
def _shipped_names() -> tuple[str, ...]:
    """A file is named after its profile."""
    names = (file.name for file in _DATA.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


@functools.cache
def _shipped(name: str) -> ClusterProfile:
    return parse_profile((_DATA / f"{name}.json").read_bytes(), source=f"shipped profile {name}.json")


def is_shipped(profile: ClusterProfile) -> bool:
    """Whether its name alone finds it again, number for number."""
    return profile.name in _shipped_names() and _shipped(profile.name) == profile


def load_profile(name_or_path: str) -> ClusterProfile:
    """The profile of a shipped name or alias (in any case), or of a JSON file.

    Raises ``HardwareProfileError`` with the nearest names, or with every violation in the file.
    """
    wanted = name_or_path.strip()
    if wanted.lower() in _shipped_names():
        return _shipped(wanted.lower())
    known = {name: profile for profile in list_profiles() for name in (profile.name, *profile.aliases)}
    if wanted.lower() in known:
        return known[wanted.lower()]
    if wanted.endswith(".json") or os.sep in wanted or (wanted and os.path.exists(wanted)):
        return _read_profile(Path(wanted))
    near = difflib.get_close_matches(wanted.lower(), known, n=_NUM_SUGGESTIONS, cutoff=0.5)
    near += [name for name in known if wanted and wanted.lower() in name and name not in near]
    nearest = list(dict.fromkeys(known[name].name for name in near))[:_NUM_SUGGESTIONS]
    raise HardwareProfileError(
        f"unknown hardware profile {name_or_path[:200]!r}"
        + (f"; the nearest names are {', '.join(nearest)}" if nearest else ""),
        hint="`planner hardware list` shows every profile; --hardware also takes a profile's JSON file. Where a plan "
        "was made with a profile of yours and does not carry it, give that file: --hardware FILE",
    )


def profile_for(num_devices: int, spec: str | None = None) -> ClusterSpec:
    """The cluster of ``num_devices`` devices that ``--hardware`` text names (None: the default profile), calibrated.

    ``spec`` is NAME, FILE, or either followed by ``:COUNT``, which must then equal ``num_devices``.
    """
    if not 1 <= num_devices <= MAX_NUM_DEVICES:
        raise HardwareProfileError(
            f"the number of devices must be between 1 and {MAX_NUM_DEVICES:,}, is {num_devices:,}",
            hint="pass the number of GPUs of the whole run with --gpus",
        )
    text = default_profile_name() if spec is None else spec
    if "," in text:
        _refuse_mixed(text)
    name, colon, count = text.rpartition(":")
    if not colon or os.path.exists(text):
        return spec_of(num_devices, calibrated(load_profile(text)))
    profile, counted = load_profile(name), count_of(count)  # that there is no such profile is told first
    if not counted:
        raise HardwareProfileError(
            f"{text!r}: {count!r} is no number of devices", hint=f"say how many there are, as in {name}:{num_devices}"
        )
    if counted != num_devices:
        raise HardwareProfileError(
            f"{text!r} asks for {counted} devices, the run for {num_devices}",
            hint=f"give the number once, or the same twice: --gpus {counted}, or --hardware {name}",
        )
    return spec_of(num_devices, calibrated(profile))


def spec_of(num_devices: int, profile: ClusterProfile) -> ClusterSpec:
    """So many devices of ``profile``, which is calibrated already; HardwareProfileError where it does not join them."""
    if profile.most_devices is not None and num_devices > profile.most_devices:
        raise HardwareProfileError(
            f"the network of {profile.name!r} joins {profile.most_devices} devices, the run is for {num_devices}",
            hint="plan for fewer, or give the profile the tier that joins its nodes, as planner hardware shows others",
        )
    return ClusterSpec(profile=profile, num_devices=num_devices)


def count_of(text: str) -> int | None:
    """A number of devices that is written in digits; None where it is none, or has more digits than any."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def parse_profile(content: bytes, *, source: str) -> ClusterProfile:
    """The profile in JSON ``content``; ``source`` names it in the error, which lists every violation."""
    data, slips = _json_of(content, source)
    if isinstance(data, dict) and "groups" in data and "device" not in data:
        _refuse_mixed(source)
    try:
        profile = ClusterProfile.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        _refuse(source, slips + readable(error))
    if isinstance(data, dict) and type(data.get("schema_version")) is not int:
        slips.append(f"schema_version: must be the number {SCHEMA_VERSION}, is {data.get('schema_version')!r}")
    found = slips + list(violations(profile))
    if found:
        _refuse(source, found)
    return profile


def _json_of(content: bytes, source: str) -> tuple[object, list[str]]:
    """What is written in ``content``, and what JSON readers pass over though it is wrong."""
    if len(content) > MAX_FILE_BYTES:
        _refuse(source, [f"holds more than {MAX_FILE_BYTES:,} bytes; a profile is a few kilobytes"])
    slips: list[str] = []

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in items]
        slips.extend(
            f"key {key!r} stands {keys.count(key)} times in one object"
            for key in dict.fromkeys(keys)
            if keys.count(key) > 1
        )
        return dict(items)

    def constant(text: str) -> None:
        slips.append(f"{text} is not a number that JSON or a profile allows")

    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant), slips
    except UnicodeDecodeError as error:
        _refuse(source, [f"is not UTF-8 text (byte {error.start})"])
    except json.JSONDecodeError as error:
        _refuse(source, [f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"])
    except RecursionError:
        _refuse(source, ["is nested too deeply to be a profile"])
    except ValueError as error:  # a number of more digits than Python converts
        _refuse(source, [f"is not JSON: {error}"])


def _read_profile(path: Path) -> ClusterProfile:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise HardwareProfileError(
                f"{path} is not a regular file", hint="--hardware takes a profile's name or its JSON file"
            )
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, HardwareProfileError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise HardwareProfileError(
            f"the hardware profile {str(path)!r} cannot be read: {reason}",
            hint="`planner hardware list` shows the shipped profiles",
        ) from error
    return parse_profile(content, source=str(path))


def readable(error: ValidationError) -> list[str]:
    """One line for each violation of the schema: its place, the rule, and what stands there."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        place = ".".join(str(part) for part in detail["loc"]) or "the file"
        given = repr(detail["input"])
        shown = "" if detail["type"] == "missing" or len(given) > 60 else f" (is {given})"
        rule = "unknown key" if detail["type"] == "extra_forbidden" else detail["msg"]
        lines.append(f"{place}: {rule[0].lower()}{rule[1:]}{shown}")
    return lines


def _refuse_mixed(source: str) -> NoReturn:
    raise HardwareProfileError(
        f"{source!r} names a mixed cluster where one profile is wanted",
        hint="name one kind of node; `planner search` and `planner hardware show` take mixed clusters",
    )


def _refuse(source: str, found: list[str]) -> NoReturn:
    count = f"{len(found)} violation{'s' if len(found) > 1 else ''}"
    raise HardwareProfileError(
        f"{_shown(source)} is not a valid hardware profile, {count}:\n"
        + "\n".join(f"  - {_shown(line)}" for line in found),
        hint=f"`planner hardware show {default_profile_name()} --json` prints a valid one to start from; "
        "docs/clusters.md says what each key means",
    )


def _shown(text: str) -> str:
    """``text`` without anything that a terminal would obey: what a damaged file holds is only shown."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
