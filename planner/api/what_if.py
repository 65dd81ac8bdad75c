"""A plan with more of something, or on other devices: what would help, and by how much.

Two things are asked. The same plan is *priced again*: layout, cut, recomputation and placements stay. And it may be
*searched again* for the best plan there, which takes as long as a search. Memory is only asked by a search: a plan is
as fast as it is, however much is left free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from costmodels.vocabulary.choices import Searches
from planner.api import PlannedLayout, Question, answer_of, price_plan
from planner.errors import PlannerError
from planner.layout.deadline import Deadline
from planner.plan.schema import MeshSection, Plan, PredictionSection
from planner.pricing.what_if import Change, changed

# Other devices that are asked about, where the plan is for one kind: one profile of each generation.
OTHER_PROFILES = ("dgx-a100-80gb", "dgx-h100-80gb", "dgx-h200", "dgx-b200")


class Resource(StrEnum):
    """What a machine has. Of these the one is called binding of which twice as much saves most."""

    label: str  # of twice as much of it

    def __new__(cls, value: str, label: str) -> Resource:
        """A resource with its key and its label."""
        resource = str.__new__(cls, value)
        resource._value_ = value
        resource.label = label
        return resource

    ARITHMETIC = "arithmetic", "twice the FLOP/s of each GPU"
    MEMORY_BANDWIDTH = "memory bandwidth", "twice the memory bandwidth of each GPU"
    MEMORY = "memory", "twice the memory of each GPU"
    NETWORK_INSIDE = "network inside a node", "twice the network inside a node"
    NETWORK_BETWEEN = "network between nodes", "twice the network between nodes"


_CHANGES = {
    Resource.ARITHMETIC: Change(arithmetic=2),
    Resource.MEMORY_BANDWIDTH: Change(memory_bandwidth=2),
    Resource.MEMORY: Change(memory=2),
    Resource.NETWORK_INSIDE: Change(network_inside=2),
    Resource.NETWORK_BETWEEN: Change(network_between=2),
}


_TWICE_THE_SPEED = "twice the speed of each GPU (FLOP/s and memory)"


@dataclass(frozen=True)
class WhatIf:
    """One change. ``priced_s``: a step of the same plan; ``searched_s``: of the best plan there, which ``mesh`` tells.

    None: not asked, or there is no such plan, as ``says`` tells.
    """

    change: str
    resource: Resource | None = None
    priced_s: float | None = None
    fits: bool | None = None  # the same plan
    searched_s: float | None = None
    mesh: MeshSection | None = None
    needs_change: bool | None = None  # the best plan there does not fit the devices as they are
    says: str = ""


def what_if(
    plan: Plan, planned: PlannedLayout, question: Question, limit_s: float | None, searches: Searches
) -> tuple[WhatIf, ...]:
    """Every change. ``question`` is the search that the plan answers; each search takes ``limit_s`` at most."""

    def due(*, is_asked: bool) -> Deadline | None:
        return Deadline.answering_within(limit_s) if is_asked else None

    found: list[WhatIf] = []
    for resource in Resource:
        asked = searches is Searches.ALL or (searches is Searches.MEMORY and resource is Resource.MEMORY)
        row = _of_change(resource.label, _CHANGES[resource], planned, question, due(is_asked=asked))
        found.append(replace(row, resource=resource))
    of_all = searches is Searches.ALL
    found.append(_of_change(_TWICE_THE_SPEED, Change(2, 2), planned, question, due(is_asked=of_all)))
    cluster = question.target.cluster
    if cluster.mixed is None and cluster.profile.name in OTHER_PROFILES:
        others = [name for name in OTHER_PROFILES if name != cluster.profile.name]
        found += [_on_other(name, plan, question, due(is_asked=of_all)) for name in others]
    return tuple(found)


def _of_change(
    label: str, change: Change, planned: PlannedLayout, question: Question, deadline: Deadline | None
) -> WhatIf:
    """``deadline``: of a search for the best plan; None: there is none."""
    priced = planned.on(replace(planned.target, cluster=changed(planned.target.cluster, change)))
    asked = WhatIf(label, priced_s=priced.step_time_s, fits=priced.fits)
    if deadline is None:
        return asked
    cluster = changed(question.target.cluster, change)
    return _searched(asked, replace(question, target=replace(question.target, cluster=cluster)), deadline, change)


def _on_other(name: str, plan: Plan, question: Question, deadline: Deadline | None) -> WhatIf:
    label = f"on as many GPUs of {name}"
    try:
        answer = price_plan(plan, name)
        prediction = answer.plan.prediction
        assert prediction is not None
        fits = max(prediction.peak_memory_bytes) <= prediction.memory_capacity_bytes
        asked = WhatIf(label, priced_s=prediction.step_time_s, fits=fits)
        if deadline is None:
            return asked
        request = replace(question.request, hardware=name)
        return _searched(asked, Question.of(request), deadline)
    except PlannerError as error:
        return WhatIf(label, says=error.message.partition("\n")[0])


def _searched(asked: WhatIf, question: Question, deadline: Deadline, change: Change | None = None) -> WhatIf:
    try:
        answer = answer_of(question, deadline)
    except PlannerError as error:
        return replace(asked, says=error.message.partition("\n")[0])
    if answer.interrupted:
        raise KeyboardInterrupt
    found = answer.plan.prediction
    assert found is not None
    needs_change = None if change is None else _needs(change, found, question)
    return replace(asked, searched_s=found.step_time_s, mesh=answer.plan.mesh, needs_change=needs_change)


def _needs(change: Change, found: PredictionSection, question: Question) -> bool:
    """Whether a plan found with ``change`` takes more memory than a plan may take without it."""
    band = question.target.recipe.memory_band
    factor = 1.0 if band is None else band.factor(question.request.memory_risk)
    pairs = zip(found.peak_memory_bytes, found.rooms_bytes, strict=True)
    return any(peak * factor > room / change.memory for peak, room in pairs)
