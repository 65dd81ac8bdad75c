"""Expert parallelism of one unit: what is left of an expert layer on one of ``ep`` ranks, and what travels between.

    experts of a rank  = experts / ep, so its grouped products read 1 / ep of the weights
    rows of a rank     = tokens · top_k · imbalance: ep ranks send each other as much as one rank's tokens make
    all-to-all         = rows · width · bytes: dispatch and combine forward, and the gradients of both backward

A dispatcher that sends a token once to each node of its k experts, of n nodes, and lets that node pass it on, moves

    over NVLink        = rows · width · bytes, between the ranks of one node
    between nodes      = (n - 1) · (1 - (1 - 1/n)^k) tokens · width · bytes of each rank, rather than (n - 1) / n · rows

at the same time (as if a token could choose an expert twice, which makes the second less by 0.1 % for 8 of 128).
``imbalance`` is the busiest rank's rows over the mean, the recipe's: all ranks wait for that one.

Sources: Lepikhin et al., "GShard" (2021), for the two exchanges; Rajbhandari et al., "DeepSpeed-MoE" (2022), for
experts whose gradients are reduced over dp / ep ranks; DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section
3.2.2, for dispatch once a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodels.communication import collective_time_s, num_domains_spanned
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from planner.graph.experts import expert_work
from planner.graph.model_graph import Node, Unit
from planner.pricing.operator_time import PricingTarget
from planner.pricing.sharded_unit import ShardedUnit, tensor_bytes


@dataclass(frozen=True)
class ExpertExchange:
    """The all-to-alls of one unit and one micro-batch on one rank; all zero without expert parallelism."""

    dispatch_s: float = 0.0
    combine_s: float = 0.0
    buffer_bytes: float = 0.0  # the larger of the tensors that are sent, which lies beside the one received

    @property
    def both_s(self) -> float:
        """One way of a micro-batch through the unit: forward, or backward."""
        return self.dispatch_s + self.combine_s


def on_one_rank(target: PricingTarget, ep: int) -> PricingTarget:
    """``target`` with the expert layers of its graph as one of ``ep`` ranks computes them."""
    if ep == 1:
        return target
    graph = target.graph
    rows = 1.0 if target.recipe.expert_imbalance is None else target.recipe.expert_imbalance.value
    nodes = list(graph.nodes)
    for unit in graph.units:
        work = expert_work(graph, unit)
        if work is not None:
            for i in work.inside:
                nodes[i] = _shared(nodes[i], ep, rows)
            for i in work.dispatched:
                nodes[i] = nodes[i].model_copy(update={"shape": _grown(nodes[i].shape, rows)})
    return replace(target, graph=graph.model_copy(update={"nodes": tuple(nodes)}))


def exchange(target: PricingTarget, unit: Unit, sharded: ShardedUnit, scale: float, ep: int) -> ExpertExchange:
    """What ``unit`` of ``on_one_rank``'s graph sends; ``scale`` is micro-batch over traced batch."""
    work = expert_work(target.graph, unit) if ep > 1 else None
    if work is None:
        return ExpertExchange()

    num_rows = target.graph.nodes[work.dispatched[0]].shape[0]
    num_chosen = num_rows / (target.graph.batch_size * target.graph.seq_len)

    def num_bytes(ids: tuple[int, ...]) -> float:
        return sum(tensor_bytes(target.graph.nodes[i]) * sharded.local_share(i) * scale for i in ids)

    # ep is the inner part of dp_shard and cp, which lie around tp.
    group = GroupPlacement(ep, sharded.degree)

    def seconds(size: float) -> float:
        return _all_to_all_s(size, group, target, num_chosen)

    there, back = num_bytes(work.dispatched), num_bytes(work.combined)
    return ExpertExchange(seconds(there), seconds(back), max(there, back))


def _all_to_all_s(num_bytes: float, group: GroupPlacement, target: PricingTarget, num_chosen: float) -> float:
    """One way of the rows of tokens that chose so many experts each."""

    def seconds(size: float, ranks: GroupPlacement) -> float:
        return collective_time_s(Collective(CollectiveKind.ALL_TO_ALL, size, ranks), target.cluster)

    num_nodes = num_domains_spanned(group, target.cluster.devices_per_node)
    if not target.dispatches_once_a_node or num_nodes == 1:
        return seconds(num_bytes, group)
    # Of an all-to-all (n - 1) / n leaves the node.
    between = num_bytes / num_chosen * num_nodes * (1 - (1 - 1 / num_nodes) ** num_chosen)
    inside = GroupPlacement(max(1, group.num_ranks // num_nodes), group.stride)
    return max(seconds(num_bytes, inside), seconds(between, group))


def _shared(node: Node, ep: int, rows: float) -> Node:
    """The operator with 1 / ep of its weights and ``rows`` times its rows."""
    weight = node.param_bytes_read
    both_ways = min(2 * weight, node.backward_bytes)  # read for the input's gradient, and its own gradient written
    grown = ("flops", "backward_flops", "weight_gradient_flops", "bytes_written", "output_bytes", "saved_extra_bytes")
    return node.model_copy(
        update={
            **{name: round(getattr(node, name) * rows) for name in grown},
            "bytes_read": round((node.bytes_read - weight) * rows) + weight // ep,
            "backward_bytes": round((node.backward_bytes - both_ways) * rows) + both_ways // ep,
            "param_bytes_read": weight // ep,
            "shape": _grown(node.shape, rows),
        }
    )


def _grown(shape: tuple[int, ...], rows: float) -> tuple[int, ...]:
    return (round(shape[0] * rows), *shape[1:]) if shape else shape
