"""What a profile must satisfy beyond its schema: rules that tie several of its numbers together."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from hardware_profiles.schema import (
    ClusterProfile,
    DeviceProfile,
    Efficiency,
    NetworkTier,
    NodeProfile,
    Quantity,
    SoftwareProfile,
)

FASTEST_PORT_BYTES_PER_S = 2e11  # 1.6 Tb/s, the fastest that is announced
USUAL_USD_PER_HOUR = 30.0  # above three times what any device of a shipped profile costs: a price of a whole node?
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]*")
LARGEST_VALUE = 1e18  # above every peak, size or rate that a machine of this age has in base units
SMALLEST_AMOUNT = 1e5  # bytes, bytes/s or FLOP/s: less is a slip of the unit, as of 25 GB/s or 81920 MiB
LONGEST_LATENCY_S = 1.0  # a message or a launch that takes longer is a slip of the unit
LONGEST_TEXT = 2000  # characters: a source is a sentence or two
LARGEST_COUNT = 1_000_000  # of devices, cores, links or sources of anything in one cluster
LARGEST_FACTOR = 1000.0  # of oversubscription; a residual spread of e is already no prediction
MOST_USD_PER_HOUR, MOST_WATTS, MOST_FAILURES_PER_YEAR = 1e4, 1e5, 1e4  # of one device
MOST_SLOWDOWN_SPREAD = 1.0  # of a logarithm: one device in six would be 2.7 times as slow as the middle one
# No source can be read later than today. A clock that is behind the profiles shipped with this version is wrong itself.
SHIPPED = datetime.date(2026, 11, 21)
# Attention is counted as the full product: causal kernels, which skip half of it, may reach twice the peak.
CAUSAL_FRACTION = 2.0
REQUIRED_EFFICIENCIES = ("gemm", "attention", "memory_bound")


def violations(profile: ClusterProfile) -> tuple[str, ...]:
    """Every rule that ``profile`` breaks, each with its place and values; empty if it is sound."""
    found = (*_names(profile), *_texts_and_counts(profile), *_value_ranges(profile))
    try:
        return (*found, *_device(profile.device), *_node(profile.node), *_tiers(profile), *_software(profile))
    except OverflowError:  # a count that is none, and is found already, has more digits than a float
        if not found:
            raise
        return found


def doubts(profile: ClusterProfile) -> tuple[str, ...]:
    """What may be so, but is more likely a slip; in words with its values."""
    found: list[str] = []
    outer, price = profile.tiers[-1], profile.device.usd_per_hour
    rate = outer.bandwidth_bytes_per_s.value
    if outer.num_devices is None and rate > FASTEST_PORT_BYTES_PER_S:
        found.append(
            f"{profile.name}: a port of {outer.name} has {rate:g} bytes/s, which are {8 * rate / 1e9:,.0f} Gb/s: are "
            f"these bits? {rate / 1e9:,.0f} Gb/s are {rate / 8:g} bytes/s"
        )
    if price is not None and price.value > USUAL_USD_PER_HOUR:
        found.append(
            f"{profile.name}: ${price.value:g} an hour is for each device: is it the price of a node of "
            f"{profile.node.num_devices}?"
        )
    return tuple(found)


def quantities(value: BaseModel, place: str = "") -> Iterator[tuple[str, Quantity]]:
    """Every quantity inside ``value`` with its dotted place."""
    return ((where, found) for where, found in _inside(value, place) if isinstance(found, Quantity))


def _inside(value: object, place: str) -> Iterator[tuple[str, object]]:
    """``value`` and all that it holds, each with its dotted place."""
    yield place, value
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, BaseModel):
        items = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, tuple):
        items = enumerate(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    elif isinstance(value, dict):
        items = value.items()  # pyright: ignore[reportUnknownVariableType]
    for name, item in items:
        yield from _inside(item, f"{place}.{name}" if place else str(name))


def _names(profile: ClusterProfile) -> Iterator[str]:
    for place, name in (("name", profile.name), *((f"aliases.{i}", a) for i, a in enumerate(profile.aliases))):
        if not NAME_PATTERN.fullmatch(name):
            yield f"{place}: {name!r} must consist of lower-case letters, digits, '.', '_' and '-'"
    if len({profile.name, *profile.aliases}) != 1 + len(profile.aliases):
        yield f"aliases: {list(profile.aliases)} repeat each other or the name {profile.name!r}"


def _texts_and_counts(profile: ClusterProfile) -> Iterator[str]:
    """Texts that a terminal can show and a person can read, and counts of things that can be."""
    for place, value in _inside(profile, ""):
        if isinstance(value, str):
            if len(value) > LONGEST_TEXT:
                yield f"{place}: holds {len(value):,} characters, more than {LONGEST_TEXT:,}"
            elif not value.strip() or not value.isprintable():
                yield f"{place}: must be text without control characters, is {value[:60]!r}"
        elif isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= LARGEST_COUNT:
            yield f"{place}: must be between 1 and {LARGEST_COUNT:,}, is {value:,}"


def _value_ranges(profile: ClusterProfile) -> Iterator[str]:
    latest = max(datetime.date.today(), SHIPPED) + datetime.timedelta(days=1)  # it may be tomorrow elsewhere
    for place, quantity in quantities(profile):
        if quantity.value > LARGEST_VALUE:
            yield f"{place}: {quantity.value:g} is above {LARGEST_VALUE:g}; values are in base units (bytes, s, FLOP/s)"
        if quantity.date is not None and quantity.date > latest:
            yield f"{place}.date: {quantity.date} is yet to come"


def _measured(*known: Quantity) -> bool:
    """Whether all were measured: then what looks contradictory is how the machine is."""
    return all(quantity.tag == "measured" for quantity in known)


def _positive(place: str, quantity: Quantity | None) -> Iterator[str]:
    if quantity is not None and quantity.value <= 0:
        yield f"{place}: must be above 0, is {quantity.value:g}"


def in_base_units(place: str, quantity: Quantity | None) -> Iterator[str]:
    """Of bytes, bytes/s and FLOP/s."""
    if quantity is not None and quantity.value < SMALLEST_AMOUNT:
        yield (
            f"{place}: must be at least {SMALLEST_AMOUNT:g}, is {quantity.value:g}; values are in base units (bytes, "
            "bytes/s, FLOP/s)"
        )


def _at_most(place: str, value: float, most: float) -> Iterator[str]:
    if value > most:
        yield f"{place}: must be at most {most:g}, is {value:g}"


def _share(place: str, quantity: Quantity | None, *, zero_allowed: bool = False) -> Iterator[str]:
    if quantity is None:
        return
    if quantity.value > 1 or (quantity.value == 0 and not zero_allowed):
        bounds = "between 0 and 1" if zero_allowed else "above 0 and at most 1"
        yield f"{place}: must be {bounds}, is {quantity.value:g}"


def _device(device: DeviceProfile) -> Iterator[str]:
    yield from in_base_units("device.memory_bytes", device.memory_bytes)
    yield from in_base_units("device.memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s)
    if device.kernel_launch_s.value > LONGEST_LATENCY_S:
        yield f"device.kernel_launch_s: {device.kernel_launch_s.value:g} s is above {LONGEST_LATENCY_S:g} s"
    yield from _peaks(device)
    yield from _efficiencies(device)
    if (device.slowdown_spread is None) != (device.slowdown_beyond_devices is None):
        yield "device.slowdown_spread: stands where, and only where, device.slowdown_beyond_devices does"
    if device.slowdown_beyond_devices is not None and device.slowdown_beyond_devices.value < 1:
        yield f"device.slowdown_beyond_devices: must be at least 1, is {device.slowdown_beyond_devices.value:g}"
    for place, quantity, most in (
        ("usd_per_hour", device.usd_per_hour, MOST_USD_PER_HOUR),
        ("watts", device.watts, MOST_WATTS),
        ("failures_per_device_year", device.failures_per_device_year, MOST_FAILURES_PER_YEAR),
        ("slowdown_spread", device.slowdown_spread, MOST_SLOWDOWN_SPREAD),
    ):
        yield from _at_most(f"device.{place}", quantity.value if quantity else 0.0, most)


def _peaks(device: DeviceProfile) -> Iterator[str]:
    if not device.peak_flops_per_s:
        yield "device.peak_flops_per_s: at least one dtype is needed"
    for dtype, peak in device.peak_flops_per_s.items():
        yield from in_base_units(f"device.peak_flops_per_s.{dtype}", peak)
    for wide, narrow in (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "fp8")):
        if wide in device.peak_flops_per_s and narrow in device.peak_flops_per_s:
            slow, fast = device.peak_flops_per_s[wide].value, device.peak_flops_per_s[narrow].value
            if fast < slow and not _measured(device.peak_flops_per_s[wide], device.peak_flops_per_s[narrow]):
                yield f"device.peak_flops_per_s: {narrow} ({fast:g}) is below {wide} ({slow:g})"


def _efficiencies(device: DeviceProfile) -> Iterator[str]:
    for op_class in REQUIRED_EFFICIENCIES:
        if op_class not in device.efficiency:
            yield f"device.efficiency.{op_class}: missing"
    for op_class, efficiency in device.efficiency.items():
        place, fraction = f"device.efficiency.{op_class}.fraction", efficiency.fraction
        if op_class != "attention":
            yield from _share(place, fraction)
        elif not 0 < fraction.value <= CAUSAL_FRACTION:
            yield f"{place}: must be above 0 and at most {CAUSAL_FRACTION:g}, is {fraction.value:g}"
        if efficiency.eight_bit_fraction is not None:
            yield from _share(f"device.efficiency.{op_class}.eight_bit_fraction", efficiency.eight_bit_fraction)
        yield from _at_most(f"device.efficiency.{op_class}.residual_spread", efficiency.residual_spread, LARGEST_FACTOR)
        half_s = _half_size_s(device, efficiency)
        if half_s > LONGEST_LATENCY_S:
            yield (
                f"device.efficiency.{op_class}.half_size_flops: every operator would take {half_s:g} s more, "
                f"above {LONGEST_LATENCY_S:g} s"
            )


def _half_size_s(device: DeviceProfile, efficiency: Efficiency) -> float:
    """What the half size adds to every operator at the highest peak."""
    peak = max((quantity.value for quantity in device.peak_flops_per_s.values()), default=0.0)
    rate = peak * efficiency.fraction.value
    return efficiency.half_size_flops.value / rate if efficiency.half_size_flops is not None and rate > 0 else 0.0


def _node(node: NodeProfile) -> Iterator[str]:
    yield from in_base_units("node.ram_bytes", node.ram_bytes)
    yield from in_base_units("node.host_link_bytes_per_s", node.host_link_bytes_per_s)
    yield from _positive("node.devices_per_host_link", node.devices_per_host_link)
    yield from in_base_units("node.host_memory_bandwidth_bytes_per_s", node.host_memory_bandwidth_bytes_per_s)
    yield from in_base_units("node.nvme_bandwidth_bytes_per_s", node.nvme_bandwidth_bytes_per_s)
    yield from in_base_units("node.nvme_bytes", node.nvme_bytes)
    yield from _positive("node.host_s_per_kernel", node.host_s_per_kernel)


def _tiers(profile: ClusterProfile) -> Iterator[str]:
    if not profile.tiers:
        yield "tiers: at least one is needed"
    names = [tier.name for tier in profile.tiers]
    if len(set(names)) != len(names):
        yield f"tiers: names must differ, are {names}"
    for index, tier in enumerate(profile.tiers):
        yield from _tier(f"tiers.{index}", tier, profile.node.num_devices)
    for index, (inner, outer) in enumerate(zip(profile.tiers, profile.tiers[1:], strict=False)):
        place = f"tiers.{index + 1} ({outer.name})"
        if inner.num_devices is None:
            yield f"tiers.{index} ({inner.name}): only the outermost tier may join all devices (num_devices null)"
        elif outer.num_devices is not None and outer.num_devices <= inner.num_devices:
            yield (
                f"{place}: joins {outer.num_devices} devices, not more than the {inner.num_devices} of {inner.name}; "
                "tiers stand innermost first"
            )
        per_node = outer.bandwidth_bytes_per_s.value * outer.links_per_node
        inner_per_node = inner.bandwidth_bytes_per_s.value * inner.links_per_node
        if per_node > inner_per_node and not _measured(inner.bandwidth_bytes_per_s, outer.bandwidth_bytes_per_s):
            yield f"{place}: {per_node:g} bytes/s a node exceed the {inner_per_node:g} of the tier inside, {inner.name}"


def _tier(place: str, tier: NetworkTier, devices_per_node: int) -> Iterator[str]:
    yield from in_base_units(f"{place}.bandwidth_bytes_per_s", tier.bandwidth_bytes_per_s)
    yield from _share(f"{place}.efficiency", tier.efficiency)
    yield from _share(f"{place}.all_to_all_efficiency", tier.all_to_all_efficiency)
    yield from _share(f"{place}.all_reduce_efficiency", tier.all_reduce_efficiency)
    for name, rate in tier.collectives.items():
        yield from _share(f"{place}.collectives.{name}.efficiency", rate.efficiency)
        if rate.latency_s.value > LONGEST_LATENCY_S:
            yield (f"{place}.collectives.{name}.latency_s: {rate.latency_s.value:g} s is above {LONGEST_LATENCY_S:g} s")
    if tier.latency_s.value > LONGEST_LATENCY_S:
        yield f"{place}.latency_s: {tier.latency_s.value:g} s is above {LONGEST_LATENCY_S:g} s"
    yield from _at_most(f"{place}.oversubscription", tier.oversubscription, LARGEST_FACTOR)
    yield from _at_most(f"{place}.residual_spread", tier.residual_spread, LARGEST_FACTOR)
    for name, rate in tier.collectives.items():
        yield from _at_most(f"{place}.collectives.{name}.residual_spread", rate.residual_spread, LARGEST_FACTOR)
    small, large = sorted((tier.num_devices or devices_per_node, devices_per_node))
    if small > 0 and large % small:
        yield f"{place}.num_devices: {tier.num_devices} devices do not fit nodes of {devices_per_node}"
    inside_a_node = tier.num_devices is not None and tier.num_devices <= devices_per_node
    if inside_a_node and tier.links_per_node != devices_per_node:
        yield (
            f"{place}.links_per_node: a tier inside a node has one link a device, {devices_per_node}, "
            f"not {tier.links_per_node}"
        )
    yield from _parts_of_a_tier(place, tier)


def _parts_of_a_tier(place: str, tier: NetworkTier) -> Iterator[str]:
    nodes = [point.num_nodes for point in tier.efficiency_at_scale]
    if nodes != sorted(set(nodes)):
        yield f"{place}.efficiency_at_scale: num_nodes must rise, is {nodes}"
    for index, point in enumerate(tier.efficiency_at_scale):
        yield from _share(f"{place}.efficiency_at_scale.{index}.fraction", point.fraction)
    ranks = [group.num_ranks for group in tier.share_of_groups]
    if ranks != sorted(set(ranks)):
        yield f"{place}.share_of_groups: num_ranks must rise, is {ranks}"
    for index, group in enumerate(tier.share_of_groups):
        yield from _share(f"{place}.share_of_groups.{index}.fraction", group.fraction)


def _software(profile: ClusterProfile) -> Iterator[str]:
    software: SoftwareProfile = profile.software
    yield from _share("software.allocator_reserve_fraction", software.allocator_reserve_fraction, zero_allowed=True)
    yield from _share("software.overlappable_fraction", software.overlappable_fraction, zero_allowed=True)
    if software.context_bytes.value >= profile.device.memory_bytes.value:
        yield (
            f"software.context_bytes: {software.context_bytes.value:g} leave nothing of the device's "
            f"{profile.device.memory_bytes.value:g} bytes"
        )
