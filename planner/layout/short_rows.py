"""What is asked of each of many short rows of numbers, a column at a time.

NumPy goes along the last axis row by row: for rows of a few numbers that takes five to fifteen times as long.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from planner.layout.columns import Array

# Rows of more numbers than this share of their number are short no longer.
SHORT = 1 / 8


def largest_of_each(rows: Array) -> Array:
    """The largest number of each row, ``rows.max(axis=1)``."""
    found: Array = reduce(np.maximum, rows.T)
    return found


def least_of_each(rows: Array) -> Array:
    """The least number of each row, ``rows.min(axis=1)``."""
    found: Array = reduce(np.minimum, rows.T)
    return found


def running_sums(rows: Array) -> Array:
    """``np.cumsum(rows, axis=1)``, of which numbers are added up in the same order."""
    if rows.shape[1] > SHORT * len(rows):
        return np.cumsum(rows, axis=1)
    found = rows.copy()
    for column in range(1, rows.shape[1]):
        found[:, column] += found[:, column - 1]
    return found
