"""Shapes of grouped products in every dtype: torch computes them in float32 and float16 too, and knows their shapes in
bfloat16 alone.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to its shape rules.

from __future__ import annotations

import functools

import torch
from torch import _meta_registrations


@functools.cache
def know_grouped_shapes() -> None:
    """Has torch give the shape of a grouped product without values, on the meta device and of fake tensors, whatever
    its dtype. Once a process; in bfloat16 torch's own rule answers.
    """
    _library().impl("_grouped_mm", _grouped_shape, "Meta", allow_override=True)
    operator = torch.ops.aten._grouped_mm.default
    operator.py_kernels[torch._C.DispatchKey.Meta] = _grouped_shape  # what torch.export asks
    operator._dispatch_cache.clear()


@functools.cache
def _library() -> torch.library.Library:
    """What is registered through it holds for as long as it is there."""
    return torch.library.Library("aten", "IMPL")


def _grouped_shape(
    rows: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if rows.dtype is torch.bfloat16 or rows.dtype is not weights.dtype:
        return _meta_registrations.meta_grouped_mm(rows, weights, ends, bias, out_dtype)
    return _meta_registrations._create_grouped_mm_output_tensor(rows, weights, ends, out_dtype or rows.dtype)
