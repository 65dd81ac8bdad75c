"""The best shares of the batch for replicas on unlike devices, put together from the prices of each group by itself.

The micro-batches of a layout with shares take as long as its slowest group, and all groups recompute alike. So with
T_g(b) the time of group g with micro-batches of b sequences, in the modes that are best for this group alone, those of
sizes (b_1, b_2, ...) take no less than the largest T_g(b_g). Of alike layouts, a family, every list of sizes that makes
up the batch is bounded so: at first by a bound of T_g(b), as ``solver.bounds`` has it for this group alone, and in that
order as long as it is below the best price; then by T_g(b) itself, each priced once, and by what one group must
recompute so that another fits (``_Part.beside``). What may still be better is priced whole, in the modes of each group.

A group that does not fit with some size does not with a larger one, which holds more of everything.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.choices import BlockMode, ContextMethod, Offload, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.block_modes import MODES
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.shares import evaluator_of
from planner.layout.columns import Array, Columns, Positions
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout
from planner.solver.best import Best
from planner.solver.bounds import bounds
from planner.solver.cutting import Pricer
from planner.solver.search import Outcome
from planner.table.cost_table import CostTable

# Groups that are priced with a size of micro-batch, some milliseconds each; beyond that what is open stays open.
MOST_PRICED = 3000
# Lists of one family that are looked at, and that are tried out to find these: with more groups there may be millions.
MOST_LISTS, MOST_TRIED = 64, 2**16
WHOLE = (0,)  # the only cut


class _Alike(NamedTuple):
    """Layouts of one family differ in the sizes of micro-batches alone."""

    mesh: Mesh
    zero_stage: int
    num_microbatches: int
    schedule: ScheduleName
    virtual_stages: int
    recompute: Recompute | None
    sequence_parallel: bool
    offload: Offload
    cp_method: ContextMethod
    offloads_activations: bool


class _GroupsKey(NamedTuple):
    groups: tuple[str, ...]


class _Family(NamedTuple):
    """Lists of sizes that make up the batch, [lists, groups], with what each takes at least, the likeliest first."""

    part: Layout  # any of its groups with any size
    number: int  # of lists
    sizes: Positions
    least_s: Array
    rest_s: float  # that the lists which are not here take at least

    @property
    def floor_s(self) -> float:
        """That any list takes at least."""
        return min([*self.least_s[:1].tolist(), self.rest_s])


class _Part(NamedTuple):
    """One group with one size, in the modes of least time with which it fits: the parts of a step."""

    modes: tuple[BlockMode, ...]
    least_s: float  # of all micro-batches if nothing is recomputed
    extra_s: float  # that any modes with which it fits take more at least
    extra_of_modes: Array  # of one block in each mode, [modes, kinds]
    data_once_s: float  # no mode leaves less
    update_s: float

    def beside(self, other: _Part) -> float:
        """What its micro-batches take at least in modes in which another group fits.

        These take the other group ``other.extra_s`` or more, and for each second that a block of it takes more, the
        same block of this group takes no less than some number of seconds more.
        """
        takes_more = other.extra_of_modes > 0
        each = self.extra_of_modes[takes_more] / other.extra_of_modes[takes_more]
        return self.least_s + max(0.0, float(each.min(initial=np.inf)) if other.extra_s > 0 else 0.0) * other.extra_s


def with_shares(
    table: CostTable, parts: Columns[Layout], outcome: Outcome, global_batch_size: int, deadline: Deadline
) -> Outcome:
    """``outcome`` and the layouts with shares that may be faster. ``parts``: as ``space.shares`` lists them.

    OutOfTimeError where the deadline is over before it is known which these may be.
    """
    walk = _Walk(table, outcome)
    enough_s = np.inf if walk.best.time_s is None else walk.best.time_s
    families = _families(table, parts, global_batch_size, _least_of_parts(table, parts, enough_s, deadline))
    for family in families:
        if walk.is_over(family.floor_s) or deadline.is_over():
            walk.leave(family.floor_s)
            break
        walk.visit(family)
    best, bound_s = walk.best, min(outcome.bound_s, walk.open_s)
    return replace(
        outcome,
        best=best.best,
        ranking=best.ranking(),
        bound_s=bound_s if best.time_s is None else min(bound_s, best.time_s),
        is_exhausted=bound_s == np.inf if best.time_s is None else best.beats(bound_s),
        num_candidates=outcome.num_candidates + sum(family.number for family in families),
        num_visited=outcome.num_visited + walk.num_visited,
    )


def priced(table: CostTable, layout: Layout) -> Evaluated | None:
    """One layout with shares in the best modes that are known; None where it does not fit."""
    found = [_part(table, part) for part in layout.parts]
    return _together(table, layout, [part for part in found if part is not None]) if None not in found else None


class _Walk:
    """What is known of the families so far."""

    def __init__(self, table: CostTable, outcome: Outcome) -> None:
        self._table = table
        self.best = Best()
        for each in outcome.ranking:
            self.best.keep(each)
        self.best.best = outcome.best
        self.open_s = np.inf  # no list of sizes takes less, of those that were left or priced
        self.num_visited = 0
        self._priced: dict[Layout, _Part | None] = {}
        self._too_large: dict[Layout, int] = {}  # a size with which a group does not fit

    def leave(self, bound_s: float) -> None:
        """What takes ``bound_s`` or more is not looked at."""
        self.open_s = min(self.open_s, bound_s)

    def is_over(self, bound_s: float) -> bool:
        """Whether nothing with this bound, or a higher one, need be looked at, or as much was as may be."""
        return bound_s == np.inf or self.best.beats(bound_s) or len(self._priced) >= MOST_PRICED

    def visit(self, family: _Family) -> None:
        """Prices every list of sizes that may be better than the best."""
        for sizes, least_s in zip(family.sizes.tolist(), family.least_s.tolist(), strict=True):
            if self.is_over(least_s):
                self.leave(least_s)
                return
            layout = family.part._replace(groups=self._groups, shares=tuple(sizes), micro_batch_size=max(sizes))
            parts = [self._part_of(part) for part in layout.parts]
            fitting = [part for part in parts if part is not None]
            if len(fitting) < len(parts):
                continue
            bound_s = _least_s(fitting)
            self.leave(bound_s)
            if not self.best.beats(bound_s):
                self.num_visited += 1
                self.best.keep(_together(self._table, layout, fitting))
        self.leave(family.rest_s)

    @property
    def _groups(self) -> tuple[str, ...]:
        return tuple(device.name for device in self._table.cluster.devices[1:])

    def _part_of(self, part: Layout) -> _Part | None:
        """One group with one size; None where it does not fit."""
        # Memory depends on whether there is more than one micro-batch, not on how many.
        alike = part._replace(micro_batch_size=0, num_microbatches=min(2, part.num_microbatches))
        if part.micro_batch_size >= self._too_large.get(alike, np.inf):
            return None
        if part not in self._priced:
            self._priced[part] = _part(self._table, part)
            if self._priced[part] is None:
                self._too_large[alike] = part.micro_batch_size
        return self._priced[part]


def _part(table: CostTable, part: Layout) -> _Part | None:
    pricer = Pricer(table, part)
    found = pricer.price(WHOLE)
    if found is None:
        return None
    evaluator = pricer.evaluator.with_modes(found.modes)
    (data_s, update_s), once_s = evaluator.once_a_step(WHOLE)[0], float(evaluator.least_once_a_step_s(0)[0, -1])
    micro_batches_s, extra_of_modes = found.step_time_s - data_s - update_s, evaluator.extra_of_modes(0)
    if evaluator.hides_exchanges:  # behind what is recomputed, too
        extra_of_modes = np.zeros_like(extra_of_modes)
    places = [MODES[mode] for mode in found.modes]
    extra_s = part.num_microbatches * float(extra_of_modes[places, list(table.units.kinds)].sum())
    own = micro_batches_s - extra_s, max(0.0, extra_s - pricer.least.slack_s(WHOLE)), extra_of_modes
    return _Part(found.modes, *own, min(data_s, once_s - update_s), update_s)


def _least_s(parts: list[_Part]) -> float:
    """What all groups together take at least, whatever they recompute: the longest of each thing that all wait for."""
    micro_batches_s = max(part.beside(other) for part in parts for other in parts)
    data_s, update_s = max(part.data_once_s for part in parts), max(part.update_s for part in parts)
    return (micro_batches_s + data_s + update_s) * (1 - 1e-12)


def _together(table: CostTable, layout: Layout, parts: list[_Part]) -> Evaluated | None:
    """All groups in the modes that are best for one of them, of which some fit all; None where none do."""
    modes_of = dict.fromkeys(part.modes for part in parts)
    tried = (evaluator_of(table, layout, modes).evaluate(WHOLE) for modes in modes_of)
    return min((each for each in tried if each.fits), key=lambda each: each.step_time_s, default=None)


def _families(table: CostTable, parts: Columns[Layout], global_batch_size: int, least_s: Array) -> list[_Family]:
    """Every family in the order of what it takes at least; ``least_s``: that each part takes at least."""
    keys, family_of = parts.by(_Alike)
    groups = table.cluster.devices[1:]
    names = [group.name for group in groups]
    group_of = parts.each(_GroupsKey, lambda key: names.index(key.groups[0])).astype(np.intp)
    size_of = parts.numbers("micro_batch_size").astype(np.intp)
    by_size = np.full((len(keys), len(names), int(size_of.max(initial=0)) + 1), np.nan)  # not a number: not listed
    by_size[family_of, group_of, size_of] = least_s
    one_of = np.zeros(len(keys), dtype=np.intp)
    one_of[family_of] = np.arange(len(parts))
    found: list[_Family] = []
    for key, part, seconds in zip(keys, parts.at(one_of), by_size, strict=True):
        replicas = tuple(group.num_devices // (key.mesh.cp * key.mesh.tp) for group in groups)
        found.append(_family(part, replicas, global_batch_size // key.num_microbatches, seconds))
    return sorted((each for each in found if each.number), key=lambda each: each.floor_s)


def _family(part: Layout, replicas: tuple[int, ...], num_sequences: int, seconds: Array) -> _Family:
    """``seconds``: that each group takes at least with each size, [groups, sizes]; NaN for sizes that it has not."""
    most = tuple((~np.isnan(seconds)).sum(axis=1).tolist())
    if prod(most[:-1]) > MOST_TRIED:
        none, floor_s = np.zeros((0, len(replicas)), dtype=np.intp), _floor_s(replicas, num_sequences, seconds)
        return _Family(part, prod(most[:-1]), none, np.zeros(0), floor_s)
    sizes = _lists(num_sequences, replicas, most)
    of_lists = seconds[np.arange(len(replicas)), sizes].max(axis=1)
    order = np.argsort(of_lists, kind="stable")
    rest_s = of_lists[order[MOST_LISTS]] if len(order) > MOST_LISTS else np.inf
    order = order[:MOST_LISTS]
    return _Family(part, len(sizes), sizes[order], of_lists[order], float(rest_s))


def _floor_s(replicas: tuple[int, ...], num_sequences: int, seconds: Array) -> float:
    """The least time in which all replicas can have so many sequences, and more: no list of sizes takes less."""
    sizes, times = np.arange(seconds.shape[1]), np.sort(seconds[np.isfinite(seconds)])

    def is_enough(limit_s: float) -> bool:
        return bool(np.where(seconds <= limit_s, sizes, 0).max(axis=1) @ replicas >= num_sequences)

    place = bisect_left(times, True, key=is_enough)
    return float(times[place]) if place < len(times) else np.inf


@lru_cache(maxsize=64)
def _lists(num_sequences: int, replicas: tuple[int, ...], most: tuple[int, ...]) -> Positions:
    """Every list of sizes, up to ``most`` of each group, with which all replicas have so many sequences together."""
    ranges = np.meshgrid(*(np.arange(1, size + 1) for size in most[:-1]), indexing="ij")
    others = np.stack(ranges, axis=-1).reshape(-1, len(replicas) - 1)
    last, rest = np.divmod(num_sequences - others @ np.array(replicas[:-1]), replicas[-1])
    fits = (rest == 0) & (last >= 1) & (last <= most[-1])
    return np.concatenate([others, last[:, None]], axis=1)[fits].astype(np.intp)


def _least_of_parts(table: CostTable, parts: Columns[Layout], enough_s: float, deadline: Deadline) -> Array:
    """What a step of each group by itself takes at least, and infinitely long where it needs more memory than it has.

    Where some time is enough, not all of the time is counted of what takes it or more.
    """
    found, (keys, which) = np.zeros(len(parts)), parts.by(_GroupsKey)
    for code, key in enumerate(keys):
        places = np.flatnonzero(which == code)
        alone = table.on_devices(table.cluster.place_of(key.groups[0]))
        lower = bounds(alone, parts.take(places).with_each("groups", [()]), enough_s, deadline)
        lacks = (lower.step_time_s < enough_s) & (lower.memory_bytes > alone.cluster.devices[0].memory_bytes)
        found[places] = np.where(lacks, np.inf, lower.step_time_s * (1 - 1e-12))
    return found
