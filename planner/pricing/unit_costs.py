"""Time and memory of one unit for one micro-batch on one rank, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from costmodels.communication import collective_time_s
from costmodels.workload import Collective, CollectiveKind, GroupPlacement
from planner.graph.experts import expert_parameters
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.parallelism import Recompute, Replicate, Shard
from planner.pricing.expert_parallel import exchange
from planner.pricing.operator_time import PricingTarget, kernels_issued, node_time_s
from planner.pricing.sharded_unit import ShardedUnit, is_floating, tensor_bytes
from planner.pricing.split_backward import weight_gradients
from planner.pricing.unit_memory import UnitMemory, kept_products

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


def held_elements(elements: float, experts: float, ep: int) -> float:
    """Of ``elements`` with all ``experts`` among them, those that one of ``ep`` ranks works with."""
    return elements - experts * (1 - 1 / ep)


def unit_states(graph: ModelGraph, unit: Unit, sharded: ShardedUnit) -> UnitStates:
    """Elements that one tp rank holds of ``unit``."""
    parameters = graph.parameter_of
    of_experts = expert_parameters(graph)

    def local(fqn: str) -> float:
        parameter = parameters[fqn]
        is_split = any(isinstance(sharded.parameters.get(n, Replicate()), Shard) for n in parameter.names)
        return parameter.num_elements / (sharded.degree if is_split else 1)

    return UnitStates(
        trainable=sum(local(fqn) for fqn in unit.parameters if parameters[fqn].trainable),
        frozen=sum(local(fqn) for fqn in unit.parameters if not parameters[fqn].trainable),
        tied=sum(local(fqn) for fqn in unit.tied_parameters),
        experts=sum(local(fqn) for fqn in unit.parameters if parameters[fqn].trainable and fqn in of_experts),
    )


class UnitWork:
    """``unit`` on one rank, split as ``sharded`` says, for ``scale`` times the traced batch.

    Holds what costs under every recomputation and context-parallel degree have in common. With ``ep`` above 1 the graph
    of ``target`` is that of one of so many ranks (``expert_parallel.on_one_rank``).
    """

    def __init__(self, target: PricingTarget, unit: Unit, sharded: ShardedUnit, scale: float, ep: int = 1) -> None:
        self._target, self._sharded, self._scale, self._is_block = target, sharded, scale, unit.is_block
        self._nodes = nodes = [target.graph.nodes[i] for i in unit.nodes]
        ways = (False, True)
        self._compute_s = [_compute_s(nodes, target, sharded, scale=scale, backward=way) for way in ways]
        self._host_s = [_host_s(nodes, target, sharded, backward=way) for way in ways]
        self._tensor_s = _tensor_parallel_s(unit, sharded, target, scale)
        self._experts = exchange(target, unit, sharded, scale, ep)
        self._weights = weights = weight_gradients(nodes, target, sharded, scale=scale)
        self._memory = memory = UnitMemory(target, unit, sharded, scale)
        num_launches = sum(issued_by_host(nodes, target, sharded, backward=way)[0] for way in ways)
        self._fixed: dict[str, float] = {
            "tensor_forward_s": self._tensor_s[False],
            "tensor_backward_s": self._tensor_s[True],
            "expert_forward_s": self._experts.both_s,
            "expert_backward_s": self._experts.both_s,
            "loss_bytes": memory.loss(),
            "buffer_bytes": memory.gather_buffers(),
            "collective_bytes": memory.waiting_collectives(),
            "queued_bytes": LAUNCH_QUEUE / max(1, num_launches) * memory.waiting_collectives(),
            "stranded_bytes": memory.stranded_copies(),
            "boundary_bytes": sum(memory.sent_bytes(target.graph.nodes[i]) for i in unit.boundary),
            "waiting_bytes": weights.gradient_bytes - memory.freed_early(weights.last_node),
        }

    def costs(self, recompute: Recompute, cp: int) -> UnitCosts:
        """Time and memory, with each sequence over ``cp`` ranks."""
        recipe = self._target.recipe
        mode = recompute if self._is_block else Recompute.NONE
        if mode is Recompute.SELECTIVE and recipe.selective == "blocks":
            mode = Recompute.FULL
        context_s = _context_parallel_s(self._nodes, self._target, self._sharded, self._scale * cp, cp)
        in_forward, in_backward = (
            tensor_s + each_s + self._experts.both_s for tensor_s, each_s in zip(self._tensor_s, context_s, strict=True)
        )
        forward = max(self._compute_s[False], self._host_s[False] - in_forward)
        backward = max(self._compute_s[True], self._host_s[True] - in_backward)
        split_host_s = self._host_s[True] * (
            1.0 if recipe.split_host_factor is None else recipe.split_host_factor.value
        )
        return UnitCosts(
            **self._fixed,
            forward_s=forward,
            backward_s=backward,
            recompute_s=self._recompute_s(mode, forward + in_forward),
            context_forward_s=context_s[False],
            context_backward_s=context_s[True],
            kept_bytes=self._memory.kept(mode),
            working_bytes=self._memory.working(mode) + self._experts.buffer_bytes,
            weight_gradient_s=self._weights.share * backward,
            split_extra_s=max(backward + self._weights.repeated_s, split_host_s - in_backward) - backward,
        )

    def _recompute_s(self, mode: Recompute, whole_s: float) -> float:
        if mode is Recompute.SELECTIVE:
            return self._selective_s
        return whole_s if mode is Recompute.FULL else 0.0

    @cached_property
    def _selective_s(self) -> float:
        """Rows go to their experts once more where the inputs of products are made again."""
        repeated = _repeated(self._nodes, self._target)
        again_s = 0.0 if self._target.recipe.selective == "attention" else self._experts.dispatch_s
        return _compute_s(repeated, self._target, self._sharded, scale=self._scale, backward=False) + again_s


def batch_scale(graph: ModelGraph, micro_batch_size: int, cp: int) -> float:
    """A rank's part of a micro-batch over the traced batch."""
    return micro_batch_size / graph.batch_size / cp


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


