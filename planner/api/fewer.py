"""Fewer devices than there are, where that is faster: the rest of the search, after that over all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.errors import InputError
from planner.evaluation.dominance import undominated
from planner.evaluation.evaluator import Evaluated
from planner.layout.columns import Columns
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.layout.layout import Layout, Pins, Training
from planner.plan.schema import Plan
from planner.pricing.decisions import decided_for_degrees
from planner.pricing.ideal import compute_device_s
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem, Solved, counts_of, placement_solver, solved_by, space_of
from planner.solver.cutting import TOLERANCE
from planner.solver.glance import rough_bound_s
from planner.solver.search import NEAR, Progress
from planner.table.keys import WorkKey
from planner.translate import to_plan

# Smaller numbers of devices that are searched at most.
MOST_SEARCHED = 6
# Step times that differ by a smaller share are said to be alike.
WORTH_SAYING = 5e-4


@dataclass(frozen=True)
class Counted:
    """The best over all numbers of devices that were searched.

    ``all_devices``: where some are left idle, the best over all of them. ``fewer``: smaller numbers that were searched.
    """

    solved: Solved
    all_devices: Evaluated | None = None
    fewer: tuple[int, ...] = ()


def with_fewer(solved: Solved, deadline: Deadline, progress: Progress | None) -> Counted:
    """The better of ``solved`` and what is found over smaller numbers of devices, where these may be faster.

    A number is passed over where its kernels alone would take longer. An answer that the deadline cut short stays.
    """
    whole = solved.outcome
    if deadline.is_over() or whole.interrupted:
        return Counted(solved)
    floor_s = compute_device_s(solved.problem.target, solved.problem.space.training)
    best, fewer, is_proved, bound_s = solved, list[int](), True, whole.bound_s
    num_candidates, seen = whole.num_candidates, [*whole.ranking]
    deadline.resume()
    try:
        for count in _counts(solved):
            best_s = None if best.outcome.best is None else best.outcome.best.step_time_s
            if best_s is not None and floor_s / count >= best_s * (1 - TOLERANCE):
                continue
            try:
                smaller = _over_fewer(solved.problem, count, deadline, best_s)
            except InputError:  # the pins allow no layout there
                continue
            outcome = smaller.problem.solved(deadline, progress, best_s)
            fewer.append(count)
            num_candidates += len(smaller.layouts)
            seen += outcome.ranking
            is_proved, bound_s = is_proved and outcome.is_exhausted, min(bound_s, outcome.bound_s)
            if outcome.best is not None:
                best = Solved(smaller.whole(deadline), outcome)
                deadline.promise()
    except OutOfTimeError:
        is_proved = False
    except KeyboardInterrupt:
        is_proved = False
        best = replace(best, outcome=replace(best.outcome, interrupted=True))
    found = best.outcome.best
    if found is None or not fewer:
        return Counted(best)
    slower = [each for each in seen if each.step_time_s >= found.step_time_s and each.layout != found.layout]
    joined = replace(
        best.outcome,
        ranking=(found, *sorted(slower, key=lambda each: each.step_time_s)),
        bound_s=min(bound_s, found.step_time_s),
        is_exhausted=is_proved and (whole.is_exhausted or whole.bound_s >= found.step_time_s * (1 - TOLERANCE)),
        num_candidates=num_candidates,
    )
    over_all = None if best.problem is solved.problem else whole.best
    return Counted(replace(best, outcome=joined), over_all, tuple(fewer))


def solved_over_fewer(
    deadline: Deadline, target: PricingTarget, training: Training, pins: Pins, memory_risk: float
) -> Solved | None:
    """The best over the largest smaller number of devices that has any layout that fits; None where none has.

    For numbers of devices over which no layout can be laid. OutOfTimeError as of ``solved_by``.
    """
    for count in counts_of(target, training, pins, deadline)[:MOST_SEARCHED]:
        try:
            solved = solved_by(deadline, target.over(count), training, pins, memory_risk)
        except InputError:
            continue
        if solved.outcome.best is not None:
            return solved
    return None


def _counts(solved: Solved) -> tuple[int, ...]:
    """Where nothing fits over all devices, nothing will over half of them."""
    counts = solved.problem.worthwhile_counts()
    if solved.outcome.best is None:
        counts = tuple(n for n in counts if 2 * n > solved.problem.target.cluster.num_devices)
    return counts[:MOST_SEARCHED]


@dataclass(frozen=True)
class _Fewer:
    """A problem over fewer devices, with those of its layouts that may be faster than a plan that is known.

    ``layouts``: all of them.
    """

    problem: Problem
    layouts: Columns[Layout]

    def whole(self, deadline: Deadline) -> Problem:
        """The same with all layouts."""
        few = self.problem
        space = replace(few.space, layouts=self.layouts)
        return Problem.priced(few.target, space, few.decisions, deadline).at_risk(few.memory_risk)


def _over_fewer(problem: Problem, num_devices: int, deadline: Deadline, best_s: float | None) -> _Fewer:
    """The same problem over ``num_devices``, which are fewer, where a plan of ``best_s`` is known.

    InputError and OutOfTimeError as of ``Problem.of``.
    """
    target, pins, training = problem.target.over(num_devices), problem.space.pins, problem.space.training
    known = problem.decisions if target.prices_as(problem.target) else None
    decisions = decided_for_degrees(target, pins, placement_solver(deadline).solve_placement, deadline, known)
    space = space_of(target, training, pins, decisions, deadline)
    one_of_each = build_table(target, training, decisions, space.layouts.one_of_each(WorkKey), deadline)
    layouts = likely = undominated(one_of_each, space.layouts)
    if best_s is not None:  # of others a search takes no closer look
        likely = layouts.take(rough_bound_s(one_of_each, layouts) < best_s * (1 + NEAR))
    found = Problem.priced(target, replace(space, layouts=likely), decisions, deadline)
    return _Fewer(found.at_risk(problem.memory_risk), layouts)


def over_devices(plan: Plan, counted: Counted, num_devices: int, target: PricingTarget) -> Plan:
    """``plan`` with what it leaves idle of ``num_devices`` devices, and what all of them would do."""
    assert plan.search is not None
    best = counted.all_devices
    is_over_all = best is not None and best.layout.mesh.world_size == num_devices
    over_all = None if best is None or not is_over_all else to_plan.candidate(f"all {num_devices} GPUs", best, target)
    search = plan.search.model_copy(update={"all_devices": over_all, "fewer_devices": counted.fewer})
    return plan.model_copy(update={"idle_devices": num_devices - plan.num_devices, "search": search})


def idle_note(plan: Plan) -> str:
    """Why some devices are left idle, in a sentence."""
    assert plan.search is not None
    assert plan.prediction is not None
    best, there_are = plan.search.all_devices, plan.num_devices + plan.idle_devices
    said = f"{plan.num_devices} of {there_are} GPUs are used"
    if best is None:
        return f"{said}: no layout over all {there_are} fits the model, the batch and the pins"
    slower = best.step_time_s / plan.prediction.step_time_s - 1
    compared = f"is {slower:.1%} slower" if slower >= WORTH_SAYING else "is no faster"
    return f"{said}: the best plan found over all {there_are} {compared}"
