"""One profile for a mixed cluster used as if all its devices were alike: everywhere what the weakest group reaches.

Ranks that run the same work in step wait for the slowest of them, so a plan that treats all devices alike takes

    device, node, software  of each field what the rule beside it in the schema says (``schema.Weakest``): of each
                            rate the least, of each cost the most, the mean price. A field without a rule is an error
    efficiency              of each class what the device that is slowest at it reaches
    network                 of each tier that of the group whose devices get least of it, over blocks that no border
                            between groups cuts: a group that fills its last node in part moves those behind it. Where
                            links between groups are given, a tier of its own outside gcd(devices of the groups)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import gcd
from typing import Literal, TypeVar

from pydantic import BaseModel

from hardware_profiles.schema import (
    ClusterProfile,
    DeviceGroup,
    DeviceProfile,
    DTypeName,
    Efficiency,
    MixedCluster,
    NetworkTier,
    OpClassName,
    Quantity,
    Weakest,
)

EIGHT_BITS: DTypeName = "fp8"
Model = TypeVar("Model", bound=BaseModel)


def slowest_profile(mixed: MixedCluster) -> ClusterProfile:
    """The profile of all groups together; ValueError where they have no dtype in common."""
    profiles = [group.cluster.profile for group in mixed.groups]
    counts = [group.cluster.num_devices for group in mixed.groups]
    backend = profiles[0].backend if len({profile.backend for profile in profiles}) == 1 else "none"
    node = weakest([profile.node for profile in profiles], counts)
    return ClusterProfile(
        name=mixed.name,
        description=" and ".join(f"{g.cluster.num_devices} devices of {g.cluster.profile.name}" for g in mixed.groups)
        + ", each quantity that of the weakest",
        backend=backend,
        device=_device(mixed, counts),
        node=node,
        tiers=_tiers(mixed, profiles, node.num_devices),
        software=weakest([profile.software for profile in profiles], counts),
    )


def weakest(parts: Sequence[Model], counts: Sequence[int], worked_out: Mapping[str, object] | None = None) -> Model:
    """What stands for all ``parts``, field by field as the schema's rules say.

    ``counts``: devices of each, for means. ``worked_out``: the fields whose rule is ``Weakest.BY_SLOWEST``.
    """
    model = type(parts[0])
    found: dict[str, object] = {}
    for name in model.model_fields:
        rule = weakest_rule(model, name)
        if rule is Weakest.BY_SLOWEST:
            found[name] = (worked_out or {})[name]
        elif rule is not Weakest.LEFT_OUT:
            found[name] = _of(rule, [getattr(part, name) for part in parts], counts)
    return model.model_validate(found)


def weakest_rule(model: type[BaseModel], name: str) -> Weakest:
    """The rule beside a field of the schema; TypeError where there is none."""
    rules = [entry for entry in model.model_fields[name].metadata if isinstance(entry, Weakest)]
    if len(rules) != 1:
        raise TypeError(f"{model.__name__}.{name} needs one rule of schema.Weakest beside it, has {len(rules)}")
    return rules[0]


def _of(rule: Weakest, values: Sequence[object], counts: Sequence[int]) -> object:
    """What stands for ``values``, one of each group."""
    if rule is Weakest.NAMES:
        return " + ".join(dict.fromkeys(str(value) for value in values))
    known = [value for value in values if value is not None]
    if rule is Weakest.MOST_OR_ONE:
        most_known = max(known, key=_number, default=None)
        return None if most_known is None or (len(known) < len(values) and _number(most_known) < 1) else most_known
    if len(known) < len(values):
        return None
    match rule:
        case Weakest.LEAST:
            return min(known, key=_number)
        case Weakest.MOST:
            return max(known, key=_number)
        case Weakest.MEAN:
            return _mean([value for value in known if isinstance(value, Quantity)], counts)
        case _:
            raise TypeError(f"{rule} says nothing of values")


def _number(value: object) -> float:
    if isinstance(value, Quantity):
        return value.value
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"{value!r} is no number")


def _mean(quantities: Sequence[Quantity], counts: Sequence[int]) -> Quantity:
    value = sum(q.value * count for q, count in zip(quantities, counts, strict=True)) / sum(counts)
    source = " and ".join(quantity.source for quantity in quantities)
    return quantities[0].model_copy(update={"value": value, "source": source})


def least(quantities: Iterable[Quantity]) -> Quantity:
    """The least of them, with its own provenance."""
    return min(quantities, key=lambda quantity: quantity.value)


def most(quantities: Iterable[Quantity]) -> Quantity:
    """The greatest of them, with its own provenance."""
    return max(quantities, key=lambda quantity: quantity.value)


def _device(mixed: MixedCluster, counts: Sequence[int]) -> DeviceProfile:
    devices = [group.cluster.profile.device for group in mixed.groups]
    shared: list[DTypeName] = [
        dtype for dtype in devices[0].peak_flops_per_s if all(dtype in d.peak_flops_per_s for d in devices)
    ]
    if not shared:
        raise ValueError(f"the devices of {mixed.name} have no dtype in common")
    peaks: dict[DTypeName, Quantity] = {
        dtype: least(device.peak_flops_per_s[dtype] for device in devices) for dtype in shared
    }
    bandwidth = least(device.memory_bandwidth_bytes_per_s for device in devices)
    efficiency: dict[OpClassName, Efficiency] = {}
    for name in devices[0].efficiency:
        if not all(name in device.efficiency for device in devices):
            continue
        if name == "memory_bound":
            rates = [(device, bandwidth.value, device.memory_bandwidth_bytes_per_s.value) for device in devices]
        else:
            wide: list[DTypeName] = [dtype for dtype in shared if dtype != EIGHT_BITS] or shared
            rates = [(d, peaks[dtype].value, d.peak_flops_per_s[dtype].value) for dtype in wide for d in devices]
        eight_bit = _eight_bit_fraction(name, devices, peaks)
        efficiency[name] = _efficiency(name, rates).model_copy(update={"eight_bit_fraction": eight_bit})
    return weakest(devices, counts, {"peak_flops_per_s": peaks, "efficiency": efficiency})


def _eight_bit_fraction(
    name: OpClassName, devices: Sequence[DeviceProfile], peaks: Mapping[DTypeName, Quantity]
) -> Quantity | None:
    """Of the shared 8-bit rate, what the slowest device reaches; None where all reach what they do in other dtypes."""
    known = [device.efficiency[name] for device in devices]
    if EIGHT_BITS not in peaks or all(each.eight_bit_fraction is None for each in known):
        return None
    fractions = [each.eight_bit_fraction or each.fraction for each in known]
    own = [device.peak_flops_per_s[EIGHT_BITS].value for device in devices]
    reached = [
        fraction.model_copy(update={"value": fraction.value * rate / peaks[EIGHT_BITS].value})
        for fraction, rate in zip(fractions, own, strict=True)
    ]
    return least(reached)


def _efficiency(name: OpClassName, rates: list[tuple[DeviceProfile, float, float]]) -> Efficiency:
    """Of the shared rate, what the slowest device reaches of its own; (device, shared rate, own rate)."""

    def reached(entry: tuple[DeviceProfile, float, float]) -> float:
        device, shared, own = entry
        return own * device.efficiency[name].fraction.value / shared

    worst = min(rates, key=reached)
    own = worst[0].efficiency[name]
    fraction = reached(worst)

    def half(attribute: Literal["half_size_flops", "half_rows"]) -> Quantity | None:
        """Half of the work that comes on top, in seconds of each device and then in work at the rate above."""
        halves = [
            (half.value / (reached(entry) * entry[1]) * fraction * entry[1], half)
            for entry in rates
            if (half := getattr(entry[0].efficiency[name], attribute)) is not None
        ]
        value, most = max(halves, key=lambda pair: pair[0], default=(0.0, None))
        return None if most is None else most.model_copy(update={"value": value})

    return own.model_copy(
        update={
            "fraction": own.fraction.model_copy(update={"value": fraction}),
            "half_size_flops": half("half_size_flops"),
            "half_rows": half("half_rows"),
            "residual_spread": max(device.efficiency[name].residual_spread for device, _, _ in rates),
        }
    )


def _tiers(mixed: MixedCluster, profiles: list[ClusterProfile], node_devices: int) -> tuple[NetworkTier, ...]:
    """One tier for each size of domain that any of the profiles has, innermost first."""
    counts = [group.cluster.num_devices for group in mixed.groups]
    domains = {tier.num_devices for profile in profiles for tier in profile.tiers if tier.num_devices is not None}
    sizes = sorted({_uncut(domain, counts) for domain in domains} - {1})
    block = gcd(*counts)
    border = _between_groups(mixed)
    outermost: list[int | None] = [None] if border is None else [block]
    found: list[NetworkTier] = []
    for size in [*(size for size in sizes if border is None or size < block), *outermost]:
        candidates = [_tier_joining(profile, size) for profile in profiles]
        weakest = min(candidates, key=lambda pair: _share_bytes_per_s(pair[1], pair[0].node.num_devices))
        latency = most(tier.latency_s for _, tier in candidates)
        tier = _for_nodes_of(node_devices, weakest[1], weakest[0].node.num_devices)
        name = f"{tier.name}-{size}" if any(tier.name == inner.name for inner in found) else tier.name
        found.append(tier.model_copy(update={"num_devices": size, "latency_s": latency, "name": name}))
    return (*found, border) if border is not None else tuple(found)


def _uncut(domain: int, counts: Sequence[int]) -> int:
    """The largest blocks of ranks that lie in one domain of so many devices each, whatever the groups' order.

    Ranks stand group by group, and each group begins a domain of its own.
    """
    return gcd(*(count if count < domain else gcd(domain, count) for count in counts))


def _tier_joining(profile: ClusterProfile, size: int | None) -> tuple[ClusterProfile, NetworkTier]:
    """The innermost tier of ``profile`` that joins ``size`` devices, or its outermost."""
    reaching = (t for t in profile.tiers if t.num_devices is None or (size is not None and t.num_devices >= size))
    return profile, next(reaching, profile.tiers[-1])


def _share_bytes_per_s(tier: NetworkTier, node_devices: int) -> float:
    """What one device sustains over ``tier`` while all of its node use it."""
    return tier.wire_bytes_per_s(node_devices) * tier.efficiency.value


def _for_nodes_of(num_devices: int, tier: NetworkTier, node_devices: int) -> NetworkTier:
    """``tier`` of nodes of ``node_devices`` as nodes of ``num_devices`` have it, each device with the same share."""
    links = tier.links_per_node * num_devices / node_devices
    whole = max(1, round(links))
    bandwidth = tier.bandwidth_bytes_per_s
    changed = bandwidth.model_copy(update={"value": bandwidth.value * links / whole})
    return tier.model_copy(update={"links_per_node": whole, "bandwidth_bytes_per_s": changed})


def _between_groups(mixed: MixedCluster) -> NetworkTier | None:
    """The weakest way between two groups as the outermost tier; None where no link was given."""
    if not mixed.links:
        return None
    ways = [_way(mixed, one, other) for one, other in combinations(mixed.groups, 2)]
    bandwidth = least(bandwidth for _, bandwidth in ways)
    return NetworkTier(
        name="between groups",
        num_devices=None,
        latency_s=most(latency for latency, _ in ways),
        bandwidth_bytes_per_s=bandwidth,
        links_per_node=1,
        efficiency=bandwidth.model_copy(update={"value": 1.0}),
    )


def _way(mixed: MixedCluster, one: DeviceGroup, other: DeviceGroup) -> tuple[Quantity, Quantity]:
    """Latency, and bandwidth of a node, between two groups: of their link, or of the slower one's network."""
    link = mixed.link(one.name, other.name)
    if link is not None:
        return link.latency_s, link.bandwidth_bytes_per_s
    outer = [(group.cluster.profile.tiers[-1], group.cluster.profile.node.num_devices) for group in (one, other)]
    rates = [(tier, num_devices * _share_bytes_per_s(tier, num_devices)) for tier, num_devices in outer]
    slower, rate = min(rates, key=lambda pair: pair[1])
    return most(tier.latency_s for tier, _ in outer), slower.bandwidth_bytes_per_s.model_copy(update={"value": rate})
