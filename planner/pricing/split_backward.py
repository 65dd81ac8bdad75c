"""What a unit's weight gradients take when a schedule makes them apart from the gradients of its inputs.

The gradient of a product's input and that of its weight are one kernel each. A norm or another memory-bound operator
with parameters has one kernel for both, which torch runs a second time for the weight alone. Until then the gradient
of each such operator's output waits, and so does everything that autograd kept: torch's ``stage_backward_input``
retains the graph (torch/distributed/pipelining/_backward.py).
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
    waiting_bytes: float  # gradients held until the weight gradients are made


def weight_gradients(
    nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, *, scale: float
) -> WeightGradients:
    """The weight gradients of ``nodes``; ``scale`` is micro-batch over traced batch."""
    total = of_weights = repeated = waiting = 0.0
    for node in nodes:
        fraction = sharded.fractions.get(node.id, 1.0)
        seconds = node_time_s(node, target, fraction=fraction, scale=scale, backward=True)
        total += seconds
        if node.weight_gradient_flops > 0:
            of_weights += seconds * node.weight_gradient_flops / node.backward_flops
        elif node.param_bytes_read > 0 and node.op_class is OpClass.MEMORY_BOUND:
            repeated += seconds
        else:
            continue
        grown = scale if node.batch_dependent else 1.0
        waiting += tensor_bytes(node) * sharded.local_share(node.id) * grown
    return WeightGradients(of_weights / total if total else 0.0, repeated, waiting)
