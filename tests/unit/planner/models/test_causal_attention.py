"""Attention with windows and sinks against all scores in memory, in torch's own operators."""

# pyright: reportPrivateUsage=false
# what a kernel is called with shows nowhere else.

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from planner.models import causal_attention as module
from planner.models.causal_attention import causal_attention

SCALE = 0.3


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> torch.Tensor:
    """The definition: a softmax over the keys in reach, and over the sink."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    rows, columns = query.shape[2], key.shape[2]
    distance = torch.arange(rows)[:, None] + (columns - rows) - torch.arange(columns)
    scores = query @ key.transpose(-1, -2) * SCALE
    scores = scores.masked_fill((distance < 0) | ((distance >= window) if window else False), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(len(query), -1, rows, 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :columns] @ value


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "window"), [(300, 300, 0), (300, 300, 7), (300, 420, 0), (300, 420, 150), (1100, 1100, 5000)]
)
def test_output_and_gradients_are_those_of_the_definition(
    rows: int, columns: int, window: int, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, rows, 16, requires_grad=True)
    key, value = torch.randn(2, 2, columns, 16, requires_grad=True), torch.randn(2, 2, columns, 24, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    wanting = [each for each in (query, key, value, sinks) if each is not None]
    output, expected = (
        causal_attention(query, key, value, sinks, window, SCALE),
        dense(query, key, value, sinks, window),
    )
    gradient = torch.randn_like(output)
    found = (output, *torch.autograd.grad(output, wanting, gradient))
    for one, other in zip(found, (expected, *torch.autograd.grad(expected, wanting, gradient)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_runs_it_again() -> None:
    """What it keeps was asked for twice, which checkpoints that do not enter backward refuse."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    wanting = [query, key, value, sinks := torch.randn(2, requires_grad=True)]
    kept = causal_attention(query, key, value, sinks, 4, SCALE)
    again = checkpoint(causal_attention, query, key, value, sinks, 4, SCALE, use_reentrant=False)
    assert isinstance(again, torch.Tensor)
    for one, other in zip(*(torch.autograd.grad(each.sum(), wanting) for each in (kept, again)), strict=True):
        assert torch.equal(one, other)


def test_torch_finds_the_operators_in_order() -> None:
    """Schema, shapes without values and autograd, as torch.library.opcheck tries them."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(
        torch.ops.planner.causal_attention.default, (*qkv, torch.randn(2, requires_grad=True), 4, 1.0)
    )
    torch.library.opcheck(torch.ops.planner.causal_attention.default, (*qkv, None, 0, 1.0))


@pytest.mark.parametrize("has_sinks", [False, True])
def test_sums_with_sinks_make_a_flash_kernels_backward_that_of_sinks(
    has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's flash kernel stands where CUDA's would: it is given what CUDA's is, but for windows, which it lacks."""
    aten, seen = torch.ops.aten, list[tuple[int | None, int | None]]()

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: object, **named: object) -> object:
        assert given == (None, None, query.shape[1], key.shape[1], 0.0, True, False)
        seen.append((named["window_size_left"], named["window_size_right"]))  # pyright: ignore[reportArgumentType]
        qkv = [each.transpose(1, 2) for each in (query, key, value)]
        output, sums = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, 0.0, True, scale=named["scale"])
        return output.transpose(1, 2), sums

    def backward(*given: torch.Tensor, **named: object) -> object:
        tensors = [each.transpose(1, 2) for each in given[:5]]
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(*tensors, given[5], 0.0, True, scale=named["scale"])
        return tuple(each.transpose(1, 2) for each in found)

    class Kernels:
        _flash_attention_forward = staticmethod(forward)
        _flash_attention_backward = staticmethod(backward)

    monkeypatch.setattr(module, "_aten", Kernels)
    monkeypatch.setattr(module, "has_flash_kernel", lambda *_: True)
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 40, 16, requires_grad=True) for _ in range(3))
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    wanting = [each for each in (query, key, value, sinks) if each is not None]
    output, expected = causal_attention(query, key, value, sinks, 0, SCALE), dense(query, key, value, sinks, 0)
    gradient = torch.randn_like(output)
    found = (output, *torch.autograd.grad(output, wanting, gradient))
    for one, other in zip(found, (expected, *torch.autograd.grad(expected, wanting, gradient)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert seen == [(None, 0)]


def test_the_calls_of_cudas_kernel_are_ones_that_torch_takes() -> None:
    """On meta, whose flash attention has the shapes and strides of CUDA's: these are what a trace is told."""
    query, key = (torch.empty(2, heads, 40, 16, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    aten, wide = torch.ops.aten, [each.transpose(1, 2) for each in (query, key, key)]
    found = aten._flash_attention_forward(
        *wide, None, None, 40, 40, 0.0, True, False, scale=1.0, window_size_left=7, window_size_right=0
    )
    assert found[0].transpose(1, 2).shape == query.shape
    assert found[1].shape == query.shape[:-1]
    assert found[1].dtype == torch.float32
    none = torch.zeros((), dtype=torch.int64, device="meta")
    gradients = aten._flash_attention_backward(
        wide[0], *wide, found[0], found[1], None, None, 40, 40, 0.0, True, none, none,
        scale=1.0, window_size_left=7, window_size_right=0,
    )  # fmt: skip
    assert [each.transpose(1, 2).shape for each in gradients] == [query.shape, key.shape, key.shape]
