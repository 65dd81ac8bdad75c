"""Sharding rules of operators that DTensor ships none for."""

# pyright: reportPrivateUsage=false
# DTensor has no public way to say that a result is no DTensor.

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import cast

import torch
from torch._ops import OpOverload
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dispatch import as_strided_handler
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OutputSharding
from torch.distributed.tensor._utils import compute_local_stride
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.executor.written_operands import written_by
from planner.models.causal_attention import causal_attention
from planner.models.grouped_shapes import know_grouped_shapes
from planner.operators.moves import VIEWS
from planner.operators.record import Trait
from planner.operators.registry import names_with

assert causal_attention  # its import makes the operators below
_aten = torch.ops.aten
# Their rules are of the forward pass alone, or want in the backward pass an input that is a DTensor: images are none.
_HALF_RULED = tuple(
    f"{name}{half}" for name in ("convolution", "native_group_norm", "_prelu_kernel") for half in ("", "_backward")
)
_BY_INDEX = (_aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default)
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_CAUSAL_ATTENTION = torch.ops.planner.causal_attention.default
_CAUSAL_ATTENTION_BACKWARD = torch.ops.planner.causal_attention_backward.default


@functools.cache
def register_sharding_rules() -> None:
    """Registers them with DTensor, once a process.

    The CPU's flash attention works on each sequence and head for itself. Results whose size depends on values (which
    tokens an expert gets) are computed whole on every rank, and so are operators of which torch has no rule: recurrent
    layers, and backward passes that were forgotten.
    DTensor asks for the shape of a grouped product, which torch knows in bfloat16 alone.
    """
    know_grouped_shapes()
    handlers: dict[OpOverload, Callable[..., object]] = DTensor._op_dispatcher._custom_op_handlers
    handlers |= dict.fromkeys((_ATTENTION, _ATTENTION_BACKWARD), _attended)
    handlers |= dict.fromkeys((_CAUSAL_ATTENTION, _CAUSAL_ATTENTION_BACKWARD), _attended_with_sinks)
    for name in names_with(Trait.SIZE_BY_VALUES):
        handlers[getattr(_aten, name).default] = _computed_whole
    for name in _HALF_RULED:
        handlers[getattr(_aten, name).default] = _computed_alike
    handlers |= dict.fromkeys((*_views_in_place(), _aten.t_.default), _viewed_in_place)
    handlers[_aten.new_empty_strided.default] = _for_gradient
    handlers[_aten.as_strided.default] = _strided
    asked = DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path
    DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path = _or_whole(asked)
    computed = DTensor._op_dispatcher._dispatch_get_local_results_slow_path
    DTensor._op_dispatcher._dispatch_get_local_results_slow_path = _or_in_order(computed)
    ended = DTensor._op_dispatcher._dispatch_fast_path_python_tail
    DTensor._op_dispatcher._dispatch_fast_path_python_tail = _or_written_to(ended)


