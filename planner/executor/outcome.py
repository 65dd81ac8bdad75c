"""Commands that measure on ranks and show what came out: the launcher gets what rank 0 found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.executor.launch import check_machine, die_with_launcher, is_rank, launch, only_the_cause
from planner.executor.mesh import check_executable
from planner.plan.schema import Plan

RESULT_FILE = "PLANNER_RESULT_FILE"  # where rank 0 leaves it for the launcher
Outcome = dict[str, Any]


def on_all_ranks(plan: Plan, work: Callable[[], Outcome]) -> Outcome | None:
    """Runs ``work`` on every rank of ``plan``; its value on rank 0, which is to be JSON, or None where others show it.

    Outside of ranks it starts them on this machine, with the command line of this process. PlanError where the plan
    cannot be executed.
    """
    check_executable(plan)
    if not is_rank():
        check_machine(plan)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcome.json"
            os.environ[RESULT_FILE] = str(path)
            try:
                launch(plan, sys.argv[1:])
                return json.loads(path.read_text())
            finally:
                del os.environ[RESULT_FILE]
    die_with_launcher()
    with only_the_cause():
        outcome = work()
    if os.environ["RANK"] != "0":
        return None
    target = os.environ.get(RESULT_FILE)
    if target is None:  # torchrun started the ranks: nobody else shows it
        return outcome
    Path(target).write_text(json.dumps(outcome))
    return None
