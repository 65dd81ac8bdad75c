"""Activation checkpointing: full drops all of a module's activations, selective keeps what is costly to repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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

from planner.errors import PlanError
from planner.parallelism import Recompute
from planner.plan.schema import RecomputeRule

_aten = torch.ops.aten
_collective = torch.ops._c10d_functional

KEPT_OPERATORS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.linear.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
        _collective.all_reduce.default,
        _collective.all_gather_into_tensor.default,
        _collective.reduce_scatter_tensor.default,
        _collective.all_to_all_single.default,
    }
)
"""What SELECTIVE keeps: outputs of matrix products, of fused attention, and of explicit collectives."""


def apply_recompute(module: nn.Module, rules: Sequence[RecomputeRule]) -> None:
    """Wraps the forward of every module that ``rules`` name. Call before FSDP wraps the modules.

    A forward that is replaced in place keeps every FQN. Modules of other pipeline stages, absent
    here, are skipped.
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
                target.forward = _checkpointed(target.forward, rule.mode)


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
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
