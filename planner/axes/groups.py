"""Groups of ranks that communicate, from the degrees of the mesh."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from costmodels.workload import GroupPlacement


class Group(Enum):
    """Ranks that communicate with each other; the value says what they have in common or divide."""

    TENSOR = "the operators of a block"
    CONTEXT = "the positions of a sequence"
    EXPERT = "the experts of a layer; the inner part of dp_shard and cp"
    SHARD = "the shards of dense parameters, gradients and optimiser states"
    EXPERT_SHARD = "the same of experts' parameters"
    REPLICATE = "replicas of the same shards"
    ALL_DATA = "all gradients of the same dense parameters"
    EXPERT_DATA = "all gradients of the same experts' parameters"


class Mesh(NamedTuple):
    """Degrees of the device mesh without its pipeline; ``ep`` lies inside ``dp_shard * cp``."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def group(self, group: Group) -> GroupPlacement:
        """Where the ranks of one group of this kind sit."""
        sharding = self.dp_shard * self.cp
        everywhere = self.dp_replicate * sharding
        ranks, stride = {
            Group.TENSOR: (self.tp, 1),
            Group.CONTEXT: (self.cp, self.tp),
            Group.EXPERT: (self.ep, self.tp),
            Group.SHARD: (sharding, self.tp),
            Group.EXPERT_SHARD: (sharding // self.ep, self.tp * self.ep),
            Group.REPLICATE: (self.dp_replicate, self.tp * sharding),
            Group.ALL_DATA: (everywhere, self.tp),
            Group.EXPERT_DATA: (everywhere // self.ep, self.tp * self.ep),
        }[group]
        return GroupPlacement(ranks, stride)
