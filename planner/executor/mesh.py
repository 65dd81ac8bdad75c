"""The device mesh of a plan, and each rank's place in it."""

# pyright: reportPrivateUsage=false
# DeviceMesh has no public way to take several axes as one.

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.mesh import MeshAxis
from planner.errors import PlanError
from planner.plan.checks import degrees_text
from planner.plan.schema import BatchShare, Plan

DATA_AXES = (MeshAxis.DP_REPLICATE.value, MeshAxis.DP_SHARD.value)
EP, EXPERT_SHARD = "ep", "expert_shard"  # axes of the ranks of experts: those that divide them, and shard the same ones
_SHARDS = (MeshAxis.DP_SHARD.value, MeshAxis.CP.value)  # of one state, under ZeRO stages above 0
_REPLICAS = (*DATA_AXES, MeshAxis.CP.value)  # of all states, under stage 0
_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}  # all of EXECUTED_PRECISIONS


def compute_dtype(plan: Plan) -> torch.dtype:
    """Dtype of the forward and backward pass; parameters and their gradients' sums stay float32."""
    return _DTYPES[plan.training.precision]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of ``tensor`` lies on this rank: all of one that no mesh divides."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def device_of(mesh: DeviceMesh) -> torch.device:
    """What this rank of ``mesh`` computes on."""
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of one rank: its pipeline rank, and which part of each global batch is its own."""

    pp_rank: int
    dp_rank: int
    dp_degree: int
    cp_degree: int = 1

    @property
    def num_parts(self) -> int:
        """Ranks whose gradients are averaged: each has some positions of some sequences."""
        return self.dp_degree * self.cp_degree

    def row(self, shares: Sequence[BatchShare]) -> int:
        """Which row of a prediction is of this rank: that of its pipeline rank, or of its share of the batch."""
        if not shares:
            return self.pp_rank
        return bisect_right(list(accumulate(share.num_replicas for share in shares)), self.dp_rank)

    def sequences(self, size: int, shares: Sequence[BatchShare] = ()) -> Sequence[int]:
        """Which of the ``size`` sequences of a global batch are this rank's own, in the order of its micro-batches.

        Ranks take one each in turn: r, r + d, r + 2d, ... Where their ``shares`` of a micro-batch are unlike, those
        that have theirs sit out the turns that are left until every rank has its own.
        """
        if not shares:
            return range(self.dp_rank, size, self.dp_degree)
        sizes = [share.micro_batch_size for share in shares for _ in range(share.num_replicas)]
        takes = [rank for turn in range(max(sizes)) for rank, own in enumerate(sizes) if turn < own]
        mine = [place for place, rank in enumerate(takes) if rank == self.dp_rank]
        return [start + place for start in range(0, size, len(takes)) for place in mine]


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """All five axes, outermost first. Needs an initialised process group of the plan's size.

    Without sharding (ZeRO stage 0) ``dp_shard`` joins ``dp_replicate``: the same ranks hold whole replicas.
    """
    mesh = plan.mesh
    replicate, shard = mesh.dp_replicate, mesh.dp_shard
    if plan.zero_stage == 0:
        replicate, shard = replicate * shard, 1
    shape = (mesh.pp, replicate, shard, mesh.cp, mesh.tp)
    whole = init_device_mesh(device_type, shape, mesh_dim_names=tuple(axis.value for axis in MeshAxis))
    if mesh.cp > 1:
        axes = _REPLICAS if plan.zero_stage == 0 else _SHARDS
        whole[axes]._flatten(_joined(axes))
    return whole


def expert_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The same ranks as experts lie on them: ``ep`` is the inner part of ``dp_shard * cp``. Collective.

    Its axes are pp, dp_replicate, expert_shard, ep, tp. Without sharding expert_shard joins dp_replicate.
    """
    mesh = plan.mesh.shape()
    replicate, shard = mesh.dp_replicate, mesh.num_expert_ranks // mesh.ep
    if plan.zero_stage == 0:
        replicate, shard = replicate * shard, 1
    names = (MeshAxis.PP.value, MeshAxis.DP_REPLICATE.value, EXPERT_SHARD, EP, MeshAxis.TP.value)
    with unset_fake_temporarily():  # a mesh of tensors without values has no ranks
        return init_device_mesh(device_type, (mesh.pp, replicate, shard, mesh.ep, mesh.tp), mesh_dim_names=names)


def place_of(mesh: DeviceMesh) -> RankPlace:
    """Where this rank stands in ``mesh``."""
    replicate, shard = (mesh[axis] for axis in DATA_AXES)
    return RankPlace(
        pp_rank=mesh[MeshAxis.PP.value].get_local_rank(),
        dp_rank=replicate.get_local_rank() * shard.size() + shard.get_local_rank(),
        dp_degree=replicate.size() * shard.size(),
        cp_degree=mesh[MeshAxis.CP.value].size(),
    )


def data_mesh(mesh: DeviceMesh, zero_stage: int) -> DeviceMesh:
    """The ranks that hold the same parameters, which ranks of context parallelism do too: shards, or replicas x shards.

    As ``Mesh.num_shards`` has it, ZeRO stages above 0 divide over ``dp_shard * cp``.
    """
    replicate, cp = (mesh[axis.value].size() for axis in (MeshAxis.DP_REPLICATE, MeshAxis.CP))
    if cp == 1:
        return mesh[DATA_AXES] if replicate > 1 else mesh[MeshAxis.DP_SHARD.value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13: a slice by a flattened axis will be asked for otherwise one day
        if zero_stage == 0:
            return mesh[_joined(_REPLICAS), MeshAxis.DP_SHARD.value]
        shards = _joined(_SHARDS)
        return mesh[MeshAxis.DP_REPLICATE.value, shards] if replicate > 1 else mesh[shards]


def replicas(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks that hold the same parameters under ZeRO stage 0."""
    is_joined = mesh[MeshAxis.CP.value].size() > 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return mesh[_joined(_REPLICAS) if is_joined else MeshAxis.DP_REPLICATE.value].get_group()


def _joined(axes: tuple[str, ...]) -> str:
    """The name of ``axes`` taken as one."""
    return "_and_".join(axes)


def check_world_size(plan: Plan) -> None:
    """PlanError where the running processes are not as many as the plan's devices."""
    world_size, needed = dist.get_world_size(), plan.mesh.shape().world_size
    if world_size != needed:
        raise PlanError(
            f"the plan needs {needed} ranks ({degrees_text(plan)}), but WORLD_SIZE is {world_size}",
            hint=f"start torchrun with {needed} processes, or make a plan for {world_size} devices",
        )
