"""Modules of any size without the memory of their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from planner.errors import ModelError


def build_weightless(build: Callable[[], nn.Module]) -> nn.Module:
    """The module on the meta device; where its code needs real values, only its parameters are there."""
    try:
        with torch.device("meta"):
            return build()
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


def _to_meta(module: nn.Module, name: str, parameter: object) -> nn.Parameter | None:
    del module, name
    if not isinstance(parameter, nn.Parameter) or parameter.device.type == "meta":
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
