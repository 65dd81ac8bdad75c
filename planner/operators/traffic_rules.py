"""Bytes that operators move, forward and backward, and the kernels of their backward passes.

Elementwise work is bound by memory: each operand is read once and the result written once. In backward the result's
gradient is read, each operand's gradient is written, and what was kept is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.operators.call import FLOATING, OpCall, TensorValue
from planner.operators.recurrence import recurrent_weights


@dataclass(frozen=True)
class BytesRead:
    """What one call reads. ``of_weights``: part of ``total``, which does not grow with the batch."""

    total: int
    of_weights: int


@dataclass(frozen=True)
class Backward:
    """Bytes that a backward pass reads and writes, and its kernels."""

    num_bytes: int = 0
    num_kernels: int = 0


KernelRule = Callable[[OpCall], int]
ReadRule = Callable[[OpCall], BytesRead]
BackwardRule = Callable[[OpCall, int], Backward]  # the bytes that were kept for it stand beside the call
ViewBackwardRule = Callable[[OpCall], Backward]  # where the call moved nothing forward


def one_kernel(call: OpCall) -> int:
    """All of it."""
    del call
    return 1


def two_kernels(call: OpCall) -> int:
    """Two passes."""
    del call
    return 2


def kernels_of_steps(call: OpCall) -> int:
    """A product and the gates behind it for each step of each layer and direction, and a product of all inputs before.

    So does torch without cuDNN, and cuDNN where it does not keep the weights in registers.
    """
    weights = recurrent_weights(call)
    return sum(1 + 2 * weights.num_steps for _ in weights.hidden) if weights is not None else 1


def steps_backward(call: OpCall, saved_bytes: int) -> Backward:
    """For each forward kernel of a step the two of its backward pass, and a product an operand over all steps."""
    backward = one_product_an_operand(call, saved_bytes)
    return Backward(backward.num_bytes, backward.num_kernels + kernels_of_steps(call))


def kernels_of_features(call: OpCall) -> int:
    """A bilinear form goes feature by feature of its result: two products and a sum of results (``_trilinear``)."""
    return 3 * call.output.shape[-1]


def features_backward(call: OpCall, saved_bytes: int) -> Backward:
    """As many for each factor that wants its gradient."""
    backward = one_product_an_operand(call, saved_bytes)
    factors = [tensor for name, tensor in call.tensors.items() if name != "bias" and tensor.requires_grad]
    return Backward(backward.num_bytes, kernels_of_features(call) * len(factors))


def all_operands(call: OpCall) -> BytesRead:
    """Every operand whole."""
    weights = sum(tensor.num_bytes for tensor in call.operands if tensor.is_weight)
    return BytesRead(sum(tensor.num_bytes for tensor in call.operands), weights)


def rows_taken(call: OpCall) -> BytesRead:
    """A lookup: the indices, and the rows of the first operand that they take."""
    indices = sum(tensor.num_bytes for tensor in call.operands if tensor.dtype not in FLOATING)
    return BytesRead(indices + min(call.operands[0].num_bytes, call.output.num_bytes), 0)


def one_pass(call: OpCall, saved_bytes: int) -> Backward:
    """One kernel reads the gradient and what was kept, and writes the operands' gradients."""
    return Backward(_gradient_bytes(call) + _written_bytes(call) + saved_bytes, 1)


def one_pass_with_weights(call: OpCall, saved_bytes: int) -> Backward:
    """As ``one_pass``; parameters, which nothing has to keep, are read again as well."""
    return one_pass(call, saved_bytes + _parameter_bytes(call))


def one_product_an_operand(call: OpCall, saved_bytes: int) -> Backward:
    """A product for each operand that wants its gradient, each of which reads the result's gradient."""
    num_products = len(_wanting(call))
    read_again = saved_bytes + _parameter_bytes(call)
    return Backward(_gradient_bytes(call) * num_products + _written_bytes(call) + read_again, num_products)


def passes_gradient_on(call: OpCall, saved_bytes: int) -> Backward:
    """The gradient passes on as it is; only a broadcast operand needs a sum of its own."""
    del saved_bytes
    summed = [tensor for tensor in _wanting(call) if tensor.num_elements < call.output.num_elements]
    return Backward(sum(_gradient_bytes(call) + tensor.num_bytes for tensor in summed), len(summed))


def adds_rows_to_zeros(call: OpCall, saved_bytes: int) -> Backward:
    """A table's gradient: zeros, then rows added."""
    del saved_bytes
    table = call.operands[0]
    gradient = _gradient_bytes(call)
    return Backward(gradient + table.num_elements * table.item_bytes + gradient, 2)


def view_of_gradient(call: OpCall) -> Backward:
    """The gradient is looked at another way: nothing moves."""
    del call
    return Backward()


def joins_pieces(call: OpCall) -> Backward:
    """Gradients of the pieces are put together again."""
    return Backward(2 * _source_bytes(call), 1)


def puts_part_into_zeros(call: OpCall) -> Backward:
    """The gradient of a part is written into zeros; where the part is everything it is that gradient."""
    if call.output.num_elements == call.operands[0].num_elements:
        return Backward()
    return Backward(_source_bytes(call) + 2 * _gradient_bytes(call), 2)


def sums_expanded(call: OpCall) -> Backward:
    """The gradient is summed over the dims that were expanded."""
    if call.output.num_elements == call.operands[0].num_elements:
        return Backward()
    return Backward(_gradient_bytes(call) + _source_bytes(call), 1)


def _gradient_bytes(call: OpCall) -> int:
    return call.output.num_elements * call.output.item_bytes


def _source_bytes(call: OpCall) -> int:
    return call.operands[0].num_elements * call.output.item_bytes if call.operands else 0


def _wanting(call: OpCall) -> list[TensorValue]:
    return [tensor for tensor in call.operands if tensor.requires_grad]


def _written_bytes(call: OpCall) -> int:
    return sum(tensor.num_elements * tensor.item_bytes for tensor in _wanting(call))


def _parameter_bytes(call: OpCall) -> int:
    return sum(tensor.num_bytes for tensor in call.operands if tensor.is_parameter)
