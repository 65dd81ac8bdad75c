"""Stand-ins hold what CUDA's kernels hold: counted by what autograd packs, on a CPU without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from planner.executor.cuda_kernels import cuda_kernels

ROWS, WIDTH = 6, 16


def kept_bytes(module: nn.Module, x: torch.Tensor) -> int:
    """Of all tensors that autograd keeps, each storage once, without parameters."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    for parameter in module.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    return sum(kept.values())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, ROWS // 2, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def test_a_norm_keeps_its_input_and_a_number_a_row(x: torch.Tensor) -> None:
    norm = nn.RMSNorm(WIDTH, dtype=torch.bfloat16)
    on_cpu = kept_bytes(norm, x)
    with cuda_kernels():
        assert kept_bytes(norm, x) == 2 * ROWS * WIDTH + 4 * ROWS  # derivatives.yaml: input, and rstd in float32
    assert on_cpu > 2 * (2 * ROWS * WIDTH + 4 * ROWS)  # or nothing need stand in for it


def test_dropout_keeps_a_byte_an_element(x: torch.Tensor) -> None:
    with cuda_kernels():
        assert kept_bytes(nn.Dropout(0.1), x) == ROWS * WIDTH
        assert kept_bytes(nn.Dropout(0.1).eval(), x) == 0


@pytest.mark.parametrize("affine", [True, False])
def test_results_and_gradients_have_the_shapes_of_torchs(x: torch.Tensor, affine: bool) -> None:
    norm = nn.RMSNorm(WIDTH, elementwise_affine=affine, dtype=torch.bfloat16)
    with cuda_kernels():
        y = norm(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for parameter in norm.parameters():
        assert parameter.grad is not None
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)


def test_torch_is_as_before_afterwards(x: torch.Tensor) -> None:
    before = F.rms_norm, F.dropout
    with pytest.raises(RuntimeError), cuda_kernels():
        raise RuntimeError
    assert (F.rms_norm, F.dropout) == before
    assert torch.equal(F.dropout(x, 0.0), x)


class Attention(nn.Module):
    """Of keys of size 24 and values of size 16, all of them ``x``'s."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key, value = x.new_ones(2, 4, 32, 24, requires_grad=True), x.new_ones(2, 4, 32, 16, requires_grad=True)
        return F.scaled_dot_product_attention(x, key, value, is_causal=True)


def test_attention_with_values_of_another_size_keeps_its_operands_its_output_and_a_number_a_row() -> None:
    positions = 2 * 4 * 32
    with FakeTensorMode():
        x = torch.ones(2, 4, 32, 24, dtype=torch.bfloat16, requires_grad=True)
        on_cpu = kept_bytes(Attention(), x)
        with cuda_kernels():
            counters = 2 * 8  # of random numbers, kept though nothing is dropped
            assert kept_bytes(Attention(), x) == pytest.approx(positions * (2 * (24 + 24 + 16 + 16) + 4), abs=counters)
            y = Attention()(x)
            assert (y.shape, y.dtype) == ((2, 4, 32, 16), torch.bfloat16)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape
    assert on_cpu > positions * 32 * 2  # scores of every pair
