"""Data parallelism: FSDP2's ``fully_shard`` is the one mechanism behind ZeRO stages 0 to 3.

| stage | parameters                    | gradients                                | optimiser states |
|-------|-------------------------------|------------------------------------------|------------------|
| 0     | whole                         | whole, all-reduced once a step           | whole            |
| 1     | sharded, gathered once a step | whole, reduce-scattered once a step      | sharded          |
| 2     | sharded, gathered once a step | sharded, reduce-scattered a micro-batch  | sharded          |
| 3     | gathered a unit, twice a      | sharded, reduce-scattered a micro-batch  | sharded          |
|       | micro-batch                   |                                          |                  |

With ``dp_replicate`` > 1 the sharded gradients are all-reduced over the replicas as well, once a
step. Ranks of context parallelism hold the same parameters as those of data parallelism, and count among them.
Gradients are averaged over all of these ranks, in float32. "Gathered once a step" means a
whole copy of the parameters beside the shards, in the compute dtype, which each unit's last
backward pass frees. FSDP makes that copy also where the shard is already whole. A parameter that a
micro-batch does not use (an expert without tokens) has a gradient of zero, not none, so that all
ranks reduce the same.

Offloaded states: the shards, their gradients and what the optimiser keeps of them lie in host memory, where the
optimiser runs. A shard goes up whenever its unit is gathered, and its gradient comes down whenever it is reduced.
"""

# pyright: reportPrivateUsage=false
# FSDP has no public way to finish a backward pass that its hooks did not see, and no public name for what says over
# which ranks one parameter is sharded.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

from costmodels.vocabulary.choices import Offload
from planner.errors import PlanError
from planner.executor.mesh import compute_dtype, data_mesh
from planner.plan.schema import Plan

Placements = Callable[[nn.Parameter], ShardPlacementResult | None]


@dataclass(frozen=True)
class ShardingUnits:
    """What is gathered as one: the modules ``fqns``, except where ``shared`` parameters are in them.

    ``shared`` are FQNs of parameters that the model also uses outside the module they belong to.
    They, and parameters tied across modules, stay in the unit of the root, where all users find
    them gathered.
    """

    fqns: tuple[str, ...]
    shared: frozenset[str] = frozenset()


def apply_data_parallel(
    module: nn.Module,
    units: ShardingUnits,
    mesh: DeviceMesh,
    plan: Plan,
    placements: Placements | None = None,
) -> None:
    """Makes each of ``units`` that is present in ``module``, then ``module`` itself, an FSDP unit.

    ``placements``: over which other ranks some parameters are sharded, as those of experts are.
    """
    zero_stage, dtype = plan.zero_stage, compute_dtype(plan)
    options: dict[str, Any] = {"mesh": data_mesh(mesh, zero_stage), "shard_placement_fn": placements}
    if plan.offload is not Offload.NONE:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = MixedPrecisionPolicy()
    if dtype is not torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options |= {"mp_policy": precision, "reshard_after_forward": zero_stage == 3}
    targets = {fqn: unit for fqn, unit in module.named_modules() if fqn in set(units.fqns)}
    kept_in_root = _tied_parameters(module)
    kept_in_root |= {p for fqn, p in module.named_parameters(remove_duplicate=False) if fqn in units.shared}
    for fqn in sorted(targets, key=lambda name: -name.count(".")):  # inner units first
        if kept_in_root.isdisjoint(targets[fqn].parameters()):
            fully_shard(targets[fqn], **options)
    root = fully_shard(module, **options)
    root.set_reduce_scatter_unused_params(True)  # an expert may have tokens on one rank and none on another


def prepare_backward(module: nn.Module, zero_stage: int, *, last: bool, pipelined: bool) -> None:
    """Sets what the coming backward pass of one micro-batch reduces and what it frees.

    FSDP forgets in which order units ran forward after what it holds to be the last backward. In a
    pipeline other micro-batches are still under way then; without one, a stale order would make it
    gather a unit too many.
    """
    if not isinstance(module, FSDPModule):
        raise PlanError("the module is not under FSDP", hint="call apply_data_parallel first")
    module.set_requires_gradient_sync(last or zero_stage >= 2)
    module.set_requires_all_reduce(last)  # over the replicas, of what is already reduced over the shards
    module.set_reshard_after_backward(last or zero_stage == 3)
    module.set_is_last_backward(last or not pipelined)


def share_reductions(module: nn.Module, reductions: list[Any]) -> None:
    """Lets ``module`` wait for what is being reduced in ``reductions``, as for what it reduced itself.

    Before it makes another buffer of gradients FSDP waits for the one that it made last and frees that. Each stage of
    a rank is a module of its own to FSDP, and would keep its last buffer from one micro-batch to the next. torch's
    ``share_comm_ctx`` shares more: the order of units as well, which one stage's last backward pass would clear under
    the others. Call after the module's first forward pass, which makes a list of its own.
    """
    assert isinstance(module, FSDPModule)
    module._get_fsdp_state()._comm_ctx.reduce_scatter_states = reductions


def finish_backward(module: nn.Module, *, last: bool) -> None:
    """Does what FSDP's hooks do at the end of a backward pass, after one that they did not see.

    torch's own pipelines do it so, once a step (``perform_reduce_grad`` in torch/distributed/pipelining/stage.py).
    """
    assert isinstance(module, FSDPModule)
    root = module._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    if last:
        root._root_post_backward_final_callback()


def reshard(module: nn.Module) -> None:
    """Frees what a forward pass without a backward has left gathered."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}
