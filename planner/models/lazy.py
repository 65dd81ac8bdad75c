"""Parameters whose shapes only a first call tells (``nn.LazyLinear``): given them by a call without values."""

# pyright: reportPrivateUsage=false
# torch gives a lazy module its shapes in a hook of its own alone, which has no public name.

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from planner.models.inputs import Batch, call_model


def has_lazy(module: nn.Module) -> bool:
    """Whether a parameter or buffer of ``module`` has no shape yet."""
    return any(is_lazy(each) for each in (*module.parameters(), *module.buffers()))


def give_shapes(module: nn.Module, inputs: Batch) -> None:
    """Gives lazy parameters the shapes and initial values that they would have after one call with ``inputs``.

    The call is that of a copy on the meta device: nothing else of ``module`` changes, and no statistics are kept.
    Modules are initialised in the order of their calls. Raises what the model raises.
    """
    copied = copy.deepcopy(module, _on_meta(module)).eval()
    calls: dict[str, tuple[Any, Any]] = {}
    for fqn, inner in copied.named_modules():
        if any(is_lazy(each) for each in (*inner.parameters(recurse=False), *inner.buffers(recurse=False))):
            inner.register_forward_pre_hook(_noting(calls, fqn), prepend=True, with_kwargs=True)
    moved = tree_map(lambda tensor: tensor.to("meta"), inputs)
    with torch.no_grad(), torch.device("meta"):
        call_model(copied, moved)
    for fqn, (args, kwargs) in calls.items():
        lazy: Any = module.get_submodule(fqn)
        lazy._infer_parameters(lazy, args, kwargs)


def _noting(calls: dict[str, tuple[Any, Any]], fqn: str) -> Callable[..., None]:
    def note(module: nn.Module, args: object, kwargs: object) -> None:
        del module
        calls.setdefault(fqn, (args, kwargs))

    return note


def _on_meta(module: nn.Module) -> dict[int, object]:
    """What stands for each parameter and buffer in a copy that has no values."""
    known: dict[int, object] = {}
    lazy_parameter: Any = nn.UninitializedParameter  # whose arguments torch declares nowhere
    lazy_buffer: Any = nn.UninitializedBuffer
    for each in module.parameters():
        known[id(each)] = (
            lazy_parameter(requires_grad=each.requires_grad, device="meta", dtype=each.dtype)
            if is_lazy(each)
            else nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
        )
    for buffer in module.buffers():
        known[id(buffer)] = (
            lazy_buffer(device="meta", dtype=buffer.dtype) if is_lazy(buffer) else buffer.detach().to("meta")
        )
    return known
