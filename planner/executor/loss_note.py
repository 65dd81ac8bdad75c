"""Whether the loss of a planned model can be computed in parts, found out beforehand in a process of its own.

No torch here but in that process: whoever only asks does not wait for it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection

from planner.errors import PlannerError
from planner.model_file import LoadedModel, ModelKind, resolve_model
from planner.plan.plan_file import plan_json
from planner.plan.schema import Plan

LIMIT_S = 60.0  # far longer than a loss takes that is tried on 256 tokens


def loss_note(plan: Plan, limit_s: float = LIMIT_S) -> str | None:
    """Why `planner run` would refuse the loss of a file of the user's; None where it does not, or time is up."""
    if _is_undivided(plan) or not _may_have_a_loss(plan.model.source):
        return None
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_find_out, args=(plan_json(plan), sender), daemon=True)
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else None
    except EOFError:  # the user's code ended its process
        return None
    finally:
        child.kill()
        child.join()


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


def _find_out(plan_text: str, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began this process ends it
    os.dup2(2, 1)  # what the user's code prints is talk
    from planner.executor.build import loaded_model

    plan, problem = Plan.model_validate_json(plan_text), None
    try:
        whole = f"--dp 1 --cp 1 --pp 1 --micro-batch {plan.training.global_batch_size}"
        problem = _refused(loaded_model(plan), plan, ("planner run", whole))
    except PlannerError as error:
        problem = f"planner run refuses this plan: {error.message}; {error.hint}"
    sender.send(problem)


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
