"""Activation checkpointing: full drops all of a module's activations, selective keeps what is costly to repeat.

What is kept stays on the device or lies in host memory.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for what selective checkpointing keeps, nor a way to say where a checkpoint repeats.

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    checkpoint,
)

from costmodels.vocabulary.choices import Recompute
from planner.errors import PlanError
from planner.executor.activation_offload import kept_on_host, leaving, returning, storage_of, storages_of
from planner.executor.written_operands import is_writing, written_by
from planner.operators.registry import kept_by_selective_recomputation
from planner.plan.schema import RecomputeRule

KEPT = kept_by_selective_recomputation()
"""What SELECTIVE keeps: outputs of products (of matrices, groups of rows, convolutions, attention) and collectives."""


_Named: TypeAlias = Mapping[str, object]
_Storage: TypeAlias = dict[Any, dict[int, Any]]
_Context: TypeAlias = contextlib.AbstractContextManager[None]
Surroundings: TypeAlias = Callable[[], contextlib.AbstractContextManager[object]]


def apply_recompute(module: nn.Module, rules: Sequence[RecomputeRule], on_host: Sequence[str] = ()) -> None:
    """Wraps the forward of every module that ``rules`` or ``on_host`` name. Call before FSDP wraps the modules.

    A forward that is replaced in place keeps every FQN. Modules of other pipeline stages, absent
    here, are skipped. ``on_host``: modules that keep what they do not recompute in host memory.
    """
    modules = dict(module.named_modules())
    modes: dict[str, Recompute] = {}
    for rule in rules:
        for fqn in rule.modules:
            if fqn in modes:
                raise PlanError(f"recompute names module {fqn!r} twice", hint="keep one rule for each module")
            modes[fqn] = rule.mode
    for fqn in dict.fromkeys([*modes, *on_host]):
        if fqn not in modules:
            continue
        target, mode, leaves = modules[fqn], modes.get(fqn, Recompute.NONE), fqn in on_host
        if mode is not Recompute.NONE:
            target.forward = _checkpointed(target.forward, mode, leaves=leaves)
        if leaves:
            target.forward = kept_on_host(target.forward, target)


@contextlib.contextmanager
def repeated_in(surroundings: Surroundings) -> Generator[None]:
    """Inside, torch's checkpoints, the user's own among them, are made so that they repeat in ``surroundings``.

    A backward pass repeats a forward outside of what the first was in: in another place a model computes another thing.
    """
    frame, function = checkpointing._CheckpointFrame, checkpointing.CheckpointFunction

    def not_reentrant(repeat: Callable[..., object], *settings: Any) -> object:
        return frame(_inside(repeat, surroundings), *settings)

    def reentrant(run: Callable[..., object], *values: object) -> object:
        return function.apply(_inside(run, surroundings), *values)

    setattr(checkpointing, "_CheckpointFrame", not_reentrant)  # noqa: B010
    setattr(checkpointing, "CheckpointFunction", SimpleNamespace(apply=reentrant))  # noqa: B010
    try:
        yield
    finally:
        setattr(checkpointing, "_CheckpointFrame", frame)  # noqa: B010
        setattr(checkpointing, "CheckpointFunction", function)  # noqa: B010


def _inside(run: Callable[..., object], surroundings: Surroundings) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        with surroundings():
            return run(*args, **kwargs)

    return call


def _checkpointed(forward: Callable[..., object], mode: Recompute, *, leaves: bool) -> Callable[..., object]:
    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        selective = _selective_contexts_on_host if leaves else _selective_contexts
        contexts: dict[str, Any] = {} if mode is Recompute.FULL else {"context_fn": selective}
        # As arguments, what comes in is kept as autograd keeps tensors, which may be in host memory.
        call = functools.partial(_called, forward, tuple(kwargs))
        return checkpoint(call, *kwargs.values(), *args, use_reentrant=False, **contexts)

    return run


def _called(forward: Callable[..., object], names: Sequence[str], *values: object) -> object:
    """``forward`` of values, the first of which have names."""
    named = dict(zip(names, values, strict=False))
    return forward(*values[len(names) :], **named)


def _selective_contexts_on_host() -> tuple[_Context, _Context]:
    first, again = _selective_contexts()
    kept = functools.partial(_kept_values, first)
    return _nested(leaving(kept), first), _nested(returning(kept), again)


def _kept_values(first: TorchDispatchMode) -> list[_VersionWrapper]:
    """What the first pass of selective checkpointing has kept so far."""
    storage: Mapping[object, Mapping[int, object]] = vars(first)["storage"]
    leaves = (leaf for entries in storage.values() for entry in entries.values() for leaf in tree_leaves(entry))
    return [leaf for leaf in leaves if isinstance(leaf, _VersionWrapper)]


@contextlib.contextmanager
def _nested(*contexts: contextlib.AbstractContextManager[object]) -> Generator[None]:
    """All of them, the last innermost."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    storage: _Storage = defaultdict(dict)
    return _Keeping(_policy, storage), _Repeating(None, storage)


class _Keeping(_CachingTorchDispatchMode):
    """Torch's first pass, which copies what it kept before that is written to: then its values are those it had."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], storage: _Storage) -> None:
        super().__init__(policy, storage)
        self._kept: dict[int, list[_VersionWrapper]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[object, ...] = (), kwargs: _Named | None = None
    ) -> object:
        for storage in storages_of(written_by(func, args, kwargs or {})):
            for each in self._kept.pop(storage, ()):
                each.val = each.val.clone()
                each.version = each.val._version
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if _name(func) in KEPT:
            *_, last = self.storage[func].values()
            for each in tree_leaves(last):
                if isinstance(each, _VersionWrapper) and isinstance(each.val, torch.Tensor):
                    self._kept[storage_of(each.val)].append(each)
        return result


class _Repeating(_CachedTorchDispatchMode):
    """Torch's second pass, which repeats what was written to behind the first: who did that is not known there."""

    def __enter__(self) -> _CachedTorchDispatchMode:
        for entries in self.storage.values():
            for index, entry in entries.items():
                if any(isinstance(each, _VersionWrapper) and _is_changed(each) for each in tree_leaves(entry)):
                    entries[index] = checkpointing._RECOMPUTE
        return super().__enter__()


def _is_changed(kept: _VersionWrapper) -> bool:
    return isinstance(kept.val, torch.Tensor) and kept.val._version != kept.version


def _policy(
    context: SelectiveCheckpointContext, operator: OpOverload, *args: object, **kwargs: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _name(operator) in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _name(operator: OpOverload) -> str:
    """``aten.mm`` of ``aten.mm.default``; of what writes to its operands nothing that is kept."""
    name, _, _ = str(operator).rpartition(".")
    return "" if is_writing(operator) else name
