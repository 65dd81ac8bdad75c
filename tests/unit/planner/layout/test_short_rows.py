"""Short rows are asked column by column, and say what numpy says of them."""

import numpy as np
import pytest

from planner.layout.short_rows import largest_of_each, least_of_each, running_sums


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (40, 1), (40, 3), (1000, 16), (8, 40)])
def test_they_are_those_of_numpy_to_the_last_digit(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(sum(shape)).normal(size=shape)
    assert (largest_of_each(rows) == rows.max(axis=1)).all()
    assert (least_of_each(rows) == rows.min(axis=1)).all()
    assert (running_sums(rows) == np.cumsum(rows, axis=1)).all()
