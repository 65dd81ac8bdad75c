"""The time of one graph operator on one rank: its share of the traced work, scaled to a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodels.compute import op_time_s
from costmodels.recipe import AttentionKernel, Recipe, attention_kernel, load_recipe
from costmodels.workload import OpClass as PricedClass
from costmodels.workload import OpWorkload
from hardware_profiles.schema import ClusterSpec
from planner.graph.model_graph import ModelGraph, Node, OpClass
from planner.graph.node_operators import is_norm, num_scores


@dataclass(frozen=True)
class PricingTarget:
    """What is priced, on what, and how the framework runs it."""

    graph: ModelGraph
    cluster: ClusterSpec
    precision: str
    recipe: Recipe = field(default_factory=load_recipe)
    attention: AttentionKernel | None = None  # None: the recipe's flash kernel
    # A token goes to each node of its experts once, and over NVLink to all of them there; otherwise once an expert.
    dispatches_once_a_node: bool = False

    @property
    def attention_kernel(self) -> AttentionKernel:
        """How attention runs."""
        return self.attention or attention_kernel(self.recipe.flash_kernel)


def node_time_s(node: Node, target: PricingTarget, *, fraction: float, scale: float, backward: bool) -> float:
    """Seconds of ``node`` forward or backward.

    ``fraction``: share of the work on this rank. ``scale``: micro-batch over traced batch (divided
    by the context-parallel degree); operators that do not depend on the batch keep their size.
    Parameters are read whole however small the micro-batch is.
    """
    grown = scale if node.batch_dependent else 1.0
    flops = (node.backward_flops if backward else node.flops) * fraction * grown
    num_bytes = _bytes_moved(node, fraction=fraction, grown=grown, backward=backward)
    if flops == 0 and num_bytes == 0:
        return 0.0
    device, precision, recipe = target.cluster.profile.device, target.precision, target.recipe
    if node.op_class in (OpClass.MEMORY_BOUND, OpClass.VIEW):
        moved = num_bytes * recipe.memory_traffic.value * (recipe.norm_traffic.value if is_norm(node) else 1.0)
        return op_time_s(OpWorkload(PricedClass.MEMORY_BOUND, 0.0, moved), device, precision)
    if node.op_class is OpClass.ATTENTION and not target.attention_kernel.is_fused:
        scores = num_scores(node, target.graph) * fraction * grown
        return _plain_attention_s(scores, flops, num_bytes, target, backward=backward)
    rate = target.attention_kernel.rate.value if node.op_class is OpClass.ATTENTION else recipe.product_rate.value
    is_product = backward and 0 < node.weight_gradient_flops < node.backward_flops
    num_kernels = 2 if is_product else 1  # input gradient and weight gradient
    workload = OpWorkload(PricedClass(node.op_class.value), flops / rate / num_kernels, num_bytes / num_kernels)
    return num_kernels * op_time_s(workload, device, precision)


def kernels_issued(node: Node, target: PricingTarget, *, backward: bool) -> int:
    """Kernels that the host issues for ``node``."""
    if node.op_class is OpClass.ATTENTION and not target.attention_kernel.is_fused:
        return target.attention_kernel.num_kernels * (2 if backward else 1)
    return node.num_backward_kernels if backward else node.num_kernels


def _bytes_moved(node: Node, *, fraction: float, grown: float, backward: bool) -> float:
    if backward:
        # A parameter is read for the input's gradient and its own gradient is written.
        parameter_bytes = 2 * node.param_bytes_read
        moved = node.backward_bytes
    else:
        parameter_bytes = node.param_bytes_read
        moved = node.bytes_read + node.bytes_written
    parameter_bytes = min(parameter_bytes, moved)
    return (moved - parameter_bytes) * fraction * grown + parameter_bytes * fraction


def _plain_attention_s(
    scores: float, flops: float, num_bytes: float, target: PricingTarget, *, backward: bool
) -> float:
    """Two batched products forward, four backward, and the kernels that pass over the scores between them."""
    device, kernel = target.cluster.profile.device, target.attention_kernel
    products, passes = (4, kernel.num_kernels * 2 - 4) if backward else (2, kernel.num_kernels - 2)
    per_score = kernel.score_bytes_backward.value if backward else kernel.score_bytes_forward.value
    # Each product writes or reads 16-bit scores once; the rest is moved by the passes between.
    by_products = OpWorkload(
        PricedClass.GEMM, flops / target.recipe.product_rate.value, 2 * products * scores + num_bytes, products
    )
    between = OpWorkload(PricedClass.MEMORY_BOUND, 0.0, max(0.0, per_score - 2 * products) * scores, max(1, passes))
    return op_time_s(by_products, device, target.precision) + op_time_s(between, device, target.precision)
