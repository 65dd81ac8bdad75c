"""What a model returns of a batch: the shapes and kinds of its outputs, found without its values wherever that can be.

A model whose code reads values (torch's own transformer asks whether a mask is causal) does not run on the meta device.
Where it is small, a copy with parameters of zero runs on the CPU instead.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from planner.executor.stage_trace import CPU, META, Inputs, as_compiled, tensors_in, twin
from planner.models.inputs import call_model

MOST_BYTES = 2**28  # of parameters and buffers: a copy on each rank, which computes for some seconds at most


class UntriedError(Exception):
    """The model could not be run on a made-up batch; why."""


class Attribute(NamedTuple):
    """Of a module: not a parameter, a buffer or another module, but what its code assigns."""

    module: str  # FQN
    name: str


class Ran(NamedTuple):
    """What a copy of a model returned of a batch, and what its forward pass left in attributes of its modules."""

    output: object
    left: dict[Attribute, object]


def output_of(module: nn.Module, batch: Inputs) -> Ran:
    """What a copy of ``module`` makes of ``batch``: values mean nothing. UntriedError where it cannot be run."""
    try:
        with torch.no_grad(), META, as_compiled():
            return _ran(twin(module, torch.float32, META), {key: value.to(META) for key, value in batch.items()})
    except Exception as error:  # whatever a user's model raises without values
        without_values = f"{type(error).__name__}: {error}"
    num_bytes = sum(_num_bytes(tensors) for tensors in (module.parameters(), module.buffers()))
    if num_bytes > MOST_BYTES:
        raise UntriedError(
            f"the model does not run without values ({without_values}), and with its {num_bytes / 2**20:,.0f} MiB it "
            f"is too large to be tried with values (at most {MOST_BYTES / 2**20:,.0f} MiB)"
        )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _ran(_with_zeros(module), {key: value.to(CPU) for key, value in batch.items()})
    except Exception as error:  # the same, with values
        raise UntriedError(f"the model does not run on a made-up batch: {type(error).__name__}: {error}") from error


def _ran(copied: nn.Module, batch: Inputs) -> Ran:
    before = _kept(copied)
    output = call_model(copied, batch)
    after = _kept(copied)
    ids = {each: [id(tensor) for tensor in tensors_in(value)] for each, value in before.items()}
    left = {each: value for each, value in after.items() if ids.get(each) != [id(t) for t in tensors_in(value)]}
    return Ran(output, left)


def _kept(module: nn.Module) -> dict[Attribute, object]:
    """Attributes that hold tensors."""
    found: dict[Attribute, object] = {}
    for fqn, each in module.named_modules():
        for name in vars(each).keys() - vars(nn.Module()).keys():
            with contextlib.suppress(Exception):  # of whatever class it may be
                if tensors_in(vars(each)[name]):
                    found[Attribute(fqn, name)] = vars(each)[name]
    return found


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _with_zeros(module: nn.Module) -> nn.Module:
    """A copy on the CPU whose parameters are zero, and whose buffers have their values where they have any."""
    memo: dict[int, object] = {}
    for parameter in module.parameters():
        dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = nn.Parameter(
            torch.zeros(parameter.shape, dtype=dtype, device=CPU), parameter.requires_grad
        )
    for buffer in module.buffers():
        has_values = not buffer.is_meta
        memo[id(buffer)] = (
            buffer.detach().to(CPU, copy=True) if has_values else torch.zeros(buffer.shape, dtype=buffer.dtype)
        )
    return copy.deepcopy(module, memo)
