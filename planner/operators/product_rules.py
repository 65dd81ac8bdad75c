"""FLOPs of operators made of matrix products, forward and backward.

Those of matrix products, convolutions and attention, a multiply-add counted as 2 and attention without regard to a
mask: what ``torch.utils.flop_counter`` counts on the meta device. Backward counts one product for each operand that
wants a gradient; the scores that a flash kernel computes again stand apart in ``recomputed_flops``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from planner.operators.call import OpCall, TensorValue
from planner.operators.einsum_pairs import pairs_of
from planner.operators.recurrence import recurrent_weights


@dataclass(frozen=True)
class Products:
    """FLOPs of one call."""

    flops: int
    backward_flops: int
    weight_gradient_flops: int
    recomputed_flops: int = 0


ProductRule = Callable[[OpCall], Products | None]  # None: this call has no product


def no_product(call: OpCall) -> None:
    """The operator is bound by the memory that it moves."""
    del call


def _products(flops: int, factors: tuple[TensorValue, ...]) -> Products:
    """Backward has one product as large as the forward one for each factor that wants its gradient."""
    wanting = [factor for factor in factors if factor.requires_grad]
    weights = [factor for factor in wanting if factor.is_weight]
    return Products(flops, flops * len(wanting), flops * len(weights))


def linear(call: OpCall) -> Products:
    """y [..., n] = x [..., k] W^T."""
    inputs, weight = call.tensor("input"), call.tensor("weight")
    return _products(2 * call.output.num_elements * inputs.shape[-1], (inputs, weight))


def matmul(call: OpCall) -> Products:
    """The last two operands are the factors; a summand may stand before them."""
    left, right = (call.operands[-2], call.operands[-1])
    return _products(2 * call.output.num_elements * left.shape[-1], (left, right))


def grouped_matmul(call: OpCall) -> Products:
    """Rows in groups, each with its own matrix."""
    left, right = call.operands[0], call.operands[1]
    if len(left.shape) == 2 and len(right.shape) == 2:  # (m, k) x (k, n): groups lie along k
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
    else:
        flops = 2 * call.output.num_elements * left.shape[-1]
    return _products(flops, (left, right))


def einsum(call: OpCall) -> Products | None:
    """Operands two at a time; a result wants its gradient where one of its factors does."""
    path = call.attributes.get("path")
    equation = str(call.attributes["equation"])
    places = tuple(place for place in path if place is not None) if isinstance(path, tuple) else None
    factors = list(call.operands)
    found: list[Products] = []
    for left, right, flops in pairs_of(equation, [operand.shape for operand in call.operands], places):
        pair = factors[left], factors[right]
        found.append(_products(flops, pair))
        wants, is_weight = any(f.requires_grad for f in pair), all(f.is_weight for f in pair)
        factors.append(replace(pair[0], requires_grad=wants, is_weight=is_weight))
    if not any(products.flops for products in found):
        return None
    return Products(
        sum(products.flops for products in found),
        sum(products.backward_flops for products in found),
        sum(products.weight_gradient_flops for products in found),
    )


def bilinear(call: OpCall) -> Products:
    """y [..., k] = x [..., i] W [k, i, j] z [..., j]: x W, whose result is multiplied by z.

    Backward is a product as large as x W for each factor; what it multiplies by the gradient is elementwise
    (``_trilinear`` of ``aten/src/ATen/native/Linear.cpp``). ``torch.utils.flop_counter`` knows no such product.
    """
    factors = left, right, _ = call.tensor("input1"), call.tensor("input2"), call.tensor("weight")
    of_right = 2 * call.output.num_elements * right.shape[-1]
    products = _products(of_right * left.shape[-1], factors)
    return replace(products, flops=products.flops + of_right)


def triangular_solution(call: OpCall) -> Products:
    """X [..., n, k] of A X = B: A has half of a matrix. Backward solves once more, and A's gradient is a product.

    ``torch.utils.flop_counter`` counts that product alone.
    """
    matrix = call.operands[0]
    flops = call.output.num_elements * matrix.shape[-1]
    return Products(flops, flops * (1 + 2 * int(matrix.requires_grad)), 0)


def convolution(call: OpCall) -> Products:
    """Each output element is a sum over the input channels of its group and the kernel."""
    inputs, weight = call.tensor("input"), call.tensor("weight")
    if "transpose" in call.name or call.attributes.get("transposed") is True:
        flops = 2 * inputs.num_elements * prod(weight.shape[1:])
    else:
        flops = 2 * call.output.num_elements * prod(weight.shape[1:])
    return _products(flops, (inputs, weight))


def attention(call: OpCall) -> Products:
    """Scores and what they weigh; a flash kernel makes the scores once more in backward."""
    query, key, value = call.tensor("query"), call.tensor("key"), call.tensor("value")
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    scores, weighted = 2 * pairs * query.shape[-1], 2 * pairs * value.shape[-1]
    through_scores = query.requires_grad or key.requires_grad
    backward = weighted * (int(value.requires_grad) + int(through_scores))
    backward += scores * (int(query.requires_grad) + int(key.requires_grad))
    return Products(scores + weighted, backward, 0, recomputed_flops=scores)


def causal_attention(call: OpCall) -> Products:
    """As ``attention``, of the pairs that windows leave: with s keys and a window of w, w (2 s - w) for s * s.

    Half of these are pairs that a query sees (s w - w * w / 2), as of s * s without a window. A kernel also works on
    what its tiles of keys have beside a window, which is left out.
    """
    whole, num_keys, window = attention(call), call.tensor("key").shape[-2], call.attributes.get("window")
    if not isinstance(window, int) or not 0 < window < num_keys:
        return whole

    def left(flops: int) -> int:
        return flops * window * (2 * num_keys - window) // num_keys**2

    return replace(
        whole,
        flops=left(whole.flops),
        backward_flops=left(whole.backward_flops),
        recomputed_flops=left(whole.recomputed_flops),
    )


def recurrence(call: OpCall) -> Products | None:
    """Each matrix of each layer is applied at every step; the first steps send no gradient to states that want none."""
    weights = recurrent_weights(call)
    if weights is None:
        return None
    inputs, states = call.operands[0], [value for name, value in call.tensors.items() if name.startswith("hx")]
    flops = 2 * weights.num_rows * sum(matrix.num_elements for matrix in weights.all)
    of_weights = 2 * weights.num_rows * sum(matrix.num_elements for matrix in weights.all if matrix.requires_grad)
    through = flops
    if not inputs.requires_grad:
        first = weights.entering[: 2 if call.attributes.get("bidirectional") else 1]
        through -= 2 * weights.num_rows * sum(matrix.num_elements for matrix in first)
    if not states[0].requires_grad:
        through -= 2 * weights.num_sequences * sum(matrix.num_elements for matrix in weights.hidden)
    return Products(flops, of_weights + through, of_weights)
