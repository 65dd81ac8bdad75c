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

from dataclasses import dataclass

from planner.graph.model_graph import Node, OpClass
from planner.pricing.operator_time import PricingTarget, node_time_s
from planner.pricing.sharded_unit import ShardedUnit, tensor_bytes


@dataclass(frozen=True)
class WeightGradients:
    """Of one unit and one micro-batch on one rank. ``share``: of the backward compute, what weight gradients take."""

    share: float
    repeated_s: float  # kernels that run twice because the backward is split
    gradient_bytes: float  # gradients held until the weight gradients are made
    last_node: int  # id of the last operator that waits; -1: none


def weight_gradients(
    nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, *, scale: float
) -> WeightGradients:
    """The weight gradients of ``nodes``; ``scale`` is micro-batch over traced batch."""
    total = of_weights = repeated = waiting = 0.0
    last = -1
    for node in nodes:
        fraction = sharded.fractions.get(node.id, 1.0)
        seconds = node_time_s(node, target, fraction=fraction, scale=scale, backward=True)
        total += seconds
        if not is_deferred(node, target):
            continue
        if node.weight_gradient_flops > 0:
            of_weights += seconds * node.weight_gradient_flops / node.backward_flops
        else:
            repeated += seconds
        last = node.id
        waiting += tensor_bytes(node) * sharded.local_share(node.id) * (scale if node.batch_dependent else 1.0)
    return WeightGradients(of_weights / total if total else 0.0, repeated, waiting, last)


def is_deferred(node: Node, target: PricingTarget) -> bool:
    """Whether the operator has a weight whose gradient a split backward pass makes in its second half."""
    if node.weight_gradient_flops > 0:
        return True
    is_small = node.op_class is OpClass.MEMORY_BOUND and node.param_bytes_read > 0
    return is_small and target.recipe.split_retains_graph
