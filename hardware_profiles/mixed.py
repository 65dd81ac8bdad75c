"""Clusters of several kinds of nodes: ``a100-80gb:32,h100:32``, or a file of node groups and the links between them.

The file: ``{"schema_version": 1, "name": "both halls", "groups": [{"name": "old", "hardware": "a100-80gb",
"num_devices": 32}, ...], "links": [{"between": ["old", "new"], "latency_s": QUANTITY, "bandwidth_bytes_per_s":
QUANTITY}]}``, where ``hardware`` is what ``--hardware`` takes and a quantity is as in a profile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from hardware_profiles.calibrated import calibrated
from hardware_profiles.catalog import (
    MAX_FILE_BYTES,
    MAX_NUM_DEVICES,
    HardwareProfileError,
    count_of,
    is_shipped,
    load_profile,
    parse_profile,
    profile_for,
    readable,
    spec_of,
)
from hardware_profiles.sanity import LONGEST_LATENCY_S, in_base_units, violations
from hardware_profiles.schema import SCHEMA_VERSION, ClusterProfile, ClusterSpec, DeviceGroup, GroupLink, MixedCluster
from hardware_profiles.slowest import slowest_profile

# A cluster as a plan carries it: the JSON of a profile, calibrated already, or of a mixed cluster of such.
Kept = dict[str, JsonValue]
Hardware = str | Kept


class _GroupEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    hardware: str
    num_devices: Annotated[int, Field(ge=1, le=MAX_NUM_DEVICES)]


class _GroupFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1]
    name: str
    groups: Annotated[tuple[_GroupEntry, ...], Field(min_length=2)]
    links: tuple[GroupLink, ...] = ()


def is_mixed(text: str) -> bool:
    """Whether ``--hardware`` text names several kinds of devices: a list, or a file with groups."""
    return "," in text or _groups_in(text) is not None


def cluster_for(num_devices: int | None, spec: Hardware | None = None) -> ClusterSpec:
    """The cluster that ``--hardware`` text names, or a plan carries; None for ``num_devices`` takes what it counts.

    Raises ``HardwareProfileError`` where the two disagree or neither says how many devices there are.
    """
    text = None if isinstance(spec, dict) else spec
    own = _found_again(spec) if isinstance(spec, dict) else _mixed_of(spec or "")
    if isinstance(own, MixedCluster):
        return _all_of(own, num_devices)
    if num_devices is None:
        num_devices = count_of(text.rpartition(":")[2]) if text and ":" in text else None
        if num_devices is None:
            raise HardwareProfileError("how many devices?", hint="give --gpus N, or --hardware NAME:N")
    return profile_for(num_devices, text) if own is None else spec_of(num_devices, own)


def _mixed_of(text: str) -> MixedCluster | None:
    """Of a list, of a file with groups, or of such a file and the number of all its devices; None for anything else."""
    if is_mixed(text):
        return mixed_cluster(text)
    name, colon, count = text.rpartition(":")
    if not colon or not is_mixed(name):
        return None
    mixed = mixed_cluster(name)
    _check_count(mixed, count_of(count) or 0)
    return mixed


def _check_count(mixed: MixedCluster, num_devices: int | None) -> None:
    if num_devices not in (None, mixed.num_devices):
        counts = " + ".join(str(group.cluster.num_devices) for group in mixed.groups)
        raise HardwareProfileError(
            f"{mixed.name!r} has {counts} = {mixed.num_devices} devices, the run is for {num_devices}",
            hint=f"give --gpus {mixed.num_devices}, or name what there is, as in --hardware A:8,B:16",
        )


def _all_of(mixed: MixedCluster, num_devices: int | None) -> ClusterSpec:
    _check_count(mixed, num_devices)
    try:
        profile = slowest_profile(mixed)
    except ValueError as error:
        raise HardwareProfileError(str(error), hint="plan for each group by itself") from error
    return ClusterSpec(profile=profile, num_devices=mixed.num_devices, mixed=mixed)


def kept(cluster: ClusterSpec) -> Kept | None:
    """``cluster`` as a plan carries it; None where its name alone finds it again."""
    if cluster.mixed is None:
        return None if is_shipped(cluster.profile) else _document(cluster.profile)
    groups = [group.cluster for group in cluster.mixed.groups]
    listed = ",".join(f"{group.profile.name}:{group.num_devices}" for group in groups)
    is_named = cluster.mixed.name == listed and not cluster.mixed.links
    return None if is_named and all(is_shipped(group.profile) for group in groups) else _document(cluster.mixed)


def _document(described: ClusterProfile | MixedCluster) -> Kept:
    return {"schema_version": SCHEMA_VERSION, **described.model_dump(mode="json", exclude_defaults=True)}


def _found_again(document: Kept) -> ClusterProfile | MixedCluster:
    """What ``kept`` made, or anybody wrote in its place; ``HardwareProfileError`` with every violation."""
    content, source = json.dumps(document).encode(), "hardware_profile of the plan"
    if "groups" not in document:
        return parse_profile(content, source=source)
    try:
        mixed = MixedCluster.model_validate_json(content, strict=True)
    except ValidationError as error:
        _refuse(source, readable(error))
    names = [group.name for group in mixed.groups]
    wrong = [f"group {name!r} stands {names.count(name)} times" for name in set(names) if names.count(name) > 1]
    for group in mixed.groups:
        if group.cluster.num_devices > MAX_NUM_DEVICES or group.cluster.mixed is not None:
            wrong.append(f"group {group.name!r}: must have at most {MAX_NUM_DEVICES:,} devices, of one kind")
        wrong += [f"group {group.name!r}: {line}" for line in violations(group.cluster.profile)]
    wrong += _wrong_links(mixed.links, names)
    if wrong:
        _refuse(source, wrong)
    return mixed


def grown(cluster: ClusterSpec, factor: int) -> ClusterSpec:
    """``factor`` times as many devices of each kind."""
    update: dict[str, object] = {"num_devices": cluster.num_devices * factor}
    if cluster.mixed is not None:
        groups = tuple(g.model_copy(update={"cluster": grown(g.cluster, factor)}) for g in cluster.mixed.groups)
        update["mixed"] = cluster.mixed.model_copy(update={"groups": groups})
    return cluster.model_copy(update=update)


def mixed_cluster(text: str) -> MixedCluster:
    """The mixed cluster of ``NAME:COUNT,NAME:COUNT`` or of a file of node groups.

    Raises ``HardwareProfileError`` with every violation.
    """
    document = None if "," in text else _groups_in(text)
    if document is None:
        found = _checked(text, text, _from_list(text))
        return MixedCluster(
            name=",".join(f"{g.cluster.profile.name}:{g.cluster.num_devices}" for g in found.groups),
            groups=tuple(_renamed(found.groups)),
        )
    try:
        file = _GroupFile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        found = [(each["loc"], each["msg"].lower()) for each in error.errors()]
        if any(place[:1] == ("groups",) != place for place, _ in found):
            # pydantic counts only groups that are right, and may find too few besides
            found = [each for each in found if each[0] != ("groups",)]
        _refuse(text, [f"{'.'.join(map(str, place)) or 'the file'}: {said}" for place, said in found])
    names = [group.name for group in file.groups]
    twice = [f"group {name!r} stands {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    entries = [(group.name, group.hardware, group.num_devices) for group in file.groups]
    return _checked(text, file.name, entries, file.links, twice)


def _from_list(text: str) -> list[tuple[str, str, int]]:
    groups: list[tuple[str, str, int]] = []
    wrong: list[str] = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        number = count_of(count) or 0
        if not name or not 1 <= number <= MAX_NUM_DEVICES:
            wrong.append(f"{part.strip()!r} is not NAME:COUNT")
        else:
            groups.append((part.strip(), name, number))
    if wrong:
        _refuse(text, wrong)
    return groups


def _renamed(groups: tuple[DeviceGroup, ...]) -> Iterator[DeviceGroup]:
    """Each group by its profile's name; a kind of node that stands again is a group of its own, ``dgx-h200#2``."""
    seen: list[str] = []
    for group in groups:
        name = group.cluster.profile.name
        seen.append(name)
        yield group.model_copy(update={"name": name if seen.count(name) == 1 else f"{name}#{seen.count(name)}"})


