"""Exceptions that handlers of signals raise: how none is lost."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Generator

# Seconds until the alarm rings again.
AGAIN_S = 1e-3


@contextlib.contextmanager
def rung_again(*errors: type[BaseException]) -> Generator[None]:
    """Within it the alarm rings again when one of ``errors`` was raised where Python can only print it.

    That is what Python does with an exception that leaves ``__del__``, a weak reference's callback or a callback of the
    garbage collector, and a signal may well come there. Others are printed as before.
    """

    def lost(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, errors):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, lost
    try:
        yield
    finally:
        sys.unraisablehook = before
