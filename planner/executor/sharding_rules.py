"""Sharding rules of operators that DTensor ships none for."""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_aten = torch.ops.aten
_Rule = tuple[list[Placement | None], list[Placement | None]]


@functools.cache
def register_sharding_rules() -> None:
    """Registers them with DTensor, once a process.

    The CPU's flash attention works on each sequence and head for itself: dims 0 and 1 of query,
    key, value, output and log-sum-exp may be split, of a mask only where it is not broadcast.
    """
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu.default)(_cpu_attention)
    register_sharding(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(_cpu_attention_backward)


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
