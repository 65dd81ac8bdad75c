"""Stands between a model and its autograd functions, for those who record what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

import torch
from torch.utils.checkpoint import CheckpointFunction

Function = type[torch.autograd.Function]
Apply = Callable[[Function, Callable[[], object], tuple[object, ...], Mapping[str, object]], object]


@contextlib.contextmanager
def applied_by(apply: Apply) -> Generator[None]:
    """``apply(function, run, args, kwargs)`` in place of ``function.apply(*args, **kwargs)``, which ``run`` does.

    A reentrant checkpoint is no function here but what it runs, since a plan says what is recomputed.
    """
    plain = vars(torch.autograd.Function)["apply"]

    def applied(cls: Function, *args: object, **kwargs: object) -> object:
        if cls is CheckpointFunction:
            return _without_checkpoint(*args)
        return apply(cls, lambda: plain.__func__(cls, *args, **kwargs), args, kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(applied))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", plain)  # noqa: B010


def _without_checkpoint(function: object, preserves_random_state: object, *args: object) -> object:
    """Of a reentrant checkpoint: nothing in it has gradients where no argument has."""
    del preserves_random_state
    assert callable(function)
    if not torch.is_grad_enabled() or any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)
