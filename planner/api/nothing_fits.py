"""Why nothing fits, and the smallest change that would help: it is looked for within a time of its own.

That a change helps is shown by a layout that fits. That none does within seconds proves nothing, and nothing is said of
it then: of long sequences on too few devices, each of thousands of layouts may have to be cut in vain.
"""

from __future__ import annotations

from dataclasses import replace

from planner.errors import HardwareError, InfeasibleError, InputError, PlannerError, TimeLimitError
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.pricing.target import PricingTarget
from planner.problem import EVEN_RISK, Problem, at_its_smallest
from planner.request import check_offload
from planner.solver.search import Outcome
from planner.translate.infeasible import Attempt, binding_text, lacking_bytes, smallest_change

# Risks that are tried where nothing fits at a smaller one.
RISKS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, EVEN_RISK)
# What all that may help takes at most, and each of it.
HINT_S, ATTEMPT_S = 20.0, 4.0


def _attempt(due: Deadline) -> Deadline:
    """The time of one attempt, where all are due then."""
    return Deadline.within(min(ATTEMPT_S, due.left_s))


def no_plan(
    problem: Problem,
    outcome: Outcome,
    deadline: Deadline | None = None,
    *,
    brief: bool = False,
    least_devices: int | None = None,
) -> PlannerError:
    """Why nothing was found by the deadline, and but for ``brief`` the smallest change that was found to help.

    ``least_devices``: where it is known that something fits, as ``smallest_change`` says.
    """
    deadline = deadline or Deadline.never()
    if deadline.is_over() and not outcome.is_exhausted:
        tried = f"{outcome.num_visited} of {outcome.num_candidates} layouts tried"
        return TimeLimitError(f"no plan was found in time ({tried})")
    assert outcome.closest is not None
    closest = at_its_smallest(problem.table, outcome.closest)
    pinned = problem.space.pins.describe()
    space_text = f"{outcome.num_candidates} layouts{f' with {pinned}' if pinned else ''}"
    cluster = problem.target.cluster
    text = binding_text(cluster, closest, space_text, problem.memory_risk, is_proved=outcome.is_exhausted)
    lacks = lacking_bytes(closest)
    if brief:
        return InfeasibleError(text, hint="planner fit says what would fit", lacks_bytes=lacks)
    due = Deadline.within(min(HINT_S, deadline.left_s))
    risk = _least_risk_that_fits(problem, due)
    if risk is not None:
        change = (
            f"give --memory-risk {risk:g}: a plan fits with {1 - risk:.0%}, as published runs differed from predictions"
        )
        return InfeasibleError(text, hint=change, lacks_bytes=lacks)
    asked = Attempt(cluster, problem.space.training, problem.space.pins)

    def fits(attempt: Attempt) -> bool:
        return something_fits(problem.target, attempt, problem.memory_risk, _attempt(due))

    return InfeasibleError(text, hint=smallest_change(asked, fits, least_devices), lacks_bytes=lacks)


def _least_risk_that_fits(problem: Problem, due: Deadline) -> float | None:
    """The least risk, of ``RISKS`` above the problem's, at which a layout is found; None where none is at 1/2."""
    higher = [risk for risk in RISKS if risk > problem.memory_risk]
    if not higher or not problem.at_risk(higher[-1]).can_fit(_attempt(due)):
        return None
    return next((risk for risk in higher[:-1] if problem.at_risk(risk).can_fit(_attempt(due))), higher[-1])


def something_fits(
    target: PricingTarget, attempt: Attempt, memory_risk: float = EVEN_RISK, deadline: Deadline | None = None
) -> bool:
    """Whether a layout is found by the deadline that fits but for this risk, of the model of ``target``."""
    deadline = deadline or Deadline.never()
    if deadline.is_over():
        return False
    try:
        check_offload(attempt.cluster, attempt.pins.offload, activations=attempt.pins.offload_activations)
        within = replace(target, cluster=attempt.cluster)
        return Problem.build(within, attempt.training, attempt.pins, memory_risk, deadline).can_fit(deadline)
    except (HardwareError, InputError, OutOfTimeError):
        return False
