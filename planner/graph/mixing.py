"""Operators of a forward pass that mix the samples of a batch: where it is divided, each part sees its own alone.

The samples are followed from the inputs through every operator by what its record says of them
(``planner.operators.sample_rules``). Found is an operator of the model that lets a sample's row depend on the others,
or that puts all of them together (a mean over the batch) for a row to use. What stays together, such as a balance
loss, is a loss and adds up as losses do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.graph.model_graph import Node
from planner.operators.call import FLOATING
from planner.operators.registry import op_name, operator_of
from planner.operators.sample_rules import LOST, NONE, Kind, Passed, Samples, Taken

NUM_NAMED = 3


def mixing_warnings(
    nodes: Sequence[Node],
    edges: Sequence[tuple[int, int]],
    shapes: Mapping[str, tuple[int, ...]],
    batch_size: int,
    of_loss: Collection[int],
) -> tuple[str, ...]:
    """What to say of ``nodes``; ``shapes`` are those of parameters, ``of_loss`` the nodes outside the model."""
    if batch_size < 2:  # a dim of one element may be any
        return ()
    counted = _leading_to_loss(nodes, edges).difference(of_loss)
    found = _Followed(nodes, shapes, batch_size).mixing(counted)
    places = tuple(dict.fromkeys(_place(node) for node in found))
    if not places:
        return ()
    more = f" and {len(places) - NUM_NAMED} more" if len(places) > NUM_NAMED else ""
    verb = "mix" if len(places) > 1 else "mixes"
    return (
        f"{', '.join(places[:NUM_NAMED])}{more} {verb} the samples of a batch: under data parallelism and in "
        "micro-batches (pipelines, gradient accumulation) each part sees its own samples alone, so that the model "
        "trains otherwise than in one process that takes all at once; planner parity shows by how much",
    )


def _leading_to_loss(nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Ids of the nodes whose numbers, not just what is chosen by them, are part of the loss."""
    losses = [node.id for node in nodes if node.requires_grad and node.shape == ()]
    reached = set(losses[-1:])
    for producer, consumer in sorted(edges, key=lambda edge: edge[1], reverse=True):
        if consumer in reached and nodes[producer].dtype in FLOATING:
            reached.add(producer)
    return frozenset(reached)


def _place(node: Node) -> str:
    return f"{op_name(node.op)} ({node.source or node.module or 'the forward pass'})"


@dataclass(frozen=True)
class _Followed:
    """A trace, from whose inputs the samples are followed."""

    nodes: Sequence[Node]
    shapes: Mapping[str, tuple[int, ...]]
    batch_size: int

    def mixing(self, counted: Collection[int]) -> list[Node]:
        """The nodes that mix samples, in order, where those in ``counted`` take or make what is mixed."""
        samples: list[Samples] = []
        found: dict[int, Node] = {}
        for node in self.nodes:
            operands = [samples[operand] if isinstance(operand, int) else NONE for operand in node.operands]
            passed = self._passed(node, operands)
            is_floating = node.dtype in FLOATING
            if passed.mixes and is_floating and node.id in counted:
                together = next((operand.at for operand in operands if operand.kind is Kind.ALL), node.id)
                found[together] = self.nodes[together]
            samples.append(self._known(node, operands, passed.samples))
        return [found[at] for at in sorted(found)]

    def _passed(self, node: Node, operands: Sequence[Samples]) -> Passed:
        if node.op == "input":
            is_batch = node.shape[:1] == (self.batch_size,)
            return Passed(Samples(Kind.EACH) if is_batch else LOST)
        if not node.batch_dependent:
            return Passed(NONE)
        rule = operator_of(node.op).samples
        if rule is None or all(operand.kind is Kind.NONE for operand in operands):
            return Passed(LOST)
        shapes = tuple(self._shape(operand) for operand in node.operands)
        taken = Taken(shapes, tuple(operands), node.shape, node.attributes, self.batch_size, None in node.operands)
        try:
            return rule(taken)
        except (IndexError, KeyError, ValueError):  # a form that the rule does not know, as ``where`` of a mask alone
            return Passed(LOST)

    def _known(self, node: Node, operands: Sequence[Samples], samples: Samples) -> Samples:
        """``samples`` with what a rule need not say: whether they are choices, and where they were put together."""
        is_floating = node.dtype in FLOATING
        has_parameter = any(isinstance(operand, str) for operand in node.operands)
        is_chosen = not is_floating or (not has_parameter and any(operand.is_chosen for operand in operands))
        if samples.kind is Kind.ALL:
            if is_chosen:
                return LOST
            return replace(samples, at=next((o.at for o in operands if o.kind is Kind.ALL), node.id))
        return replace(samples, is_chosen=is_chosen)

    def _shape(self, operand: int | str | None) -> tuple[int, ...]:
        if isinstance(operand, int):
            return self.nodes[operand].shape
        return () if operand is None else self.shapes.get(operand, ())
