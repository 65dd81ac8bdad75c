"""What autograd keeps for backward, as CUDA's fused kernels keep it.

Each rule is the formula of PyTorch's ``tools/autograd/derivatives.yaml`` for that operator, with
the kernel that CUDA takes: flash or memory-efficient attention (query, key, value, output and the
float32 log-sum-exp of each row), fused layer and RMS norm (input, float32 mean and reciprocal
standard deviation of each row), native dropout (a mask of 1 byte), cross entropy (the
log-probabilities in the dtype of the logits it is given, float32 after the usual upcast).
A weight is kept too, but it is no activation: the tracer leaves parameters out.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from planner.operators.call import FLOATING, OpCall, Saved
from planner.operators.recurrence import recurrent_weights

SavedRule = Callable[[OpCall], Saved]

FLOAT32_BYTES = 4
INDEX_BYTES = 8


def nothing(call: OpCall) -> Saved:
    """No tensor is wanted again."""
    del call
    return Saved()


def first_operand(call: OpCall) -> Saved:
    """The operand that the derivative is taken at."""
    return Saved(tuple(call.tensors)[:1])


def result(call: OpCall) -> Saved:
    """The result, of which the derivative is made."""
    del call
    return Saved(("output",))


def first_operand_and_result(call: OpCall) -> Saved:
    """Both."""
    return Saved((*first_operand(call).tensors, "output"))


def keep_all(call: OpCall) -> Saved:
    """The cautious answer for an operator without a rule: its floating operands and its result."""
    floating = tuple(name for name, tensor in call.tensors.items() if tensor.dtype in FLOATING)
    return Saved((*floating, "output"))


def factors_of_product(call: OpCall) -> Saved:
    """Of a product, each factor is kept where another factor wants its gradient."""
    names = [name for name in call.tensors if name not in ("bias", "attn_mask")]
    wanting = [name for name in names if call.tensors[name].requires_grad]
    return Saved(tuple(name for name in names if any(other != name for other in wanting)))


def factors_of_batches(call: OpCall) -> Saved:
    """As of a product; what is broadcast over a batch of matrices is copied for each of them, and the copy is kept."""
    kept, batch = factors_of_product(call), prod(call.output.shape[:-2])
    if any(len(tensor.shape) < 3 for tensor in call.operands):  # of one matrix, whose rows are those of all batches
        return kept
    copied = [name for name in kept.tensors if prod(call.tensors[name].shape[:-2]) < batch]
    num_elements = sum(batch * prod(call.tensors[name].shape[-2:]) for name in copied)
    others = tuple(name for name in kept.tensors if name not in copied)
    return Saved(others, num_elements * call.output.item_bytes)


def factors_besides_summand(call: OpCall) -> Saved:
    """addmm(input, mat1, mat2): the summand is not kept."""
    factors = [name for name in call.tensors if name not in ("self", "input")]
    wanting = [name for name in factors if call.tensors[name].requires_grad]
    return Saved(tuple(name for name in factors if any(other != name for other in wanting)))


def divisor(call: OpCall) -> Saved:
    """self / other: the divisor always, the dividend where the divisor wants its gradient."""
    names = list(call.tensors)
    if len(names) < 2:
        return Saved()
    dividend, divisor = names[0], names[1]
    return Saved((dividend, divisor) if call.tensors[divisor].requires_grad else (divisor,))


def base_and_result(call: OpCall) -> Saved:
    """A power: the base; of one whose exponent is a tensor, both and the result."""
    names = tuple(call.tensors)
    return Saved((*names, "output") if len(names) > 1 else names)


def _rows(call: OpCall, normalized: str) -> int:
    """Rows that a norm over the last dims has."""
    shape = call.operands[0].shape
    dims = call.attributes.get(normalized)
    count = len(dims) if isinstance(dims, tuple) else 1
    return prod(shape[: len(shape) - count])


def layer_norm(call: OpCall) -> Saved:
    """The input, and mean and reciprocal standard deviation of each row."""
    return Saved(("input",), 2 * FLOAT32_BYTES * _rows(call, "normalized_shape"))


def rms_norm(call: OpCall) -> Saved:
    """The input, and the reciprocal standard deviation of each row."""
    return Saved(("input",), FLOAT32_BYTES * _rows(call, "normalized_shape"))


def group_norm(call: OpCall) -> Saved:
    """The input, and two statistics of each group of each sample."""
    groups = call.attributes.get("num_groups")
    statistics = 2 * call.operands[0].shape[0] * (groups if isinstance(groups, int) else 1)
    return Saved(("input",), statistics * call.output.item_bytes)


def batch_norm(call: OpCall) -> Saved:
    """The input, and two statistics of each channel."""
    return Saved(("input",), 2 * FLOAT32_BYTES * call.operands[0].shape[1])


def attention(call: OpCall) -> Saved:
    """Query, key, value, mask and output, and the log-sum-exp of each row."""
    query = call.tensor("query")
    mask = tuple(name for name in ("attn_mask",) if name in call.tensors)
    return Saved(("query", "key", "value", *mask, "output"), prod(query.shape[:-1]) * FLOAT32_BYTES)


def cross_entropy(call: OpCall) -> Saved:
    """The classes, and the log-probabilities as a tensor of their own."""
    logits = call.tensor("self", "input")
    return Saved(("target",), logits.num_elements * logits.item_bytes)


def dropout_mask(call: OpCall) -> Saved:
    """Which elements stayed, a byte each."""
    return Saved((), call.output.num_elements)


def embedding_indices(_: OpCall) -> Saved:
    """Which rows were taken."""
    return Saved(("indices",))


def condition(call: OpCall) -> Saved:
    """Which of the two was taken."""
    return Saved(("condition",))


def indices(call: OpCall) -> Saved:
    """Integer and boolean operands: where the values were taken from or put."""
    return Saved(tuple(name for name, tensor in call.tensors.items() if tensor.dtype not in FLOATING))


def selected_and_indices(call: OpCall) -> Saved:
    """What is selected from besides where: ``gather`` takes the shape of its gradient from it."""
    return Saved(tuple(dict.fromkeys((next(iter(call.tensors)), *indices(call).tensors))))


def source_and_indices(call: OpCall) -> Saved:
    """What is added or put besides where: the gradient is expanded to its shape."""
    return Saved(tuple(name for name in call.tensors if name == "source" or name in indices(call).tensors))


def operands_and_result(call: OpCall) -> Saved:
    """Everything."""
    return Saved((*call.tensors, "output"))


def difference(call: OpCall) -> Saved:
    """|input - target|: the difference, whose sign is wanted."""
    return Saved((), call.operands[0].num_elements * call.output.item_bytes)


def target(_: OpCall) -> Saved:
    """What the input is compared with."""
    return Saved(("target",))


def instance_norm(call: OpCall) -> Saved:
    """Mean and reciprocal standard deviation of each channel of each sample in float32."""
    return Saved(("input",), 2 * FLOAT32_BYTES * prod(call.operands[0].shape[:2]))


def returned_indices(call: OpCall) -> Saved:
    """Where the results were found."""
    return Saved((), call.output.num_elements * INDEX_BYTES)


def both_results(_: OpCall) -> Saved:
    """The indices, which share the node's memory with the values: a router's are kept by what weighs with them."""
    return Saved(("output",))


def first_operand_and_returned_indices(call: OpCall) -> Saved:
    """The input, and where the results were found."""
    return Saved((next(iter(call.tensors)),), call.output.num_elements * INDEX_BYTES)


def all_operands(call: OpCall) -> Saved:
    """Every operand."""
    return Saved(tuple(call.tensors))


def extremum(call: OpCall) -> Saved:
    """Over all elements: input and result; along a dim: the indices it returns."""
    return returned_indices(call) if "dim" in call.attributes else Saved((next(iter(call.tensors)), "output"))


def steps(call: OpCall) -> Saved:
    """Operands and result; of each layer and direction all gates and a state a row, which no formula undoes."""
    weights = recurrent_weights(call)
    if weights is None:
        return keep_all(call)
    a_row = sum(matrix.shape[0] + matrix.shape[1] for matrix in weights.hidden)
    return Saved((*call.tensors, "output"), weights.num_rows * a_row * call.output.item_bytes)
