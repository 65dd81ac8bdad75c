"""One rank as a process: it joins the others, keeps torch quiet, names itself where it fails, and is told to stop."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from pathlib import Path

import torch
import torch.distributed as dist

from costmodels.vocabulary.shown import shown
from planner.errors import InputError, PlannerError
from planner.executor.host_allocator import keep_freed_memory

_WAY_TO_MEET = "are all hosts up, and does a firewall let them through? --timeout says how long to wait"
_FAREWELL = datetime.timedelta(seconds=5)  # for all to read why rank 0 leaves
DEFAULT_TIMEOUT_S = 300.0  # far above what a busy machine holds a process up, far below what a cluster costs idle


@contextlib.contextmanager
def process_group(
    timeout_s: float = DEFAULT_TIMEOUT_S, work: str = "", *, offloads: bool = False
) -> Generator[torch.device]:
    """Joins the ranks that torchrun (or we) started, within ``timeout_s``; yields this rank's device.

    ``work``: what this rank was told to do. ``offloads``: tensors in host memory are communicated too. PlannerError
    where a rank does not come, InputError where one was told otherwise; both name it.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=timeout_s)
    store = _met(rank, size, timeout, work)
    backend = ("cpu:gloo,cuda:nccl" if offloads else "nccl") if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise PlannerError(f"rank {rank} cannot connect to the others: {error}", hint=_WAY_TO_MEET) from error
    gc.freeze()  # torch's modules are hundreds of thousands of objects, and stay: no collection is to look through them
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def device_type() -> str:
    """What ranks on this machine compute on: ``cuda`` or ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _met(rank: int, size: int, timeout: datetime.timedelta, work: str) -> dist.Store:
    """The store of torch's environment variables, once all ranks are there and are told to do the same."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by the launcher, as torch has it
    try:
        served = dist.TCPStore(address, port, None, rank == 0 and not is_held, timeout, wait_for_workers=False)
    except dist.DistError as error:
        raise PlannerError(f"rank {rank} finds no rank 0 at {address}:{port}: {error}", hint=_WAY_TO_MEET) from error
    store = dist.PrefixStore(f"planner/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", served)
    store.set(f"work/{rank}", work)
    try:
        late, unlike = _told(store, size, timeout) if rank == 0 else _heard(store, rank, timeout)
    except dist.DistError as error:
        text = f"rank {rank} lost rank 0 at {address}:{port} before all had met: {error}"
        raise PlannerError(text, hint=_WAY_TO_MEET) from error
    if late:
        text = f"{_ranks(late)} of {size} did not come within {timeout.total_seconds():g} s"
        raise PlannerError(text, hint=_WAY_TO_MEET)
    if unlike:
        text = f"{_ranks(unlike)} {'was' if len(unlike) == 1 else 'were'} started with another plan or other options"
        raise InputError(f"{text} than rank 0", hint="give every host the same plan file and command line")
    return store


def _told(store: dist.Store, size: int, timeout: datetime.timedelta) -> tuple[list[int], list[int]]:
    """What rank 0 tells all: the ranks that did not come, and the ranks whose work is not its own."""
    keys = [f"work/{rank}" for rank in range(size)]
    late: list[int] = []
    try:
        store.wait(keys, timeout)
    except dist.DistError:
        late = [rank for rank in range(size) if not store.check([keys[rank]])]
    own = store.get(keys[0])
    present = [rank for rank in range(size) if rank not in late]
    unlike = [rank for rank in present if store.get(keys[rank]) != own]
    store.set("verdict", json.dumps([late, unlike]))
    if late or unlike:  # rank 0 may serve the store, which ends with it
        with contextlib.suppress(dist.DistError):
            store.wait([f"heard/{rank}" for rank in present[1:]], _FAREWELL)
    return late, unlike


def _heard(store: dist.Store, rank: int, timeout: datetime.timedelta) -> tuple[list[int], list[int]]:
    """What rank 0 found, which may begin to wait later than this rank."""
    store.wait(["verdict"], timeout + _FAREWELL)
    late, unlike = json.loads(store.get("verdict"))
    store.set(f"heard/{rank}", "")
    return late, unlike


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@contextlib.contextmanager
def told_to_stop(device: torch.device, *, enabled: bool) -> Generator[Callable[[], bool]]:
    """Yields whether any rank was sent SIGTERM, which all are to ask at once; not ``enabled``, it ends a rank."""
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda number, frame: told.set())

    def any_is() -> bool:
        flag = torch.tensor(int(told.is_set()), device=device)
        dist.all_reduce(flag)
        return bool(flag)

    try:
        yield any_is
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def told_by_rank(step: int) -> Generator[None]:
    """What goes wrong inside a step, in the user's model or in torch, with the rank it happened on."""
    rank = dist.get_rank()
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "plan with a smaller micro-batch, recomputation or more sharding"
        raise PlannerError(f"rank {rank} is out of device memory in step {step + 1}: {error}", hint=hint) from error
    except PlannerError:
        raise
    except Exception as error:
        cause = _root_cause(error)
        text = f"rank {rank} failed in step {step + 1}: {type(cause).__name__}: {cause}{_where(cause)}"
        raise PlannerError(text, hint="run again with --debug for the whole traceback") from cause


@contextlib.contextmanager
def quiet_torch() -> Generator[None]:
    """Hides torch's remarks about its own internals, which no user can act on.

    Where a stage raises, torch writes the whole schedule down on every rank; the error itself is raised besides.
    """
    hidden = {"torch.distributed.tensor": logging.ERROR, "torch.distributed.pipelining": logging.CRITICAL}
    before = {name: logging.getLogger(name).level for name in hidden}
    for name, level in hidden.items():
        logging.getLogger(name).setLevel(level)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def say(text: str) -> None:
    """A line for people, from rank 0 alone."""
    if dist.get_rank() == 0:
        print(shown(text), file=sys.stderr, flush=True)


def _root_cause(error: BaseException) -> BaseException:
    """What a pipeline schedule wraps in errors of its own, with the arguments' shapes in place of the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _where(error: BaseException) -> str:
    """The lines that the error came through, innermost first: of the user's code, or where it is not there of ours."""
    ours = str(Path(__file__).resolve().parents[1])
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    users = [f for f in frames if not f.filename.startswith((ours, "<"))]
    lines = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in reversed(users or frames[-1:])]
    return f" (at {', from '.join(lines)})" if lines else ""
