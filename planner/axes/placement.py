"""Ways to place one unit's operators on the tensor-parallel axis, and what a choice among them means.

The operators are the unit's nodes plus one for everything that enters and one for what leaves. An alternative of an
operator is a strategy of its rule, the placement its output is redistributed to where it ends a module (that is what
the executor can hook), and whether its gradient arrives as a partial sum. Between two operators lies what DTensor would
redistribute on its own. Nothing here has a price: ``planner.pricing.placements`` makes the integer program of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from costmodels.vocabulary.choices import Partial, Placement, Replicate, Shard
from costmodels.vocabulary.mesh import Group, Mesh
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind
from planner.axes.lowered import Collective, Hides, Kernel, Role, Tensor
from planner.axes.partial_sums import partial_sums
from planner.axes.traced import is_floating, kernel_of, tensors_of
from planner.axes.unit_rules import UnitRules
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.graph.node_operators import has_placement_rule, is_redistributed
from planner.layout.decided import Decided
from planner.operators.call import ITEM_BYTES
from planner.operators.placement_rules import OpStrategy
from planner.problems import PlacementSolution
from planner.table.keys import TensorSplit

Collectives = tuple[Collective, ...]


@dataclass(frozen=True)
class Alternative:
    """One way to run one operator. ``kernel``: what a rank then does; None for what enters or leaves."""

    kernel: Kernel | None
    collectives: Collectives
    operands: tuple[Placement, ...]
    partial_gradients: tuple[bool, ...]  # of each operand
    native: Placement  # of the output as the operator makes it
    placement: Placement  # as its users find it
    gradient_is_partial: bool
    share: float = 1.0  # of the work, on one rank
    is_hooked: bool = False  # where a module ends: its output, or the output's gradient, is redistributed there


@dataclass(frozen=True)
class Operator:
    """An operator, or a tensor that enters or leaves the unit."""

    node: int
    parameters: Mapping[int, str]  # position among the operands -> FQN
    ends_module: str  # the innermost module whose output this is; "": of none
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Edge:
    """What feeding one operand takes, for each alternative of ``source`` and each of ``target``; None: impossible."""

    source: int  # places in ``Alternatives.operators``
    target: int
    collectives: tuple[tuple[Collectives | None, ...], ...]


@dataclass(frozen=True)
class Alternatives:
    """All ways to place one unit."""

    split: TensorSplit
    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    tensors: Mapping[int, Tensor]

    @property
    def is_possible(self) -> bool:
        """Whether every operator has an alternative that respects what is fixed."""
        return all(operator.alternatives for operator in self.operators)


@dataclass(frozen=True)
class UnitPlacement:
    """How the operators and parameters of one unit are placed on the tensor-parallel axis."""

    split: TensorSplit
    shares: Mapping[int, float]  # node id -> share of its work on one rank
    placements: Mapping[int, Placement]  # node id -> placement of its output, after redistribution
    parameters: Mapping[str, Placement]
    module_outputs: Mapping[str, Placement]  # module FQN -> placement its output is redistributed to
    collectives: Collectives
    is_proved: bool = True  # no other placement takes less time

    def local_share(self, node: int) -> float:
        """Share of the node's output that one rank holds."""
        return 1 / self.split.tp if isinstance(self.placements.get(node), Shard) else 1.0

    @property
    def splits_weights(self) -> bool:
        """Whether any parameter is split."""
        return any(isinstance(placement, Shard) for placement in self.parameters.values())


def alternatives(graph: ModelGraph, unit: Unit, split: TensorSplit, decided: Decided, rules: UnitRules) -> Alternatives:
    """The ways to place ``unit``."""
    ways = _Ways(graph, unit, split, decided, rules)
    operators = [ways.entering(graph.nodes[i]) for i in ways.entering_ids]
    operators += [ways.operator(graph.nodes[i]) for i in unit.nodes]
    places = {operator.node: place for place, operator in enumerate(operators)}
    edges: list[Edge] = []
    for i in unit.nodes:
        for position, operand in enumerate(graph.nodes[i].operands):
            if isinstance(operand, int):
                source, target = places[operand], places[i]
                edges.append(Edge(source, target, ways.edge(operators[source], operators[target], position)))
    inside = set(unit.nodes)
    for i in unit.boundary:
        if i in inside:
            leaving = ways.leaving(graph.nodes[i])
            edges.append(Edge(places[i], len(operators), ways.agreed(operators[places[i]], leaving)))
            operators.append(leaving)
    return Alternatives(split, tuple(operators), tuple(edges), tensors_of(graph, places))


