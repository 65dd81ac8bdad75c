"""The labels of the cost table's axes: every term of time and every holding of memory, declared once.

Breakdown, plan, ledger and tables iterate over these; a new term or holding is a new line here.
"""

from __future__ import annotations

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
    SEND = "pipeline_communication", "pipeline communication, exposed"
    BUBBLE = "bubble", "pipeline bubble"
    OPTIMIZER = "optimizer", "optimiser step"


class Time(Enum):
    """Seconds that the table stores of one micro-batch through one unit, none of them hidden behind another yet.

    The value is (term, pass); a part that no term counts by itself has a name in place of the term.
    """

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

    KEPT = "from its forward to its backward, for every micro-batch in flight"
    WORKING = "besides, while this unit's backward runs, or its loss forward"
    LOSS = "part of WORKING that the loss needs in forward already"
    BUFFER = "for good, in buffers that all units share"
    COLLECTIVE = "freed, but not reusable before asynchronous collectives are done with it"
    QUEUED = "part of COLLECTIVE that belongs to as many launches as the driver queues"
    STRANDED = "freed, but too small for what is allocated next"
    BOUNDARY = "sent where the pipeline is cut behind this unit, by one rank"
    WAITING = "more, or less, from the first to the second half of a split backward pass"
