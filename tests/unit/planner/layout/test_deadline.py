import math
import time

import pytest

from planner.layout.deadline import Deadline, OutOfTimeError


def test_without_a_limit_it_is_never_over() -> None:
    never = Deadline.never()
    assert (never.is_over(), never.left_s, never.is_limited) == (False, math.inf, False)
    never.check()


def test_without_time_it_is_over_at_once() -> None:
    over = Deadline.within(0.0)
    assert (over.is_over(), over.left_s, over.is_limited) == (True, 0.0, True)
    with pytest.raises(OutOfTimeError):
        over.check()


def test_who_wants_the_answer_earlier_cuts_it() -> None:
    deadline = Deadline.never()
    deadline.cut()
    assert (deadline.is_over(), deadline.is_cut, deadline.left_s) == (True, True, 0.0)


@pytest.mark.parametrize(("limit_s", "kept_back_s"), [(1.2, 0.4), (3600.0, 1.0)])
def test_time_is_kept_back_for_the_answer(limit_s: float, kept_back_s: float) -> None:
    before_s = time.monotonic()
    deadline = Deadline.answering_within(limit_s)
    over_s, due_s = (time.monotonic() + each for each in (deadline.left_s, deadline.left_with_answer_s))
    deadline.promise()
    now_due_s = time.monotonic() + deadline.left_s
    # Without a plan to answer with, it goes into finding one.
    for found_s, expected_s in ((over_s, limit_s), (due_s, limit_s - kept_back_s), (now_due_s, limit_s - kept_back_s)):
        assert before_s + expected_s <= found_s <= time.monotonic() + expected_s


def test_a_plan_that_comes_late_is_answered_with_at_once() -> None:
    deadline = Deadline(time.monotonic() - 1, 0.0, kept_back_s=100)
    deadline.check()
    deadline.promise()
    assert deadline.is_over()
    assert Deadline(time.monotonic() - 1, 0.0, kept_back_s=0.5).is_over()


def test_what_has_passed_is_counted_from_the_beginning() -> None:
    began_s = time.monotonic() - 100
    assert Deadline.within(None, began_s=began_s).elapsed_s >= 100
    assert Deadline.never().elapsed_s < 100


def test_a_chosen_answer_is_one() -> None:
    deadline = Deadline.never()
    assert not deadline.has_answer
    deadline.settle()
    assert deadline.has_answer
    assert deadline.is_settled
