"""Every pipeline schedule gives the gradients of one process, also with many stages and few micro-batches.

A part of the matrix: ``python -m benchmarks.parity_matrix`` runs all of it.
"""

from __future__ import annotations

import pytest

from benchmarks.parity_matrix import TOLERANCE, Layout, accepted, representative, with_every_loss
from tests.distributed.conftest import Outcome

LAYOUTS = {layout.name: layout for layout in representative()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_equal_one_process(name: str, outcomes: dict[str, Outcome]) -> None:
    errors = outcomes[name]["errors"]
    assert isinstance(errors, dict)
    assert len(errors) > 50  # the loss, and parameters of twelve blocks
    wrong = {fqn: error for fqn, error in errors.items() if not error <= TOLERANCE}
    assert not wrong


def test_part_has_what_goes_wrong_first() -> None:
    """Three stages a rank, one micro-batch, and fewer than twice the ranks, of every schedule that allows it."""
    part, whole = list(LAYOUTS.values()), accepted(4)

    def kinds(layouts: list[Layout]) -> set[tuple[str, int, int]]:
        return {(layout.schedule, layout.pp, layout.virtual_stages) for layout in layouts}

    assert kinds(part) == kinds(whole)
    single = [layout for layout in whole if layout.num_microbatches == 1]
    assert kinds([layout for layout in part if layout.num_microbatches == 1]) == kinds(single)
    assert any(layout.virtual_stages == 3 and layout.model == "tied" for layout in part)


@pytest.mark.parametrize("name", [layout.name for layout in with_every_loss()])
def test_losses_of_unequal_parts_equal_one_process(name: str, outcomes: dict[str, Outcome]) -> None:
    """Micro-batches with unequal numbers of labels, some with none, under every way to say what a loss is."""
    errors = outcomes[name]["errors"]
    assert isinstance(errors, dict)
    assert len(errors) > 50
    assert not {fqn: error for fqn, error in errors.items() if not error <= TOLERANCE}
