"""Data parallelism with ZeRO: ranks train on different sequences, and hold, gather and reduce parameters together.

    ZeRO 0     gradients are all-reduced over all ranks that hold the same parameters
    ZeRO 1-3   gradients are reduce-scattered over a group of shards, and the shard all-reduced over the replicas of
               that group; parameters are gathered over the group of shards
    ZeRO 1 of frameworks that reduce to all: as ZeRO 0, and updated parameters are gathered

From ZeRO 2 on every micro-batch is reduced over the shards, and over the replicas as well, unless the framework leaves
that to the last one of the step.

Ranks of context parallelism hold the same parameters, so they count with those of data parallelism. An expert's
parameters lie on 1 / ep of these ranks. Where experts are not divided, all of a unit moves in one collective, unless
the framework gathers every tensor by itself.

Source: Rajbhandari et al., "ZeRO" (2020).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import ClassVar, NamedTuple

from costmodels.memory import COMPUTE_BYTES
from costmodels.vocabulary.mesh import ZERO_STAGES, Group, Mesh, ZeroStage
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement
from planner.axes.base import Asked, Axis, divisors, undivided
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Hides, Role, StateKind
from planner.layout.layout import Limits, Pins
from planner.table.keys import DataKey

MAX_MICRO_BATCH_SIZE = 64
_DENSE, _FROZEN, _EXPERT = StateKind.DENSE.value, StateKind.FROZEN.value, StateKind.EXPERT.value


class DataFields(NamedTuple):
    """What collectives of states depend on: ranks of context parallelism count with those of data parallelism."""

    num_replicas: int
    num_shards: int
    tp: int
    ep: int
    zero: ZeroStage
    etp: int | None = None

    @property
    def mesh(self) -> Mesh:
        """Degrees with the same groups of states."""
        return Mesh(dp_replicate=self.num_replicas, dp_shard=self.num_shards, tp=self.tp, ep=self.ep, etp=self.etp)


class DataAxis(Axis[DataFields]):
    """Two degrees, replicas of groups of shards, and the stage of ZeRO."""

    name: ClassVar[str] = "dp"

    def degrees(self, asked: Asked, left: int) -> list[int]:
        """All that is left, where it divides the batch."""
        if asked.pins.dp not in (None, left) or asked.training.global_batch_size % left:
            return []
        return [left]

    def violations(self, asked: Asked) -> list[str]:
        """Of the batch, and of ZeRO's stages."""
        training, pins, limits = asked
        batch, micro, dp = training.global_batch_size, pins.micro_batch, pins.dp or 1
        found = undivided("dp", pins.dp, limits.num_devices)
        if pins.dp and batch % pins.dp:
            found.append(f"dp={pins.dp} does not divide the global batch of {batch} sequences")
        if micro is not None and (micro < 1 or batch % (micro * dp)):
            found.append(f"micro-batch {micro} * dp {dp} does not divide the global batch of {batch} sequences")
        if pins.zero is not None and pins.zero not in range(4):
            found.append(f"ZeRO stage must be 0, 1, 2 or 3, got {pins.zero}")
        return [*found, *_nothing_to_shard_over(pins, limits)]

    def state_fields(self, key: DataKey) -> DataFields:
        """Groups of ranks, and what ZeRO divides."""
        zero = ZERO_STAGES[key.zero_stage]
        return DataFields(key.dp_replicate, key.num_shards, key.tensor.tp, key.ep, zero, key.tensor.etp)

    def state_collectives(self, own: DataFields, framework: Framework) -> tuple[Collective, ...]:
        """Gathers of parameters and reductions of gradients; those of experts apart where they lie on fewer ranks."""
        if own.ep == 1:
            return _moves(own, (_DENSE, _EXPERT), (_FROZEN,), framework)
        return *_moves(own, (_DENSE,), (_FROZEN,), framework), *_moves(own, (_EXPERT,), (), framework)


DATA = DataAxis()


def replica_options(asked: Asked, dp: int) -> list[int]:
    """Numbers of replicas into which ``dp`` ranks can be divided."""
    return [d for d in divisors(dp) if asked.pins.dp_replicate in (None, d)]


