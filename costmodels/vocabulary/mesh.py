"""The device mesh: its axes, the groups of ranks that communicate over it, and what ZeRO's stages divide over them.

Ranks are numbered along the axes, outermost first, so a group of ranks that differ along some axes and agree in all
others is a number of ranks and the distance between neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum

from costmodels.vocabulary.workload import GroupPlacement


class MeshAxis(StrEnum):
    """Axes of the device mesh, outermost first: neighbouring ranks differ in ``tp``."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


class Group(Enum):
    """Ranks that communicate with each other; the value says what they have in common or divide."""

    TENSOR = "the operators of a block"
    CONTEXT = "the positions of a sequence"
    EXPERT = "the experts of a layer; the inner part of dp_shard and cp, or of dp_shard, cp and tp"
    SHARD = "the shards of dense parameters, gradients and optimiser states"
    EXPERT_SHARD = "the same of experts' parameters"
    REPLICATE = "replicas of the same shards"
    ALL_DATA = "all gradients of the same dense parameters"
    EXPERT_DATA = "all gradients of the same experts' parameters"
    PIPELINE = "the stages of a pipeline"


@dataclass(frozen=True)
class Mesh:
    """Degrees of the device mesh. ``ep`` lies inside ``dp_shard * cp`` and adds no ranks.

    ``etp`` is the tensor-parallel degree of experts where that is not ``tp`` (None: it is). It can be 1: experts are
    whole on a rank, and ``ep`` lies inside ``dp_shard * cp * tp``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks, which equals the number of devices."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many different micro-batches are in work at once."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO divides dense states over: those that shard data, and those of context, which agree."""
        return self.dp_shard * self.cp

    @property
    def is_replicated(self) -> bool:
        """Whether more than one rank holds the same dense parameters, and reduces their gradients with the others."""
        return self.dp * self.cp > 1

    @property
    def experts_are_replicated(self) -> bool:
        """The same of the same experts."""
        return self.dp_replicate * self.num_expert_ranks > self.ep

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_expert_ranks(self) -> int:
        """Ranks in which ``ep`` lies: they divide the experts of a layer, or shard the states of the same ones."""
        return self.num_shards * self.tp // self.expert_tp

    @property
    def expert_parts(self) -> float:
        """A rank's experts are one part of so many of all experts' 1 / tp; below 1 it holds more than that."""
        return self.ep if self.etp is None else self.ep * self.etp / self.tp

    def degree(self, axis: MeshAxis) -> int:
        """Number of ranks along ``axis``."""
        return int(getattr(self, axis.value))

    def violations(self) -> tuple[str, ...]:
        """Every rule of the mesh that its degrees break, as sentences."""
        found = [
            f"{name} must be at least 1, got {degree}"
            for name, degree in asdict(self).items()
            if degree is not None and degree < 1
        ]
        if found:
            return tuple(found)
        if self.etp is not None and (self.etp != 1 or self.tp == 1):
            found.append(f"etp must be 1 or tp = {self.tp}, got {self.etp}")
        elif self.num_expert_ranks % self.ep:
            ranks = "dp_shard * cp" if self.etp is None else "dp_shard * cp * tp"
            found.append(f"ep {self.ep} does not divide {ranks} = {self.num_expert_ranks}")
        elif self.etp is not None and self.ep == 1:
            found.append("etp 1 beside tp > 1 needs ep > 1, or every rank would hold all experts")
        return tuple(found)

    def group(self, group: Group) -> GroupPlacement:
        """Where the ranks of one group of this kind sit."""
        inside = self.num_shards
        match group:
            case Group.TENSOR:
                return GroupPlacement(self.tp, 1)
            case Group.CONTEXT:
                return GroupPlacement(self.cp, self.tp)
            case Group.EXPERT:
                return GroupPlacement(self.ep, self.expert_tp)
            case Group.SHARD:
                return GroupPlacement(inside, self.tp)
            case Group.EXPERT_SHARD:
                return GroupPlacement(self.num_expert_ranks // self.ep, self.expert_tp * self.ep)
            case Group.REPLICATE:
                return GroupPlacement(self.dp_replicate, self.tp * inside)
            case Group.ALL_DATA:
                return GroupPlacement(self.dp_replicate * inside, self.tp)
            case Group.EXPERT_DATA:
                return GroupPlacement(self.dp_replicate * self.num_expert_ranks // self.ep, self.expert_tp * self.ep)
            case Group.PIPELINE:
                return GroupPlacement(self.pp, self.world_size // self.pp)


def even_dim(shape: Sequence[int], num_parts: int) -> int | None:
    """The first dim of ``shape`` that makes so many equal parts; None where there is none."""
    return next((dim for dim, size in enumerate(shape) if size % num_parts == 0), None)


@dataclass(frozen=True)
class ZeroStage:
    """What a stage of ZeRO (Rajbhandari et al., 2020) divides over the ranks of ``Group.SHARD``."""

    number: int
    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool

    def violations(self, mesh: Mesh) -> tuple[str, ...]:
        """Rules of ``mesh`` with this stage that are broken, as sentences."""
        if self.shards_optimizer or mesh.dp_shard == 1:
            return ()
        return (f"ZeRO stage 0 shards nothing, but dp_shard is {mesh.dp_shard}",)


ZERO_STAGES = tuple(ZeroStage(number, number >= 1, number >= 2, number >= 3) for number in range(4))
"""By number."""
