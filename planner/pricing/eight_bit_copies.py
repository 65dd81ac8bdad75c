"""What it takes to make the 8-bit copies that products in 8 bits multiply.

Forward, each tensor that such products take is copied once, for all of them; backward, the gradient of each one's
output. A recipe says how many bytes move per element. One kernel that runs a whole gated expert makes the copies
between its products by itself.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for which operands have 8 bits;
transformer_engine/pytorch/module/linear.py and grouped_linear.py, which quantise inputs and outputs' gradients.
"""

from __future__ import annotations

import numpy as np

from costmodels.compute import EIGHT_BIT_CLASSES
from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.workload import OpClass
from planner.axes.framework import Framework
from planner.axes.lowered import RankUnit
from planner.layout.columns import Array
from planner.pricing.kernels import KernelTimes
from planner.pricing.machine import Machine


def with_copies(
    times: KernelTimes, unit: RankUnit, sizes: Array, machine: Machine, framework: Framework
) -> KernelTimes:
    """``times`` of the unit's kernels, with those of the copies among the times of the products that need them."""
    each = framework.recipe.eight_bit_copy_bytes
    if each is None or framework.precision != Precision.FP8:
        return times
    inside = _inside_experts(unit) if framework.recipe.fuses_experts else set[int]()
    forward, backward = np.zeros(len(unit.kernels)), np.zeros(len(unit.kernels))
    copied: set[int] = set()
    for place, kernel in enumerate(unit.kernels):
        if not kernel.is_eight_bit or kernel.op_class not in EIGHT_BIT_CLASSES:
            continue
        taken = [i for i in kernel.inputs if _is_copied(unit, i) and i not in inside | copied]
        forward[place] = sum(_elements(unit, i) for i in taken)
        backward[place] = 0.0 if kernel.id in inside else _elements(unit, kernel.id)
        copied.update(taken)
    line = machine.roofline(OpClass.MEMORY_BOUND, framework.precision)

    def seconds(elements: Array) -> Array:
        moved = each.value * elements * sizes[:, None]
        return np.where(moved > 0, line.times_s(np.zeros_like(moved), moved), 0.0)

    return KernelTimes(times.forward_s + seconds(forward), times.backward_s + seconds(backward))


def _inside_experts(unit: RankUnit) -> set[int]:
    """Tensors between the products of experts: what one of them takes that is made of another's outputs, and these."""
    if unit.experts is None:
        return set()
    of_experts = (kernel for kernel in unit.kernels if kernel.id in unit.experts.kernels)
    products = [kernel for kernel in of_experts if kernel.op_class in EIGHT_BIT_CLASSES]
    outputs = {kernel.id for kernel in products}
    made_of = {kernel.id: outputs.intersection(kernel.inputs) for kernel in unit.kernels if kernel.id not in outputs}
    taken = {i for kernel in products for i in kernel.inputs if made_of.get(i)}
    return taken.union(*(made_of[i] for i in taken))


def _is_copied(unit: RankUnit, tensor: int) -> bool:
    return tensor in unit.tensors and unit.tensors[tensor].is_activation


def _elements(unit: RankUnit, tensor: int) -> float:
    return unit.tensors[tensor].bytes / unit.tensors[tensor].item_bytes