def zero_stages(asked: Asked, mesh: Mesh) -> list[int]:
    """Stages over the shards of ``mesh``: sharding needs ranks to shard over, and stage 0 leaves no shards of data."""
    possible = [*([0] if mesh.dp_shard == 1 else []), *([1, 2, 3] if mesh.num_shards > 1 else [])]
    return [stage for stage in possible if asked.pins.zero in (None, stage)]


def micro_batches(asked: Asked, dp: int) -> list[tuple[int, int]]:
    """Sizes of a micro-batch, and how many a rank then has."""
    per_rank, pin = asked.training.global_batch_size // dp, asked.pins.micro_batch
    sizes = [pin] if pin else divisors(per_rank)
    return [
        (size, per_rank // size) for size in sizes if per_rank % size == 0 and (size <= MAX_MICRO_BATCH_SIZE or pin)
    ]


def _nothing_to_shard_over(pins: Pins, limits: Limits) -> list[str]:
    """ZeRO divides states over the ranks of dp_shard * cp: there must be some."""
    if pins.zero not in (1, 2, 3):
        return []
    others = {name: getattr(pins, name) for name in ("tp", "pp", "dp_replicate") if (getattr(pins, name) or 1) > 1}
    ranks = limits.num_devices // prod(others.values())
    if pins.dp is not None and pins.cp is not None:
        others = {"dp": pins.dp, "cp": pins.cp, **({"dp_replicate": pins.dp_replicate} if pins.dp_replicate else {})}
        ranks = pins.dp * pins.cp // (pins.dp_replicate or 1)
    if ranks > 1:
        return []
    told = ", ".join(f"{name}={degree}" for name, degree in others.items()) or f"{limits.num_devices} GPU"
    return [f"zero={pins.zero} divides states over the ranks of dp_shard * cp, and with {told} there is only one"]


def _moves(
    own: DataFields, trained: tuple[int, ...], frozen: tuple[int, ...], framework: Framework
) -> tuple[Collective, ...]:
    """Of parameters that lie on the same ranks."""
    mesh, zero, is_dense = own.mesh, own.zero, _DENSE in trained
    everywhere = mesh.group(Group.ALL_DATA if is_dense else Group.EXPERT_DATA)
    if not zero.shards_optimizer:
        return (_reduction(CollectiveKind.ALL_REDUCE, everywhere, trained, zero, framework),)
    shards, replicas = mesh.group(Group.SHARD if is_dense else Group.EXPERT_SHARD), mesh.group(Group.REPLICATE)
    gathered = framework.recipe.state.gathered_bytes
    gather = Collective(
        CollectiveKind.ALL_GATHER,
        shards,
        Term.DATA,
        Pass.FORWARD,
        Role.GATHER,
        of=(*trained, *frozen),
        times=COMPUTE_BYTES[framework.precision] if gathered is None else gathered.value,
        hides=Hides.UNIT if zero.shards_parameters else Hides.FIRST_FORWARD,
        rate=framework.recipe.data_parallel_rate.value,
        each_tensor=framework.recipe.gathers_each_tensor,
    )
    if not zero.shards_gradients and framework.recipe.state.reduces_to_all:
        return gather, _reduction(CollectiveKind.ALL_REDUCE, everywhere, trained, zero, framework)
    scatter = _reduction(CollectiveKind.REDUCE_SCATTER, shards, trained, zero, framework)
    across = _reduction(CollectiveKind.ALL_REDUCE, replicas, trained, zero, framework, 1 / shards.num_ranks)
    if zero.shards_gradients and framework.recipe.reduces_over_replicas_once:
        across = replace(across, role=Role.REPLICAS, hides=Hides.LAST_BACKWARD)
    return gather, scatter, across


def _reduction(
    kind: CollectiveKind,
    group: GroupPlacement,
    of: tuple[int, ...],
    zero: ZeroStage,
    framework: Framework,
    share: float = 1.0,
) -> Collective:
    return Collective(
        kind,
        group,
        Term.DATA,
        Pass.BACKWARD,
        Role.REDUCE,
        of=of,
        times=framework.recipe.state.reduced_bytes(framework.precision) * share,
        hides=Hides.UNIT if zero.shards_gradients else Hides.LAST_BACKWARD,
        rate=framework.recipe.data_parallel_rate.value,
    )
