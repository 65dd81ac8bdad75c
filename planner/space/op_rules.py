"""Which placements on the tensor-parallel axis each operator can take, as DTensor would propagate them.

A strategy says, for one operator on an axis of ``degree`` ranks: the placement each operand must
have, the placement the output then has, the share of the work left on a rank, and which operand
gradients come out as partial sums. Replicating everything is always the first strategy, so that an
operator without a rule is still planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.graph.model_graph import ModelGraph, Node, OpClass, op_name
from planner.parallelism import Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class OpStrategy:
    """One way to run an operator on the axis; tuples are aligned with ``Node.operands``."""

    operands: tuple[Placement, ...]
    output: Placement
    compute_fraction: float
    partial_gradients: tuple[bool, ...]  # operand's gradient is a partial sum over the axis

    @property
    def is_replicated(self) -> bool:
        """Every rank does the whole work on whole operands."""
        return self.compute_fraction == 1.0 and all(isinstance(p, Replicate) for p in self.operands)


@dataclass(frozen=True)
class _Operand:
    shape: tuple[int, ...]
    is_parameter: bool


Rule = Callable[[Node, Sequence[_Operand], int], list[OpStrategy]]

_ELEMENTWISE = frozenset(
    "add sub mul div rsub pow neg abs exp log rsqrt sqrt sin cos tanh sigmoid relu gelu silu where clamp masked_fill "
    "dropout native_dropout to _to_copy clone contiguous type_as leaky_relu elu softplus mish hardtanh hardswish erf "
    "reciprocal square logical_not logical_and logical_or eq ne lt le gt ge add_ mul_ sub_ div_ relu_ silu_ gelu_ "
    "masked_fill_ dropout_ copy_ detach alias float".split()
)
_NORMS = {"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"}
_REDUCTIONS = {"sum", "mean", "amax", "amin", "var", "std", "softmax", "_softmax", "log_softmax", "logsumexp", "cumsum"}
_VIEWS = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "expand"}
_MULTI = {"split", "split_with_sizes", "chunk", "unbind", "slice", "select", "narrow", "tensor_split"}


def strategies(node: Node, graph: ModelGraph, degree: int) -> list[OpStrategy]:
    """Every strategy of ``node`` on an axis of ``degree`` ranks, replication first."""
    operands = [_operand(o, graph) for o in node.operands]
    found = [_replicated(len(operands))]
    rule = _rule(op_name(node.op))
    if rule is not None:
        found += [s for s in rule(node, operands, degree) if s not in found]
    return found


def has_rule(node: Node) -> bool:
    """Whether the operator can be anything but replicated."""
    return _rule(op_name(node.op)) is not None


def _operand(operand: int | str | None, graph: ModelGraph) -> _Operand:
    if operand is None:
        return _Operand((), is_parameter=False)
    if isinstance(operand, str):
        parameter = graph.parameter_of.get(operand)
        return _Operand(() if parameter is None else parameter.shape, is_parameter=True)
    return _Operand(graph.nodes[operand].shape, is_parameter=False)


def _replicated(num_operands: int) -> OpStrategy:
    return OpStrategy((Replicate(),) * num_operands, Replicate(), 1.0, (False,) * num_operands)


def _rule(name: str) -> Rule | None:
    if name in _ELEMENTWISE:
        return _elementwise
    if name in _NORMS:
        return _norm
    if name in _REDUCTIONS:
        return _reduction
    if name in _VIEWS:
        return _view
    if name in _MULTI:
        return _along_dim
    return _RULES.get(name)


def _splits(shape: Sequence[int], dim: int, degree: int) -> bool:
    return 0 <= dim < len(shape) and shape[dim] % degree == 0 and shape[dim] >= degree


def _linear(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """y = x W^T + b with W [n, k]; x may have any number of leading dims."""
    if len(operands) < 2 or not operands[1].is_parameter:
        return []
    return _matrix_product(node, operands, degree, x_at=0, weight_at=1, weight_out_dim=0)


def _addmm(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """y = b + x W with W [k, n]."""
    if len(operands) < 3 or not operands[2].is_parameter:
        return []
    return _matrix_product(node, operands, degree, x_at=1, weight_at=2, weight_out_dim=1)


def _mm(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """y = x W with a parameter, or the product of two activations."""
    if len(operands) == 2 and operands[1].is_parameter and len(operands[1].shape) == 2:
        return _matrix_product(node, operands, degree, x_at=0, weight_at=1, weight_out_dim=1)
    if len(operands) != 2 or any(o.is_parameter for o in operands):
        return []
    found: list[OpStrategy] = []
    batch_dims = len(node.shape) - 2
    for dim in range(1, batch_dims):  # batch-like dims after the batch itself, such as heads
        if all(_splits(o.shape, dim, degree) for o in operands):
            found.append(OpStrategy((Shard(dim), Shard(dim)), Shard(dim), 1 / degree, (False, False)))
    return found


def _matrix_product(
    node: Node, operands: Sequence[_Operand], degree: int, *, x_at: int, weight_at: int, weight_out_dim: int
) -> list[OpStrategy]:
    x, weight = operands[x_at], operands[weight_at]
    last = len(x.shape) - 1
    bias_at = [i for i in range(len(operands)) if i not in (x_at, weight_at) and operands[i].shape]

    def build(
        x_placement: Placement,
        weight_placement: Placement,
        bias: Placement,
        output: Placement,
        *,
        partial_x: bool,
        partial_params: bool,
    ) -> OpStrategy:
        placements: list[Placement] = [Replicate()] * len(operands)
        partial = [False] * len(operands)
        placements[x_at], placements[weight_at] = x_placement, weight_placement
        partial[x_at], partial[weight_at] = partial_x, partial_params
        for i in bias_at:
            placements[i], partial[i] = bias, partial_params
        return OpStrategy(tuple(placements), output, 1 / degree, tuple(partial))

    found: list[OpStrategy] = []
    if _splits(weight.shape, weight_out_dim, degree):  # columns: the input's gradient is a partial sum
        found.append(
            build(Replicate(), Shard(weight_out_dim), Shard(0), Shard(last), partial_x=True, partial_params=False)
        )
    if _splits(weight.shape, 1 - weight_out_dim, degree):  # rows: the output is a partial sum
        found.append(
            build(Shard(last), Shard(1 - weight_out_dim), Replicate(), Partial(), partial_x=False, partial_params=False)
        )
    for dim in range(1, last):  # sequence: the weight's gradient is a partial sum
        if _splits(x.shape, dim, degree):
            found.append(build(Shard(dim), Replicate(), Replicate(), Shard(dim), partial_x=False, partial_params=True))
    return found


def _attention(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """q, k, v [b, heads, s, d]: split heads, query and key-value heads alike."""
    if len(operands) < 3 or len(node.shape) != 4:
        return []
    if not all(_splits(o.shape, 1, degree) for o in operands[:3]):
        return []
    rest: list[Placement] = [
        Shard(1) if len(o.shape) == 4 and o.shape[1] == node.shape[1] else Replicate() for o in operands[3:]
    ]
    placements = (Shard(1), Shard(1), Shard(1), *rest)
    return [OpStrategy(placements, Shard(1), 1 / degree, (False,) * len(operands))]


def _embedding(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """Table [vocab, hidden] and indices: split the vocabulary (masked partial sums) or the hidden dim."""
    if len(operands) < 2 or not operands[0].is_parameter:
        return []
    table, last = operands[0], len(node.shape) - 1
    rest = (Replicate(),) * (len(operands) - 1)
    whole = (False,) * len(operands)
    found: list[OpStrategy] = []
    if _splits(table.shape, 0, degree):
        found.append(OpStrategy((Shard(0), *rest), Partial(), 1 / degree, whole))
    if _splits(table.shape, 1, degree):
        found.append(OpStrategy((Shard(1), *rest), Shard(last), 1 / degree, whole))
    return found


def _cross_entropy(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """Logits [..., classes]: split classes (loss parallel)."""
    if not operands or operands[0].is_parameter:
        return []
    dim = len(operands[0].shape) - 1
    if dim != 1 or not _splits(operands[0].shape, dim, degree):
        return []
    rest = (Replicate(),) * (len(operands) - 1)
    return [OpStrategy((Shard(dim), *rest), Replicate(), 1 / degree, (False,) * len(operands))]


def _elementwise(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    found: list[OpStrategy] = []
    rank = len(node.shape)
    for dim in range(1, rank):
        if not _splits(node.shape, dim, degree):
            continue
        placements: list[Placement] = []
        partial: list[bool] = []
        for operand in operands:
            own = dim - (rank - len(operand.shape))
            if own >= 0 and operand.shape[own] == node.shape[dim]:
                placements.append(Shard(own))
                partial.append(False)
            else:  # broadcast along the split dim: every rank adds its share to the gradient
                placements.append(Replicate())
                partial.append(bool(operand.shape))
        found.append(OpStrategy(tuple(placements), Shard(dim), 1 / degree, tuple(partial)))
    return found


def _norm(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """Normalisation over the last dims: any earlier dim but the batch may be split."""
    if not operands:
        return []
    shape = operands[0].shape
    normalized = max((len(o.shape) for o in operands[1:]), default=1) or 1
    found: list[OpStrategy] = []
    for dim in range(1, len(shape) - normalized):
        if _splits(shape, dim, degree):
            placements = (Shard(dim), *(Replicate() for _ in operands[1:]))
            partial = (False, *(bool(o.shape) for o in operands[1:]))
            found.append(OpStrategy(placements, Shard(dim), 1 / degree, partial))
    return found


def _reduction(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """Reductions and softmax that keep rank: any dim but the reduced ones and the batch."""
    if len(operands) != 1 or len(operands[0].shape) != len(node.shape):
        return []
    rank = len(node.shape)
    reduced = {d % rank for d in _dims(node.attributes.get("dim"))}
    if not reduced:
        return []
    return [
        OpStrategy((Shard(dim),), Shard(dim), 1 / degree, (False,))
        for dim in range(1, rank)
        if dim not in reduced and _splits(operands[0].shape, dim, degree)
    ]


def _dims(value: object) -> tuple[int, ...]:
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else ()


def _carry(dim_in: int, dim_out: int, num_operands: int, degree: int) -> OpStrategy:
    rest = (Replicate(),) * (num_operands - 1)
    return OpStrategy((Shard(dim_in), *rest), Shard(dim_out), 1 / degree, (False,) * num_operands)


def _view(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """A split dim survives where it leads the dims it is merged with or cut into; partial sums stay so."""
    if not operands:
        return []
    rest = (Replicate(),) * (len(operands) - 1)
    found = [OpStrategy((Partial(), *rest), Partial(), 1.0, (False,) * len(operands))]
    before, after = operands[0].shape, node.shape
    if node.batch_dependent and before and after:  # a batch of one must not be taken for a dim of size one
        before, after = (2 * before[0], *before[1:]), (2 * after[0], *after[1:])
    for dim_in, dim_out in leading_dims(before, after):
        if dim_in >= 1 and _splits(operands[0].shape, dim_in, degree) and _splits(node.shape, dim_out, degree):
            found.append(_carry(dim_in, dim_out, len(operands), degree))
    return found


def leading_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (dim before, dim after) that lead the groups into which a reshape splits both shapes.

    [2, 16, 64] -> [2, 16, 4, 16] gives (0, 0), (1, 1), (2, 2); [2, 4, 3, 8] -> [2, 12, 8] gives
    (0, 0), (1, 1), (3, 2). Expanded dims (size 1 before) stand for themselves.
    """
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        size_i, size_j = before[i], after[j]
        i, j = i + 1, j + 1
        while size_i != size_j:
            if size_i < size_j and i < len(before):
                size_i, i = size_i * before[i], i + 1
            elif size_j < size_i and j < len(after):
                size_j, j = size_j * after[j], j + 1
            else:  # an expand, or sizes that do not match: nothing more to say
                break
        lead_i = next((k for k in range(start_i, i) if before[k] > 1), start_i)
        lead_j = next((k for k in range(start_j, j) if after[k] > 1), start_j)
        if size_i == size_j:
            pairs.append((lead_i, lead_j))
    return pairs


