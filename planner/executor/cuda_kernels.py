"""On tensors without values: operators that hold less memory on CUDA than on a CPU, as CUDA's kernels hold it.

A CPU runs these as several operators, whose results autograd keeps:

- RMS norm: CUDA's ``_fused_rms_norm`` keeps its input and, in float32, one number a row (PyTorch's
  tools/autograd/derivatives.yaml); a CPU keeps two copies of the input in float32 besides.
- attention whose values are of another size than keys: CUDA's memory-efficient kernel takes it (aten/src/ATen/native/
  transformers/cuda/sdp_utils.cpp), and keeps its operands, its output and a number a row; a CPU keeps all scores.
- dropout: CUDA's ``native_dropout`` keeps a mask of a byte an element; a CPU keeps one in the input's dtype.
"""

# pyright: reportPrivateUsage=false
# torch has no public name for the modes that are active.

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F  # noqa: N812
from torch.overrides import _get_current_function_mode_stack

from planner.executor.context_parallel import AttentionCall, Sharded

_attention = F.scaled_dot_product_attention


@contextlib.contextmanager
def cuda_kernels() -> Generator[None]:
    """Within the context, modules take the stand-ins below. Results have shapes and dtypes, and no meaning.

    No mode of torch does this: none is active where a backward pass repeats a forward pass.
    """
    before = {name: vars(F)[name] for name in _STAND_INS}
    try:
        for name, stand_in in _STAND_INS.items():
            setattr(F, name, stand_in)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    dims = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    if isinstance(input, DTensor) and any(isinstance(p, Shard) and p.dim in dims for p in input.placements):
        return torch.rms_norm(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, weight, dims)  # pyright: ignore[reportReturnType]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, train=True)[0]


def _scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = AttentionCall(*args, **kwargs)
    is_answered = torch._C._is_torch_function_mode_enabled() and any(
        isinstance(mode, Sharded) for mode in _get_current_function_mode_stack()
    )
    is_plain = call.attn_mask is None and not call.enable_gqa and call.query.ndim == 4
    if is_answered or not is_plain or call.key.shape[-1] == call.value.shape[-1]:
        return _attention(*args, **kwargs)
    qkv = (call.query, call.key, call.value)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(*qkv, None, True, call.dropout_p, call.is_causal, scale=call.scale)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """As large in every tensor as ``_fused_rms_norm`` and its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: tuple[int, ...]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight, x.mean(dims, keepdim=True, dtype=torch.float32))
        ctx.leading = tuple(range(x.ndim - len(dims)))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _ = ctx.saved_tensors
        of_weight = None if weight is None else gradient.sum(ctx.leading, dtype=weight.dtype)
        return torch.empty_like(x), of_weight, None


_STAND_INS = {
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _scaled_dot_product_attention,
}
