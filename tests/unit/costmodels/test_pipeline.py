import random
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.pipeline import Timeline, simulate
from costmodels.vocabulary.action import Action, Transfer
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

seconds = st.floats(min_value=0.001, max_value=10)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 8), (16, 64)])
def test_equal_stages_meet_the_closed_form(name: str, p: int, m: int) -> None:
    timeline = simulate(ScheduleName(name).rules.actions(p, 1, m), [1.0] * p, [2.0] * p, 0.0)
    assert timeline.makespan_s == pytest.approx((m + p - 1) * 3.0)
    assert timeline.busy_s == pytest.approx([m * 3.0] * p)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 32)])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(p: int, v: int, m: int) -> None:
    schedule = ScheduleName("Interleaved1F1B").rules.actions(p, v, m)
    timeline = simulate(schedule, [1.0 / v] * (p * v), [2.0 / v] * (p * v), 0.0)
    assert timeline.makespan_s == pytest.approx(m * 3.0 + (p - 1) * 3.0 / v)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 32)])
def test_splitting_backward_passes_fills_the_bubble(p: int, m: int) -> None:
    def idle(name: str, v: int) -> list[float]:
        """Seconds each rank waits between its first and its last action; F, I and W take one second."""
        each = [1.0 / v] * (p * v)
        timeline = simulate(ScheduleName(name).rules.actions(p, v, m), each, [2.0 / v] * (p * v), 0.0, (each, each))
        assert timeline.busy_s == pytest.approx([3.0 * m] * p)
        return [rank[-1].end_s - rank[0].start_s - 3.0 * m for rank in timeline.ranks]

    whole = idle("1F1B", 1)
    assert max(whole) == pytest.approx((p - 1) * 3.0)
    # Qi et al. (2024), table 2: (p-1)(F + I - W), a third of 1F1B's where all are equal; nothing for the other two
    assert idle("InterleavedZeroBubble", 1) == pytest.approx([seconds / 3 for seconds in whole])
    assert idle("ZB-2P", 1) == pytest.approx([0.0] * p)
    assert idle("ZBVZeroBubble", 2) == pytest.approx([0.0] * p)


