"""One search, ready to be solved: operators placed for every degree, the space of layouts, and its cost table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import factorial
from typing import NamedTuple

from costmodels.vocabulary.choices import Preference
from costmodels.vocabulary.mesh import Mesh
from planner.axes.base import Asked
from planner.axes.unlike_devices import MAX_ORDERS, over_groups
from planner.evaluation.dominance import undominated
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.shares import evaluator_of
from planner.graph.disk_cache import DiskCache
from planner.graph.graph_cache import default_folder
from planner.layout.columns import Columns
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.pricing.decisions import decided_for_degrees, limits_of, usual_tensor_degree
from planner.pricing.ideal import ideal_step_s
from planner.pricing.rows import Decisions
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.solver.base import PlacementSolver, StageSolver
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.in_turn import in_turn, over_its_mesh
from planner.solver.known_placements import KnownPlacements
from planner.solver.preference import simplest, tie_share
from planner.solver.search import Outcome, Progress, Wanted, probes, search
from planner.solver.shares import with_shares
from planner.solver.smallest import at_its_smallest, needing_least
from planner.space.device_counts import worthwhile_counts
from planner.space.search_space import SearchSpace, build_space, narrowed, typical_space
from planner.space.shares import parts_of_shares
from planner.table.cost_table import CostTable
from planner.table.keys import WorkKey

# A search solves a few dozen programs, of some hundred bytes each.
MOST_KNOWN_PLACEMENTS = 4096
# The risk of not fitting at which predictions of memory are taken at their word.
EVEN_RISK = 0.5
# A plan that leaves a tenth of what it may take of every device has room.
ROOMY = 0.9


class _MeshKey(NamedTuple):
    mesh: Mesh


@dataclass(frozen=True)
class Problem:
    """One search, ready to be solved."""

    target: PricingTarget
    space: SearchSpace
    baseline_layouts: Columns[Layout]
    decisions: Decisions
    table: CostTable
    solver: StageSolver
    memory_risk: float = EVEN_RISK  # that a plan does not fit after all

    @staticmethod
    def build(
        target: PricingTarget,
        training: Training,
        pins: Pins,
        memory_risk: float = EVEN_RISK,
        deadline: Deadline | None = None,
    ) -> Problem:
        """Places the operators for every degree, enumerates the space, prices it and drops what cannot be best.

        OutOfTimeError where the deadline is over before that.
        """
        decisions = decided_for_degrees(target, pins, placement_solver().solve_placement)
        return Problem.of(target, training, pins, decisions, deadline or Deadline.never()).at_risk(memory_risk)

    @staticmethod
    def of(
        target: PricingTarget,
        training: Training,
        pins: Pins,
        decisions: Decisions,
        deadline: Deadline,
        *,
        is_typical: bool = False,
    ) -> Problem:
        """The same where placements are decided, with the degrees that there are placements for, at an even risk.

        ``is_typical``: of the typical layouts alone. OutOfTimeError where the deadline is over before that.
        """
        space = space_of(target, training, pins, decisions, None if is_typical else deadline)
        problem = Problem.priced(target, space, decisions, deadline)
        return replace(problem, space=replace(space, layouts=undominated(problem.table, space.layouts)))

    @staticmethod
    def priced(target: PricingTarget, space: SearchSpace, decisions: Decisions, deadline: Deadline) -> Problem:
        """Every layout of ``space``. OutOfTimeError where the deadline is over before that."""
        baseline, own_cut = baseline_space(space.training, space.limits), None
        if target.within is not None:
            baseline, own_cut = target.within.of(baseline, space.training), target.within.cut
        deadline.check()
        layouts = Columns.joined([space.layouts, space.shares, baseline])
        table = build_table(target, space.training, decisions, layouts, deadline)
        return Problem(target, space, baseline, decisions, table, DynamicProgramSolver(own_cut))

    def at_risk(self, memory_risk: float) -> Problem:
        """The same problem, whose plans may need more memory than there is with this probability.

        At 1/2 predictions are taken at their word, as they are where the recipe has no band of memory.
        """
        band = self.target.recipe.memory_band
        factor = 1.0 if band is None else band.factor(memory_risk)
        table = replace(self.table, cluster=self.table.cluster.with_memory_factor(factor))
        return replace(self, table=table, memory_risk=memory_risk)

    def roomier(self, outcome: Outcome, deadline: Deadline) -> Evaluated | None:
        """The fastest layout known whose ranks take at most ``ROOMY`` of what they may.

        Known are the layouts that were visited and the likeliest over the mesh of the plan: others may be faster.
        None where the plan itself takes no more, and where none is known.
        """
        found = outcome.best
        if found is None or found.memory_share <= ROOMY:
            return None
        known = next((each for each in outcome.ranking if each.memory_share <= ROOMY), None)  # the fastest comes first
        if deadline.is_over():
            return known
        cluster = self.table.cluster
        table = replace(self.table, cluster=cluster.with_memory_factor(cluster.memory_factor / ROOMY))
        over_mesh = self.space.layouts.where(_MeshKey, lambda key: key.mesh == found.layout.mesh)
        wanted = Wanted(known=known, proof=False)
        try:
            return search(table, over_mesh, self.solver, deadline=deadline, wanted=wanted).best
        except OutOfTimeError:
            return None  # nor is one known

    def preferred(self, outcome: Outcome, baseline: Outcome, preference: Preference) -> Outcome:
        """``outcome`` with a simpler layout about as fast as its best, if there is one; never slower than FSDP."""
        assert outcome.best is not None
        tie = tie_share(self.table)
        if preference is Preference.FASTEST or not outcome.is_exhausted or tie == 0:
            return outcome
        limit_s = outcome.best.step_time_s * (1 + tie)
        if baseline.best is not None:
            limit_s = min(limit_s, baseline.best.step_time_s)
        found = simplest(self.table, outcome, limit_s, self.solver)
        if found is None:
            return outcome
        others = [each for each in outcome.ranking if each.layout != found.layout]
        return replace(outcome, best=found, ranking=tuple(sorted([*others, found], key=lambda each: each.step_time_s)))

    def solved(
        self,
        deadline: Deadline | None = None,
        progress: Progress | None = None,
        cutoff_s: float | None = None,
        known: Evaluated | None = None,
    ) -> Outcome:
        """The fastest layout of the space that fits, with what was seen on the way; faster than ``cutoff_s``.

        ``known``: a layout of it that fits.
        """

        def of(layouts: Columns[Layout], best: Evaluated | None) -> Outcome:
            wanted = Wanted(cutoff_s, known=best)
            return search(self.table, layouts, self.solver, deadline=deadline, progress=progress, wanted=wanted)

        outcome = in_turn(self.table, self.space.layouts, of, known)
        if not (outcome.interrupted or (deadline is not None and deadline.is_over())):
            outcome = over_its_mesh(self.table, self.space.layouts, outcome, of)
        if not self.space.shares:
            return outcome
        training, deadline = self.space.training, deadline or Deadline.never()
        if not (outcome.interrupted or deadline.is_over()):
            try:
                return with_shares(self.table, self.space.shares, outcome, training.global_batch_size, deadline)
            except (KeyboardInterrupt, OutOfTimeError) as error:
                if outcome.best is None:
                    raise
                outcome = replace(outcome, interrupted=isinstance(error, KeyboardInterrupt))
        bound_s = min(outcome.bound_s, ideal_step_s(self.target, training))
        return replace(outcome, bound_s=bound_s, is_exhausted=False)

    def worthwhile_counts(self) -> tuple[int, ...]:
        """Smaller numbers of devices that may train faster, descending; none where devices differ."""
        if self.target.cluster.mixed is not None:
            return ()
        return worthwhile_counts(self.space.training, self.space.pins, self.space.limits)

    def solved_baseline(self) -> Outcome:
        """The fastest plain FSDP layout that fits."""
        return search(self.table, self.baseline_layouts, self.solver)

    def can_fit(self, deadline: Deadline) -> bool:
        """Whether a layout that fits is found by the deadline.

        The one that needs least is tried first, cut evenly; then all, until one fits.
        """
        try:
            nearest = needing_least(self.table, self.space.layouts, deadline)
            if nearest is None or nearest.fits:
                return nearest is not None
            wanted = Wanted(any_will_do=True)
            return (
                search(self.table, self.space.layouts, self.solver, deadline=deadline, wanted=wanted).best is not None
            )
        except OutOfTimeError:
            return False

    @property
    def placements_are_proved(self) -> bool:
        """Whether no operators can be placed in less time, for any degree."""
        return all(unit.is_proved for decision in self.decisions.values() for unit in decision)

    @property
    def lower_bound_s(self) -> float:
        """What holds for layouts that are not searched: infinite where all are.

        Groups of unlike devices are laid in ``MAX_ORDERS`` orders at most, and where there are more none has a share
        of the batch. The model's FLOPs at peak bound the others.
        """
        mixed, pins = self.target.cluster.mixed, self.space.pins
        is_alike = pins.pp == 1 and pins.micro_batch is not None
        if mixed is None or is_alike or factorial(len(mixed.groups)) <= MAX_ORDERS:
            return float("inf")
        return ideal_step_s(self.target, self.space.training)

    def exactly(self, found: Evaluated) -> Evaluated:
        """The same layout and cut with every micro-batch simulated."""
        return evaluator_of(self.table, found.layout, found.modes).evaluate(found.starts, exact=True)

    def closest_baseline(self, baseline: Outcome) -> Evaluated | None:
        """The best plain FSDP layout, or where none fits the one that lacks least memory."""
        if baseline.best is not None:
            return baseline.best
        return None if baseline.closest is None else at_its_smallest(self.table, baseline.closest)


def space_of(
    target: PricingTarget, training: Training, pins: Pins, decisions: Decisions, deadline: Deadline | None
) -> SearchSpace:
    """Every layout that the framework can run, over unlike devices also their orders; typical ones without deadline."""
    whole = (training, pins, limits_of(target, decisions))
    if deadline is None:
        space = typical_space(*whole)
        space = replace(space, layouts=space.layouts.where(WorkKey, lambda key: key.tensor in decisions))
    else:
        space = build_space(*whole, deadline)
    if target.within is not None:
        return narrowed(space, target.within, may_be_empty=deadline is None)
    if target.cluster.mixed is not None:
        groups = target.cluster.mixed.groups
        layouts = Columns.joined([space.layouts, over_groups(space.layouts, groups)])
        if deadline is not None:
            counts = {group.name: group.cluster.num_devices for group in groups}
            space = replace(space, shares=parts_of_shares(Asked(*whole), counts))
        space = replace(space, layouts=layouts)
    return space


def placement_solver(deadline: Deadline | None = None) -> PlacementSolver:
    """CP-SAT, for programs that it has not solved before."""
    folder = default_folder("placements")
    store = None if folder is None else DiskCache(folder, ".placement", MOST_KNOWN_PLACEMENTS)
    return KnownPlacements(store, deadline or Deadline.never())


@dataclass(frozen=True)
class Solved:
    """What was found, and the problem of whose layouts it speaks."""

    problem: Problem
    outcome: Outcome


def solved_by(
    deadline: Deadline,
    target: PricingTarget,
    training: Training,
    pins: Pins,
    memory_risk: float = EVEN_RISK,
    progress: Progress | None = None,
) -> Solved:
    """The fastest layout that fits, or the best that was found by the deadline.

    The whole space may take minutes to list, to price and to bound. So a few typical layouts go through the same
    stages before: the best of them is the answer where the deadline, or Ctrl-C, comes first. OutOfTimeError where it
    came before any plan.
    """
    first: Solved | None = None
    try:
        solve = placement_solver(deadline).solve_placement
        usual = replace(pins, tp=usual_tensor_degree(target, pins))
        placed = decided_for_degrees(target, usual, solve, deadline, are_typical=True)
        first = _first(
            Problem.of(target, training, pins, placed, deadline, is_typical=True).at_risk(memory_risk), deadline
        )
        placed = decided_for_degrees(target, pins, solve, deadline, placed)
        problem = Problem.of(target, training, pins, placed, deadline).at_risk(memory_risk)
        outcome = problem.solved(deadline, progress, known=None if first is None else first.outcome.best)
        if outcome.best is not None:
            deadline.settle()
    except OutOfTimeError:
        if first is None:
            raise
        return first
    except KeyboardInterrupt:
        if first is None:
            raise
        return replace(first, outcome=replace(first.outcome, interrupted=True))
    if first is None or outcome.is_exhausted:
        return Solved(problem, outcome)
    return Solved(problem, _with(first.outcome, outcome))


def _first(problem: Problem, deadline: Deadline) -> Solved | None:
    """The best of a few typical layouts, with a bound that holds for all; None where none of them fits."""
    outcome = probes(problem.table, problem.space.layouts, problem.solver, deadline)
    if outcome.best is None:
        return None
    return Solved(problem, replace(outcome, bound_s=ideal_step_s(problem.target, problem.space.training)))


def _with(first: Outcome, outcome: Outcome) -> Outcome:
    """An outcome that was cut short, with what was found before it."""
    assert first.best is not None
    both = {each.layout: each for each in [*first.ranking, *outcome.ranking]}
    best = first.best
    if outcome.best is not None and outcome.best.step_time_s <= best.step_time_s:
        best = outcome.best
    ranking = tuple(sorted(both.values(), key=lambda each: each.step_time_s))
    return replace(outcome, best=best, ranking=ranking, bound_s=max(first.bound_s, outcome.bound_s))


def baseline_space(training: Training, limits: Limits) -> Columns[Layout]:
    """Plain FSDP over all devices, whatever the user pinned; empty where the batch does not divide."""
    n = limits.num_devices
    if training.global_batch_size % n or n == 1:
        return Columns.of(Layout, ())
    pins = Pins(tp=1, pp=1, cp=1, ep=1, dp=n, dp_replicate=1, zero=3)
    return build_space(training, pins, limits).layouts


def counts_of(target: PricingTarget, training: Training, pins: Pins, deadline: Deadline) -> tuple[int, ...]:
    """Smaller numbers of devices that may do better, descending, where there is no problem over all of them."""
    if target.cluster.mixed is not None:
        return ()
    placed = decided_for_degrees(target, pins, placement_solver(deadline).solve_placement, deadline)
    return worthwhile_counts(training, pins, limits_of(target, placed))
