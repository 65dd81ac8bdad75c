"""Activation checkpointing: full drops all of a module's activations, selective keeps what is costly to repeat."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from costmodels.vocabulary.choices import Recompute
from planner.errors import PlanError
from planner.operators.registry import kept_by_selective_recomputation
from planner.plan.schema import RecomputeRule

KEPT = kept_by_selective_recomputation()
"""What SELECTIVE keeps: outputs of products (of matrices, groups of rows, convolutions, attention) and collectives."""


Surroundings: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]


def apply_recompute(
    module: nn.Module, rules: Sequence[RecomputeRule], surroundings: Surroundings = contextlib.nullcontext
) -> None:
    """Wraps the forward of every module that ``rules`` name. Call before FSDP wraps the modules.

    A forward that is replaced in place keeps every FQN. Modules of other pipeline stages, absent
    here, are skipped. ``surroundings`` is entered for each pass, for backward repeats it outside of
    what the first was in.
    """
    modules = dict(module.named_modules())
    done: set[str] = set()
    for rule in rules:
        for fqn in rule.modules:
            if fqn in done:
                raise PlanError(f"recompute names module {fqn!r} twice", hint="keep one rule for each module")
            done.add(fqn)
            if fqn in modules and rule.mode is not Recompute.NONE:
                target = modules[fqn]
                target.forward = _checkpointed(_inside(target.forward, surroundings), rule.mode)


def _inside(forward: Callable[..., object], surroundings: Surroundings) -> Callable[..., object]:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        with surroundings():
            return forward(*args, **kwargs)

    return run


def _checkpointed(forward: Callable[..., object], mode: Recompute) -> Callable[..., object]:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        contexts = noop_context_fn if mode is Recompute.FULL else _selective_contexts
        call = functools.partial(forward, *args, **kwargs)
        return checkpoint(call, use_reentrant=False, context_fn=contexts)

    return run


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(
    context: SelectiveCheckpointContext, operator: OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    name, _, _ = str(operator).rpartition(".")  # aten.mm of aten.mm.default
    return CheckpointPolicy.MUST_SAVE if name in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
