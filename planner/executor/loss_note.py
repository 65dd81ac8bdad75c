"""Whether the loss of a planned model can be computed in parts, found out beforehand in a process of its own.

No torch here but in that process: whoever only asks does not wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile

from planner.errors import PlannerError
from planner.model_file import LoadedModel, ModelKind, resolve_model
from planner.plan.plan_file import plan_json
from planner.plan.schema import Plan

LIMIT_S = 60.0  # far longer than a loss takes that is tried on 256 tokens
STDERR = 2
# Not by multiprocessing, whose child runs the caller's script once more: one that plans without asking for __main__.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from planner.executor.loss_note import answer; answer(int(sys.argv[2]))"
)


def loss_note(plan: Plan, left_s: float = LIMIT_S) -> str | None:
    """Why `planner run` would refuse the loss of a file of the user's; None where it does not.

    That nobody looked, where ``left_s``, the seconds of whoever asks (infinite: any), or ours are over before.
    """
    if _is_undivided(plan) or not _may_have_a_loss(plan.model.source):
        return None
    limit_s = min(LIMIT_S, left_s)
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as found:
        asked.write(plan_json(plan).encode())
        asked.seek(0)
        command = [sys.executable, "-P", "-c", PROGRAM, json.dumps([str(each) for each in sys.path])]
        child = subprocess.Popen(
            [*command, str(found.fileno())],
            stdin=asked, stdout=STDERR, start_new_session=True, pass_fds=(found.fileno(),),
        )  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return _not_looked_at(plan, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        found.seek(0)
        return found.read().decode() or None  # nothing too where the user's code ended its process


def _not_looked_at(plan: Plan, limit_s: float) -> str:
    return (
        f"whether the loss of {plan.model.source} can be computed in {num_parts_of(plan)} parts was not found out in "
        f"the {limit_s:.1f} s that were left: planner run says so at its start, planner check without devices"
    )


def num_parts_of(plan: Plan) -> int:
    """In how many parts a step of ``plan`` computes the loss of its batch."""
    mesh = plan.mesh.shape()
    return mesh.dp * mesh.cp * plan.pipeline.num_microbatches


def _is_undivided(plan: Plan) -> bool:
    return num_parts_of(plan) * plan.mesh.pp == 1


def _may_have_a_loss(source: str) -> bool:
    """Whether the model is a file in which there is talk of one: without, it is the default, whose parts add up."""
    try:
        model = resolve_model(source)
        if model.kind is not ModelKind.PYTHON or model.path is None:
            return False
        return b"loss_fn" in model.path.read_bytes()
    except (PlannerError, OSError):
        return False


def answer(file: int) -> None:
    """What the child does: reads the plan from standard input and writes why it is refused, if it is, to ``file``."""
    plan = Plan.model_validate_json(sys.stdin.buffer.read())
    from planner.executor.build import loaded_model

    try:
        whole = f"--dp 1 --cp 1 --pp 1 --micro-batch {plan.training.global_batch_size}"
        problem = _refused(loaded_model(plan), plan, ("planner run", whole))
    except PlannerError as error:
        problem = f"planner run refuses this plan: {error.message}; {error.hint}"
    with os.fdopen(file, "w", encoding="utf-8") as found:
        found.write(problem or "")
    os._exit(0)  # threads and exit handlers of the user's are not waited for


def held_loss_note(loaded: LoadedModel, plan: Plan) -> str | None:
    """The same of a module that is held in Python, and of its loss, which are tried here."""
    if _is_undivided(plan):
        return None
    whole = f"dp=1, cp=1, pp=1, micro_batch={plan.training.global_batch_size}"
    return _refused(loaded, plan, ("planner.parallelize", whole))


def _refused(loaded: LoadedModel, plan: Plan, where: tuple[str, str]) -> str | None:
    """Why the loss is refused by what ``where`` names first, whose pins for a batch in one part come second."""
    from planner.executor.check import loss_of
    from planner.executor.loss import check_reduction
    from planner.executor.loss_beside import check_beside

    by, whole = where
    try:
        loss = loss_of(loaded, plan)
        check_beside(loss, plan)
        check_reduction(loss, num_parts_of(plan))
    except PlannerError as error:
        return f"{by} refuses this plan: {error.message}; pin {whole} for one part, or {error.hint}"
    return None
