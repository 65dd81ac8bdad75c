"""Which placements on the tensor-parallel axis each operator can take, as DTensor would propagate them.

A strategy says, for one operator on an axis of ``degree`` ranks: the placement each operand must
have, the placement the output then has, the share of the work left on a rank, and which operand
gradients come out as partial sums. Replicating everything is a strategy of every operator and in no
rule, so that an operator without one is still planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from costmodels.vocabulary.choices import Partial, Placement, Replicate, Shard
from planner.operators.call import AttributeValue


@dataclass(frozen=True)
class OpStrategy:
    """One way to run an operator on the axis; tuples are aligned with the operands."""

    operands: tuple[Placement, ...]
    output: Placement
    compute_fraction: float
    partial_gradients: tuple[bool, ...]  # operand's gradient is a partial sum over the axis

    @property
    def is_replicated(self) -> bool:
        """Every rank does the whole work on whole operands."""
        return self.compute_fraction == 1.0 and all(isinstance(p, Replicate) for p in self.operands)


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator takes; ``shape`` is () of a buffer or constant."""

    shape: tuple[int, ...]
    is_parameter: bool


@dataclass(frozen=True)
class Applied:
    """An operator of a graph as placement rules see it."""

    operands: tuple[Operand, ...]
    shape: tuple[int, ...]  # of the output
    attributes: Mapping[str, AttributeValue]
    batch_dependent: bool


PlacementRule = Callable[[Applied, int], list[OpStrategy]]  # on an axis of so many ranks; replication stands apart


def replicated(num_operands: int) -> OpStrategy:
    """Every rank does everything."""
    return OpStrategy((Replicate(),) * num_operands, Replicate(), 1.0, (False,) * num_operands)


def _splits(shape: Sequence[int], dim: int, degree: int) -> bool:
    return 0 <= dim < len(shape) and shape[dim] % degree == 0 and shape[dim] >= degree


def linear(applied: Applied, degree: int) -> list[OpStrategy]:
    """y = x W^T + b with W [n, k]; x may have any number of leading dims."""
    operands = applied.operands
    if len(operands) < 2 or not operands[1].is_parameter:
        return []
    return _matrix_product(applied, degree, x_at=0, weight_at=1, weight_out_dim=0)


def addmm(applied: Applied, degree: int) -> list[OpStrategy]:
    """y = b + x W with W [k, n]."""
    operands = applied.operands
    if len(operands) < 3 or not operands[2].is_parameter:
        return []
    return _matrix_product(applied, degree, x_at=1, weight_at=2, weight_out_dim=1)


def mm(applied: Applied, degree: int) -> list[OpStrategy]:
    """y = x W with a parameter, or the product of two activations."""
    operands = applied.operands
    if len(operands) == 2 and operands[1].is_parameter and len(operands[1].shape) == 2:
        return _matrix_product(applied, degree, x_at=0, weight_at=1, weight_out_dim=1)
    if len(operands) != 2 or any(o.is_parameter for o in operands):
        return []
    found: list[OpStrategy] = []
    batch_dims = len(applied.shape) - 2
    for dim in range(1, batch_dims):  # batch-like dims after the batch itself, such as heads
        if all(_splits(o.shape, dim, degree) for o in operands):
            found.append(OpStrategy((Shard(dim), Shard(dim)), Shard(dim), 1 / degree, (False, False)))
    return found


def _matrix_product(
    applied: Applied, degree: int, *, x_at: int, weight_at: int, weight_out_dim: int
) -> list[OpStrategy]:
    operands = applied.operands
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


def grouped_mm(applied: Applied, degree: int) -> list[OpStrategy]:
    """Rows [rows, k] in groups, each times its own of [groups, k, n]: columns or rows of every group's matrix."""
    operands = applied.operands
    if len(operands) < 2 or len(operands[0].shape) != 2 or len(operands[1].shape) != 3:
        return []
    matrices, ends = operands[1].shape, (Replicate(),) * (len(operands) - 2)
    whole = (False,) * (len(operands) - 1)
    found: list[OpStrategy] = []
    if _splits(matrices, 2, degree):  # columns: the rows' gradient is a partial sum
        found.append(OpStrategy((Replicate(), Shard(2), *ends), Shard(1), 1 / degree, (True, *whole)))
    if _splits(matrices, 1, degree):  # rows: the output is a partial sum
        found.append(OpStrategy((Shard(1), Shard(1), *ends), Partial(), 1 / degree, (False, *whole)))
    return found


