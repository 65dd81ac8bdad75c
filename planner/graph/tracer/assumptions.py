"""What Python asks of tensors that have no values: answered from what is known, else assumed and said.

Beside tensors that stand for a shape, the values are followed that are known without weights:
the user's own example inputs, buffers, constants and what is computed from them. Where a model
chooses by value (top-k of a router), the choice is taken as evenly spread, so that the sizes of
what each expert gets are those of balanced routing. A condition that is not known is taken either
way and the way with more work kept; a mask that is not known selects everything.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload or the identity of a storage.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from planner.graph.tracer.failure import TraceStoppedError
from planner.graph.tracer.frames import user_frame, user_place
from planner.graph.tracer.fx_reading import asks_for_value, base_overload_name, operator_behind
from planner.operators.record import Trait

MAX_FOLLOWED = 2**20  # elements: larger tensors have no values here, but for what is chosen by value
MAX_ANSWERS = 1024  # to one call of a function: more than a layer's experts, fewer than a loop that never ends
MAX_GUESSES = 8  # lines whose other branch is tried

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_READS_VALUES = "its data is not allocated yet"  # what torch says of a kernel that looks at a tensor without values

T = TypeVar("T")


@dataclass(frozen=True)
class _Known:
    """The values of a tensor, and what had to be assumed for them."""

    values: torch.Tensor
    assumed: frozenset[str] = frozenset()


class Assumptions:
    """Answers for one trace; ``notes`` says what had to be assumed, ``guessed`` which lines' conditions."""

    def __init__(self, guesses: Mapping[str, bool]) -> None:
        self.guessed: dict[str, bool] = {}
        self._guesses = guesses
        self._asking: FrameType | None = None  # the call of the user's function that asks, and how often in a row
        self._asked = 0
        self._known: dict[int, tuple[torch.Tensor, _Known]] = {}  # by id; the tensor is kept, so that no id comes twice
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """One for each line."""
        return tuple(self._notes)

    def know(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Stand-ins with their values."""
        self._known.update({id(stand_in): (stand_in, _Known(values)) for stand_in, values in pairs})

    @contextlib.contextmanager
    def answering(self) -> Generator[None]:
        """Surrounds a trace: answers the questions that are no operators (``tolist``, ``numpy``)."""
        with _Questions(self):
            yield

    def run(self, overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """``overload`` on stand-ins; where it needs values, its answer."""
        try:
            result = overload(*args, **kwargs)
        except _NEEDS_VALUES:
            return self._answer(overload, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if overload.namespace in ("aten", "prims") and _READS_VALUES not in str(error):
                raise
            self._note(f"calls {overload}, which tells no sizes without values: run once to learn them")
            return self._answer(overload, args, kwargs)
        self._follow(overload, args, kwargs, result)
        return result

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Its values where they are known; what was assumed for them is from now on said."""
        known = self._look_up(tensor)
        if known is None:
            return None
        self._notes.update(dict.fromkeys(sorted(known.assumed)))
        return known.values

    def values_or_ones(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its values; where they are not known, everything is selected."""
        values = self.values_of(tensor)
        if values is None:
            self._note("uses values of a tensor that are not known: all its elements are taken as 1 or True")
            with unset_fake_temporarily():
                values = torch.ones(1, dtype=tensor.dtype).expand(tensor.shape)
        return values

    def _look_up(self, tensor: torch.Tensor) -> _Known | None:
        if not isinstance(tensor, FakeTensor):
            return _Known(tensor) if tensor.device.type == "cpu" else None
        if tensor.constant is not None:
            return _Known(tensor.constant)
        found = self._known.get(id(tensor))
        return None if found is None else found[1]

    def _note(self, what: str) -> None:
        self._notes[f"{user_place()} {what}"] = None

    def _answer(self, overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        operator, name = operator_behind(overload), base_overload_name(overload)
        tensors = _tensors((args, kwargs))
        if asks_for_value(operator):
            return self._scalar(tensors, is_condition=operator.has(Trait.GIVES_CONDITION))
        if name == "masked_select":
            return self._index(tensors[0], tensors[1:])
        if name == "index" and isinstance(args[1], Sequence):
            return self._index(tensors[0], args[1])

        def real(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_floating_point() and len(tensors) > 1 and self._look_up(leaf) is None:
                with unset_fake_temporarily():  # only its shape matters
                    return torch.ones(1, dtype=leaf.dtype).expand(leaf.shape)
            return self.values_or_ones(leaf)

        real_args, real_kwargs = tree_map(real, (args, dict(kwargs)))
        result = _run_for_real(overload, real_args, real_kwargs)
        wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

        def stand_in(leaf: object) -> object:
            return self._stand_in(leaf, wants_gradient=wants_gradient) if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(stand_in, result)

    def _stand_in(self, values: torch.Tensor, *, wants_gradient: bool) -> torch.Tensor:
        stand_in = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        if wants_gradient and stand_in.is_floating_point():
            return stand_in.requires_grad_().clone()  # no leaf: it may be written to
        self._known[id(stand_in)] = (stand_in, _Known(values))
        return stand_in

    def _scalar(self, tensors: Sequence[torch.Tensor], *, is_condition: bool) -> bool | int | float:
        values = [value for tensor in tensors if (value := self.values_of(tensor)) is not None]
        if len(values) == len(tensors):
            with unset_fake_temporarily():
                number = values[0].item() if len(values) == 1 else torch.equal(*values)
            return bool(number) if is_condition else number
        if is_condition or tensors[0].dtype is torch.bool:
            return self._guess()
        self._note("reads a number from a tensor whose values are not known: taken as 1")
        return 1.0 if tensors[0].is_floating_point() else 1

    def _guess(self) -> bool:
        place, frame = user_place(), user_frame()
        self._asked = self._asked + 1 if frame is self._asking else 1
        self._asking = frame
        guess = self._guesses.get(place, True)
        self.guessed.pop(place, None)  # the last guessed stands last
        self.guessed[place] = guess
        if self._asked > MAX_ANSWERS:
            raise RuntimeError(f"{place} asks for a condition again and again, taken as {guess} each time")
        return guess

    def _index(self, tensor: torch.Tensor, indices: Sequence[object]) -> torch.Tensor:
        """``tensor[indices]`` with the places of its masks in their stead: the same, with a known size."""
        places: list[object] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                values = self.values_or_ones(index)
                with unset_fake_temporarily():
                    found = torch.nonzero(values, as_tuple=True)
                places += [self._stand_in(place, wants_gradient=False) for place in found]
            else:
                places.append(index)
        return torch.ops.aten.index.Tensor(tensor, places)

    def _follow(
        self, overload: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
    ) -> None:
        """Finds the values of ``result`` where those of the operands are known."""
        outputs = _tensors(result)
        tensors = _tensors((args, kwargs))
        operator = operator_behind(overload)
        known = {id(tensor): self._look_up(tensor) for tensor in tensors}
        if not outputs or not _can_be_followed(overload, outputs):
            self._forget(overload, outputs)
        elif all(known.values()) or operator.has(Trait.SHAPE_ALONE):
            assumed = frozenset[str]().union(*(k.assumed for k in known.values() if k is not None))

            def real(leaf: object) -> object:
                if not isinstance(leaf, torch.Tensor):
                    return leaf
                found = known[id(leaf)]
                return torch.zeros(1, dtype=leaf.dtype).expand(leaf.shape) if found is None else found.values

            with unset_fake_temporarily():
                real_args, real_kwargs = tree_map(real, (args, dict(kwargs)))
            values = _tensors(_run_for_real(overload, real_args, real_kwargs))
            for output, value in zip(outputs, values, strict=True):
                self._known[id(output)] = (output, _Known(value, assumed))
        elif operator.has(Trait.CHOOSES):
            arguments = dict(zip((a.name for a in overload._schema.arguments), args, strict=False)) | dict(kwargs)
            self._spread(str(overload), tensors[0], arguments.get("dim"), outputs)
        else:
            self._forget(overload, outputs)

    def _spread(self, name: str, operand: torch.Tensor, dim: object, outputs: Sequence[torch.Tensor]) -> None:
        """Indices that a choice by value returns, spread evenly over the dim that it chooses from."""
        if not operand.ndim or not any(output.dtype is torch.int64 for output in outputs):
            return
        dim = dim if isinstance(dim, int) else -1
        size = operand.shape[dim]
        text = f"{user_place()} chooses by value ({name}): taken as evenly spread over {size}"
        for output in outputs:
            with unset_fake_temporarily():
                values = (
                    _evenly(output, dim if output.ndim == operand.ndim else -1, size)
                    if output.dtype is torch.int64
                    else torch.ones(output.shape)
                )
            self._known[id(output)] = (output, _Known(values.to(output.dtype), frozenset((text,))))

    def _forget(self, overload: OpOverload, outputs: Sequence[torch.Tensor]) -> None:
        """What was written with unknown values is not known any more, in any view of the same memory."""
        if not overload._schema.is_mutable:
            return
        storages = {output.untyped_storage()._cdata for output in outputs}
        stale = [key for key, (tensor, _) in self._known.items() if tensor.untyped_storage()._cdata in storages]
        for key in stale:
            del self._known[key]


class _Questions(TorchFunctionMode):
    """Answers what torch asks of a tensor without an operator."""

    def __init__(self, assumptions: Assumptions) -> None:
        super().__init__()
        self._assumptions = assumptions

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Real values for ``tolist`` and ``numpy``."""
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            tensor = args[0]
            assert isinstance(tensor, torch.Tensor)
            values = self._assumptions.values_or_ones(tensor)
            with unset_fake_temporarily():
                return values.tolist() if func is torch.Tensor.tolist else values.numpy()
        return func(*args, **(kwargs or {}))


def trace_with_guesses(trace: Callable[[Assumptions], T], work: Callable[[T], object]) -> tuple[T, tuple[str, ...]]:
    """The trace with the most work among the ways that unknown conditions may go, and what was assumed for it.

    TraceStoppedError where none runs.
    """
    guesses: dict[str, bool] = {}
    while True:
        assumptions = Assumptions(guesses)
        try:
            best = trace(assumptions)
            break
        except TraceStoppedError:
            last = next(reversed(assumptions.guessed), None)
            if last is None or not guesses.get(last, True):
                raise
            guesses[last] = False
    notes = assumptions
    for place in list(assumptions.guessed)[:MAX_GUESSES]:
        if not guesses.get(place, True):
            continue
        other = Assumptions({**guesses, place: False})
        try:
            traced = trace(other)
        except TraceStoppedError:
            continue
        if work(traced) > work(best):  # pyright: ignore[reportOperatorIssue]  # tuples of numbers
            best, notes, guesses = traced, other, {**guesses, place: False}
    branches = tuple(
        f"{place} asks for a condition that depends on values: taken as {guess}, of the ways that run the one "
        "with more work"
        for place, guess in notes.guessed.items()
    )
    return best, (*notes.notes, *branches)


def _evenly(output: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Indices of the shape of ``output`` that take each of ``size`` places equally often; along ``dim`` none twice."""
    shape = list(output.shape)
    if shape:
        shape.append(shape.pop(dim))
    return (torch.arange(output.numel()) % max(1, size)).reshape(shape).movedim(-1, dim).reshape(output.shape)


def _can_be_followed(overload: OpOverload, outputs: Sequence[torch.Tensor]) -> bool:
    if torch.Tag.nondeterministic_seeded in overload.tags or operator_behind(overload).has(Trait.VALUES_UNSET):
        return False
    return sum(output.numel() for output in outputs) <= MAX_FOLLOWED


def _run_for_real(overload: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    with unset_fake_temporarily(), torch.no_grad():
        return overload(*args, **kwargs)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
