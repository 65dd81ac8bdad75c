"""The matrix products that ``torch.einsum`` is made of: it contracts its operands two at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

Labels = tuple[str, ...]
Pair = tuple[int, int, int]  # the two factors, and 2 FLOPs a multiply-add

ELLIPSIS = "..."


def pairs_of(equation: str, shapes: Sequence[Sequence[int]], path: Sequence[int] | None = None) -> list[Pair]:
    """The contractions in order: operands are numbered, and each result has the number behind the last.

    ``path``: the positions that meet, two at a time (opt_einsum's); None: from the left, as torch goes without one.
    What only multiplies elements has no FLOPs, as in torch, where it is no product of matrices.
    """
    terms, result = labelled(equation, [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(term, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))  # a side of 1 is broadcast
    open_terms = list(enumerate(map(set[str], terms)))
    pairs: list[Pair] = []
    while len(open_terms) > 1:
        positions = (0, 1) if path is None else sorted(path[2 * len(pairs) : 2 * len(pairs) + 2])
        (right, of_right), (left, of_left) = (open_terms.pop(place) for place in reversed(positions))
        wanted = set(result).union(*(labels for _, labels in open_terms))
        summed = (of_left & of_right) - wanted
        kept = (of_left | of_right) & wanted
        flops = 2 * prod(sizes[label] for label in kept | summed) if summed else 0
        pairs.append((left, right, flops))
        open_terms.insert(0 if path is None else len(open_terms), (len(terms) + len(pairs) - 1, kept))
    return pairs


def labelled(equation: str, num_dims: Sequence[int]) -> tuple[list[Labels], Labels]:
    """The labels of each operand's dims and of the result's; dims of an ellipsis have their place from the right."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = [_with_dims(term, dims) for term, dims in zip(inputs.split(","), num_dims, strict=True)]
    every = Counter(label for term in terms for label in term)
    of_ellipsis = sorted((label for label in every if label.startswith(ELLIPSIS)), key=lambda label: int(label[3:]))
    if not arrow:
        once = sorted(label for label, times in every.items() if times == 1 and not label.startswith(ELLIPSIS))
        return terms, (*of_ellipsis[::-1], *once)
    before, dots, after = result.partition(ELLIPSIS)
    return terms, (*before, *(of_ellipsis[::-1] if dots else ()), *after)


def _with_dims(term: str, num_dims: int) -> Labels:
    before, dots, after = term.partition(ELLIPSIS)
    hidden = num_dims - len(before) - len(after) if dots else 0
    return (*before, *(f"{ELLIPSIS}{place}" for place in reversed(range(hidden))), *after)
