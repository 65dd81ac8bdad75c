"""The whole model, as one process has it: built with values of its own, or filled from files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from planner.errors import ModelError, PlanError
from planner.executor.parallelize import Tensors
from planner.executor.weights import load_weights
from planner.model_file import LoadedModel, load_model, planned_source
from planner.models.inputs import LABELS, by_name, for_forward
from planner.plan.schema import Plan


def loaded_model(plan: Plan) -> LoadedModel:
    """The plan's model. PlanError where it is code that is not to be run, or one that only stands for it."""
    loaded = load_model(planned_source(plan.model))
    if loaded.stands_for is not None:
        raise PlanError(
            f"{plan.model.source} cannot be trained: {loaded.stands_for}",
            hint="a model of the same sizes stands for it in planning only; give a model.py",
        )
    return loaded


def build_model(loaded: LoadedModel, seed: int, weights: Path | None = None) -> nn.Module:
    """The whole model on the CPU with equal values on every rank, random or those of ``weights``."""
    torch.manual_seed(seed)
    module = loaded.build()
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(f"{loaded.source.name} builds its parameters on the meta device: they have no values to train",
                         hint="let the factory build on the current default device")  # fmt: skip
    module = in_training(module.float())
    if weights is not None:
        load_weights(module, weights)
    return module


def in_training(module: nn.Module) -> nn.Module:
    """``module``, ready to be trained; parts of it that its author put into evaluation mode stay there."""
    return module if module.training else module.train()


def example_batch(loaded: LoadedModel, plan: Plan, module: nn.Module) -> dict[str, torch.Tensor]:
    """One micro-batch of what ``module``'s forward is given: token ids alone can be filled with text, and labels."""
    given = named_inputs(loaded, plan.pipeline.micro_batch_size, plan.training.seq_len)
    named = {name: value for name, value in given.items() if name != LABELS}  # the data have them
    if len(named) != 1 or next(iter(named.values())).dtype != torch.int64:
        in_script = "train it in a script of your own, split by planner.parallelize(model, plan, loss_fn, inputs)"
        raise ModelError(
            f"{loaded.source.name} takes {', '.join(named)}: only models whose one input is token ids can be run yet",
            hint=in_script if len(named) < 2 else f"give defaults to the other inputs of its forward, or {in_script}",
        )
    return for_forward(given, module)


def named_inputs(loaded: LoadedModel, batch_size: int, seq_len: int) -> Tensors:
    """The model's inputs by name, or where it has none by position."""
    return by_name(loaded.example_inputs(batch_size, seq_len))
