"""The time of many micro-batches that is found from few is that of the whole schedule, action by action."""

import numpy as np
import pytest

from costmodels import pipeline_steady
from costmodels.pipeline_many import simulate_many
from costmodels.pipeline_steady import simulate_long
from costmodels.vocabulary.action import ActionColumns, Transfer
from costmodels.vocabulary.schedules import ScheduleName

SHAPES = [(2, 1, 99), (3, 1, 130), (4, 1, 163), (2, 2, 96), (3, 2, 120), (4, 2, 174), (4, 3, 240), (8, 2, 416)]


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches of every schedule that is simulated whole."""
    found: list[int] = []

    def run(schedule: ActionColumns, seconds: np.ndarray, sends: list[float], *, transfer: Transfer) -> object:
        found.append(1 + int(schedule.microbatch.max()))
        return simulate_many(schedule, seconds, sends, transfer=transfer)

    monkeypatch.setattr(pipeline_steady, "simulate_many", run)
    return found


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize("transfer", Transfer)
def test_as_the_whole_schedule(name: ScheduleName, transfer: Transfer, whole_runs: list[int]) -> None:
    """Stages alike, nearly alike and unlike, with sends shorter and longer than passes."""
    rng, tried = np.random.default_rng(7), 0
    for p, v, m in SHAPES:
        if name.rules.violations(p, v, m):
            continue
        for spread, send_s in [(0.0, 0.0), (0.0, 0.1), (0.05, 0.1), (1.0, 0.01), (1.0, 1.0), (0.05, 6.0)]:
            tried += 1
            forward = 1 + spread * rng.random(p * v)
            backward, sends = 2 * forward, (send_s * rng.random(p * v - 1)).tolist()
            weight = backward * rng.random()
            seconds = np.concatenate([forward, backward, backward - weight, weight])[:, None]
            long = simulate_long(name.rules, (p, v, m), seconds, sends, transfer=transfer)
            whole = simulate_many(name.rules.columns(p, v, m), seconds, sends, transfer=transfer)
            assert long.makespan_s == pytest.approx(whole.makespan_s, rel=1e-10)
            assert long.longest_rank_s == pytest.approx(whole.longest_rank_s, rel=1e-10)
    assert tried > 0
    num_found = tried - len(whole_runs)
    assert num_found == 0 if name.rules.forwards_first else num_found > tried / 2


def test_a_hundred_thousand_rounds_are_told_from_few(whole_runs: list[int]) -> None:
    """Equal stages and free sends: (m + p - 1) (f + b)."""
    p, m = 4, 400_000
    seconds = np.repeat([1.0, 2.0, 2.0, 0.0], p)[:, None]
    long = simulate_long(ScheduleName.ONE_F_ONE_B.rules, (p, 1, m), seconds, [0.0] * (p - 1))
    assert long.makespan_s[0] == pytest.approx((m + p - 1) * 3.0, rel=1e-12)
    assert not whole_runs
