"""What an fx node says: its operator, arguments, results, and the memory behind them."""

# pyright: reportPrivateUsage=false
# torch has no public name for an operator overload, its schema, or the identity of a storage.

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from planner.operators.call import AttributeValue, TensorValue
from planner.operators.record import Operator, Trait
from planner.operators.registry import base_of, operator_called


class ValueDependentSizeError(ValueError):
    """The size of a tensor is only known when the model runs."""


def storage_of(value: torch.Tensor) -> int:
    """The identity of the memory behind ``value``; a sparse tensor, which has several, counts as one of its own."""
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return id(value)


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the memory behind ``value``; of a sparse tensor as if it were dense."""
    try:
        return int(value.untyped_storage().nbytes())
    except NotImplementedError:
        return value.numel() * value.element_size()


def distinct_bytes(values: list[torch.Tensor]) -> int:
    """Bytes of the memories behind ``values``, each once."""
    return sum({storage_of(value): storage_bytes(value) for value in values}.values())


def tensor_value(value: torch.Tensor, *, requires_grad: bool = False) -> TensorValue:
    """Shape, dtype and stored size of a fake tensor; ModelError where its size depends on values."""
    if any(isinstance(size, torch.SymInt) for size in value.shape):
        raise ValueDependentSizeError(f"a tensor of shape {tuple(map(str, value.shape))}")
    shape = tuple(int(size) for size in value.shape)
    stored = storage_bytes(value) // max(1, value.element_size())
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorValue(shape, dtype, requires_grad=requires_grad, num_stored=stored)


def values_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that the operator returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def flat_nodes(value: object) -> Iterator[fx.Node]:
    """All nodes in nested lists and tuples, in order."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat_nodes(item)


def base_name(node: fx.Node) -> tuple[str, bool]:
    """``relu_`` as (``relu``, True): the operator's name and whether it writes to an operand."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return str(getattr(node.target, "__name__", node.target)), False
    name = base_overload_name(node.target)
    return name, name != _own_name(node.target)


def operator_run_by(node: fx.Node) -> Operator:
    """The record of the operator that the node runs."""
    return operator_called(base_name(node)[0])


def operator_behind(overload: torch._ops.OpOverload) -> Operator:
    """The record of an overload."""
    return operator_called(base_overload_name(overload))


def base_overload_name(overload: torch._ops.OpOverload) -> str:
    """``relu`` for ``aten.relu_.default``."""
    return base_of(_own_name(overload))


def _own_name(overload: torch._ops.OpOverload) -> str:
    return overload._schema.name.split("::")[-1]


def asks_for_value(operator: Operator) -> bool:
    """Whether the operator hands a tensor's value to Python."""
    return operator.has(Trait.GIVES_NUMBER) or operator.has(Trait.GIVES_CONDITION)


def past_same_shape(value: object) -> fx.Node | None:
    """The node behind ``value``, or behind the reshapes to its own shape that lie before it."""
    while isinstance(value, fx.Node) and operator_run_by(value).has(Trait.KEEPS_ORDER):
        before = value.args[0]
        if not isinstance(before, fx.Node) or before.meta["val"].shape != value.meta["val"].shape:
            break
        value = before
    return value if isinstance(value, fx.Node) else None


def writes_sequence_first(attention: fx.Node) -> bool:
    """Whether CUDA's kernel of this attention lays its output out as (batch, sequence, heads, width).

    Flash attention and cuDNN lay it out as the query is (torch/_meta_registrations.py). The memory-efficient kernel
    always writes so; it runs in float32, with a mask, and where values are of another width than keys.
    """
    given = dict(named_arguments(attention))
    nodes = (given[name] for name in ("query", "key", "value"))
    query, key, value = (node.meta["val"] for node in nodes if isinstance(node, fx.Node))
    if given.get("attn_mask") is not None or query.dtype is torch.float32 or key.shape[-1] != value.shape[-1]:
        return True
    return query.stride(1) <= query.stride(2)


def inlined_region(module: nn.Module, node: fx.Node) -> tuple[fx.GraphModule, list[object], bool | None] | None:
    """The graph, arguments and gradient mode of a region wrapped by set_grad_enabled or autocast."""
    position = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(str(node.target))
    if position is None:
        return None
    reference = node.args[position]
    graph = getattr(module, str(reference.target), None) if isinstance(reference, fx.Node) else None
    if not isinstance(graph, fx.GraphModule):
        return None
    enabled = bool(node.args[0]) if position == 1 else None
    return graph, list(node.args[position + 1 :]), enabled


def named_arguments(node: fx.Node) -> Iterator[tuple[str, object]]:
    """Each argument with its name in the operator's schema."""
    if isinstance(node.target, torch._ops.OpOverload):
        arguments = node.target._schema.arguments
        yield from ((argument.name, value) for argument, value in zip(arguments, node.args, strict=False))
    else:
        yield from ((f"argument.{index}", value) for index, value in enumerate(node.args))
    yield from node.kwargs.items()


def attribute_value(value: object) -> AttributeValue:
    """An argument that is no tensor, as graph.json holds it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(item is None or isinstance(item, int) for item in value):
        return tuple(value)
    return str(value)
