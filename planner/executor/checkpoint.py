"""Checkpoints by torch.distributed.checkpoint: each rank writes its own shards, under the names the model gives them.

A checkpoint is a folder ``step-N`` that is there as a whole or not at all: it is written under another name and renamed
once every rank is done. It holds parameters, persistent buffers and what the optimiser keeps, by FQN. Data and random
numbers follow from the step, so nothing else is needed to go on. Like any of torch's, it is read with pickle: load only
what you trust.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from planner.errors import InputError
from planner.executor.parallelize import ParallelModel

_NAME = re.compile(r"step-(\d+)")
State = dict[str, torch.Tensor]


def save(folder: Path, model: ParallelModel, optimizer: torch.optim.Optimizer, step: int) -> Path:
    """Writes ``folder/step-N`` after ``step`` steps. Collective."""
    target, partial = folder / f"step-{step}", folder / f".step-{step}.partial"
    if target.exists():
        return target
    dcp.save(_state(model, optimizer), checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.replace(target)
    dist.barrier()
    return target


def resume(folder: Path, model: ParallelModel, optimizer: torch.optim.Optimizer) -> int:
    """Loads the latest checkpoint of ``folder``; how many steps it has seen, 0 where there is none. Collective."""
    seen = torch.tensor(latest(folder) or 0, device=model.parameters()[0].device)
    dist.broadcast(seen, src=0)  # one rank's view of a folder that may be on a network
    step = int(seen)
    if step == 0:
        return 0
    _make_states(optimizer)
    state = _state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=folder / f"step-{step}")
    except (dcp.api.CheckpointException, RuntimeError, KeyError) as error:
        raise InputError(
            f"cannot go on from {folder / f'step-{step}'}: {error}",
            hint="name another --checkpoint-dir, or the model and optimiser it was made with",
        ) from error
    return step


def latest(folder: Path) -> int | None:
    """The number of steps of the newest whole checkpoint in ``folder``."""
    if not folder.is_dir():
        return None
    found = [int(match.group(1)) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return max(found, default=None)


def clear_partial(folder: Path) -> None:
    """Makes ``folder`` and removes what an interrupted save left there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)


def _state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> State:
    """Everything by name; a tied parameter stands under each of its names."""
    state: State = {}
    for root in model.roots:
        state |= {f"model.{fqn}": value.detach() for fqn, value in root.state_dict().items()}
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            kept: dict[str, object] = optimizer.state.get(parameter, {})
            state |= {f"optimizer.{fqn}.{name}": v for name, v in kept.items() if isinstance(v, torch.Tensor)}
    return state


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Lets the optimiser make its states, which it does in its first step, without moving anything."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
