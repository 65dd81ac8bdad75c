"""Which operators a partial sum passes through, and is reduced only behind them, as DTensor propagates it.

Rows of experts that are split over ranks come out as partial sums. Weighing them, bringing them back into the tokens'
order and adding up what a token's experts made is all linear, so one reduction of a row for each token is enough,
where reducing at once takes one for each expert of each token. Backward alike: the gradients of such operators are
linear in the gradient of their result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from costmodels.vocabulary.choices import Partial, Placement, Replicate
from planner.operators.placement_rules import OpStrategy
from planner.operators.record import Operator, Trait


def partial_places(operator: Operator, may_be_partial: Sequence[bool]) -> list[frozenset[int]]:
    """The sets of operands that may be partial sums together, of those that may be one at all.

    Each gives a result that is a partial sum. A product is linear in each factor, a sum in all its terms together.
    """
    places = [place for place, possible in enumerate(may_be_partial) if possible]
    if operator.has(Trait.LINEAR_IN_EACH):
        return [frozenset([place]) for place in places]
    if operator.has(Trait.LINEAR):
        return [frozenset([0])] if 0 in places else []
    if operator.has(Trait.LINEAR_IN_ALL):
        is_sum = len(places) == len(may_be_partial) > 1  # of tensors: a number would be added by every rank
        return [frozenset(places)] if is_sum else []
    return []


def passes_gradients(operator: Operator) -> bool:
    """Whether a gradient that is a partial sum gives gradients of the operands that are partial sums."""
    return any(operator.has(trait) for trait in (Trait.LINEAR, Trait.LINEAR_IN_EACH, Trait.LINEAR_IN_ALL))


def passing(operator: Operator, may_be_partial: Sequence[bool]) -> list[OpStrategy]:
    """Every rank does the whole operator on its own summands.

    Where another operand has a gradient, that is made of the summands: a partial sum as well.
    """
    return [_on_summands(partial, len(may_be_partial)) for partial in partial_places(operator, may_be_partial)]


def _on_summands(partial: Iterable[int], num_operands: int) -> OpStrategy:
    summands = frozenset(partial)
    places = range(num_operands)
    operands: tuple[Placement, ...] = tuple(Partial() if place in summands else Replicate() for place in places)
    return OpStrategy(operands, Partial(), 1.0, tuple(place not in summands for place in places))
