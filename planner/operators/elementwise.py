"""Operators that work on each element for itself: each dim that the result has may be split."""

from __future__ import annotations

from dataclasses import replace

from planner.operators import placement_rules, sample_rules, saved_rules
from planner.operators.record import ONE_PASS, PLAIN, REPEATED, Operator, Trait, named, traits
from planner.operators.traffic_rules import passes_gradient_on

_SUM = replace(ONE_PASS, backward=passes_gradient_on)

ELEMENTWISE = (
    Operator(
        names=named("add sub"),
        work=_SUM,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.LINEAR_IN_ALL),
    ),
    Operator(
        names=named("rsub neg alias eq ne lt le gt ge logical_and logical_or logical_not"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("copy"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.OVERWRITES),
    ),
    Operator(
        names=named("detach"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.CUTS_GRADIENT),
    ),
    Operator(
        names=named("clone contiguous"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.KEEPS_ORDER),
    ),
    Operator(
        names=named("to _to_copy type_as float"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=placement_rules.elementwise,
        samples=sample_rules.first_operand,
        kept_as=REPEATED,
        traits=traits(Trait.CAST, Trait.LINEAR),
    ),
    Operator(
        names=named("gelu silu leaky_relu elu softplus hardswish mish hardtanh erf log sin cos abs square clamp"),
        work=ONE_PASS,
        saved=saved_rules.first_operand,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("relu sigmoid tanh exp sqrt rsqrt reciprocal"),
        work=ONE_PASS,
        saved=saved_rules.result,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("mul"),
        work=ONE_PASS,
        saved=saved_rules.factors_of_product,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.LINEAR_IN_EACH),
    ),
    Operator(
        names=named("div"),
        work=ONE_PASS,
        saved=saved_rules.divisor,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.LINEAR),
    ),
    Operator(
        names=named("pow"),
        work=ONE_PASS,
        saved=saved_rules.base_and_result,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("where"),
        work=ONE_PASS,
        saved=saved_rules.condition,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("masked_fill"),
        work=ONE_PASS,
        saved=saved_rules.indices,
        placements=placement_rules.elementwise,
        samples=sample_rules.first_operand,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("dropout"),
        work=ONE_PASS,
        saved=saved_rules.dropout_mask,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.DROPOUT),
    ),
    Operator(
        names=named("native_dropout"),
        work=ONE_PASS,
        saved=saved_rules.dropout_mask,
        placements=placement_rules.elementwise,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
)
"""Held against DTensor; of the next ones the placements are not."""

ELEMENTWISE_REPLICATED = (
    Operator(
        names=named(
            "floor ceil round sign floor_divide bitwise_and bitwise_or bitwise_not __and__ __or__ isin isinf "
            "isnan bernoulli bucketize searchsorted lift_fresh lift_fresh_copy"
        ),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("fill"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=sample_rules.first_operand,
        kept_as=REPEATED,
        traits=traits(Trait.OVERWRITES),
    ),
    Operator(
        names=named("detach_"),
        work=ONE_PASS,
        saved=saved_rules.nothing,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.CUTS_GRADIENT),
    ),
    Operator(
        names=named(
            "relu6 glu log2 log10 log1p expm1 clamp_min clamp_max selu celu log_sigmoid hardsigmoid softsign atan asin "
            "acos sinh cosh"
        ),
        work=ONE_PASS,
        saved=saved_rules.first_operand,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("tan"),
        work=ONE_PASS,
        saved=saved_rules.result,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("true_divide divide"),
        work=ONE_PASS,
        saved=saved_rules.divisor,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("maximum minimum prelu lerp atan2 polar complex logaddexp"),
        work=ONE_PASS,
        saved=saved_rules.all_operands,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("addcmul addcdiv"),
        work=ONE_PASS,
        saved=saved_rules.factors_besides_summand,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("index_fill"),
        work=ONE_PASS,
        saved=saved_rules.indices,
        placements=None,
        samples=sample_rules.first_operand,
        kept_as=REPEATED,
        traits=PLAIN,
    ),
    Operator(
        names=named("feature_dropout"),
        work=ONE_PASS,
        saved=saved_rules.dropout_mask,
        placements=None,
        samples=sample_rules.elementwise,
        kept_as=REPEATED,
        traits=traits(Trait.DROPOUT),
    ),
)
