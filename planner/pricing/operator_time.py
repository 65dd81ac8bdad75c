"""The time of one graph operator on one rank: its share of the traced work, scaled to a micro-batch."""

from __future__ import annotations

from costmodels.compute import op_time_s
from costmodels.workload import OpClass as PricedClass
from costmodels.workload import OpWorkload
from hardware_profiles.schema import DeviceProfile
from planner.graph.model_graph import Node, OpClass


def node_time_s(
    node: Node, device: DeviceProfile, precision: str, *, fraction: float, scale: float, backward: bool
) -> float:
    """Seconds of ``node`` forward or backward.

    ``fraction``: share of the work on this rank. ``scale``: micro-batch over traced batch (divided
    by the context-parallel degree); operators that do not depend on the batch keep their size.
    Parameters are read whole however small the micro-batch is.
    """
    if node.op_class is OpClass.VIEW:
        return 0.0
    grown = scale if node.batch_dependent else 1.0
    flops = (node.backward_flops if backward else node.flops) * fraction * grown
    if backward:
        # A parameter is read for the input's gradient and its own gradient is written.
        parameter_bytes = 2 * node.param_bytes_read
        moved = node.backward_bytes
    else:
        parameter_bytes = node.param_bytes_read
        moved = node.bytes_read + node.bytes_written
    parameter_bytes = min(parameter_bytes, moved)
    num_bytes = (moved - parameter_bytes) * fraction * grown + parameter_bytes * fraction
    if flops == 0 and num_bytes == 0:
        return 0.0
    is_product = backward and 0 < node.weight_gradient_flops < node.backward_flops
    num_kernels = 2 if is_product else 1  # input gradient and weight gradient
    workload = OpWorkload(PricedClass(node.op_class.value), flops / num_kernels, num_bytes / num_kernels)
    return num_kernels * op_time_s(workload, device, precision)
