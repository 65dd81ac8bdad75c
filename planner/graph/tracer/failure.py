"""Where a trace stopped and why: the operator, and the user's line that called it."""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload.

from __future__ import annotations

import inspect
import re
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import ModelError
from planner.graph.tracer.frames import TORCH_FOLDER, short_place

MAX_REASON = 200  # characters
MAX_LINE = 80
_LACKS_INPUTS = re.compile(r"forward\(\) missing \d+ required|forward\(\) got an unexpected keyword")
_NAMES_DEVICE = re.compile(r"not linked with support for \w+ devices|not compiled with \w+ enabled|'CUDA' backend")
_DEVICE_HINT = (
    "a model is traced without a GPU: make tensors where the input is, with device=x.device or .to(x.device), in place "
    'of device="cuda" or .cuda()'
)
_INPUTS_HINT = "define example_inputs(batch_size, seq_len) in a model.py: a dict or tuple of what forward takes"


@dataclass(frozen=True)
class Failure:
    """One way of tracing that did not work."""

    operator: str | None
    place: str  # file:line and the line, "" where no line of the user's was at work
    reason: str
    hint: str = ""  # the way out, where there is a better one than to correct the line

    @staticmethod
    def of(error: Exception) -> Failure:
        """What ``error``, raised under a trace, says."""
        if isinstance(error, TraceStoppedError):
            return error.failure
        if isinstance(error, ModelError):
            cause = error.__cause__  # the loss function's own error, already told with its line
            return Failure.of(cause) if isinstance(cause, Exception) else Failure(None, "", error.message, error.hint)
        own = own_frames(error)
        place = _place(own[-1]) if own else ""
        text = str(error).strip()
        reason = _first_sentence(text)
        if type(error).__name__ == "GuardOnDataDependentSymNode":
            reason = "the control flow depends on the values of tensors"
        lacks_inputs = not own and isinstance(error, TypeError) and _LACKS_INPUTS.search(text)  # by our own call
        hint = _INPUTS_HINT if lacks_inputs else _DEVICE_HINT if _NAMES_DEVICE.search(text) else ""
        return Failure(_failed_operator(error), place, f"{type(error).__name__}: {reason}", hint)

    def __str__(self) -> str:
        return f"{self.operator or 'the forward pass'} failed{f' at {self.place}' if self.place else ''}: {self.reason}"


class TraceStoppedError(Exception):
    """One way of tracing did not work."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def _first_sentence(text: str) -> str:
    """As much of what torch says as tells the reason: advice and links are left out."""
    line = text.splitlines()[0] if text else ""
    sentence = line.partition(". ")[0]
    return _cut(sentence, MAX_REASON)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{short_place(frame.filename, frame.lineno or 0)} `{_cut(frame.line or '', MAX_LINE)}`"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def own_frames(error: Exception) -> list[traceback.FrameSummary]:
    """The frames of ``error`` that are neither torch's nor ours, outermost first."""
    planner_folder = str(Path(inspect.getfile(ModelError)).parent)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((TORCH_FOLDER, planner_folder, "<"))]


def _failed_operator(error: Exception) -> str | None:
    """The innermost ATen operator on the stack when ``error`` was raised."""
    name: str | None = None
    frame = error.__traceback__
    while frame is not None:
        operator = frame.tb_frame.f_locals.get("func")
        if isinstance(operator, torch._ops.OpOverload):
            name = str(operator)
        frame = frame.tb_next
    return name
