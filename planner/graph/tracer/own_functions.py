"""What torch.export records of autograd functions: their forward as operators that have gradients.

A function's forward runs without gradients, and torch switches them on again below what export records. Where code in
between says so in Python, as torch's own checkpoints do, everything behind it would be recorded as without gradients.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for what switches gradients, nor for calling it unseen by what records.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction


class _SwitchedUnseen(TorchFunctionMode):
    """Switches gradients on and off without handing that on to whoever records."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """``func`` as it is called."""
        del types
        if func is not torch._C._set_grad_enabled:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def functions_have_gradients() -> Generator[None]:
    """Records functions so; a reentrant checkpoint is what it runs, since a plan says what is recomputed."""
    plain = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: object, **kwargs: object) -> object:
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        with _SwitchedUnseen():
            return plain.__func__(cls, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", plain)  # noqa: B010


def _checkpointed(function: object, preserves_random_state: object, *args: object) -> object:
    """Of a reentrant checkpoint: nothing in it has gradients where no argument has."""
    del preserves_random_state
    assert callable(function)
    if not torch.is_grad_enabled() or any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)
