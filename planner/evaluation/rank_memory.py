"""The memory of one pipeline rank in every phase, from what its units hold and the states of its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from costmodels.ledger import MemoryLedger, RankMemory, SoftwareBytes, StateBytes
from costmodels.vocabulary.held_counts import ONLY_FIRST, BackwardPass, OfPasses, Passes
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.terms import PLACE, Element, Holding, MemoryTerm, Phase
from planner.evaluation.fsdp_moments import Moment, Sharding, UnitAtWork, fullest_last_moment, fullest_moment
from planner.evaluation.software import num_communicators, outside_bytes, software_bytes
from planner.evaluation.states import held_elements, num_updated, state_bytes
from planner.evaluation.unit_times import LayoutRows
from planner.evaluation.variants import VariantsOfUnits
from planner.layout.layout import Layout
from planner.table.cost_table import CostTable

# A block whose activations go to the host makes them, or uses them, while those of another are copied.
BLOCKS_IN_TRANSIT = 2


@dataclass(frozen=True)
class Transient:
    """Bytes of a rank besides states and kept activations."""

    last: Moment | None  # of the last micro-batch, with no other in flight, where only its gradients are reduced
    loss: float  # of the loss in forward
    gathered: float  # parameters of units in transit in forward (ZeRO 3)
    buffers: float
    waiting: float
    stranded: float
    offloaded: float  # activations of blocks on their way to the host, or back


_Variants = tuple[tuple[int, ...], ...]  # of the units of each stage of a rank
# The rows of ledgers in order: states, which last, and what comes and goes in each phase.
_STATES = (MemoryTerm.PARAMETERS, MemoryTerm.GRADIENTS, MemoryTerm.OPTIMIZER)
_AT_WORK = (MemoryTerm.ACTIVATIONS, MemoryTerm.WORKING_SET, MemoryTerm.GATHERED_PARAMETERS)
_BUFFERS = (MemoryTerm.GATHER_BUFFERS, MemoryTerm.OFFLOAD_BUFFERS)
_IN_FORWARD = (*_STATES, *_AT_WORK, *_BUFFERS)
_IN_BACKWARD = (*_STATES, *_AT_WORK, MemoryTerm.REDUCTION_BUFFERS, *_BUFFERS)
_IN_UPDATE = (*_STATES, MemoryTerm.GATHERED_UPDATE, MemoryTerm.GATHER_BUFFERS)
_NUM_LASTING = len(_STATES)
_total = attrgetter("total")


class RankMemoryModel(VariantsOfUnits):
    """Memory of the ranks of one layout."""

    def __init__(self, table: CostTable, layout: Layout, rows: LayoutRows, modes: Sequence[int]) -> None:
        """``rows``: those of ``layout`` alone; ``modes``: place of the mode of recomputation of every unit."""
        super().__init__(table, layout, rows, modes)
        self._state = table.state_bytes[rows.state[0]]
        self._transients: dict[_Variants, Transient] = {}
        self._most_of: dict[frozenset[int], Transient] = {}
        self._elements_of: dict[tuple[tuple[bool, tuple[int, ...]], ...], tuple[float, float, float]] = {}
        self._states_of: dict[tuple[float, float, float], StateBytes] = {}
        self._made_of: dict[tuple[tuple[range, ...], Passes], tuple[float, ...]] = {}
        self._units_at_work: dict[int, UnitAtWork] = {}
        self._moments: dict[tuple[tuple[int, ...], float | None], Moment] = {}
        self._at_work_of: dict[tuple[_Variants, Passes], tuple[Moment, ...]] = {}

    def with_some(self, modes: Mapping[int, int]) -> RankMemoryModel:
        """The same with other modes of recomputation of some of its units."""
        found, kinds = object.__new__(RankMemoryModel), self._table.units.kinds
        found.__dict__.update(self.__dict__)
        found._variants = list(self._variants)
        for unit, mode in modes.items():
            found._variants[unit] = mode * self._num_kinds + kinds[unit]
        return found

    def with_least(self, modes: Sequence[int]) -> RankMemoryModel:
        """Of units that hold while at work the least of what they do in any of ``modes``, and have kept the most.

        Behind them most has been freed, so that less passes through no choice of modes.
        """
        found = object.__new__(RankMemoryModel)
        found.__dict__.update(self.__dict__)
        found._held, found._variants = self._least_held(modes), list(self._table.units.kinds)
        found._transients, found._most_of, found._units_at_work, found._moments, found._at_work_of = {}, {}, {}, {}, {}
        return found

    def passing_bytes(self, stages: Sequence[range], place: int | None = None) -> float:
        """What comes and goes in a backward pass of the stage at ``place``, with the allocator's reserve.

        Without one, of that of ``stages`` which needs least.
        """
        variants = self._variants_of(stages)
        places = [place] if place is not None else [each for each, units in enumerate(stages) if units]
        transient = self._transient_in(variants)
        least = min([self._moment_of(variants, BackwardPass(each)).total for each in places])
        reserve = 1.0 if self._leaves_shards else self._reserve  # of gradients, which stay, there is none
        return least * reserve + transient.buffers * self._reserve + transient.waiting + transient.stranded

    def lasting_bytes(self, stages: Sequence[range], made: Sequence[int]) -> float:
        """What is there while activations are, whatever the units keep: states, communicators and the context.

        ``made``: places of the stages that have gradients, where it is known which (``BackwardPass``).
        """
        states = self._states(*self.elements(stages))
        gradients = self._gradients(states, stages, made)
        return states.parameters + states.optimizer + gradients + self._outside_bytes

    def _gradients(self, states: StateBytes, stages: Sequence[range], made: Sequence[int]) -> float:
        """Bytes of gradients while activations are there; ``states``: of all ``stages``."""
        if not self.holds_gradients:
            return 0.0
        if len(made) == len(stages) or not self._table.framework.has_first_gradients:
            return states.gradients
        return self._states(*self.elements([stages[place] for place in made])).gradients

    def _made(self, states: StateBytes, stages: Sequence[range], passes: Passes) -> tuple[float, ...]:
        """The gradients in each of these backward passes, whatever the modes of units."""
        key = tuple(stages), passes
        if key not in self._made_of:
            found = {made: self._gradients(states, stages, made) for made in {each.made for each in passes}}
            self._made_of[key] = tuple([found[each.made] for each in passes])
        return self._made_of[key]

    @cached_property
    def _outside_bytes(self) -> float:
        return outside_bytes(self._table, self._layout.mesh, bool(self._rows.mixes_lifetimes[0]))

    @cached_property
    def num_communicators(self) -> float:
        """Process groups of more than one rank."""
        return num_communicators(self._table, self._layout.mesh)

    @cached_property
    def software(self) -> SoftwareBytes:
        """What the software takes, its allocator's reserve as this layout makes it."""
        return software_bytes(self._table, bool(self._rows.mixes_lifetimes[0]))

    @cached_property
    def _reserve(self) -> float:
        """Bytes that a byte of tensors that come and go takes: of moments those count that need most with it."""
        return 1 + self.software.reserve_fraction

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients exist while all activations do: in buffers, or left by an earlier micro-batch."""
        return self._table.framework.keeps_gradients or self._layout.num_microbatches > 1

    @cached_property
    def _leaves_shards(self) -> bool:
        """Whether it is known how gradients grow in the only micro-batch: unit by unit of a rank's only stage."""
        is_known = self._table.framework.has_fsdp_moments and self._layout.virtual_stages == 1
        return is_known and not self.holds_gradients

    def rank(self, stages: Sequence[range], activation_bytes: OfPasses) -> RankMemory:
        """The rank that holds ``stages``, rows of units, and of activations the most in each backward pass."""
        states = self._states(*self.elements(stages))
        lasting, start = states.gradients if self._table.framework.keeps_gradients else 0.0, states.before_first_step
        forward, backward, update, transient = self._step(stages, activation_bytes)
        freed = transient.waiting, transient.stranded
        return RankMemory(
            (
                (Phase.INITIALISATION, self._ledger(_STATES, [start.parameters, lasting, start.optimizer])),
                (Phase.FORWARD, self._ledger(_IN_FORWARD, forward, freed)),
                (Phase.BACKWARD, self._ledger(_IN_BACKWARD, backward, freed)),
                (Phase.OPTIMIZER, self._ledger(_IN_UPDATE, update)),
                (Phase.CHECKPOINT, self._ledger(_STATES, [states.parameters, lasting, states.optimizer])),
            )
        )

    def peak_bytes(self, stages: Sequence[range], activation_bytes: OfPasses) -> float:
        """The total of ``rank``'s peak. It lies within a step: before and after it, a rank holds less of the same."""
        forward, backward, update, transient = self._step(stages, activation_bytes)
        groups, freed = self.num_communicators, [transient.waiting, transient.stranded]
        in_passes = max(self._total(forward, groups, freed), self._total(backward, groups, freed))
        return max(in_passes, self._total(update, groups))

    def _total(self, rows: list[float], num_communicators: float, freed: Sequence[float] = (0.0, 0.0)) -> float:
        """The total of the ledger with these rows: the same sum as ``MemoryLedger.with_reserve``, without names."""
        software = self.software
        reserve = sum(rows[_NUM_LASTING:]) * software.reserve_fraction
        outside = num_communicators * software.communicator_bytes, software.context_bytes, software.workspace_bytes
        return sum([*rows, *freed, reserve, *outside])

    def _step(
        self, stages: Sequence[range], activation_bytes: OfPasses
    ) -> tuple[list[float], list[float], list[float], Transient]:
        """Rows in forward, backward and update without what the software takes, and what passes in the first two."""
        trainable, frozen, experts = self.elements(stages)
        states, variants = self._states(trainable, frozen, experts), self._variants_of(stages)
        transient = self._transient_in(variants)
        # A rank holds as much after a forward pass as before the backward pass that follows.
        made, reserve = self._made(states, stages, activation_bytes.passes), self._reserve
        held = zip(activation_bytes.numbers, made, strict=True)
        activations, gradients = max(held, key=lambda each: each[0] * reserve + each[1])
        passing = [activations, transient.loss, transient.gathered, transient.buffers, transient.offloaded]
        forward = [states.parameters, gradients, states.optimizer, *passing]
        gathered_update = self._gathered_update(trainable, experts)
        update = [states.parameters, states.gradients, states.optimizer, gathered_update, transient.buffers]
        at_work = self._moments_of(variants, activation_bytes.passes)
        passes = list(zip(activation_bytes.numbers, at_work, made, strict=True))
        return forward, self._backward(states, stages, passes, transient), update, transient

    def _states(self, trainable: float, frozen: float, experts: float) -> StateBytes:
        """States of so many elements, with the flat buffers of frameworks that have some among the gradients."""
        key = trainable, frozen, experts
        if key not in self._states_of:
            framework, layout = self._table.framework, self._layout
            states = state_bytes(self._state, trainable, frozen, experts)
            if layout.zero_stage > 0 and layout.mesh.num_shards > 1:
                buckets = 2 * min(framework.bucket_elements, trainable) * framework.item_bytes
                states = replace(states, gradients=states.gradients + buckets)
            self._states_of[key] = states
        return self._states_of[key]

    def elements(self, stages: Sequence[range]) -> tuple[float, float, float]:
        """Trainable and frozen elements of a rank, before ZeRO divides them, and of the trainable those of experts."""
        kinds, pp = self._table.units.kinds, self._layout.mesh.pp
        # A tied parameter is held twice where owner and user lie in different stages.
        key = tuple([(pp > 1 and 0 not in stage, kinds[stage.start : stage.stop]) for stage in stages])
        if key not in self._elements_of:
            found = [self._elements(kind, tied_copy=is_apart) for is_apart, stage in key for kind in stage]
            trainable, frozen, experts = (sum(of_unit[place] for of_unit in found) for place in range(3))
            self._elements_of[key] = trainable, frozen, experts
        return self._elements_of[key]

    def _backward(
        self,
        states: StateBytes,
        stages: Sequence[range],
        passes: Sequence[tuple[float, Moment, float]],
        transient: Transient,
    ) -> list[float]:
        """The fullest moment. ``passes``: of each activations, its fullest moment and the gradients that are made.

        Where the only micro-batch allocates the gradients, and nothing says how they grow, that is its beginning, with
        all activations, or its end, with all gradients.
        """

        def rows(gradients: float, activations: float, moment: Moment) -> list[float]:
            passing = [moment.working, moment.gathered, moment.reduced, transient.buffers, transient.offloaded]
            return [states.parameters, gradients, states.optimizer, activations, *passing]

        reserve = self._reserve
        activations, fullest, gradients = max(
            passes, key=lambda each: (each[0] + each[1].passing) * reserve + each[1].gradients + each[2]
        )
        if self.holds_gradients or self._leaves_shards:
            first = rows(fullest.gradients if self._leaves_shards else gradients, activations, fullest)
            if transient.last is None:
                return first
            once = sum([self.held_of(stage, Holding.KEPT) for stage in stages])
            most = max([activations for activations, _, _ in passes])
            last = rows(states.gradients, min(most, once), transient.last)
        else:
            first = rows(0.0, activations, fullest)
            lowest, of = [stage[:1] for stage in stages[:1]], self._table.units.kinds
            kept = sum(self.held(unit, Holding.KEPT) for stage in lowest for unit in stage)
            reduced = self._reduction_bytes(self._largest([of[unit] for stage in stages for unit in stage]))
            at_end = self._moments_of(self._variants_of(lowest), ONLY_FIRST)[0].working
            last = rows(states.gradients, kept, fullest._replace(working=at_end, reduced=reduced))
        return max(first, last, key=lambda each: self._total(each, 0))

    def transient(self, stages: Sequence[range]) -> Transient:
        """What the units of a rank need besides states and kept activations; the same for stages of the same kinds."""
        return self._transient_in(self._variants_of(stages))

    def _transient_in(self, variants: _Variants) -> Transient:
        if variants not in self._transients:
            self._transients[variants] = self._transient_of(variants)
        return self._transients[variants]

    def _variants_of(self, stages: Sequence[range]) -> _Variants:
        of = self._variants
        return tuple([tuple(of[stage.start : stage.stop]) for stage in stages])

    def _transient_of(self, stages: _Variants) -> Transient:
        variants = [variant for stage in stages for variant in stage]
        there, collective = frozenset(variants), PLACE[Holding.COLLECTIVE]
        if there not in self._most_of:
            self._most_of[there] = self._most_of_each(there)
        most, last = self._most_of[there], None
        if self._table.framework.has_fsdp_moments and not self._sharding.reduces_each:
            last = max([self._fullest(stage, None) for stage in dict.fromkeys(stages)], key=_total)
        waiting = min(sum([self._held[variant][collective] for variant in variants]), most.waiting)
        return replace(most, last=last, waiting=waiting)

    def _most_of_each(self, there: Set[int]) -> Transient:
        """What does not depend on how many units of each variant there are; ``waiting`` is the most that there is."""
        gathered, loss = self._gathered(there), self._most(there, Holding.LOSS)
        if self._table.framework.has_fsdp_moments:
            gathered += self._shared_elements * self._sharding.compute_bytes * self._sharding.gathers_units
            gathered = max(0.0, gathered - loss)  # while the loss is at work, nothing is
        return Transient(
            last=None,
            loss=loss,
            gathered=gathered,
            buffers=self._most(there, Holding.BUFFER),
            waiting=self._most(there, Holding.QUEUED),
            stranded=self._most(there, Holding.STRANDED),
            offloaded=BLOCKS_IN_TRANSIT * max([self._on_host[variant] for variant in there], default=0.0),
        )

    def _moments_of(self, variants: _Variants, passes: Passes) -> tuple[Moment, ...]:
        """The fullest moment of each of these backward passes of a rank."""
        if (variants, passes) not in self._at_work_of:
            self._at_work_of[variants, passes] = tuple([self._moment_of(variants, each) for each in passes])
        return self._at_work_of[variants, passes]

    def _moment_of(self, stages: _Variants, backward: BackwardPass) -> Moment:
        """Of the unit that needs most, less what units behind it have freed."""
        if not self._table.framework.has_fsdp_moments:
            return self._at_work(stages[backward.stage])
        # In a pipeline gradients of the pass before wait in the buffer: those of its stage's first unit.
        waits = backward.before is not None and self._layout.mesh.pp > 1
        before = self._sizes[stages[backward.before or 0][0] % self._num_kinds] if waits else 0.0
        return self._fullest(stages[backward.stage], before)

    def _fullest(self, stage: tuple[int, ...], before: float | None) -> Moment:
        """The fullest moment of a stage. Most are alike, and ranks share them.

        ``before``: elements that wait in the buffer; None: of the last micro-batch.
        """
        if (stage, before) not in self._moments:
            runs = [(self._unit_at_work(variant), len(list(row))) for variant, row in groupby(stage)]
            self._moments[stage, before] = (
                fullest_last_moment(runs, self._sharding)
                if before is None
                else fullest_moment(runs, self._sharding, before)
            )
        return self._moments[stage, before]

    def _gathered(self, variants: Iterable[int]) -> float:
        return max([self.gathered_bytes(variant % self._num_kinds) for variant in variants], default=0.0)

    def gathered_bytes(self, kind: int) -> float:
        """Parameters of as many units of a kind as ZeRO 3 has in transit; nothing where it does not gather them."""
        framework = self._table.framework
        in_transit = framework.units_in_transit * self._sizes[kind] * framework.item_bytes
        return in_transit * ZERO_STAGES[self._layout.zero_stage].shards_parameters

    @cached_property
    def _sharding(self) -> Sharding:
        layout, framework = self._layout, self._table.framework
        zero = ZERO_STAGES[layout.zero_stage]
        return Sharding(
            gathers_units=zero.shards_parameters,
            reduces_each=zero.shards_gradients or layout.num_microbatches == 1,
            compute_bytes=0.0 if self._leaves_whole else framework.item_bytes,
            buffer_bytes=0.0 if self._leaves_whole else framework.reduction_bytes,
            shared_elements=self._shared_elements,
            leaves_shards=self._leaves_shards,
        )

    @cached_property
    def _shared_elements(self) -> float:
        """Parameters that several units of a stage use, where no pipeline parts them."""
        return sum(self._count(kind, Element.TIED) for kind in self._table.units.kinds) * (self._layout.mesh.pp == 1)

    @cached_property
    def _leaves_whole(self) -> bool:
        """Whether parameters have no copy and gradients no buffer."""
        return not self._table.framework.shards(self._layout.zero_stage, self._layout.offload)

    def _unit_at_work(self, variant: int) -> UnitAtWork:
        if variant not in self._units_at_work:
            kind = variant % self._num_kinds
            shared = self._shared_elements * (kind == self._table.units.kinds[0])
            trainable, _, experts = self._elements(kind, tied_copy=False)
            self._units_at_work[variant] = UnitAtWork(
                working=self._of(variant, Holding.WORKING),
                loss=self._of(variant, Holding.LOSS),
                kept=self._of(variant, Holding.KEPT),
                elements=self._sizes[kind] - shared,
                with_gradients=self._of(variant, Holding.GRADIENTS),
                shards=num_updated(self._layout, trainable - shared, experts),
            )
        return self._units_at_work[variant]

    def _at_work(self, stage: Sequence[int]) -> Moment:
        """The worst moment of the stage's backward pass, which goes from its end.

        Units behind the one at work have freed what they kept, and their gradients are being reduced. ``stage``: the
        variants of its units.
        """
        worst, freed, largest = (0.0, 0.0), 0.0, 0.0
        for variant in reversed(stage):
            worst = max(worst, (self._of(variant, Holding.WORKING) - freed, self._reduction_bytes(largest)), key=sum)
            freed += self._of(variant, Holding.KEPT)
            largest = max(largest, self._sizes[variant % self._num_kinds])
        return Moment(max(0.0, worst[0]), self._gathered(set(stage)), worst[1])

    def _reduction_bytes(self, largest: float) -> float:
        """Bytes of gradients in transit of units with so many elements; nothing where they are reduced in place."""
        mesh, framework = self._layout.mesh, self._table.framework
        if framework.reduces_in_place or self._leaves_whole or mesh.dp * mesh.cp == 1:
            return 0.0
        return framework.units_in_transit * framework.reduction_bytes * largest

    def _ledger(
        self, terms: Sequence[MemoryTerm], rows: Sequence[float], freed: tuple[float, float] = (0.0, 0.0)
    ) -> MemoryLedger:
        ledger = MemoryLedger(tuple(zip(terms, rows, strict=True)))
        waiting, stranded = freed
        return ledger.with_reserve(self.software, self.num_communicators, waiting=waiting, stranded=stranded)

    def _gathered_update(self, trainable: float, experts: float) -> float:
        """Copies through which ZeRO 1 gathers updated parameters."""
        framework, layout = self._table.framework, self._layout
        if layout.zero_stage != 1 or layout.mesh.num_shards == 1:
            return 0.0
        gathered, sent = framework.gathered_update_bytes, framework.gathered_update_shard_bytes
        held = held_elements(trainable, experts, layout.mesh.expert_parts)
        return held * gathered + trainable * sent / layout.mesh.num_shards
