"""Why nothing fits: the constraint that binds at the layout that lacks least, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from costmodels.ledger import MemoryLedger
from costmodels.vocabulary.choices import Offload, Precision
from costmodels.vocabulary.terms import MemoryTerm
from hardware_profiles.mixed import grown
from hardware_profiles.schema import ClusterSpec
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.host import HostMemory
from planner.layout.layout import NO_PINS, Pins, Training
from planner.translate.to_plan import layout_text, offloaded_bytes

GIB = 2**30
# How many times as many GPUs are tried when nothing fits, and into how many steps the last doubling is parted.
MORE_DEVICES, PARTS = (2, 4, 8, 16, 32, 64), 8

NamedBytes = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Attempt:
    """What was searched, or could be instead."""

    cluster: ClusterSpec
    training: Training
    pins: Pins


Fits = Callable[[Attempt], bool]  # whether any layout fits
NOT_PROVED = "Of pipelines whose ranks hold several stages not every cut was tried: that none fits is not proved"
# Parts of the memory that are named.
MOST_PARTS = 3


def lacking_bytes(closest: Evaluated) -> float:
    """What the fullest device lacks, or where that is less scarce the fullest node's host memory or NVMe."""
    need, room = _fullest(closest)
    host = closest.host
    if host is None or host.share < need.total_bytes / room:
        return need.total_bytes - room
    _, needed, capacity, _ = _scarcest(host)
    return needed - capacity


def _fullest(found: Evaluated) -> tuple[MemoryLedger, float]:
    """The ledger of the device that is fullest, and what a plan may take of it."""
    return max(zip(found.ledgers, found.capacity_bytes, strict=True), key=lambda p: p[0].total_bytes / p[1])


def binding_text(
    cluster: ClusterSpec, closest: Evaluated, space_text: str, memory_risk: float, *, is_proved: bool = True
) -> str:
    """What binds, with its values. ``space_text``: the layouts of which ``closest`` needs least.

    ``is_proved``: whether no cut of any of them fits; of ranks with several stages not all cuts are tried.
    """
    return f"{_binding_text(cluster, closest, space_text, memory_risk)}{'' if is_proved else f'. {NOT_PROVED}'}"


def _binding_text(cluster: ClusterSpec, closest: Evaluated, space_text: str, memory_risk: float) -> str:
    need, room = _fullest(closest)
    host = closest.host
    even = f"Even the smallest of {space_text} ({layout_text(closest.layout)}) needs"
    if host is None or host.share < need.total_bytes / room:
        return (
            f"nothing fits: memory binds. {even} {need.total_bytes / GIB:.1f} GiB on its worst GPU, and "
            f"{_room_text(cluster, room, memory_risk)}. {_parts_text(need.rows)}"
        )
    name, needed, capacity, rows = _scarcest(host)
    return (
        f"nothing fits: {name} binds. {even} {needed / GIB:.1f} GiB of it on its fullest node, and a node of "
        f"{cluster.profile.name} has {capacity / GIB:.1f} GiB. {_parts_text(rows)}"
    )


def _room_text(cluster: ClusterSpec, room: float, memory_risk: float) -> str:
    """``H100 has 79.2 GiB``, and what a plan may take of that."""
    device = cluster.profile.device
    whole = device.memory_bytes.value
    if room >= whole:
        return f"{device.name} has {room / GIB:.1f} GiB"
    return (
        f"of the {whole / GIB:.1f} GiB of {device.name} a plan may take {room / GIB:.1f} by prediction, to fit with "
        f"{1 - memory_risk:.0%} (--memory-risk {memory_risk:g})"
    )


def _scarcest(host: HostMemory) -> tuple[str, float, float, NamedBytes]:
    """What binds on a node: its name, what is needed, what there is, and what takes it."""
    states = host.states
    if states.on_nvme and states.nvme_bytes / host.nvme_capacity_bytes >= host.share:
        return "NVMe", states.nvme_bytes, host.nvme_capacity_bytes, ((MemoryTerm.OPTIMIZER, states.optimizer),)
    return "host memory", states.ram_bytes, host.ram_capacity_bytes, tuple(offloaded_bytes(host).items())


