"""The terms of time and of memory, each declared once: what a step is spent on, what a rank's memory holds.

Breakdown, plan, ledger, cost table and printed tables iterate over these; a new term is a new line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum


class Pass(Enum):
    """One way of a micro-batch through a unit."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Term(StrEnum):
    """What a step's time is spent on; the value is the key in plan.json's ``prediction.breakdown_s``."""

    label: str  # as tables show it

    def __new__(cls, value: str, label: str) -> Term:
        """A term with its key and its label."""
        term = str.__new__(cls, value)
        term._value_ = value
        term.label = label
        return term

    COMPUTE = "compute", "compute"
    RECOMPUTE = "recompute", "recomputation"
    TENSOR = "tensor_parallel", "tensor-parallel communication"
    CONTEXT = "context_parallel", "context-parallel communication"
    EXPERT = "expert_parallel", "expert-parallel communication"
    DATA = "data_parallel", "data-parallel communication, exposed"
    OFFLOAD = "offload", "activations to the host and back, exposed"
    SEND = "pipeline_communication", "pipeline communication"
    BUBBLE = "bubble", "pipeline bubble"
    OPTIMIZER = "optimizer", "optimiser step"


class Time(Enum):
    """Seconds that the table stores of one micro-batch through one unit, none of them hidden behind another yet.

    The value is (term, pass); a part that no term counts by itself has a name in place of the term.
    """

    __hash__ = object.__hash__  # members are looked up a million times: that of Enum is in Python

    COMPUTE_FORWARD = Term.COMPUTE, Pass.FORWARD
    COMPUTE_BACKWARD = Term.COMPUTE, Pass.BACKWARD  # without recomputation
    RECOMPUTE = Term.RECOMPUTE, Pass.BACKWARD  # forward work that the backward pass repeats
    TENSOR_FORWARD = Term.TENSOR, Pass.FORWARD
    TENSOR_BACKWARD = Term.TENSOR, Pass.BACKWARD
    CONTEXT_FORWARD = Term.CONTEXT, Pass.FORWARD
    CONTEXT_BACKWARD = Term.CONTEXT, Pass.BACKWARD
    EXPERT_FORWARD = Term.EXPERT, Pass.FORWARD
    EXPERT_BACKWARD = Term.EXPERT, Pass.BACKWARD
    WEIGHT_GRADIENT = "part of COMPUTE_BACKWARD: what a schedule that splits backward passes runs later", Pass.BACKWARD
    SPLIT_EXTRA = "kernels that run twice where a schedule splits the backward pass", Pass.BACKWARD
    HIDING_FORWARD = "part of COMPUTE_FORWARD that hides messages of the unit itself, and nothing else", Pass.FORWARD
    HIDING_BACKWARD = "part of COMPUTE_BACKWARD and RECOMPUTE that does the same", Pass.BACKWARD
    SPARE_FORWARD = "part of COMPUTE_FORWARD that the host does not need, and may take for more", Pass.FORWARD
    SPARE_BACKWARD = "part of COMPUTE_BACKWARD and RECOMPUTE that it does not need", Pass.BACKWARD

    @property
    def term(self) -> Term | None:
        """The term that counts it; None for a part of another time."""
        return self.value[0] if isinstance(self.value[0], Term) else None

    @property
    def runs_in(self) -> Pass:
        """Forward or backward."""
        return self.value[1]


class Holding(Enum):
    """Bytes that the table stores of one micro-batch in one unit on one rank; the value says when they are held."""

    __hash__ = object.__hash__

    KEPT = "from its forward to its backward, for every micro-batch in flight"
    WORKING = "besides, while this unit's backward runs, or its loss forward"
    GRADIENTS = "as WORKING, but when gradients of this unit's parameters are there as well"
    LOSS = "part of WORKING that the loss needs in forward already"
    BUFFER = "for good, in buffers that all units share"
    COLLECTIVE = "freed, but not reusable before asynchronous collectives are done with it"
    QUEUED = "part of COLLECTIVE that belongs to as many launches as the driver queues"
    STRANDED = "freed, but too small for what is allocated next"
    BOUNDARY = "sent where the pipeline is cut behind this unit, by one rank"
    WAITING = "more, or less, from the first to the second half of a split backward pass"


