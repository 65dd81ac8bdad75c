"""Ctrl-C raises KeyboardInterrupt: none is lost where Python makes another error of it, or C++ an abort."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any, NoReturn

PATIENCE_S = 0.25  # for a library whose import cannot be broken off

# Whether there is nothing that a process which ends without another word would lose; all of them are asked.
_idle: list[Callable[[], bool]] = []


@contextlib.contextmanager
def idle_while(is_idle: Callable[[], bool]) -> Generator[None]:
    """Within it an import may only be broken off by the end of the process where ``is_idle``."""
    _idle.append(is_idle)
    try:
        yield
    finally:
        _idle.remove(is_idle)


def leave() -> None:
    """Ends the process where it is, as Ctrl-C does where nothing has begun that would have to be ended properly."""
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(130)


class _Raised:
    """Whether Ctrl-C has raised an exception in this process."""

    yet = False


def interrupt(_signal: int = signal.SIGINT, _frame: FrameType | None = None) -> NoReturn:
    """Handles Ctrl-C as Python does, and takes note: KeyboardInterrupt wherever the process is.

    Python itself makes another error of it where a class is made (RuntimeError) or a module in C (ImportError).
    """
    _Raised.yet = True
    raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Whether any error may be what became of a KeyboardInterrupt."""
    return _Raised.yet


@contextlib.contextmanager
def held_back() -> Generator[None]:
    """Within it Ctrl-C and the alarm wait for its end; Ctrl-C not for long where the process has nothing to lose."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    waiting: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    ours = {number: handler for number, handler in before.items() if callable(handler)}
    ends: list[threading.Timer] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        waiting.append(number)
        if number == signal.SIGINT and not ends and all(is_idle() for is_idle in _idle):
            ends.append(threading.Timer(PATIENCE_S, leave))
            ends[0].start()

    for number in ours:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for end in ends:
            end.cancel()
        for number, handler in ours.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(waiting):
            signal.raise_signal(number)


def import_whole(*packages: str) -> None:
    """From now on Ctrl-C waits while modules of these packages are imported.

    Theirs are in C++ and call Python while they make their types. An exception in between ends the process: torch and
    OR-Tools do not expect one there (pybind11's ``error_already_set``, "terminate called").
    """
    sys.meta_path.insert(0, _WholeImports(packages))


class _WholeImports:
    """Finds modules as Python does, and has them made and run with signals held back."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None where the module is of no such package; Python asks the next finder then."""
        if name.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # one for each module
            loader.create_module, loader.exec_module = _whole(loader.create_module), _whole(loader.exec_module)
        return spec


def _whole(function: Callable[[Any], object]) -> Callable[[Any], object]:
    def held(argument: Any) -> object:
        with held_back():
            return function(argument)

    return held
