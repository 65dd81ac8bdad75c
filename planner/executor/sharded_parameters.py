"""ZeRO's stages by FSDP2's ``fully_shard``, and stage 0 where it computes in another dtype or states lie on the host.

With ``dp_replicate`` > 1 the sharded gradients are all-reduced over the replicas as well, once a step. "Gathered once a
step" means a whole copy of the parameters beside the shards, in the compute dtype, which each unit's last backward pass
frees. FSDP makes that copy also where the shard is already whole.

Offloaded states: the shards, their gradients and what the optimiser keeps of them lie in host memory, where the
optimiser runs. A shard goes up whenever its unit is gathered, and its gradient comes down whenever it is reduced.

A parameter without dimensions, such as CLIP's scale of logits, cannot be divided: it stays whole on the device, and
its gradient is averaged at the end of a step. So does one without numbers.
"""

# pyright: reportPrivateUsage=false
# FSDP has no public way to finish a backward pass that its hooks did not see, and no public name for what says over
# which ranks one parameter is sharded.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

from costmodels.vocabulary.choices import Offload
from planner.executor.data_parallel import DataParallel, ShardingUnits
from planner.executor.mesh import compute_dtype, data_mesh, device_of
from planner.executor.whole_parameters import settled_gradient
from planner.plan.schema import Plan

Placements = Callable[[nn.Parameter], ShardPlacementResult | None]


