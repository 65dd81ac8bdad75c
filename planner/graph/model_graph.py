"""ModelGraph: the operators of one training step of a model, as plain values (no torch here).

Sizes are of the whole model on one device, for ``batch_size`` sequences of ``seq_len`` tokens.
A multiply-add counts as 2 FLOPs and attention counts without regard to a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from costmodels.vocabulary.bounds import MOST_BYTES, MOST_FLOPS, MOST_SEQ_LEN, MOST_TEXT
from hardware_profiles.vocabulary import OpClass
from planner.operators.call import AttributeValue

SCHEMA_VERSION = 1

Size = Annotated[int, Field(ge=0, le=MOST_BYTES)]  # of bytes, elements, nodes
Text = Annotated[str, Field(max_length=MOST_TEXT)]  # as a plan has them, which says many of them as well
Positive = Annotated[int, Field(ge=1, le=MOST_SEQ_LEN)]
Flops = Annotated[int, Field(ge=0, le=MOST_FLOPS)]
Sizes = Annotated[tuple[Size, ...], FailFast()]
Operands = Annotated[tuple[Size | Text | None, ...], FailFast()]
Names = Annotated[tuple[Text, ...], FailFast()]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Parameter(_Value):
    """One trainable or frozen parameter, listed once under its first FQN."""

    fqn: Text
    shape: Sizes
    dtype: Text
    trainable: bool = True
    aliases: Names = ()  # further FQNs of the same (tied) tensor

    @property
    def names(self) -> Names:
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

    id: Size  # position in ``nodes``; a node's operands have smaller ids
    op: Text  # ATen name such as ``aten.linear.default``; ``input`` for an input of the model
    op_class: OpClass
    module: Text  # FQN of the innermost owning module, "" for the root
    source: Text = ""  # file:line of the user's code, where known
    operands: Operands = ()  # tensors in order: node id, parameter FQN, None = buffer or constant
    attributes: dict[str, AttributeValue] = Field(default_factory=dict)  # non-tensor arguments by schema name
    shape: Sizes
    dtype: Text
    flops: Flops = 0
    bytes_read: Size = 0
    bytes_written: Size = 0
    param_bytes_read: Size = 0  # part of bytes_read that is parameters (does not grow with the batch)
    backward_flops: Flops = 0  # input gradient + weight gradient
    weight_gradient_flops: Flops = 0  # part of backward_flops
    recomputed_flops: Flops = 0  # done again in the backward kernel (flash attention's scores), not in backward_flops
    backward_bytes: Size = 0  # read + written in backward
    saves: Sizes = ()  # node ids whose storage autograd keeps for this operator's backward
    saved_extra_bytes: Size = 0  # kept besides: masks, statistics, fp32 copies
    storage: Size  # id of the node that owns the memory (itself, unless a view or in-place)
    batch_dependent: bool = True  # False: independent of the model's inputs (rotary tables, masks)
    output_bytes: Size = 0  # bytes of the output (0 for views, whose storage is another node's)
    num_kernels: Size = 1  # launches forward (0 for views)
    num_backward_kernels: Size = 0  # launches in backward; a view may have some (a split's pieces are joined)
    requires_grad: bool = False  # whether a gradient flows back through this operator


class Block(_Value):
    """Structurally identical modules, in execution order."""

    modules: Names
    count: Size


class Unit(_Value):
    """A piece the pipeline may not cut: one repeated block, or what lies before, between or after.

    Units partition nodes and parameters: each node is in exactly one, and each module of
    ``modules`` (maximal modules that lie wholly in this unit) in exactly one.
    """

    name: Text  # FQN of the block, or "pre", "post", "glue.N"
    kind: Size  # units of equal kind have the same operators and shapes
    modules: Names
    nodes: Sizes
    parameters: Names  # FQNs of first owners; a tied parameter belongs to its first user
    tied_parameters: Names = ()  # used here, owned by an earlier unit
    is_block: bool = False  # a block, or where those are few a piece: the grain of recomputation and of sharded units
    boundary: Sizes = ()  # node ids alive after this unit: what a pipeline cut here must send


class CutPoint(_Value):
    """A place where a pipeline may cut, and what must be sent there forward for the traced micro-batch."""

    after: Text  # name of the unit
    node: Size  # the last before the cut
    tensors: Sizes  # node ids
    num_bytes: Size


class ModelGraph(_Value):
    """The operator DAG of a model with its loss. Key names are the contract of graph.json."""

    schema_version: Literal[1] = SCHEMA_VERSION
    source: Text  # MODEL as the user named it
    digest: Text
    files: dict[Text, Text] = Field(default_factory=dict)  # of a Python model, as ``model.files`` of a plan
    tier: Literal["export", "modules", "config"]
    num_params: Size
    num_trainable_params: Size
    batch_size: Positive
    seq_len: Positive
    dtype: Text  # parameters and activations were traced in this dtype, e.g. "bfloat16"
    forward_flops: Flops
    backward_flops: Flops
    saved_activation_bytes: Size
    parameters: Annotated[tuple[Parameter, ...], FailFast()]
    nodes: Annotated[tuple[Node, ...], FailFast()]
    edges: Annotated[tuple[tuple[Size, Size], ...], FailFast()]
    blocks: Annotated[tuple[Block, ...], FailFast()]
    units: Annotated[tuple[Unit, ...], FailFast()]
    cut_points: Annotated[tuple[CutPoint, ...], FailFast()] = ()  # between each unit and the next
    warnings: Names = ()
    reads_values: Names = ()  # FQNs of modules whose Python asks for values of tensors (``if tensor``)

    @cached_property
    def parameter_of(self) -> Mapping[str, Parameter]:
        """Each parameter under every FQN that it has."""
        return {name: p for p in self.parameters for name in p.names}
