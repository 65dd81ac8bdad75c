"""Why a plan takes the time and the memory that it takes, and what would change that: ``planner explain``.

The plan is priced again first, so that whatever is set beside it comes from the same prices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodels.vocabulary.choices import Searches
from costmodels.vocabulary.terms import MemoryTerm, Term
from planner.api import PlannedLayout, planned_layout, priced_again
from planner.api.alternatives import Alternative, pinned_question, runners_up, why_not
from planner.api.money import whole_run
from planner.api.operators import ComputeShares, compute_shares
from planner.api.what_if import Resource, WhatIf, what_if
from planner.evaluation.evaluator import Evaluated
from planner.layout.deadline import Deadline
from planner.layout.layout import NO_PINS, Pins
from planner.plan.schema import Plan, RunSection
from planner.translate import to_plan

# Tokens of which a price is always told.
BILLION = 10**9
# Seconds of the search for runners-up and with twice the memory, which nobody asked for: an order of magnitude will do.
USUAL_LIMIT_S = 20.0
# A plan that takes more than this of what it may take of a device has no room to speak of.
NEARLY_FULL = 0.95


@dataclass(frozen=True)
class Wishes:
    """What is asked besides. ``time_limit_s``: of each search; None: as long as it takes, but ``USUAL_LIMIT_S`` where
    nobody asked for the search.
    """

    why_not: Pins | None = None
    num_tokens: int | None = None
    searches: Searches = Searches.MEMORY
    time_limit_s: float | None = None


@dataclass(frozen=True)
class FullestRank:
    """The pipeline rank that takes most of its device. ``terms_bytes`` add up to ``peak_bytes``."""

    rank: int
    terms_bytes: Mapping[MemoryTerm, int]
    peak_bytes: int
    room_bytes: int  # that a plan may take of the device, to fit with the probability that was asked for
    device_bytes: int

    @property
    def is_nearly_full(self) -> bool:
        """Whether there is hardly any room left."""
        return self.peak_bytes > NEARLY_FULL * self.room_bytes


@dataclass(frozen=True)
class Binding:
    """The resource of which twice as much saves most of the step: ``saves``, of 1. None: no change was priced."""

    resource: Resource | None
    saves: float


@dataclass(frozen=True)
class Prices:
    """Dollars and energy. Energy is that of devices alone, at the power of their data sheet; None: not known."""

    usd_per_billion_tokens: float | None
    kwh_per_billion_tokens: float | None
    run: RunSection | None = None
    run_kwh: float | None = None
    watts_source: str = ""


@dataclass(frozen=True)
class Explanation:
    """Everything that is said of ``plan``, whose prediction is made anew.

    ``time_s`` adds up to the step time, on the pipeline rank that works longest.
    """

    plan: Plan
    binding: Binding
    time_s: Mapping[Term, float]
    memory: FullestRank
    compute: ComputeShares
    runners_up: tuple[Alternative, ...]
    why_not: Alternative | None
    what_if: tuple[WhatIf, ...]
    prices: Prices
    band_source: str  # of the band around the step time; "" where there is none
    node_sizes: tuple[int, ...]  # devices of each node that are used, in the order of the ranks
    memory_risk: float  # that a plan may have of not fitting
    notes: tuple[str, ...]


def explain(plan: Plan, hardware: str | None = None, wishes: Wishes | None = None) -> Explanation:
    """Explains ``plan``, on its own or on other hardware.

    InputError where the plan, its model, its hardware or what is asked besides is wrong.
    """
    wishes = wishes or Wishes()
    planned = planned_layout(plan, hardware, None)
    found = planned.evaluator.evaluate(planned.starts, exact=True)
    again = priced_again(plan, planned, found)
    question = pinned_question(plan, hardware, NO_PINS)
    alternative = None
    if wishes.why_not is not None:
        asked = pinned_question(plan, hardware, wishes.why_not)
        alternative = why_not(again, asked, found, Deadline.answering_within(wishes.time_limit_s))
    limit_s = USUAL_LIMIT_S if wishes.time_limit_s is None else wishes.time_limit_s
    of_each = wishes.time_limit_s if wishes.searches is Searches.ALL else limit_s
    changes = what_if(plan, planned, question, of_each, wishes.searches)
    may_search = wishes.searches is not Searches.NONE
    others = runners_up(plan, planned, found, Deadline.answering_within(limit_s) if may_search else None)
    return Explanation(
        plan=again,
        binding=_binding(changes, found.step_time_s, fastest_s(others, found.step_time_s)),
        time_s=found.breakdown,
        memory=_fullest(planned, found, question.request.memory_risk),
        compute=compute_shares(planned),
        runners_up=others,
        why_not=alternative,
        what_if=changes,
        prices=_prices(again, planned, wishes.num_tokens),
        band_source="" if planned.target.recipe.error_band is None else planned.target.recipe.error_band.source,
        memory_risk=question.request.memory_risk,
        node_sizes=planned.target.cluster.node_sizes([each.device_group or "" for each in plan.pipeline.stages]),
        notes=(*planned.notes, *_changed_since(plan, found)),
    )


def _changed_since(plan: Plan, found: Evaluated) -> tuple[str, ...]:
    """A note where the plan itself predicts another step time."""
    if plan.prediction is None or abs(found.step_time_s / plan.prediction.step_time_s - 1) < 1e-6:
        return ()
    return (
        f"the plan predicts a step of {plan.prediction.step_time_s:.4g} s; priced again it takes "
        f"{found.step_time_s:.4g} s, which is what is explained: model, hardware profile or Planner have changed",
    )


def fastest_s(others: Sequence[Alternative], step_s: float) -> float:
    """A step of the plan, ``step_s``, or of a faster one that was found on the same devices."""
    return min([step_s, *(each.candidate.step_time_s for each in others if each.candidate is not None)])


def _binding(changes: tuple[WhatIf, ...], step_s: float, fastest_here_s: float) -> Binding:
    """Everything counts by the same plan, memory by what a search finds with twice as much over what it finds here.

    What it finds may fit without: then memory saves nothing, and a search here would have found it with more time.
    """
    saved: dict[Resource, float] = {}
    for each in changes:
        of_memory = each.resource is Resource.MEMORY
        seconds = each.searched_s if of_memory else each.priced_s
        if each.resource is not None and seconds is not None:
            saved[each.resource] = 1 - seconds / (fastest_here_s if of_memory else step_s)
            if of_memory and not each.needs_change:
                saved[each.resource] = 0.0
    most = max(saved, key=lambda resource: saved[resource], default=None)
    return Binding(None, 0.0) if most is None else Binding(most, max(0.0, saved[most]))


def _fullest(planned: PlannedLayout, found: Evaluated, memory_risk: float) -> FullestRank:
    band = planned.target.recipe.memory_band
    factor = 1.0 if band is None else band.factor(memory_risk)
    pairs = list(zip(found.ledgers, found.capacity_bytes, strict=True))
    rank = max(range(len(pairs)), key=lambda r: pairs[r][0].total_bytes / pairs[r][1])
    ledger, device_bytes = pairs[rank]
    return FullestRank(
        rank=rank,
        terms_bytes=to_plan.term_bytes_exactly(ledger),
        peak_bytes=round(ledger.total_bytes),
        room_bytes=round(device_bytes / factor),
        device_bytes=round(device_bytes),
    )


def _prices(plan: Plan, planned: PlannedLayout, num_tokens: int | None) -> Prices:
    asked = num_tokens if num_tokens is not None or plan.run is None else plan.run.num_tokens
    run = None if asked is None else whole_run(plan, asked)
    prediction, training = plan.prediction, plan.training
    assert prediction is not None
    steps = BILLION / (training.global_batch_size * training.seq_len)
    device_hours = steps * prediction.step_time_s * plan.num_devices / 3600
    watts, usd = planned.target.cluster.profile.device.watts, prediction.usd_per_step
    kilowatts = None if watts is None else watts.value / 1e3
    return Prices(
        usd_per_billion_tokens=None if usd is None else usd * steps,
        kwh_per_billion_tokens=None if kilowatts is None else kilowatts * device_hours,
        run=run,
        run_kwh=None if kilowatts is None or run is None else kilowatts * run.gpu_hours,
        watts_source="" if watts is None else watts.source,
    )
