"""Other plans for a training that is planned already: what a user may hold it against by measuring."""

from __future__ import annotations

from planner.api import Question, described, same_run
from planner.api.runners_up import unlike_runners
from planner.errors import TimeLimitError
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.plan.schema import Plan
from planner.problem import solved_by


def other_plans(plan: Plan, number: int, hardware: str | None, time_limit_s: float) -> list[Plan]:
    """At most ``number`` plans for the run of ``plan`` on its devices, the fastest by prediction first.

    ``hardware``: the file of its profile, where that is none of the shipped ones. Searched with the pins and the memory
    risk of the search that ``plan`` came from. Each differs from ``plan`` and from the others in its mesh, ZeRO stage
    or schedule. Errors as of a search.
    """
    search = plan.search
    request = same_run(plan, plan.num_devices, hardware, {} if search is None else search.pins)
    deadline = Deadline.answering_within(time_limit_s)
    try:
        question = Question.in_time(request)
        solved = solved_by(deadline, question.target, question.training, request.pins, request.memory_risk)
    except OutOfTimeError:
        raise TimeLimitError("no other plan was found in time", hint="measure this plan alone") from None
    problem, outcome = solved.problem, solved.outcome
    if outcome.best is None:
        return []
    found = [outcome.best, *unlike_runners(problem, outcome, number, deadline)]
    plans = [described(problem, problem.exactly(each)) for each in found]
    unlike = [each for each in plans if _matter(each) != _matter(plan)]
    return [each.model_copy(update={"framework": plan.framework}) for each in unlike[:number]]


def _matter(plan: Plan) -> tuple[object, ...]:
    return plan.mesh, plan.zero_stage, plan.pipeline.schedule
