"""ModelGraph: the operators of one training step of a model, as plain values (no torch here).

Sizes are of the whole model on one device, for ``batch_size`` sequences of ``seq_len`` tokens.
A multiply-add counts as 2 FLOPs and attention counts without regard to a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from hardware_profiles.vocabulary import OpClass
from planner.operators.call import AttributeValue

SCHEMA_VERSION = 1


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parameter(_Value):
    """One trainable or frozen parameter, listed once under its first FQN."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()  # further FQNs of the same (tied) tensor

    @property
    def names(self) -> tuple[str, ...]:
        """All its FQNs."""
        return (self.fqn, *self.aliases)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


class Node(_Value):
    """One forward operator, with what its backward costs and keeps."""

    id: int  # position in ``nodes``; a node's operands have smaller ids
    op: str  # ATen name such as ``aten.linear.default``; ``input`` for an input of the model
    op_class: OpClass
    module: str  # FQN of the innermost owning module, "" for the root
    source: str = ""  # file:line of the user's code, where known
    operands: tuple[int | str | None, ...] = ()  # tensors in order: node id, parameter FQN, None = buffer or constant
    attributes: dict[str, AttributeValue] = Field(default_factory=dict)  # non-tensor arguments by schema name
    shape: tuple[int, ...]
    dtype: str
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    param_bytes_read: int = 0  # part of bytes_read that is parameters (does not grow with the batch)
    backward_flops: int = 0  # input gradient + weight gradient
    weight_gradient_flops: int = 0  # part of backward_flops
    recomputed_flops: int = 0  # done again inside the backward kernel (flash attention's scores); not in backward_flops
    backward_bytes: int = 0  # read + written in backward
    saves: tuple[int, ...] = ()  # node ids whose storage autograd keeps for this operator's backward
    saved_extra_bytes: int = 0  # kept besides: masks, statistics, fp32 copies
    storage: int  # id of the node that owns the memory (itself, unless a view or in-place)
    batch_dependent: bool = True  # False: independent of the model's inputs (rotary tables, masks)
    output_bytes: int = 0  # bytes of the output (0 for views, whose storage is another node's)
    num_kernels: int = 1  # launches forward (0 for views)
    num_backward_kernels: int = 0  # launches in backward; a view may have some (a split's pieces are joined)
    requires_grad: bool = False  # whether a gradient flows back through this operator


class Block(_Value):
    """Structurally identical modules, in execution order."""

    modules: tuple[str, ...]
    count: int


class Unit(_Value):
    """A piece the pipeline may not cut: one repeated block, or what lies before, between or after.

    Units partition nodes and parameters: each node is in exactly one, and each module of
    ``modules`` (maximal modules that lie wholly in this unit) in exactly one.
    """

    name: str  # FQN of the block, or "pre", "post", "glue.N"
    kind: int  # units of equal kind have the same operators and shapes
    modules: tuple[str, ...]
    nodes: tuple[int, ...]
    parameters: tuple[str, ...]  # FQNs of first owners; a tied parameter belongs to its first user
    tied_parameters: tuple[str, ...] = ()  # used here, owned by an earlier unit
    is_block: bool = False  # a block, or where those are few a piece: the grain of recomputation and of sharded units
    boundary: tuple[int, ...] = ()  # node ids alive after this unit: what a pipeline cut here must send


class CutPoint(_Value):
    """A place where a pipeline may cut, and what must be sent there forward for the traced micro-batch."""

    after: str  # name of the unit
    node: int  # the last before the cut
    tensors: tuple[int, ...]  # node ids
    num_bytes: int


class ModelGraph(_Value):
    """The operator DAG of a model with its loss. Key names are the contract of graph.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    source: str  # MODEL as the user named it
    digest: str
    files: dict[str, str] = Field(default_factory=dict)  # of a Python model, as ``model.files`` of a plan
    tier: Literal["export", "modules", "config"]
    num_params: int
    num_trainable_params: int
    batch_size: int
    seq_len: int
    dtype: str  # parameters and activations were traced in this dtype, e.g. "bfloat16"
    forward_flops: int
    backward_flops: int
    saved_activation_bytes: int
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]
    blocks: tuple[Block, ...]
    units: tuple[Unit, ...]
    cut_points: tuple[CutPoint, ...] = ()  # between each unit and the next
    warnings: tuple[str, ...] = ()
    reads_values: tuple[str, ...] = ()  # FQNs of modules whose Python asks for values of tensors (``if tensor``)

    @cached_property
    def parameter_of(self) -> Mapping[str, Parameter]:
        """Each parameter under every FQN that it has."""
        return {name: p for p in self.parameters for name in p.names}
