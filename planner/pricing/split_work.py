"""What a unit's weight gradients take when a schedule makes them apart from the gradients of its inputs.

The gradient of a product's input and that of its weight are one kernel each. Between the two, the gradient of the
product's output waits. What else waits depends on the framework:

- torch's ``stage_backward_input`` retains the graph (torch/distributed/pipelining/_backward.py), and with it all that
  autograd kept except behind the stage's last weight: the loss. Norms, too, make their weights' gradients later, in a
  second run of a kernel that makes both.
- Megatron's zero-bubble pipelines store the input and the output gradient of each linear layer
  (``WeightGradStore`` of Qi et al.'s code); everything else is as without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from costmodels.vocabulary.workload import OpClass
from planner.axes.framework import Framework
from planner.axes.lowered import Kernel
from planner.layout.columns import Array


class WeightGradients(NamedTuple):
    """At each size of the micro-batch. ``share``: of the backward compute, the part of weight gradients."""

    share: Array
    repeated_s: Array  # kernels that run twice because the backward is split


def weight_gradients(kernels: Sequence[Kernel], backward_s: Array, framework: Framework) -> WeightGradients:
    """The weight gradients of ``kernels``, of which each takes ``backward_s``, [sizes, kernels]."""
    of_weights = [k.weight_gradient_flops / k.backward.flops if k.weight_gradient_flops > 0 else 0.0 for k in kernels]
    twice = [is_deferred(k, framework) and k.weight_gradient_flops <= 0 for k in kernels]
    total = backward_s.sum(axis=1)
    share = np.divide(backward_s @ np.array(of_weights), total, out=np.zeros_like(total), where=total > 0)
    return WeightGradients(share, backward_s @ np.array(twice, dtype=np.float64))


def is_deferred(kernel: Kernel, framework: Framework) -> bool:
    """Whether the operator has a weight whose gradient a split backward pass makes in its second half."""
    if kernel.weight_gradient_flops > 0:
        return True
    is_small = kernel.op_class is OpClass.MEMORY_BOUND and not kernel.is_view and kernel.forward.weight_bytes > 0
    return is_small and framework.recipe.split_retains_graph
