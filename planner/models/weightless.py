"""Modules of any size without the memory of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError

# What fills a tensor and has no other effect. On meta PyTorch runs each through its Python reference.
_FILLS = frozenset(
    (
        *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.fill_, torch.Tensor.zero_),
        *(init.normal_, init.uniform_, init.constant_, init.kaiming_uniform_),
    )
)


def build_weightless(build: Callable[[], nn.Module]) -> nn.Module:
    """The module on the meta device; where its code needs real values, only its parameters are there."""
    try:
        with torch.device("meta"), _Unfilled():
            return build_with_values(build)  # torch.normal and NumPy's arrays know nothing of the device
    except ModelError:
        return build_with_values(build)


def build_with_values(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with real buffers and attributes; each parameter goes to meta as soon as it is assigned.

    An uninitialised parameter costs no memory until then, and initialising it afterwards nothing.
    """
    hook: Callable[..., None] = _to_meta  # pyright: ignore[reportAssignmentType]  # torch declares no result
    handle = register_module_parameter_registration_hook(hook)
    try:
        return build()
    finally:
        handle.remove()


class _Unfilled(TorchFunctionMode):
    """Leaves tensors on meta as they are where they would be filled: half the time of building a large model."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """``func`` without what nobody can see."""
        del types
        named = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else named.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **named)


def _to_meta(module: nn.Module, name: str, parameter: object) -> nn.Parameter | None:
    del module, name
    if not isinstance(parameter, nn.Parameter) or is_lazy(parameter) or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
