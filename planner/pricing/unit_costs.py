"""Time and memory of one unit for one micro-batch on one rank, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.communication import collective_time_s
from costmodels.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.schema import ClusterSpec
from planner.graph.experts import expert_parameters
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.parallelism import Recompute, Replicate, Shard
from planner.pricing.expert_parallel import exchange
from planner.pricing.operator_time import PricingTarget, kernels_issued, node_time_s
from planner.pricing.sharded_unit import ShardedUnit, is_floating, tensor_bytes
from planner.pricing.split_backward import weight_gradients
from planner.pricing.unit_memory import UnitMemory, kept_products
from planner.space.op_rules import op_name

# Kernels that the CUDA driver queues before a launch blocks: no farther can the host be ahead of the device.
LAUNCH_QUEUE = 1024


@dataclass(frozen=True)
class UnitCosts:
    """One micro-batch through one unit on one rank; seconds and bytes."""

    forward_s: float  # compute alone
    backward_s: float  # compute alone, without recomputation
    recompute_s: float  # forward work repeated in the backward pass
    tensor_forward_s: float  # tensor-parallel collectives
    tensor_backward_s: float
    context_forward_s: float  # context-parallel collectives
    context_backward_s: float
    expert_forward_s: float  # all-to-alls of expert parallelism
    expert_backward_s: float
    kept_bytes: float  # held from forward to backward
    working_bytes: float  # held besides while this unit's backward runs, or its loss forward
    loss_bytes: float  # of these, what the loss needs in forward already
    buffer_bytes: float  # buffers that are kept for good, shared by all units
    collective_bytes: float  # freed, but not reusable before asynchronous collectives are done with them
    queued_bytes: float  # of such, what the launches hold that the driver queues at most
    stranded_bytes: float  # freed, but too small for what is allocated next
    boundary_bytes: float  # sent where the pipeline is cut behind this unit, by one rank
    weight_gradient_s: float = 0.0  # part of backward_s
    split_extra_s: float = 0.0  # kernels that run twice where a schedule splits the backward pass
    waiting_bytes: float = 0.0  # held more (or less) from the first to the second half of a split backward pass


@dataclass(frozen=True)
class UnitStates:
    """Parameters of one unit on one rank of the tp axis, in elements."""

    trainable: float
    frozen: float
    tied: float  # used here but owned by an earlier unit: a pipeline that parts them holds a copy
    experts: float = 0.0  # of the trainable ones, those that expert parallelism divides

    @property
    def total(self) -> float:
        """Elements of this unit."""
        return self.trainable + self.frozen

    def held(self, elements: float, ep: int) -> float:
        """Of ``elements`` with all experts among them, those that one of ``ep`` ranks works with."""
        return elements - self.experts * (1 - 1 / ep)


def unit_states(graph: ModelGraph, unit: Unit, sharded: ShardedUnit) -> UnitStates:
    """Elements that one tp rank holds of ``unit``."""
    parameters = {name: p for p in graph.parameters for name in (p.fqn, *p.aliases)}
    of_experts = expert_parameters(graph)

    def local(fqn: str) -> float:
        parameter = parameters[fqn]
        names = (parameter.fqn, *parameter.aliases)
        is_split = any(isinstance(sharded.parameters.get(n, Replicate()), Shard) for n in names)
        return parameter.num_elements / (sharded.degree if is_split else 1)

    return UnitStates(
        trainable=sum(local(fqn) for fqn in unit.parameters if parameters[fqn].trainable),
        frozen=sum(local(fqn) for fqn in unit.parameters if not parameters[fqn].trainable),
        tied=sum(local(fqn) for fqn in unit.tied_parameters),
        experts=sum(local(fqn) for fqn in unit.parameters if parameters[fqn].trainable and fqn in of_experts),
    )


def unit_costs(  # over 6 arguments: what a unit's costs depend on, given by name
    target: PricingTarget,
    unit: Unit,
    sharded: ShardedUnit,
    *,
    recompute: Recompute,
    micro_batch_size: int,
    cp: int,
    ep: int = 1,
) -> UnitCosts:
    """Price ``unit``, split as ``sharded`` says, for ``micro_batch_size`` sequences over ``cp`` ranks.

    With ``ep`` above 1 the graph of ``target`` is that of one of so many ranks (``expert_parallel.on_one_rank``).
    """
    graph, cluster = target.graph, target.cluster
    scale = micro_batch_size / graph.batch_size / cp
    nodes = [graph.nodes[i] for i in unit.nodes]
    mode = recompute if unit.is_block else Recompute.NONE
    if mode is Recompute.SELECTIVE and target.recipe.selective == "blocks":
        mode = Recompute.FULL
    tensor_forward, tensor_backward = _tensor_parallel_s(sharded, target, scale)
    context_forward, context_backward = _context_parallel_s(nodes, graph, sharded, cluster, micro_batch_size, cp)
    experts = exchange(target, unit, sharded, scale, ep)
    communication = (
        tensor_forward + context_forward + experts.both_s,
        tensor_backward + context_backward + experts.both_s,
    )
    forward, backward = (
        max(
            _compute_s(nodes, target, sharded, scale=scale, backward=is_backward),
            _host_s(nodes, target, sharded, backward=is_backward) - communication[is_backward],
        )
        for is_backward in (False, True)
    )
    memory = UnitMemory(target, unit, sharded, scale)
    repeated = {
        Recompute.NONE: 0.0,
        Recompute.SELECTIVE: _compute_s(_repeated(nodes, target), target, sharded, scale=scale, backward=False)
        + (0.0 if target.recipe.selective == "attention" else experts.dispatch_s),
        Recompute.FULL: forward + tensor_forward + context_forward + experts.both_s,
    }[mode]
    num_launches = sum(issued_by_host(nodes, target, sharded, backward=is_backward)[0] for is_backward in (False, True))
    weights = weight_gradients(nodes, target, sharded, scale=scale)
    factor = target.recipe.split_host_factor
    split_host_s = _host_s(nodes, target, sharded, backward=True) * (1.0 if factor is None else factor.value)
    return UnitCosts(
        forward_s=forward,
        backward_s=backward,
        recompute_s=repeated,
        tensor_forward_s=tensor_forward,
        tensor_backward_s=tensor_backward,
        context_forward_s=context_forward,
        context_backward_s=context_backward,
        expert_forward_s=experts.both_s,
        expert_backward_s=experts.both_s,
        kept_bytes=memory.kept(mode),
        working_bytes=memory.working(mode) + experts.buffer_bytes,
        loss_bytes=memory.loss(),
        buffer_bytes=memory.gather_buffers(),
        collective_bytes=memory.waiting_collectives(),
        queued_bytes=LAUNCH_QUEUE / max(1, num_launches) * memory.waiting_collectives(),
        stranded_bytes=memory.stranded_copies(),
        boundary_bytes=sum(memory.local_bytes(graph.nodes[i]) for i in unit.boundary),
        weight_gradient_s=weights.share * backward,
        split_extra_s=max(backward + weights.repeated_s, split_host_s - communication[True]) - backward,
        waiting_bytes=weights.gradient_bytes - memory.freed_early(weights.last_node),
    )


def _repeated(nodes: list[Node], target: PricingTarget) -> list[Node]:
    """Operators that selective recomputation runs again."""
    if target.recipe.selective == "attention":
        return [n for n in nodes if n.op_class is OpClass.ATTENTION]
    kept = {n.id for n in kept_products(nodes, target)}
    return [n for n in nodes if n.id not in kept]


def _compute_s(
    nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, *, scale: float, backward: bool
) -> float:
    return sum(
        node_time_s(n, target, fraction=sharded.fractions.get(n.id, 1.0), scale=scale, backward=backward) for n in nodes
    )


def issued_by_host(
    nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, *, backward: bool
) -> tuple[int, int]:
    """Kernels and tensor-parallel collectives that the host issues for a unit."""
    num_collectives = sum(term.in_backward == backward for term in sharded.communication)
    return sum(kernels_issued(node, target, backward=backward) for node in nodes), num_collectives


def _host_s(nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, *, backward: bool) -> float:
    """Seconds that the host needs to issue the unit's kernels: however short they are, they come no faster."""
    recipe, cluster = target.recipe, target.cluster
    num_kernels, num_collectives = issued_by_host(nodes, target, sharded, backward=backward)
    collective_s = recipe.host_s_per_collective.value
    if recipe.host_s_per_collective_rank is not None and cluster.num_devices > cluster.devices_per_node:
        collective_s += recipe.host_s_per_collective_rank.value * sharded.degree
    return num_kernels * recipe.issue_s(is_sharded=sharded.degree > 1) + num_collectives * collective_s


