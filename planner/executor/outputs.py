"""What a model returns of a batch: the shapes and kinds of its outputs, found without its values wherever that can be.

A model whose code reads values (torch's own transformer asks whether a mask is causal) does not run on the meta device.
Where it is small, a copy with parameters of zero runs on the CPU instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from planner.executor.stage_trace import CPU, META, Inputs, as_compiled, twin
from planner.models.inputs import call_model

MOST_BYTES = 2**28  # of parameters and buffers: a copy on each rank, which computes for some seconds at most


class UntriedError(Exception):
    """The model could not be run on a made-up batch; why."""


def output_of(module: nn.Module, batch: Inputs) -> object:
    """What a copy of ``module`` returns of ``batch``: values mean nothing. UntriedError where it cannot be run."""
    try:
        with torch.no_grad(), META, as_compiled():
            return call_model(twin(module, torch.float32, META), {key: value.to(META) for key, value in batch.items()})
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
            return call_model(_with_zeros(module), {key: value.to(CPU) for key, value in batch.items()})
    except Exception as error:  # the same, with values
        raise UntriedError(f"the model does not run on a made-up batch: {type(error).__name__}: {error}") from error


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
