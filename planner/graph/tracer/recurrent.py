"""Recurrent layers under a trace: one step of each, its result repeated, for torch would run every step one by one.

The shapes are those of all steps, and what the layers cost follows from shapes (``planner/operators/recurrence.py``).
"""

# pyright: reportPrivateUsage=false
# torch has no public way to exchange what an operator is made of.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from planner.operators.record import Trait
from planner.operators.registry import names_with

LENGTH_DIM, BATCH_FIRST = 0, -1  # the last argument of each says whether sequences come first
OVERLOADS: frozenset[OpOverload] = frozenset(getattr(torch.ops.aten, name).input for name in names_with(Trait.STEPS))


def run_one_step(run: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """What ``run``, a recurrent operator, returns for ``args``, by one step where they have no values."""
    inputs = args[0]
    assert isinstance(inputs, torch.Tensor)
    dim = LENGTH_DIM + int(args[BATCH_FIRST] is True)
    if not isinstance(inputs, FakeTensor) and not inputs.is_meta:
        return run(*args, **kwargs)
    result = run(inputs.narrow(dim, 0, 1), *args[1:], **kwargs)
    assert isinstance(result, tuple)
    output, *states = result
    repeats = [1] * output.ndim
    repeats[dim] = inputs.shape[dim]
    return (output.repeat(repeats), *states)


@contextlib.contextmanager
def one_step() -> Generator[None]:
    """Exchanges torch's loops over the steps, where a trace runs them, for ``run_one_step``."""
    before = {overload: dict(overload.py_kernels) for overload in OVERLOADS}
    try:
        for overload, kernels in before.items():
            overload.py_kernels.update({key: _shortened(kernel) for key, kernel in kernels.items()})
            overload._dispatch_cache.clear()
        yield
    finally:
        for overload, kernels in before.items():
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


def _shortened(kernel: Callable[..., object]) -> Callable[..., object]:
    def run(*args: object, **kwargs: object) -> object:
        return run_one_step(kernel, args, kwargs)

    return run