def _tensor_parallel_s(sharded: ShardedUnit, target: PricingTarget, scale: float) -> tuple[float, float]:
    times = [0.0, 0.0]
    group = GroupPlacement(sharded.degree, 1)
    exposed = 1 - target.recipe.tensor_overlap.value
    for term in sharded.communication:
        num_bytes = term.num_bytes * (scale if term.scales else 1.0) / target.recipe.tensor_parallel_rate.value
        times[term.in_backward] += exposed * collective_time_s(Collective(term.kind, num_bytes, group), target.cluster)
    return times[0], times[1]


def _context_parallel_s(
    nodes: list[Node], graph: ModelGraph, sharded: ShardedUnit, cluster: ClusterSpec, micro_batch_size: int, cp: int
) -> tuple[float, float]:
    """Keys and values are gathered before attention, again in backward, and their gradients reduce-scattered."""
    if cp == 1:
        return 0.0, 0.0
    group = GroupPlacement(cp, sharded.degree)
    scale = micro_batch_size / graph.batch_size
    forward = backward = 0.0
    for node in nodes:
        if node.op_class is not OpClass.ATTENTION:
            continue
        for operand in node.operands[1:3]:
            if not isinstance(operand, int):
                continue
            size = tensor_bytes(graph.nodes[operand]) * sharded.local_share(operand) * scale
            gather = collective_time_s(Collective(CollectiveKind.ALL_GATHER, size, group), cluster)
            forward += gather
            backward += gather + collective_time_s(Collective(CollectiveKind.REDUCE_SCATTER, size, group), cluster)
    return forward, backward


def mixes_positions_outside_attention(graph: ModelGraph) -> bool:
    """Whether an operator besides attention looks along the sequence, so that the sequence cannot be split."""
    mixing = {"conv1d", "conv2d", "conv3d", "convolution", "cumsum", "fft_rfft", "flip", "roll", "scan"}
    return any(op_name(n.op) in mixing and n.batch_dependent and is_floating(n) for n in graph.nodes)
