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

from planner.models.autograd_functions import Function, applied_by


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
    """Records functions so."""
    with applied_by(_apply):
        yield


def _apply(
    function: Function, run: Callable[[], object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    del function, args, kwargs
    with _SwitchedUnseen():
        return run()
