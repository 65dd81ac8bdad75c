"""How the samples of a batch go through operators: each for itself, or mixed with one another.

A rule takes where the samples lie in each operand and says where they lie in the result. ``None`` in place of a rule,
and ``LOST`` as its answer, say that nobody knows: from there on nothing is said of mixing, so that no right model is
called wrong. What is made of choices (integers, comparisons) may look at all samples: routing and its capacity do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from planner.operators.call import AttributeValue
from planner.operators.einsum_pairs import labelled


class Kind(StrEnum):
    """What a tensor has of the samples."""

    NONE = "none"  # nothing: parameters and constants
    EACH = "each"  # rows of each sample, along one dim
    ALL = "all"  # what was made of all of them together, such as a mean
    LOST = "lost"  # not known


@dataclass(frozen=True)
class Samples:
    """Where a tensor has the samples of a batch."""

    kind: Kind
    dim: int = 0  # of EACH
    inner: int = 1  # neighbours along that dim which are of one sample: positions, where (batch, positions) are merged
    is_chosen: bool = False  # made of choices
    at: int = 0  # of ALL: the node that first put them together


NONE, ALL, LOST = Samples(Kind.NONE), Samples(Kind.ALL), Samples(Kind.LOST)


@dataclass(frozen=True)
class Taken:
    """A call as these rules see it."""

    shapes: tuple[tuple[int, ...], ...]  # of operands; () of a buffer or constant
    samples: tuple[Samples, ...]
    shape: tuple[int, ...]  # of the result
    attributes: Mapping[str, AttributeValue]
    batch_size: int
    has_buffers: bool

    @property
    def first(self) -> Samples:
        """Of the first operand."""
        return self.samples[0] if self.samples else NONE

    def dims(self, name: str) -> tuple[int, ...] | None:
        """The dims in that attribute, counted from the left; None where there is none, which means all."""
        value, rank = self.attributes.get(name), len(self.shapes[0])
        found = (value,) if isinstance(value, int) else value
        if not isinstance(found, tuple) or not found or not rank:
            return None
        return tuple(dim % rank for dim in found if isinstance(dim, int))


@dataclass(frozen=True)
class Passed:
    """Where the samples are in the result, and whether the operator mixed them there."""

    samples: Samples
    mixes: bool = False


SampleRule = Callable[[Taken], Passed]
_NOWHERE = Passed(LOST)


def _each(dim: int, inner: int = 1) -> Passed:
    return Passed(Samples(Kind.EACH, dim, inner))


def _joined(taken: Taken, terms: Sequence[Sequence[str]], result: Sequence[str]) -> Passed:
    """Of operands whose dims are named: those of one name meet, and those that the result lacks are summed."""
    each = [
        (samples, term[samples.dim])
        for samples, term in zip(taken.samples, terms, strict=True)
        if samples.kind is Kind.EACH and samples.dim < len(term)
    ]
    kinds = {samples.kind for samples in taken.samples}
    kept = dict.fromkeys(name for _, name in each if name in result)
    is_summed = any(name not in result for _, name in each)
    has_choice = any(samples.is_chosen for samples in taken.samples)
    if not kept:
        is_all = (is_summed or Kind.ALL in kinds) and Kind.LOST not in kinds and not has_choice
        return Passed(ALL) if is_all else _NOWHERE
    name = next(iter(kept))
    inner = {samples.inner for samples, other in each if other == name}
    if len(inner) > 1:
        return _NOWHERE
    mixes = (len(kept) > 1 or is_summed or Kind.ALL in kinds) and not has_choice
    return Passed(Samples(Kind.EACH, result.index(name), inner.pop()), mixes)


def _from_right(rank: int) -> list[str]:
    return [f"-{place}" for place in range(rank, 0, -1)]


def elementwise(taken: Taken) -> Passed:
    """Elements at the same place, counted from the right, meet."""
    terms = [_from_right(len(shape)) for shape in taken.shapes]
    stretched = any(
        samples.kind is Kind.EACH and (not shape or shape[samples.dim] != taken.shape[samples.dim - len(shape)])
        for samples, shape in zip(taken.samples, taken.shapes, strict=True)
    )
    return _NOWHERE if stretched else _joined(taken, terms, _from_right(len(taken.shape)))


def first_operand(taken: Taken) -> Passed:
    """The result is as the first operand; the others only say where, or how much."""
    return Passed(taken.first) if taken.shapes and taken.shapes[0] == taken.shape else _NOWHERE


def product(taken: Taken) -> Passed:
    """The last two operands are factors ``[..., i, j]`` and ``[..., j, k]``."""
    left, right = taken.shapes[-2:]
    if len(left) < 2 or len(right) < 2 or len(taken.shape) < 2:
        return _NOWHERE
    names = [[*_from_right(len(left))[:-2], "i", "j"], [*_from_right(len(right))[:-2], "j", "k"]]
    result = [*_from_right(len(taken.shape))[:-2], "i", "k"]
    summands = [result[len(result) - len(shape) :] for shape in taken.shapes[:-2]]
    return _joined(taken, [*summands, *names], result)


def linear(taken: Taken) -> Passed:
    """Rows ``[..., j]``, a matrix ``[k, j]`` and what is added."""
    if any(samples.kind is not Kind.NONE for samples in taken.samples[1:]):
        return _NOWHERE
    names = _from_right(len(taken.shapes[0]))
    rest = [["k", names[-1]], ["k"]][: len(taken.shapes) - 1]
    return _joined(taken, [names, *rest], [*names[:-1], "k"])


def einsum(taken: Taken) -> Passed:
    """As the equation names the dims."""
    terms, result = labelled(str(taken.attributes["equation"]), [len(shape) for shape in taken.shapes])
    return _joined(taken, terms, result) if len(result) == len(taken.shape) else _NOWHERE


def attention(taken: Taken) -> Passed:
    """Queries ``[..., q, d]`` look at keys ``[..., k, d]`` and values ``[..., k, v]``; a mask chooses."""
    parts = [
        [*_from_right(len(shape))[:-2], *names]
        for shape, names in zip(taken.shapes, (("q", "d"), ("k", "d"), ("k", "v")), strict=False)
    ]
    seen = Taken(
        taken.shapes[:3], taken.samples[:3], taken.shape, taken.attributes, taken.batch_size, has_buffers=False
    )
    return _joined(seen, parts, [*_from_right(len(taken.shape))[:-2], "q", "v"])


def lookup(taken: Taken) -> Passed:
    """Rows of a table, by numbers: those of each sample are where its numbers were."""
    if len(taken.samples) < 2 or taken.first.kind is not Kind.NONE:
        return _NOWHERE
    return Passed(taken.samples[1]) if taken.samples[1].kind is Kind.EACH else _NOWHERE


def image(taken: Taken) -> Passed:
    """Samples lie along the first dim, and each is worked on for itself."""
    is_known = all(samples.kind is Kind.NONE for samples in taken.samples[1:])
    if _is_each(taken) and (taken.first.dim or not is_known or taken.shape[0] != taken.shapes[0][0]):
        return _NOWHERE
    return Passed(taken.first) if is_known else _NOWHERE


def batch_norm(taken: Taken) -> Passed:
    """Statistics of all samples in training; those of modules that keep them are told of where a plan runs."""
    looks = taken.attributes.get("training") is True and not taken.has_buffers
    return Passed(taken.first, looks and _is_each(taken) and taken.first.dim != 1)


def norm(taken: Taken) -> Passed:
    """Normalises the last dims."""
    sizes = taken.attributes.get("normalized_shape")
    start = len(taken.shape) - (len(sizes) if isinstance(sizes, tuple) else 1)
    return Passed(taken.first, _is_each(taken) and taken.first.dim >= start)


def recurrence(taken: Taken) -> Passed:
    """Steps along positions: the second dim where the batch is first, else the first."""
    is_batch_first = taken.attributes.get("batch_first")
    if not isinstance(is_batch_first, bool) or len(taken.shapes[0]) != 3 or not _is_each(taken):
        return _NOWHERE
    return Passed(LOST, taken.first.dim == int(is_batch_first))


def reduction(taken: Taken) -> Passed:
    """One value in place of all along some dims, or along every one."""
    if len(taken.samples) > 1:
        return elementwise(taken) if taken.attributes.get("dim") is None else _NOWHERE
    if not _is_each(taken):
        return Passed(taken.first)
    dims, dim = taken.dims("dim"), taken.first.dim
    if dims is None or dim in dims:
        return _NOWHERE if taken.first.is_chosen else Passed(ALL)
    is_kept = len(taken.shape) == len(taken.shapes[0])
    return _each(dim if is_kept else dim - sum(other < dim for other in dims), taken.first.inner)


def extremum(taken: Taken) -> Passed:
    """As ``reduction``; the one of all elements is often subtracted before exponentials, where it cancels out."""
    is_of_all = len(taken.samples) == 1 and prod(taken.shape) == 1
    return _NOWHERE if is_of_all and _is_each(taken) else reduction(taken)


def along(taken: Taken) -> Passed:
    """Softmax, sums so far, moves along dims: the result has them all."""
    dims = taken.dims("dim") or taken.dims("dims")
    if not _is_each(taken):
        return Passed(taken.first)
    if dims is None:
        return _NOWHERE
    return Passed(taken.first, taken.first.dim in dims and not taken.first.is_chosen)


def view(taken: Taken) -> Passed:
    """Elements in their order, under other dims."""
    samples, before, after = taken.first, taken.shapes[0] if taken.shapes else (), taken.shape
    if samples.kind is not Kind.EACH:
        return Passed(samples)
    if prod(before) != prod(after) or not prod(after):
        return _NOWHERE
    start = samples.inner * prod(before[samples.dim + 1 :])
    end = start * taken.batch_size
    for dim in range(len(after)):
        step = prod(after[dim + 1 :])
        if step <= start and end <= step * after[dim]:
            return _each(dim, start // step) if start % step == 0 and step * after[dim] % end == 0 else _NOWHERE
    return _NOWHERE


def expansion(taken: Taken) -> Passed:
    """Dims of one element are repeated, and new ones stand on the left."""
    return elementwise(taken) if _is_each(taken) else Passed(taken.first)


def transposition(taken: Taken) -> Passed:
    """Every dim takes a new place."""
    rank = len(taken.shapes[0])
    if not _is_each(taken):
        return Passed(taken.first)
    order = taken.dims("dims")
    if order is None:
        swapped = taken.dims("dim0"), taken.dims("dim1")
        if swapped[0] is None or swapped[1] is None:
            return _NOWHERE
        places = list(range(rank))
        one, other = swapped[0][0], swapped[1][0]
        places[one], places[other] = other, one
        order = tuple(places)
    return _each(order.index(taken.first.dim), taken.first.inner) if taken.first.dim in order else _NOWHERE


def reversal(taken: Taken) -> Passed:
    """The last dim comes first."""
    return _each(len(taken.shape) - 1 - taken.first.dim, taken.first.inner) if _is_each(taken) else Passed(taken.first)


def distances(taken: Taken) -> Passed:
    """Of rows ``[..., i, d]`` to rows ``[..., k, d]``."""
    names = [[*_from_right(len(shape))[:-2], row, "d"] for shape, row in zip(taken.shapes, ("i", "k"), strict=False)]
    return _joined(taken, names, [*_from_right(len(taken.shape))[:-2], "i", "k"])


def _is_each(taken: Taken) -> bool:
    return taken.first.kind is Kind.EACH


def _cut(taken: Taken) -> int | None:
    found = taken.attributes.get("dim", 0)
    rank = len(taken.shapes[0]) if taken.shapes else 0
    return found % rank if isinstance(found, int) and rank else None


def piece(taken: Taken) -> Passed:
    """Parts along one dim; of parts of the batch nothing is known."""
    is_whole = taken.shapes[0] == taken.shape and len(taken.samples) == 1 and "start" in taken.attributes
    if not _is_each(taken) or is_whole:
        return Passed(taken.first)
    return _NOWHERE if _cut(taken) in (None, taken.first.dim) else Passed(taken.first)


def one_of_dim(taken: Taken) -> Passed:
    """As ``piece``, of results that lack that dim."""
    cut = _cut(taken)
    if not _is_each(taken):
        return Passed(taken.first)
    if cut is None or cut == taken.first.dim:
        return _NOWHERE
    return _each(taken.first.dim - int(cut < taken.first.dim), taken.first.inner)


def element(taken: Taken) -> Passed:
    """One result of several, which are alike."""
    dim = taken.first.dim
    if _is_each(taken) and dim >= len(taken.shape):
        return _NOWHERE
    return Passed(taken.first)


def side_by_side(taken: Taken) -> Passed:
    """Pieces along one dim; of pieces of the batch nothing is known."""
    ranks = {len(shape) for shape, samples in zip(taken.shapes, taken.samples, strict=True) if _has(samples)}
    cut = taken.attributes.get("dim", 0)
    if ranks != {len(taken.shape)} or not isinstance(cut, int):
        return _NOWHERE
    if any(samples.kind is Kind.EACH and samples.dim == cut % len(taken.shape) for samples in taken.samples):
        return _NOWHERE
    names = _from_right(len(taken.shape))
    return _joined(taken, [names] * len(taken.shapes), names)


def choice(taken: Taken) -> Passed:
    """Values along a dim that are compared: along the batch that is routing, or nobody's business."""
    dims = taken.dims("dim")
    is_apart = dims is not None and _is_each(taken) and taken.first.dim not in dims
    return Passed(taken.first) if is_apart and len(taken.shape) == len(taken.shapes[0]) else _NOWHERE


def _has(samples: Samples) -> bool:
    return samples.kind is not Kind.NONE