def decision(alternatives: Alternatives, solution: PlacementSolution) -> UnitPlacement:
    """The placements and collectives that ``solution`` stands for."""
    operators = alternatives.operators
    chosen = [each.alternatives[choice] for each, choice in zip(operators, solution.choices, strict=True)]
    inside = [(each, way) for each, way in zip(operators, chosen, strict=True) if way.kernel is not None]
    collectives = [collective for way in chosen for collective in way.collectives]
    for edge in alternatives.edges:
        moved = edge.collectives[solution.choices[edge.source]][solution.choices[edge.target]]
        collectives += moved or ()
    return UnitPlacement(
        split=alternatives.split,
        shares={each.node: way.share for each, way in inside},
        placements={each.node: way.placement for each, way in zip(operators, chosen, strict=True)},
        parameters={fqn: way.operands[place] for each, way in inside for place, fqn in each.parameters.items()},
        module_outputs={each.ends_module: way.placement for each, way in inside if way.is_hooked and each.ends_module},
        collectives=tuple(collectives),
        is_proved=solution.bound_ns >= solution.cost_ns,
    )


class _Ways:
    """The alternatives of the operators of one unit."""

    def __init__(self, graph: ModelGraph, unit: Unit, split: TensorSplit, decided: Decided, rules: UnitRules) -> None:
        self.graph, self._split, self._decided, self._fixed = graph, split, decided, decided.parameters
        self._degree = split.tp
        self._group = Mesh(tp=split.tp).group(Group.TENSOR)
        inside = set(unit.nodes)
        operands = {o for i in unit.nodes for o in graph.nodes[i].operands if isinstance(o, int)}
        self.entering_ids = sorted(operands - inside)
        self._users: dict[int, list[int]] = {}
        for i in unit.nodes:
            for operand in graph.nodes[i].operands:
                if isinstance(operand, int):
                    self._users.setdefault(operand, []).append(i)
        self.rules, self._own_tokens, self._may_be_whole = rules.of, rules.own_tokens, rules.whole
        self._sums = partial_sums(graph, unit, self.rules, lambda node: bool(self._module_ended_by(node)))

    def entering(self, node: Node) -> Operator:
        """What an earlier unit made, placed as agreed between units; its gradient may be a partial sum."""
        placement = self._agreed(node)
        plain = Alternative(None, (), (), (), placement, placement, gradient_is_partial=False)
        if not self.has_gradient(node):
            return Operator(node.id, {}, "", (plain,))
        partial = replace(plain, collectives=self.of_partial_gradient(node, placement), gradient_is_partial=True)
        return Operator(node.id, {}, "", (plain, partial))

    def leaving(self, node: Node) -> Operator:
        """What the next unit expects."""
        placement = self._agreed(node)
        return Operator(node.id, {}, "", (Alternative(None, (), (), (), placement, placement, False),))

    def operator(self, node: Node) -> Operator:
        """Every way to run ``node``."""
        whole = kernel_of(self.graph, node)
        kernels = {1.0: whole}
        found: list[Alternative] = []
        for rule in self._allowed_rules(node):
            share = rule.compute_fraction
            if share not in kernels:
                kernels[share] = whole.times(share)
            found += self._under(node, rule, kernels[share])
        parameters = {place: operand for place, operand in enumerate(node.operands) if isinstance(operand, str)}
        module = self._module_ended_by(node)
        return Operator(node.id, parameters, module, tuple(self._decided.of_output(module, found)))

    def edge(self, source: Operator, target: Operator, position: int) -> tuple[tuple[Collectives | None, ...], ...]:
        """What feeding operand ``position`` takes, in every pair of alternatives."""
        before, user = self.graph.nodes[source.node], self.graph.nodes[target.node]
        feeding = _Feeding(self, before, user, position)
        once = self._own_tokens.moved_once
        return tuple(tuple(once(before, feeding.moved(a, b)) for b in target.alternatives) for a in source.alternatives)

    @staticmethod
    def agreed(source: Operator, leaving: Operator) -> tuple[tuple[Collectives | None, ...], ...]:
        """Nothing moves between units: what leaves already lies as it was agreed."""
        placement = leaving.alternatives[0].placement
        return tuple((() if way.placement == placement else None,) for way in source.alternatives)

    def _under(self, node: Node, rule: OpStrategy, kernel: Kernel) -> list[Alternative]:
        has_gradient = self.has_gradient(node)
        of_rule = self._of_parameters(node, rule)
        share = rule.compute_fraction
        found: list[Alternative] = []
        reduces = node.id not in self._sums.gradients
        passes = node.op_class is OpClass.VIEW or node.id in self._sums.gradients
        if passes and has_gradient and rule.is_replicated:  # partial gradients pass through
            through = (True,) * len(rule.operands)
            found.append(Alternative(kernel, of_rule, rule.operands, through, rule.output, rule.output, True, share))
        for placement in self._redistributions(node, rule.output):
            forward = self.resharded(node, rule.output, placement)
            for partial in (False, True) if has_gradient and placement == Replicate() and reduces else (False,):
                back = self.of_partial_gradient(node, rule.output)
                gradient = back if partial else self.returned(node, rule.output, placement)
                collectives = (*of_rule, *forward, *gradient)
                found.append(
                    Alternative(
                        kernel,
                        collectives,
                        rule.operands,
                        rule.partial_gradients,
                        rule.output,
                        placement,
                        partial,
                        share,
                        is_hooked=placement != rule.output or (partial and node.id in self._sums.weighing),
                    )
                )
        return found

    def _agreed(self, node: Node) -> Placement:
        """Placement of what crosses between units: split along the sequence under sequence parallelism."""
        if (own := self._own_tokens.agreed(node)) is not None:
            return own
        splittable = len(node.shape) == 3 and node.shape[1] % self._degree == 0 and node.batch_dependent
        return Shard(1) if self._split.sequence_parallel and splittable and is_floating(node) else Replicate()

    def _allowed_rules(self, node: Node) -> list[OpStrategy]:
        """What is fixed is respected; other matrix products split their weight wherever its dims divide.

        That is what a tensor-parallel degree means to users, and it saves the memory that they choose it for;
        left free, slow links would leave everything replicated. Those that nothing takes parts of may be whole.
        """
        rules = self.rules(node)
        if self._degree == 1:
            return rules[:1]
        if any(operand in self._fixed for operand in node.operands if isinstance(operand, str)):
            return [rule for rule in rules if self._respects_fixed(node, rule)]
        split = [rule for rule in rules if splits_weight(node, rule.operands)]
        is_product = node.op_class in (OpClass.GEMM, OpClass.GROUPED_GEMM) and node.id not in self._may_be_whole
        return split if split and is_product else [*rules, *self._sums.strategies(node)]

    def _respects_fixed(self, node: Node, rule: OpStrategy) -> bool:
        return all(
            self._fixed.get(operand, placement) == placement
            for operand, placement in zip(node.operands, rule.operands, strict=True)
            if isinstance(operand, str)
        )

    def _redistributions(self, node: Node, native: Placement) -> list[Placement]:
        """Placements the output can have for its users: as it is, or what a module hook makes of it."""
        if not self._module_ended_by(node) or not is_floating(node) or self._degree == 1:
            return [native]
        # A partial sum is reduced where its module ends, unless it passes through all that follows: what does not
        # let it pass would each reduce it again.
        options = dict.fromkeys((native, Replicate(), self._agreed(node)))
        return [option for option in options if not isinstance(option, Partial) or self._passes_on(node)]

    def _passes_on(self, node: Node) -> bool:
        users = self._users.get(node.id, [])
        return bool(users) and all(user in self._sums.values for user in users)

    def _module_ended_by(self, node: Node) -> str:
        """The innermost module whose output this node is: none of its users lies in that module."""
        module = node.module
        users = [self.graph.nodes[user].module for user in self._users.get(node.id, [])]
        if module and not any(user == module or user.startswith(module + ".") for user in users):
            return module
        return ""

    def has_gradient(self, node: Node) -> bool:
        """Whether a gradient of the output flows back, on several ranks."""
        return self._degree > 1 and node.requires_grad and is_floating(node)

    # -- communication ----------------------------------------------------------------------------

    def _of(
        self, node: Node, kind: CollectiveKind, runs_in: Pass, *, times: float = 1.0, follows_batch: bool = True
    ) -> Collectives:
        """A collective of the operator's output."""
        if follows_batch and not node.batch_dependent:
            # What does not follow the batch is redistributed as if it did, each micro-batch a part for each sequence.
            times /= self.graph.batch_size
        return (
            Collective(
                kind,
                self._group,
                Term.TENSOR,
                runs_in,
                Role.PLACEMENT,
                of=(node.id,),
                of_whole=True,
                times=times,
                follows_batch=follows_batch,
                hides=Hides.KERNELS,
                issued_by_host=True,
            ),
        )

    def resharded(self, node: Node, before: Placement, after: Placement) -> Collectives:
        """Forward: a redistribution."""
        if before == after or isinstance(before, Replicate):
            return ()
        if isinstance(before, Partial):
            kind = CollectiveKind.REDUCE_SCATTER if isinstance(after, Shard) else CollectiveKind.ALL_REDUCE
            return self._of(node, kind, Pass.FORWARD)
        if isinstance(after, Shard):
            return self._of(node, CollectiveKind.ALL_TO_ALL, Pass.FORWARD, times=1 / self._degree)
        return self._of(node, CollectiveKind.ALL_GATHER, Pass.FORWARD)

    def returned(self, node: Node, before: Placement, after: Placement) -> Collectives:
        """Backward: a redistribution whose gradient arrives placed like ``after``."""
        if not self.has_gradient(node) or before == after or not isinstance(after, Shard):
            return ()
        if isinstance(before, Shard):
            return self._of(node, CollectiveKind.ALL_TO_ALL, Pass.BACKWARD, times=1 / self._degree)
        return self._of(node, CollectiveKind.ALL_GATHER, Pass.BACKWARD)

    def of_partial_gradient(self, node: Node, native: Placement) -> Collectives:
        """Backward: turning a partial-sum gradient into the placement that the producer needs."""
        kind = CollectiveKind.REDUCE_SCATTER if isinstance(native, Shard) else CollectiveKind.ALL_REDUCE
        return self._of(node, kind, Pass.BACKWARD, follows_batch=node.batch_dependent)

    def _of_parameters(self, node: Node, rule: OpStrategy) -> Collectives:
        """Backward: gradients of parameters that come out as partial sums."""
        found: list[Collective] = []
        for position, operand in enumerate(node.operands):
            if not isinstance(operand, str) or not rule.partial_gradients[position]:
                continue
            parameter = self.graph.parameter_of.get(operand)
            if parameter is not None and parameter.trainable:
                size = parameter.num_elements * ITEM_BYTES[self.graph.dtype]
                (one,) = self._of(node, CollectiveKind.ALL_REDUCE, Pass.BACKWARD, follows_batch=False)
                found.append(replace(one, of=(), fixed_bytes=size))
        return tuple(found)


