"""Pipeline parallelism: torch.distributed.pipelining's schedules over stages cut from any model.

Some split a backward pass. Its first half makes the gradients that a stage sends, under FSDP's hooks as ever; the
second makes those of the weights, starting inside the recorded graph, where FSDP has no hooks: what these would do is
done after it. It needs the parameters as they were recorded, so they stay gathered until the step's end (ZeRO 0 or 1).
"""

# pyright: reportPrivateUsage=false
# torch's stages allocate what they receive where no public method is.

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _make_tensor_from_meta, _RecvInfo

from costmodels.vocabulary.mesh import MeshAxis
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import PlannerError
from planner.executor.mesh import device_of, local_part
from planner.executor.stage_module import StageModule
from planner.executor.stage_split import TiedParameter
from planner.executor.stage_trace import META, TensorMeta
from planner.plan.schema import Plan

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
_OF_ONE_STAGE = {ScheduleName.GPIPE: ScheduleGPipe, ScheduleName.ONE_F_ONE_B: Schedule1F1B}
_OF_SEVERAL_STAGES = {
    ScheduleName.INTERLEAVED_1F1B: ScheduleInterleaved1F1B,
    ScheduleName.INTERLEAVED_ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    ScheduleName.ZBV_ZERO_BUBBLE: ScheduleZBVZeroBubble,
    ScheduleName.DUAL_PIPE_V: ScheduleDualPipeV,
}
_DRIFT = 1e-4  # of a norm: copies that are updated alike differ by rounding at most, 1e-7
LOSS_META = TensorMeta((), torch.float32, requires_grad=True)


class SendsAfterReceives(list[dist.P2POp]):
    """Sends, of which torch's 1F1B makes one batch with receives: ``sends + receives``. Receives are posted first.

    Over gloo messages of both ways go at once then, and one after the other else; for NCCL a batch has no order.
    """

    def __add__(self, receives: list[dist.P2POp]) -> list[dist.P2POp]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [*receives, *self]


class _Stage(PipelineStage):
    """A stage whose gradients are reduced as the plan's ZeRO stage says, with a pipeline as without.

    torch's own stage would keep all gradients whole until the last micro-batch, for good a buffer for what it receives
    of each micro-batch, in both directions, and what it sends until the backward pass. Here a buffer is there from when
    it is received into until the pass that takes it has run, and what is sent until it is sent; autograd keeps either
    longer where it needs it.
    """

    def __init__(self, module: StageModule, index: int, plan: Plan, mesh: DeviceMesh, reductions: list[object]) -> None:
        self._reductions = reductions
        num_stages = len(plan.pipeline.stages)
        sent = module.output_metas if index < num_stages - 1 else (LOSS_META,)
        super().__init__(
            module,
            index,
            num_stages,
            device_of(mesh),
            input_args=tuple(module.local_meta(meta).empty() for meta in module.input_metas),
            output_args=tuple(module.local_meta(meta).empty() for meta in sent),
            group=mesh[MeshAxis.PP.value].get_group(),
        )

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, object], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, object]] | None]:
        """Sets what this micro-batch's backward reduces and frees, then runs it: ``full``, ``input`` or ``weight``."""
        assert isinstance(self.submod, StageModule)
        data, is_weight = self.submod.data, backward_type == "weight"
        # Weights' gradients may pass a unit's hook on their way: it must not free parameters that others still need.
        data.prepare_backward(last=last_backward and not is_weight)
        data.share_reductions(self._reductions)
        if backward_type == "input" and not _wants_gradients(bwd_kwargs["input_values"]):
            return self._all_at_once(bwd_kwargs)
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if is_weight:
            data.finish_weights(last=last_backward)
        return result

    def _all_at_once(
        self, bwd_kwargs: dict[str, object]
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, object]]]:
        """Both halves of a backward pass, where nothing is to be sent: all stages before are frozen.

        torch finds what the second half has to do from the first's way to what was received: here there is none.
        """
        if self.is_last:  # of which torch made a tuple of one
            (loss,) = cast(tuple[torch.Tensor], bwd_kwargs["stage_output"])
            bwd_kwargs = {**bwd_kwargs, "stage_output": loss}
        gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs)
        return gradients, []

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of a micro-batch's forward pass."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's forward pass, after which only they hold what is sent."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.is_last:
            outputs, inputs = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = tuple(map(_without_memory, outputs)), inputs
        return SendsAfterReceives(operations)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of a micro-batch's backward pass."""
        self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's backward pass, each in order: a split pass makes transposed gradients too."""
        if bwd_chunk_id in self.bwd_cache:
            gradients: tuple[torch.Tensor | None, ...] = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(None if each is None else each.contiguous() for each in gradients)
        return SendsAfterReceives(super().get_bwd_send_ops(bwd_chunk_id))

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Takes gradients from a stage on the same rank; where there is none, torch writes zeros."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self._allocate(self.grad_recv_info[mb_index])
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        """Runs a micro-batch forward."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        _release(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs a micro-batch backward, or the first half of it."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        _release(self.grad_recv_info[bwd_chunk_id])

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._without_memory():
            super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _release(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._without_memory():
            super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            _release(infos)

    @contextlib.contextmanager
    def _without_memory(self) -> Generator[None]:
        """Lets torch make its buffers where they take none."""
        device, self.device = self.device, META
        try:
            yield
        finally:
            self.device = device

    def _allocate(self, infos: Iterable[_RecvInfo]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)


def _wants_gradients(values: object) -> bool:
    assert isinstance(values, list | tuple)
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def _release(infos: Iterable[_RecvInfo]) -> None:
    for info in infos:
        info.buffer = None


def _without_memory(output: torch.Tensor) -> torch.Tensor:
    """Stands in for ``output`` in a backward pass, which takes gradients of its shape and not its values."""
    return _Shape.apply(output) if output.requires_grad else output  # pyright: ignore[reportReturnType]


class _Shape(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, output: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.empty_strided(output.shape, (0,) * output.ndim, dtype=output.dtype, device=output.device)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


def build_schedule(stages: Sequence[StageModule], indices: Sequence[int], plan: Plan, mesh: DeviceMesh) -> Schedule:
    """The plan's schedule over this rank's stages. Losses come ready scaled, so it scales nothing."""
    reductions: list[object] = []  # one list for all stages
    built = [_Stage(stage, index, plan, mesh, reductions) for stage, index in zip(stages, indices, strict=True)]
    microbatches = plan.pipeline.num_microbatches
    name = plan.pipeline.schedule
    if name in _OF_ONE_STAGE:
        return _OF_ONE_STAGE[name](built[0], microbatches, loss_fn=_given_loss, scale_grads=False)
    return _OF_SEVERAL_STAGES[name]([*built], microbatches, loss_fn=_given_loss, scale_grads=False)


def _given_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage returns the loss itself."""
    return output


