"""Micro-batches in flight on the pipeline ranks of one layout."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.held_counts import HeldCounts, OfPasses, held_counts, of_one_stage
from planner.layout.layout import Layout


class Flying(NamedTuple):
    """A moment at which a backward pass begins on a rank."""

    counts: tuple[int, ...]  # micro-batches in flight at each of the rank's stages, the lowest first
    made: tuple[int, ...]  # places of the rank's stages that have gradients, where it is known which
    stage: int | None = None  # place of the stage whose pass it is, where that is known


class InFlight:
    """Of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def _has_one_stage(self) -> bool:
        return self._layout.schedule.rules.has_one_stage or self._layout.mesh.pp == 1

    def moments(self, rank: int) -> tuple[Flying, ...]:
        """Moments that a rank must have memory for: when it holds most micro-batches, and when it has all gradients.

        One where both come together.
        """
        return self._moments[rank]

    @cached_property
    def _moments(self) -> list[tuple[Flying, ...]]:
        layout, rules = self._layout, self._layout.schedule.rules
        pp, v, m = layout.mesh.pp, layout.virtual_stages, layout.num_microbatches
        every = tuple(range(v))
        if self._has_one_stage:
            return [(Flying((number,), every),) for number in (self._at_once if pp > 1 else (1,))]
        ranks: list[list[int]] = [[] for _ in range(pp)]
        for stage in range(pp * v):
            ranks[rules.rank_of(stage, pp)].append(stage)
        most = rules.in_flight_by_stage(pp, v, rules.shortened_to_peak(pp, m))[0]
        of_ranks = [tuple([most[stage] for stage in stages]) for stages in ranks]
        if not rules.begins_stage_by_stage or rules.peak_comes_again(pp, v, m):
            return [(Flying(counts, every),) for counts in of_ranks]
        # Most are in flight before the first backward pass, through the highest stage.
        lowest = rules.in_flight_at_lowest(pp, v, m)
        return [
            (Flying(counts, every[-1:]), Flying(tuple([lowest[stage] for stage in stages]), every))
            for counts, stages in zip(of_ranks, ranks, strict=True)
        ]

    def at_stage(self, rank: int, place: int) -> Flying | None:
        """When the rank holds most before a backward pass of one of its stages, and no weight gradients wait."""
        if self._has_one_stage:
            return None  # it is the only one of ``moments``
        held, v = self._held_counts[rank], self._layout.virtual_stages
        rows = np.repeat(np.arange(len(held.passes)), np.diff([*held.first, len(held.counts)]))
        is_one = np.array([each.stage == place for each in held.passes])[rows] & ~held.counts[:, v:].any(axis=1)
        if not is_one.any():
            return None
        row = int(np.argmax(np.where(is_one, held.counts.sum(axis=1), -1.0)))
        return Flying(tuple(held.counts[row, :v].astype(int).tolist()), held.passes[int(rows[row])].made, place)

    def like(self, rank: int) -> int:
        """Equal for ranks that hold as many micro-batches at every moment: with like units they need as much memory."""
        return self._like[rank]

    @cached_property
    def _like(self) -> list[int]:
        if self._has_one_stage:
            return list(self._at_once)
        known: dict[Hashable, int] = {}
        pairs = zip(self._held_counts, self._moments, strict=True)
        return [known.setdefault((held.key, moments), len(known)) for held, moments in pairs]

    def most_bytes(self, rank: int, kept: Mapping[int, float], waiting: Mapping[int, float]) -> OfPasses:
        """The most bytes of all micro-batches in flight on a rank while each kind of its backward passes goes on.

        ``kept``, ``waiting``: of one micro-batch, in each stage.
        """
        if self._layout.schedule.rules.has_one_stage:
            found = of_one_stage(self._at_once[rank], self._layout.num_microbatches)
            once = sum(kept.values())
            return OfPasses(found.passes, tuple([number * once for number in found.numbers]))
        # More, or less, from the first to the second half of a split backward pass.
        in_order = sorted(kept)
        each = [*[kept[stage] for stage in in_order], *[waiting.get(stage, 0.0) for stage in in_order]]
        return self._held_counts[rank].most_of_each(each)

    @cached_property
    def _at_once(self) -> tuple[int, ...]:
        return self._layout.schedule.rules.in_flight(self._layout.mesh.pp, self._layout.num_microbatches)

    @cached_property
    def _held_counts(self) -> tuple[HeldCounts, ...]:
        layout, rules, pp = self._layout, self._layout.schedule.rules, self._layout.mesh.pp
        short = rules.shortened_to_peak(pp, layout.num_microbatches)
        return held_counts(layout.schedule, pp, layout.virtual_stages, short)
