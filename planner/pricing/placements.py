"""The integer program of placing a unit's operators, and the decisions for all units of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import numpy as np

from costmodels.vocabulary.choices import Placement, Shard
from planner.axes.dead_ends import dead_ends
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Kernel
from planner.axes.placement import Alternatives, Collectives, UnitPlacement, alternatives, decision
from planner.axes.traced import representatives
from planner.axes.unit_rules import UnitRules
from planner.errors import InputError
from planner.graph.model_graph import ModelGraph
from planner.layout.decided import Decided
from planner.pricing.kernels import kernel_times
from planner.pricing.machine import Machine
from planner.problems import PlacementProblem, PlacementSolution
from planner.table.keys import TensorSplit

Decision = tuple[UnitPlacement, ...]  # one a unit kind, in order of appearance
_Key = frozenset[tuple[str, Placement]]
Solve = Callable[[PlacementProblem], PlacementSolution | None]

_NS = 1e9
# Of one operator and one sequence: no real one takes a day, and the sum over a model's fits into 64 bits.
MOST_OPERATOR_S = 1e5


def placement_problem(ways: Alternatives, machine: Machine, framework: Framework) -> PlacementProblem:
    """The program in numbers: nanoseconds of one sequence.

    No communication is hidden here, and links are as fast as the profile says. A recipe's facts about both were found
    for whole runs, and nobody knows that they hold for one placement more than for another.
    """
    prices = _Prices(ways, machine, framework)
    return PlacementProblem(
        tuple(
            tuple(prices.of(way.collectives) + prices.of_kernel(way.kernel) for way in operator.alternatives)
            for operator in ways.operators
        ),
        tuple(
            (
                edge.source,
                edge.target,
                tuple(tuple(None if moved is None else prices.of(moved) for moved in row) for row in edge.collectives),
            )
            for edge in ways.edges
        ),
    )


def decide(
    graph: ModelGraph,
    split: TensorSplit,
    decided: Decided,
    machine: Machine,
    framework: Framework,
    solve: Solve,
) -> Decision | None:
    """Solves the placement program of every unit kind; None where one has no solution.

    Goes from the last kind to the first, so that the head decides for an embedding tied to it.
    """
    parameters, outputs = dict(decided.parameters), decided.outputs
    in_pieces = any(isinstance(each, Shard) and each.pieces > 1 for each in parameters.values())
    splits_fused = framework.recipe.splits_fused_gates or in_pieces
    found: list[UnitPlacement] = []

    def solved(ways: Alternatives) -> PlacementSolution | None:
        return solve(placement_problem(ways, machine, framework)) if ways.is_possible else None

    for unit in reversed(representatives(graph)):
        of_unit = partial(
            _ways,
            _SameGraph(graph),
            unit.kind,
            split,
            (_key(parameters), None if outputs is None else _key(outputs)),
            splits_fused=splits_fused,
        )
        ways = of_unit()
        solution = solved(ways)
        if solution is None and (closed := dead_ends(ways)):
            ways = of_unit(whole=closed)
            solution = solved(ways)
        if solution is None:
            return None
        placement = decision(ways, solution)
        found.append(placement)
        for fqn, own in placement.parameters.items():
            parameter = graph.parameter_of[fqn]
            if parameter.aliases or fqn in unit.tied_parameters:  # an earlier unit has it too
                parameters.update(dict.fromkeys(parameter.names, own))
    return tuple(reversed(found))


def _key(placements: Mapping[str, Placement]) -> _Key:
    return frozenset(placements.items())


class _SameGraph:
    """A graph that is looked up by what it is, not by what is in it: it has thousands of operators."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph.nodes)

    def __eq__(self, other: object) -> bool:
        """A copy under another name of its source has the same operators."""
        return (
            isinstance(other, _SameGraph)
            and other.graph.nodes is self.graph.nodes
            and other.graph.units is self.graph.units
            and other.graph.parameters is self.graph.parameters
        )


@lru_cache(maxsize=128)  # a few models in every split: who compares frameworks asks for each again and again
def _ways(
    same: _SameGraph,
    kind: int,
    split: TensorSplit,
    given: tuple[_Key, _Key | None],
    *,
    splits_fused: bool,
    whole: frozenset[int] = frozenset(),
) -> Alternatives:
    """The ways to place a unit of that kind, whatever the machine.

    ``given``: parameters and outputs of modules that are decided. ``whole``: products that need not be split.
    """
    graph, (parameters, outputs) = same.graph, given
    unit = next(each for each in representatives(graph) if each.kind == kind)
    decided = Decided(dict(parameters), None if outputs is None else dict(outputs))
    rules = UnitRules(graph, unit, split, splits_fused=splits_fused, whole=whole)
    return alternatives(graph, unit, split, decided, rules)


class _Prices:
    """Prices of kernels and collectives, each worked out once."""

    def __init__(self, ways: Alternatives, machine: Machine, framework: Framework) -> None:
        self._machine, self._tensors = machine, ways.tensors
        kernels = {id(way.kernel): way.kernel for each in ways.operators for way in each.alternatives if way.kernel}
        times = kernel_times(list(kernels.values()), np.ones(1), machine, framework)
        both_s = times.forward_s[0] + times.backward_s[0]
        self._kernels_ns = {key: _nanoseconds(seconds) for key, seconds in zip(kernels, both_s.tolist(), strict=True)}
        self._seconds: dict[Collective, float] = {}

    def of_kernel(self, kernel: Kernel | None) -> int:
        """Forward and backward together."""
        return 0 if kernel is None else self._kernels_ns[id(kernel)]

    def of(self, collectives: Collectives) -> int:
        """Of collectives that run one after the other."""
        return _nanoseconds(sum(self._collective_s(each) for each in collectives))

    def _collective_s(self, collective: Collective) -> float:
        alike = collective
        if alike not in self._seconds:
            num_bytes = np.array([collective.num_bytes(self._tensors)])
            self._seconds[alike] = float(self._machine.collective_s(collective, num_bytes)[0])
        return self._seconds[alike]


def _nanoseconds(seconds: float) -> int:
    if not seconds <= MOST_OPERATOR_S:
        raise InputError(
            f"one operator takes {seconds:g} s for one sequence by this model, profile and recipe, and may take "
            f"{MOST_OPERATOR_S:g} s at most",
            hint="is there a digit too many in the profile or the model's sizes?",
        )
    return round(seconds * _NS)
