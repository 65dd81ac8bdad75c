"""The strategies of the operators of one unit: those of their rules, and what experts add or put in their place."""

from __future__ import annotations

from collections.abc import Collection

from planner.axes.fused_gates import fused_gate_strategies
from planner.axes.whole_experts import TokenSplit
from planner.graph.model_graph import ModelGraph, Node, Unit
from planner.graph.node_operators import strategies
from planner.operators.placement_rules import OpStrategy
from planner.table.keys import TensorSplit


class UnitRules:
    """Strategies of each operator of ``unit``; partial sums of experts stand apart.

    ``splits_fused``: gate and up projection of experts that are one parameter are split each for itself. ``whole``:
    node ids of matrix products that a rank may do whole; all others are split wherever their weight's dims divide.
    """

    def __init__(
        self, graph: ModelGraph, unit: Unit, split: TensorSplit, *, splits_fused: bool, whole: Collection[int] = ()
    ) -> None:
        self._graph, self._split, self.whole = graph, split, whole
        self.own_tokens = TokenSplit(graph, unit, split)
        self._fused = fused_gate_strategies(graph, unit, split) if splits_fused else {}
        self._known: dict[int, list[OpStrategy]] = {}

    def of(self, node: Node) -> list[OpStrategy]:
        """Strategies of the operator's rule; where experts are whole, those of a rank's own tokens."""
        if node.id not in self._known:
            own = self.own_tokens.strategies(node)
            every = [*strategies(node, self._graph, self._split.tp), *self._fused.get(node.id, ())]
            self._known[node.id] = every if own is None else own
        return self._known[node.id]
