"""A trace's process without its start: forked from one that has torch, whose import takes most of a start.

It stands where ``planner.graph.tracing`` starts Python, and has all else of that process: a session, an environment
and a folder of its own, no input, our standard error for its output, and an answer in a file without a name.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import get_context, reduction
from typing import Protocol, cast

from planner.graph.tracing import answer


class _Detachable(Protocol):
    def detach(self) -> int: ...


class ForkedTrace:
    """What ``tracing`` asks of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, start_new_session: bool, pass_fds: tuple[int]
    ) -> None:
        assert stdin == subprocess.DEVNULL
        assert start_new_session
        context, self._command = get_context("forkserver"), command
        context.set_forkserver_preload(["planner.graph.tracer", "torch._dynamo", "torch.distributed.tensor"])
        place = (dict(os.environ), os.getcwd())
        # Files cross as they are pickled for the child.
        self._process = context.Process(target=_run, args=(command[-1], *place, _Fd(stdout), _Fd(pass_fds[0])))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal; TimeoutExpired where there is none yet."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return self._process.exitcode


class _Fd:
    """An open file on its way into the child."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[object, ...]:
        return _opened, (reduction.DupFd(self._number),)


def _opened(duplicate: object) -> int:
    return cast(_Detachable, duplicate).detach()


def _run(order: str, environment: dict[str, str], folder: str, output: int, file: int) -> None:
    os.setsid()
    gc.disable()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # As Python opens them when it starts.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout
    read = json.loads(order)
    sys.path[:] = read["path"]
    answer({**read, "answer": file})
