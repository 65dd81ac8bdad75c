"""``planner.parallelize``: a model of one's own, split as a plan says, inside one's own training script."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import InputError, ModelError, PlanError
from planner.executor.given_batches import GivenBatches, plain_inputs
from planner.executor.loss_probe import recognised
from planner.executor.mesh import build_mesh, check_world_size
from planner.executor.optimizer_trial import try_optimizers
from planner.executor.parallelize import ParallelModel, Tensors, parallelize
from planner.executor.recording import UnrecordableError
from planner.executor.start import say_whole, split_by_parts
from planner.executor.weights import load_weights
from planner.models.held import nest_of
from planner.models.huggingface import for_training, shifts_labels
from planner.models.inputs import by_name, for_forward, taken_by_loss
from planner.models.loss import NEXT_TOKEN, Batch, TrainingLoss
from planner.plan.schema import Plan

Module = nn.Module
LossFunction = Callable[[object, Batch], torch.Tensor]
GIVE_THE_FUNCTION = "give the function that builds it: planner.parallelize(build_model, plan)"


def parallelized(
    model: Module | Callable[[], Module],
    plan: Plan,
    loss_fn: LossFunction | None,
    inputs: object,
    weights: Path | None = None,
) -> ParallelModel:
    """This rank's part of ``model``; PlanError where torch.distributed is not initialised with the plan's ranks.

    InputError where ranks hold other values. ``model`` may be a function that makes it: then a rank makes the values of
    its part alone, as rank 0 would draw them, or reads them from ``weights``, safetensors. Where the model's code does
    not allow that, each rank builds the whole.

    ``inputs``: one micro-batch of what forward takes, nested as it takes it, and where ``labels`` are no tokens those
    too; None: token ids, int64 (micro-batch, sequence), under the name of forward's first parameter.
    """
    if not dist.is_initialized():
        raise PlanError(
            "torch.distributed is not initialised",
            hint="start the script with torchrun and call torch.distributed.init_process_group() first",
        )
    check_world_size(plan)
    split = functools.partial(_split, plan=plan, loss_fn=loss_fn, inputs=inputs)
    if not isinstance(model, Module):
        return _made(model, plan, split, weights)
    if weights is not None:
        raise InputError("weights are read into a model that is made without values", hint=GIVE_THE_FUNCTION)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError(
            "the model's parameters are on the meta device: they have no values to train", hint=GIVE_THE_FUNCTION
        )
    _check_dtypes(model, plan)
    _check_equal(model)
    return split(model)


def _made(
    build: Callable[[], Module], plan: Plan, split: Callable[[Module], ParallelModel], weights: Path | None
) -> ParallelModel:
    _draw_as_rank_0()

    def ready(module: Module) -> Module:
        _check_dtypes(module, plan)
        return module

    try:
        return split_by_parts(build, ready, split, weights)
    except UnrecordableError as error:  # on all ranks at once
        say_whole(error)
    module = ready(build())
    if weights is not None:
        load_weights(module, weights)
    _check_equal(module)
    return split(module)


def _split(model: Module, *, plan: Plan, loss_fn: LossFunction | None, inputs: object) -> ParallelModel:
    model = for_training(model)
    name = next(iter(inspect.signature(model.forward).parameters))

    def tokens(batch_size: int, seq_len: int) -> Tensors:
        return {name: torch.zeros(batch_size, seq_len, dtype=torch.int64)}

    def like_given(batch_size: int, seq_len: int) -> Tensors:
        del seq_len
        return {key: tensor[torch.arange(batch_size) % len(tensor)] for key, tensor in by_name(inputs).items()}

    makes, nest = (tokens, None) if inputs is None else (like_given, nest_of(inputs))
    if nest is not None:
        model = nest.adapted(model)
    loss = NEXT_TOKEN
    if loss_fn is not None:
        loss = recognised(taken_by_loss(nest, TrainingLoss(loss_fn)), model, makes, plan.training.seq_len)
    example = makes(plan.pipeline.micro_batch_size, plan.training.seq_len)
    example = for_forward(example, model)
    plain = plain_inputs(model, example) if plan.mesh.cp > 1 and nest is None else frozenset[str]()
    given = GivenBatches(plain, shifts_labels=loss_fn is None and shifts_labels(model))
    example = {key: value for key, value in example.items() if key not in plain}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    part = replace(parallelize(model, example, loss, plan, build_mesh(plan, device)), given=given)
    try_optimizers(part)
    return part


def _check_dtypes(model: Module, plan: Plan) -> None:
    """ModelError where parameters are kept in less or more than the 32 bits that an optimiser is to update."""
    for fqn, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise ModelError(
                f"{fqn} is {str(parameter.dtype).removeprefix('torch.')}: parameters and what an optimiser keeps of "
                f"them are float32 under every plan, and this one computes in {plan.training.precision.value}",
                hint="call model.float() before",
            )


def _check_equal(model: Module) -> None:
    """InputError where ranks hold other values, by the sum and the first number of each tensor. Collective."""
    with torch.no_grad():
        tensors = [tensor.detach() for tensor in model.state_dict().values() if tensor.numel()]
        real = [torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor for tensor in tensors]
        mine = [(float(tensor.double().sum()), float(tensor.flatten()[0])) for tensor in real]
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, repr(mine))
    others = [rank for rank, values in enumerate(every) if values != every[0]]
    if others:
        raise InputError(
            f"the model has other values on rank {others[0]} than on rank 0",
            hint="build it from the same seed on every rank, torch.manual_seed(0) before it, or load the same weights",
        )


def _draw_as_rank_0() -> None:
    """Every rank's generator goes on as that of rank 0 does, for all are to make the same values. Collective."""
    states = [torch.get_rng_state()]
    dist.broadcast_object_list(states)
    torch.set_rng_state(states[0])
