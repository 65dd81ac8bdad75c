"""Operators that were written down, and played back on real tensors as far as some of them need.

Operators run in their order and on their own random numbers. Those that lead nowhere are left out; where others go on
from their random numbers, these are drawn and dropped. A tensor is handed out behind the last operator that changes it
and then let go: a model that fills one parameter after the other takes no more memory than one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

BEGINNING = -1  # stands for the operator before the first

Give: TypeAlias = Callable[[int, torch.Tensor], None]


class UnrecordableError(Exception):
    """A model whose values come about in ways that cannot be played back; nobody but the executor sees it."""


@dataclass(frozen=True)
class View:
    """A tensor as a part of a storage."""

    storage: int  # in the order in which they came about
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that it is of a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True)
class Operation:
    """One operator; views stand for tensors in its arguments."""

    function: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]  # where a result has a storage of its own
    reads: set[int]
    writes: set[int]  # storages that it makes or changes
    replaces: set[int]  # of these, whose values before have no part in those behind it
    after: int | torch.Tensor | None  # the operator whose state of the generator it goes on from, or the state itself


@dataclass
class Recording:
    """All operators of a build, and what the generator was like before."""

    beginning: torch.Tensor
    operations: list[Operation] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)

    def play(self, wanted: Sequence[View], give: Give) -> None:
        """Calls ``give`` with the place in ``wanted`` and the value of each, in the order in which they are finished.

        UnrecordableError where an operator does not make what was recorded. The generator is left as it is.
        """
        _Player(self, wanted).play(give)


class _Player:
    """Runs what of a recording leads to some tensors."""

    def __init__(self, recording: Recording, wanted: Sequence[View]) -> None:
        self._recording = recording
        self._wanted: dict[int, list[tuple[int, View]]] = {}
        for index, view in enumerate(wanted):
            self._wanted.setdefault(view.storage, []).append((index, view))
        self._steps = self._needed()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._states: dict[int, torch.Tensor] = {BEGINNING: recording.beginning}
        self._drawn_by = BEGINNING

    def play(self, give: Give) -> None:
        operations = self._recording.operations
        used = {s: number for number, only_draws in self._steps if not only_draws
                for s in operations[number].reads | operations[number].writes}  # fmt: skip
        finished = {s: number for number, only_draws in self._steps if not only_draws
                    for s in operations[number].writes & self._wanted.keys()}  # fmt: skip
        kept = self._states_kept()
        with torch.random.fork_rng(devices=()), torch.no_grad():
            for number, only_draws in self._steps:
                operation = operations[number]
                self._restore(operation.after)
                self._run(operation, only_draws)
                if operation.after is not None:
                    self._drawn_by = number
                    if number in kept:
                        self._states[number] = torch.default_generator.get_state()
                if only_draws:
                    continue
                for storage in operation.writes:
                    if finished.get(storage) == number:
                        for index, view in self._wanted[storage]:
                            give(index, view.of(self._storages[storage]))
                for storage in operation.reads | operation.writes:
                    if used[storage] == number:
                        self._storages.pop(storage, None)

    def _needed(self) -> list[tuple[int, bool]]:
        """Operators in their order, each with whether it only draws for others' sake."""
        needed, states = set(self._wanted), set[int]()
        steps: list[tuple[int, bool]] = []
        for number in reversed(range(len(self._recording.operations))):
            operation = self._recording.operations[number]
            is_needed = not needed.isdisjoint(operation.writes)
            if is_needed:
                needed = (needed - operation.replaces) | operation.reads
            if is_needed or number in states:
                steps.append((number, not is_needed))
                if isinstance(operation.after, int):
                    states.add(operation.after)
        return steps[::-1]

    def _states_kept(self) -> set[int]:
        """Operators whose state another one than the next goes on from."""
        kept, before = set[int](), BEGINNING
        for number, _ in self._steps:
            after = self._recording.operations[number].after
            if after is None:
                continue
            if isinstance(after, int) and after != before:
                kept.add(after)
            before = number
        return kept

    def _restore(self, after: int | torch.Tensor | None) -> None:
        """Brings the generator to where an operator draws from."""
        if isinstance(after, torch.Tensor):
            torch.default_generator.set_state(after)
        elif after is not None and (after == BEGINNING or after != self._drawn_by):
            torch.default_generator.set_state(self._states[after])

    def _run(self, operation: Operation, only_draws: bool) -> None:
        storages = {} if only_draws else self._storages

        def real(leaf: object) -> object:
            if not isinstance(leaf, View):
                return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
            if leaf.storage not in storages:
                storages[leaf.storage] = torch.UntypedStorage(self._recording.storage_bytes[leaf.storage])
            return leaf.of(storages[leaf.storage])

        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        if only_draws or not any(operation.results):
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor, view in zip(tensors, operation.results, strict=True):
            if view is None:
                continue
            found = View(view.storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            if found != view:
                text = f"{operation.function} makes {_described(found)} where it declares {_described(view)}"
                raise UnrecordableError(text)
            storages[view.storage] = tensor.untyped_storage()


def _described(view: View) -> str:
    return f"{view.dtype} of shape {view.shape} and strides {view.stride}"


def storages_in(nest: object) -> set[int]:
    """The storages of all views in ``nest``."""
    return {leaf.storage for leaf in tree_leaves(nest) if isinstance(leaf, View)}
