"""Starts the ranks of a plan on this machine, or finds that torchrun started them already.

Ranks find each other through a store that the launcher holds, bound to the loopback address, as gloo's and NCCL's own
connections are: nothing that this opens can be reached from another machine. Ranks die with their launcher, and the
first that fails ends all.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence

import torch
import torch.distributed as dist

from planner.errors import DivergedError, InputError, PlanError, PlannerError
from planner.model_file import planned_source
from planner.plan.schema import Plan

MAX_CPU_RANKS_PER_CORE = 8  # gloo ranks are threads of work on shared cores: more of them only wait
MIN_CPU_RANKS = 16  # small plans may be tried on any machine
GRACE_S = 3.0  # the launcher stops all ranks within a fraction of it
POLL_S = 0.05
SAVING_S = 600.0  # for the step under way and a checkpoint, before ranks that were told to stop are killed
LAUNCHER_PID = "PLANNER_LAUNCHER_PID"  # set for ranks that are to die with their launcher
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies
RANK_COMMAND = "from planner.__main__ import rank; rank()"
STOPPED = 128 + signal.SIGTERM  # exit code of a rank that was told to stop, and saved
DIVERGED = 5  # exit code of a rank of ours whose training cannot go on; the command's is that of DivergedError
_KILLERS = {
    "SIGKILL": "by somebody, or by the kernel where memory ran out: `dmesg` says so",
    "SIGBUS": "a file that it had mapped, such as --data, became shorter, or its disk failed",
}


class RankError(PlannerError):
    """A rank ended with an error, which it has already told, or was killed; its exit code becomes ours."""

    def __init__(self, rank: int, exit_code: int) -> None:
        how, hint = f"ended with exit code {exit_code}", "the error of that rank is above"
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            how, hint = f"was killed by {name}", _KILLERS.get(name, "what it said last is above")
        if exit_code == DIVERGED:
            how = "cannot go on training"
        super().__init__(f"rank {rank} {how}; all ranks were stopped", hint=hint)
        self.comes_again = exit_code in (InputError.exit_code, DIVERGED)  # however often it is tried
        self.exit_code = 1 if exit_code < 0 or exit_code == DIVERGED else exit_code


def is_rank() -> bool:
    """Whether torchrun, or something like it, started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_machine(plan: Plan) -> None:
    """PlanError where this machine cannot hold the plan's ranks."""
    ranks = plan.mesh.shape().world_size
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if gpus < ranks:
            raise PlanError(
                f"the plan needs {ranks} GPUs, this machine has {gpus}",
                hint=f"start it with torchrun on enough nodes: torchrun ... -m planner run PLAN, {ranks} ranks in all",
            )
        return
    limit = max(MIN_CPU_RANKS, MAX_CPU_RANKS_PER_CORE * (os.cpu_count() or 1))
    if ranks > limit:
        raise PlanError(
            f"the plan needs {ranks} ranks; without a GPU this machine can hold {limit} processes",
            hint="run it on a cluster with torchrun, or make a plan for fewer devices",
        )


class StoppedError(PlannerError):
    """The launcher was told to stop, and so were its ranks."""

    exit_code = STOPPED


def launch(
    plan: Plan, arguments: Sequence[str], *, grace_s: float = 0.0, kept_open: Sequence[int] = (), max_restarts: int = 0
) -> None:
    """Runs ``planner ARGUMENTS`` once a rank and waits. RankError with the code of the first rank that failed.

    Ranks have the files ``kept_open``. All are started again up to ``max_restarts`` times when one fails, unless what
    it was given is wrong or its training diverged: from the same checkpoint it would again. On SIGTERM the ranks are
    told, and get ``grace_s`` to save what they have; StoppedError follows.
    """
    planned_source(plan.model)  # or it is refused before a rank starts
    told = threading.Event()
    with _handling(signal.SIGTERM, told.set):
        for restart in range(1, max_restarts + 2):
            try:
                _run_ranks(plan.mesh.shape().world_size, arguments, kept_open, told, grace_s)
                return
            except RankError as error:
                if restart > max_restarts or told.is_set() or error.comes_again:
                    raise
                said = f"warning: {error.message}; restart {restart} of {max_restarts} from the last checkpoint"
                print(said, file=sys.stderr, flush=True)


def _run_ranks(
    size: int, arguments: Sequence[str], kept_open: Sequence[int], told: threading.Event, grace_s: float
) -> None:
    store, port = _loopback_store()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-c", RANK_COMMAND, *arguments]
            environment = _environment(rank, size, port)
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=tuple(kept_open)))
        _wait(ranks, told, grace_s)
    finally:
        _kill(ranks)
    del store  # held for as long as ranks use it


def _wait(ranks: Sequence[subprocess.Popen[bytes]], told: threading.Event, grace_s: float) -> None:
    """Returns once all ranks have ended well. StoppedError where they were told to stop, or one of them was."""
    deadline_s: float | None = None
    while any(rank.poll() is None for rank in ranks):
        _check(ranks)
        if told.is_set() and deadline_s is None:
            deadline_s = time.monotonic() + grace_s
            for rank in ranks:
                rank.terminate()
        if deadline_s is not None and time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    codes = {rank.poll() for rank in ranks}
    if told.is_set() or STOPPED in codes:
        raise StoppedError("stopped by SIGTERM" + (", after a checkpoint" if codes <= {0, STOPPED} else ""))
    _check(ranks)


def _check(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """RankError where one failed."""
    for number, rank in enumerate(ranks):
        if rank.poll() not in (None, 0, STOPPED):
            raise RankError(number, rank.returncode)


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


def _loopback_store() -> tuple[dist.TCPStore, int]:
    """A store that this machine alone can reach, and its port. torch's own would listen on all interfaces."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )
    return store, port


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun gives a rank, and what keeps it on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    wanted = {
        "OMP_NUM_THREADS": "1" if not torch.cuda.is_available() else None,  # many ranks share the cores
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
        "NCCL_SOCKET_IFNAME": _loopback_interface(),
    }
    return {
        **{name: value for name, value in wanted.items() if value is not None},
        **os.environ,
        **{name: str(number) for name, number in numbers.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: rank 0 opens none
        LAUNCHER_PID: str(os.getpid()),
    }


def _loopback_interface() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)


@contextlib.contextmanager
def _handling(number: signal.Signals, act: Callable[[], object]) -> Generator[None]:
    """``act`` on a signal; without effect outside the main thread, where Python handles none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, lambda signal_number, frame: act())
    try:
        yield
    finally:
        signal.signal(number, before)


def die_with_launcher() -> None:
    """Asks Linux to end this rank when its launcher, ours or torchrun's, ends, however that comes about."""
    launcher = os.environ.get(LAUNCHER_PID) or ("TORCHELASTIC_RUN_ID" in os.environ and os.getppid())
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it was gone before this was asked
        os._exit(1)


@contextlib.contextmanager
def only_the_cause() -> Generator[None]:
    """Surrounds the work of a rank, so that one error is told once.

    A rank whose peers are gone, or which found what rank 0 finds as well, an error in the input or a
    loss that is no number, waits for the launcher to stop it; it speaks only where nothing does.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DivergedError) and LAUNCHER_PID in os.environ:
            error.exit_code = DIVERGED
        lost_peers = isinstance(error.__cause__ or error, dist.DistError) or "gloo/transport" in str(error)
        if lost_peers or (isinstance(error, InputError | DivergedError) and os.environ.get("RANK") != "0"):
            time.sleep(GRACE_S)
        raise
