"""What is said of degrees for experts that cannot be."""

import pytest

from planner.axes.base import Asked
from planner.axes.expert import EXPERT
from planner.errors import NoLayoutError
from planner.layout.layout import Limits, Pins
from planner.space.search_space import build_space
from tests.planning import training_of


def asked(pins: Pins, num_experts: int, *counts: int) -> Asked:
    degrees = frozenset({2, 4, 8})
    limits = Limits(8, 8, 4, degrees, degrees, context_splits=True, num_experts=num_experts, expert_counts=counts)
    return Asked(training_of(64, 512), pins, limits)


@pytest.mark.parametrize(
    ("pins", "counts", "said"),
    [
        (Pins(ep=2), (1,), "ep=2 needs layers of experts (grouped products), and the model has none"),
        (Pins(ep=4), (6, 6), "ep=4 does not divide the 6 experts; allowed: 1, 2, 3, 6"),
        (
            Pins(ep=8),
            (4, 8, 12),
            "ep=8 does not divide the 8 and the 12 experts of the model's layers; allowed: 1, 2, 4",
        ),
        (Pins(ep=2), (1, 8, 9), "ep=2 does not divide the 8 and the 9 experts of the model's layers; allowed: 1"),
        (Pins(etp=0), (8, 8), "etp=0 must be 1 or the degree of tensor parallelism"),
        (Pins(etp=4, tp=2), (8, 8), "etp=4 must be 1 or tp=2"),
    ],
)
def test_what_cannot_be_is_said_of_the_experts_that_there_are(pins: Pins, counts: tuple[int, ...], said: str) -> None:
    """8 and 9 experts in turn were called none, and 8 and 12 were called 4."""
    assert EXPERT.violations(asked(pins, *counts)) == [said]


def test_a_degree_that_no_layout_has_is_spoken_of() -> None:
    with pytest.raises(NoLayoutError) as caught:
        build_space(*asked(Pins(etp=3), 8, 8))
    assert caught.value.hint.startswith("etp must be 1, beside ep > 1, or tp itself; ")