def _parts_text(rows: NamedBytes) -> str:
    largest = sorted(rows, key=lambda row: -row[1])[:MOST_PARTS]
    return "Largest parts, in GiB: " + ", ".join(
        f"{name.replace('_', ' ')} {num_bytes / GIB:.1f}" for name, num_bytes in largest
    )


def smallest_change(asked: Attempt, fits: Fits, least_devices: int | None = None) -> str:
    """The first change that makes some layout fit: dropping one pin, or all, offloading, more GPUs.

    ``least_devices``: where something is known to fit, pinned as asked and of the same batch.
    """
    pins = asked.pins
    for field in fields(pins):
        if getattr(pins, field.name) is None:
            continue
        if fits(replace(asked, pins=replace(pins, **{field.name: None}))):
            return f"drop --{field.name.replace('_', '-')}: without that pin a plan fits"
    if pins != NO_PINS and fits(replace(asked, pins=NO_PINS)):
        return f"drop the pins {pins.describe()}: without all of them a plan fits"
    leaving = replace(asked, pins=replace(pins, offload_activations=True))
    if not pins.offload_activations and fits(leaving):
        return "add --offload-activations: with activations of some blocks in host memory a plan fits"
    offloading = replace(asked, pins=replace(pins, offload=Offload.CPU))
    if pins.offload in (None, Offload.NONE) and fits(offloading):
        return "add --offload cpu: with optimiser states in host memory a plan fits"
    if least_devices is not None:
        return f"use --gpus {least_devices}: on that many of these GPUs a plan fits"
    return _more_devices(asked, fits) or _last_resorts(asked.training)


def _last_resorts(training: Training) -> str:
    """What makes any model smaller, where nothing else was found to be enough."""
    if training.precision is Precision.FP32:
        return "use devices with more memory, a shorter --seq-len, or --precision bf16"
    return "use devices with more memory, or a shorter --seq-len"


def _more_devices(asked: Attempt, fits: Fits) -> str | None:
    """The fewest devices, of those tried, with which something fits."""
    pins, cluster = asked.pins, asked.cluster
    for factor in MORE_DEVICES:
        there = _fitting(asked, grown(cluster, factor), fits)
        if there is None:
            continue
        if cluster.mixed is None:
            there = _fewer(asked, there, cluster.num_devices * factor // 2, fits)
        num_devices, batch = there.cluster.num_devices, there.training.global_batch_size
        devices = f"--gpus {num_devices}" if cluster.mixed is None else f"{factor} times as many of each"
        options = devices + (f" --global-batch {batch}" if batch != asked.training.global_batch_size else "")
        return f"use {options}{' without pins' if pins != NO_PINS else ''}: on that many of these GPUs a plan fits"
    return None


def _fitting(asked: Attempt, cluster: ClusterSpec, fits: Fits) -> Attempt | None:
    """What fits there without pins: of the same batch, else of one that all devices can share; None if neither does."""
    same, number = replace(asked, cluster=cluster, pins=NO_PINS), cluster.num_devices
    batch = -(-max(asked.training.global_batch_size, number) // number) * number
    shared = replace(same, training=replace(asked.training, global_batch_size=batch))
    attempts = (same,) if batch == asked.training.global_batch_size else (same, shared)
    return next(filter(fits, attempts), None)


def _fewer(asked: Attempt, fitting: Attempt, too_few: int, fits: Fits) -> Attempt:
    """The same on fewer devices than ``fitting`` and more than ``too_few``, in ``PARTS`` steps, by whole nodes."""
    cluster, most = fitting.cluster, fitting.cluster.num_devices
    node = cluster.profile.node.num_devices
    whole = node if most > node else 1
    steps = (too_few + (most - too_few) * part / PARTS for part in range(1, PARTS))
    counts = sorted({count for step in steps if too_few < (count := -(-int(step) // whole) * whole) < most})
    low, high = 0, len(counts)
    while low < high:  # more devices never fit less: taken for granted
        middle = (low + high) // 2
        found = _fitting(asked, cluster.model_copy(update={"num_devices": counts[middle]}), fits)
        low, high, fitting = (middle + 1, high, fitting) if found is None else (low, middle, found)
    return fitting
