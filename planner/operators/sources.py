"""Operators that no gradient comes through: constants, what takes a shape alone, and what Python asks."""

from __future__ import annotations

from planner.operators import saved_rules
from planner.operators.record import ONE_PASS, PLAIN, REPEATED, Operator, Trait, named, traits

CONSTANTS = (
    Operator(
        names=named("zeros ones full arange linspace eye scalar_tensor tril_indices triu_indices one_hot"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("rand randint randn"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.DRAWS_BY_SHAPE),
    ),
    Operator(
        names=named("empty empty_strided empty_permuted"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.VALUES_UNSET),
    ),
    Operator(
        names=named("zeros_like ones_like full_like new_zeros new_ones new_full"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.SHAPE_ALONE, Trait.CUTS_GRADIENT),
    ),
    Operator(
        names=named("rand_like randn_like"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.SHAPE_ALONE, Trait.CUTS_GRADIENT, Trait.DRAWS_BY_SHAPE),
    ),
    Operator(
        names=named("empty_like new_empty"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.SHAPE_ALONE, Trait.CUTS_GRADIENT, Trait.VALUES_UNSET),
    ),
)

QUESTIONS = (
    Operator(
        names=named("item _local_scalar_dense"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.GIVES_NUMBER),
    ),
    Operator(
        names=named("is_nonzero equal"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=None,
        kept_as=REPEATED,
        traits=traits(Trait.GIVES_CONDITION),
    ),
)
