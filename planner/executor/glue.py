"""What code between pipelined modules does that a list of calls does not have, and what of it draws random numbers.

A recording is replayed at every step, on the stages that it was cut into. So it must hold all that the code does:
hooks on tensors, derivatives, autocast, Python's random numbers and what the code keeps in its modules are seen here,
and refused.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for what tells whether two tensors lie in the same memory, and for a module's hooks.

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[..., object]

_HOOKS: frozenset[Function] = frozenset(
    {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
)  # fmt: skip
_DIFFERENTIATING: frozenset[Function] = frozenset({torch.autograd.grad, torch.Tensor.backward})
DIFFERENTIATES = "differentiates what it computes"
REPARAMETRIZES = "calls modules with other parameters than their own, as torch.func.functional_call does"
_PLAIN = int | float | str | bool


class Watch:
    """Looks at one recording from its beginning to its end; ``reasons`` says what cannot be replayed, each once."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """``modules``: those whose own forward is recorded."""
        self._modules = tuple(modules)
        self._before = self._kept()
        self._autocast = _autocast()
        self._drawn = _drawn()
        self._reasons: dict[str, None] = {}
        self._held: list[tuple[nn.Module, list[int]]] = []
        if any(module._backward_hooks or module._backward_pre_hooks for module in self._modules):
            self._say("hooks gradients of modules")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Sentences without a subject."""
        return tuple(self._reasons)

    def called(self, function: Function | None) -> None:
        """After each torch function outside pipelined modules, and before each of these (None)."""
        if function in _HOOKS:
            self._say("hooks gradients of tensors")
        if function in _DIFFERENTIATING:
            self._say(DIFFERENTIATES)
        if _autocast() != self._autocast:
            self._say("changes autocast")

    def holds(self, module: nn.Module) -> None:
        """``module``, which is recorded as one call, has its own parameters now."""
        self._held.append((module, [id(parameter) for parameter in module.parameters()]))

    def enters(self) -> None:
        """A pipelined module is about to run: what it draws is its own."""
        self._look_at_draws()
        if any([id(parameter) for parameter in module.parameters()] != own for module, own in self._held):
            self._say(REPARAMETRIZES)

    def leaves(self) -> None:
        """It has run."""
        self._drawn = _drawn()

    def ended(self, again: Callable[[], object]) -> None:
        """The recording is over; ``again`` makes another pass, for what the code keeps may be there to stay."""
        self._look_at_draws()
        if self._changed():
            again()
            changed = self._changed()
            if changed:
                self._say(f"changes {', '.join(changed)} of its modules")

    def _changed(self) -> list[str]:
        """What modules keep that is not what it was when this was last asked."""
        before, self._before = self._before, self._kept()
        names = before.keys() | self._before.keys()
        return sorted(name for name in names if before.get(name) != self._before.get(name))

    def _look_at_draws(self) -> None:
        if _drawn() != self._drawn:
            self._say("draws random numbers of Python or NumPy")
            self._drawn = _drawn()

    def _say(self, reason: str) -> None:
        self._reasons[reason] = None

    def _kept(self) -> Mapping[str, object]:
        """Numbers and words that modules keep."""
        return {
            f"{type(module).__name__}.{name}": value
            for module in self._modules
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and name != "training"
        }


class Draws(TorchDispatchMode):
    """Notices operators that draw from torch's generators."""

    def __init__(self) -> None:
        super().__init__()
        self._found = False

    def taken(self) -> bool:
        """Whether one did since this was last asked."""
        found, self._found = self._found, False
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self._found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _autocast() -> tuple[object, ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _drawn() -> tuple[object, ...]:
    """Where Python's and NumPy's own generators are."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(rest)


class Aliases:
    """Which recorded tensors lie in the same memory: what is written into one is in the others too.

    On stages they may travel by themselves, so ``reasons`` says where one is read that another was written into.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, None] = {}
        self._known: dict[int, torch.Tensor] = {}  # kept, so that no id is used twice
        self._outdated: set[int] = set()

    def made(self, tensor: torch.Tensor) -> None:
        """It is a result, also again."""
        self._known[id(tensor)] = tensor
        self._outdated.discard(id(tensor))

    def read(self, tensor: torch.Tensor) -> None:
        """It is an argument."""
        if id(tensor) in self._outdated:
            self.reasons["writes into a tensor and then reads another one that lies in the same memory"] = None

    def written(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of ``tensors``, which a call wrote into, those that it does not return. The others there are outdated."""
        now = {id(tensor) for tensor in (*tensors, *results)}
        places = {tensor.untyped_storage()._cdata for tensor in tensors}
        same = {key for key, tensor in self._known.items() if tensor.untyped_storage()._cdata in places}
        self._outdated |= same - now
        returned = {id(tensor) for tensor in results}
        return list({id(tensor): tensor for tensor in tensors if id(tensor) not in returned}.values())


@dataclass(frozen=True)
class Writing:
    """``function``, which writes into arguments. ``number`` that it does not return come first, and last in its result.

    What is written into is another tensor from then on.
    """

    function: Function
    number: int

    def __call__(self, *args: object, **kwargs: object) -> tuple[object, ...]:
        """Its result, and what it has written into."""
        return self.function(*args[self.number :], **kwargs), *args[: self.number]
