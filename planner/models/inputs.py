"""A module's inputs: by name, flat everywhere but in the user's own functions, which may take them in nests.

``{"batch": {"image": x, "text": [y, z]}}`` is ``{"batch.image": x, "batch.text.0": y, "batch.text.1": z}``: so it is
traced, cut into micro-batches and sent. The user's ``forward`` and ``loss_fn`` get what ``example_inputs`` returned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    SequenceKey,
    TreeSpec,
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
)

from planner.errors import ModelError
from planner.models.loss import TrainingLoss, in_float32

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
LABELS = "labels"
Constant = None | bool | int | float | str
T = TypeVar("T")


class InOrder(dict[str, T]):
    """A batch whose inputs have no names but ``input_0``, ``input_1``, ...: their positions will do as well."""

    def __missing__(self, key: object) -> T:
        if isinstance(key, int) and (name := _of_position(key)) in self:
            return self[name]
        raise KeyError(f"{key!r}: the batch holds {', '.join(self)}")


@dataclass(frozen=True)
class Nest:
    """How inputs by name are put together to what the user's functions take."""

    spec: TreeSpec
    leaves: tuple[str | None, ...]  # in the order of ``spec``: the name of a tensor, None for a constant
    constants: tuple[object, ...]  # beside them

    def __deepcopy__(self, memo: object) -> Nest:
        """Itself: it never changes, and torch warns where its trees are copied."""
        return self

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors."""
        return frozenset(name for name in self.leaves if name is not None)

    def nested(self, batch: Mapping[str, object]) -> Any:
        """``batch`` as ``example_inputs`` returned it."""
        pairs = zip(self.leaves, self.constants, strict=True)
        return tree_unflatten([constant if name is None else batch[name] for name, constant in pairs], self.spec)

    def nested_for_loss(self, batch: Mapping[str, object]) -> object:
        """The same, by name; what else ``batch`` holds, such as labels, is beside it."""
        value = self.nested(batch)
        others = {name: tensor for name, tensor in batch.items() if name not in self.names}
        if isinstance(value, Mapping):
            return {**value, **others} if others else value
        return InOrder({**{_of_position(i): each for i, each in enumerate(value)}, **others})

    def adapted(self, module: nn.Module) -> nn.Module:
        """``module``, whose forward now takes these inputs by name too."""
        module.forward = functools.partial(_called, module.forward, self)
        return module


def taking(nest: Nest | None, function: Callable[..., T], batch_at: int) -> Callable[..., T]:
    """The user's ``function``, which takes the batch at ``batch_at`` as they give it, for a batch by name."""

    @functools.wraps(function)
    def call(*args: object) -> T:
        return function(*args[:batch_at], _as_given(nest, args[batch_at]), *args[batch_at + 1 :])

    return call


def taken_by_loss(nest: Nest | None, loss: TrainingLoss) -> TrainingLoss:
    """The user's ``loss``, for batches by name."""
    weight = None if loss.weight is None else taking(nest, loss.weight, 0)
    return replace(loss, function=taken_in_float32(nest, loss.function), weight=weight)


def taken_in_float32(nest: Nest | None, loss_fn: Callable[[object, Batch], T]) -> Callable[[object, Batch], T]:
    """The user's ``loss_fn``, for a batch by name and for outputs in any dtype, which it gets in float32.

    So torch.autocast computes losses, and so the default loss is: a sum in bfloat16 has 8 bits.
    """

    @functools.wraps(loss_fn)
    def call(output: object, batch: Batch) -> T:
        return loss_fn(in_float32(output), batch)

    return taking(nest, call, 1)


def _as_given(nest: Nest | None, batch: object) -> object:
    if not isinstance(batch, Mapping):
        return batch
    if nest is not None and nest.names <= batch.keys():
        return nest.nested_for_loss(batch)
    return InOrder(batch) if _of_position(0) in batch else batch


def flattened(inputs: object) -> tuple[Batch, Nest | None]:
    """Inputs by name or in order, and how they were nested: None where they are a dict or a tuple of tensors.

    TypeError names what is no tensor.
    """
    inputs = _container(inputs)
    values = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
    if not values:
        raise TypeError("nothing")
    if all(isinstance(value, torch.Tensor) for value in values):
        return dict(zip(map(str, inputs), values, strict=True)) if isinstance(inputs, dict) else tuple(values), None
    beside: dict[str, torch.Tensor] = {}
    if isinstance(inputs, dict) and isinstance(inputs.get(LABELS), torch.Tensor):
        beside[LABELS] = inputs.pop(LABELS)  # of our copy: forward need not take them
    found, spec = tree_flatten_with_path(inputs)
    named = [(_name(path), leaf) for path, leaf in found]
    batch = {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}
    constants = [leaf for _, leaf in named if not isinstance(leaf, torch.Tensor)]
    strange = next((leaf for leaf in constants if not isinstance(leaf, Constant)), None)
    if strange is not None:
        raise TypeError(f"a {type(strange).__name__} among them")
    if not batch or len(dict(named)) < len(named):
        raise TypeError("two values of one name" if batch else "no tensor at all")
    leaves = tuple(name if name in batch else None for name, _ in named)
    return {**batch, **beside}, Nest(spec, leaves, tuple(None if name in batch else leaf for name, leaf in named))