def test_a_split_backward_takes_the_seconds_of_its_halves() -> None:
    schedule = ((Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)),)
    assert simulate(schedule, [1.0], [99.0], 0.0, ([2.0], [4.0])).makespan_s == pytest.approx(7.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    forward = [1.0, 1.0, 4.0, 1.0]
    timeline = simulate(ScheduleName("1F1B").rules.actions(4, 1, 100), forward, [0.0] * 4, 0.0)
    assert timeline.makespan_s == pytest.approx(100 * 4 + 1 + 1 + 1)


def test_sends_delay_the_first_microbatch_once_per_hop_and_direction() -> None:
    timeline = simulate(ScheduleName("GPipe").rules.actions(4, 1, 1), [1.0] * 4, [1.0] * 4, 0.25)
    assert timeline.makespan_s == pytest.approx(8 + 6 * 0.25)


def test_sends_that_block_keep_their_sender() -> None:
    schedule = ScheduleName("GPipe").rules.actions(2, 1, 3)
    free = simulate(schedule, [1.0, 1.0], [1.0, 1.0], 0.25)
    held = simulate(schedule, [1.0, 1.0], [1.0, 1.0], 0.25, transfer=Transfer.BLOCKING)
    assert free.makespan_s == pytest.approx(8 + 2 * 0.25)  # each way once
    assert held.makespan_s == pytest.approx(8 + 6 * 0.25)  # after every forward of one and every backward of the other
    assert held.busy_s == free.busy_s
    first, second = held.start_s
    assert first[:3] == pytest.approx((0.0, 1.25, 2.5))
    assert second[:3] == pytest.approx((1.25, 2.5, 3.75))


def test_on_demand_nothing_arrives_while_the_receiver_works() -> None:
    """GPipe: the second rank's forwards follow one another, each behind a way; so do the first rank's backwards."""
    schedule = ScheduleName("GPipe").rules.actions(2, 1, 3)
    timeline = simulate(schedule, [1.0, 1.0], [1.0, 1.0], 0.25, transfer=Transfer.ON_DEMAND)
    first, second = timeline.start_s
    assert first == pytest.approx((0.0, 1.0, 2.0, 6.0, 7.25, 8.5))
    assert second == pytest.approx((1.25, 2.5, 3.75, 4.75, 5.75, 6.75))


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_on_demand_is_as_if_a_pass_took_as_long_as_its_way_and_itself(name: str) -> None:
    rng = random.Random(5)
    for p, m in [(2, 2), (2, 9), (3, 4), (4, 11), (6, 6)]:
        schedule = ScheduleName(name).rules.actions(p, 1, m)
        forward, backward = ([rng.random() for _ in range(p)] for _ in range(2))
        sends = [rng.random() / 4 for _ in range(p - 1)]
        longer = [f + way for f, way in zip(forward, [0.0, *sends], strict=True)]
        later = [b + way for b, way in zip(backward, [*sends, 0.0], strict=True)]
        on_demand = simulate(schedule, forward, backward, sends, transfer=Transfer.ON_DEMAND)
        assert on_demand.makespan_s == pytest.approx(simulate(schedule, longer, later, 0.0).makespan_s, rel=1e-12)
        assert on_demand.busy_s == pytest.approx([m * (f + b) for f, b in zip(forward, backward, strict=True)])


def test_stages_of_one_rank_need_no_send() -> None:
    schedule = ((Action("F", 0, 0), Action("F", 1, 0), Action("B", 1, 0), Action("B", 0, 0)),)
    assert simulate(schedule, [1.0, 1.0], [1.0, 1.0], 100.0).makespan_s == pytest.approx(4.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(list(SCHEDULES)))
    p = draw(st.integers(1, 5))
    v = 2 if "V" in name else draw(st.integers(2, 3)) if name.startswith("Interleaved") else 1
    m = p * draw(st.integers(2 if name == "DualPipeV" else 1, 4))
    return name, p, v, m


@given(problem=problems(), data=st.data(), send_s=st.floats(0, 5))
def test_what_holds_for_any_stages(problem: tuple[str, int, int, int], data: st.DataObject, send_s: float) -> None:
    name, p, v, m = problem
    assert not ScheduleName(name).rules.violations(p, v, m)
    forward = data.draw(st.lists(seconds, min_size=p * v, max_size=p * v))
    backward = data.draw(st.lists(seconds, min_size=p * v, max_size=p * v))
    schedule = ScheduleName(name).rules.actions(p, v, m)
    split = ([0.4 * b for b in backward], [0.6 * b for b in backward])
    timeline = simulate(schedule, forward, backward, send_s, split)

    stages = [{action.stage for action in actions} for actions in schedule]
    work = [m * sum(forward[s] + backward[s] for s in mine) for mine in stages]
    assert timeline.busy_s == pytest.approx(work)
    assert timeline.makespan_s >= max(work) - 1e-9
    rank_of = {stage: rank for rank, mine in enumerate(stages) for stage in mine}
    hops = sum(rank_of[stage] != rank_of[stage + 1] for stage in range(p * v - 1))
    through = 0.4 if ScheduleName(name).rules.splits_backward else 1.0
    assert timeline.makespan_s >= sum(forward) + through * sum(backward) + 2 * hops * send_s - 1e-9

    end = {timed.action: timed.end_s for rank in timeline.ranks for timed in rank}
    start = {timed.action: timed.start_s for rank in timeline.ranks for timed in rank}

    def arrival(action: Action, at: int) -> float:
        return end[action] + (send_s if rank_of[action.stage] != rank_of[at] else 0.0)

    for action, begun in start.items():
        kind, stage, i = action
        if kind == "F" and stage > 0:
            assert begun >= arrival(Action("F", stage - 1, i), stage) - 1e-9
        if kind in ("B", "I") and stage < p * v - 1:
            gradient = next(a for k in ("B", "I") if (a := Action(k, stage + 1, i)) in end)
            assert begun >= arrival(gradient, stage) - 1e-9
        if kind in ("B", "I"):
            assert begun >= end[Action("F", stage, i)] - 1e-9
        if kind == "W":
            assert begun >= end[Action("I", stage, i)] - 1e-9
    for rank in timeline.ranks:
        for previous, following in pairwise(rank):
            assert following.start_s >= previous.end_s

    _links_carry_one_result_after_another(timeline, rank_of, send_s)

    slower = [f * 1.5 for f in forward]
    assert simulate(schedule, slower, backward, send_s, split).makespan_s >= timeline.makespan_s - 1e-9
    assert simulate(schedule, forward, backward, send_s + 1, split).makespan_s >= timeline.makespan_s - 1e-9
    held = simulate(schedule, forward, backward, send_s, split, transfer=Transfer.BLOCKING)
    assert held.makespan_s >= timeline.makespan_s - 1e-9
    assert held.busy_s == pytest.approx(timeline.busy_s)


def _links_carry_one_result_after_another(timeline: Timeline, rank_of: dict[int, int], send_s: float) -> None:
    """Of what a rank has made from some result on, the k-th is not used before it and k - 1 more can be sent."""
    start = {timed.action: timed.start_s for rank in timeline.ranks for timed in rank}
    for rank in timeline.ranks:
        sent: list[tuple[float, float]] = []  # when a result is made, and when another rank begins with it
        for (kind, stage, i), _, end_s in rank:
            to = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and to in rank_of and rank_of[to] != rank_of[stage]:
                uses = [Action(k, to, i) for k in (("F",) if kind == "F" else ("B", "I"))]
                sent.append((end_s, next(start[use] for use in uses if use in start)))
        for first, (made_s, _) in enumerate(sent):
            for k, (_, used_s) in enumerate(sent[first:], 1):
                assert used_s >= made_s + k * send_s - 1e-9


@pytest.mark.parametrize(
    ("name", "v", "crossings"), [("1F1B", 1, 1), ("Interleaved1F1B", 4, 7), ("ZBVZeroBubble", 2, 2)]
)
def test_a_slow_link_sets_the_pace(name: str, v: int, crossings: int) -> None:
    """Two ranks: over each border between them a result goes one way and a gradient the other, 10 s each."""
    m = 64
    timeline = simulate(ScheduleName(name).rules.actions(2, v, m), [0.1] * 2 * v, [0.2] * 2 * v, 10.0)
    assert timeline.makespan_s >= crossings * m * 10.0
    if v > 1:  # enough in flight to keep the link busy
        assert timeline.makespan_s <= 1.1 * crossings * m * 10.0


def test_an_order_that_never_completes_is_refused() -> None:
    first = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    last = (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0))
    with pytest.raises(ValueError, match="deadlocks: rank 0 waits before .*B.*; rank 1 waits before .*F"):
        simulate((first, last), [1.0] * 2, [1.0] * 2, 0.0)


