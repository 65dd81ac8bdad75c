"""What the blocks of one pipeline rank recompute so that it fits its device, in the least time.

Blocks of one kind cost the same wherever they lie, so of each kind only two numbers are chosen: how many recompute
everything, and how many the selective part. Which of them makes no difference to time, and least memory is needed
where those that recompute most come first: behind them more has been freed by the time their backward pass runs, and
in a rank of several stages the stage that holds most micro-batches gains most.

Whether a rank fits the ledger says. It is asked for few of the choices: for those near the fastest that should fit by
what blocks keep alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Holding
from planner.evaluation.evaluator import Evaluator
from planner.layout.columns import Array, Positions

# Choices of one rank whose ledgers are looked at: those that need least; and of those about to fit, the first that
# should, slower ones until one does, and faster ones. Two blocks more or less that recompute are within these numbers.
MOST_SMALLEST, MOST_SLOWER, MOST_FASTER = 6, 12, 6
# Combinations of counts that are listed; ranks of so many kinds of blocks that there are more choose one mode a kind.
MOST_COMBINATIONS = 200_000

Stages = Mapping[int, range]  # the units of each stage that a rank holds


@dataclass(frozen=True)
class Choice:
    """What the units of a rank recompute.

    ``least_s``: no choice that fits takes less, in seconds a micro-batch more than if nothing were recomputed.
    """

    least_s: float
    modes: Mapping[int, Recompute]


@dataclass(frozen=True)
class _Kind:
    """Blocks of one kind on a rank, those whose recomputation saves most first."""

    units: list[int]
    counts: Array  # [choices, 2]: how many recompute everything, and selectively
    extra_s: Array  # [choices]
    kept_bytes: Array  # [choices]: activations when the rank holds most micro-batches

    def modes(self, choice: int) -> dict[int, Recompute]:
        """The mode of every unit."""
        full, selective = self.counts[choice].astype(int).tolist()
        modes = [Recompute.FULL] * full + [Recompute.SELECTIVE] * selective
        return dict(zip(self.units, modes + [Recompute.NONE] * (len(self.units) - len(modes)), strict=True))


class LeastRecompute:
    """Of one layout: every rank by itself, since its memory depends on its own units alone."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        layout = evaluator.layout
        self._is_free = layout.recompute is None
        self._units = evaluator.table.units
        self._model = evaluator.memory_model
        self._found: dict[tuple[object, ...], tuple[float, tuple[Recompute, ...]] | None] = {}

    def modes(self, starts: Sequence[int]) -> tuple[Recompute, ...] | None:
        """What every unit recomputes under this cut; None where some rank fits with no choice."""
        evaluator = self._evaluator
        if not self._is_free:
            return evaluator.modes if self._fits_as_it_is(starts) else None
        found = list(evaluator.modes)
        for rank, stages in enumerate(evaluator.stages_of_ranks(starts)):
            choice = self.of_rank(rank, stages)
            if choice is None:
                return None
            for unit, mode in choice.modes.items():
                found[unit] = mode
        return tuple(found)

    def _fits_as_it_is(self, starts: Sequence[int]) -> bool:
        stages = self._evaluator.stages_of_ranks(starts)
        return all(self._evaluator.rank_fits(rank, held) for rank, held in enumerate(stages))

    def of_rank(self, rank: int, stages: Stages) -> Choice | None:
        """The choice of least time with which ``rank`` fits holding ``stages``; None where none fits."""
        units = [unit for held in stages.values() for unit in held]
        key = (
            self._evaluator.flying(rank),
            self._evaluator.place_of(rank),
            0 in units,
            tuple(
                (stage if len(stages) > 1 else 0, *(self._units.kinds[u] for u in held))
                for stage, held in stages.items()
            ),
        )
        if key not in self._found:
            choice = self._least(rank, stages)
            self._found[key] = choice and (choice.least_s, tuple(choice.modes[unit] for unit in units))
        known = self._found[key]
        if known is None:
            return None
        least_s, modes = known
        return Choice(least_s, dict(zip(units, modes, strict=True)))

    def _least(self, rank: int, stages: Stages) -> Choice | None:
        evaluator = self._evaluator
        nothing = {unit: evaluator.modes[unit] for held in stages.values() for unit in held}
        if evaluator.rank_fits(rank, stages):
            return Choice(0.0, nothing)
        kinds = self._kinds(rank, stages) if self._is_free else []
        if not kinds:
            return None
        extra_s, kept = np.zeros(1), np.zeros(1)
        for kind in kinds:
            extra_s = (extra_s[:, None] + kind.extra_s).ravel()
            kept = (kept[:, None] + kind.kept_bytes).ravel()
        shape = [len(kind.extra_s) for kind in kinds]

        def modes_of(place: int) -> dict[int, Recompute]:
            modes = dict(nothing)
            for kind, choice in zip(kinds, np.unravel_index(place, shape), strict=True):
                modes |= kind.modes(int(choice))
            return modes

        def excess(place: int) -> float:
            return evaluator.excess_bytes(rank, stages, modes_of(place))

        places = np.flatnonzero(kept <= self._room_bytes(rank, stages, kinds))
        found = _least_that_fits(places, extra_s, kept * evaluator.reserve, excess)
        return None if found is None else Choice(found[0], modes_of(found[1]))

    def _kinds(self, rank: int, stages: Stages) -> list[_Kind]:
        flying = self._evaluator.flying(rank)
        units = [
            (-flying[stage], unit) for stage, held in stages.items() for unit in held if self._units.is_block[unit]
        ]
        groups: dict[int, list[tuple[int, int]]] = {}
        for flies, unit in sorted(units):
            groups.setdefault(self._units.kinds[unit], []).append((flies, unit))
        every = [self._listed(len(found)) for found in groups.values()]
        if np.prod([float(len(each)) for each in every]) > MOST_COMBINATIONS:
            every = [np.array([(n, 0), (0, n), (0, 0)], dtype=np.float64) for n in map(len, groups.values())]
        times = self._evaluator.extra_of_modes(rank)  # [modes, kinds]
        kinds: list[_Kind] = []
        for (kind, found), counts in zip(groups.items(), every, strict=True):
            flies = np.concatenate(([0.0], np.cumsum([-number for number, _ in found])))
            kept = self._kept[:, kind]
            full, some = counts[:, 0].astype(int), counts.sum(axis=1).astype(int)
            held = flies[full] * kept[2] + (flies[some] - flies[full]) * kept[1] + (flies[-1] - flies[some]) * kept[0]
            extra_s = counts[:, 0] * times[2, kind] + counts[:, 1] * times[1, kind]
            kinds.append(_Kind([unit for _, unit in found], counts, extra_s, held))
        return kinds

    @staticmethod
    def _listed(number: int) -> Array:
        """Numbers of blocks that recompute everything, and selectively, of so many; [choices, 2]."""
        return np.array(
            [(full, some) for full, some in product(range(number + 1), repeat=2) if full + some <= number],
            dtype=np.float64,
        )

    @cached_property
    def _kept(self) -> Array:
        return self._evaluator.holding_of_modes(Holding.KEPT)

    @cached_property
    def _working(self) -> Array:
        return self._evaluator.holding_of_modes(Holding.WORKING)

    def _room_bytes(self, rank: int, stages: Stages, kinds: Sequence[_Kind]) -> float:
        """At most so many bytes of blocks' activations fit: the device less what is there under every choice."""
        flying = self._evaluator.flying(rank)
        in_kinds = {unit for kind in kinds for unit in kind.units}
        others = sum(
            flying[stage] * self._kept[0, self._units.kinds[unit]]
            for stage, held in stages.items()
            for unit in held
            if unit not in in_kinds
        )
        # The last unit of a stage is at work while nothing behind it has been freed.
        working = max(float(self._working[:, self._units.kinds[held[-1]]].min()) for held in stages.values() if held)
        return self._evaluator.room_bytes(rank, stages) - working - others


