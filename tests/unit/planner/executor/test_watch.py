"""A rank that says nothing, or a step that does not end, is found after the time-out and not before."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time

import pytest

from planner.executor.watch import Beat, Finding, Record, _end, _watch_store

TIMEOUT_S = 10.0


def beat(count: int, step: int = 0, line: str = "model.py:3") -> Beat:
    return Beat(count, step, "host", 42, line)


def test_a_silent_rank_is_named_with_its_last_line() -> None:
    record = Record(2, TIMEOUT_S, 0.0)
    for now_s in range(1, 12):
        record.note(0, beat(now_s, 1), now_s)
        record.note(1, beat(1, 1), now_s)  # the same beat, read again
        finding = record.finding(now_s)
        assert (finding is None) == (now_s < 12)
    record.note(0, beat(12, 1), 12)
    finding = record.finding(12.0)
    assert finding is not None
    assert finding.ranks == (1,)
    assert finding.text.startswith("rank 1 (process 42 on host, last at model.py:3) does not answer since 10 s")


def test_ranks_of_a_host_that_went_at_once_are_named_together() -> None:
    record = Record(4, TIMEOUT_S, 0.0)
    for rank, heard_s in ((1, 1.0), (2, 1.9), (3, 2.1), (0, 11.0)):
        record.note(rank, beat(5, 1), heard_s)
    finding = record.finding(11.01)
    assert finding is not None
    assert finding.ranks == (1, 2)  # a beat is 0.5 s, and the third was heard of more than two later
    assert record.finding(10.99) is None


def test_a_rank_that_never_came_is_named() -> None:
    record = Record(2, TIMEOUT_S, 0.0)
    record.note(0, beat(1), 9.0)
    assert record.finding(9.0) is None
    finding = record.finding(10.5)
    assert finding is not None
    assert finding.ranks == (1,)


def alive(record: Record, now_s: float, step: int) -> None:
    record.note(0, beat(round(now_s * 10), step, "model.py:7"), now_s)
    record.note(1, beat(round(now_s * 10), step, "model.py:9"), now_s)


def test_a_step_that_does_not_end_shows_where_each_rank_is() -> None:
    record = Record(2, TIMEOUT_S, 0.0)
    alive(record, 1.0, 1)
    alive(record, 1.5, 2)  # a step of half a second
    for now_s in (6.0, 11.0, 16.0, 21.0):
        alive(record, now_s, 2)
        assert record.finding(now_s) is None
    alive(record, 22.0, 2)
    finding = record.finding(22.0)
    assert finding is not None
    assert finding.ranks == ()
    assert "step 3 is not finished after 20 s: rank 0 is at model.py:7; rank 1 is at model.py:9" in finding.text


def test_long_steps_and_a_long_first_one_are_waited_for() -> None:
    record = Record(2, TIMEOUT_S, 0.0)
    for now_s in range(0, 40, 5):
        alive(record, now_s, 0)
        assert record.finding(now_s) is None
    alive(record, 39.0, 1)
    alive(record, 44.0, 2)  # a step of 5 s
    for now_s in range(45, 94, 5):
        alive(record, now_s, 2)
        assert record.finding(now_s) is None
    alive(record, 95.0, 2)
    assert record.finding(95.0) is not None


def test_a_rank_ends_when_the_store_of_the_first_host_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, with a store that stops answering as one on a host that lost its power."""
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": "3", "MASTER_ADDR": "host0"}
        _watch_store(0.2, threading.Event(), [time.monotonic()])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    said = capfd.readouterr().err
    assert "error: rank 3 on " in said
    assert "has no answer from host0 since 0.2 s" in said


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (2, False)])
def test_ranks_of_every_host_end_and_a_stopped_one_with_them(
    rank: int, speaks: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = subprocess.Popen(["sleep", "60"])
    stopped.send_signal(signal.SIGSTOP)
    record = Record(3, TIMEOUT_S, 0.0)
    record.note(1, Beat(1, 1, socket.gethostname(), stopped.pid, "model.py:3"), 0.0)
    child = os.fork()
    if child == 0:
        _end(Finding((1,), "rank 1 does not answer"), rank, record)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert stopped.wait(timeout=30) == -signal.SIGKILL
    assert ("error: rank 1 does not answer" in capfd.readouterr().err) == speaks
