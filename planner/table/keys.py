"""What a row of the cost table depends on: the fields of a layout that its price may read, and no others.

A function that fills or reads a row is given the key, never the layout: a field that is left out of a key is a type
error and an AttributeError, not a silent price. Names of fields are those of ``Layout`` and of its mesh.
"""

from __future__ import annotations

from typing import NamedTuple

from costmodels.vocabulary.choices import ContextMethod, Offload


class TensorSplit(NamedTuple):
    """How the operators of a block are split: placements are decided once for each. ``etp``: of experts; None: tp."""

    tp: int
    sequence_parallel: bool
    etp: int | None = None


class WorkKey(NamedTuple):
    """One micro-batch through a unit on one rank. ``cp`` ranks share each of ``micro_batch_size`` sequences."""

    tensor: TensorSplit
    ep: int
    cp: int
    micro_batch_size: int
    cp_method: ContextMethod = ContextMethod.ALL_GATHER


class DataKey(NamedTuple):
    """Gathering a unit's parameters and reducing its gradients over the data-parallel ranks."""

    tensor: TensorSplit
    ep: int
    dp_replicate: int
    num_shards: int
    zero_stage: int


class StateKey(NamedTuple):
    """States of parameters on one rank."""

    zero_stage: int
    num_shards: int
    num_expert_ranks: int
    ep: int
    expert_parts: float
    is_replicated: bool  # more than one rank of data and context parallelism
    experts_are_replicated: bool
    offload: Offload


class SendKey(NamedTuple):
    """What one pipeline rank sends to the next, over which links."""

    pp: int
    groups: tuple[str, ...]
