"""Checkpoints by torch.distributed.checkpoint, under the FQNs of the whole model, so that any layout reads any other's.

A checkpoint is a folder ``step-N`` that is there as a whole or not at all: it is written under another name, by a
thread of its own while training goes on, and renamed once every rank's file is on the disk. It holds parameters,
persistent buffers and what the optimiser keeps. The position in the data, the order of samples and all random numbers
follow from ``Progress``. One that is damaged is set aside, and the one before is taken.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Optimizer
from costmodels.vocabulary.shown import shown
from planner.errors import InputError, ModelError, PlannerError
from planner.executor.checkpoint_storage import ManifestReader, ManifestWriter
from planner.executor.parallelize import ParallelModel
from planner.executor.ranks import say
from planner.plan.manifest import (
    DamagedError,
    Manifest,
    Progress,
    damage_of,
    read_manifest,
)

_PREFIX = "step-"
_EXTRA_STATE = "_extra_state"  # how torch names what get_extra_state returns
_LOCK = ".lock"  # held by rank 0 of the run that writes to the folder, for as long as it lives
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, as every rank knows it."""

    folder: Path
    manifest: Manifest


class Checkpointer:
    """Saves and loads one run's state in ``folder``, of which the newest ``keep`` checkpoints stay.

    InputError where the folder cannot be written to, or another run writes to it.

    All methods are collective. The ranks agree over a process group of their own, which a save in the background
    does not share with training.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._under_way: tuple[int, Future[object]] | None = None
        self._saved = 0  # the newest whole checkpoint's step
        problem: str | None = None
        if self._first_rank:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = _locked(folder)
                self._unlock = weakref.finalize(self, os.close, lock)
                for path in folder.glob(f".{_PREFIX}*.partial"):  # of a save that was interrupted
                    shutil.rmtree(path)
                tempfile.TemporaryFile(dir=folder).close()
            except BlockingIOError:
                problem = "another run writes to it"
            except OSError as error:
                problem = error.strerror or str(error)
        problem = _of_all(problem, self._group)[0]
        if problem is not None:
            raise InputError(f"no checkpoint can be written to {folder}: {problem}",
                             hint="name another --checkpoint-dir")  # fmt: skip

    @property
    def _first_rank(self) -> bool:
        return dist.get_rank() == 0

    def find(self) -> Found | None:
        """The newest whole checkpoint, or None where there is none at all; damaged ones are set aside and told.

        InputError where there are checkpoints, but none is whole.
        """
        steps = _same_everywhere(steps_in(self._folder) if self._first_rank else None, self._group)
        for step in steps:
            folder = self._folder / f"{_PREFIX}{step}"
            found, damage = self._examine(folder)
            if found is not None:
                self._saved = step
                return found
            if self._first_rank:
                print(
                    f"warning: {shown(damage)}; it is set aside, and the one before is taken",
                    file=sys.stderr,
                    flush=True,
                )
                _set_aside(folder)
        if steps:
            raise InputError(
                f"no checkpoint in {self._folder} is whole; it holds {_names(steps)}",
                hint="name another --checkpoint-dir to begin anew",
            )
        return None

    def load(self, found: Found, model: ParallelModel, optimizer: torch.optim.Optimizer, name: Optimizer) -> None:
        """Takes over parameters, buffers and the optimiser's states of ``found``. InputError where they do not fit."""
        if found.manifest.progress.optimizer is not name:
            raise InputError(
                f"{found.folder} is of {found.manifest.progress.optimizer.value}, the plan trains with {name.value}",
                hint="give the plan the same optimiser, or begin anew in another --checkpoint-dir",
            )
        make_states(optimizer)
        _forget_unused(model, optimizer, found.manifest)
        state = state_of(model, optimizer)
        _agree(_mismatch(state, found.manifest), found.folder, self._group)
        frozen = _frozen_since(model, found.manifest, self._group)
        if frozen:
            say(f"warning: what the optimiser kept of parameters that are frozen now is left behind: {frozen[0]}"
                + (f" and {len(frozen) - 1} more" if frozen[1:] else ""))  # fmt: skip
        _agree(_unused(state, found.manifest, frozen, self._group), found.folder, self._group)
        try:
            dcp.load(
                state,
                storage_reader=ManifestReader(found.folder, found.manifest),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._group,
            )
        except dcp.CheckpointException as error:
            raise InputError(f"cannot go on from {found.folder}: {_reason(error)}",
                             hint="name another --checkpoint-dir") from error  # fmt: skip
        _spread(state, model, optimizer)

    def save(self, model: ParallelModel, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Copies the state and begins to write it, after what is still being written.

        A save that failed is told on rank 0 and training goes on: the checkpoint before it is still there.
        """
        self.wait()
        if progress.step == self._saved:
            return
        writer = ManifestWriter(self._folder / f"{_PREFIX}{progress.step}", progress, self._prune)
        future = dcp.async_save(
            state_of(model, optimizer),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._group,
        )
        assert isinstance(future, Future)
        self._under_way = progress.step, future

    def wait(self) -> None:
        """Returns once nothing is being written; a save that failed is told on rank 0."""
        self._wait(lambda text: print(f"warning: {shown(text)}", file=sys.stderr, flush=True))

    def close(self) -> None:
        """Waits for what is being written. PlannerError where the last save failed."""
        problems: list[str] = []
        self._wait(problems.append, on=None)
        if self._first_rank:
            self._unlock()
        if problems:
            kept = f"{_PREFIX}{self._saved} is still there" if self._saved else "there is none from before"
            raise PlannerError(problems[0], hint=f"{kept}; look at the disk of {self._folder}")

    def _wait(self, tell: Callable[[str], object], on: int | None = 0) -> None:
        if self._under_way is None:
            return
        step, future = self._under_way
        self._under_way = None
        try:
            future.result()
            self._saved = step
        except dcp.CheckpointException as error:
            if self._first_rank:  # it would hold the room that the next one needs
                shutil.rmtree(self._folder / f".{_PREFIX}{step}.partial", ignore_errors=True)
            if on is None or dist.get_rank() == on:
                tell(f"checkpoint {_PREFIX}{step} was not written: {_reason(error)}")

    def _examine(self, folder: Path) -> tuple[Found | None, str]:
        """Each rank reads its share of the files; all come to the same verdict."""
        problem: str | None = None
        manifest: Manifest | None = None
        try:
            manifest = read_manifest(folder)
            share = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
            damage = damage_of(folder, manifest, share)
            problem = None if damage is None else f"{folder}: {damage}"
        except DamagedError as error:
            problem = error.message
        problem = next((p for p in _of_all(problem, self._group) if p is not None), None)
        if problem is None and manifest is not None:
            return Found(folder, manifest), ""
        return None, problem or ""

    def _prune(self) -> None:
        """Deletes what is older than the newest ``keep``; called on rank 0 once a checkpoint has its name."""
        for step in steps_in(self._folder)[self._keep :]:
            shutil.rmtree(self._folder / f"{_PREFIX}{step}", ignore_errors=True)


def _locked(folder: Path) -> int:
    """A file in ``folder`` that no other process can lock until it is closed; BlockingIOError where one has.

    It is open for reading, so that the disk can be made read-only meanwhile; where locks need that, as over NFS, for
    writing. Where a file system has no locks, nothing is locked.
    """
    path = folder / _LOCK
    path.touch()
    for access in (os.O_RDONLY, os.O_RDWR):
        descriptor = os.open(path, access | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise
        else:
            return descriptor
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in ``folder``, the newest first."""
    names = [path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*")]
    return sorted((int(name) for name in names if name.isdecimal()), reverse=True)


def state_of(model: ParallelModel, optimizer: torch.optim.Optimizer) -> State:
    """Everything of this rank by name; a tied parameter stands under each of its names."""
    state: State = {}
    for name, value in _named(model, optimizer):
        state.setdefault(name, value)
    return state


def _named(model: ParallelModel, optimizer: torch.optim.Optimizer) -> Generator[tuple[str, torch.Tensor]]:
    """Names and values of all stages of this rank. Two of them may hold a copy each of one parameter."""
    for root in model.roots:
        for fqn, value in root.state_dict().items():
            yield f"model.{fqn}", value.detach()
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            kept: dict[str, object] = optimizer.state.get(parameter, {})
            for name, value in kept.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer.{fqn}.{name}", value


def _spread(state: State, model: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """Gives every copy on this rank what its name has in ``state``."""
    for name, value in _named(model, optimizer):
        source, target = (v.to_local() if isinstance(v, DTensor) else v for v in (state[name], value))
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def check_kept(model: ParallelModel) -> None:
    """ModelError on every rank where a module of one has a state besides tensors of its own. Collective."""
    states = [item for root in model.roots for item in root.state_dict().items()]
    mine = next((n for n, v in states if n.endswith(_EXTRA_STATE) or not isinstance(v, torch.Tensor)), None)
    name = next((each for each in _of_all(mine, None) if each is not None), None)
    if name is not None:
        raise ModelError(
            f"checkpoints hold parameters and buffers alone, not what a module adds to its state_dict: {name}",
            hint="keep it in a buffer (register_buffer) in place of get_extra_state, or leave out --checkpoint-dir",
        )


def make_states(optimizer: torch.optim.Optimizer) -> None:
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


def _parameter_of(name: str) -> str | None:
    """The parameter that the optimiser kept the tensor ``name`` of; None where it did not."""
    return name.removeprefix("optimizer.").rpartition(".")[0] if name.startswith("optimizer.") else None


def _forget_unused(model: ParallelModel, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    """Leaves those parameters without states that had none: the run has not given them a gradient yet."""
    stateful = {_parameter_of(name) for name in manifest.tensors}
    for root in model.roots:
        for fqn, parameter in root.named_parameters(remove_duplicate=False):
            if fqn not in stateful:
                optimizer.state.pop(parameter, None)


def _frozen_since(model: ParallelModel, manifest: Manifest, group: dist.ProcessGroup) -> list[str]:
    """Parameters of which the checkpoint has optimiser states, and which any rank trains no more. Collective."""
    stateful = {_parameter_of(name) for name in manifest.tensors}
    named = [pair for root in model.roots for pair in root.named_parameters(remove_duplicate=False)]
    mine = [fqn for fqn, parameter in named if fqn in stateful and not parameter.requires_grad]
    every: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(every, mine, group=group)
    return sorted({fqn for names in every for fqn in names})


def _mismatch(state: State, manifest: Manifest) -> str | None:
    """The first tensor of this rank that the checkpoint has not, or has in another form."""
    for name, value in state.items():
        stored = manifest.tensors.get(name)
        if stored is None:
            return f"it has no {name}"
        if stored.shape != tuple(value.shape):
            return f"{name} has the shape {list(stored.shape)} in it, {list(value.shape)} in the model"
    return None


def _unused(state: State, manifest: Manifest, frozen: Sequence[str], group: dist.ProcessGroup) -> str | None:
    """The first tensor of the checkpoint that no rank has, and is not of what is ``frozen``: it is another model's."""
    names = sorted(name for name in manifest.tensors if _parameter_of(name) not in frozen)
    wanted = torch.tensor([name in state for name in names], dtype=torch.uint8)
    dist.all_reduce(wanted, dist.ReduceOp.MAX, group=group)
    unused = [name for name, count in zip(names, wanted.tolist(), strict=True) if not count]
    return f"it has {unused[0]}, and {len(unused)} in all that the model has not" if unused else None


def _agree(problem: str | None, folder: Path, group: dist.ProcessGroup) -> None:
    """InputError on every rank where one has a problem."""
    found = next((p for p in _of_all(problem, group) if p is not None), None)
    if found is not None:
        raise InputError(f"cannot go on from {folder}: {found}",
                         hint="name another --checkpoint-dir, or the model that it was made with")  # fmt: skip


def _of_all(value: str | None, group: dist.ProcessGroup | None) -> list[str | None]:
    values: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _same_everywhere(steps: list[int] | None, group: dist.ProcessGroup) -> list[int]:
    """What rank 0 sees: a folder on a network may look different elsewhere for a while."""
    box: list[Any] = [steps]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def _set_aside(folder: Path) -> None:
    target = folder.with_name(f"{folder.name}.damaged")
    with suppress(OSError):
        if target.exists():
            shutil.rmtree(target)
        folder.replace(target)


def _reason(error: dcp.CheckpointException) -> str:
    """The first rank's error, without torch's traceback of it."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause.message if isinstance(cause, PlannerError) else f'{type(cause).__name__}: {cause}'}"


def _names(steps: list[int]) -> str:
    return ", ".join(f"{_PREFIX}{step}" for step in steps)
