"""Commands that measure on ranks and show what came out: the launcher gets what rank 0 found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from planner.executor.executable import check_executable
from planner.executor.launch import check_machine, die_with_launcher, is_rank, launch, only_the_cause
from planner.plan.schema import Plan

RESULT_HANDLE = "PLANNER_RESULT_HANDLE"  # of the open file in which rank 0 leaves it for the launcher
Outcome = dict[str, Any]


def on_all_ranks(plan: Plan, work: Callable[[], Outcome]) -> Outcome | None:
    """Runs ``work`` on every rank of ``plan``; its value on rank 0, which is to be JSON, or None where others show it.

    Outside of ranks it starts them on this machine, with the command line of this process. PlanError where the plan
    cannot be executed.
    """
    check_executable(plan)
    if not is_rank():
        check_machine(plan)
        with tempfile.TemporaryFile("w+") as file:  # it has no name, so that nothing stays of it whoever is killed
            os.environ[RESULT_HANDLE] = str(file.fileno())
            try:
                launch(plan, sys.argv[1:], kept_open=(file.fileno(),))
                file.seek(0)
                return json.load(file)
            finally:
                del os.environ[RESULT_HANDLE]
    die_with_launcher()
    with only_the_cause():
        outcome = work()
    if os.environ["RANK"] != "0":
        return None
    target = os.environ.get(RESULT_HANDLE)
    if target is None:  # torchrun started the ranks: nobody else shows it
        return outcome
    with os.fdopen(int(target), "w") as file:
        json.dump(outcome, file)
    return None
