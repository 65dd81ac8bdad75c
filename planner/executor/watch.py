"""Finds the rank that a run waits for, and ends the run in its name instead of waiting for ever.

A thread of each rank says every few seconds, through the ranks' store, that it is alive, which step it has finished and
which line it is at. A rank that says nothing for ``timeout_s`` is stopped, swapped out or gone. If all are alive and
none finishes a step for twice as long, so that a silent rank is found first (and for ten times the longest step so
far; the first may take four times ``timeout_s``), each rank's line is printed. The lowest rank that is alive speaks,
and all end. Meanwhile torch's own time-outs are out of the way: a collective that runs into one ends its rank without
the name of the rank it waited for. A second thread ends a rank that the store itself does not answer any more: its host
is gone, or the network in between, and the rank would wait for what nobody sends.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to the store of the default process group, its list of groups and a group's time-out; and
# Python none to another thread's frame.

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist
from torch.distributed import distributed_c10d

BEATS_A_TIMEOUT = 20  # so that one late beat is far from a missed one
LONGEST_BEAT_S = 5.0
STEP_TIMEOUTS, FIRST_STEP_TIMEOUTS = 2, 4
STEP_TIMES = 10
SPEAKING_S = 2.0  # in which the launcher ends a rank that is not the first to say why, where both are on one host
COLLECTIVE_TIMEOUT_S = 7 * 24 * 3600.0  # while ranks are watched: longer than any step is waited for
_HERE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    count: int
    step: int  # steps finished
    host: str
    pid: int
    line: str  # of the user's code, or ours, that the main thread is in


@dataclass(frozen=True)
class Finding:
    """Why a run must end: the ranks at fault, and a sentence."""

    ranks: tuple[int, ...]
    text: str


class Record:
    """When each rank was last heard of, and when a step was last finished; times are this process's own."""

    def __init__(self, size: int, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._beats: list[Beat | None] = [None] * size
        self._changed_s = [now_s] * size
        self._step, self._step_s, self._longest_s = 0, now_s, 0.0

    def note(self, rank: int, beat: Beat, now_s: float) -> None:
        """Takes what ``rank`` last said."""
        before = self._beats[rank]
        if before is None or before.count != beat.count:
            self._beats[rank], self._changed_s[rank] = beat, now_s
        if beat.step > self._step:
            if self._step > 0:
                self._longest_s = max(self._longest_s, now_s - self._step_s)
            self._step, self._step_s = beat.step, now_s

    def silent(self, now_s: float) -> tuple[int, ...]:
        """Ranks not heard of for the time-out, with those that went silent within two beats of them, as hosts do."""
        waited_s = [now_s - changed_s for changed_s in self._changed_s]
        if max(waited_s) <= self._timeout_s:
            return ()
        return tuple(r for r, each_s in enumerate(waited_s) if each_s > self._timeout_s - 2 * _beat_s(self._timeout_s))

    def finding(self, now_s: float) -> Finding | None:
        """What is wrong, if anything is."""
        silent = self.silent(now_s)
        if silent:
            who = ", ".join(f"rank {rank}{_who(self._beats[rank])}" for rank in silent)
            verb = "does" if len(silent) == 1 else "do"
            return Finding(silent, f"{who} {verb} not answer since {self._timeout_s:g} s: stopped, hung or gone")
        patience_s = max(STEP_TIMEOUTS * self._timeout_s, STEP_TIMES * self._longest_s)
        if self._step == 0:
            patience_s = FIRST_STEP_TIMEOUTS * self._timeout_s
        if now_s - self._step_s > patience_s:
            lines = "; ".join(f"rank {rank} is at {beat.line}" for rank, beat in enumerate(self._beats) if beat)
            return Finding((), f"step {self._step + 1} is not finished after {patience_s:g} s: {lines}")
        return None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._beats)

    def beat_of(self, rank: int) -> Beat | None:
        """What ``rank`` last said."""
        return self._beats[rank]


