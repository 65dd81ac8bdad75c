"""The model of the fault drill: small, and failing where ``DRILL_FAULT`` says, once ``DRILL_TRIGGER`` is there.

``DRILL_FAULT`` is a kind and a rank: ``raise:1``. The drill makes the trigger's file when it is time.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

KIND, _, RANK = os.environ.get("DRILL_FAULT", "").partition(":")
IS_HERE = bool(KIND) and os.environ.get("RANK") == RANK
TRIGGER = Path(os.environ.get("DRILL_TRIGGER", "/nowhere"))
PAUSE_S = float(os.environ.get("DRILL_PAUSE_S", "0"))  # so that steps last long enough to be aimed at


def is_time(kind: str) -> bool:
    """Whether this process is to fail now, in this way."""
    return IS_HERE and kind == KIND and TRIGGER.exists()


def die() -> None:
    """As kill -9 from elsewhere, but at this very line."""
    os.kill(os.getpid(), signal.SIGKILL)


if IS_HERE and KIND == "die in write":
    fsync = os.fsync

    def dying_fsync(handle: int) -> None:
        """The file was written, and may be half on the disk."""
        if is_time(KIND):
            die()
        fsync(handle)

    os.fsync = dying_fsync

if IS_HERE and KIND == "die before commit":
    replace = Path.replace

    def dying_replace(self: Path, target: str | os.PathLike[str]) -> Path:
        """All files of the checkpoint are whole; it has not its name yet."""
        if is_time(KIND) and str(target).rpartition("/")[2].startswith("step-"):
            die()
        return replace(self, target)

    Path.replace = dying_replace


class Block(nn.Module):
    """Where the time is spent and things go wrong."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width) to the same."""
        if not x.is_meta:
            time.sleep(PAUSE_S)
            if is_time("raise"):
                raise ValueError("an error of one rank")
            if is_time("die in forward"):
                die()
            if is_time("hang"):
                time.sleep(3600)
            if is_time("nan"):
                x = x * float("nan")
        return x + torch.tanh(self.mix(x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.first, self.second = Block(width), Block(width)
        self.head = nn.Linear(width, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(batch, positions) to (batch, positions, 256)."""
        return self.head(self.second(self.first(self.embedding(input_ids))))


def build_model() -> nn.Module:
    """What planner asks for."""
    return Model()