class Data(Enum):
    """Seconds that the table stores of one unit's states over the data-parallel ranks, nothing hidden yet."""

    __hash__ = object.__hash__

    GATHER = "its parameters, whole on every rank"
    REDUCE = "its gradients, summed where they belong"
    ACCUMULATE = "one micro-batch's gradients added to those before it"
    REPLICAS = "its gradients, reduced in every micro-batch, summed over replicas once a step"


class Element(Enum):
    """What is counted of a unit's parameters on one tensor-parallel rank."""

    __hash__ = object.__hash__

    TRAINABLE = "all that are trained, experts among them"
    FROZEN = "the others"
    TIED = "used here but owned by an earlier unit: a pipeline that parts them holds a copy"
    EXPERT = "of the trainable ones, those that expert parallelism divides"


PLACE: Mapping[Enum, int] = {
    label: place for axis in (Time, Holding, Data, Element) for place, label in enumerate(axis)
}
"""Where each label stands on its axis of the cost table's arrays."""


class Provenance(StrEnum):
    """How the bytes of a term are known."""

    SPECIFIED = "specified"  # a line of some code allocates them
    MEASURED = "measured"  # seen on machines
    FITTED = "fitted"  # to published runs


class Counted(Enum):
    """Who sees the bytes of a term."""

    ALLOCATED = "PyTorch's allocator, as tensors"
    RESERVED = "PyTorch's allocator, as memory that it holds and no tensor uses"
    OUTSIDE = "the driver alone"


class MemoryTerm(StrEnum):
    """What a rank's memory holds; the value is the key in plan.json's ``prediction.memory_breakdown_bytes``."""

    provenance: Provenance
    counted: Counted
    is_lasting: bool  # allocated once and kept: it leaves no gaps; all other tensors come and go in every step

    __hash__ = str.__hash__  # that of Enum is in Python

    def __new__(
        cls,
        value: str,
        provenance: Provenance = Provenance.SPECIFIED,
        counted: Counted = Counted.ALLOCATED,
        is_lasting: bool = False,
    ) -> MemoryTerm:
        """A term with its key and its facts."""
        term = str.__new__(cls, value)
        term._value_ = value
        term.provenance, term.counted, term.is_lasting = provenance, counted, is_lasting
        return term

    PARAMETERS = "parameters", Provenance.SPECIFIED, Counted.ALLOCATED, True
    GRADIENTS = "gradients", Provenance.SPECIFIED, Counted.ALLOCATED, True
    OPTIMIZER = "optimizer", Provenance.SPECIFIED, Counted.ALLOCATED, True  # master copy and moments
    ACTIVATIONS = "activations"  # kept from forward to backward
    WORKING_SET = "working_set"  # of the unit at work, besides what it keeps
    GATHERED_PARAMETERS = "gathered_parameters"  # of the units that ZeRO 3 has in transit
    REDUCTION_BUFFERS = "reduction_buffers"  # gradients of the units in transit
    GATHER_BUFFERS = "gather_buffers"  # into which inputs that are split along the sequence are gathered
    OFFLOAD_BUFFERS = "offload_buffers"  # activations of the blocks that are on their way to the host, or back
    GATHERED_UPDATE = "gathered_update"  # copies through which ZeRO 1 gathers updated parameters
    WAITING_COLLECTIVES = "waiting_collectives", Provenance.FITTED, Counted.RESERVED
    STRANDED_COPIES = "stranded_copies", Provenance.SPECIFIED, Counted.RESERVED
    ALLOCATOR_RESERVE = "allocator_reserve", Provenance.FITTED, Counted.RESERVED
    WORKSPACE = "workspace", Provenance.MEASURED, Counted.ALLOCATED, True  # of libraries, on every rank
    COMMUNICATORS = "communicators", Provenance.MEASURED, Counted.OUTSIDE
    CONTEXT = "context", Provenance.MEASURED, Counted.OUTSIDE


class Phase(StrEnum):
    """When a rank's memory is looked at; ``backward`` is any moment of it."""

    label: str  # as tables show it

    def __new__(cls, value: str, label: str) -> Phase:
        """A phase with its key and its label."""
        phase = str.__new__(cls, value)
        phase._value_ = value
        phase.label = label
        return phase

    INITIALISATION = "initialisation", "start"
    FORWARD = "forward", "forward"
    BACKWARD = "backward", "backward"
    OPTIMIZER = "optimizer", "update"
    CHECKPOINT = "checkpoint", "save"
