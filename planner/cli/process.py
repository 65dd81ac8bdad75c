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

from planner.cli.ctrl_c import interrupt
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


# Seconds that a search has to end by itself when its deadline is over; then it is ended.
GRACE_S = 0.25


@contextlib.contextmanager
def interruptible(deadline: Deadline) -> Generator[None]:
    """Within it Ctrl-C and the clock end the process while there is nothing to answer with.

    Once there is a plan, they only end the search for a better one, and what is shown and written is whole. The second
    Ctrl-C ends the process in any case. KeyboardInterrupt and OutOfTimeError are raised wherever the process is.
    """
    is_ended = was_warned = False

    def interrupted(_signal: int, _frame: FrameType | None) -> None:
        nonlocal is_ended
        is_ended = not deadline.has_answer or deadline.is_cut
        if is_ended:
            interrupt()
        deadline.cut()
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def late(_signal: int, _frame: FrameType | None) -> None:
        nonlocal was_warned
        if is_ended:  # the interrupt was lost
            interrupt()
        if not deadline.has_answer or (was_warned and not deadline.is_settled):
            raise OutOfTimeError
        if not deadline.is_settled:
            was_warned = True
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    alarm_before = signal.signal(signal.SIGALRM, late)
    if deadline.is_limited:
        signal.setitimer(signal.ITIMER_REAL, max(1e-3, deadline.left_s))
    try:
        with rung_again(KeyboardInterrupt, OutOfTimeError):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm_before)
        signal.signal(signal.SIGINT, before)