def _least_that_fits(
    places: Positions, extra_s: Array, kept: Array, excess: Callable[[int], float]
) -> tuple[float, int] | None:
    """Of the choices at ``places`` the fastest that was found to fit, after the least time that any may take.

    ``kept``: bytes of each choice; ``excess``: by how much the ledger says that it is too large. None: none fits.
    """
    over = np.inf
    for smallest in places[np.argsort(kept[places], kind="stable")][:MOST_SMALLEST].tolist():
        over = excess(smallest)
        if over <= 0:
            break
    else:
        return None
    # What the rank needs besides blocks' activations is about the same under every choice.
    order = places[np.argsort(extra_s[places], kind="stable")]
    likely = np.flatnonzero(kept[order] - kept[smallest] + over <= 0)
    first = int(likely[0])
    found = int(np.flatnonzero(order == smallest)[0])
    for at in range(first, min(first + MOST_SLOWER, found)):
        if excess(int(order[at])) <= 0:
            found = at
            break
    lowest = max(0, first - MOST_FASTER)
    for at in range(min(first, found) - 1, lowest - 1, -1):
        if excess(int(order[at])) <= 0:
            found = at
    untested = order[lowest] if lowest else order[found]
    return float(min(extra_s[untested], extra_s[order[found]])), int(order[found])
