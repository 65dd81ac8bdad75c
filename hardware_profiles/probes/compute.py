"""Times matrix products and attention on one device, over the sizes that transformers train with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812 torch's own name for it

from hardware_profiles.probes.measurement import OpTiming
from hardware_profiles.probes.timing import seconds_per_call, seconds_per_cold_call
from hardware_profiles.schema import DTypeName

_Shape = TypeVar("_Shape")

TORCH_DTYPES: dict[DTypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Rows are tokens of a micro-batch, columns a hidden size; outputs are hidden or 4 x hidden: projections and MLPs.
_GPU_TOKENS, _GPU_HIDDEN = (512, 2048, 4096, 16384), (1024, 2048, 4096, 8192)
_CPU_TOKENS, _CPU_HIDDEN = (32, 128, 512), (128, 256, 512, 1024)
# A matrix product of a linear layer runs as it stands forward, and with one operand transposed in either gradient.
_LAYOUTS = ("nn", "nt", "tn")
_GPU_ATTENTION = tuple(product((1, 4), (16, 32), (1024, 2048, 4096, 8192), (64, 128)))
_CPU_ATTENTION = tuple(product((1, 2), (4,), (64, 128, 256, 512), (32, 64)))
_LARGEST_CPU_FLOPS = 3e9
_BUDGET_S_PER_SIZE = 0.15
_FEWEST_SIZES = 4  # what a fit needs, whatever the deadline


def time_gemms(device: torch.device, dtype: DTypeName, deadline_s: float, *, stride: int = 1) -> tuple[OpTiming, ...]:
    """Matrix products in ``dtype``, every ``stride``-th size, until ``time.monotonic()`` reaches ``deadline_s``.

    On a CPU operands come from memory, as they do in training: a product of these sizes is up to a fifth slower so.
    """
    tokens, hidden = (_GPU_TOKENS, _GPU_HIDDEN) if device.type == "cuda" else (_CPU_TOKENS, _CPU_HIDDEN)
    shapes = [(m, k, n) for m in tokens for k in hidden for n in (k, 4 * k)]
    found: list[OpTiming] = []
    for index, (m, k, n) in _spread_out(shapes, stride):
        flops = 2.0 * m * k * n
        too_late = time.monotonic() > deadline_s and len(found) >= _FEWEST_SIZES
        if too_late or (device.type == "cpu" and flops > _LARGEST_CPU_FLOPS):
            continue
        layout = _LAYOUTS[index % len(_LAYOUTS)]
        call = _gemm(device, TORCH_DTYPES[dtype], (m, k, n), layout)
        size = torch.finfo(TORCH_DTYPES[dtype]).bits // 8
        found.append(
            OpTiming(
                op_class="gemm",
                dtype=dtype,
                shape=f"{m}x{k}x{n} {layout}",
                flops=flops,
                num_bytes=float(size * (m * k + k * n + m * n)),
                samples_s=(
                    seconds_per_cold_call(call, budget_s=_BUDGET_S_PER_SIZE)
                    if device.type == "cpu"
                    else seconds_per_call(call, device, budget_s=_BUDGET_S_PER_SIZE)
                ),
            )
        )
    return tuple(found)


def time_attention(
    device: torch.device, dtype: DTypeName, deadline_s: float, *, stride: int = 1
) -> tuple[OpTiming, ...]:
    """Causal attention forward, and forward with backward; work counted in full, as graph.json counts it.

    Forward has 2 products of 2·b·h·s²·d FLOPs, backward 5 (it repeats one).
    """
    shapes = _GPU_ATTENTION if device.type == "cuda" else _CPU_ATTENTION
    found: list[OpTiming] = []
    for _, (batch, heads, seq_len, head_dim) in _spread_out(shapes, stride):
        product_flops = 2.0 * batch * heads * seq_len**2 * head_dim
        if device.type == "cpu" and 7 * product_flops > _LARGEST_CPU_FLOPS:
            continue
        operand_bytes = torch.finfo(TORCH_DTYPES[dtype]).bits // 8 * batch * heads * seq_len * head_dim
        for with_backward, num_products, num_operands in ((False, 2, 4), (True, 7, 12)):
            if time.monotonic() > deadline_s and len(found) >= _FEWEST_SIZES:
                continue
            call = _attention(device, TORCH_DTYPES[dtype], (batch, heads, seq_len, head_dim), with_backward)
            found.append(
                OpTiming(
                    op_class="attention",
                    dtype=dtype,
                    shape=f"{batch}x{heads}x{seq_len}x{head_dim}{' with backward' if with_backward else ''}",
                    flops=num_products * product_flops,
                    num_bytes=float(num_operands * operand_bytes),
                    samples_s=seconds_per_call(call, device, budget_s=_BUDGET_S_PER_SIZE),
                )
            )
    return tuple(found)


def _spread_out(shapes: Sequence[_Shape], stride: int) -> list[tuple[int, _Shape]]:
    """Every ``stride``-th shape with its index, those far apart first: a deadline then leaves gaps, not an end off."""
    indexed = list(enumerate(shapes))[::stride]
    return [entry for offset in range(4) for entry in indexed[offset::4]]


def _gemm(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], layout: str) -> Callable[[], object]:
    m, k, n = shape
    left = (
        torch.randn(m, k, device=device).to(dtype)
        if layout[0] == "n"
        else torch.randn(k, m, device=device).to(dtype).t()
    )
    right = (
        torch.randn(k, n, device=device).to(dtype)
        if layout[1] == "n"
        else torch.randn(n, k, device=device).to(dtype).t()
    )
    return lambda: torch.mm(left, right)


def _attention(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], with_backward: bool
) -> Callable[[], object]:
    query, key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    if not with_backward:
        return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)
    gradient = torch.randn(shape, device=device).to(dtype)
    operands = [tensor.requires_grad_() for tensor in (query, key, value)]

    def forward_backward() -> object:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(out, operands, gradient)

    return forward_backward
