"""Tensor parallelism of one unit: builds the placement program for the solver and reads its answer.

The program's operators are the unit's nodes plus one for everything that enters and one for what
leaves. An operator's strategy is an operator rule's strategy, the placement its output is
redistributed to where it ends a module (that is what the executor can hook), and whether its
gradient arrives as a partial sum. Edges cost what DTensor would redistribute on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from costmodels.communication import collective_time_s
from costmodels.workload import Collective, CollectiveKind, GroupPlacement
from planner.graph.model_graph import Node, OpClass, Unit
from planner.graph.node_operators import has_placement_rule, is_redistributed, strategies
from planner.operators.call import FLOATING, ITEM_BYTES
from planner.operators.placement_rules import OpStrategy
from planner.parallelism import Partial, Placement, Replicate, Shard
from planner.pricing.operator_time import PricingTarget, node_time_s
from planner.problems import PlacementProblem, PlacementSolution


@dataclass(frozen=True)
class CommunicationTerm:
    """One collective on the tp axis. ``num_bytes`` is for the traced batch; ``scales``: grows with the batch."""

    kind: CollectiveKind
    num_bytes: float
    scales: bool
    in_backward: bool


@dataclass(frozen=True)
class ShardedUnit:
    """How the operators and parameters of one unit are placed on the tp axis."""

    degree: int
    fractions: dict[int, float]  # node id -> share of its work on one rank
    placements: dict[int, Placement]  # node id -> placement of its output, after redistribution
    parameters: dict[str, Placement]
    module_outputs: dict[str, Placement]  # module FQN -> placement its output is redistributed to
    communication: tuple[CommunicationTerm, ...]
    is_proved: bool = True  # no other placement takes less time

    def local_share(self, node_id: int) -> float:
        """Share of the node's output that one rank holds."""
        return 1 / self.degree if isinstance(self.placements.get(node_id), Shard) else 1.0

    @property
    def splits_weights(self) -> bool:
        """Whether any parameter is split."""
        return any(isinstance(placement, Shard) for placement in self.parameters.values())


@dataclass(frozen=True)
class _State:
    """One strategy of one operator of the program."""

    operands: tuple[Placement, ...]
    partial_gradients: tuple[bool, ...]
    native: Placement
    placement: Placement
    gradient_is_partial: bool
    fraction: float
    terms: tuple[CommunicationTerm, ...]