@dataclass(frozen=True)
class _Feeding:
    """One operand of ``user``, which ``node`` makes."""

    ways: _Ways
    node: Node
    user: Node
    position: int

    def moved(self, before: Alternative, after: Alternative) -> Collectives | None:
        """Collectives of feeding the operand from one alternative to another; None where DTensor won't."""
        wanted = after.operands[self.position]
        partial = after.partial_gradients[self.position] and self._has_gradient
        if before.placement == wanted:
            return None if partial and not before.gradient_is_partial else ()
        if isinstance(wanted, Partial) or not self._is_redistributed(before, after):
            return None
        forward = self._resharded(before.placement, wanted)
        if partial:
            return (*forward, *self.ways.of_partial_gradient(self.node, before.placement))
        return (*forward, *self.ways.returned(self.node, before.placement, wanted))

    @cached_property
    def _has_gradient(self) -> bool:
        return self.ways.has_gradient(self.node)

    @cached_property
    def _is_kept(self) -> bool:
        """Whether autograd keeps what lay there before."""
        nodes = self.ways.graph.nodes
        return any(nodes[saved].storage == self.node.storage for saved in self.user.saves)

    def _resharded(self, before: Placement, wanted: Placement) -> Collectives:
        """What DTensor moves by itself it moves again in the backward pass, where autograd kept what was moved."""
        forward = self.ways.resharded(self.node, before, wanted)
        again = tuple(replace(each, runs_in=Pass.BACKWARD) for each in forward) if self._is_kept else ()
        return forward + again

    def _is_redistributed(self, before: Alternative, after: Alternative) -> bool:
        """Whether DTensor brings the operand from where one alternative leaves it to where the other wants it."""
        user, node = self.user, self.node
        if not has_placement_rule(user):
            return True  # gathered for an operator without a rule
        if not is_redistributed(user):
            return False
        if not isinstance(after.operands[self.position], Shard):
            return not self._works_where_it_lies(before.placement, after)
        return splits_weight(user, after.operands) or prod(node.shape) < prod(user.shape) or not node.batch_dependent

    def _works_where_it_lies(self, placement: Placement, after: Alternative) -> bool:
        """Whether DTensor runs the operator on what each rank has: all but products of split weights follow."""
        if self.user.op_class is OpClass.GEMM and any(isinstance(operand, str) for operand in self.user.operands):
            return isinstance(placement, Shard) and not splits_weight(self.user, after.operands)
        if self.user.op_class is not OpClass.MEMORY_BOUND:
            return False
        return any(rule.operands[self.position] == placement for rule in self.ways.rules(self.user))


def splits_weight(node: Node, placements: tuple[Placement, ...]) -> bool:
    """Whether a parameter among the operands is split."""
    pairs = zip(node.operands, placements, strict=True)
    return any(isinstance(operand, str) and isinstance(placement, Shard) for operand, placement in pairs)