def _checked(
    source: str,
    name: str,
    entries: list[tuple[str, str, int]],
    links: tuple[GroupLink, ...] = (),
    found: Sequence[str] = (),
) -> MixedCluster:
    """The mixed cluster; ``found`` are violations that are known already."""
    groups: list[DeviceGroup] = []
    wrong = list(found)
    for group, hardware, num_devices in entries:
        try:
            cluster = ClusterSpec(profile=calibrated(load_profile(hardware)), num_devices=num_devices)
        except HardwareProfileError as error:
            wrong.append(f"group {group!r}: {error.message}")
        else:
            groups.append(DeviceGroup(name=group, cluster=cluster))
    names = [group for group, _, _ in entries]
    wrong += _wrong_links(links, names)
    if len(entries) < 2:
        wrong.append("a mixed cluster has at least two groups")
    if wrong:
        _refuse(source, wrong)
    return MixedCluster(name=name, groups=tuple(groups), links=links)


def _wrong_links(links: tuple[GroupLink, ...], names: list[str]) -> Iterator[str]:
    seen: set[frozenset[str]] = set()
    for index, link in enumerate(links):
        ends = frozenset(link.between)
        for end in sorted(ends - set(names)):
            yield f"links.{index}: there is no group {end!r}"
        if len(ends) == 1:
            yield f"links.{index}: a link joins two groups, not {link.between[0]!r} to itself"
        if ends in seen:
            yield f"links.{index}: the link between {' and '.join(sorted(ends))} stands twice"
        seen.add(ends)
        yield from in_base_units(f"links.{index}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)
        if link.latency_s.value > LONGEST_LATENCY_S:
            yield f"links.{index}.latency_s: {link.latency_s.value:g} s is above {LONGEST_LATENCY_S:g} s"


def _groups_in(text: str) -> dict[str, object] | None:
    """The document of a JSON file that has groups; None for anything else, which ``load_profile`` judges."""
    try:
        path = Path(text.strip())
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "groups" in document else None


def _refuse(source: str, found: list[str]) -> NoReturn:
    raise HardwareProfileError(
        f"{source} is not a valid mixed cluster, {len(found)} violation{'s' if len(found) > 1 else ''}:\n"
        + "\n".join(f"  - {line}" for line in found),
        hint="name the groups as NAME:COUNT,NAME:COUNT, or in a JSON file as docs/clusters.md describes it",
    )
