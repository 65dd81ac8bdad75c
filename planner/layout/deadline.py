"""When an answer is due: one clock for everything that one question takes, from tracing to the plan.

Whatever takes long is given the deadline and looks at it between its steps. Two things end it: the clock, and somebody
who wants what there is now (Ctrl-C).
"""

from __future__ import annotations

import math
import time


class OutOfTimeError(Exception):
    """The deadline was over before a step could end; whoever has a plan by then answers with it."""


class Deadline:
    """A moment on ``time.monotonic``, and the moment from which the time that an answer took is counted.

    Time may be kept back to work the answer out. As long as there is no plan to answer with, it goes into finding one:
    the deadline is that much later then.
    """

    def __init__(self, due_s: float, began_s: float, kept_back_s: float = 0.0) -> None:
        self._due_s, self._began_s = due_s, began_s
        self.kept_back_s = kept_back_s
        self._is_cut = self._has_answer = self._is_settled = False

    @staticmethod
    def never() -> Deadline:
        """There is time for everything."""
        return Deadline.within(None)

    @staticmethod
    def within(limit_s: float | None, *, began_s: float | None = None, kept_back_s: float = 0.0) -> Deadline:
        """``limit_s`` seconds from now, None: never. ``began_s``: what is counted from, where that is not now.

        ``kept_back_s``: of the limit, to work the answer out.
        """
        now_s = time.monotonic()
        due_s = math.inf if limit_s is None else now_s + limit_s - kept_back_s
        return Deadline(due_s, now_s if began_s is None else began_s, kept_back_s)

    @staticmethod
    def answering_within(limit_s: float | None, *, began_s: float | None = None) -> Deadline:
        """The same with time kept back to work the answer out: a third of the limit, a second at most."""
        kept_back_s = 0.0 if limit_s is None else min(limit_s / 3, 1.0)
        return Deadline.within(limit_s, began_s=began_s, kept_back_s=kept_back_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 where it is over, infinite where it never is."""
        return self._left_until(self._over_s)

    @property
    def left_with_answer_s(self) -> float:
        """The same if there is a plan to answer with by then."""
        return self._left_until(self._due_s)

    def _left_until(self, moment_s: float) -> float:
        return 0.0 if self._is_cut else max(0.0, moment_s - time.monotonic())

    @property
    def _over_s(self) -> float:
        return self._due_s if self._has_answer else self._due_s + self.kept_back_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since everything began."""
        return time.monotonic() - self._began_s

    @property
    def is_limited(self) -> bool:
        """Whether the clock can end it."""
        return self._due_s != math.inf

    def is_over(self) -> bool:
        """Whether to stop and answer with what there is."""
        return self._is_cut or time.monotonic() >= self._over_s

    def check(self) -> None:
        """OutOfTimeError where it is over."""
        if self.is_over():
            raise OutOfTimeError

    # -- Ctrl-C ---------------------------------------------------------------------------------

    @property
    def has_answer(self) -> bool:
        """Whether there is a plan to answer with: then Ctrl-C ends the search, and not the process."""
        return self._has_answer

    def promise(self) -> None:
        """From now on there is a plan to answer with."""
        self._has_answer = True

    @property
    def is_settled(self) -> bool:
        """Whether the answer is chosen: what is left is to describe it, which nothing should stop."""
        return self._is_settled

    def settle(self) -> None:
        """From now on the answer is chosen."""
        self._has_answer = self._is_settled = True

    def resume(self) -> None:
        """A better answer is looked for again; the one there is stays."""
        self._is_settled = False

    @property
    def is_cut(self) -> bool:
        """Whether somebody wanted the answer earlier."""
        return self._is_cut

    def cut(self) -> None:
        """It is over now."""
        self._is_cut = True