def _tensor_parallel_s(unit: Unit, sharded: ShardedUnit, target: PricingTarget, scale: float) -> tuple[float, float]:
    times = [0.0, 0.0]
    group = GroupPlacement(sharded.degree, 1)
    exposed = 1 - target.recipe.tensor_overlap.value
    for term in sharded.communication:
        num_bytes = term.num_bytes * (scale if term.scales else 1.0) / target.recipe.tensor_parallel_rate.value
        times[term.in_backward] += exposed * collective_time_s(Collective(term.kind, num_bytes, group), target.cluster)
    separate = target.recipe.separate_reductions
    crossing = [target.graph.nodes[i] for i in unit.boundary if not isinstance(sharded.placements.get(i), Shard)]
    whole = [node for node in crossing if node.batch_dependent and is_floating(node)]
    if separate is not None and unit.is_block and whole:
        num_bytes = scale * sum(map(tensor_bytes, whole)) / target.recipe.tensor_parallel_rate.value
        again = Collective(CollectiveKind.ALL_REDUCE, num_bytes, group)
        times[1] += exposed * separate.value * collective_time_s(again, target.cluster)
    return times[0], times[1]


def _context_parallel_s(
    nodes: list[Node], target: PricingTarget, sharded: ShardedUnit, scale: float, cp: int
) -> tuple[float, float]:
    """Keys and values are gathered before attention, again in backward, and their gradients reduce-scattered.

    ``scale``: whole sequences of a micro-batch over the traced batch.
    """
    if cp == 1:
        return 0.0, 0.0
    group = GroupPlacement(cp, sharded.degree)
    gather_s = reduce_s = 0.0
    for node in nodes:
        if node.op_class is not OpClass.ATTENTION:
            continue
        for operand in node.operands[1:3]:
            if not isinstance(operand, int):
                continue
            size = tensor_bytes(target.graph.nodes[operand]) * sharded.local_share(operand) * scale
            gather_s += collective_time_s(Collective(CollectiveKind.ALL_GATHER, size, group), target.cluster)
            reduce_s += collective_time_s(Collective(CollectiveKind.REDUCE_SCATTER, size, group), target.cluster)
    return gather_s, gather_s + reduce_s
