"""The plan that loses least where something is slower than the profile says: the worst of a few cases decides.

Two things are tried besides the nominal case: half of the bandwidth between nodes, and one host whose devices compute a
tenth slower. Ranks that share a step wait for the slowest of them, so such a host makes all ranks of its pipeline stage
slow, and of the stages the one where that costs most is taken. Placements, cuts and recomputation stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from planner.errors import InputError
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.plan.schema import CaseSection
from planner.pricing.table_builder import build_table, slowed
from planner.pricing.what_if import Change, changed
from planner.problem import Problem
from planner.solver.search import Outcome

# The fastest layouts known that are priced in every case.
MOST_PRICED = 24
SLOW_HOST, SLOW_NETWORK = 1.1, 0.5
CASES = ("as predicted", "half of the bandwidth between nodes", "one host computes 10 % slower")


@dataclass(frozen=True)
class Robust:
    """``outcome`` with the most robust layout as its best, and the cases that decided."""

    outcome: Outcome
    cases: tuple[CaseSection, ...]
    note: str


def most_robust(problem: Problem, outcome: Outcome) -> Robust:
    """Of the layouts that the search visited the one whose worst case is fastest. InputError where devices differ."""
    assert outcome.best is not None
    if problem.target.cluster.mixed is not None:
        raise InputError("the cases of --robust are of clusters whose devices are alike", hint="drop --robust")
    size = outcome.best.layout.mesh.world_size
    known = [outcome.best, *(each for each in outcome.ranking if each.layout.mesh.world_size == size)]
    tried = list({each.layout: each for each in known}.values())[:MOST_PRICED]
    in_cases = _pricer(problem, tried)
    times = [in_cases(each) for each in tried]
    place = min(range(len(tried)), key=lambda i: (max(times[i]), times[i][0]))
    fastest = min(range(len(tried)), key=lambda i: times[i][0])
    cases = tuple(
        CaseSection(case=case, step_time_s=own, fastest_step_time_s=other)
        for case, own, other in zip(CASES, times[place], times[fastest], strict=True)
    )
    is_proved = outcome.is_exhausted and place == fastest
    chosen = replace(outcome, best=tried[place], is_exhausted=is_proved)
    return Robust(chosen, cases, _note(times[place], times[fastest], len(tried)))


def _note(own: tuple[float, ...], fastest: tuple[float, ...], number: int) -> str:
    if own == fastest:
        return f"robust: of {number} plans the fastest one is also the fastest in its worst case"
    return (
        f"robust: {own[0] / fastest[0] - 1:.1%} slower than the fastest of {number} plans if all is as predicted, "
        f"{1 - max(own) / max(fastest):.1%} faster in the worst case"
    )


def _pricer(problem: Problem, tried: list[Evaluated]) -> Callable[[Evaluated], tuple[float, ...]]:
    """Step times of a layout in each of the ``CASES``, for layouts among ``tried``."""
    training, decisions = problem.space.training, problem.decisions
    target = problem.target
    slow_network = replace(target, cluster=changed(target.cluster, Change(network_between=SLOW_NETWORK)))
    network = build_table(slow_network, training, decisions, [each.layout for each in tried])
    host = slowed(problem.table, SLOW_HOST)

    def in_cases(found: Evaluated) -> tuple[float, ...]:
        nominal = Evaluator(problem.table, found.layout, found.modes)
        slow = Evaluator(host, found.layout, found.modes)
        hosts = (nominal.with_rank_of(slow, rank) for rank in range(found.layout.mesh.pp))
        return (
            nominal.evaluate(found.starts).step_time_s,
            Evaluator(network, found.layout, found.modes).evaluate(found.starts).step_time_s,
            max(each.evaluate(found.starts).step_time_s for each in hosts),
        )

    return in_cases
