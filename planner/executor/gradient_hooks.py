"""Hooks of the user's on gradients of parameters: where they are lost, or make another thing of each part of a step.

A step's gradient is added up over its micro-batches and ranks. A hook sees each part: what it makes of the whole is the
sum of what it makes of the parts where it scales or masks, and is not where it clips or counts. Which it is, is tried.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to ask a parameter for its hooks.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from planner.errors import PlanError
from planner.executor.data_parallel import DataParallel, keeps_whole
from planner.executor.loss_note import num_parts_of
from planner.executor.sharded_parameters import ShardedParameters
from planner.plan.schema import Plan

NUM_NAMED = 3  # names in one message: enough to see which
_REL = 1e-4  # of a gradient in float32; a hook that is not linear differs by its size
Hook = Callable[..., object]


def hooked_parameters(module: nn.Module) -> list[str]:
    """FQNs of parameters whose gradients go through hooks of the user's."""
    return [fqn for fqn, parameter in module.named_parameters() if _on_way(parameter) or _once_there(parameter)]


def check_hooks(module: nn.Module, plan: Plan) -> None:
    """PlanError where hooks on ``module``, which is whole, are lost, or differ between a step's parts and the whole."""
    hooked = hooked_parameters(module)
    if hooked and not (keeps_whole(plan) and plan.mesh.tp == 1):
        raise PlanError(
            f"hooks on the gradients of {', '.join(hooked[:NUM_NAMED])}: they are lost where parameters are divided",
            hint="plan with --zero 0 --tp 1 in fp32, or leave the hooks out",
        )
    _check_parts([(fqn, p, _on_way(p)) for fqn, p in module.named_parameters()], plan)


def check_later_hooks(parts: Sequence[DataParallel], plan: Plan) -> None:
    """The same of hooks that were set once the model was split. Called before each step; each is tried once."""
    for data in parts:
        named = list(data.root.named_parameters())
        lost = [fqn for fqn, parameter in named if isinstance(data, ShardedParameters) and _on_way(parameter)]
        if lost:
            raise PlanError(
                f"hooks on the gradients of {', '.join(lost[:NUM_NAMED])}: FSDP, which divides these, never calls them",
                hint="change gradients between forward_backward and the optimiser's step",
            )
        new = [(fqn, p, [hook for hook in _on_way(p) if id(hook) not in data.known_hooks]) for fqn, p in named]
        _check_parts(new, plan)
        data.known_hooks |= {id(hook) for _, _, hooks in new for hook in hooks}


def _check_parts(named: Sequence[tuple[str, nn.Parameter, Sequence[Hook]]], plan: Plan) -> None:
    number = num_parts_of(plan)
    if number == 1:
        return
    torn = [fqn for fqn, p, hooks in named if _once_there(p) or any(not _is_linear(hook, p) for hook in hooks)]
    if torn:
        raise PlanError(
            f"hooks on the gradients of {', '.join(torn[:NUM_NAMED])}: a step has {number} parts, of which they see "
            "each before it is added up, and what they make of the parts is not what they make of the whole",
            hint="change gradients between forward_backward and the optimiser's step, or let the hooks return a "
            "multiple of each number",
        )


def _on_way(parameter: nn.Parameter) -> list[Hook]:
    """Those that see what is added to its gradient."""
    return list((parameter._backward_hooks or {}).values())


def _once_there(parameter: nn.Parameter) -> list[Hook]:
    """Those of the user's that are called once something is added."""
    hooks: list[Hook] = list((parameter._post_accumulate_grad_hooks or {}).values())
    return [h for h in hooks if not (isinstance(h, functools.partial) and _is_ours(h))]


def _is_ours(hook: functools.partial[object]) -> bool:
    return isinstance(getattr(hook.func, "__self__", None), DataParallel)


@torch.no_grad()
def _is_linear(hook: Hook, parameter: nn.Parameter) -> bool:
    """Whether it makes of two gradients what it makes of their sum; True where it takes none that is made up."""
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(parameter.shape, generator=generator, device="cpu") for _ in range(2))
    with contextlib.suppress(Exception):  # whatever a user's hook raises
        found = _made(hook, one)
        if torch.equal(found, one):  # it looks, and changes nothing
            return True
        both, apart = _made(hook, one + other), found + _made(hook, other)
        return float((both - apart).norm()) <= _REL * float(apart.norm())
    return True


def _made(hook: Hook, gradient: torch.Tensor) -> torch.Tensor:
    given = gradient.clone()
    result = hook(given)
    return result if isinstance(result, torch.Tensor) else given
