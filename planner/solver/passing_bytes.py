"""What a pipeline rank needs at least besides states and kept activations: software, and a unit at work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import PLACE, Element, Holding
from planner.evaluation.fsdp_moments import Sharding, UnitAtWork, most_bytes
from planner.evaluation.states import held_elements
from planner.layout.columns import Array, Positions
from planner.solver.memory_bounds import NumMicroBatches
from planner.solver.time_bounds import AlikeLayouts

_SHARDS_PARAMETERS = np.array([stage.shards_parameters for stage in ZERO_STAGES])
_SHARDS_GRADIENTS = np.array([stage.shards_gradients for stage in ZERO_STAGES])


class PassingBytes:
    """What ranks of many layouts need besides states and kept activations; one number a layout."""

    def __init__(self, of: AlikeLayouts, held: Array) -> None:
        """``held``: of one unit in every mode that blocks may take, [layouts, modes, kinds, Holding]."""
        self._of, self._held = of, held
        self._found: dict[tuple[tuple[int, ...], tuple[int, ...]], Array] = {}

    def of_some(self, of: AlikeLayouts, places: Positions) -> PassingBytes:
        """The same of the layouts at these places, ``of``, at another moment: what comes and goes there is the same."""
        found = PassingBytes(of, self._held[places])
        found._found.update({kinds: each[places] for kinds, each in self._found.items()})
        return found

    def while_at_work(self, ends: tuple[int, ...]) -> tuple[Array, Array]:
        """What a rank needs at least while a unit is at work, and one that holds two blocks in a stage.

        ``ends``: kinds of the ends of the model that it holds. A stage needs no less than its last units alone,
        whatever each recomputes. Of a rank's only stage the last unit may be of any kind. Of several stages it counts
        which one's backward pass goes on when the rank holds the micro-batches that are counted. Where whole passes
        interleave that is the first pass, through its last stage, which ends with a block, a unit that stands between
        blocks and the model's end, or the model's end; or the first through its lowest stage, which may end with any
        but the model's end, of layouts that are ``at_lowest``. Otherwise it may be any, so the least counts. The
        gradients that wait are those of the pass before, if there is one (``_waiting``).
        """
        units, rules = self._of.table.units, self._of.schedule.rules
        pairs = list(zip(units.kinds, units.is_block, strict=True))
        between = [kind for kind, is_block in pairs[1:-1] if not is_block]
        blocks = sorted({kind for kind, is_block in pairs if is_block})
        has_one, is_last_stage = self._of.virtual_stages == 1, rules.runs_in_rounds and not rules.splits_backward
        of_ends = [] if is_last_stage else ends
        any_kind = range(len(units.counts)) if has_one else sorted({*blocks, *between, *of_ends})
        first = ends[:1] if units.kinds[0] in ends[:1] else (*blocks, *between, *(ends if has_one else ()))
        few = np.minimum.reduce([self._least(each, first=first) for each in any_kind])
        of_any = np.minimum.reduce([self._least(each, first=first) for each in sorted({*blocks, *between, *ends})])
        if units.kinds[-1] in ends and (has_one or is_last_stage):
            few = np.maximum(few, self._least(units.kinds[-1], first=first))
        few = np.where(self._of.at_lowest, np.minimum(few, of_any), few)
        two = {(one[0], other[0]) for one, other in pairwise(pairs) if one[1] and other[1]}
        if between or not has_one or not two:
            return few, few
        return few, np.maximum(few, np.minimum.reduce([self._least(*each, first=first) for each in sorted(two)]))

    def of_each_kind(self) -> Array:
        """What comes and goes at least while a unit of each kind is at work, and what it kept; [layouts, kinds]."""
        nothing, found = np.zeros(len(self._of.num_microbatches)), list[Array]()
        for kind in range(len(self._of.counts)):
            unit, _, _ = self._unit(kind, 0, 1)
            found.append((self._passing((kind,), nothing) + unit.kept * self._of.reserve[:, None]).min(axis=1))
        return np.stack(found, axis=1)

    def _least(self, *kinds: int, first: tuple[int, ...]) -> Array:
        """The least over all modes of what comes and goes in the backward pass of a stage of these kinds of units.

        ``first``: kinds of which one is the first unit of the rank's lowest stage.
        """
        if (kinds, first) not in self._found:
            passing = self._passing(kinds, self._waiting(first))
            self._found[kinds, first] = passing.reshape(len(passing), -1).min(axis=1)
        return self._found[kinds, first]

    def _passing(self, kinds: tuple[int, ...], waiting: Array) -> Array:
        """What comes and goes then, [layouts, modes of each unit]; ``waiting``: elements whose gradients wait."""
        whole = (slice(None), *[None] * len(kinds))
        units = [self._unit(kind, place, len(kinds)) for place, kind in enumerate(kinds)]
        at_work = [unit for unit, _, _ in units]
        has_moments = self._of.table.framework.has_fsdp_moments
        needed = self._of_moments(at_work, waiting) if has_moments else self._at_work(at_work)
        buffers, stranded = (np.maximum.reduce(np.broadcast_arrays(*[u[k] for u in units])) for k in (1, 2))
        return (needed + buffers) * self._of.reserve[whole] + stranded

    def _waiting(self, first: tuple[int, ...]) -> Array:
        """Elements whose gradients wait at least in one of the moments at which a rank holds most micro-batches.

        None before the first backward pass. Where the moment comes again the pass before went through the rank's
        lowest stage, and its first unit is of one of these kinds.
        """
        return np.where(self._comes_again, self._sizes[:, list(first)].min(axis=1), 0.0)

    @cached_property
    def _comes_again(self) -> Array:
        rules, p, v = self._of.schedule.rules, self._of.pp, self._of.virtual_stages
        return self._of.layouts.each(NumMicroBatches, lambda key: rules.peak_comes_again(p, v, key.num_microbatches))

    def _unit(self, kind: int, place: int, number: int) -> tuple[UnitAtWork, Array, Array]:
        """One of so many units of a stage, and its buffers and stranded copies, [layouts, modes of each unit]."""
        units = self._of.table.units
        num_modes = self._held.shape[1] if units.is_block[units.kinds.index(kind)] else 1  # all others are the same
        shape = [len(self._held), *[num_modes if at == place else 1 for at in range(number)]]
        held = self._held[:, :num_modes, kind]

        def of(holding: Holding) -> Array:
            return held[..., PLACE[holding]].reshape(shape)

        elements = self._sizes[:, kind].reshape(-1, *[1] * number)
        unit = UnitAtWork(
            of(Holding.WORKING), of(Holding.LOSS), of(Holding.KEPT), elements, with_gradients=of(Holding.GRADIENTS)
        )
        return unit, of(Holding.BUFFER), of(Holding.STRANDED)

    @cached_property
    def _sizes(self) -> Array:
        """Elements of a unit when it is gathered, [layouts, kinds]."""
        elements = self._of.elements
        whole = elements[..., PLACE[Element.TRAINABLE]] + elements[..., PLACE[Element.FROZEN]]
        sizes = held_elements(whole, elements[..., PLACE[Element.EXPERT]], self._of.rows.expert_parts[:, None])
        if self._of.pp == 1:  # what several units use stays gathered, and is no part of the first
            sizes[:, self._of.table.units.kinds[0]] -= elements[..., PLACE[Element.TIED]] @ self._of.counts
        return sizes

    def _of_moments(self, stage: Sequence[UnitAtWork], waiting: Array) -> Array:
        """``RankMemoryModel`` asks the same of one layout. ``waiting``: elements in the buffer, [layouts]."""
        framework, zero = self._of.table.framework, self._of.rows.zero_stage
        whole = (slice(None), *[None] * len(stage))
        is_left = ~self._of.rows.is_sharded
        sharding = Sharding(
            gathers_units=_SHARDS_PARAMETERS[zero][whole],
            reduces_each=(_SHARDS_GRADIENTS[zero] | (self._of.num_microbatches == 1))[whole],
            compute_bytes=np.where(is_left, 0.0, framework.item_bytes)[whole],
            buffer_bytes=np.where(is_left, 0.0, framework.reduction_bytes)[whole],
        )
        return most_bytes([(unit, 1) for unit in stage], sharding, before=waiting[whole])

    def _at_work(self, stage: Sequence[UnitAtWork]) -> Array:
        """The same of frameworks without these moments: as ``RankMemoryModel`` counts them."""
        framework, layouts = self._of.table.framework, self._of.layouts
        whole = (slice(None), *[None] * len(stage))
        reduces = (layouts.numbers("dp") * layouts.numbers("cp") > 1) & (not framework.reduces_in_place)
        of_element = (framework.units_in_transit * framework.reduction_bytes * reduces)[whole]
        zero = np.zeros_like(stage[0].working)
        worst, reduced, freed, largest = zero, zero, zero, 0 * stage[0].elements
        for unit in reversed(stage):
            working, behind = unit.working - freed, of_element * largest
            is_more = working + behind > worst + reduced
            worst, reduced = np.where(is_more, working, worst), np.where(is_more, behind, reduced)
            freed, largest = freed + unit.kept, np.maximum(largest, unit.elements)
        gathers = _SHARDS_PARAMETERS[self._of.rows.zero_stage][whole]
        return np.maximum(0.0, worst) + framework.units_in_transit * framework.item_bytes * largest * gathers + reduced
