"""A few steps of a plan, measured: the step and its parts, and the memory of every pipeline rank."""

from __future__ import annotations

import gc
import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from costmodels.vocabulary.choices import Offload
from planner.errors import InputError
from planner.executor.build import loaded_model
from planner.executor.executable import check_executable
from planner.executor.live_memory import LiveMemory
from planner.executor.mesh import check_world_size, place_of
from planner.executor.options import RunOptions
from planner.executor.randomness import seed_rank
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.train import Run, prepare, timed_step
from planner.plan.plan_file import plan_json
from planner.plan.schema import Plan

WARM_UP_STEPS = 2  # the first makes the optimiser's states, the second settles FSDP's order
COLLECTIVES: tuple[str, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv")


@dataclass(frozen=True)
class Measured:
    """What some steps of a plan came to. Times are of the slowest rank."""

    step_times_s: tuple[float, ...]
    optimizer_s: float  # of one step
    collectives_s: dict[str, float]  # in flight during one step by kind, hidden or not, waiting for others included
    memory_bytes: tuple[int, ...]  # by pipeline rank or share of the batch, the fullest of its ranks
    memory_is: str

    @property
    def step_time_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_times_s)


def measure(plan: Plan, options: RunOptions) -> dict[str, object]:
    """``options.steps`` steps after a warm-up, one more under torch's profiler, one more with memory counted.

    Runs on each rank of the plan; every rank gets the same.
    """
    with quiet_torch(), process_group(options.timeout_s, offloads=plan.offload is not Offload.NONE) as device:
        return measured(plan, options, device)


def measure_each(plan: Plan, others: Callable[[], list[Plan]], options: RunOptions) -> dict[str, object]:
    """As ``measure``, of ``plan`` and then of what rank 0 gets from ``others``, in one world.

    Under ``plans`` stand all of them, and under ``found`` what each came to, or ``refused`` with the reason where one
    cannot be executed.
    """
    with quiet_torch(), process_group(options.timeout_s, offloads=plan.offload is not Offload.NONE) as device:
        box = [[plan_json(each) for each in others()] if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(box)
        told = [Plan.model_validate_json(text).model_copy(update={"model": plan.model}) for text in box[0]]
        found = [measured(plan, options, device), *(_measured_or_refused(each, options, device) for each in told)]
    return {"plans": [json.loads(plan_json(each)) for each in (plan, *told)], "found": found}


def _measured_or_refused(plan: Plan, options: RunOptions, device: torch.device) -> dict[str, object]:
    """All ranks refuse a plan or none: what is refused is found out before anything is computed."""
    gc.collect()  # modules and their hooks refer to each other: the model before is to go
    try:
        check_executable(plan)
        return measured(plan, options, device)
    except InputError as error:
        return {"refused": error.message}


def measured(plan: Plan, options: RunOptions, device: torch.device) -> dict[str, object]:
    """As ``measure``, among ranks that have found each other."""
    last = WARM_UP_STEPS + options.steps
    check_world_size(plan)
    run = prepare(plan, loaded_model(plan), replace(options, steps=last + 2), device, None)
    times = [_step(run, step) for step in range(last)][WARM_UP_STEPS:]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    optimizer_s, collectives_s = _parts(run, last)
    memory, memory_is = _memory(run, last + 1, device)
    slowest = torch.tensor([optimizer_s, *collectives_s.values(), *times], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    values = slowest.tolist()
    kinds = dict(zip(collectives_s, values[1 : 1 + len(collectives_s)], strict=True))
    found = Measured(
        step_times_s=tuple(values[1 + len(collectives_s) :]),
        optimizer_s=values[0],
        collectives_s={kind: value for kind, value in kinds.items() if value > 0},
        memory_bytes=_by_row(memory, run, device),
        memory_is=memory_is,
    )
    return {**asdict(found), "step_time_s": found.step_time_s}


def _step(run: Run, step: int) -> float:
    seed_rank(run.options.seed or 0, run.mesh, step)
    return timed_step(run, step).step_time_s


def _parts(run: Run, step: int) -> tuple[float, dict[str, float]]:
    """Seconds of the optimiser, and of each kind of collective, in one step."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would talk on stderr
    with torch.profiler.profile() as profiler:
        _step(run, step)
    return seconds_of_parts(profiler.key_averages(), on_gpu=run.mesh.device_type == "cuda")


def seconds_of_parts(events: Iterable[Any], *, on_gpu: bool) -> tuple[float, dict[str, float]]:
    """Seconds of the optimiser, and of each kind of collective, in ``events`` as ``key_averages`` returns them.

    A GPU's time line has marks of its own for what was issued under a name; counted is what the host marked, with the
    kernels that it issued.
    """
    optimizer_s, found = 0.0, dict.fromkeys(COLLECTIVES, 0.0)
    for event in events:
        if event.device_type != DeviceType.CPU:  # two of one kind are equal, not identical
            continue
        seconds = (event.device_time_total if on_gpu else event.cpu_time_total) / 1e6
        name = event.key.lower()
        if event.key.startswith("Optimizer.step"):
            optimizer_s += seconds
        if name.startswith(("gloo:", "nccl:")):
            kind = next((kind for kind in COLLECTIVES if kind in name), None)
            if kind is not None:
                found[kind] += seconds
    return optimizer_s, found


def _memory(run: Run, step: int, device: torch.device) -> tuple[int, str]:
    """The most that tensors of this rank held during a step, and who counted."""
    if device.type == "cuda":
        _step(run, step)
        return torch.cuda.max_memory_allocated(device), "allocated, by torch's allocator"
    tracker = LiveMemory()
    tracker.note(run.model.parameters())
    tracker.note(buffer for root in run.model.roots for buffer in root.buffers())
    tracker.note(v for state in run.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    with tracker:
        _step(run, step)
    everywhere = "" if run.model.plan.offload is Offload.NONE else ", those in host memory as well"
    return tracker.peak_bytes, f"held by tensors{everywhere}, counted operator by operator"


def _by_row(memory: int, run: Run, device: torch.device) -> tuple[int, ...]:
    shares = run.model.plan.pipeline.batch_shares
    fullest = torch.zeros(len(shares) or run.model.plan.mesh.pp, dtype=torch.int64, device=device)
    fullest[place_of(run.mesh).row(shares)] = memory
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    return tuple(fullest.tolist())
