"""The predicted step, action by action: the very simulation that its step time comes from.

After its last action each rank reduces gradients as far as that is not hidden, and steps its optimiser. Both are priced
as if every rank began them when the slowest has ended the pipeline, and are drawn so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from costmodels.pipeline import Timeline
from costmodels.vocabulary.action import Action
from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.shares import AnyEvaluator


class Work(StrEnum):
    """What a rank is busy with."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    EXPOSED = "communication not hidden"
    REDUCTION = "gradient reduction and parameter gathering, once a step"
    OPTIMIZER = "optimiser step"
    SEND_ACTIVATIONS = "send activations"
    SEND_GRADIENTS = "send gradients"


OF_KIND = {"F": Work.FORWARD, "B": Work.BACKWARD, "I": Work.INPUT_GRADIENT, "W": Work.WEIGHT_GRADIENT}


@dataclass(frozen=True)
class Span:
    """One piece of work and when it runs; ``action`` is None for what happens once a step."""

    work: Work
    start_s: float
    end_s: float
    action: Action | None = None


@dataclass(frozen=True)
class RankTimeline:
    """One pipeline rank. Spans of a row are in order and do not overlap.

    ``exposed``: the part of each action that is communication, drawn at the action's end. ``sends`` run beside the
    actions: of activations, and of gradients.
    """

    actions: tuple[Span, ...]  # and the optimiser step
    exposed: tuple[Span, ...]  # and what is exposed once a step
    sends: tuple[tuple[Span, ...], tuple[Span, ...]]

    @property
    def idle_s(self) -> float:
        """Seconds without work, from the start of the step to the end of this rank's last work."""
        spans = (*self.actions, *(span for span in self.exposed if span.action is None))
        return max(span.end_s for span in spans) - sum(span.end_s - span.start_s for span in spans)


@dataclass(frozen=True)
class StepTimeline:
    """A whole step, one row a pipeline rank; of shares of the batch one for the replicas on each of ``groups``."""

    schedule: ScheduleName
    ranks: tuple[RankTimeline, ...]
    pipeline_s: float  # until the last action of any rank ends
    step_time_s: float
    groups: tuple[str, ...] = ()


def step_timeline(evaluator: AnyEvaluator, starts: tuple[int, ...]) -> StepTimeline:
    """The step of the layout cut at ``starts``."""
    # Where ranks do not wait for each other between steps, each is drawn by its own clock.
    own_clock = evaluator.layout.schedule.rules.overlaps_steps
    timelines = [part.timeline(starts) for part in evaluator.parts]
    pipeline_s = max(each.longest_rank_s if own_clock else each.makespan_s for each in timelines)
    once = [seconds for part in evaluator.parts for seconds in part.once_a_step(starts)]
    reduced_s = pipeline_s + max(data_s for data_s, _ in once)
    ranks: list[RankTimeline] = []
    for part, timeline in zip(evaluator.parts, timelines, strict=True):
        ranks += _ranks(part, starts, timeline, (pipeline_s, reduced_s))
    schedule, groups = evaluator.layout.schedule, evaluator.layout.groups if evaluator.layout.shares else ()
    return StepTimeline(schedule, tuple(ranks), pipeline_s, reduced_s + max(o for _, o in once), groups)


def _ranks(
    evaluator: Evaluator, starts: tuple[int, ...], timeline: Timeline, ends_s: tuple[float, float]
) -> Iterator[RankTimeline]:
    """Of every pipeline rank. ``ends_s``: when the last action of any ends, and the last reduction."""
    pipeline_s, reduced_s = ends_s
    exposed_s = evaluator.exposed_s(starts)
    rank_of_stage = {action.stage: rank for rank, actions in enumerate(timeline.schedule) for action in actions}
    for rank, (data_s, optimizer_s) in enumerate(evaluator.once_a_step(starts)):
        zero_s = timeline.start_s[rank][0] if evaluator.layout.schedule.rules.overlaps_steps else 0.0
        actions = _actions(timeline, rank, zero_s)
        exposed = [_exposed(span, exposed_s) for span in actions]
        yield RankTimeline(
            actions=(*actions, Span(Work.OPTIMIZER, reduced_s, reduced_s + optimizer_s)),
            exposed=(
                *(span for span in exposed if span.end_s > span.start_s),
                *([Span(Work.REDUCTION, pipeline_s, pipeline_s + data_s)] if data_s > 0 else []),
            ),
            sends=_sends(actions, rank_of_stage, evaluator.send_s),
        )


def _actions(timeline: Timeline, rank: int, zero_s: float) -> list[Span]:
    return [
        Span(OF_KIND[timed.action.kind], timed.start_s - zero_s, timed.end_s - zero_s, timed.action)
        for timed in timeline.ranks[rank]
    ]


def _exposed(span: Span, exposed_s: tuple[tuple[float, ...], tuple[float, ...]]) -> Span:
    """The communication of an action: none in the making of weight gradients."""
    assert span.action is not None
    kind, stage, _ = span.action
    seconds = 0.0 if kind == "W" else exposed_s[kind != "F"][stage]
    return Span(Work.EXPOSED, max(span.start_s, span.end_s - seconds), span.end_s, span.action)


def _sends(
    actions: list[Span], rank_of_stage: dict[int, int], send_s: float | Sequence[float]
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """What the rank sends to others; ``send_s[k]`` is from stage k to the next and back, one number all of those."""
    rows: dict[Work, list[Span]] = {Work.SEND_ACTIVATIONS: [], Work.SEND_GRADIENTS: []}
    for span in actions:
        assert span.action is not None
        kind, stage, _ = span.action
        if kind == "W":
            continue
        work, receiver = (Work.SEND_ACTIVATIONS, stage + 1) if kind == "F" else (Work.SEND_GRADIENTS, stage - 1)
        if rank_of_stage.get(receiver, rank_of_stage[stage]) != rank_of_stage[stage]:
            way_s = send_s[min(stage, receiver)] if isinstance(send_s, Sequence) else send_s
            rows[work].append(Span(work, span.end_s, span.end_s + way_s, span.action))
    return tuple(rows[Work.SEND_ACTIVATIONS]), tuple(rows[Work.SEND_GRADIENTS])
