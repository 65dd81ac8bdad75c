"""The line of the user's code at which a trace is."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType

import torch

TORCH_FOLDER = str(Path(inspect.getfile(torch)).parent)
_OWN_FOLDER = str(Path(__file__).parent)


def user_frame(start: int = 1) -> FrameType | None:
    """The innermost frame that is neither torch's nor the tracer's."""
    frame: FrameType | None = sys._getframe(start)  # pyright: ignore[reportPrivateUsage]  # the public way reads files
    while frame is not None and frame.f_code.co_filename.startswith((TORCH_FOLDER, _OWN_FOLDER, "<")):
        frame = frame.f_back
    return frame


def short_place(file: str, line: int) -> str:
    """file:line, the file by its name, or from its package on where it is installed."""
    if "site-packages/" in file:
        return f"{file.rpartition('site-packages/')[2]}:{line}"
    return f"{Path(file).name}:{line}"


def user_place() -> str:
    """The user's line that runs at the moment."""
    frame = user_frame(2)
    return "an unknown line" if frame is None else short_place(frame.f_code.co_filename, frame.f_lineno)
