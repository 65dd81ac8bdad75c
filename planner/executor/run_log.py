"""What a run says of itself: a report a step, and a line of JSON a step beside what the plan predicts."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.plan.schema import Plan


@dataclass(frozen=True)
class StepReport:
    """One finished step, as every rank knows it."""

    step: int  # from 1
    loss: float  # mean over the global batch
    step_time_s: float
    tokens_per_s: float
    learning_rate: float
    gradient_norm: float | None = None  # before it was clipped; None: nobody asked for it
    eval_loss: float | None = None  # after this step, where it is one to evaluate after


def check_log(path: Path | None) -> None:
    """InputError before the run rather than in it, where there is no folder for the log."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is no folder", hint="choose another --log FILE")


class RunLog:
    """Lines of JSON appended to ``path`` by rank 0; a run that goes on appends to what is there.

    Each has the fields of ``StepReport`` with ``mfu`` and ``peak_memory_bytes`` (the largest of all ranks), and the
    plan's ``predicted_step_time_s``, ``predicted_mfu`` and ``predicted_peak_memory_bytes``. ``memory_kind`` says what
    was measured: ``allocated`` by torch on a GPU, or the ``resident`` pages of a process on a CPU.
    """

    def __init__(self, path: Path, plan: Plan, device: torch.device) -> None:
        self._path, self._plan, self._device = path, plan, device

    def write(self, report: StepReport) -> None:
        """Appends a line. Collective, since the memory is that of the fullest rank."""
        peak = torch.tensor(peak_memory_bytes(self._device), dtype=torch.int64, device=self._device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            memory = {"peak_memory_bytes": int(peak),
                      "memory_kind": "allocated" if self._device.type == "cuda" else "resident"}  # fmt: skip
            line = asdict(report) | measured_mfu(self._plan, report.step_time_s) | memory | predicted(self._plan)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def measured_mfu(plan: Plan, step_time_s: float) -> dict[str, float]:
    """The plan's MFU at the measured step time: the same model FLOPs and the same peak."""
    prediction = plan.prediction
    if prediction is None:
        return {}
    return {"mfu": prediction.mfu * prediction.step_time_s / step_time_s}


def predicted(plan: Plan) -> dict[str, float]:
    """What the plan predicts of what is measured; nothing where it was written by hand."""
    prediction = plan.prediction
    if prediction is None:
        return {}
    return {
        "predicted_step_time_s": prediction.step_time_s,
        "predicted_mfu": prediction.mfu,
        "predicted_peak_memory_bytes": max(prediction.peak_memory_bytes),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this rank has held: allocated by torch on a GPU, resident pages of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
