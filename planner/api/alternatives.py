"""Other plans beside a plan: its runners-up, and the one that a user would have taken; what each loses, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import mul
from typing import NamedTuple

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Term
from planner.api import PlannedLayout, Question, answer_of, same_run
from planner.api.runners_up import unlike_runners
from planner.errors import InfeasibleError, InputError, ModelError, PlanError, PlannerError, TimeLimitError
from planner.evaluation.evaluator import Evaluated
from planner.layout.deadline import Deadline
from planner.layout.layout import NO_PINS, Pins
from planner.plan.schema import Candidate, Plan
from planner.problem import ROOMY, Problem, at_its_smallest, solved_by
from planner.request import DEFAULT_RISK
from planner.solver.search import search
from planner.solver.shares import priced
from planner.table.cost_table import CostTable
from planner.translate import to_plan

# Predictions that differ by less are called equal: what a search takes for a tie, too.
EQUAL_WITHIN = 1e-3


class Verdict(StrEnum):
    """How an alternative does beside the plan."""

    SLOWER = "slower"
    EQUAL = "as fast"
    FASTER = "faster"
    DOES_NOT_FIT = "does not fit"
    BREAKS_A_RULE = "breaks a rule"
    NOT_FOUND = "not found in time"


@dataclass(frozen=True)
class Alternative:
    """Another plan. Of one that there is none of, ``reason`` says why, and ``way_out`` what would help.

    ``differences_s``: its time less the plan's, term by term; they add up to the difference of the step times.
    """

    label: str
    verdict: Verdict
    candidate: Candidate | None = None
    differences_s: Mapping[Term, float] | None = None  # None: only its step time is known
    plan: Plan | None = None  # of one that was searched for
    lacks_bytes: float | None = None
    reason: str = ""
    way_out: str = ""


class _GroupsKey(NamedTuple):
    groups: tuple[str, ...]


class _NumberKey(NamedTuple):
    num_microbatches: int


def runners_up(
    plan: Plan, planned: PlannedLayout, found: Evaluated, deadline: Deadline | None
) -> tuple[Alternative, ...]:
    """The candidates that the plan itself names; where it names none, those that a search comes by until the deadline.

    ``found``: the plan, priced. Each is cut as well as it can be, where the search stopped to improve those that could
    not become the best. Without a deadline nothing is searched.
    """
    search_section = plan.search
    if search_section is None:
        return () if deadline is None else _searched_runners(planned, found, deadline)
    named = [(each, 1.0) for each in search_section.runners_up]
    others = ((search_section.baseline, 1.0), (search_section.all_devices, 1.0), (search_section.roomier, ROOMY))
    named += [(each, share) for each, share in others if each is not None]
    risk = search_section.memory_risk
    return tuple(_compared(each, found, _priced(each, planned, risk, share)) for each, share in named)


def why_not(plan: Plan, question: Question, found: Evaluated, deadline: Deadline) -> Alternative:
    """The best plan of ``question``, whose pins are those that a user asks after, beside ``plan``.

    The search is that of ``planner search`` with the same pins. ModelError and PlanError are raised: they do not speak
    of the pins.
    """
    label = question.request.pins.describe()
    try:
        answer = answer_of(question, deadline)
    except InfeasibleError as error:
        return Alternative(
            label, Verdict.DOES_NOT_FIT, lacks_bytes=error.lacks_bytes, reason=error.message, way_out=error.hint
        )
    except TimeLimitError as error:
        return Alternative(label, Verdict.NOT_FOUND, reason=error.message, way_out=error.hint)
    except (ModelError, PlanError):
        raise
    except InputError as error:
        return Alternative(label, Verdict.BREAKS_A_RULE, reason=error.message, way_out=error.hint)
    if answer.interrupted:
        raise KeyboardInterrupt
    prediction = answer.plan.prediction
    assert prediction is not None
    differences = {term: prediction.breakdown_s[term] - seconds for term, seconds in found.breakdown.items()}
    verdict = _verdict(prediction.step_time_s, found.step_time_s)
    return Alternative(label, verdict, _candidate_of(label, answer.plan), differences, answer.plan)


def pinned_question(plan: Plan, hardware: str | None, pins: Pins) -> Question:
    """The search that made ``plan``, or would have, with ``pins`` beside its own pins, or in the place of these.

    InputError where the plan names no model, hardware or pins that there are.
    """
    own = {} if plan.search is None else plan.search.pins
    request = replace(
        same_run(plan, plan.num_devices + plan.idle_devices, hardware, {**own, **pins.given()}),
        may_idle=True,
    )
    return Question.of(request)


def _searched_runners(planned: PlannedLayout, found: Evaluated, deadline: Deadline) -> tuple[Alternative, ...]:
    solved = solved_by(deadline, planned.target, planned.training, NO_PINS, DEFAULT_RISK)
    outcome, problem = solved.outcome, solved.problem
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.best is None:
        return ()
    known = [outcome.best, *unlike_runners(problem, outcome, None, deadline)]
    unlike = [each for each in known if (each.layout, each.starts) != (found.layout, found.starts)]
    exact = [problem.exactly(each) for each in unlike]
    named = [(to_plan.candidate(f"#{i + 1}", each, problem.target), each) for i, each in enumerate(exact)]
    return tuple(_compared(candidate, found, each) for candidate, each in named)


def _compared(candidate: Candidate, found: Evaluated, other: Evaluated | None) -> Alternative:
    """``other`` is the candidate, priced; None where it cannot be priced any more."""
    step_s = candidate.step_time_s if other is None else other.step_time_s
    differences = None if other is None else {t: other.breakdown[t] - s for t, s in found.breakdown.items()}
    verdict = _verdict(step_s, found.step_time_s) if candidate.fits else Verdict.DOES_NOT_FIT
    return Alternative(candidate.label, verdict, candidate.model_copy(update={"step_time_s": step_s}), differences)


def _verdict(step_s: float, plan_s: float) -> Verdict:
    if abs(step_s / plan_s - 1) < EQUAL_WITHIN:
        return Verdict.EQUAL
    return Verdict.SLOWER if step_s > plan_s else Verdict.FASTER


def _priced(candidate: Candidate, planned: PlannedLayout, risk: float, share: float) -> Evaluated | None:
    """The layout of ``candidate`` with the best cut; None where the rules allow no such layout any more.

    It takes at most ``share`` of the memory that a plan may take.
    """
    target = planned.target
    if target.cluster.mixed is None:
        cluster = target.cluster.model_copy(update={"num_devices": candidate.mesh.shape().world_size})
        target = replace(target, cluster=cluster)
    try:
        problem = Problem.build(target, planned.training, _pins_of(candidate), risk)
    except PlannerError:
        return None
    cluster = problem.table.cluster
    table = replace(problem.table, cluster=cluster.with_memory_factor(cluster.memory_factor / share))
    if candidate.micro_batch_sizes:
        return _priced_with_shares(candidate, problem, table)
    layouts = problem.space.layouts.where(_GroupsKey, lambda key: key.groups == candidate.device_groups)
    if not layouts:
        return None
    outcome = search(table, layouts, problem.solver)
    if outcome.best is not None:
        return problem.exactly(outcome.best)
    return None if outcome.closest is None else at_its_smallest(table, outcome.closest, exact=True)


def _priced_with_shares(candidate: Candidate, problem: Problem, table: CostTable) -> Evaluated | None:
    """The same of one whose replicas have shares of the batch."""
    mesh, devices = candidate.mesh.shape(), {each.name: each.num_devices for each in table.cluster.devices[1:]}
    if devices.keys() != set(candidate.device_groups):
        return None
    counts = [devices[name] for name in candidate.device_groups]
    sequences = sum(map(mul, counts, candidate.micro_batch_sizes)) // (mesh.cp * mesh.tp)
    number = problem.space.training.global_batch_size // sequences
    alike = problem.space.shares.where(_NumberKey, lambda key: key.num_microbatches == number)
    if not alike:
        return None
    layout = alike[0]._replace(
        groups=candidate.device_groups,
        shares=candidate.micro_batch_sizes,
        micro_batch_size=max(candidate.micro_batch_sizes),
    )
    found = priced(table, layout)
    return None if found is None else problem.exactly(found)


def _pins_of(candidate: Candidate) -> Pins:
    """All that a candidate says; what says nothing of it is left alone."""
    mesh = candidate.mesh.shape()
    return Pins(
        tp=mesh.tp,
        pp=mesh.pp,
        dp=mesh.dp,
        dp_replicate=mesh.dp_replicate,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=mesh.etp or mesh.tp,
        zero=candidate.zero_stage,
        micro_batch=None if candidate.micro_batch_sizes else candidate.micro_batch_size,
        schedule=candidate.schedule if mesh.pp > 1 else None,
        virtual_stages=candidate.virtual_stages if mesh.pp > 1 else None,
        recompute=candidate.recompute,
        sequence_parallel=candidate.sequence_parallel if mesh.tp > 1 else None,
        offload=candidate.offload,
        cp_method=candidate.cp_method if mesh.cp > 1 else None,
    )


def _candidate_of(label: str, plan: Plan) -> Candidate:
    """A whole plan as one row of a table."""
    prediction, pipeline = plan.prediction, plan.pipeline
    assert prediction is not None
    modes = {rule.mode for rule in plan.recompute}
    in_order = pipeline.batch_shares or pipeline.stages
    return Candidate(
        label=label,
        mesh=plan.mesh,
        zero_stage=plan.zero_stage,
        micro_batch_size=pipeline.micro_batch_size,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        recompute=None if modes else Recompute.NONE,
        sequence_parallel=plan.placements.sequence_parallel,
        offload=plan.offload,
        cp_method=plan.cp_method,
        device_groups=tuple(dict.fromkeys(s.device_group for s in in_order if s.device_group is not None)),
        micro_batch_sizes=tuple(share.micro_batch_size for share in pipeline.batch_shares),
        step_time_s=prediction.step_time_s,
        peak_memory_bytes=max(prediction.peak_memory_bytes),
        fits=True,
        fit_probability=prediction.fit_probability,
    )
