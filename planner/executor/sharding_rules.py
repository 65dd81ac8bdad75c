"""Sharding rules of operators that DTensor ships none for."""

# pyright: reportPrivateUsage=false
# DTensor has no public way to say that a result is no DTensor, torch none to its shape rule of grouped products.

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import _meta_registrations
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.operators.record import Trait
from planner.operators.registry import names_with

_aten = torch.ops.aten
# Recurrent layers by their libraries, what weight_norm runs, and those whose rule is of the forward pass alone, or asks
# in the backward pass for an input that is a DTensor: images are none.
_WITHOUT_RULES = tuple(
    f"{name}{half}"
    for name in (
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "_weight_norm_interface",
        "native_group_norm",
        "_prelu_kernel",
        "convolution",
    )
    for half in ("", "_backward")
)
_Rule = tuple[list[Placement | None], list[Placement | None]]


@functools.cache
def register_sharding_rules() -> None:
    """Registers them with DTensor, once a process.

    The CPU's flash attention works on each sequence and head for itself: dims 0 and 1 of query,
    key, value, output and log-sum-exp may be split, of a mask only where it is not broadcast. Results
    whose size depends on values (which tokens an expert gets) are computed whole on every rank, and so are operators
    of which torch has no rule.
    DTensor asks for the shape of a grouped product, which torch knows in bfloat16 alone.
    """
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(_cpu_attention)
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_cpu_attention_backward)
    _aten_library().impl("_grouped_mm", _grouped_shape, "Meta", allow_override=True)
    handlers: dict[OpOverload, Callable[..., object]] = DTensor._op_dispatcher._custom_op_handlers
    for name in names_with(Trait.SIZE_BY_VALUES):
        handlers[getattr(_aten, name).default] = _computed_whole
    for name in _WITHOUT_RULES:
        handlers[getattr(_aten, name).default] = _computed_alike


@functools.cache
def _aten_library() -> torch.library.Library:
    """What is registered through it holds for as long as it is there."""
    return torch.library.Library("aten", "IMPL")


def _grouped_shape(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if rows.dtype is torch.bfloat16:
        return _meta_registrations.meta_grouped_mm(rows, weights, ends, bias, out_dtype)
    return _meta_registrations._create_grouped_mm_output_tensor(rows, weights, ends, out_dtype or rows.dtype)


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


def _cpu_attention(*arguments: object, attn_mask: object = None, **options: object) -> list[_Rule]:
    return [
        ([placement] * 2, [placement] * 3 + _mask_placements(attn_mask, placement))
        for placement in (Shard(0), Shard(1), Replicate())
    ]


def _cpu_attention_backward(*arguments: object, attn_mask: object = None, **options: object) -> list[_Rule]:
    return [
        ([placement] * 3, [placement] * 6 + _mask_placements(attn_mask, placement))
        for placement in (Shard(0), Shard(1), Replicate())
    ]


def _mask_placements(mask: object, placement: Placement) -> list[Placement | None]:
    """The mask's placement, if there is one: a dim of size 1, or one it lacks, is broadcast and stays whole."""
    if mask is None:
        return []
    shape = getattr(mask, "shape", torch.Size())
    split = isinstance(placement, Shard) and len(shape) == 4 and shape[placement.dim] > 1
    return [placement if split else Replicate()]
