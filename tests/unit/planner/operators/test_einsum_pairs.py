"""FLOPs of ``torch.einsum`` by its equation are those of the products that torch runs for it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from planner.operators.call import OpCall, TensorValue
from planner.operators.product_rules import einsum

EQUATIONS = {
    "ij,jk->ik": ((3, 4), (4, 5)),
    "... b i, b i o -> ... b o": ((2, 3, 4, 5), (4, 5, 6)),
    "a...,b...->ab": ((3, 4, 5), (6, 4, 5)),
    "...ij,...jk": ((2, 3, 4, 5), (1, 3, 5, 6)),
    "b...i,...ij->b...j": ((2, 3, 7, 4), (3, 7, 4, 5)),
    "bi,bj": ((2, 3), (2, 4)),
    "bij,bk->bk": ((2, 3, 4), (2, 5)),
    "bi,bj->bij": ((2, 3), (2, 4)),
    "bii->b": ((2, 3, 3),),
    "ab,cd,bc->ad": ((3, 4), (5, 6), (4, 5)),
    "btec,btd,btk->ecdk": ((2, 6, 4, 3), (2, 6, 5), (2, 6, 7)),
    "ij,jk,kl,lm->im": ((2, 3), (3, 5), (5, 7), (7, 11)),
}


def _rule(equation: str, shapes: tuple[tuple[int, ...], ...], path: tuple[int, ...] | None) -> tuple[int, int]:
    tensors = {f"tensors.{i}": TensorValue(shape, "float32", requires_grad=True) for i, shape in enumerate(shapes)}
    output = TensorValue((), "float32", requires_grad=True)  # its shape is not asked for
    products = einsum(OpCall("einsum", tensors, output, {"equation": equation, "path": path}))
    return (products.flops, products.backward_flops) if products else (0, 0)


def _counted(equation: str, shapes: tuple[tuple[int, ...], ...], path: tuple[int, ...] | None) -> tuple[int, int]:
    tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    with FlopCounterMode(display=False) as forward:
        result = torch.ops.aten.einsum(equation, tensors, path=path)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("equation", EQUATIONS)
def test_as_torch_counts_them(equation: str) -> None:
    shapes = EQUATIONS[equation]
    assert _rule(equation, shapes, None) == _counted(equation, shapes, None)


@pytest.mark.parametrize("path", [(2, 3, 1, 2, 0, 1), (0, 1, 0, 1, 0, 1), (3, 1, 0, 2, 1, 0)])
def test_in_the_order_of_a_path(path: tuple[int, ...]) -> None:
    equation = "ij,jk,kl,lm->im"
    assert _rule(equation, EQUATIONS[equation], path) == _counted(equation, EQUATIONS[equation], path)


def test_a_product_of_weights_alone_is_a_weight() -> None:
    shapes = ((3, 4), (4, 5), (2, 3))
    weights = [TensorValue(shape, "float32", requires_grad=True, is_weight=True) for shape in shapes[:2]]
    tensors = {"tensors.0": weights[0], "tensors.1": weights[1], "tensors.2": TensorValue(shapes[2], "float32")}
    call = OpCall("einsum", tensors, TensorValue((2, 5), "float32", requires_grad=True), {"equation": "ij,jk,bi->bk"})
    products = einsum(call)
    assert products is not None
    of_weights, of_rows = 2 * 3 * 4 * 5, 2 * 2 * 3 * 5
    assert products.flops == of_weights + of_rows
    assert products.backward_flops == products.weight_gradient_flops == 2 * of_weights + of_rows
