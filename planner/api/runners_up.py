"""Plans worth showing beside the best: each differs from it and from the others in something that matters."""

from __future__ import annotations

from planner.evaluation.evaluator import Evaluated
from planner.layout.deadline import Deadline
from planner.problem import Problem
from planner.solver.kinds import Matter, matter_of
from planner.solver.search import Outcome, search

# Where a user does not say how many.
MOST_RUNNERS_UP = 5


def unlike_runners(problem: Problem, outcome: Outcome, number: int | None, deadline: Deadline) -> list[Evaluated]:
    """The ``number`` fastest layouts known that differ from the best and from each other in what matters.

    Known are those that the search visited. Where these are too few and ``number`` was asked for, the best of all
    layouts unlike them is searched, one after the other, as long as there is time and any fits.
    """
    assert outcome.best is not None
    seen = {matter_of(outcome.best.layout)}
    found: list[Evaluated] = []
    for each in outcome.ranking:
        if len(found) < (number or MOST_RUNNERS_UP) and matter_of(each.layout) not in seen:
            seen.add(matter_of(each.layout))
            found.append(each)
    while number is not None and len(found) < number and not deadline.is_over():
        left = problem.space.layouts.where(Matter, lambda each: each not in seen)
        best = search(problem.table, left, problem.solver, deadline=deadline).best if left else None
        if best is None:
            break
        seen.add(matter_of(best.layout))
        found.append(best)
    return sorted(found, key=lambda each: each.step_time_s)
