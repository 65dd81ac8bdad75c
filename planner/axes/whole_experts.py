"""Layers of experts that are whole on a rank beside tensor parallelism: each rank routes its own part of a sequence.

All that lies between the tokens that enter such a layer and those that leave it works on 1 / tp of the tokens, with
whole parameters: the router, the sorting of rows by expert, the experts, the way back into the tokens' order. Nothing
is reduced or gathered over the tp ranks but the gradients of the router. Shared experts, which every token takes, are
placed as any product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

from costmodels.vocabulary.choices import Placement, Replicate, Shard
from planner.axes.lowered import Collective
from planner.graph.experts import expert_weight, expert_work
from planner.graph.model_graph import ModelGraph, Node, Unit
from planner.operators.placement_rules import OpStrategy
from planner.table.keys import TensorSplit


class TokenSplit:
    """Which operators of a unit work on a rank's own tokens; none where experts are split as all else is."""

    def __init__(self, graph: ModelGraph, unit: Unit, split: TensorSplit) -> None:
        self._graph, self._split = graph, split
        self._num_tokens = graph.batch_size * graph.seq_len
        self._nodes = frozenset[int]() if split.etp is None else self._between(unit)
        others = [node for node in unit.nodes if node not in self._nodes] if self._nodes else []
        self._uses = Counter(operand for node in others for operand in graph.nodes[node].operands)

    def strategies(self, node: Node) -> list[OpStrategy] | None:
        """The one way to run ``node`` on a rank's own tokens; None where its own rules say how it runs."""
        if node.id not in self._nodes:
            return None
        output = self._of_own_tokens(node)
        operands = tuple(self._operand(operand) for operand in node.operands)
        is_split = isinstance(output, Shard) or any(isinstance(each, Shard) for each in operands)
        experts = expert_weight(node, self._graph)
        summed = tuple(isinstance(o, str) and experts is None and is_split for o in node.operands)
        return [OpStrategy(operands, output, 1 / self._split.tp if is_split else 1.0, summed)]

    def agreed(self, node: Node) -> Placement | None:
        """How tokens lie between such operators and others; None where nothing says so."""
        is_flat = bool(self._nodes) and len(node.shape) == 2 and node.shape[0] == self._num_tokens
        return Shard(0) if is_flat and node.batch_dependent else None

    def moved_once(self, node: Node, collectives: tuple[Collective, ...] | None) -> tuple[Collective, ...] | None:
        """Part of what brings ``node`` to one operator of shared experts: one gather serves all of them."""
        if not collectives or node.id not in self._nodes or not self._uses[node.id]:
            return collectives
        return tuple(replace(each, times=each.times / self._uses[node.id]) for each in collectives)

    def _operand(self, operand: int | str | None) -> Placement:
        if not isinstance(operand, int):
            return Replicate()
        node = self._graph.nodes[operand]
        is_known = operand in self._nodes or self._is_whole_sequence(node) or node.requires_grad
        return self._of_own_tokens(node) if is_known else Replicate()

    def _of_own_tokens(self, node: Node) -> Placement:
        if self._is_whole_sequence(node):
            return Shard(1)
        return Shard(0) if node.shape and node.shape[0] and node.shape[0] % self._num_tokens == 0 else Replicate()

    def _is_whole_sequence(self, node: Node) -> bool:
        """(batch, sequence, ...), as activations lie between the layers of a block."""
        return len(node.shape) >= 3 and prod(node.shape[:2]) == self._num_tokens and node.batch_dependent

    def _between(self, unit: Unit) -> frozenset[int]:
        """From the tokens that enter the layer to those that leave it."""
        work = expert_work(self._graph, unit)
        if work is None:
            return frozenset()
        nodes, inside = self._graph.nodes, set(unit.nodes)
        users: dict[int, list[int]] = {}
        for i in unit.nodes:
            for operand in nodes[i].operands:
                if isinstance(operand, int):
                    users.setdefault(operand, []).append(i)

        def onwards(i: int) -> Iterable[int]:
            return () if self._is_whole_sequence(nodes[i]) else users.get(i, ())

        def backwards(i: int) -> Iterable[int]:
            made_of = (o for o in nodes[i].operands if isinstance(o, int) and o in inside)
            return (o for o in made_of if not self._is_whole_sequence(nodes[o]))

        behind = _reached(work.inside, onwards)
        rows = {nodes[i].shape[0] for i in work.inside}
        before = _reached((i for i in behind if nodes[i].shape[:1] and nodes[i].shape[0] in rows), backwards)
        return frozenset(behind | before)


def _reached(starts: Iterable[int], steps: Callable[[int], Iterable[int]]) -> set[int]:
    found: set[int] = set()
    open_nodes = list(starts)
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            open_nodes += steps(node)
    return found
