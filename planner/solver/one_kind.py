"""Blocks of the one kind that a bound deals out, where a model has several.

A rank that holds blocks of this kind takes at least their time and memory. Of the others those count that it cannot be
without: what lies between two of the kind in one stage, and between the end of the model and the first or last of them.
That holds for every kind; taken is the one with most of the model's parameters. Example: of a model whose first three
blocks are dense, the mixtures behind them are dealt out. A first rank with any of them holds the three as well.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.evaluation.cuts import StageSizes
from planner.layout.columns import Positions
from planner.table.cost_table import CostTable


class OneKind(NamedTuple):
    """The kind, and what is known of its blocks from the order of all blocks alone."""

    kind: int
    others: list[int]  # all other kinds of blocks
    is_one: tuple[bool, ...]  # of every block in order

    @staticmethod
    def of(table: CostTable) -> OneKind:
        """The kind of blocks that has most parameters."""
        units = table.units
        blocks = [kind for kind, is_block in zip(units.kinds, units.is_block, strict=True) if is_block]
        sizes = table.elements[0].sum(axis=-1) * np.array(units.counts)
        kinds = sorted(set(blocks))
        kind = max(kinds, key=lambda kind: float(sizes[kind]))
        return OneKind(kind, [each for each in kinds if each != kind], tuple(each == kind for each in blocks))

    @property
    def number(self) -> int:
        """Blocks of the kind."""
        return sum(self.is_one)

    def sizes(self, of_all: StageSizes) -> StageSizes:
        """How many of the kind a stage may hold that may hold so many blocks in a row."""
        least, _ = self._in_a_row(of_all.least)
        _, most = self._in_a_row(of_all.most)
        return StageSizes(least, most)

    def others_of_ranks(self, num_ranks: int, virtual_stages: int) -> Positions:
        """Other blocks that each rank holds at least if it holds no, one, two, ... of the kind; [ranks, numbers]."""
        return _others_of_ranks(self.is_one, num_ranks, virtual_stages)

    def _in_a_row(self, number: int) -> tuple[int, int]:
        before = np.concatenate([[0], np.cumsum(self.is_one)])
        number = min(number, len(self.is_one))
        held = before[number:] - before[: len(before) - number]
        return int(held.min()), int(held.max())


@lru_cache(maxsize=1024)
def _others_of_ranks(is_one: tuple[bool, ...], num_ranks: int, virtual_stages: int) -> Positions:
    places, held = np.flatnonzero(is_one), np.arange(sum(is_one) + 1)
    of_stage = np.array([0, *(_others_in_a_row(places, number) for number in held[1:])])
    of_rank = of_stage
    for _ in range(virtual_stages - 1 if of_stage.any() else 0):
        of_rank = np.array([(of_rank[: number + 1] + of_stage[number::-1]).min() for number in held])
    found = np.tile(of_rank, (num_ranks, 1))
    if virtual_stages == 1:  # of several stages any may hold what the rank holds
        found[0, 1:] = places - held[:-1]
        found[-1, 1:] = len(is_one) - places[::-1] - held[1:]
    return found


def _others_in_a_row(places: Positions, number: int) -> int:
    return int((places[number - 1 :] - places[: len(places) - number + 1]).min()) - (number - 1)
