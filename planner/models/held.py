"""A module that is held in Python: copied without its weights as often as it is traced, and never changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from planner.errors import ModelError
from planner.models.huggingface import for_training
from planner.models.inputs import Batch, Nest, flattened, short_name

MakesInputs = Callable[[int, int], object]
IN_A_FILE = "put a build_model() that returns it into a model.py, and pass the path of that"
AS_FUNCTION = "pass a function example_inputs(batch_size, seq_len) that returns the inputs"
# What inputs of token ids are called, of those that have names.
TOKEN_NAMES = ("input_ids", "decoder_input_ids", "tokens", "idx")


@dataclass(frozen=True)
class HeldModule:
    """A user's module with what it is traced with."""

    module: nn.Module
    nest: Nest | None = None  # of its inputs

    @staticmethod
    def of(module: nn.Module, nest: Nest | None = None) -> HeldModule:
        """ModelError where it has no shape yet, or is not whole any more."""
        name = type(module).__name__
        check_has_shapes(module, name)
        for fqn, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise ModelError(
                    f"{name}: the parameter {fqn} is split over devices already",
                    hint="pass the module before FSDP or tensor parallelism is applied to it",
                )
        return HeldModule(module, nest)

    def build(self) -> nn.Module:
        """A copy whose parameters are on meta, and its buffers where tensors are made at present."""
        on_meta = torch.empty(0).is_meta
        known: dict[int, object] = {}
        for parameter in self.module.parameters():
            known[id(parameter)] = nn.Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
        for buffer in self.module.buffers():
            known[id(buffer)] = buffer.detach().to("meta") if on_meta else buffer.detach().cpu().clone()
        try:
            copied = copy.deepcopy(self.module, known)
        except Exception as error:
            raise ModelError(
                f"{type(self.module).__name__} cannot be copied: {type(error).__name__}: {error}", hint=IN_A_FILE
            ) from error
        copied = for_training(copied)
        return copied if self.nest is None else self.nest.adapted(copied)


def check_has_shapes(module: nn.Module, name: str) -> None:
    """ModelError where a parameter has none until the module is called (``nn.LazyLinear``)."""
    for fqn, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"{name}: the parameter {fqn} has no shape yet", hint="call the module once before it is planned for"
            )


def inputs_like(example: object) -> Callable[[int, int], Batch]:
    """Inputs of any number of samples, made of an example whose tensors all begin with one number of them."""
    given = as_batch(example)
    tensors = list(given.values()) if isinstance(given, dict) else list(given)
    numbers = {tuple(tensor.shape[:1]) for tensor in tensors}
    if len(numbers) != 1 or numbers <= {(), (0,)}:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ModelError(
            f"the example inputs do not all begin with the number of samples: their shapes are {shapes}",
            hint=AS_FUNCTION,
        )

    def resized(tensor: torch.Tensor, batch_size: int) -> torch.Tensor:
        return tensor.detach().cpu()[torch.arange(batch_size) % tensor.shape[0]]

    def made(batch_size: int, seq_len: int) -> Batch:
        if seq_len != seq_len_of(given):
            raise ModelError(
                f"the example inputs have sequences of {seq_len_of(given)} tokens, not {seq_len}", hint=AS_FUNCTION
            )
        if isinstance(given, dict):
            return {name: resized(tensor, batch_size) for name, tensor in given.items()}
        return tuple(resized(tensor, batch_size) for tensor in given)

    return made


def as_batch(inputs: object) -> Batch:
    """Inputs in order or by name, flat, as the tracer takes them; ModelError where they are something else.

    One tensor of integers alone is token ids, for which there are labels.
    """
    if isinstance(inputs, list | tuple) and len(inputs) == 1:
        inputs = inputs[0]
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 2 and not inputs.is_floating_point():
        return {TOKEN_NAMES[0]: inputs}
    return _flattened(inputs)[0]


def nest_of(inputs: object) -> Nest | None:
    """How ``inputs`` are nested; None where they are not."""
    if isinstance(inputs, list | tuple) and len(inputs) == 1:
        inputs = inputs[0]
    return _flattened(inputs)[1]


def _flattened(inputs: object) -> tuple[Batch, Nest | None]:
    try:
        return flattened(inputs)
    except TypeError as error:
        raise ModelError(
            f"example inputs must be tensors, alone or in tuples, lists and dicts, got {error}",
            hint="pass one micro-batch of the module's inputs, or a function example_inputs(batch_size, seq_len)",
        ) from None


def seq_len_of(inputs: Batch) -> int:
    """Tokens of a sequence; 1 where the inputs hold none, so that a sample counts as one."""
    named = {short_name(name): value for name, value in inputs.items()} if isinstance(inputs, dict) else {}
    tokens = next((named[name] for name in TOKEN_NAMES if name in named), None)
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if tokens is None and not any(value.is_floating_point() for value in values):
        tokens = values[0]
    return tokens.shape[1] if tokens is not None and tokens.ndim > 1 else 1


def own_seq_len(example_inputs: MakesInputs, usual: int) -> int:
    """Tokens of a sequence: what inputs have whatever is asked for, as ``seq_len_of`` says, else as ``usual``.

    It tries a few lengths, of which some may not do.
    """
    fixed = None
    with contextlib.suppress(ModelError):
        fixed = _fixed_seq_len(example_inputs)
    return fixed or usual


def _fixed_seq_len(example_inputs: MakesInputs) -> int | None:
    one, other = (as_batch(example_inputs(2, length)) for length in (64, 128))
    shapes = [
        [tuple(value.shape) for value in (batch.values() if isinstance(batch, dict) else batch)]
        for batch in (one, other)
    ]
    return seq_len_of(one) if shapes[0] == shapes[1] else None
