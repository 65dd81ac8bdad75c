"""The command as a process of the system: when it began, and what Ctrl-C and the time limit do to it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

from planner.cli.ctrl_c import idle_while, interrupt
from planner.errors import PlannerError
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.signals import rung_again

_IMPORTED_S = time.monotonic()


def process_began_s() -> float:
    """When this process began, on ``time.monotonic``; where the system does not say, when this module was imported."""
    try:
        # The 20th value behind the name, which is in brackets: ticks from the system's start to the process's.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_S
    return min(_IMPORTED_S, time.monotonic() - age_s)


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Within it nobody looks for cycles of references: searches and imports leave few, and looking costs a tenth.

    Nor does anybody look later through what there was when it ended.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Seconds that a search has to end by itself when its deadline is over, and where time is kept back for the answer no
# more than such a share of that; then it is ended.
GRACE_S, GRACE_SHARE = 0.25, 0.25


@contextlib.contextmanager
def interruptible(deadline: Deadline) -> Generator[None]:
    """Within it Ctrl-C and the clock end the process while there is nothing to answer with.

    Once there is a plan, they only end the search for a better one, and what is shown and written is whole. The second
    Ctrl-C ends the process in any case. KeyboardInterrupt and OutOfTimeError are raised wherever the process is, also
    on the way out of here; OutOfTimeError too where a library made an error of its own of it, as pydantic does.
    """
    handlers = _Handlers(deadline)
    try:
        with handlers.at_work(), rung_again(KeyboardInterrupt, OutOfTimeError):
            yield
    except PlannerError:
        raise
    except Exception as error:
        if handlers.was_late:
            raise OutOfTimeError from error
        raise


class _Handlers:
    """What Ctrl-C and the alarm do. ``was_late``: the alarm has raised OutOfTimeError."""

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._is_ended = self._was_warned = self.was_late = False

    @contextlib.contextmanager
    def at_work(self) -> Generator[None]:
        """Within it they handle the signals, and the alarm is set for the deadline of an answer, if there is one."""
        with contextlib.ExitStack() as undone:
            undone.enter_context(idle_while(lambda: not self._deadline.has_answer))
            before = signal.getsignal(signal.SIGINT)
            if before is not signal.SIG_IGN:
                undone.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, self._interrupted))
            undone.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, self._late))
            undone.callback(signal.setitimer, signal.ITIMER_REAL, 0)
            if self._deadline.is_limited:
                self._wake_in(self._deadline.left_with_answer_s)
            yield

    def _interrupted(self, _signal: int, _frame: FrameType | None) -> None:
        self._is_ended = not self._deadline.has_answer or self._deadline.is_cut
        if self._is_ended:
            interrupt()
        self._deadline.cut()
        self._wake_in(GRACE_S)

    def _late(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_ended:  # the interrupt was lost
            interrupt()
        deadline = self._deadline
        if deadline.is_limited and not deadline.has_answer and not deadline.is_over():
            self._wake_in(deadline.left_s)  # into the time that was kept back for the answer
        elif not deadline.has_answer or (self._was_warned and not deadline.is_settled):
            self.was_late = True
            raise OutOfTimeError
        elif not deadline.is_settled:
            self._was_warned = True
            self._wake_in(min(GRACE_S, GRACE_SHARE * deadline.kept_back_s or GRACE_S))

    def _wake_in(self, seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, seconds))
