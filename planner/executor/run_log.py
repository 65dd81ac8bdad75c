"""What a run says of itself: a report a step, as JSON or for TensorBoard, beside what the plan predicts."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import InputError
from planner.executor.ranks import say
from planner.plan.schema import Plan

_PREDICTED = "predicted_"  # before what the plan predicts, and behind it the name of what is measured


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


@dataclass(frozen=True)
class LogOptions:
    """Where a run writes what it says."""

    file: Path | None = None  # lines of JSON
    board: Path | None = None  # a folder for TensorBoard

    @property
    def is_wanted(self) -> bool:
        """Whether anything is written."""
        return self.file is not None or self.board is not None

    def check(self) -> None:
        """InputError before the run rather than in it, where it cannot be written."""
        if self.file is not None and not self.file.parent.is_dir():
            text = f"cannot write {self.file}: {self.file.parent} is no folder"
            raise InputError(text, hint="choose another --log FILE")
        if self.file is not None and self.file.is_dir():
            raise InputError(f"cannot write {self.file}: it is a folder", hint="choose another --log FILE")
        if self.board is None:
            return
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError("--tensorboard needs the package tensorboard, which is not installed",
                             hint="pip install 'planner[tensorboard]', or write lines of JSON: --log FILE")  # fmt: skip
        if self.board.exists() and not self.board.is_dir():
            raise InputError(
                f"cannot write into {self.board}: it is no folder", hint="choose another --tensorboard DIR"
            )


class RunLog:
    """Writes on rank 0 what each step came to; a run that goes on adds to what is there, each step once.

    A line of JSON has the fields of ``StepReport`` with ``mfu`` and ``peak_memory_bytes`` (the largest of all ranks),
    and the plan's ``predicted_step_time_s``, ``predicted_mfu`` and ``predicted_peak_memory_bytes``. ``memory_kind``
    says what was measured: ``allocated`` by torch on a GPU, or the ``resident`` pages of a process on a CPU.
    TensorBoard gets the same numbers as scalars, side by side as ``mfu/measured`` and ``mfu/predicted``. ``first``:
    steps done before.
    """

    def __init__(self, options: LogOptions, plan: Plan, device: torch.device, first: int) -> None:
        self._file, self._plan, self._device = options.file, plan, device
        self._board: Any = None
        if self._file is not None and first and dist.get_rank() == 0:
            try:
                cut_after(self._file, first)
            except OSError as error:
                self._file = _given_up(self._file, error)
        if options.board is not None and dist.get_rank() == 0:
            from torch.utils.tensorboard import SummaryWriter  # here, for it needs the package

            # What a run wrote behind the checkpoint that it goes on from is not shown.
            self._board = SummaryWriter(str(options.board), purge_step=first + 1)

    def write(self, report: StepReport) -> None:
        """Adds a step. Collective, since the memory is that of the fullest rank."""
        peak = torch.tensor(peak_memory_bytes(self._device), dtype=torch.int64, device=self._device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if dist.get_rank() != 0:
            return
        kind = "allocated" if self._device.type == "cuda" else "resident"
        numbers = asdict(report) | measured_mfu(self._plan, report.step_time_s) | {"peak_memory_bytes": int(peak)}
        expected = predicted(self._plan)
        if self._file is not None:
            try:
                with self._file.open("a") as file:
                    file.write(json.dumps(numbers | {"memory_kind": kind} | expected) + "\n")
            except OSError as error:
                self._file = _given_up(self._file, error)
        if self._board is not None:
            for name, value in (numbers | expected).items():
                if value is not None and name != "step":
                    self._board.add_scalar(_tag(name, expected), value, report.step)
            self._board.flush()

    def close(self) -> None:
        """Ends what is written in the background."""
        if self._board is not None:
            self._board.close()


def cut_after(file: Path, step: int) -> None:
    """Ends a log behind ``step``: cuts off the later steps of the run that ended there, and a line that it tore.

    What is before them stays, whatever it is. One call of the system cuts, so that nothing is lost half-way.
    """
    if not file.is_file():
        return
    lines = file.read_bytes().splitlines(keepends=True)
    kept = len(lines)
    while kept and (not lines[kept - 1].endswith(b"\n") or _step_in(lines[kept - 1]) > step):
        kept -= 1
    os.truncate(file, sum(map(len, lines[:kept])))


def _step_in(line: bytes) -> int:
    """The step that a line of a log is of; 0 where it is of something else."""
    try:
        found = json.loads(line)
    except ValueError:
        return 0
    step = found.get("step") if isinstance(found, dict) else None
    return step if isinstance(step, int) else 0


def _given_up(file: Path, error: OSError) -> None:
    """Training goes on without the log, as where a checkpoint cannot be written."""
    say(f"warning: {file} cannot be written any more: {error.strerror}")


def _tag(name: str, expected: dict[str, float]) -> str:
    """What TensorBoard shows a number as: what is before the slash makes a section."""
    if name in expected:
        return f"{name.removeprefix(_PREDICTED)}/predicted"
    return f"{name}/measured" if _PREDICTED + name in expected else name


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
