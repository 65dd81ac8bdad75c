"""What autograd keeps for backward, as CUDA's fused kernels keep it.

Each rule is the formula of PyTorch's ``tools/autograd/derivatives.yaml`` for that operator, with
the kernel that CUDA takes: flash or memory-efficient attention (query, key, value, output and the
float32 log-sum-exp of each row), fused layer and RMS norm (input, float32 mean and reciprocal
standard deviation of each row), native dropout (a mask of 1 byte), cross entropy (the
log-probabilities in the dtype of the logits it is given, float32 after the usual upcast).
A weight is kept too, but it is no activation: the tracer leaves parameters out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from planner.graph.op_call import FLOATING, OpCall, Saved

Rule = Callable[[OpCall], Saved]

FLOAT32_BYTES = 4
INDEX_BYTES = 8


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NOTHING = _words(
    """
    reshape flatten unflatten view permute transpose add sub rsub neg sum mean cumsum to _to_copy type_as clone
    contiguous cat stack concat hstack vstack flip roll pad constant_pad_nd tril triu repeat fill fill_diagonal
    zeros ones full empty arange zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not __and__ __or__ isin
    argmax argmin round floor ceil sign floor_divide copy one_hot bincount randn rand randint rand_like
    randn_like bernoulli scalar_tensor lift_fresh_copy lift_fresh detach_ alias linspace upsample_nearest2d
    upsample_bilinear2d upsample_bicubic2d interpolate rot90 any all isinf isnan item searchsorted bucketize
    nonzero diff eye tril_indices triu_indices numpy_T _assert_scalar sym_size im2col col2im
    """
)

INPUT = _words(
    """
    gelu silu leaky_relu elu softplus hardswish mish hardtanh relu6 glu erf log log2 log10 log1p sin cos abs
    square clamp  clamp_min clamp_max selu celu log_sigmoid hardsigmoid softsign atan asin acos sinh cosh expm1 var
    avg_pool2d  avg_pool1d adaptive_avg_pool2d adaptive_avg_pool1d
    """
)
OUTPUT = _words(
    """
    relu sigmoid tanh exp sqrt rsqrt reciprocal softmax _softmax log_softmax _log_softmax tan
    """
)
BOTH = _words(
    """
    norm linalg_vector_norm logsumexp amax amin max min prod std cumprod
    """
)


def saved_for_backward(call: OpCall) -> Saved | None:
    """What ``call`` keeps; None where there is no rule (the caller then keeps all and says so)."""
    if not call.requires_grad:
        return Saved()
    name = call.name
    if name in NOTHING:
        return Saved()
    if name in RULES:
        return RULES[name](call)
    first = next(iter(call.tensors), None)
    if name in INPUT and first is not None:
        return Saved((first,))
    if name in OUTPUT:
        return Saved(("output",))
    if name in BOTH and first is not None:
        return Saved((first, "output"))
    return None


def keep_all(call: OpCall) -> Saved:
    """The cautious answer for an operator without a rule: its floating operands and its result."""
    floating = tuple(name for name, tensor in call.tensors.items() if tensor.dtype in FLOATING)
    return Saved((*floating, "output"))


def _product(call: OpCall) -> Saved:
    """Of a product, each factor is kept where another factor wants its gradient."""
    names = [name for name in call.tensors if name not in ("bias", "attn_mask")]
    wanting = [name for name in names if call.tensors[name].requires_grad]
    return Saved(tuple(name for name in names if any(other != name for other in wanting)))


def _matmul_with_bias(call: OpCall) -> Saved:
    """addmm(input, mat1, mat2): the summand is not kept."""
    factors = [name for name in call.tensors if name not in ("self", "input")]
    wanting = [name for name in factors if call.tensors[name].requires_grad]
    return Saved(tuple(name for name in factors if any(other != name for other in wanting)))


def _quotient(call: OpCall) -> Saved:
    """self / other: the divisor always, the dividend where the divisor wants its gradient."""
    names = list(call.tensors)
    if len(names) < 2:
        return Saved()
    dividend, divisor = names[0], names[1]
    return Saved((dividend, divisor) if call.tensors[divisor].requires_grad else (divisor,))


def _power(call: OpCall) -> Saved:
    names = tuple(call.tensors)
    return Saved((*names, "output") if len(names) > 1 else names)


def _rows(call: OpCall, normalized: str) -> int:
    """Rows that a norm over the last dims has."""
    shape = call.operands[0].shape
    dims = call.attributes.get(normalized)
    count = len(dims) if isinstance(dims, tuple) else 1
    return prod(shape[: len(shape) - count])


def _layer_norm(call: OpCall) -> Saved:
    return Saved(("input",), 2 * FLOAT32_BYTES * _rows(call, "normalized_shape"))


def _rms_norm(call: OpCall) -> Saved:
    return Saved(("input",), FLOAT32_BYTES * _rows(call, "normalized_shape"))


def _group_norm(call: OpCall) -> Saved:
    groups = call.attributes.get("num_groups")
    statistics = 2 * call.operands[0].shape[0] * (groups if isinstance(groups, int) else 1)
    return Saved(("input",), statistics * call.output.item_bytes)


def _batch_norm(call: OpCall) -> Saved:
    return Saved(("input",), 2 * FLOAT32_BYTES * call.operands[0].shape[1])


def _attention(call: OpCall) -> Saved:
    query = call.tensor("query")
    mask = tuple(name for name in ("attn_mask",) if name in call.tensors)
    return Saved(("query", "key", "value", *mask, "output"), prod(query.shape[:-1]) * FLOAT32_BYTES)


def _cross_entropy(call: OpCall) -> Saved:
    logits = call.tensor("self", "input")
    return Saved(("target",), logits.num_elements * logits.item_bytes)


def _dropout(call: OpCall) -> Saved:
    return Saved((), call.output.num_elements)


def _embedding(_: OpCall) -> Saved:
    return Saved(("indices",))


def _where(call: OpCall) -> Saved:
    return Saved(("condition",))


def _indices(call: OpCall) -> Saved:
    """Integer and boolean operands: where the values were taken from or put."""
    return Saved(tuple(name for name, tensor in call.tensors.items() if tensor.dtype not in FLOATING))


def _selected_and_indices(call: OpCall) -> Saved:
    """What is selected from besides where: ``gather`` takes the shape of its gradient from it."""
    return Saved(tuple(dict.fromkeys((next(iter(call.tensors)), *_indices(call).tensors))))


def _source_and_indices(call: OpCall) -> Saved:
    """What is added or put besides where: the gradient is expanded to its shape."""
    return Saved(tuple(name for name in call.tensors if name == "source" or name in _indices(call).tensors))


def _operands_and_result(call: OpCall) -> Saved:
    return Saved((*call.tensors, "output"))


def _difference(call: OpCall) -> Saved:
    """|input - target|: the difference, whose sign is wanted."""
    return Saved((), call.operands[0].num_elements * call.output.item_bytes)


def _target(_: OpCall) -> Saved:
    return Saved(("target",))


def _instance_norm(call: OpCall) -> Saved:
    """Mean and reciprocal standard deviation of each channel of each sample in float32."""
    return Saved(("input",), 2 * FLOAT32_BYTES * prod(call.operands[0].shape[:2]))


def _returned_indices(call: OpCall) -> Saved:
    return Saved((), call.output.num_elements * INDEX_BYTES)


def _both_results(_: OpCall) -> Saved:
    """The indices, which share the node's memory with the values: a router's are kept by what weighs with them."""
    return Saved(("output",))


def _input_and_returned_indices(call: OpCall) -> Saved:
    return Saved((next(iter(call.tensors)),), call.output.num_elements * INDEX_BYTES)


def _all_operands(call: OpCall) -> Saved:
    return Saved(tuple(call.tensors))


def _max(call: OpCall) -> Saved:
    """Over all elements: input and result; along a dim: the indices it returns."""
    return _returned_indices(call) if "dim" in call.attributes else Saved((next(iter(call.tensors)), "output"))


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "linear",
            "matmul",
            "mm",
            "bmm",
            "mv",
            "dot",
            "mul",
            "einsum",
            "bilinear",
            "_grouped_mm",
            "grouped_mm",
            "grouped_mm_fallback",
        ),
        _product,
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addcmul", "addcdiv"), _matmul_with_bias),
    **dict.fromkeys(("div", "true_divide", "divide"), _quotient),
    "pow": _power,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("cross_entropy_loss",), _cross_entropy),
    **dict.fromkeys(
        ("nll_loss", "nll_loss_nd", "mse_loss", "smooth_l1_loss", "huber_loss", "maximum", "minimum"), _all_operands
    ),
    **dict.fromkeys(
        ("binary_cross_entropy_with_logits", "prelu", "lerp", "atan2", "polar", "complex", "logaddexp"), _all_operands
    ),
    **dict.fromkeys(("dropout", "native_dropout", "feature_dropout"), _dropout),
    "embedding": _embedding,
    "where": _where,
    **dict.fromkeys(("masked_fill", "index", "index_select", "scatter", "scatter_add"), _indices),
    **dict.fromkeys(("index_put", "masked_scatter"), _indices),
    **dict.fromkeys(("gather", "take_along_dim", "masked_select"), _selected_and_indices),
    **dict.fromkeys(("index_add", "index_copy"), _source_and_indices),
    **dict.fromkeys(("scatter_reduce", "cdist"), _operands_and_result),
    "l1_loss": _difference,
    "kl_div": _target,
    "instance_norm": _instance_norm,
    **dict.fromkeys(("repeat_interleave", "index_fill", "embedding_bag"), _indices),
    "topk": _both_results,
    **dict.fromkeys(("sort", "kthvalue", "cummax"), _returned_indices),
    **dict.fromkeys(("max_pool2d", "max_pool1d", "max_pool2d_with_indices"), _input_and_returned_indices),
    **dict.fromkeys(("max", "min", "amax", "amin"), _max),
}
