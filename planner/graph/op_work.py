"""The work of each operator: FLOPs and bytes, forward and backward.

FLOPs are those of matrix products, convolutions and attention, a multiply-add counted as 2 and
attention without regard to a mask: what ``torch.utils.flop_counter`` counts on the meta device.
Backward counts one product for each operand that wants a gradient; the scores that a flash
kernel computes again stand apart in ``recomputed_flops``. Elementwise work is bound by memory:
each operand read once and the result written once; a gradient is read, each operand gradient
written, and what was kept is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from planner.graph.model_graph import OpClass
from planner.graph.op_call import FLOATING, OpCall, TensorValue


@dataclass(frozen=True)
class Products:
    """FLOPs of an operator made of matrix products."""

    op_class: OpClass
    flops: int
    backward_flops: int
    weight_gradient_flops: int
    recomputed_flops: int = 0


@dataclass(frozen=True)
class OpWork:
    """All that one call costs."""

    op_class: OpClass
    flops: int = 0
    backward_flops: int = 0
    weight_gradient_flops: int = 0
    recomputed_flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    param_bytes_read: int = 0
    backward_bytes: int = 0
    num_kernels: int = 0
    num_backward_kernels: int = 0


ProductRule = Callable[[OpCall], Products]


def work_of(call: OpCall, saved_bytes: int, *, is_view: bool, measured: Products | None = None) -> OpWork:
    """The work of ``call``; ``saved_bytes`` is what its backward reads again of what was kept.

    ``measured`` stands in where there is no rule.
    """
    backward_bytes, backward_kernels = _backward(call, saved_bytes, is_view=is_view)
    if is_view:
        return OpWork(OpClass.VIEW, backward_bytes=backward_bytes, num_backward_kernels=backward_kernels)
    no_products = Products(OpClass.MEMORY_BOUND, 0, 0, 0)
    products = PRODUCT_RULES[call.name](call) if call.name in PRODUCT_RULES else measured or no_products
    read, of_parameters = _bytes_read(call)
    return OpWork(
        op_class=products.op_class,
        flops=products.flops,
        backward_flops=products.backward_flops if call.requires_grad else 0,
        weight_gradient_flops=products.weight_gradient_flops if call.requires_grad else 0,
        recomputed_flops=products.recomputed_flops if call.requires_grad else 0,
        bytes_read=read,
        bytes_written=call.output_bytes,
        param_bytes_read=of_parameters,
        backward_bytes=backward_bytes,
        num_kernels=2 if call.name in ("cross_entropy_loss",) else 1,
        num_backward_kernels=backward_kernels,
    )


def _bytes_read(call: OpCall) -> tuple[int, int]:
    """Bytes of all operands, and those of weights among them; a lookup reads the rows it takes."""
    if call.name in ("embedding", "index_select", "gather", "index"):
        indices = sum(tensor.num_bytes for tensor in call.operands if tensor.dtype not in FLOATING)
        table = call.operands[0]
        rows = min(table.num_bytes, call.output.num_bytes)
        return indices + rows, 0
    weights = sum(tensor.num_bytes for tensor in call.operands if tensor.is_weight)
    return sum(tensor.num_bytes for tensor in call.operands), weights


def _backward(call: OpCall, saved_bytes: int, *, is_view: bool) -> tuple[int, int]:
    """Bytes that backward moves, and its kernels."""
    if not call.requires_grad:
        return 0, 0
    wanting = [tensor for tensor in call.operands if tensor.requires_grad]
    gradient = call.output.num_elements * call.output.item_bytes
    if is_view:
        return _view_backward(call, gradient)
    if call.name in ("add", "sub", "add_", "sub_"):
        # The gradient passes on as it is; only a broadcast operand needs a sum of its own.
        summed = [tensor for tensor in wanting if tensor.num_elements < call.output.num_elements]
        return sum(gradient + tensor.num_bytes for tensor in summed), len(summed)
    if call.name == "embedding":
        table = call.operands[0]
        return gradient + table.num_elements * table.item_bytes + gradient, 2  # zeros, then rows added
    written = sum(tensor.num_elements * tensor.item_bytes for tensor in wanting)
    read_again = saved_bytes + sum(
        tensor.num_bytes for tensor in call.operands if tensor.is_parameter and call.name in PRODUCT_RULES
    )
    if call.name in PRODUCT_RULES and call.name != "scaled_dot_product_attention":
        return gradient * len(wanting) + written + read_again, len(wanting)
    return gradient + written + read_again, 1


def _view_backward(call: OpCall, gradient: int) -> tuple[int, int]:
    """Pieces are put together again, or into zeros; an expanded operand's gradient is summed."""
    source = call.operands[0].num_elements * call.output.item_bytes if call.operands else 0
    match call.name:
        case "split" | "split_with_sizes" | "chunk" | "unbind" | "tensor_split":
            return 2 * source, 1
        case "slice" | "select" | "narrow" | "diagonal":
            is_whole = call.output.num_elements == call.operands[0].num_elements
            return (0, 0) if is_whole else (source + 2 * gradient, 2)
        case "expand" | "expand_as" | "broadcast_to":
            is_whole = call.output.num_elements == call.operands[0].num_elements
            return (0, 0) if is_whole else (gradient + source, 1)
        case _:
            return 0, 0