def test_lists_that_do_not_fit_together_are_refused() -> None:
    schedule = ScheduleName("1F1B").rules.actions(2, 1, 2)
    with pytest.raises(ValueError, match="2 stages have a forward time but 1 a backward time"):
        simulate(schedule, [1.0] * 2, [1.0], 0.0)
    with pytest.raises(ValueError, match="runs stage 1, but times are given for 1 stages"):
        simulate(schedule, [1.0], [1.0], 0.0)
    with pytest.raises(ValueError, match="exactly once in every stage"):
        simulate((schedule[0][:-1], schedule[1]), [1.0] * 2, [1.0] * 2, 0.0)
    with pytest.raises(ValueError, match="exactly once in every stage"):
        simulate(((Action("F", 0, 0), Action("W", 0, 0), Action("I", 0, 0)),), [1.0], [1.0], 0.0)
    with pytest.raises(ValueError, match="stage 0 runs on ranks 0 and 1"):
        simulate((schedule[0], schedule[0]), [1.0] * 2, [1.0] * 2, 0.0)


def lines_run(num_ranks: int, num_microbatches: int) -> int:
    """How many lines of Python a simulation runs: its work, on any machine."""
    num_lines = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    schedule = ScheduleName("1F1B").rules.actions(num_ranks, 1, num_microbatches)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        simulate(schedule, [1.0] * num_ranks, [2.0] * num_ranks, 0.01)
    finally:
        sys.settrace(before)
    return num_lines


def test_the_work_of_a_simulation_grows_with_its_actions() -> None:
    small = lines_run(8, 64)
    assert small > 2 * 8 * 64
    assert lines_run(32, 256) < 16 * 1.1 * small
