"""The modes of the blocks of one pipeline rank with which it fits its device, in the least time.

A mode is what a block recomputes, and where the layout allows it whether what it keeps lies in host memory. Blocks of
one kind cost the same wherever they lie, so of each kind only numbers are chosen: how many lie on the host, how many
recompute everything, and how many the selective part. Which of them makes no difference to time, and least memory is
needed where those that hold least come first: behind them more has been freed by the time their backward pass runs,
and in a rank of several stages the stage that holds most micro-batches gains most.

On the host all blocks of a rank recompute the same: a second way there would save no memory of the device. Of the
node's memory each device may take an equal share.

Whether a rank fits the ledger says. It is asked for few of the choices: for those near the fastest that should fit by
what blocks keep alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from math import comb, prod

import numpy as np

from costmodels.vocabulary.choices import BlockMode, KeptOnHost
from costmodels.vocabulary.terms import Holding
from planner.evaluation.block_modes import MODES
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.in_flight import Flying
from planner.evaluation.rank_memory import BLOCKS_IN_TRANSIT
from planner.layout.columns import Array, Positions

# Choices of one rank whose ledgers are looked at: those that need least; and of those about to fit, the first that
# should, slower ones until one does, and faster ones until so many do not. Two blocks more or less that recompute are
# within these numbers.
MOST_SMALLEST, MOST_SLOWER, MOST_FASTER = 6, 12, 6
# Combinations of counts that are listed; ranks of so many kinds of blocks that there are more choose one mode a kind.
MOST_COMBINATIONS = 200_000

Stages = Mapping[int, range]  # the units of each stage that a rank holds


@dataclass(frozen=True)
class Choice:
    """The modes of the units of a rank.

    ``least_s``: no choice that fits takes less, in seconds a micro-batch more than in the modes of least time.
    ``slack_s``: this one takes so much more than that; nothing where no faster choice was left untried.
    """

    least_s: float
    slack_s: float
    modes: Mapping[int, BlockMode]


Mix = tuple[BlockMode, ...]  # modes that blocks of one kind may be in, those that hold least first


@dataclass(frozen=True)
class _Kind:
    """Blocks of one kind on a rank, those whose modes matter most first."""

    units: list[int]
    mix: Mix
    counts: Array  # [choices, modes but the last]: how many are in each
    extra_s: Array  # [choices]
    kept_bytes: Array  # [moments, choices]: activations at each of ``InFlight.moments``
    host_bytes: Array  # [choices]: the same in host memory, when the rank holds most micro-batches

    def modes(self, choice: int) -> dict[int, BlockMode]:
        """The mode of every unit."""
        counts = self.counts[choice].astype(int).tolist()
        modes = [mode for mode, number in zip(self.mix, counts, strict=False) for _ in range(number)]
        return dict(zip(self.units, modes + [self.mix[-1]] * (len(self.units) - len(modes)), strict=True))


class LeastRecompute:
    """Of one layout: every rank by itself, since its memory depends on its own units alone."""

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        self._is_free = len(evaluator.free_modes) > 1
        self._units = evaluator.table.units
        self._model = evaluator.memory_model
        self._found: dict[tuple[object, ...], tuple[float, float, tuple[BlockMode, ...]] | None] = {}
        # Of alike ranks the bytes of activations, a number a kind of backward pass: known to fit, and known not to.
        self._known_to_fit: dict[tuple[object, ...], tuple[float, ...]] = {}
        self._known_not_to: dict[tuple[object, ...], tuple[float, ...]] = {}

    def modes(self, starts: Sequence[int]) -> tuple[BlockMode, ...] | None:
        """The mode of every unit under this cut; None where some rank fits with no choice."""
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

    def slack_s(self, starts: Sequence[int]) -> float:
        """Seconds that a step in ``modes`` may take more than in others that fit and were not tried, at most."""
        if not self._is_free:
            return 0.0
        choices = [self.of_rank(rank, held) for rank, held in enumerate(self._evaluator.stages_of_ranks(starts))]
        m = self._evaluator.layout.num_microbatches
        return m * sum(choice.slack_s for choice in choices if choice is not None)

    def _fits_as_it_is(self, starts: Sequence[int]) -> bool:
        stages = self._evaluator.stages_of_ranks(starts)
        return all(self._evaluator.rank_fits(rank, held) for rank, held in enumerate(stages))

    def of_rank(self, rank: int, stages: Stages) -> Choice | None:
        """The choice of least time with which ``rank`` fits holding ``stages``; None where none fits."""
        units = [unit for held in stages.values() for unit in held]
        key = (
            self._evaluator.in_flight.like(rank),
            self._evaluator.place_of(rank),
            0 in units,
            tuple([tuple([self._units.kinds[unit] for unit in held]) for held in stages.values()]),
        )
        if key not in self._found:
            choice = self._least(rank, stages)
            modes = choice and tuple(choice.modes[unit] for unit in units)
            self._found[key] = None if choice is None or modes is None else (choice.least_s, choice.slack_s, modes)
        known = self._found[key]
        if known is None:
            return None
        least_s, slack_s, of_units = known
        return Choice(least_s, slack_s, dict(zip(units, of_units, strict=True)))

    def _least(self, rank: int, stages: Stages) -> Choice | None:
        evaluator = self._evaluator
        nothing = {unit: evaluator.modes[unit] for held in stages.values() for unit in held}
        if self._fits_with_nothing(rank, stages):
            return Choice(0.0, 0.0, nothing)
        mixes = self._mixes(nothing) if self._is_free else []
        found = [each for mix in mixes if (each := self._least_of(rank, stages, mix)) is not None]
        if not found:
            return None
        fastest, modes = min(found, key=lambda each: each[0].taken_s)
        least_s = min(each.least_s for each, _ in found)
        return Choice(least_s, fastest.taken_s - least_s, nothing | modes)

    def _fits_with_nothing(self, rank: int, stages: Stages) -> bool:
        """Of ranks of alike devices and units, one that holds less of activations than another that fits does fit."""
        kinds = [(0 in held, *(self._units.kinds[unit] for unit in held)) for held in stages.values()]
        activation_bytes = self._evaluator.activation_bytes(rank, stages)
        alike = self._evaluator.place_of(rank), activation_bytes.passes, *kinds
        activations = activation_bytes.numbers
        if _is_no_more(activations, self._known_to_fit.get(alike)):
            return True
        if (too_many := self._known_not_to.get(alike)) and _is_no_more(too_many, activations):
            return False
        fits = self._evaluator.excess_with(rank, stages, activation_bytes) <= 0
        (self._known_to_fit if fits else self._known_not_to)[alike] = activations
        return fits

    def _mixes(self, units: Iterable[int]) -> list[Mix]:
        """Without the host, and with each way to the host that is not slower and larger than another."""
        free = self._evaluator.free_modes
        here = tuple(mode for mode in reversed(free) if not isinstance(mode, KeptOnHost))
        kinds = sorted({self._units.kinds[unit] for unit in units if self._units.is_block[unit]})
        times = self._evaluator.extra_of_modes(0)[:, kinds]

        def is_worse(place: int, other: int) -> bool:
            slower, larger = times[place] - times[other], (self._on_host[place] - self._on_host[other])[kinds]
            both = np.concatenate([slower, larger])
            return bool((both >= 0).all() and (both > 0).any())

        ways = [mode for mode in free if isinstance(mode, KeptOnHost)]
        useful = [way for way in ways if not any(is_worse(MODES[way], MODES[other]) for other in ways)]
        return [here, *((way, *here) for way in useful)] if kinds else []

    def _least_of(self, rank: int, stages: Stages, mix: Mix) -> tuple[_Found, dict[int, BlockMode]] | None:
        """Of the choices of one mix, each of which has blocks on the host if the mix has any."""
        evaluator = self._evaluator
        kinds = self._kinds(rank, stages, mix)
        flying = evaluator.in_flight.moments(rank)
        extra_s, kept, host = np.zeros(1), np.zeros((len(flying), 1)), np.zeros(1)
        for kind in kinds:
            extra_s = (extra_s[:, None] + kind.extra_s).ravel()
            kept = (kept[:, :, None] + kind.kept_bytes[:, None]).reshape(len(flying), -1)
            host = (host[:, None] + kind.host_bytes).ravel()
        shape = [len(kind.extra_s) for kind in kinds]

        def modes_of(place: int) -> dict[int, BlockMode]:
            modes: dict[int, BlockMode] = {}
            for kind, choice in zip(kinds, np.unravel_index(place, shape), strict=True):
                modes |= kind.modes(int(choice))
            return modes

        def excess(place: int) -> float:
            return evaluator.excess_bytes(rank, stages, modes_of(place))

        rooms = np.array([self._room_bytes(rank, stages, kinds, moment) for moment in flying])
        fits = (kept <= rooms[:, None]).all(axis=0)
        needed = (kept + (rooms[0] - rooms)[:, None]).max(axis=0)  # as if there were no other moment than the first
        if isinstance(mix[0], KeptOnHost):
            fits &= (host > 0) & (host <= evaluator.host_room_bytes(stages))
        found = _least_that_fits(np.flatnonzero(fits), extra_s, needed * evaluator.reserve, excess)
        return None if found is None else (found, modes_of(found.place))

    def _kinds(self, rank: int, stages: Stages, mix: Mix) -> list[_Kind]:
        flying = [moment.counts for moment in self._evaluator.in_flight.moments(rank)]
        units = [
            (tuple([-number for number in numbers]), unit)
            for numbers, held in zip(zip(*flying, strict=True), stages.values(), strict=True)
            for unit in held
            if self._units.is_block[unit]
        ]
        groups: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for flies, unit in sorted(units):
            groups.setdefault(self._units.kinds[unit], []).append((flies, unit))
        every = _listed([len(found) for found in groups.values()], mix)
        places = [MODES[mode] for mode in mix]
        times = self._evaluator.extra_of_modes(rank)[places]  # [modes, kinds]
        times = times - times[-1]
        kinds: list[_Kind] = []
        for (kind, found), counts in zip(groups.items(), every, strict=True):
            each = [[0.0] * len(flying), *([-number for number in numbers] for numbers, _ in found)]
            flies = np.cumsum(each, axis=0)  # [units, moments]
            ends = np.cumsum(counts, axis=1).astype(int).T
            before = [np.zeros(len(counts), dtype=int), *ends]
            behind = [*ends, np.full(len(counts), len(found))]
            held = np.array([flies[b] - flies[a] for a, b in zip(before, behind, strict=True)]).transpose(2, 0, 1)
            kinds.append(
                _Kind(
                    [unit for _, unit in found],
                    mix,
                    counts,
                    extra_s=_summed(counts.T, times[:-1, kind]),
                    kept_bytes=np.array([_summed(of_moment, self._kept[places, kind]) for of_moment in held]),
                    host_bytes=_summed(held[0], self._on_host[places, kind]),
                )
            )
        return kinds

    @cached_property
    def _on_host(self) -> Array:
        return self._evaluator.bytes_on_host_of_modes()

    @cached_property
    def _kept(self) -> Array:
        return self._evaluator.holding_of_modes(Holding.KEPT)

    @cached_property
    def _kept_by_others(self) -> list[float]:
        """Of each kind, in the mode of units that are no blocks."""
        kept: list[float] = self._kept[0].tolist()
        return kept

    @cached_property
    def _working(self) -> Array:
        return self._evaluator.holding_of_modes(Holding.WORKING)

    def _room_bytes(self, rank: int, stages: Stages, kinds: Sequence[_Kind], moment: Flying) -> float:
        """At most so many bytes of blocks' activations fit then: the device less what is there under every choice."""
        in_kinds = {unit for kind in kinds for unit in kind.units}
        others = sum(
            [
                number * self._kept_by_others[self._units.kinds[unit]]
                for number, held in zip(moment.counts, stages.values(), strict=True)
                for unit in held
                if unit not in in_kinds
            ]
        )
        mixes = {kind.mix[0] for kind in kinds}
        in_transit = [self._on_host[MODES[mode], self._units.kinds[u]] for mode in mixes for u in in_kinds]
        # The last unit of a stage is at work while nothing behind it has been freed. Of several stages it is not known
        # which one's backward pass goes on when the rank holds most.
        working = min(float(self._working[:, self._units.kinds[held[-1]]].min()) for held in stages.values() if held)
        passing = working + BLOCKS_IN_TRANSIT * float(min(in_transit, default=0.0))
        return self._evaluator.room_bytes(rank, stages, moment.made) - passing - others