def _transpose(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    shape = operands[0].shape
    order = list(range(len(shape)))
    dims = node.attributes.get("dims")
    if isinstance(dims, tuple) and len(dims) == len(shape):
        order = [d % len(shape) for d in _dims(dims)]
    else:
        first, second = node.attributes.get("dim0", 0), node.attributes.get("dim1", 1)
        if not isinstance(first, int) or not isinstance(second, int) or len(shape) < 2:
            return []
        a, b = first % len(shape), second % len(shape)
        order[a], order[b] = order[b], order[a]
    return [
        _carry(dim_in, dim_out, len(operands), degree)
        for dim_out, dim_in in enumerate(order)
        if dim_in >= 1 and _splits(shape, dim_in, degree)
    ]


def _along_dim(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """Splitting, slicing and selecting along one dim: the other dims may be split."""
    shape = operands[0].shape
    name = op_name(node.op)
    dim = node.attributes.get("dim", 0)
    if not isinstance(dim, int) or not shape:
        return []
    cut = dim % len(shape)
    drops = name in {"unbind", "select"}
    found: list[OpStrategy] = []
    for dim_in in range(1, len(shape)):
        whole = name == "slice" and node.shape == shape  # a slice of everything
        if (dim_in == cut and not whole) or not _splits(shape, dim_in, degree):
            continue
        dim_out = dim_in - 1 if drops and dim_in > cut and len(node.shape) < len(shape) else dim_in
        found.append(_carry(dim_in, dim_out, len(operands), degree))
    return found


def _getitem(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    """An element of a tuple: the producer's placement, dim for dim."""
    shape = operands[0].shape if operands else ()
    if len(shape) != len(node.shape):
        return [_carry(d, d, 1, degree) for d in range(1, len(node.shape)) if _splits(node.shape, d, degree)]
    return [
        _carry(d, d, len(operands), degree)
        for d in range(1, len(shape))
        if _splits(node.shape, d, degree) and node.shape[d] == shape[d]
    ]


def _concatenate(node: Node, operands: Sequence[_Operand], degree: int) -> list[OpStrategy]:
    dim = node.attributes.get("dim", 0)
    if not isinstance(dim, int) or not operands or any(len(o.shape) != len(node.shape) for o in operands):
        return []
    cut = dim % len(node.shape)
    return [
        OpStrategy((Shard(d),) * len(operands), Shard(d), 1 / degree, (False,) * len(operands))
        for d in range(1, len(node.shape))
        if d != cut and all(_splits(o.shape, d, degree) for o in operands)
    ]


_RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    "mm": _mm,
    "matmul": _mm,
    "bmm": _mm,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "transpose": _transpose,
    "permute": _transpose,
    "getitem": _getitem,
    "cat": _concatenate,
}


def is_view(node: Node) -> bool:
    """Operators that DTensor refuses to run on operands it would have to gather first."""
    return node.op_class is OpClass.VIEW
