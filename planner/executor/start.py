"""This rank's part of a model with its initial values, made without the whole model wherever its code allows that.

The model is built and split without values (``recorded_build.py``). Then each parameter in turn is made, or read, and
this rank keeps its part. Where that cannot be, every process builds the whole model before it splits it, and rank 0
says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from planner.executor.build import build_model, example_batch, in_training, named_inputs
from planner.executor.loss_probe import recognised
from planner.executor.parallelize import ParallelModel, parallelize
from planner.executor.ranks import say
from planner.executor.recorded_build import RecordedModel, recorded_model
from planner.executor.recording import UnrecordableError
from planner.executor.weights import matched_weights
from planner.model_file import LoadedModel
from planner.plan.schema import Plan

Made = TypeVar("Made")


@dataclass(frozen=True)
class Start:
    """Where values come from."""

    seed: int
    weights: Path | None = None  # safetensors in place of the model's own initialisation
    is_resumed: bool = False  # values are to be loaded from a checkpoint: parameters are left at zero
    is_evaluated: bool = False  # in evaluation mode
    backend: str | None = None  # of torch.compile; None: nothing is compiled


def started(loaded: LoadedModel, plan: Plan, mesh: DeviceMesh, start: Start) -> ParallelModel:
    """This rank's part of the model. Collective; values are the same under every layout."""

    def ready(module: nn.Module) -> nn.Module:
        module = module.float()
        return module.eval() if start.is_evaluated else in_training(module)

    torch.manual_seed(start.seed)
    split = functools.partial(_split, loaded=loaded, where=(plan, mesh, start.backend))
    try:
        return split_by_parts(loaded.build, ready, split, start.weights, is_filled=not start.is_resumed)
    except UnrecordableError as error:  # on all ranks at once
        say_whole(error)
    module = build_model(loaded, start.seed, start.weights)
    return split(module.eval() if start.is_evaluated else module)


def say_whole(error: UnrecordableError) -> None:
    """Why what follows is not by parts, on rank 0."""
    say(f"every process builds the whole model before it splits it: {error}")


def split_by_parts(
    build: Callable[[], nn.Module],
    ready: Callable[[nn.Module], nn.Module],
    split: Callable[[nn.Module], ParallelModel],
    weights: Path | None,
    *,
    is_filled: bool = True,
) -> ParallelModel:
    """What ``split`` makes of the model that ``build`` makes, of which this rank makes the values of its part alone.

    Or it reads them from ``weights``, or leaves them at zero where they are not to be filled. Draws from torch's
    generator as it is. ``ready`` gets the model without values before these are matched to files. Collective.
    UnrecordableError, on all ranks, where the model's code does not allow that.
    """
    built = _on_all_ranks(lambda: recorded_model(build))
    module = ready(built.module)
    stored = matched_weights(module, weights) if weights is not None and is_filled else None
    if stored is not None:
        for fqn, buffer in module.named_buffers():
            if fqn in stored:
                buffer.copy_(stored[fqn])
    model = split(module)
    if stored is not None:
        for fqn, targets in _held(model.roots).items():
            _keep(targets, stored[fqn])
    elif is_filled:
        _on_all_ranks(lambda: _initialise(model.roots, built))
    return model


def _on_all_ranks(make: Callable[[], Made]) -> Made:
    """What ``make`` returns; UnrecordableError on every rank where it is one on any. Collective.

    What follows is collective too: a rank that went another way than the others would wait for them in vain.
    """
    made, problem = None, ""
    try:
        made = make()
    except UnrecordableError as error:
        problem = str(error)
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text:
            raise UnrecordableError(f"rank {rank}: {text}" if "" in problems else text)
    return cast(Made, made)


def _split(module: nn.Module, *, loaded: LoadedModel, where: tuple[Plan, DeviceMesh, str | None]) -> ParallelModel:
    plan, mesh, backend = where
    inputs_of = functools.partial(named_inputs, loaded)
    loss = recognised(loaded.training_loss, module, inputs_of, plan.training.seq_len)
    return parallelize(module, example_batch(loaded, plan, module), loss, plan, mesh, backend)


def _initialise(roots: Sequence[nn.Module], built: RecordedModel) -> None:
    """Fills all parameters of ``roots`` as the model's own code does."""
    held = _held(roots)
    targets = list(held.values())

    def give(index: int, value: torch.Tensor) -> None:
        _keep(targets[index], value)

    built.recording.play([built.parameters[fqn] for fqn in held], give)


def _held(roots: Sequence[nn.Module]) -> dict[str, list[nn.Parameter]]:
    """This rank's parameters by FQN; two stages may hold a copy each of one."""
    held: dict[str, list[nn.Parameter]] = {}
    for root in roots:
        for fqn, parameter in root.named_parameters():
            held.setdefault(fqn, []).append(parameter)
    return held


@torch.no_grad()
def _keep(targets: Sequence[nn.Parameter], whole: torch.Tensor) -> None:
    """Copies this rank's part of ``whole`` into each of ``targets``."""
    for target in targets:
        local, part = target.detach(), whole
        if isinstance(local, DTensor):
            shape, offset = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)
            local = local.to_local()
            part = whole[tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))]
        if local.numel():
            assert local.shape == part.shape
            local.copy_(part)