def attention(applied: Applied, degree: int) -> list[OpStrategy]:
    """q, k, v [b, heads, s, d]: split heads, query and key-value heads alike, and what has a number for each head."""
    operands = applied.operands
    if len(operands) < 3 or len(applied.shape) != 4:
        return []
    if not all(_splits(o.shape, 1, degree) for o in operands[:3]):
        return []
    heads = applied.shape[1]
    rest: list[Placement] = [
        Shard(0) if o.shape == (heads,) else Shard(1) if len(o.shape) == 4 and o.shape[1] == heads else Replicate()
        for o in operands[3:]
    ]
    placements = (Shard(1), Shard(1), Shard(1), *rest)
    return [OpStrategy(placements, Shard(1), 1 / degree, (False,) * len(operands))]


def embedding(applied: Applied, degree: int) -> list[OpStrategy]:
    """Table [vocab, hidden] and indices: split the vocabulary (masked partial sums) or the hidden dim."""
    operands = applied.operands
    if len(operands) < 2 or not operands[0].is_parameter:
        return []
    table, last = operands[0], len(applied.shape) - 1
    rest = (Replicate(),) * (len(operands) - 1)
    whole = (False,) * len(operands)
    found: list[OpStrategy] = []
    if _splits(table.shape, 0, degree):
        found.append(OpStrategy((Shard(0), *rest), Partial(), 1 / degree, whole))
    if _splits(table.shape, 1, degree):
        found.append(OpStrategy((Shard(1), *rest), Shard(last), 1 / degree, whole))
    return found


def cross_entropy(applied: Applied, degree: int) -> list[OpStrategy]:
    """Logits [..., classes]: split classes (loss parallel)."""
    operands = applied.operands
    if not operands or operands[0].is_parameter:
        return []
    dim = len(operands[0].shape) - 1
    if dim != 1 or not _splits(operands[0].shape, dim, degree):
        return []
    rest = (Replicate(),) * (len(operands) - 1)
    return [OpStrategy((Shard(dim), *rest), Replicate(), 1 / degree, (False,) * len(operands))]


def elementwise(applied: Applied, degree: int) -> list[OpStrategy]:
    """Any dim of the result but the batch may be split; what is broadcast along it stays whole."""
    operands = applied.operands
    found: list[OpStrategy] = []
    rank = len(applied.shape)
    for dim in range(1, rank):
        if not _splits(applied.shape, dim, degree):
            continue
        placements: list[Placement] = []
        partial: list[bool] = []
        for operand in operands:
            own = dim - (rank - len(operand.shape))
            if own >= 0 and operand.shape[own] == applied.shape[dim]:
                placements.append(Shard(own))
                partial.append(False)
            else:  # broadcast along the split dim: every rank adds its share to the gradient
                placements.append(Replicate())
                partial.append(bool(operand.shape))
        found.append(OpStrategy(tuple(placements), Shard(dim), 1 / degree, tuple(partial)))
    return found


def norm(applied: Applied, degree: int) -> list[OpStrategy]:
    """Normalisation over the last dims: any earlier dim but the batch may be split."""
    operands = applied.operands
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


def reduction(applied: Applied, degree: int) -> list[OpStrategy]:
    """Reductions and softmax that keep rank: any dim but the reduced ones and the batch."""
    operands = applied.operands
    if len(operands) != 1 or len(operands[0].shape) != len(applied.shape):
        return []
    rank = len(applied.shape)
    reduced = {d % rank for d in _dims(applied.attributes.get("dim"))}
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


