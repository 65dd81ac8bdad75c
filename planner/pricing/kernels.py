"""Times of a unit's kernels on one rank, for many sizes of its part of a micro-batch at once.

A kernel's time comes from the roofline of its class, its FLOPs and its bytes; the framework's recipe says how far its
kernels differ. Parameters are read whole, however small the micro-batch is. Where tensor cores do not take heads of
some width, attention's batched products run in fp32 on the ordinary cores; of matrix products with such a side a part
of the rate is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.compute import EIGHT_BIT_CLASSES, UNALIGNED_DTYPES, UNALIGNED_RATE
from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.terms import Pass
from costmodels.vocabulary.workload import OpClass
from planner.axes.framework import Framework
from planner.axes.lowered import Kernel, Work
from planner.layout.columns import Array
from planner.pricing.machine import Machine

SIXTEEN_BITS = "bf16"  # of products that stay out of 8 bits
WORK_OF_CAUSAL = 0.5  # profiles rate attention by its full product as causal kernels reach it, which do half of it


class KernelTimes(NamedTuple):
    """Seconds, [sizes, kernels]."""

    forward_s: Array
    backward_s: Array


def kernel_times(kernels: Sequence[Kernel], sizes: Array, machine: Machine, framework: Framework) -> KernelTimes:
    """Times of ``kernels`` for ``sizes`` sequences each."""
    return KernelTimes(*(_times_s(kernels, sizes, machine, framework, run) for run in Pass))


def kernels_issued(kernel: Kernel, framework: Framework, run: Pass) -> int:
    """Kernels that the host issues for an operator."""
    if is_plain_attention(kernel, framework):
        return framework.attention.num_kernels * (1 if run is Pass.FORWARD else 2)
    return work_of(kernel, run).launches


def is_plain_attention(kernel: Kernel, framework: Framework) -> bool:
    """Whether the operator is attention with its scores in memory."""
    return kernel.op_class is OpClass.ATTENTION and not framework.attention.is_fused


def work_of(kernel: Kernel, run: Pass) -> Work:
    """What the kernel does in one pass."""
    return kernel.forward if run is Pass.FORWARD else kernel.backward


class _Loads(NamedTuple):
    """FLOPs and bytes of some kernels, [sizes, kernels]."""

    flops: Array
    num_bytes: Array


def _times_s(kernels: Sequence[Kernel], sizes: Array, machine: Machine, framework: Framework, run: Pass) -> Array:
    works = [work_of(kernel, run) for kernel in kernels]
    numbers = [
        (work.flops, work.moved_bytes, work.weight_bytes, kernel.follows_batch)
        for work, kernel in zip(works, kernels, strict=True)
    ]
    flops, moved, weights, follows = np.array(numbers, dtype=np.float64).reshape(-1, 4).T
    grown = np.where(follows, sizes[:, None], 1.0)
    loads = _Loads(flops * grown, moved * grown + weights)
    found = np.zeros_like(grown)
    for op_class in dict.fromkeys(kernel.op_class for kernel in kernels):
        places = [place for place, kernel in enumerate(kernels) if kernel.op_class is op_class]
        own = [kernels[place] for place in places]
        own_loads = _Loads(loads.flops[:, places], loads.num_bytes[:, places])
        if op_class is OpClass.MEMORY_BOUND:
            found[:, places] = _memory_bound_s(own, own_loads, machine, framework)
        elif op_class is OpClass.ATTENTION and not framework.attention.is_fused:
            found[:, places] = _plain_attention_s(own, own_loads, grown[:, places], (machine, framework), run)
        else:
            if op_class is OpClass.ATTENTION:
                rows = np.array([kernel.query_rows for kernel in own]) * grown[:, places]
                done = np.array([1.0 if kernel.is_causal else 1 / WORK_OF_CAUSAL for kernel in own])
                own_loads = own_loads._replace(flops=own_loads.flops * done * machine.idle_factor(rows))
            found[:, places] = _product_s(own, own_loads, machine, framework, run)
    return np.where((loads.flops == 0) & (loads.num_bytes == 0), 0.0, found)


def _memory_bound_s(kernels: Sequence[Kernel], loads: _Loads, machine: Machine, framework: Framework) -> Array:
    recipe = framework.recipe
    passes = np.array([recipe.norm_traffic.value if kernel.norm_elements else 1.0 for kernel in kernels])
    moved = loads.num_bytes * recipe.memory_traffic.value * passes
    return machine.roofline(OpClass.MEMORY_BOUND, framework.precision).times_s(np.zeros_like(moved), moved)


def _product_s(kernels: Sequence[Kernel], loads: _Loads, machine: Machine, framework: Framework, run: Pass) -> Array:
    op_class = kernels[0].op_class
    rate = framework.attention.rate if op_class is OpClass.ATTENTION else framework.recipe.product_rate
    # Backward, the input's gradient and the weight's are a kernel each.
    num_kernels = np.array(
        [
            2 if run is Pass.BACKWARD and 0 < kernel.weight_gradient_flops < kernel.backward.flops else 1
            for kernel in kernels
        ]
    )
    precision = framework.precision
    flops = loads.flops / (rate.value * _unaligned_rates(kernels, op_class, machine, framework))
    found = machine.roofline(op_class, precision).times_s(flops, loads.num_bytes, num_kernels)
    is_wide = np.array([not kernel.is_eight_bit for kernel in kernels])
    if precision == Precision.FP8 and op_class in EIGHT_BIT_CLASSES and is_wide.any():
        in_sixteen = machine.roofline(op_class, SIXTEEN_BITS).times_s(flops, loads.num_bytes, num_kernels)
        return np.where(is_wide, in_sixteen, found)
    return found


def _unaligned_rates(
    kernels: Sequence[Kernel], op_class: OpClass, machine: Machine, framework: Framework
) -> float | Array:
    """Of the rate of a product, what is left where tensor cores do not take its sides and nobody pads them."""
    is_priced = framework.precision in UNALIGNED_DTYPES and machine.has_tensor_cores
    if op_class not in EIGHT_BIT_CLASSES or not is_priced or framework.recipe.pads_products:
        return 1.0
    return np.array([1.0 if kernel.is_aligned else UNALIGNED_RATE for kernel in kernels])


def _plain_attention_s(
    kernels: Sequence[Kernel], loads: _Loads, sizes: Array, prices: tuple[Machine, Framework], run: Pass
) -> Array:
    """Two batched products forward, four backward, and the kernels that pass over the scores between them."""
    machine, framework = prices
    scores = np.array([kernel.scores for kernel in kernels]) * sizes
    kernel = framework.attention
    if run is Pass.FORWARD:
        products, passes, per_score = 2, kernel.num_kernels - 2, kernel.score_bytes_forward.value
    else:
        products, passes, per_score = 4, kernel.num_kernels * 2 - 4, kernel.score_bytes_backward.value
    between = machine.roofline(OpClass.MEMORY_BOUND, framework.precision)
    # Each product writes or reads 16-bit scores once; the rest is moved by the passes between.
    flops, in_products = loads.flops / framework.recipe.product_rate.value, 2 * products * scores + loads.num_bytes
    in_products_s = machine.roofline(OpClass.GEMM, framework.precision).times_s(flops, in_products, products)
    aligned = np.array([each.is_aligned for each in kernels])
    if not aligned.all() and machine.has_arithmetic("fp32"):
        elsewhere_s = machine.roofline(OpClass.GEMM, "fp32").times_s(flops, in_products, products)
        in_products_s = np.where(aligned, in_products_s, elsewhere_s)
    moved = max(0.0, per_score - 2 * products) * scores
    return in_products_s + between.times_s(np.zeros_like(moved), moved, max(1, passes))
