"""torch.compile of a model's units, one by one: what FSDP gathers, a pipeline stage runs and recomputation repeats.

Units that are of one class share what is compiled. Around them stays what cannot be compiled with them: FSDP's hooks,
the redistribution of outputs, and a stage's own code. What looks into a unit while it runs does not see the operators
of a compiled one, so it is refused.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from costmodels.vocabulary.choices import Recompute
from planner.errors import PlanError
from planner.plan.schema import Plan

INDUCTOR = "inductor"


def check_compilable(plan: Plan, backend: str, device_type: str) -> None:
    """PlanError that lists everything in ``plan`` that looks into units, and what ``backend`` lacks on this machine."""
    problems: list[str] = []
    if plan.mesh.cp > 1:
        problems.append(f"attention reaches the positions of other ranks call by call (cp = {plan.mesh.cp})")
    if plan.mesh.ep > 1:
        problems.append(f"products reach the experts of other ranks call by call (ep = {plan.mesh.ep})")
    if any(rule.modules and rule.mode is Recompute.SELECTIVE for rule in plan.recompute):
        problems.append("selective recomputation chooses operators one by one")
    if plan.offloaded_activations:
        problems.append("activations go to the host one by one (offloaded_activations)")
    if plan.pipeline.schedule.rules.splits_backward and plan.mesh.pp > 1:
        problems.append(f"{plan.pipeline.schedule} splits the backward pass of every operator")
    if not plan.placements.sharded_units:
        problems.append("placements.sharded_units names no units to compile")
    if backend == INDUCTOR:
        problems += _lacking(device_type)
    if problems:
        raise PlanError("this plan cannot be run with --compile: " + "; ".join(problems),
                        hint="leave --compile out, or search with other pins")  # fmt: skip


def _lacking(device_type: str) -> list[str]:
    if device_type == "cuda":
        return [] if importlib.util.find_spec("triton") else ["it needs Triton for GPUs, which is not installed"]
    from torch._inductor import cpp_builder, exc  # here, for it takes seconds

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return ["it needs a C++ compiler for CPUs, and there is none (set CXX)"]
    return []


def apply_compile(root: nn.Module, plan: Plan, backend: str) -> None:
    """Compiles the forward of each unit that is in ``root``. Call before recomputation and FSDP wrap them."""
    units = dict(root.named_modules())
    for fqn in plan.placements.sharded_units:
        if fqn in units and next(units[fqn].children(), None) is not None:  # one operator is no faster compiled
            units[fqn].forward = torch.compile(units[fqn].forward, backend=backend)
