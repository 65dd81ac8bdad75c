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


@pytest.mark.parametrize(("within_s", "limit_s", "error"), [(50.0, 50.0, OutOfTimeError), (None, 100.0, UnprovedError)])
def test_no_answer_in_time(
    within_s: float | None, limit_s: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops a moment before the deadline: then the deadline is what ended it."""
    stopped = _Stopped()
    monkeypatch.setattr("planner.solver.cp_sat.solved", stopped)
    with pytest.raises(error):
        CpSatSolver(100.0, Deadline.within(within_s)).solve_placement(random_placement(0))
    assert limit_s / 2 < stopped.limit_s <= limit_s
