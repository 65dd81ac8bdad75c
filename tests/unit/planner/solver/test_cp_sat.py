"""What CP-SAT's time is, and what is said where it ran out."""

import pytest

from planner.layout.deadline import Deadline, OutOfTimeError
from planner.solver.base import UnprovedError
from planner.solver.cp_program import CpModel, CpSolverStatus, Status
from planner.solver.cp_sat import CpSatSolver
from tests.random_problems import random_placement


class _Stopped:
    """OR-Tools' answer where it found nothing in the time it was given; some of that time is left."""

    limit_s = 0.0

    def __call__(self, _model: CpModel, limit_s: float) -> tuple[CpSolverStatus, None]:
        self.limit_s = limit_s
        return Status.UNKNOWN, None


@pytest.mark.parametrize(
    ("deadline", "limit_s", "error"),
    [(Deadline.within(60.0), 60.0, OutOfTimeError), (Deadline.never(), 100.0, UnprovedError)],
)
def test_no_answer_in_time(
    deadline: Deadline, limit_s: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops a moment before the deadline: then the deadline is what ended it."""
    stopped = _Stopped()
    monkeypatch.setattr("planner.solver.cp_sat.solved", stopped)
    with pytest.raises(error):
        CpSatSolver(100.0, deadline).solve_placement(random_placement(0))
    assert stopped.limit_s == pytest.approx(limit_s, abs=30.0)
