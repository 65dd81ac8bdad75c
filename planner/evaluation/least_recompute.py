"""The modes of the blocks of one pipeline rank with which it fits its device, in the least time.

A mode is what a block recomputes, and where the layout allows it whether what it keeps lies in host memory. Blocks of
one kind cost the same wherever they lie, so of each kind only numbers are chosen: how many lie on the host, how many
recompute everything, and how many the selective part. Which of them makes no difference to time, and least memory is
needed where those that hold least come first: behind them more has been freed by the time their backward pass runs,
and in a rank of several stages the stage that holds most micro-batches gains most.

On the host all blocks of a rank recompute the same: a second way there would save no memory of the device. Of the
node's memory each device may take an equal share.

Whether a rank fits the ledger says. It is asked for few of the choices: what does not fit rules out all that need no
less (``choices_in_order``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations, compress
from math import comb, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels.vocabulary.choices import BlockMode, KeptOnHost
from costmodels.vocabulary.terms import Holding
from planner.evaluation.block_modes import MODES
from planner.evaluation.choices_in_order import Choices, fastest_that_fits
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.in_flight import Flying
from planner.evaluation.rank_memory import BLOCKS_IN_TRANSIT
from planner.layout.columns import Array

# Combinations of counts that are listed; ranks of so many kinds of blocks that there are more choose one mode a kind.
MOST_COMBINATIONS = 200_000

Stages = Mapping[int, range]  # the units of each stage that a rank holds


@dataclass(frozen=True)
class Choice:
    """The modes of the units of a rank.

    ``least_s``: no choice that fits takes less, in seconds a micro-batch more than in the modes of least time.
    ``slack_s``: this one takes so much more than that; mostly nothing.
    """

    least_s: float
    slack_s: float
    modes: Mapping[int, BlockMode]


Mix = tuple[BlockMode, ...]  # modes that blocks may be in, those that hold least first
# Blocks of each kind, before each the negative of what is in flight of it at every moment.
_Blocks: TypeAlias = dict[int, list[tuple[tuple[int, ...], int]]]


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
        self._mixes_of: dict[tuple[int, ...], list[Mix]] = {}
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
        """Seconds that a step in ``modes`` may take more than in others that may fit, at most."""
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
        kinds = sorted({self._units.kinds[unit] for unit in nothing if self._units.is_block[unit]})
        mixes = self._mixes(tuple(kinds)) if kinds and self._is_free else []
        found = [each for mix in mixes if (each := self._least_of(rank, stages, mix)) is not None]
        if not found:
            return None
        fastest = min(found, key=lambda each: each.least_s + each.slack_s)
        least_s = min(each.least_s for each in found)
        slack_s = fastest.least_s + fastest.slack_s - least_s
        return Choice(least_s, slack_s, {**nothing, **fastest.modes})

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

    def _mixes(self, kinds: tuple[int, ...]) -> list[Mix]:
        """Without the host, and with each way to the host; without modes than which another is better for all kinds."""
        if kinds not in self._mixes_of:
            free, times = self._evaluator.free_modes, self._evaluator.extra_of_modes(0)[..., None]
            needs = [times, self._lasting, self._at_work + self._kept[..., None]]
            here = self._useful([mode for mode in reversed(free) if not isinstance(mode, KeptOnHost)], kinds, needs)
            to_host = [mode for mode in free if isinstance(mode, KeptOnHost)]
            ways = self._useful(to_host, kinds, [times, self._on_host[..., None]])
            self._mixes_of[kinds] = [here, *((way, *here) for way in ways)]
        return self._mixes_of[kinds]

    @staticmethod
    def _useful(modes: Sequence[BlockMode], kinds: Sequence[int], costs: Sequence[Array]) -> Mix:
        """Modes of which no other is as good in all ``costs``, [modes, kinds, numbers] each, and better in one."""
        of = {mode: np.concatenate([each[MODES[mode], kinds] for each in costs], axis=-1) for mode in modes}

        def is_worse(mode: BlockMode, other: BlockMode) -> bool:
            more = of[mode] - of[other]
            return bool((more >= 0).all() and (more > 0).any())

        return tuple([mode for mode in modes if not any(is_worse(mode, other) for other in modes)])

    def _least_of(self, rank: int, stages: Stages, mix: Mix) -> Choice | None:
        """Of the choices of one mix, each of which has blocks on the host if the mix has any."""
        evaluator = self._evaluator
        flying = self._flying(rank, stages, mix)
        groups = self._blocks(stages, flying)
        kinds = self._kinds(rank, groups, mix)
        extra_s, kept, host = np.zeros(1), np.zeros((len(flying), 1)), np.zeros(1)
        for kind in kinds:
            extra_s = (extra_s[:, None] + kind.extra_s).ravel()
            kept = (kept[:, :, None] + kind.kept_bytes[:, None]).reshape(len(flying), -1)
            host = (host[:, None] + kind.host_bytes).ravel()
        shape = [len(kind.extra_s) for kind in kinds]
        is_whole = prod(shape) == prod(_num_combinations(len(kind.units), mix) for kind in kinds)
        rooms = np.array([self._room_bytes(rank, stages, kinds, moment) for moment in flying])
        fits = (kept <= rooms[:, None]).all(axis=0)
        needed = (kept + (rooms[0] - rooms)[:, None]).max(axis=0)  # as if there were no other moment than the first
        if isinstance(mix[0], KeptOnHost):
            fits &= (host > 0) & (host <= evaluator.host_room_bytes(stages))
        places = np.flatnonzero(fits)
        picked = np.unravel_index(places, shape)
        ends = [kind.counts[choice].cumsum(axis=1) for kind, choice in zip(kinds, picked, strict=True)]
        numbers = extra_s[places], needed[places] * evaluator.reserve, np.hstack(ends)
        choices = Choices(*numbers, *self._order(kinds))

        def modes_of(place: int) -> dict[int, BlockMode]:
            modes: dict[int, BlockMode] = {}
            for kind, choice in zip(kinds, picked, strict=True):
                modes |= kind.modes(int(choice[place]))
            return modes

        found = fastest_that_fits(choices, lambda place: evaluator.excess_bytes(rank, stages, modes_of(place)))
        if found is None:
            return None
        taken_s = float(choices.extra_s[found.place])
        least_s = found.least_s if is_whole else min(found.least_s, self._relaxed_s(rank, groups, mix, rooms))
        return Choice(least_s, taken_s - least_s, modes_of(found.place))

    def _flying(self, rank: int, stages: Stages, mix: Mix) -> list[Flying]:
        """Moments that a rank must have memory for, and one of that stage's pass in which most comes and goes."""
        held, least = list(stages.values()), self._evaluator.at_work_at_least(mix)
        most = max(range(len(held)), key=lambda place: least.passing_bytes(held, place) if held[place] else -1.0)
        found, of_most = self._evaluator.in_flight.moments(rank), self._evaluator.in_flight.at_stage(rank, most)
        return [*found, *([of_most] if of_most else [])]

    def _order(self, kinds: Sequence[_Kind]) -> tuple[NDArray[np.bool], float]:
        """As of ``Choices``: steps from each mode of a kind to the next, and what is less at work in another mode."""
        is_ordered: list[bool] = []
        on_host: list[float] = []
        spread_bytes = 0.0
        for kind in kinds:
            of = [MODES[mode] for mode in kind.mix], self._units.kinds[kind.units[0]]
            is_ordered += [bool((step >= 0).all()) for step in np.diff(self._lasting[of], axis=0)]
            working, kept = self._at_work[of], self._kept[of]
            for a, b in combinations(range(len(kind.mix)), 2):
                # A block may go from the mode that keeps less to that which keeps more, or change places with another.
                less = [*(working[a] - working[b] + kept[a] - kept[b]), *(working[b] - working[a])]
                spread_bytes = max(spread_bytes, *less)
            on_host.append(float(self._on_host[of].max()))
        # Some block stays on the host, of whichever kind.
        spread_bytes += BLOCKS_IN_TRANSIT * float(np.ptp(on_host))
        return np.array(is_ordered, dtype=bool), spread_bytes * self._evaluator.reserve

    def _relaxed_s(self, rank: int, groups: _Blocks, mix: Mix, rooms: Array) -> float:
        """At least so long every combination takes whose blocks keep no more than ``rooms``, of each moment.

        A price for each byte in the room of a moment, at which every block by itself is in its best mode.
        """
        places, blocks = [MODES[mode] for mode in mix], list(chain.from_iterable(groups.values()))
        of = [self._units.kinds[unit] for _, unit in blocks]
        times = self._evaluator.extra_of_modes(rank)[places][:, of]
        times -= times.min(axis=0)
        least_s = 0.0
        for room, flies in zip(rooms.tolist(), -np.array([flies for flies, _ in blocks]).T, strict=True):
            kept = self._kept[places][:, of] * flies
            pairs = list(combinations(range(len(mix)), 2))
            slower, smaller = (np.array([each[a] - each[b] for a, b in pairs]) for each in (times, -kept))
            prices = np.unique(slower[(smaller > 0) & (slower > 0)] / smaller[(smaller > 0) & (slower > 0)])
            found = [float((times + price * kept).min(axis=0).sum() - price * room) for price in prices.tolist()]
            least_s = max([least_s, *found])
        return least_s * (1 - 1e-12)

    def _blocks(self, stages: Stages, flying: Sequence[Flying]) -> _Blocks:
        """Where most is in flight at moments of any stage's pass, blocks come first."""
        is_of_any = [moment.stage is None for moment in flying]
        units = [
            (tuple([-number for number in numbers]), unit)
            for numbers, held in zip(
                zip(*[moment.counts for moment in flying], strict=True), stages.values(), strict=True
            )
            for unit in held
            if self._units.is_block[unit]
        ]
        groups: _Blocks = {}
        for flies, unit in sorted(units, key=lambda each: (tuple(compress(each[0], is_of_any)), each[1])):
            groups.setdefault(self._units.kinds[unit], []).append((flies, unit))
        return groups

    def _kinds(self, rank: int, groups: _Blocks, mix: Mix) -> list[_Kind]:
        every = _listed([len(found) for found in groups.values()], mix)
        times = self._evaluator.extra_of_modes(rank)  # [modes, kinds]
        kinds: list[_Kind] = []
        for (kind, found), counts in zip(groups.items(), every, strict=True):
            own: Mix = tuple(sorted(mix, key=lambda mode: float(self._kept[MODES[mode], kind])))
            places = [MODES[mode] for mode in own]
            extra = times[places, kind] - times[places, kind].min()
            each = [[0.0] * len(found[0][0]), *([-number for number in numbers] for numbers, _ in found)]
            flies = np.cumsum(each, axis=0)  # [units, moments]
            ends = np.cumsum(counts, axis=1).astype(int).T
            before = [np.zeros(len(counts), dtype=int), *ends]
            behind = [*ends, np.full(len(counts), len(found))]
            held = np.array([flies[b] - flies[a] for a, b in zip(before, behind, strict=True)]).transpose(2, 0, 1)
            kinds.append(
                _Kind(
                    [unit for _, unit in found],
                    own,
                    counts,
                    extra_s=_summed(counts.T, extra[:-1] - extra[-1]) + len(found) * extra[-1],
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
    def _lasting(self) -> Array:
        """What a rank needs no less of where its blocks hold no less, [modes, kinds, numbers]."""
        of, kept = self._evaluator.holding_of_modes, self._kept
        others = [Holding.LOSS, Holding.BUFFER, Holding.COLLECTIVE, Holding.QUEUED, Holding.STRANDED]
        return np.stack([kept, kept + of(Holding.WAITING), *map(of, others)], axis=-1)

    @cached_property
    def _at_work(self) -> Array:
        """What a block holds besides while its backward pass runs, [modes, kinds, numbers]."""
        return np.stack(list(map(self._evaluator.holding_of_modes, (Holding.WORKING, Holding.GRADIENTS))), axis=-1)

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
        in_transit = [self._on_host[MODES[kind.mix[0]], self._units.kinds[u]] for kind in kinds for u in kind.units]
        room_bytes = self._evaluator.room_bytes(rank, stages, moment, kinds[0].mix)
        return room_bytes - BLOCKS_IN_TRANSIT * float(min(in_transit, default=0.0)) - others


def _is_no_more(bytes_of: tuple[float, ...], most: tuple[float, ...] | None) -> bool:
    return most is not None and all(a <= b for a, b in zip(bytes_of, most, strict=True))


def _listed(numbers: Sequence[int], mix: Mix) -> list[Array]:
    """For each kind of so many blocks how many may be in every mode of ``mix`` but the last; [choices, modes] each."""
    if prod(_num_combinations(number, mix) for number in numbers) <= MOST_COMBINATIONS:
        return [_all_counts(number, len(mix)) for number in numbers]
    if isinstance(mix[0], KeptOnHost) and prod(len(mix) ** 2 * number for number in numbers) <= MOST_COMBINATIONS:
        return [_counts_of_two(number, len(mix)) for number in numbers]
    return [np.vstack([number * np.eye(len(mix) - 1), np.zeros((1, len(mix) - 1))]) for number in numbers]


def _num_combinations(number: int, mix: Mix) -> int:
    return comb(number + len(mix) - 1, len(mix) - 1)


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
