"""What the optimiser keeps of offloaded parameters, in a file of the node's disks in place of host memory.

The file is mapped: the kernel reads and writes its pages as the optimiser goes through them, and keeps in memory those
for which there is room. It has no name, so that nothing is left of it however the process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Optimizer
from planner.errors import InputError, PlannerError

ITEM_BYTES = 4  # of float32
_MOMENTS = {
    Optimizer.ADAMW: ("exp_avg", "exp_avg_sq"), Optimizer.ADAM: ("exp_avg", "exp_avg_sq"), Optimizer.SGD: (),
    Optimizer.SGD_MOMENTUM: ("momentum_buffer",),
}  # fmt: skip
_COUNT_STEPS = (Optimizer.ADAMW, Optimizer.ADAM)


def put_on_disk(optimizer: torch.optim.Optimizer, name: Optimizer, folder: Path) -> None:
    """Gives ``optimizer``, which has made no step, states that lie in a file under ``folder``.

    InputError where nothing can be written there, PlannerError where its disk has no room for them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    locals_ = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    moments = _MOMENTS[name]
    room = _mapped(folder, len(moments) * sum(local.numel() for local in locals_) * ITEM_BYTES)
    first = 0
    for parameter, local in zip(parameters, locals_, strict=True):
        if not moments or not local.numel():
            continue  # the optimiser makes its own: of nothing
        state = {"step": torch.zeros(())} if name in _COUNT_STEPS else {}
        for moment in moments:
            # a storage for each: torch's checkpoints take a DTensor with an offset into one for a plain tensor
            part = torch.frombuffer(room, dtype=torch.float32, count=local.numel(), offset=first)
            state[moment] = _like(parameter, part.view(local.shape))
            first += local.numel() * ITEM_BYTES
        optimizer.state[parameter] = state


def _mapped(folder: Path, num_bytes: int) -> mmap.mmap | bytearray:
    """Zeros in a file that has no name."""
    if num_bytes == 0:
        return bytearray()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}", hint="name another --offload-dir") from error
    with file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk would end the process at its first use
        except OSError as error:
            raise PlannerError(
                f"{folder} has no room for the {num_bytes} bytes that this rank keeps on disk: {error.strerror}",
                hint="make room, or name another --offload-dir",
            ) from error
        return mmap.mmap(file.fileno(), num_bytes)


def _like(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """``part``, which is this rank's, as ``parameter`` is divided."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