def _container(inputs: object) -> dict[str, Any] | list[Any] | tuple[Any, ...]:
    """Inputs in order or by name; one alone, a tensor or of a class that torch knows to be a nest, is in order."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    if isinstance(inputs, list | tuple):
        return inputs
    if isinstance(inputs, torch.Tensor) or not tree_structure(inputs).is_leaf():
        return (inputs,)
    raise TypeError(f"a {type(inputs).__name__}")


def by_name(batch: object) -> dict[str, torch.Tensor]:
    """A batch that may be nested, by the names of its tensors; ModelError where it holds something else."""
    try:
        found, _ = flattened(batch)
    except TypeError as error:
        raise ModelError(f"a batch must be tensors in tuples, lists and dicts, got {error}",
                         hint="pass what forward and loss_fn take, by name") from None  # fmt: skip
    return found if isinstance(found, dict) else {_of_position(index): each for index, each in enumerate(found)}


def short_name(name: str) -> str:
    """The last part of a nested name."""
    return name.rpartition(".")[2]


def _name(path: KeyPath) -> str:
    first, *rest = path
    start = _of_position(first.idx) if isinstance(first, SequenceKey) else _part(first)
    return ".".join([start, *map(_part, rest)])


def _part(key: object) -> str:
    match key:
        case MappingKey(key=inner):
            return str(inner)
        case SequenceKey(idx=index):
            return str(index)
        case _:
            return str(getattr(key, "name", key))


def _of_position(index: int) -> str:
    return f"input_{index}"


def _called(forward: Callable[..., object], nest: Nest, *args: object, **kwargs: object) -> object:
    """``forward`` with nested inputs; called in another way, as it is."""
    if args or not nest.names <= kwargs.keys():
        return forward(*args, **kwargs)
    value = nest.nested({name: kwargs[name] for name in nest.names})
    return _passed(forward, value if isinstance(value, dict) else tuple(value), forward)


def call_model(module: nn.Module, inputs: Batch) -> object:
    """Calls ``module`` with ``inputs``: by name where they have names and its forward takes these, else in order.

    Inputs by other names than that of its one argument are that argument. ``labels`` are for the loss, unless forward
    takes them.
    """
    return _passed(module, inputs, module.forward)


def _passed(
    function: Callable[..., object], inputs: Mapping[str, object] | tuple[object, ...], forward: Callable[..., object]
) -> object:
    if isinstance(inputs, tuple):
        return function(*inputs)
    positional = [inputs[name] for name in map(_of_position, range(len(inputs))) if name in inputs]
    if positional and len(positional) == len(inputs.keys() - {LABELS}):
        return function(*positional)
    parameters = inspect.signature(forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return function(**inputs)
    taken = {name: value for name, value in inputs.items() if name != LABELS or name in parameters}
    if all(name in parameters for name in taken):
        return function(**taken)
    if not _takes_many(parameters.values()):
        _check_known(taken, parameters)
        if len(taken) > 1 and len(parameters) == 1:
            return function(dict(inputs))
    return function(*taken.values())


def takes_labels(module: nn.Module) -> bool:
    """Whether ``call_model`` gives forward the labels that its inputs hold. A nest never holds them."""
    forward = module.forward
    if isinstance(forward, functools.partial) and forward.func is _called:
        return False
    parameters = inspect.signature(forward).parameters.values()
    return any(each.name == LABELS or each.kind is each.VAR_KEYWORD for each in parameters)


def for_forward(inputs: Mapping[str, T], module: nn.Module) -> dict[str, T]:
    """``inputs`` without labels, unless forward takes them."""
    return {name: value for name, value in inputs.items() if name != LABELS or takes_labels(module)}


def _check_known(given: Iterable[str], parameters: Collection[str]) -> None:
    """ModelError where there are more inputs than parameters, and these are some of them by name."""
    strange = [name for name in given if name not in parameters]
    known = [name for name in given if name in parameters]
    if known and len(known) + len(strange) > len(parameters):
        raise ModelError(
            f"the inputs hold {', '.join(strange)}, which forward({', '.join(parameters)}) does not take",
            hint=f"what only the loss function needs, other than {LABELS}, is given to forward too: let forward take "
            + ", ".join(f"{name}=None" for name in strange),
        )


def _takes_many(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters)


def training_batch(given: Batch) -> dict[str, torch.Tensor]:
    """Inputs by name, with the ``labels`` that the data have: one for each token, or for each image."""
    inputs = by_name(given)
    if LABELS in inputs:
        return inputs
    named = {short_name(name): value for name, value in inputs.items()}
    tokens = named.get("decoder_input_ids", named.get("input_ids"))
    first, *others = inputs.values()
    if not others and _of_position(0) in inputs and first.dtype == torch.int64 and first.dim() == 2:
        tokens = first
    if tokens is not None:
        return {**inputs, LABELS: torch.zeros_like(tokens)}
    if "pixel_values" in named:
        return {**inputs, LABELS: torch.zeros(named["pixel_values"].shape[0], dtype=torch.int64)}
    return inputs
