"""Operators made of products: matrix products, convolutions, attention.

``kept_as`` names what torch runs below autograd for them, on CUDA and on the CPU: that is what a selective
checkpoint sees (``torch/utils/checkpoint.py``). Attention without a fused kernel falls apart into batched products.
"""

from __future__ import annotations

from dataclasses import replace

from hardware_profiles.vocabulary import OpClass
from planner.operators import placement_rules, product_rules, sample_rules, saved_rules
from planner.operators.record import ONE_PASS, PLAIN, Operator, Trait, named, traits
from planner.operators.traffic_rules import (
    features_backward,
    kernels_of_features,
    kernels_of_steps,
    one_pass_with_weights,
    one_product_an_operand,
    steps_backward,
)

_PRODUCT = replace(ONE_PASS, op_class=OpClass.GEMM, products=product_rules.matmul, backward=one_product_an_operand)
_LINEAR = replace(_PRODUCT, products=product_rules.linear)
_EINSUM = replace(_PRODUCT, products=product_rules.einsum)
_GROUPED = replace(_PRODUCT, op_class=OpClass.GROUPED_GEMM, products=product_rules.grouped_matmul)
_CONVOLUTION = replace(_PRODUCT, op_class=OpClass.CONVOLUTION, products=product_rules.convolution)
_ATTENTION = replace(
    ONE_PASS, op_class=OpClass.ATTENTION, products=product_rules.attention, backward=one_pass_with_weights
)
_CAUSAL_ATTENTION = replace(_ATTENTION, products=product_rules.causal_attention)

_RECURRENCE = replace(_PRODUCT, products=product_rules.recurrence, kernels=kernels_of_steps, backward=steps_backward)

_BILINEAR = replace(_PRODUCT, products=product_rules.bilinear, kernels=kernels_of_features, backward=features_backward)

_EIGHT_BIT = traits(Trait.EIGHT_BIT)
_MATRIX_PRODUCTS = named("aten.mm aten.addmm aten.bmm aten.baddbmm aten.mv aten.addmv aten.dot")
_CONVOLUTIONS = named("aten.convolution")

PRODUCTS = (
    Operator(
        names=named("linear"),
        work=_LINEAR,
        saved=saved_rules.factors_of_product,
        placements=placement_rules.linear,
        samples=sample_rules.linear,
        kept_as=(*_MATRIX_PRODUCTS, "aten.linear"),
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("matmul mm bmm"),
        work=_PRODUCT,
        saved=saved_rules.factors_of_batches,
        placements=placement_rules.mm,
        samples=sample_rules.product,
        kept_as=_MATRIX_PRODUCTS,
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("mv dot"),
        work=_PRODUCT,
        saved=saved_rules.factors_of_product,
        placements=None,
        samples=None,
        kept_as=_MATRIX_PRODUCTS,
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("addmm"),
        work=_PRODUCT,
        saved=saved_rules.factors_besides_summand,
        placements=placement_rules.addmm,
        samples=sample_rules.product,
        kept_as=_MATRIX_PRODUCTS,
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("baddbmm"),
        work=_PRODUCT,
        saved=saved_rules.factors_besides_summand,
        placements=None,
        samples=sample_rules.product,
        kept_as=_MATRIX_PRODUCTS,
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("linalg_solve_triangular"),
        work=replace(_PRODUCT, products=product_rules.triangular_solution),
        saved=saved_rules.first_operand_and_result,
        placements=None,
        samples=sample_rules.product,
        kept_as=named("aten.linalg_solve_triangular"),
        traits=PLAIN,
    ),
    Operator(
        names=named("einsum"),
        work=_EINSUM,
        saved=saved_rules.factors_of_product,
        placements=None,
        samples=sample_rules.einsum,
        kept_as=_MATRIX_PRODUCTS,
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("bilinear"),
        work=_BILINEAR,
        saved=saved_rules.factors_of_product,
        placements=None,
        samples=None,
        kept_as=named("aten._trilinear"),
        traits=PLAIN,
    ),
    Operator(
        names=named("_grouped_mm grouped_mm grouped_mm_fallback"),
        work=_GROUPED,
        saved=saved_rules.factors_of_product,
        placements=placement_rules.grouped_mm,
        samples=None,
        kept_as=named("aten._grouped_mm transformers.grouped_mm_fallback"),
        traits=_EIGHT_BIT,
    ),
    Operator(
        names=named("conv1d conv2d conv3d convolution"),
        work=_CONVOLUTION,
        saved=saved_rules.factors_of_product,
        placements=None,
        samples=sample_rules.image,
        kept_as=_CONVOLUTIONS,
        traits=traits(Trait.MIXES_POSITIONS),
    ),
    Operator(
        names=named("conv_transpose1d conv_transpose2d"),
        work=_CONVOLUTION,
        saved=saved_rules.factors_of_product,
        placements=None,
        samples=sample_rules.image,
        kept_as=_CONVOLUTIONS,
        traits=PLAIN,
    ),
    Operator(
        names=named("lstm gru rnn_tanh rnn_relu"),
        work=_RECURRENCE,
        saved=saved_rules.steps,
        placements=None,
        samples=sample_rules.recurrence,
        kept_as=named("aten._cudnn_rnn aten.mkldnn_rnn_layer"),
        traits=traits(Trait.MIXES_POSITIONS, Trait.STEPS),
    ),
    Operator(
        names=named("scaled_dot_product_attention"),
        work=_ATTENTION,
        saved=saved_rules.attention,
        placements=placement_rules.attention,
        samples=sample_rules.attention,
        kept_as=named(
            "aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu "
            "aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention "
            "aten._scaled_dot_product_fused_attention_overrideable"
        ),
        traits=PLAIN,
    ),
    Operator(  # planner.models.causal_attention
        names=named("causal_attention"),
        work=_CAUSAL_ATTENTION,
        saved=saved_rules.attention,
        placements=placement_rules.attention,
        samples=sample_rules.attention,
        kept_as=named("planner.causal_attention"),
        traits=traits(Trait.CAUSAL),
    ),
)
