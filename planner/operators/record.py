"""The record of an operator: all that planning knows of it, in one place.

Whoever adds an operator answers every question of ``Operator``, since no field has a default. The constants below are
answers that many operators share. What has no record at all is ``UNKNOWN``: run once on tensors without values to count
its products and what it keeps, else priced by its bytes with all of it kept; replicated; named in a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hardware_profiles.vocabulary import OpClass
from planner.operators.placement_rules import PlacementRule
from planner.operators.product_rules import ProductRule, no_product
from planner.operators.sample_rules import SampleRule
from planner.operators.saved_rules import SavedRule
from planner.operators.traffic_rules import (
    BackwardRule,
    KernelRule,
    ReadRule,
    ViewBackwardRule,
    all_operands,
    one_kernel,
    one_pass,
    view_of_gradient,
)


class Trait(StrEnum):
    """What an operator is to those who ask about one thing alone."""

    # What it does to values
    LOSS = "loss"  # turns logits into a loss: a recipe's facts about logits are about its copies of them
    NORM = "norm"  # normalises rows: a recipe's facts about norms are about it
    CAST = "cast"  # changes a tensor's dtype, nothing else
    DROPOUT = "dropout"  # returns its input as it is where its probability is 0 or training is off
    # What it does to places
    LOOKS_UP = "looks_up"  # takes rows of its first operand that its second operand numbers
    MIXES_POSITIONS = "mixes_positions"  # looks along the sequence, which can then not be split over ranks
    CAUSAL = "causal"  # attention of which no query looks at what follows it, whatever its arguments
    STEPS = "steps"  # goes along the sequence position by position: its result has the shape of one step, repeated
    MOVES_ROWS = "moves_rows"  # gives rows another order or number: behind it they are no expert's any more
    KEEPS_ORDER = "keeps_order"  # returns its elements in their order: copies nothing where they already lie so
    PERMUTES_DIMS = "permutes_dims"
    FOLLOWS_AS_VIEW = "follows_as_view"  # a view whose operands DTensor redistributes; of other views it refuses
    # What it makes of partial sums
    LINEAR = "linear"  # of one as its first operand, another one
    LINEAR_IN_EACH = "linear_in_each"  # of one as any of its operands, the others being whole
    LINEAR_IN_ALL = "linear_in_all"  # of partial sums alone
    # What its results say of values, where a trace has none
    SHAPE_ALONE = "shape_alone"  # of its operands it takes shape, dtype and device: no gradient, nothing of the batch
    CUTS_GRADIENT = "cuts_gradient"
    VALUES_UNSET = "values_unset"  # memory as it was found
    OVERWRITES = "overwrites"  # where it writes to an operand, it keeps nothing of it
    DRAWS_BY_SHAPE = "draws_by_shape"  # random numbers, of which shapes alone say how many
    CHOOSES = "chooses"  # its results say where values were found
    GIVES_NUMBER = "gives_number"  # hands a value to Python
    GIVES_CONDITION = "gives_condition"  # hands Python what it branches on
    SIZE_BY_VALUES = "size_by_values"  # DTensor knows no such result: every rank computes it whole
    # How its products run
    EIGHT_BIT = "eight_bit"  # in 8 bits where the precision is fp8 (Transformer Engine's linear and grouped layers)


@dataclass(frozen=True, kw_only=True)
class WorkRules:
    """How the work of one call follows from its tensors."""

    op_class: OpClass  # where it has products
    products: ProductRule
    reads: ReadRule
    kernels: KernelRule  # forward
    backward: BackwardRule
    view_backward: ViewBackwardRule  # where the call moves nothing forward


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator, or several that are alike in everything."""

    names: tuple[str, ...]  # of the operator without namespace, overload, and the ``_`` of writing in place
    work: WorkRules
    saved: SavedRule | None  # what autograd keeps; None: not known
    placements: PlacementRule | None  # on the tp axis besides replication; None: not known, kept replicated
    samples: SampleRule | None  # how samples of a batch go through it; None: not known, nothing is said of it
    kept_as: tuple[str, ...]  # torch operators as which its products run: selective recomputation keeps their results
    traits: frozenset[Trait]

    def has(self, trait: Trait) -> bool:
        """Whether it is that."""
        return trait in self.traits


def named(names: str) -> tuple[str, ...]:
    """Names in a text, apart by spaces."""
    return tuple(names.split())


def traits(*of_operator: Trait) -> frozenset[Trait]:
    """Exactly these."""
    return frozenset(of_operator)


ONE_PASS = WorkRules(
    op_class=OpClass.MEMORY_BOUND,
    products=no_product,
    reads=all_operands,
    kernels=one_kernel,
    backward=one_pass,
    view_backward=view_of_gradient,
)
"""Bound by memory: one kernel forward, one backward."""

REPEATED: tuple[str, ...] = ()
"""``kept_as`` of what selective recomputation runs again."""

PLAIN = traits()
"""None of the traits."""

UNKNOWN = Operator(
    names=(),
    work=ONE_PASS,
    saved=None,
    placements=None,
    samples=None,
    kept_as=REPEATED,  # what the executor cannot name it cannot keep
    traits=traits(Trait.EIGHT_BIT),  # products that a run finds in it are timed as all others are
)
"""Every answer about an operator that has no record."""
