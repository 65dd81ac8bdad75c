"""The numbers about cluster and framework that the cost table holds beside its arrays."""

from __future__ import annotations

from costmodels.ledger import SoftwareBytes
from costmodels.memory import COMPUTE_BYTES, GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES
from costmodels.offload import HostWork, copy_s_per_byte, download_s, host_update_s, missing_facts
from costmodels.recipe import HookTimes
from costmodels.step import FP32_BYTES, optimizer_step_line, update_bytes
from costmodels.vocabulary.choices import Offload
from hardware_profiles.schema import ClusterSpec
from planner.layout.layout import Training
from planner.pricing.machine import Machine
from planner.pricing.target import PricingTarget
from planner.table.facts import ClusterFacts, DeviceFacts, FrameworkFacts, HostCopies, HostFacts, Line, ShardedHooks

# FSDP2 prefetches the next unit while one computes: two units' parameters or gradients are whole at once.
UNITS_IN_TRANSIT = 2


def cluster_facts(target: PricingTarget, training: Training) -> ClusterFacts:
    """The cluster's numbers for this training."""
    cluster = target.cluster
    groups = () if cluster.mixed is None else cluster.mixed.groups
    software = cluster.profile.software
    workspace = software.workspace_bytes
    return ClusterFacts(
        name=cluster.profile.name,
        num_devices=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        devices=tuple(
            _device_facts(name, each, target, training)
            for name, each in [("", cluster), *((group.name, group.cluster) for group in groups)]
        ),
        software=SoftwareBytes(
            software.allocator_reserve_fraction.value,
            software.communicator_bytes.value,
            software.context_bytes.value,
            max(target.recipe.workspace_bytes, 0.0 if workspace is None else workspace.value),
        ),
        hosts=tuple(
            _host_facts(cluster, training, offload)
            for offload in Offload
            if offload is not Offload.NONE and unpriced_offload(cluster, offload) is None
        ),
        copies=_host_copies(cluster),
    )


def _device_facts(name: str, cluster: ClusterSpec, target: PricingTarget, training: Training) -> DeviceFacts:
    device = cluster.profile.device
    moved = update_bytes(training.optimizer.value, fuses_momentum=target.recipe.fuses_momentum)
    line = optimizer_step_line(moved + target.recipe.update_extra_bytes.value, device)
    overlap = Machine(cluster).overlap
    message_slowdown = overlap.slowdown if cluster.profile.computes_on_host else 0.0
    return DeviceFacts(name, cluster.num_devices, device.memory_bytes.value, overlap, Line(*line), message_slowdown)


def unpriced_offload(cluster: ClusterSpec, offload: Offload) -> str | None:
    """Why ``offload`` has no price on ``cluster``; None where it has one."""
    if offload is Offload.NONE:
        return None
    if cluster.mixed is not None:
        return "offloading has no price on clusters of several kinds of nodes"
    missing = missing_facts(cluster.profile.node, uses_nvme=offload is Offload.NVME)
    names = ", ".join(f"node.{name}" for name in missing)
    return f"the profile of {cluster.profile.name} does not say {names}" if missing else None


def _host_facts(cluster: ClusterSpec, training: Training, offload: Offload) -> HostFacts:
    node, num_devices = cluster.profile.node, cluster.devices_per_node
    work = _host_work(training, offload)
    return HostFacts(
        offload=offload,
        update=Line(0.0, host_update_s(work, node, num_devices)),
        download=Line(0.0, download_s(work, node, num_devices)),
        ram_bytes=0.0 if node.ram_bytes is None else node.ram_bytes.value,
        nvme_bytes=0.0 if node.nvme_bytes is None else node.nvme_bytes.value,
        gradient_bytes=GRADIENT_BYTES,
        parameter_bytes=COMPUTE_BYTES[training.precision.value],
    )


def _host_copies(cluster: ClusterSpec) -> HostCopies | None:
    """Of activations; None where the profile does not say enough."""
    node, num_devices = cluster.profile.node, cluster.devices_per_node
    if node.ram_bytes is None or unpriced_offload(cluster, Offload.CPU) is not None:
        return None
    s_per_byte = copy_s_per_byte(node, num_devices)
    slowdown = 1 / s_per_byte / cluster.profile.device.memory_bandwidth_bytes_per_s.value
    return HostCopies(s_per_byte, slowdown, node.ram_bytes.value / num_devices)


def _host_work(training: Training, offload: Offload) -> HostWork:
    """What the update of one parameter asks of the host: every part of it grows with their number."""
    optimizer, item_bytes = training.optimizer.value, COMPUTE_BYTES[training.precision.value]
    stored = MASTER_BYTES + MOMENT_BYTES[optimizer]
    return HostWork(
        down_bytes=GRADIENT_BYTES,
        up_bytes=item_bytes,
        update_bytes=update_bytes(optimizer) + item_bytes,
        streamed_bytes=2 * stored if offload is Offload.NVME else 0.0,
    )


def _sharded_hooks(hooks: HookTimes | None, item_bytes: int) -> ShardedHooks | None:
    """The hooks around units whose parameters are computed with in so many bytes."""
    if hooks is None:
        return None
    is_cast = item_bytes < FP32_BYTES
    return ShardedHooks(
        hooks.sharded_forward_s + is_cast * hooks.cast_forward_s,
        hooks.sharded_backward_s + is_cast * hooks.cast_backward_s,
        hooks.gather_s,
        hooks.reduce_s,
    )


def framework_facts(target: PricingTarget) -> FrameworkFacts:
    """How the framework runs a layout."""
    recipe = target.recipe
    overflow, band, bucket = recipe.overflow_s_per_byte, recipe.error_band, recipe.state.bucket_elements
    plain = target.cluster.profile.software.plain_reserve_share
    # On a processor FSDP2 has no streams, and waits for each of its collectives.
    has_streams = not target.cluster.profile.computes_on_host
    return FrameworkFacts(
        name=recipe.name,
        overlaps_reduction=recipe.overlaps_reduction and has_streams,
        overlaps_whole_reduction=recipe.overlaps_reduction,
        overlaps_gather=recipe.overlaps_gather and has_streams,
        overlaps_micro_batches=recipe.overlaps_micro_batches and has_streams,
        gathers_to_recompute=recipe.gathers_to_recompute,
        transfers=recipe.transfers,
        exchanges_hide_under=recipe.exchanges_hide_under,
        exchanges_hide_without_pipeline=recipe.exchanges_hide_without_pipeline,
        partition=recipe.partition,
        head_weight=1.0 if recipe.head_weight is None else recipe.head_weight.value,
        plain_reserve=1.0 if plain is None else plain.value,
        units_in_transit=UNITS_IN_TRANSIT,
        has_fsdp_moments=recipe.memory.has_fsdp_moments,
        keeps_gradients=recipe.memory.keeps_gradients,
        reduces_in_place=recipe.state.reduces_in_place,
        leaves_whole=recipe.state.leaves_whole and target.precision == "fp32",
        hooks=_sharded_hooks(recipe.hooks, COMPUTE_BYTES[target.precision]),
        reduction_bytes=recipe.state.reduced_bytes(target.precision),
        bucket_elements=0.0 if bucket is None else bucket.value,
        extra_communicators=recipe.memory.extra_communicators.value,
        gathered_update_bytes=recipe.memory.gathered_update_bytes.value,
        gathered_update_shard_bytes=recipe.memory.gathered_update_shard_bytes.value,
        overflow_s_per_byte=None if overflow is None else overflow.value,
        item_bytes=COMPUTE_BYTES[target.precision],
        error_between_layouts=None if band is None else band.between_layouts,
    )