class PlacementModel:
    """The placement program of ``unit`` and the way back from its solution."""

    def __init__(
        self,
        target: PricingTarget,
        unit: Unit,
        degree: int,
        sequence_parallel: bool,
        fixed: Mapping[str, Placement] | None = None,
    ) -> None:
        """``fixed``: placements of parameters (by any FQN) that are decided already."""
        graph = target.graph
        self._fixed = fixed or {}
        self._target, self._graph, self._unit, self._degree = target, graph, unit, degree
        self._sequence_parallel = sequence_parallel
        self._group = GroupPlacement(degree, 1)
        inside = set(unit.nodes)
        self._entering = sorted(
            {o for i in unit.nodes for o in graph.nodes[i].operands if isinstance(o, int) and o not in inside}
        )
        self._ids = [*self._entering, *unit.nodes]
        self._index = {node_id: i for i, node_id in enumerate(self._ids)}
        self._users: dict[int, list[int]] = {}
        for node_id in unit.nodes:
            for operand in graph.nodes[node_id].operands:
                if isinstance(operand, int):
                    self._users.setdefault(operand, []).append(node_id)
        self._leaving = [i for i in unit.boundary if i in inside]
        self._states = [
            self._entering_states(graph.nodes[i]) if i not in inside else self._node_states(graph.nodes[i])
            for i in self._ids
        ]

    @property
    def is_possible(self) -> bool:
        """Whether every operator has a strategy that respects what is fixed."""
        return all(self._states)

    def boundary_placement(self, node: Node) -> Placement:
        """Placement of what crosses between units: split along the sequence under sequence parallelism."""
        splittable = len(node.shape) == 3 and node.shape[1] % self._degree == 0 and node.batch_dependent
        return Shard(1) if self._sequence_parallel and splittable and is_floating(node) else Replicate()

    def problem(self) -> PlacementProblem:
        """The program in numbers: nanoseconds for one sequence."""
        costs = [tuple(self._state_cost_ns(i, s) for s in states) for i, states in enumerate(self._states)]
        edges: list[tuple[int, int, tuple[tuple[int | None, ...], ...]]] = []
        for node_id in self._unit.nodes:
            node = self._graph.nodes[node_id]
            for position, operand in enumerate(node.operands):
                if isinstance(operand, int):
                    source, target = self._index[operand], self._index[node_id]
                    matrix = tuple(
                        tuple(self._edge_cost_ns(operand, node, position, (a, b)) for b in self._states[target])
                        for a in self._states[source]
                    )
                    edges.append((source, target, matrix))
        for node_id in self._leaving:  # the next unit expects the placement agreed between units
            source = self._index[node_id]
            agreed = self.boundary_placement(self._graph.nodes[node_id])
            edges.append(
                (source, len(costs), tuple((0 if s.placement == agreed else None,) for s in self._states[source]))
            )
            costs.append((0,))
        return PlacementProblem(tuple(costs), tuple(edges))

    def read(self, solution: PlacementSolution) -> ShardedUnit:
        """The placements and collectives that ``solution`` stands for."""
        chosen = {i: self._states[k][solution.choices[k]] for i, k in self._index.items()}
        inside = set(self._unit.nodes)
        terms: list[CommunicationTerm] = []
        parameters: dict[str, Placement] = {}
        outputs: dict[str, Placement] = {}
        for node_id, state in chosen.items():
            terms += state.terms
            if node_id not in inside:
                continue
            node = self._graph.nodes[node_id]
            for position, operand in enumerate(node.operands):
                if isinstance(operand, str):
                    parameters[operand] = state.operands[position]
                elif isinstance(operand, int):
                    terms += self._edge_terms(operand, node, position, (chosen[operand], state)) or ()
            if state.placement != state.native:
                outputs[self._module_ended_by(node)] = state.placement
        return ShardedUnit(
            degree=self._degree,
            fractions={i: chosen[i].fraction for i in self._unit.nodes},
            placements={i: s.placement for i, s in chosen.items()},
            parameters=parameters,
            module_outputs=outputs,
            communication=tuple(terms),
            is_proved=solution.bound_ns >= solution.cost_ns,
        )

    # -- states ---------------------------------------------------------------------------------

    def _entering_states(self, node: Node) -> list[_State]:
        placement = self.boundary_placement(node)
        plain = _State((), (), placement, placement, False, 1.0, ())
        if not self._has_gradient(node):
            return [plain]
        reduce = self._gradient_terms(node, placement)
        return [plain, _State((), (), placement, placement, True, 1.0, reduce)]

    def _node_states(self, node: Node) -> list[_State]:
        states: list[_State] = []
        for rule in self._allowed_rules(node):
            rule_terms = self._parameter_gradient_terms(node, rule)
            # Partial gradients pass through a view.
            if node.op_class is OpClass.VIEW and self._has_gradient(node) and rule.is_replicated:
                through = (True,) * len(rule.operands)
                states.append(_State(rule.operands, through, rule.output, rule.output, True, 1.0, rule_terms))
            for placement in self._redistributions(node, rule.output):
                forward = self._reshard_terms(node, rule.output, placement) if placement != rule.output else ()
                for partial in (False, True) if self._has_gradient(node) and placement == Replicate() else (False,):
                    gradient = (
                        self._gradient_terms(node, rule.output)
                        if partial
                        else self._return_terms(node, rule.output, placement)
                    )
                    states.append(
                        _State(
                            rule.operands,
                            rule.partial_gradients,
                            rule.output,
                            placement,
                            partial,
                            rule.compute_fraction,
                            (*rule_terms, *forward, *gradient),
                        )
                    )
        return states

    def _allowed_rules(self, node: Node) -> list[OpStrategy]:
        """What is fixed is respected; other matrix products split their weight wherever its dims divide.

        That is what a tensor-parallel degree means to users, and it saves the memory that they choose it for;
        left free, slow links would leave everything replicated.
        """
        rules = strategies(node, self._graph, self._degree)
        if self._degree == 1:
            return rules[:1]
        names = [operand for operand in node.operands if isinstance(operand, str)]
        if any(name in self._fixed for name in names):
            return [rule for rule in rules if self._respects_fixed(node, rule)]
        split = [rule for rule in rules if self._splits_weight(node, rule)]
        return split if split and node.op_class is OpClass.GEMM else rules

    @staticmethod
    def _splits_weight(node: Node, rule: OpStrategy) -> bool:
        pairs = zip(node.operands, rule.operands, strict=True)
        return any(isinstance(operand, str) and isinstance(placement, Shard) for operand, placement in pairs)

    def _respects_fixed(self, node: Node, rule: OpStrategy) -> bool:
        return all(
            self._fixed.get(operand, placement) == placement
            for operand, placement in zip(node.operands, rule.operands, strict=True)
            if isinstance(operand, str)
        )

    def _redistributions(self, node: Node, native: Placement) -> list[Placement]:
        """Placements the output can have for its users: as it is, or what a module hook makes of it."""
        wanted = self.boundary_placement(node)
        if not self._ends_module(node) or not is_floating(node) or self._degree == 1:
            return [native]
        options = [native, Replicate(), wanted]
        # A partial sum is reduced where its module ends: what follows would each reduce it again.
        unique: list[Placement] = []
        for option in options:
            if option not in unique and not isinstance(option, Partial):
                unique.append(option)
        return unique

    def _ends_module(self, node: Node) -> bool:
        return bool(node.module) and self._module_ended_by(node) != ""

    def _module_ended_by(self, node: Node) -> str:
        """The innermost module whose output this node is: none of its users lies in that module."""
        module = node.module
        users = [self._graph.nodes[u].module for u in self._users.get(node.id, [])]
        if module and not any(u == module or u.startswith(module + ".") for u in users):
            return module
        return ""

    def _has_gradient(self, node: Node) -> bool:
        return self._degree > 1 and node.requires_grad and is_floating(node)

    # -- communication ----------------------------------------------------------------------------

    def _term(
        self, kind: CollectiveKind, num_bytes: float, *, backward: bool, scales: bool = True
    ) -> tuple[CommunicationTerm, ...]:
        return (CommunicationTerm(kind, num_bytes, scales, backward),)

    def _reshard_terms(self, node: Node, before: Placement, after: Placement) -> tuple[CommunicationTerm, ...]:
        """Forward cost of a redistribution."""
        size = tensor_bytes(node)
        if before == after or isinstance(before, Replicate):
            return ()
        if isinstance(before, Partial):
            kind = CollectiveKind.REDUCE_SCATTER if isinstance(after, Shard) else CollectiveKind.ALL_REDUCE
            return self._term(kind, size, backward=False)
        if isinstance(after, Shard):
            return self._term(CollectiveKind.ALL_TO_ALL, size / self._degree, backward=False)
        return self._term(CollectiveKind.ALL_GATHER, size, backward=False)

    def _return_terms(self, node: Node, before: Placement, after: Placement) -> tuple[CommunicationTerm, ...]:
        """Backward cost of a redistribution whose gradient arrives placed like ``after``."""
        if not self._has_gradient(node) or before == after or not isinstance(after, Shard):
            return ()
        size = tensor_bytes(node)
        if isinstance(before, Shard):
            return self._term(CollectiveKind.ALL_TO_ALL, size / self._degree, backward=True)
        return self._term(CollectiveKind.ALL_GATHER, size, backward=True)

    def _gradient_terms(self, node: Node, native: Placement) -> tuple[CommunicationTerm, ...]:
        """Backward cost of turning a partial-sum gradient into the placement that the producer needs."""
        kind = CollectiveKind.REDUCE_SCATTER if isinstance(native, Shard) else CollectiveKind.ALL_REDUCE
        return self._term(kind, tensor_bytes(node), backward=True, scales=node.batch_dependent)

    def _parameter_gradient_terms(self, node: Node, rule: OpStrategy) -> tuple[CommunicationTerm, ...]:
        terms: tuple[CommunicationTerm, ...] = ()
        for position, operand in enumerate(node.operands):
            if not isinstance(operand, str) or not rule.partial_gradients[position]:
                continue
            parameter = self._graph.parameter_of.get(operand)
            if parameter is not None and parameter.trainable:
                size = parameter.num_elements * ITEM_BYTES[self._graph.dtype]
                terms += self._term(CollectiveKind.ALL_REDUCE, size, backward=True, scales=False)
        return terms

    def _edge_terms(
        self, source_id: int, user: Node, position: int, states: tuple[_State, _State]
    ) -> tuple[CommunicationTerm, ...] | None:
        """Collectives of feeding one operand of ``user`` from the first state to the second; None where DTensor won't.

        What DTensor moves by itself it moves again in the backward pass, where autograd kept what lay there before.
        """
        source, target = states
        node = self._graph.nodes[source_id]
        wanted = target.operands[position]
        partial = target.partial_gradients[position] and self._has_gradient(node)
        if source.placement == wanted:
            return None if partial and not source.gradient_is_partial else ()
        if isinstance(wanted, Partial):
            return None
        forward = self._reshard_terms(node, source.placement, wanted)
        if any(self._graph.nodes[saved].storage == node.storage for saved in user.saves):
            forward += tuple(replace(term, in_backward=True) for term in forward)
        if partial:
            return (*forward, *self._gradient_terms(node, source.placement))
        return (*forward, *self._return_terms(node, source.placement, wanted))

    def _edge_cost_ns(self, source_id: int, user: Node, position: int, states: tuple[_State, _State]) -> int | None:
        terms = self._edge_terms(source_id, user, position, states)
        source, target = states
        moves = source.placement != target.operands[position]
        if terms is None or (moves and not self._would_redistribute(source_id, user, position, states)):
            return None
        return self._terms_cost_ns(terms)

    def _would_redistribute(self, source_id: int, target: Node, position: int, states: tuple[_State, _State]) -> bool:
        """Whether DTensor brings this operand from where the first state leaves it to where the second wants it."""
        before, state = states
        if not has_placement_rule(target):
            return True  # gathered for an operator without a rule
        if not is_redistributed(target):
            return False
        if not isinstance(state.operands[position], Shard):
            return not self._works_where_it_lies(target, position, before.placement)
        has_sharded_parameter = any(
            isinstance(o, str) and isinstance(p, Shard) for o, p in zip(target.operands, state.operands, strict=True)
        )
        source = self._graph.nodes[source_id]
        return has_sharded_parameter or prod(source.shape) < prod(target.shape) or not source.batch_dependent

    def _works_where_it_lies(self, target: Node, position: int, placement: Placement) -> bool:
        """Whether DTensor runs the operator on what each rank has: all but products follow a split operand."""
        if target.op_class is not OpClass.MEMORY_BOUND:
            return False
        return any(rule.operands[position] == placement for rule in strategies(target, self._graph, self._degree))

    def _terms_cost_ns(self, terms: tuple[CommunicationTerm, ...]) -> int:
        total = 0.0
        for term in terms:
            size = term.num_bytes / self._graph.batch_size if term.scales else term.num_bytes
            total += collective_time_s(Collective(term.kind, size, self._group), self._target.cluster)
        return round(total * 1e9)

    def _state_cost_ns(self, index: int, state: _State) -> int:
        node_id = self._ids[index]
        cost = self._terms_cost_ns(state.terms)
        if node_id in self._entering:
            return cost
        node = self._graph.nodes[node_id]
        scale = 1 / self._graph.batch_size
        forward = node_time_s(node, self._target, fraction=state.fraction, scale=scale, backward=False)
        backward = node_time_s(node, self._target, fraction=state.fraction, scale=scale, backward=True)
        return cost + round((forward + backward) * 1e9)


def is_floating(node: Node) -> bool:
    """Whether the output is a floating-point tensor."""
    return node.dtype in FLOATING


def tensor_bytes(node: Node) -> float:
    """Size of the node's output as a tensor of its own."""
    return prod(node.shape) * ITEM_BYTES[node.dtype]
