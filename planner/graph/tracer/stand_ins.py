"""The model and its inputs as stand-ins for a trace: shapes and dtypes without values."""

# pyright: reportPrivateUsage=false
# a module's parameters and buffers can only be exchanged in its private tables.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from costmodels.vocabulary.bounds import MOST_TEXT
from costmodels.vocabulary.shown import shown
from planner.errors import ModelError
from planner.model_file import LoadedModel, token_inputs
from planner.models.inputs import by_name, call_model, training_batch
from planner.models.weightless import build_weightless, build_with_values

Batch = dict[str, torch.Tensor]  # by name


@dataclass(frozen=True)
class StandIn:
    """A module in training mode, its inputs, and the batch that the loss sees."""

    model: nn.Module
    inputs: Batch
    batch: Batch
    device: str  # on which tensors appear that the model makes itself
    batch_size: int


class TrainingStep(nn.Module):
    """The forward pass and the loss as one module."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[object, Batch], torch.Tensor], inputs: Batch) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.input_names = tuple(inputs)

    def forward(self, batch: Batch) -> torch.Tensor:
        """``batch``: the inputs and what the loss needs besides."""
        inputs = {name: batch[name] for name in self.input_names}
        return self.loss_fn(call_model(self.model, inputs), batch)


@dataclass(frozen=True)
class Sizes:
    """What is traced: a micro-batch, and the dtype of parameters and floating inputs."""

    batch_size: int
    seq_len: int
    dtype: str


def on_meta(loaded: LoadedModel, sizes: Sizes) -> StandIn:
    """All on the meta device: the quickest, and enough for a model that keeps to its inputs' device."""
    model = _prepared(build_weightless(loaded.build), sizes)
    return _with_inputs(loaded, model, sizes, "meta", torch.device("meta"))


def on_fake_cpu(loaded: LoadedModel, sizes: Sizes) -> StandIn:
    """As fake tensors that say they are on the CPU: for code that makes tensors there, or asks for the device."""
    model = _prepared(build_with_values(loaded.build), sizes)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True, static_shapes=True)
    _make_fake(model, mode)
    return _with_inputs(loaded, model, sizes, "cpu", mode)


@dataclass(frozen=True)
class ValuedStandIn:
    """A StandIn on a fake CPU, to be run under ``mode``, with the values that are known without weights."""

    stand_in: StandIn
    mode: FakeTensorMode
    known: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # a stand-in and what it stands for


def on_valued_cpu(loaded: LoadedModel, sizes: Sizes) -> ValuedStandIn:
    """As ``on_fake_cpu``; buffers and the user's own example inputs, always the same, have their values."""
    model = _prepared(build_with_values(loaded.build), sizes)
    mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
    known = _make_fake(model, mode)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        real = _with_inputs(loaded, model, sizes, "cpu", nullcontext())
    fakes: Batch = {key: mode.from_tensor(value) for key, value in real.batch.items()}
    if loaded.example_inputs is not token_inputs:
        known += [(fakes[key], value) for key, value in real.inputs.items()]
    inputs: Batch = {key: fakes[key] for key in real.inputs}
    return ValuedStandIn(StandIn(model, inputs, fakes, "cpu", sizes.batch_size), mode, tuple(known))


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Exchanges parameters and buffers for fake ones; the fake buffers with their values come back."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in parameters:
                    parameters[id(parameter)] = _fake_parameter(parameter, mode)
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake = mode.from_tensor(buffer)
                buffers.append((fake, buffer))
    return buffers


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        fake = torch.empty(parameter.shape, dtype=parameter.dtype)
    return nn.Parameter(fake, requires_grad=parameter.requires_grad)


def _prepared(model: nn.Module, sizes: Sizes) -> nn.Module:
    """In training mode, floating parameters in the dtype of the precision. ModelError where no file takes a name."""
    model.train()
    _check_names(model)
    target = getattr(torch, sizes.dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(device="meta", dtype=target)
    return model


def _check_names(model: nn.Module) -> None:
    """A graph and a plan say these names: they are text, and no longer than texts there may be."""
    for name in chain(dict(model.named_modules()), dict(model.named_parameters())):
        if len(name) > MOST_TEXT or name != name.encode("utf-8", "ignore").decode():
            raise ModelError(
                f"a module or parameter is called {shown(name[:40])}, {len(name):,} characters",
                hint=f"give it a name of valid Unicode, which with its modules' has at most {MOST_TEXT:,} characters",
            )


def _with_inputs(
    loaded: LoadedModel, model: nn.Module, sizes: Sizes, device: str, context: AbstractContextManager[object]
) -> StandIn:
    target = getattr(torch, sizes.dtype)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # A copy: one tensor under two names would be one input.
        return tensor.to(device=device, dtype=target if tensor.is_floating_point() else None, copy=True)

    with context:
        given = by_name(loaded.example_inputs(sizes.batch_size, sizes.seq_len))
        inputs = {name: move(tensor) for name, tensor in given.items()}
        return StandIn(model, inputs, training_batch(inputs), device, sizes.batch_size)