def _products(op_class: OpClass, flops: int, factors: tuple[TensorValue, ...]) -> Products:
    """Backward has one product as large as the forward one for each factor that wants its gradient."""
    wanting = [factor for factor in factors if factor.requires_grad]
    weights = [factor for factor in wanting if factor.is_weight]
    return Products(op_class, flops, flops * len(wanting), flops * len(weights))


def _linear(call: OpCall) -> Products:
    inputs, weight = call.tensor("input"), call.tensor("weight")
    return _products(OpClass.GEMM, 2 * call.output.num_elements * inputs.shape[-1], (inputs, weight))


def _matmul(call: OpCall) -> Products:
    left, right = (call.operands[-2], call.operands[-1])
    return _products(OpClass.GEMM, 2 * call.output.num_elements * left.shape[-1], (left, right))


def _grouped_matmul(call: OpCall) -> Products:
    left, right = call.operands[0], call.operands[1]
    if len(left.shape) == 2 and len(right.shape) == 2:  # (m, k) x (k, n): groups lie along k
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    else:
        flops = 2 * call.output.num_elements * left.shape[-1]
    return _products(OpClass.GROUPED_GEMM, flops, (left, right))


def _einsum(call: OpCall) -> Products:
    equation = str(call.attributes.get("equation", "")).replace(" ", "")
    inputs, _, result = equation.partition("->")
    labels = inputs.split(",")
    sizes: dict[str, int] = {}
    for names, tensor in zip(labels, call.operands, strict=False):
        if "." not in names:
            sizes.update(zip(names, tensor.shape, strict=False))
    contracts = set(sizes) - set(result)
    if len(call.operands) != 2 or not contracts or "." in equation:
        return Products(OpClass.MEMORY_BOUND, 0, 0, 0)
    return _products(OpClass.GEMM, 2 * prod(sizes.values()), call.operands)


def _convolution(call: OpCall) -> Products:
    """Each output element is a sum over the input channels of its group and the kernel."""
    inputs, weight = call.tensor("input"), call.tensor("weight")
    if "transpose" in call.name or call.attributes.get("transposed") is True:
        flops = 2 * inputs.num_elements * prod(weight.shape[1:])
    else:
        flops = 2 * call.output.num_elements * prod(weight.shape[1:])
    return _products(OpClass.CONVOLUTION, flops, (inputs, weight))


def _attention(call: OpCall) -> Products:
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    scores, weighted = 2 * pairs * query.shape[-1], 2 * pairs * value.shape[-1]
    through_scores = query.requires_grad or key.requires_grad
    backward = weighted * (int(value.requires_grad) + int(through_scores))
    backward += scores * (int(query.requires_grad) + int(key.requires_grad))
    return Products(OpClass.ATTENTION, scores + weighted, backward, 0, recomputed_flops=scores)


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d")

PRODUCT_RULES: Mapping[str, ProductRule] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "dot"), _matmul),
    **dict.fromkeys(("_grouped_mm", "grouped_mm", "grouped_mm_fallback"), _grouped_matmul),
    "einsum": _einsum,
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "scaled_dot_product_attention": _attention,
}
