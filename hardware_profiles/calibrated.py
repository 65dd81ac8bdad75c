"""A cluster's profile as its calibration corrects it: each factor says where it acts.

    product_rate       efficiency of matrix products, grouped products and convolutions
    attention_rate     efficiency of fused attention
    memory_rate        efficiency of memory-bound operators
    network_inside     bandwidth that collectives reach on tiers inside a node
    network_between    the same on tiers between nodes
    host_time          a framework's own host time (``costmodels/calibrated.py``), nothing of a profile
    collective_delay   how late hosts come to collectives (the same)
    allocator_reserve  share of memory lost between tensors
    constant bytes     workspaces that every rank keeps

No efficiency grows beyond 1, whatever the factor.
"""

from __future__ import annotations

from collections.abc import Mapping

from hardware_profiles.schema import (
    ClusterProfile,
    CollectiveRate,
    DeviceProfile,
    Efficiency,
    FactorName,
    NetworkTier,
    OpClassName,
    Quantity,
    SoftwareProfile,
)

Factors = Mapping[FactorName, float]
FACTOR_OF_CLASS: dict[OpClassName, FactorName] = {
    "gemm": "product_rate",
    "grouped_gemm": "product_rate",
    "convolution": "product_rate",
    "attention": "attention_rate",
    "memory_bound": "memory_rate",
}
MOST_RESERVE = 0.9  # a share of what comes and goes; more is no allocator's gaps


def calibrated(profile: ClusterProfile) -> ClusterProfile:
    """``profile`` with its own calibration applied; itself where it has none. It keeps the record of it."""
    calibration = profile.calibration
    if calibration is None:
        return profile
    return scaled(profile, calibration.values, calibration.constant_bytes)


def scaled(profile: ClusterProfile, factors: Factors, constant_bytes: float = 0.0) -> ClusterProfile:
    """``profile`` with ``factors`` applied, 1 where one is not named, and so many bytes more on every rank."""
    per_node = profile.node.num_devices
    return profile.model_copy(
        update={
            "device": _device(profile.device, factors),
            "tiers": tuple(_tier(tier, factors, per_node) for tier in profile.tiers),
            "software": _software(profile.software, factors, constant_bytes),
        }
    )


def _device(device: DeviceProfile, factors: Factors) -> DeviceProfile:
    def of_class(name: OpClassName, known: Efficiency) -> Efficiency:
        factor = factors.get(FACTOR_OF_CLASS[name], 1.0)
        fractions = {"fraction": known.fraction, "eight_bit_fraction": known.eight_bit_fraction}
        update = {each: _at_most_one(own, factor) for each, own in fractions.items() if own is not None}
        return known.model_copy(update=update)

    efficiency = {name: of_class(name, known) for name, known in device.efficiency.items()}
    return device.model_copy(update={"efficiency": efficiency})


def _tier(tier: NetworkTier, factors: Factors, per_node: int) -> NetworkTier:
    is_inside = tier.num_devices is not None and tier.num_devices <= per_node
    factor = factors.get("network_inside" if is_inside else "network_between", 1.0)

    def rate(known: CollectiveRate) -> CollectiveRate:
        return known.model_copy(update={"efficiency": _at_most_one(known.efficiency, factor)})

    names = ("efficiency", "all_to_all_efficiency", "all_reduce_efficiency")
    known = {name: quantity for name in names if (quantity := getattr(tier, name)) is not None}
    update: dict[str, object] = {name: _at_most_one(quantity, factor) for name, quantity in known.items()}
    update["collectives"] = {name: rate(known) for name, known in tier.collectives.items()}
    return tier.model_copy(update=update)


def _software(software: SoftwareProfile, factors: Factors, constant_bytes: float) -> SoftwareProfile:
    reserve = software.allocator_reserve_fraction
    share = min(max(MOST_RESERVE, reserve.value), reserve.value * factors.get("allocator_reserve", 1.0))
    update: dict[str, object] = {"allocator_reserve_fraction": reserve.model_copy(update={"value": share})}
    if constant_bytes > 0:
        known = 0.0 if software.workspace_bytes is None else software.workspace_bytes.value
        source = "memory that every measured run took besides what was predicted"
        update["workspace_bytes"] = Quantity(value=known + constant_bytes, tag="measured", source=source)
    return software.model_copy(update=update)


def _at_most_one(quantity: Quantity, factor: float) -> Quantity:
    """An efficiency times ``factor``, at most 1 or what it was before."""
    return quantity.model_copy(update={"value": min(max(1.0, quantity.value), quantity.value * factor)})