def _computed_whole(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The result on whole operands: a plain tensor, the same on every rank."""
    whole = [argument.full_tensor() if isinstance(argument, DTensor) else argument for argument in args]
    return operator(*whole, **kwargs)


def _computed_alike(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The result on whole operands, replicated, so that it goes on among DTensors."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    whole_args, whole_kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    result = operator(*whole_args, **whole_kwargs)
    mesh = given[0].device_mesh
    return tree_map_only(
        torch.Tensor, lambda each: DTensor.from_local(each, mesh, [Replicate()] * mesh.ndim, run_check=False), result
    )


@functools.cache
def _views() -> frozenset[OpOverload]:
    """What gives a tensor another shape or order."""
    packets = [getattr(_aten, name, None) for operator in VIEWS for name in operator.names]
    return frozenset(getattr(each, overload) for each in packets if each is not None for overload in each.overloads())


def _views_in_place() -> Generator[OpOverload]:
    """What gives a tensor another shape or order in place: where torch has a rule for it, that keeps its shape."""
    for name in (f"{name}_" for operator in VIEWS for name in operator.names):
        packet = getattr(_aten, name, None)
        each = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
        yield from (operator for operator in each if torch.Tag.inplace_view in operator.tags)


def _viewed_in_place(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The operand itself, which from now on is what the operator that makes a new view returns.

    Recurrent layers, for one, bring the batch to the front so: without it their output keeps the shape from before.
    """
    changed = args[0]
    assert isinstance(changed, DTensor)
    view = getattr(_aten, operator._schema.name.removeprefix("aten::").removesuffix("_"))(*args, **kwargs)
    changed._local_tensor, changed._spec = view._local_tensor, view._spec
    return return_and_correct_aliasing(operator, args, kwargs, changed)


def _for_gradient(
    operator: OpOverload, args: tuple[torch.Tensor, list[int], list[int]], kwargs: dict[str, object]
) -> object:
    """Room for a gradient, placed as the first operand; whole where autograd is to write into a part of it.

    A part of a divided tensor is a copy. Slices that a forward pass writes to lost their gradient so, without a word.
    """
    like, size, stride = args
    assert isinstance(like, DTensor)
    mesh, local = like.device_mesh, like._local_tensor
    node = _node_of_backward()
    is_written_to = node is not None and node.name().endswith("CopySlices")
    if is_written_to or tuple(size) != tuple(like.shape):
        placements, made = (Replicate(),) * mesh.ndim, operator(local, size, stride, **kwargs)
    else:
        placements, strides = like.placements, compute_local_stride(tuple(stride), tuple(local.shape))
        made = operator(local, local.shape, strides, **kwargs)
    return DTensor.from_local(made, mesh, placements, run_check=False, shape=torch.Size(size), stride=tuple(stride))


def _node_of_backward() -> Node | None:
    """The node that a backward pass is at, if one is under way."""
    return cast(Node | None, torch._C._current_autograd_node())


def _strided(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """A view of what is whole on every rank: autograd takes one where a slice of a plain tensor was written to."""
    viewed = args[0]
    assert isinstance(viewed, DTensor)
    if not _is_whole(viewed):
        return as_strided_handler(operator, args, kwargs)
    view = operator(viewed._local_tensor, *args[1:], **kwargs)
    result = DTensor.from_local(view, viewed.device_mesh, viewed.placements, run_check=False)
    return return_and_correct_aliasing(operator, args, kwargs, result)


def _or_whole(propagate: Callable[..., object]) -> Callable[..., object]:
    """What DTensor asks for placements; the result of the operator, which it takes instead, where that has no answer.

    That is where there is no rule, where the shape that DTensor asks for depends on values, where a gradient's dim is
    viewed as two of which neither can be divided as that was, or where a rule moves the operand that is written to: a
    copy would be written to. A divided operand is written to as a whole, of which each rank keeps its own part.
    """

    @functools.wraps(propagate)
    def asked(
        operator: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        info: OpInfo,
        *others: object,
        **options: object,
    ) -> object:
        if _is_sized_by_values(operator, args):
            return _computed_alike(operator, args, kwargs)
        try:
            if operator in _BY_INDEX and _has_mask(args[1]):  # of which DTensor takes its part for whole
                raise NotImplementedError(f"{operator}: by a mask")
            found = propagate(operator, args, kwargs, info, *others, **options)
        except RuntimeError as error:
            is_mutable, is_of_gradient = operator._schema.is_mutable, _node_of_backward() is not None
            has_no_rule = isinstance(error, NotImplementedError) or (is_of_gradient and operator in _views())
            if not (has_no_rule or is_mutable):  # a gradient's view others may write to
                raise
            if not is_mutable:
                return _computed_alike(operator, args, kwargs)
            refusal = error
        else:
            if not _moves_first(found, info):
                return found
            refusal = RuntimeError(f"{operator}: in-place on what is still to be summed over ranks")
        if torch.Tag.inplace_view in operator.tags or any(map(_is_part_of_a_sum, written_by(operator, args, kwargs))):
            raise refusal  # a shape is not changed by what lies on this rank
        return _written_as_a_whole(operator, args, kwargs)

    return asked


def _written_as_a_whole(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The first operand, of which each rank keeps its own part."""
    whole_args, whole_kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    operator(*whole_args, **whole_kwargs)  # a tensor that is whole is no copy
    written = written_by(operator, args, kwargs), written_by(operator, whole_args, whole_kwargs)
    for each, whole in zip(*written, strict=True):
        _keep_own_part(each, whole)
        _write_to_what_it_is_of(each)
    return args[0]


def _or_in_order(compute: Callable[..., object]) -> Callable[..., object]:
    """What computes a part, of a gradient's view with the strides that DTensor takes it to have.

    An operator may lay a part out in memory otherwise than the whole, and then it cannot be viewed as that can.
    """

    @functools.wraps(compute)
    def computed(operator: OpOverload, args: tuple[object, ...], info: OpInfo) -> object:
        if operator is _aten.view.default and _node_of_backward() is not None:
            info.local_args = tree_map_only(torch.Tensor, torch.Tensor.contiguous, info.local_args)
        return compute(operator, args, info)

    return computed


def _or_written_to(end: Callable[..., object]) -> Callable[..., object]:
    """What DTensor ends an operator with; the operand that was written to, where that is a plain tensor.

    It counts as whole on every rank and stays one: torch wants a DTensor here.
    """

    @functools.wraps(end)
    def ended(operator: OpOverload, args: tuple[object, ...], *others: object, **options: object) -> object:
        first = args[0] if args else None
        is_plain = isinstance(first, torch.Tensor) and not isinstance(first, DTensor)
        if is_plain and any(first is each for each in written_by(operator, args, {})):
            return first
        result = end(operator, args, *others, **options)
        if operator._schema.is_mutable and isinstance(first, DTensor) and torch.Tag.inplace_view not in operator.tags:
            _write_to_what_it_is_of(first)
        return result

    return ended


def _write_to_what_it_is_of(part: torch.Tensor) -> None:
    """Of a tensor that is divided along the dim of a slice the slice is a copy, and what is written to it was lost.

    RuntimeError where that tensor is one of those whose sum counts.
    """
    divided = part._base
    if not (isinstance(part, DTensor) and isinstance(divided, DTensor)) or _storage_of(part) == _storage_of(divided):
        return
    if _is_part_of_a_sum(divided):
        raise RuntimeError("in-place on a slice of what is still to be summed over ranks")
    whole = _computed_alike(_aten.clone.default, (divided,), {})
    assert isinstance(whole, DTensor)
    view = part._view_func_unsafe(whole)
    assert isinstance(view, DTensor)
    view._local_tensor.copy_(part.full_tensor())
    _keep_own_part(divided, whole._local_tensor)


def _storage_of(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage()._cdata


def _is_sized_by_values(operator: OpOverload, args: tuple[object, ...]) -> bool:
    """Whether the result is as large as values say, such as what a mask selects."""
    if torch.Tag.dynamic_output_shape not in operator.tags:
        return False
    return operator is not _aten.index.Tensor or _has_mask(args[1])


def _has_mask(indices: object) -> bool:
    return any(
        isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) for each in tree_leaves(indices)
    )


def _is_whole(operand: torch.Tensor) -> bool:
    return not isinstance(operand, DTensor) or all(each.is_replicate() for each in operand.placements)


def _is_part_of_a_sum(operand: torch.Tensor) -> bool:
    return isinstance(operand, DTensor) and any(each.is_partial() for each in operand.placements)


def _keep_own_part(operand: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes to what is divided what this rank has of ``whole``: its views see it."""
    if isinstance(operand, DTensor) and not _is_whole(operand):
        mesh = operand.device_mesh
        of_all = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        operand._local_tensor.copy_(of_all.redistribute(mesh, operand.placements)._local_tensor)


def _moves_first(found: object, info: OpInfo) -> bool:
    """Whether what DTensor found, for an operator that writes to its first operand, places that as it does not lie."""
    if not isinstance(found, OutputSharding) or found.redistribute_schema is None or info.schema is None:
        return False
    if not info.schema.is_inplace_op():
        return False
    before, after = info.schema.args_schema[0], found.redistribute_schema.args_schema[0]
    return isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec) and before.placements != after.placements


def _attended(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Attention, or its backward pass, of the sequences or heads that the query is split in; of all where it is whole.

    The mask comes by name: rules of DTensor move no such argument, and do not look at one again.
    """
    is_backward = operator is _ATTENTION_BACKWARD
    tensors, others = args[: 6 if is_backward else 3], args[6 if is_backward else 3 :]
    mesh = next(each.device_mesh for each in tree_leaves((tensors, kwargs)) if isinstance(each, DTensor))
    whole = [_as_dtensor(each, mesh) for each in tensors]
    split = _split_of(whole[1 if is_backward else 0], whole)

    def local(tensor: DTensor) -> torch.Tensor:
        return tensor.redistribute(mesh, [split]).to_local()

    mask = kwargs.get("attn_mask")
    if mask is not None:
        mask = _as_dtensor(mask, mesh)
        is_own = isinstance(split, Shard) and mask.ndim == 4 and mask.shape[split.dim] > 1  # not broadcast
        kwargs = {**kwargs, "attn_mask": local(mask) if is_own else mask.full_tensor()}
    result = operator(*map(local, whole), *others, **kwargs)
    return tree_map_only(torch.Tensor, lambda each: DTensor.from_local(each, mesh, [split], run_check=False), result)


def _split_of(query: DTensor, others: Sequence[DTensor]) -> Shard | Replicate:
    """The sequences or heads of a query that ranks have, where they have as many of all ``others``."""
    (split,) = query.placements
    if not isinstance(split, Shard) or split.dim > 1:
        return Replicate()
    return Replicate() if any(each.shape[split.dim] % query.device_mesh.size() for each in others) else split


def _attended_with_sinks(operator: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """As ``_attended``, with a number a head (heads,) or None behind the tensors, whose gradient comes last."""
    assert not kwargs
    *tensors, sinks, window, scale = args
    mesh = next(each.device_mesh for each in tree_leaves(args) if isinstance(each, DTensor))
    whole = tree_map_only(torch.Tensor, lambda each: _as_dtensor(each, mesh), tensors)
    is_backward = operator is _CAUSAL_ATTENTION_BACKWARD
    split = _split_of((whole[1] if is_backward else whole)[0], tree_leaves(whole))
    of_heads = Shard(0) if isinstance(split, Shard) and split.dim == 1 else Replicate()
    local = tree_map_only(DTensor, lambda each: each.redistribute(mesh, [split]).to_local(), whole)
    own_sinks = None if sinks is None else _as_dtensor(sinks, mesh).redistribute(mesh, [of_heads]).to_local()
    found = operator(*local, own_sinks, window, scale)
    placements: list[Placement] = [split] * len(found)
    if is_backward:  # of the sequences that a rank has comes a part of the sum
        placements[-1] = Partial() if split == Shard(0) and sinks is not None else of_heads
    return tuple(
        DTensor.from_local(each, mesh, [place], run_check=False) for each, place in zip(found, placements, strict=True)
    )


def _as_dtensor(tensor: object, mesh: DeviceMesh) -> DTensor:
    assert isinstance(tensor, torch.Tensor)
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
