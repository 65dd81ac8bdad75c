"""Integers among what code hands to torch's functions: numbers, and tensors of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether its elements are whole numbers."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def integers_in(leaves: Sequence[object]) -> list[int]:
    """Those among ``leaves``."""
    given = [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and is_integer(leaf)]
    return [*given, *map(int, tensors)]
