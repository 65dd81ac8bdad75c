"""Times this machine or, under torchrun, this cluster; what the timings say of it is for planner.calibration."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
import warnings
from collections.abc import Callable, Generator
from pathlib import Path

import torch
import torch.distributed as dist

from hardware_profiles.probes import communication
from hardware_profiles.probes.compute import TORCH_DTYPES, time_attention, time_gemms
from hardware_profiles.probes.detect import DetectedHardware, detect
from hardware_profiles.probes.hosts import host_facts
from hardware_profiles.probes.issuing import time_issuing
from hardware_profiles.probes.measurement import ClusterMeasurement, DeviceMeasurement, OpTiming
from hardware_profiles.probes.memory import context_bytes, pinned_copy_bytes_per_s, time_element_wise, time_launches
from hardware_profiles.probes.storage import measure_storage
from hardware_profiles.probes.timing import CoreShare
from hardware_profiles.probes.topology import discover_domains, message_times_s
from hardware_profiles.schema import DTypeName

Say = Callable[[str], None]

# Seconds for the operators of one device at one visit, of which the full measurement of a cluster makes two, one before
# and one after its network; communication and storage follow their own effort. Under 3 minutes together.
FULL_OPERATORS_S, QUICK_OPERATORS_S = 30.0, 10.0
QUICK_STRIDE = 3


def measure_machine(say: Say, *, quick: bool = False, folder: Path | None = None) -> ClusterMeasurement | None:
    """Everything that is timed; None on every rank but 0. ``folder``: on the disk to time (None: no disk is timed).

    Joins the ranks that torchrun started, else measures one device alone. ValueError where ranks do not stand host by
    host.
    """
    with _ranks() as device:
        rank, is_cluster = (dist.get_rank(), True) if dist.is_initialized() else (0, False)
        tell: Say = say if rank == 0 else _silent
        detected = detect()
        facts = host_facts(detected)
        own = measure_device(device, detected, tell, quick=quick)
        hosts = communication.gathered(facts) if is_cluster else [facts]
        devices = communication.gathered(own) if is_cluster else [own]
        measurement = ClusterMeasurement(
            date=datetime.date.today(),
            tool=f"planner profile with torch {torch.__version__.partition('+')[0]}",
            backend="nccl" if device.type == "cuda" else "gloo",
            hosts=tuple(hosts),
            devices=tuple(devices),
        )
        _ = measurement.devices_per_node  # an irregular cluster is refused before it is measured
        if dist.is_initialized() and dist.get_world_size() > 1:
            measurement = _measure_network(
                measurement, device, tell, communication.QUICK if quick else communication.FULL
            )
            if not quick:
                later = communication.gathered(measure_device(device, detected, tell, quick=quick))
                both = tuple(first.joined(again) for first, again in zip(devices, later, strict=True))
                measurement = measurement.model_copy(update={"devices": both})
        if rank != 0:
            return None
        if folder is not None:
            tell(f"disk under {folder}")
            measurement = measurement.model_copy(update={"storage": measure_storage(folder)})
        return measurement


def _silent(_text: str) -> None:
    """What ranks other than 0 say."""


@contextlib.contextmanager
def _ranks() -> Generator[torch.device]:
    """Joins the process group of torchrun, if it started this process; yields this rank's device."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield device
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remarks about its own internals, which no user can act on
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield device
            dist.barrier()
        finally:
            dist.destroy_process_group()


def measure_device(device: torch.device, detected: DetectedHardware, say: Say, *, quick: bool) -> DeviceMeasurement:
    """Times launches and their issue, element-wise operators, attention, products and pinned copies on one device."""
    held = context_bytes(device)
    deadline_s = time.monotonic() + (QUICK_OPERATORS_S if quick else FULL_OPERATORS_S)
    stride = QUICK_STRIDE if quick else 1
    half: DTypeName = "bf16" if device.type == "cpu" or _has_bf16(device) else "fp16"
    primary, secondary = (half, "fp32") if device.type == "cuda" else ("fp32", half)
    core = CoreShare(device)
    say("launches and element-wise operators")
    launches, issuing = time_launches(device), time_issuing(device)
    operators: list[OpTiming] = [*time_element_wise(device, primary, TORCH_DTYPES[primary], deadline_s)]
    say(f"attention in {primary}")
    operators += time_attention(device, primary, deadline_s, stride=stride)
    for dtype in (primary, secondary):
        say(f"matrix products in {dtype}")
        operators += time_gemms(device, dtype, deadline_s, stride=stride)
    share = core.value()
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return DeviceMeasurement(
        device_name=properties.name if properties else "cpu",
        memory_bytes=properties.total_memory if properties else detected.ram_bytes,
        sm_count=properties.multi_processor_count if properties else None,
        context_bytes=held,
        launch_samples_s=tuple(sample / share for sample in launches),
        operators=tuple(op.slowed(share) for op in operators),
        issuing_samples_s=tuple(sample / share for sample in issuing),
        core_share=share,
        host_link_samples_bytes_per_s=pinned_copy_bytes_per_s(device),
    )


def _has_bf16(device: torch.device) -> bool:
    """Whether the GPU itself multiplies bf16: NVIDIA from compute capability 8.0 on, AMD's CDNA GPUs all."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] >= 8


def _measure_network(
    measurement: ClusterMeasurement, device: torch.device, say: Say, effort: communication.Effort
) -> ClusterMeasurement:
    keys = [host.key for host in measurement.hosts]
    pairs = communication.time_pairs(communication.pair_rounds(keys), device, effort, say)
    domains = discover_domains(message_times_s(pairs, keys), keys)
    placements = communication.placements_of(domains)
    collectives = communication.time_collectives(placements, device, effort, say)
    say("an all-reduce beside matrix products")
    overlap = communication.time_overlap(device, effort)
    found = {"pairs": pairs, "domains": domains, "collectives": collectives, "overlap": overlap}
    return measurement.model_copy(update=found)
