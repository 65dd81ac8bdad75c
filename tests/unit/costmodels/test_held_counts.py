"""What ranks hold before their backward passes, counted at once, is what a replay of their actions finds."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import pytest

from costmodels.vocabulary.action import Action
from costmodels.vocabulary.held_counts import FIRST, LATER, BackwardPass, held_counts, of_one_stage
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName, peak_in_flight
from tests.replay import before_each_backward

OF_ONE = [name for name in SCHEDULES if SCHEDULES[name].has_one_stage]
OF_SEVERAL = [name for name in SCHEDULES if not SCHEDULES[name].has_one_stage]
WHOLE = [name for name in SCHEDULES if not SCHEDULES[name].splits_backward]
LONG = (1, 2, 4, 6, 8, 12, 24, 32, 45)


def replayed(
    actions: Sequence[Action], kept: Mapping[int, float], waiting: Mapping[int, float]
) -> dict[BackwardPass, float]:
    stages, most = sorted(kept), dict[BackwardPass, float]()
    for stage, before, made, held in before_each_backward(actions, kept, waiting):
        waits = None if before is None else stages.index(before)
        key = BackwardPass(stages.index(stage), waits, tuple(map(stages.index, made)))
        most[key] = max(most.get(key, 0.0), held)
    return most


def legal(names: Sequence[ScheduleName], *, most_stages: int = 3) -> Iterator[tuple[ScheduleName, int, int, int]]:
    for name, p, v, m in itertools.product(names, (2, 3, 4), range(1, most_stages + 1), LONG):
        if not name.rules.violations(p, v, m):
            yield name, p, v, m


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_the_most_before_each_backward_pass_is_that_of_a_replay(name: ScheduleName) -> None:
    for _, p, v, m in legal([name]):
        for actions, counts in zip(name.rules.actions(p, v, m), held_counts(name, p, v, m), strict=True):
            stages = sorted({action.stage for action in actions})
            kept = {stage: 3.0 + stage % 5 for stage in stages}
            waiting = {stage: (-1.0) ** stage * 0.5 for stage in stages}
            found = dict(zip(*counts.most_of_each([*kept.values(), *waiting.values()]), strict=True))
            assert found == pytest.approx(replayed(actions, kept, waiting)), (p, v, m)
            assert max(found.values()) == pytest.approx(peak_in_flight(actions, kept, waiting))


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_a_shortened_schedule_has_the_same_backward_passes(name: ScheduleName) -> None:
    for _, p, v, m in legal([name]):
        short = name.rules.shortened_to_peak(p, m)
        for few, many in zip(held_counts(name, p, v, short), held_counts(name, p, v, m), strict=True):
            bytes_of = [3.0 + 2 * stage % 5 for stage in range(2 * v)]
            one, other = (dict(zip(*each.most_of_each(bytes_of), strict=True)) for each in (few, many))
            assert one == pytest.approx(other), (p, v, m)


@pytest.mark.parametrize("name", OF_ONE)
def test_what_a_rank_s_only_stage_holds_is_that_of_a_replay(name: ScheduleName) -> None:
    for _, p, _, m in legal([name]):
        pairs = zip(name.rules.actions(p, 1, m), name.rules.in_flight(p, m), strict=True)
        for rank, (actions, in_flight) in enumerate(pairs):
            found = dict(zip(*of_one_stage(in_flight, m), strict=True))
            assert found == replayed(actions, {rank: 1.0}, {rank: 0.0}), (p, m)
    assert of_one_stage(3, 1) == ((FIRST,), (3,))
    assert of_one_stage(3, 2).passes == (FIRST, LATER)


def test_the_peak_comes_again_after_the_lowest_stage_where_the_records_say_so() -> None:
    seen = {False: 0, True: 0}
    for name, p, v, m in legal(WHOLE):
        flying, _ = name.rules.in_flight_by_stage(p, v, m)
        again = True
        for rank, actions in enumerate(name.rules.actions(p, v, m)):
            lowest, held, after = rank, dict.fromkeys((action.stage for action in actions), 0), list[int | None]()
            before = None
            for kind, stage, _ in actions:
                if kind != "F" and all(held[s] == flying[s] for s in held):
                    after.append(before)
                held[stage] += 1 if kind == "F" else -1
                before = before if kind == "F" else stage
            assert after[0] is None, (name, p, v, m)  # it is there before the first
            again = again and lowest in after
        says = name.rules.peak_comes_again(p, v, m)
        assert again or not says, (name, p, v, m)
        seen[says] += 1
    assert min(seen.values()) > 5


def test_the_micro_batches_in_flight_at_the_lowest_stage_are_those_of_a_replay() -> None:
    seen = 0
    for name, p, v, m in legal([name for name in SCHEDULES if SCHEDULES[name].begins_stage_by_stage]):
        found = name.rules.in_flight_at_lowest(p, v, m)
        for rank, actions in enumerate(name.rules.actions(p, v, m)):
            first = next(place for place, (kind, stage, _) in enumerate(actions) if kind != "F" and stage == rank)
            held = Counter(dict.fromkeys(range(rank, p * v, p), 0))
            for kind, stage, _ in actions[:first]:
                held[stage] += 1 if kind == "F" else -1
            assert held == {stage: found[stage] for stage in held}, (p, v, m)
            seen += 1
    assert seen > 50
