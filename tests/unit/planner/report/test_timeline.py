"""The drawn step is the priced one: it ends when the predicted step time does, and runs the executor's action lists."""

import json
import random
from itertools import pairwise

import pytest
from rich.console import Console

from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.evaluator import Evaluator
from planner.layout.layout import Layout, Pins
from planner.render_schedule import show_timeline
from planner.report.timeline import StepTimeline, Work, step_timeline
from planner.report.trace_events import trace_events, trace_json
from tests.planning import problem_of

ROUNDING = 1e-9


def points(schedule: ScheduleName, count: int) -> list[Evaluator]:
    """A few points of the schedule, of pipelines where it needs one."""
    problem = problem_of("gpt2-1.5b", 8, batch=64, pins=Pins(schedule=schedule))
    choices = [c for c in problem.space.layouts if c.num_microbatches <= 64]
    return [Evaluator(problem.table, choice) for choice in random.Random(5).sample(choices, count)]


def a_timeline() -> tuple[StepTimeline, Layout]:
    problem = problem_of("gpt2-1.5b", 8, batch=64, pins=Pins(schedule=ScheduleName.ZBV_ZERO_BUBBLE))
    choice = next(c for c in problem.space.layouts if c.mesh.pp == 4 and c.num_microbatches == 32)
    point = Evaluator(problem.table, choice)
    return step_timeline(point, point.even_starts()), choice


@pytest.mark.parametrize("schedule", ScheduleName)
def test_the_drawn_step_takes_the_predicted_time(schedule: ScheduleName) -> None:
    for point in points(schedule, 12):
        starts = point.even_starts()
        drawn = step_timeline(point, starts)
        predicted = point.evaluate(starts, exact=True)
        assert drawn.step_time_s == pytest.approx(predicted.step_time_s, rel=ROUNDING)
        ends = [span.end_s for rank in drawn.ranks for span in (*rank.actions, *rank.exposed)]
        assert max(ends) == pytest.approx(drawn.step_time_s, rel=ROUNDING)
        work = sum(s.end_s - s.start_s for rank in drawn.ranks for s in rank.actions if s.action)
        times = point._stage_times(starts)
        assert work == pytest.approx(point.layout.num_microbatches * (sum(times.forward_s) + sum(times.backward_s)))


@pytest.mark.parametrize("schedule", ScheduleName)
def test_every_rank_is_drawn_doing_what_its_schedule_lists(schedule: ScheduleName) -> None:
    for point in points(schedule, 4):
        choice = point.layout
        drawn = step_timeline(point, point.even_starts())
        if choice.mesh.pp > 1:
            listed = schedule.rules.actions(choice.mesh.pp, choice.virtual_stages, choice.num_microbatches)
            assert tuple(tuple(s.action for s in rank.actions if s.action) for rank in drawn.ranks) == listed
        for rank in drawn.ranks:
            assert rank.actions[-1].work is Work.OPTIMIZER
            assert 0 <= rank.idle_s + ROUNDING <= drawn.step_time_s + ROUNDING
            for row in (rank.actions, rank.exposed):
                assert all(b.start_s >= a.end_s - ROUNDING for a, b in pairwise(row))
            for span in rank.sends[0]:
                assert span.action is not None
                assert span.action.kind == "F"


def test_nothing_is_sent_where_a_v_turns_round() -> None:
    drawn, choice = a_timeline()
    last = drawn.ranks[-1]
    sent = {span.action.stage for span in last.sends[0] if span.action}
    assert sent == {choice.mesh.pp}  # its second stage sends on; its first hands over on the rank


def test_trace_events_are_what_viewers_read() -> None:
    drawn, choice = a_timeline()
    content = json.loads(trace_json(drawn))
    assert content["traceEvents"] == trace_events(drawn)
    spans = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert {event["ph"] for event in content["traceEvents"]} == {"X", "M"}
    for event in content["traceEvents"]:
        assert {"name", "ts", "dur", "pid", "tid"} <= event.keys()
        assert event["dur"] >= 0
        assert event["ts"] >= 0
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(drawn.step_time_s * 1e6)
    assert {event["pid"] for event in spans} == set(range(choice.mesh.pp))
    assert sum(event["cat"] == "forward" for event in spans) == 2 * choice.mesh.pp * choice.num_microbatches
    for rank in range(choice.mesh.pp):
        for row in range(4):
            lane = [event for event in spans if (event["pid"], event["tid"]) == (rank, row)]
            assert all(b["ts"] >= a["ts"] + a["dur"] - 1e-3 for a, b in pairwise(lane))


def test_a_chart_of_100_columns_is_readable_without_colours() -> None:
    drawn, _ = a_timeline()
    console = Console(width=100, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(show_timeline(drawn, console.width))
    lines = capture.get().splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert sum(line.startswith("rank   0 ") for line in lines) == 3  # whole, beginning, end
    beginning = next(i for i, line in enumerate(lines) if line.startswith("its beginning"))
    assert lines[beginning + 1].startswith("rank   0 F0")
    assert lines[beginning + 4].startswith("rank   3 ··")
    assert "I input gradient; W weight gradient" in capture.get()


def test_many_ranks_are_cut_in_the_middle() -> None:
    problem = problem_of("gpt2-1.5b", 48, batch=48, pins=Pins(pp=48, micro_batch=1))
    point = Evaluator(problem.table, problem.space.layouts[0])
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(show_timeline(step_timeline(point, point.even_starts()), console.width))
    text = capture.get()
    assert "rank  15 " in text
    assert "rank  16 " not in text
    assert "rank  47 " in text
