"""Many sets of seconds at once take what each takes alone, action by action."""

import random

import numpy as np
import pytest

from costmodels.pipeline import simulate
from costmodels.pipeline_many import simulate_many, whole_s
from costmodels.vocabulary.action import Action, ActionColumns, Transfer
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName

SETS = 4


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("longest_s", [0.25, 3.0])
def test_as_each_alone(name: ScheduleName, transfer: Transfer, longest_s: float) -> None:
    rng, tried = random.Random(3), 0
    for p, v, m in [(2, 1, 3), (2, 2, 4), (3, 1, 7), (4, 1, 8), (4, 2, 9), (4, 3, 8), (4, 2, 16)]:
        if name.rules.violations(p, v, m):
            continue
        tried += 1
        num_stages, schedule = p * v, name.rules.actions(p, v, m)
        forward, backward = np.array([[rng.random() for _ in range(SETS)] for _ in range(2 * num_stages)]).reshape(
            2, num_stages, SETS
        )
        weight = backward * rng.random()
        sends = [rng.random() * longest_s for _ in range(num_stages - 1)]
        seconds = np.concatenate([forward, backward, backward - weight, weight])
        together = simulate_many(name.rules.columns(p, v, m), seconds, sends, transfer=transfer)
        for at in range(SETS):
            split = (backward - weight)[:, at].tolist(), weight[:, at].tolist()
            one = forward[:, at].tolist(), backward[:, at].tolist()
            alone = simulate(schedule, *one, sends, split, transfer=transfer)
            assert together.makespan_s[at] == pytest.approx(alone.makespan_s, rel=1e-12)
            assert together.longest_rank_s[at] == pytest.approx(alone.longest_rank_s, rel=1e-12)
    assert tried > 0


def test_a_long_schedule_is_extrapolated_once_it_is_steady() -> None:
    """Equal stages and free sends: (m + p - 1) (f + b), whatever the number of micro-batches."""
    rules, p, m = SCHEDULES[ScheduleName.ONE_F_ONE_B], 4, 1000
    seconds = np.repeat([[1.0, 0.5], [2.0, 1.0], [2.0, 1.0], [0.0, 0.0]], p, axis=0)
    asked: list[int] = []

    def run(num_microbatches: int, sets: np.ndarray) -> np.ndarray:
        asked.append(num_microbatches)
        return simulate_many(rules.columns(p, 1, num_microbatches), seconds[:, sets], [0.0] * (p - 1)).makespan_s

    assert whole_s(run, rules, p, m, np.array([3.0, 1.5])).tolist() == pytest.approx([3009.0, 1504.5])
    assert max(asked) < m


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    schedule = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="exactly once"):
        simulate_many(ActionColumns.of(schedule), np.ones((8, 1)), [0.0])