def _is_no_more(bytes_of: tuple[float, ...], most: tuple[float, ...] | None) -> bool:
    return most is not None and all(a <= b for a, b in zip(bytes_of, most, strict=True))


def _listed(numbers: Sequence[int], mix: Mix) -> list[Array]:
    """For each kind of so many blocks how many may be in every mode of ``mix`` but the last; [choices, modes] each."""
    if prod(comb(number + len(mix) - 1, len(mix) - 1) for number in numbers) <= MOST_COMBINATIONS:
        return [_all_counts(number, len(mix)) for number in numbers]
    if isinstance(mix[0], KeptOnHost) and prod(len(mix) ** 2 * number for number in numbers) <= MOST_COMBINATIONS:
        return [_counts_of_two(number, len(mix)) for number in numbers]
    return [np.vstack([number * np.eye(len(mix) - 1), np.zeros((1, len(mix) - 1))]) for number in numbers]


@lru_cache(maxsize=256)
def _all_counts(number: int, num_modes: int) -> Array:
    if num_modes == 1:
        return np.zeros((1, 0))
    every = np.indices((number + 1,) * (num_modes - 1)).reshape(num_modes - 1, -1).T
    return every[every.sum(axis=1) <= number].astype(np.float64)


def _counts_of_two(number: int, num_modes: int) -> Array:
    """Every number of blocks in one mode, and the others in another."""
    first = np.arange(number + 1, dtype=np.float64)[:, None]
    modes = np.eye(num_modes)
    mixed = [first * modes[a] + (number - first) * modes[b] for a, b in combinations(range(num_modes), 2)]
    return np.unique(np.concatenate(mixed), axis=0)[:, :-1]


def _summed(numbers: Array, each: Array) -> Array:
    """``numbers`` [modes, choices] of things that are ``each`` [modes], added up in order."""
    found = np.zeros(numbers.shape[1])
    for number, one in zip(numbers, each, strict=True):
        found = found + number * one
    return found


@dataclass(frozen=True)
class _Found:
    """Of many choices the fastest that was found to fit; none that fits takes less than ``least_s``."""

    least_s: float
    taken_s: float
    place: int


def _least_that_fits(places: Positions, extra_s: Array, kept: Array, excess: Callable[[int], float]) -> _Found | None:
    """Of the choices at ``places`` the fastest that was found to fit.

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
    at, num_too_large = min(first, found), 0
    while at > 0 and num_too_large < MOST_FASTER:
        at -= 1
        if excess(int(order[at])) <= 0:
            found = at
        else:
            num_too_large += 1
    taken_s = float(extra_s[order[found]])
    # Before ``at`` nothing was tried.
    return _Found(float(extra_s[order[0]]) if at > 0 else taken_s, taken_s, int(order[found]))