@contextlib.contextmanager
def watched(timeout_s: float) -> Generator[Callable[[int], None]]:
    """Watches all ranks of the default process group; yields what is to be called with the number of steps finished."""
    steps = [0]
    done = threading.Event()
    store = distributed_c10d._get_default_store().clone()  # pyright: ignore[reportAttributeAccessIssue]
    main = threading.get_ident()
    _say(store, 0, 0, main)  # before the first step: whoever finishes it knows of all
    answered_s = [time.monotonic()]
    thread = threading.Thread(target=_watch, args=(store, timeout_s, steps, done, main, answered_s), daemon=True)
    thread.start()
    threading.Thread(target=_watch_store, args=(timeout_s, done, answered_s), daemon=True).start()

    def finished(count: int) -> None:
        steps[0] = count

    _set_timeouts(COLLECTIVE_TIMEOUT_S)
    try:
        yield finished
    finally:
        _set_timeouts(timeout_s)
        done.set()
        thread.join(timeout=LONGEST_BEAT_S)


def _set_timeouts(seconds: float) -> None:
    """How long a collective of any group may take."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def _watch_store(timeout_s: float, done: threading.Event, answered_s: list[float]) -> None:
    """Ends this rank once the store has said nothing for ``timeout_s``, in which the other thread may hang."""
    last_s = time.monotonic()
    while not done.wait(_beat_s(timeout_s)):
        now_s = time.monotonic()
        if now_s - last_s > timeout_s:  # it was this rank that slept
            answered_s[0] = now_s
        last_s = now_s
        if now_s - answered_s[0] > timeout_s:
            rank, host = os.environ.get("RANK", "?"), os.environ.get("MASTER_ADDR", "the first host")
            text = f"rank {rank} on {socket.gethostname()} has no answer from {host} since {timeout_s:g} s"
            sys.stderr.write(f"error: {text}: it ended, or the network to it did\nhint: look at that host's messages\n")
            sys.stderr.flush()
            os._exit(1)


def _beat_s(timeout_s: float) -> float:
    return min(LONGEST_BEAT_S, timeout_s / BEATS_A_TIMEOUT)


def _watch(
    store: dist.Store, timeout_s: float, steps: list[int], done: threading.Event, main: int, answered_s: list[float]
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    record = Record(size, timeout_s, time.monotonic())
    count, last_s = 0, time.monotonic()
    with contextlib.suppress(dist.DistError, RuntimeError):  # a store that is gone does not answer
        while not done.wait(_beat_s(timeout_s)):
            count += 1
            _say(store, count, steps[0], main)
            now_s = time.monotonic()
            if now_s - last_s > timeout_s:  # it was this rank that slept: what it missed says nothing of the others
                record = Record(size, timeout_s, now_s)
            last_s = now_s
            for other in range(size):
                if store.check([_key(other)]):
                    record.note(other, Beat(**json.loads(store.get(_key(other)))), now_s)
            answered_s[0] = time.monotonic()
            finding = record.finding(now_s)
            if finding is not None and not done.is_set():
                _end(finding, rank, record)


def _say(store: dist.Store, count: int, step: int, main: int) -> None:
    """Leaves this rank's beat in the store."""
    beat = Beat(count, step, socket.gethostname(), os.getpid(), _line(sys._current_frames().get(main)))
    store.set(_key(dist.get_rank()), json.dumps(asdict(beat)))


def _end(finding: Finding, rank: int, record: Record) -> None:
    """Ends this rank, and those at fault on its host, which hear nothing else; one rank says why."""
    if rank == min(r for r in range(record.size) if r not in finding.ranks):
        sys.stderr.write(f"error: {finding.text}\nhint: all ranks are stopped; --timeout says how long to wait\n")
        sys.stderr.flush()
    else:
        time.sleep(SPEAKING_S)
    for silent in finding.ranks:
        beat = record.beat_of(silent)
        if beat is not None and beat.host == socket.gethostname():
            with contextlib.suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)
    os._exit(1)


def _who(beat: Beat | None) -> str:
    return "" if beat is None else f" (process {beat.pid} on {beat.host}, last at {beat.line})"


def _line(frame: FrameType | None) -> str:
    """The innermost line outside torch and other packages, else the innermost of all."""
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith((_HERE, "<")):
            break
        frame = frame.f_back
    found = frame or innermost
    return "its end" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def _key(rank: int) -> str:
    return f"planner/beat/{rank}"
