"""Starts the ranks of a plan on this machine through torchrun's own launcher, or finds that they run already."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from planner.errors import InputError, PlanError, PlannerError
from planner.plan.schema import Plan

MAX_CPU_RANKS_PER_CORE = 8  # gloo ranks are threads of work on shared cores: more of them only wait
MIN_CPU_RANKS = 16  # small plans may be tried on any machine
GRACE_S = 3.0  # the launcher stops all ranks within a fraction of it
RANK_COMMAND = "from planner.cli.main import main; main()"


class RankError(PlannerError):
    """A rank ended with an error, which it has already told; its exit code becomes ours."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} ended with exit code {exit_code}; all ranks were stopped",
                         hint="the error of that rank is above")  # fmt: skip
        self.exit_code = exit_code if exit_code > 0 else 1


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


def launch(plan: Plan, arguments: Sequence[str]) -> None:
    """Runs ``planner ARGUMENTS`` once a rank and waits. RankError with the code of the first rank that failed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    ranks = plan.mesh.shape().world_size
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=f"planner-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # many ranks share the cores
    try:
        with _no_logging():  # ranks tell their own errors
            elastic_launch(config, sys.executable)("-c", RANK_COMMAND, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(rank, failure.exitcode) from None
    except SignalException as error:
        raise KeyboardInterrupt from error


@contextlib.contextmanager
def only_the_cause() -> Generator[None]:
    """Surrounds the work of a rank, so that one error is told once.

    A rank whose peers are gone, or which found an error in the input that rank 0 finds as well,
    waits for the launcher to stop it; it speaks only where nothing does.
    """
    try:
        yield
    except Exception as error:
        lost_peers = isinstance(error.__cause__ or error, dist.DistError) or "gloo/transport" in str(error)
        if lost_peers or (isinstance(error, InputError) and os.environ.get("RANK") != "0"):
            time.sleep(GRACE_S)
        raise


@contextlib.contextmanager
def _no_logging() -> Generator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