class ShardedParameters(DataParallel):
    """Each unit that is present in a stage is one of FSDP's, and so is the stage.

    ``placements``: over which other ranks some parameters are sharded, as those of experts are.
    """

    def __init__(
        self,
        root: nn.Module,
        units: ShardingUnits,
        mesh: DeviceMesh,
        plan: Plan,
        placements: Placements | None = None,
    ) -> None:
        super().__init__(root, device_of(mesh))
        self._zero_stage, self._is_pipelined = plan.zero_stage, plan.mesh.pp > 1
        options = _options(mesh, plan, placements)
        options["ignored_params"] = set(_numbers(root))
        for parameter in root.parameters():  # FSDP takes no transposed ones, whose values are the same in order
            parameter.data = parameter.data.contiguous()
        targets = {fqn: unit for fqn, unit in root.named_modules() if fqn in set(units.fqns)}
        kept_in_root = _tied_parameters(root)
        kept_in_root |= {p for fqn, p in root.named_parameters(remove_duplicate=False) if fqn in units.shared}
        for fqn in sorted(targets, key=lambda name: -name.count(".")):  # inner units first
            if kept_in_root.isdisjoint(targets[fqn].parameters()):
                fully_shard(targets[fqn], **options)
        self._fsdp = fully_shard(root, **options)
        # An expert may have tokens on one rank and none on another.
        self._fsdp.set_reduce_scatter_unused_params(True)
        self._watched: set[Any] = set()
        self._reached: set[Any] = set()
        _leave_meta(root, self.device if plan.offload is Offload.NONE else torch.device("cpu"))
        for number in _numbers(root):
            number.data = number.data.to(self.device)
        self._ranks = [group for group in data_mesh(mesh, plan.zero_stage).get_all_groups() if group.size() > 1]

    def prepare_backward(self, *, last: bool) -> None:
        """Sets FSDP's switches.

        FSDP forgets in which order units ran forward after what it holds to be the last backward. In a pipeline other
        micro-batches are still under way then; without one, a stale order would make it gather a unit too many.
        """
        self._watch()
        if last:
            self._keep_zeros()
        self._fsdp.set_requires_gradient_sync(last or self._zero_stage >= 2)
        self._fsdp.set_requires_all_reduce(last)  # over the replicas, of what is already reduced over the shards
        self._fsdp.set_reshard_after_backward(last or self._zero_stage == 3)
        self._fsdp.set_is_last_backward(last or not self._is_pipelined)

    def _keep_zeros(self) -> None:
        """Gives zeros to what has no gradient yet, where a unit's other gradients are kept until the last backward.

        FSDP keeps them in float32, and would take what is new, and zeros, in the compute dtype: it reduces one dtype.
        """
        for group in self._groups():
            kept = [p.unsharded_accumulated_grad for p in group.fsdp_params if p.unsharded_accumulated_grad is not None]
            for each in group.fsdp_params if kept else ():
                if each.unsharded_accumulated_grad is None and each._unsharded_param.requires_grad:
                    each.unsharded_accumulated_grad = torch.zeros_like(each._unsharded_param, dtype=kept[0].dtype)

    def finish_weights(self, *, last: bool) -> None:
        """Does what FSDP's hooks do at the end of a backward pass.

        torch's own pipelines do it so, once a step (``perform_reduce_grad`` in torch/distributed/pipelining/stage.py).
        """
        for each in self._watched:  # whose gradient FSDP may have set aside in float32 already
            if each._unsharded_param.grad is not None or each.unsharded_accumulated_grad is not None:
                self._reached.add(each)
        self.prepare_backward(last=last)
        for group in self._groups():
            group.post_backward()
        if last:
            self._fsdp._get_fsdp_state()._root_post_backward_final_callback()

    def finish_step(self) -> None:
        """FSDP's last hook has waited. Of a stage that is frozen as a whole none ran: its copies are freed here."""
        self.finish_forward()
        every = {each.sharded_param: each for group in self._groups() for each in group.fsdp_params}
        self.unreached = frozenset(parameter for parameter, each in every.items() if each not in self._reached)
        self._reached.clear()
        self._average_numbers()

    @torch.no_grad()
    def _average_numbers(self) -> None:
        numbers = [number for number in _numbers(self.root) if number.requires_grad]
        self.unreached |= {number for number in numbers if number.grad is None}
        if not numbers:
            return
        gradients = [settled_gradient(number) for number in numbers]
        average = torch.cat([gradient.flatten() for gradient in gradients])
        for group in self._ranks:
            dist.all_reduce(average.div_(group.size()), group=group)
        for gradient, value in zip(gradients, average.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(value.view_as(gradient))

    def finish_forward(self) -> None:
        """Frees what is still gathered."""
        for unit in self.root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def _groups(self) -> list[Any]:
        """What FSDP gathers and reduces as one each; there from the first forward pass on."""
        states = self._fsdp._get_fsdp_state()._state_ctx.all_states
        return [group for state in states for group in state._fsdp_param_groups]

    def _watch(self) -> None:
        """Notes which parameters get a gradient. What is gathered is the same tensor from its first time on."""
        for each in [each for group in self._groups() for each in group.fsdp_params if each not in self._watched]:
            if hasattr(each, "_unsharded_param") and each._unsharded_param.requires_grad:
                self._watched.add(each)
                each._unsharded_param.register_post_accumulate_grad_hook(partial(self._arrived, each))

    def _arrived(self, each: Any, gathered: torch.Tensor) -> None:
        self._reached.add(each)

    def share_reductions(self, reductions: list[Any]) -> None:
        """Lets the stage wait for what is being reduced in ``reductions``, as for what it reduced itself.

        Before it makes another buffer of gradients FSDP waits for the one that it made last and frees that. Each stage
        of a rank is a module of its own to FSDP, and would keep its last buffer from one micro-batch to the next.
        torch's ``share_comm_ctx`` shares more: the order of units as well, which one stage's last backward pass would
        clear under the others. Call after the first forward pass, which makes a list of its own.
        """
        self._fsdp._get_fsdp_state()._comm_ctx.reduce_scatter_states = reductions


def _options(mesh: DeviceMesh, plan: Plan, placements: Placements | None) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": data_mesh(mesh, plan.zero_stage), "mp_policy": MixedPrecisionPolicy()}
    dtype = compute_dtype(plan)
    if dtype is not torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if plan.offload is not Offload.NONE:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return {**options, "reshard_after_forward": plan.zero_stage == 3, "shard_placement_fn": placements}


def _numbers(root: nn.Module) -> list[nn.Parameter]:
    """Parameters without dimensions, or without numbers."""
    return [parameter for parameter in root.parameters() if parameter.ndim == 0 or not parameter.numel()]


def _leave_meta(root: nn.Module, device: torch.device) -> None:
    """Gives parameters without values memory, of this rank's part of each."""
    if any(parameter.is_meta for parameter in root.parameters()):
        with torch.no_grad():
            root._apply(lambda tensor: torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor)


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, int] = {}
    for _, parameter in module.named_parameters(remove_duplicate=False):
        owners[parameter] = owners.get(parameter, 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}