def view(applied: Applied, degree: int) -> list[OpStrategy]:
    """A split dim survives where it leads the dims it is merged with or cut into; partial sums stay so."""
    operands = applied.operands
    if not operands:
        return []
    rest = (Replicate(),) * (len(operands) - 1)
    found = [OpStrategy((Partial(), *rest), Partial(), 1.0, (False,) * len(operands))]
    before, after = operands[0].shape, applied.shape
    if applied.batch_dependent and before and after:  # a batch of one must not be taken for a dim of size one
        before, after = (2 * before[0], *before[1:]), (2 * after[0], *after[1:])
    for dim_in, dim_out in leading_dims(before, after):
        if dim_in >= 1 and _splits(operands[0].shape, dim_in, degree) and _splits(applied.shape, dim_out, degree):
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


def transpose(applied: Applied, degree: int) -> list[OpStrategy]:
    """Every dim keeps its placement and takes a new place."""
    operands = applied.operands
    shape = operands[0].shape
    order = list(range(len(shape)))
    dims = applied.attributes.get("dims")
    if isinstance(dims, tuple) and len(dims) == len(shape):
        order = [d % len(shape) for d in _dims(dims)]
    else:
        first, second = applied.attributes.get("dim0", 0), applied.attributes.get("dim1", 1)
        if not isinstance(first, int) or not isinstance(second, int) or len(shape) < 2:
            return []
        a, b = first % len(shape), second % len(shape)
        order[a], order[b] = order[b], order[a]
    return [
        _carry(dim_in, dim_out, len(operands), degree)
        for dim_out, dim_in in enumerate(order)
        if dim_in >= 1 and _splits(shape, dim_in, degree)
    ]


def along_dim(applied: Applied, degree: int) -> list[OpStrategy]:
    """Splitting and narrowing along one dim: the other dims may be split."""
    return [_carry(dim, dim, len(applied.operands), degree) for dim in _dims_besides_cut(applied, degree)]


def slicing(applied: Applied, degree: int) -> list[OpStrategy]:
    """As ``along_dim``; of a slice that takes everything, every dim may be split."""
    operands = applied.operands
    if applied.shape != operands[0].shape or not isinstance(applied.attributes.get("dim", 0), int):
        return along_dim(applied, degree)
    dims = (dim for dim in range(1, len(applied.shape)) if _splits(applied.shape, dim, degree))
    return [_carry(dim, dim, len(operands), degree) for dim in dims]


def taking_dim_away(applied: Applied, degree: int) -> list[OpStrategy]:
    """As ``along_dim``, of operators whose results, each of several where they are many, lack that dim."""
    number, cut = len(applied.operands), _cut(applied)
    dims = _dims_besides_cut(applied, degree)
    return [_carry(dim, dim - 1 if dim > cut else dim, number, degree) for dim in dims]


def _cut(applied: Applied) -> int:
    dim = applied.attributes.get("dim", 0)
    return dim % len(applied.operands[0].shape) if isinstance(dim, int) else 0


def _dims_besides_cut(applied: Applied, degree: int) -> list[int]:
    shape = applied.operands[0].shape
    if not isinstance(applied.attributes.get("dim", 0), int) or not shape:
        return []
    return [dim for dim in range(1, len(shape)) if dim != _cut(applied) and _splits(shape, dim, degree)]


def getitem(applied: Applied, degree: int) -> list[OpStrategy]:
    """An element of a tuple: the producer's placement, dim for dim."""
    operands = applied.operands
    shape = operands[0].shape if operands else ()
    if len(shape) != len(applied.shape):
        return [_carry(d, d, 1, degree) for d in range(1, len(applied.shape)) if _splits(applied.shape, d, degree)]
    return [
        _carry(d, d, len(operands), degree)
        for d in range(1, len(shape))
        if _splits(applied.shape, d, degree) and applied.shape[d] == shape[d]
    ]


def concatenate(applied: Applied, degree: int) -> list[OpStrategy]:
    """Pieces side by side: any dim but theirs may be split."""
    operands = applied.operands
    dim = applied.attributes.get("dim", 0)
    if not isinstance(dim, int) or not operands or any(len(o.shape) != len(applied.shape) for o in operands):
        return []
    cut = dim % len(applied.shape)
    return [
        OpStrategy((Shard(d),) * len(operands), Shard(d), 1 / degree, (False,) * len(operands))
        for d in range(1, len(applied.shape))
        if d != cut and all(_splits(o.shape, d, degree) for o in operands)
    ]
