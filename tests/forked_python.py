"""A process of Python without its start: forked from one that has torch, whose import takes most of a start.

It stands where planner starts ``python -c PROGRAM``: for a trace, for the look at a loss, and for ranks. It has all
else of that process: an environment, a folder, open files, and a session where one is asked for.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context, reduction
from typing import Protocol, cast

PRELOADED = ["planner.graph.tracer", "planner.executor.train", "planner.executor.verify", "planner.executor.parity"]
FREE = 500  # file numbers from here on are taken by nobody


class _Detachable(Protocol):
    def detach(self) -> int: ...


class _Numbered(Protocol):
    def fileno(self) -> int: ...


class OnRanks(Protocol):
    """Runs a program as so many ranks, of which rank 0 finds the others as under torchrun: what all of them printed."""

    def __call__(self, size: int, program: str, *arguments: object) -> tuple[str, str]: ...


class ForkedPython:
    """What planner asks of ``subprocess.Popen``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: object = None,
        stdout: int | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._command, place = command, command.index("-c")
        assert command[0] == sys.executable
        assert set(command[1:place]) <= {"-P"}
        files = {0: _number_of(stdin, 0), 1: stdout or 1, 2: 2, **{each: each for each in pass_fds}}
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        where = dict(os.environ if env is None else env), os.getcwd(), start_new_session
        # Files cross as they are pickled for the child.
        crossing = {number: None if source is None else _Fd(source) for number, source in files.items()}
        self._process = context.Process(target=_run, args=(command[place + 1 :], *where, crossing))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; TimeoutExpired where there is none yet."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same; None where there is none yet."""
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """The same."""
        return self.poll()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._process.kill()


def _number_of(stream: object, own: int) -> int | None:
    """Of an open file; None of none."""
    if stream in (None, subprocess.DEVNULL):
        return own if stream is None else None
    return cast(_Numbered, stream).fileno()


class _Fd:
    """An open file on its way into the child."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _opened, (reduction.DupFd(self._number),)


def _opened(duplicate: object) -> int:
    return cast(_Detachable, duplicate).detach()


def _run(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    starts_session: bool,
    files: Mapping[int, int | None],
) -> None:
    import torch

    from planner.executor.launch import LAUNCHER_PID

    if starts_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if LAUNCHER_PID in environment:  # a rank looks whether that is its parent
        os.environ[LAUNCHER_PID] = str(os.getppid())
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    sources = {number: null if source is None else source for number, source in files.items()}
    # First out of the way of the numbers that they get.
    apart = {number: fcntl.fcntl(source, fcntl.F_DUPFD, FREE) for number, source in sources.items()}
    for number, source in apart.items():
        os.dup2(source, number)
        os.close(source)
    # As Python opens them when it starts.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout
    sys.argv = ["-c", *words[1:]]
    exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