@dataclass(frozen=True)
class TiedGradient:
    """The local copies of one parameter that several stages hold, and the ranks that hold others."""

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None  # None: all copies are on this rank
    num_copies: int  # on all stages
    names: tuple[str, ...] = ()  # on the stages, in order

    def reduce(self) -> None:
        """Gives every copy the sum of all copies' gradients, so that an optimiser keeps them equal.

        None to what is frozen, on every rank alike: zeros would let weight decay and momentum move it.
        """
        if self._is_frozen_alike():
            for parameter in self.parameters:
                parameter.grad = None
            return
        total = torch.zeros_like(local_part(self.parameters[0].detach()))
        for parameter in self.parameters:
            if parameter.grad is not None:
                total += local_part(parameter.grad)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(total)

    def _is_frozen_alike(self) -> bool:
        """Whether any copy is: in one process they are one tensor, frozen under all of its names. Collective.

        PlannerError where copies are no longer equal.
        """
        is_frozen = any(not parameter.requires_grad for parameter in self.parameters)
        norms = torch.stack([torch.linalg.vector_norm(local_part(each.detach())).double() for each in self.parameters])
        said = torch.stack([norms.new_tensor(is_frozen), norms.max(), -norms.min()])
        if self.group is not None:
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.group)
        if isinstance(said, FakeTensor):
            return is_frozen
        frozen, most, least = said.tolist()
        if most + least > _DRIFT * most:
            raise PlannerError(
                f"{' and '.join(self.names)} are one tensor in the model, and its copies on several pipeline stages "
                f"are no longer alike (norms of {-least:.7g} and {most:.7g}): they were updated in different ways",
                hint="give the optimiser the same options for a tied parameter under all of its names",
            )
        return bool(frozen)


def tied_gradients(
    ties: Sequence[TiedParameter], roots: dict[int, nn.Module], plan: Plan, mesh: DeviceMesh
) -> tuple[TiedGradient, ...]:
    """This rank's part in each tie. Collective: every rank creates the groups of every pipeline."""
    pp_rank_of = {stage.index: stage.pp_rank for stage in plan.pipeline.stages}
    side_by_side = mesh.size() // plan.mesh.pp  # pp is the outermost axis, and ranks lie in order
    pipelines = [list(range(first, mesh.size(), side_by_side)) for first in range(side_by_side)]
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # one for all ties of the same pipeline ranks
    found: list[TiedGradient] = []
    for tie in ties:
        holders = tuple(sorted({pp_rank_of[stage] for stage in tie.fqns}))
        if holders not in groups:
            groups[holders] = _group_of(holders, pipelines)
        local = tuple(roots[stage].get_parameter(fqn) for stage, fqn in sorted(tie.fqns.items()) if stage in roots)
        if local:
            names = tuple(dict.fromkeys(fqn for _, fqn in sorted(tie.fqns.items())))
            found.append(TiedGradient(local, groups[holders], len(tie.fqns), names))
    return tuple(found)


def _group_of(holders: Sequence[int], pipelines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The ranks ``holders`` of this rank's pipeline; None where one rank holds all, or this rank is not among them."""
    mine: dist.ProcessGroup | None = None
    for ranks in pipelines if len(holders) > 1 else ():
        members = [ranks[holder] for holder in holders]
        group = dist.new_group(members)
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in members:
            mine = group
    return mine


def separate_ties(ties: Sequence[TiedParameter], roots: dict[int, nn.Module]) -> None:
    """Gives each stage on this rank its own copy of what it is tied to, as a stage elsewhere has one."""
    for tie in ties:
        for stage in sorted(set(tie.fqns) & set(roots))[1:]:
            old = roots[stage].get_parameter(tie.fqns[stage])
            new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            _replace(roots[stage], old, new)


def _replace(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    for owner in root.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                owner.register_parameter(name, new)
