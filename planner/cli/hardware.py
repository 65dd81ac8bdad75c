"""``planner hardware``: the shipped profiles, one of them in full, and what this machine has."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer
from pydantic import BaseModel
from rich import box
from rich.markup import escape
from rich.table import Table

from hardware_profiles.catalog import HardwareProfileError, list_profiles, load_profile
from hardware_profiles.mixed import is_mixed, mixed_cluster
from hardware_profiles.sanity import quantities
from hardware_profiles.schema import ClusterProfile, MixedCluster, Quantity
from planner.cli.terminal import markup_console
from planner.errors import HardwareError
from planner.render_calibration import calibration_tables

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")

JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else there.")]


def register(app: typer.Typer) -> None:
    """Adds the command group to ``app``."""
    group = typer.Typer(help="What is known about hardware: the profiles, and this machine.")
    group.callback(invoke_without_command=True)(_default)
    group.command("list")(_list)
    group.command("show")(_show)
    group.command("detect")(_detect)
    app.add_typer(group, name="hardware")


def _default(context: typer.Context, as_json: JsonOption = False) -> None:
    """What is known about hardware: the profiles, and this machine."""
    if context.invoked_subcommand is None:
        _list(as_json)


def _list(as_json: JsonOption = False) -> None:
    """List the shipped profiles that --hardware takes."""
    with _as_planner_error():
        profiles = list_profiles()
    if as_json:
        _print_json([_summary(profile) for profile in profiles])
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("name", "node", "TFLOP/s", "GB/s inside", "and between"):
        table.add_column(column, no_wrap=column in ("name", "node"), justify="right" if column == "TFLOP/s" else "left")
    for profile in profiles:
        node = f"{profile.node.num_devices} x {escape(profile.device.name)}"
        table.add_row(profile.name, node, _peak_text(profile), *_tier_texts(profile))
    console = markup_console()
    console.print(table)
    console.print("`planner hardware show NAME` gives every number with its source, and other names.", soft_wrap=True)


def _show(
    name: Annotated[str, typer.Argument(help="Name, alias or JSON file of a profile, or NAME:COUNT,NAME:COUNT.")],
    as_json: JsonOption = False,
) -> None:
    """Show a profile: every number, how it is known, and its source."""
    with _as_planner_error():
        mixed = mixed_cluster(name) if is_mixed(name) else None
        profile = load_profile(name) if mixed is None else None
    if as_json:
        _print_json(mixed or profile)
        return
    if mixed is not None:
        _show_mixed(mixed)
    if profile is not None:
        _show_profile(profile)


def _show_mixed(mixed: MixedCluster) -> None:
    console = markup_console()
    console.print(f"[bold]{escape(mixed.name)}[/]  {mixed.num_devices} devices in {len(mixed.groups)} groups")
    table = Table()
    for column in ("group", "profile", "devices", "memory", "TFLOP/s", "GB/s between nodes"):
        table.add_column(column, overflow="fold", justify="right" if column == "devices" else "left")
    for group in mixed.groups:
        profile = group.cluster.profile
        table.add_row(
            escape(group.name),
            profile.name,
            str(group.cluster.num_devices),
            _amount(profile.device.memory_bytes.value, "B", binary=True),
            _peak_text(profile),
            _tier_texts(profile)[1],
        )
    console.print(table)
    for link in mixed.links:
        rate = _amount(link.bandwidth_bytes_per_s.value, "B/s")
        console.print(f"{escape(' - '.join(link.between))}: {rate} a node", soft_wrap=True)


def _show_profile(profile: ClusterProfile) -> None:
    console = markup_console()
    console.print(f"[bold]{escape(profile.name)}[/]  {escape(profile.description)}", soft_wrap=True)
    if profile.aliases:
        console.print(f"also named {', '.join(profile.aliases)}", soft_wrap=True)
    console.print(f"{profile.node.num_devices} devices a node, backend {profile.backend}")
    table = Table()
    table.add_column("quantity", overflow="fold")
    table.add_column("value", justify="right")
    table.add_column("known by")
    table.add_column("source", overflow="fold", ratio=1)
    for place, quantity in quantities(profile):
        fit = quantity.fit
        source = quantity.source if fit is None else f"{quantity.source}; fitted to {fit.to} ({fit.num_rows} rows)"
        table.add_row(_place_text(profile, place), _value_text(place, quantity), quantity.tag, escape(source))
    console.print(table)
    for note in profile.notes:
        console.print(escape(note), soft_wrap=True)
    if profile.calibration is not None:
        console.print(f"calibrated on {profile.calibration.date}, which corrects the numbers above:", soft_wrap=True)
        for each in calibration_tables(profile.calibration):
            console.print(each)


def _detect(as_json: JsonOption = False) -> None:
    """Show what this machine has, and the shipped profile nearest to it."""
    from hardware_profiles.probes.detect import detect, nearest_profile  # imports torch where there is one

    detected = detect()
    with _as_planner_error():
        profile, differences = nearest_profile(detected)
    if as_json:
        _print_json(
            {
                "detected": detected.model_dump(mode="json"),
                "nearest_profile": profile.name,
                "differences": list(differences),
            }
        )
        return
    console = markup_console()
    table = Table(title="This machine")
    table.add_column("what")
    table.add_column("found", overflow="fold")
    for what, found in detected.summary():
        table.add_row(what, escape(found))
    console.print(table)
    for line in detected.warnings:
        console.print(f"[yellow]slow:[/] {escape(line)}", soft_wrap=True)
    for line in detected.absent:
        console.print(f"absent: {escape(line)}", soft_wrap=True)
    console.print(f"nearest profile: [bold]{profile.name}[/]", soft_wrap=True)
    for line in differences:
        console.print(f"  differs: {escape(line)}", soft_wrap=True)


@contextmanager
def _as_planner_error() -> Generator[None]:
    try:
        yield
    except HardwareProfileError as error:
        raise HardwareError(error.message, hint=error.hint) from error


def _print_json(value: object) -> None:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    typer.echo(json.dumps(plain, indent=2))


def _summary(profile: ClusterProfile) -> dict[str, object]:
    return {
        "name": profile.name,
        "aliases": list(profile.aliases),
        "description": profile.description,
        "backend": profile.backend,
        "device": profile.device.name,
        "vendor": profile.device.vendor,
        "memory_bytes": profile.device.memory_bytes.value,
        "peak_flops_per_s": {dtype: peak.value for dtype, peak in profile.device.peak_flops_per_s.items()},
        "devices_per_node": profile.node.num_devices,
        "tiers": [
            {"name": t.name, "num_devices": t.num_devices, "bandwidth_bytes_per_s": t.bandwidth_bytes_per_s.value}
            for t in profile.tiers
        ],
    }


def _peak_text(profile: ClusterProfile) -> str:
    """TFLOP/s in the first of these dtypes that the device has."""
    peaks = profile.device.peak_flops_per_s
    order = ("bf16", "fp16", "tf32", "fp32", "fp8")
    dtype, peak = min(peaks.items(), key=lambda item: order.index(item[0]))
    return f"{peak.value / 1e12:.4g} {dtype}"


def _tier_texts(profile: ClusterProfile) -> tuple[str, str]:
    """The innermost and the outermost tier, in words and GB/s."""
    first, last = profile.tiers[0], profile.tiers[-1]
    inside = f"{first.name} {first.bandwidth_bytes_per_s.value / 1e9:.4g}"
    if len(profile.tiers) == 1:
        return inside, "-"
    return inside, f"{last.links_per_node} x {last.name} {last.bandwidth_bytes_per_s.value / 1e9:.4g}"


def _place_text(profile: ClusterProfile, place: str) -> str:
    """``tiers.0.latency_s`` with the tier's name in place of its index."""
    parts = place.split(".")
    if parts[0] == "tiers":
        parts[1] = profile.tiers[int(parts[1])].name
    return escape(".".join(parts))


def _value_text(place: str, quantity: Quantity) -> str:
    for ending, unit, binary in (
        ("_bytes_per_s", "B/s", False),
        ("_bytes", "B", True),
        ("_s", "s", False),
        ("half_size_flops", "FLOP", False),
    ):
        if place.endswith(ending) and "peak_flops_per_s" not in place:
            return _amount(quantity.value, unit, binary=binary)
    if "peak_flops_per_s" in place:
        return _amount(quantity.value, "FLOP/s")
    return f"{quantity.value:g}"


def _amount(value: float, unit: str, *, binary: bool = False) -> str:
    """A number with a prefix: 85.0e9 bytes as 79.2 GiB, 3e-06 s as 3 us."""
    if unit == "s":
        return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.4g} ms"
    base = 1024.0 if binary else 1000.0
    index = 0
    while value >= base and index < len(_PREFIXES) - 1:
        value, index = value / base, index + 1
    prefix = _PREFIXES[index].upper() + "i" if binary and index else _PREFIXES[index]
    return f"{value:.4g} {prefix}{unit}"
