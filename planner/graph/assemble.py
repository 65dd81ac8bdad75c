"""From nodes and parameters to the whole ModelGraph: blocks, units and sums (no torch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.graph.model_graph import CutPoint, ModelGraph, Node, Parameter, Unit
from planner.graph.units import find_units
from planner.operators.call import TensorValue


@dataclass(frozen=True)
class GraphHeader:
    """What a trace was made of."""

    source: str
    digest: str
    tier: Literal["export", "modules", "config"]
    batch_size: int
    seq_len: int
    dtype: str


def assemble_graph(
    header: GraphHeader,
    nodes: Sequence[Node],
    edges: Sequence[tuple[int, int]],
    parameters: Sequence[Parameter],
    warnings: Sequence[str],
) -> ModelGraph:
    """The graph of ``nodes``, with what follows from them."""
    nodes = with_gradient_sums(without_dead_ends(nodes, edges))
    blocks, units = find_units(nodes, edges, parameters)
    return ModelGraph(
        source=header.source,
        digest=header.digest,
        tier=header.tier,
        num_params=sum(p.num_elements for p in parameters),
        num_trainable_params=sum(p.num_elements for p in parameters if p.trainable),
        batch_size=header.batch_size,
        seq_len=header.seq_len,
        dtype=header.dtype,
        forward_flops=sum(node.flops for node in nodes),
        backward_flops=sum(node.backward_flops for node in nodes),
        saved_activation_bytes=saved_bytes(nodes),
        parameters=tuple(parameters),
        nodes=tuple(nodes),
        edges=tuple(edges),
        blocks=blocks,
        units=units,
        cut_points=cut_points(units, nodes),
        warnings=(*warnings, *_without_gradient(nodes, parameters)),
    )


def _without_gradient(nodes: Sequence[Node], parameters: Sequence[Parameter]) -> tuple[str, ...]:
    """A warning where trainable parameters are in no operator that a gradient flows through."""
    reached = {operand for node in nodes if node.requires_grad for operand in node.operands if isinstance(operand, str)}
    idle = [p.fqn for p in parameters if p.trainable and not reached.intersection(p.names)]
    if not idle:
        return ()
    return (
        f"{len(idle)} trainable parameters get no gradient, the first is {idle[0]}: unused, used under no_grad, or "
        "in a checkpoint with use_reentrant=True whose inputs have no gradient",
    )


def cut_points(units: Sequence[Unit], nodes: Sequence[Node]) -> tuple[CutPoint, ...]:
    """Where a pipeline may cut: behind each unit but the last."""
    return tuple(
        CutPoint(
            after=unit.name,
            node=unit.nodes[-1],
            tensors=unit.boundary,
            num_bytes=sum(TensorValue(nodes[i].shape, nodes[i].dtype).num_bytes for i in unit.boundary),
        )
        for unit in units[:-1]
    )


def without_dead_ends(nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> tuple[Node, ...]:
    """No gradient comes from where the loss does not: what leads elsewhere has no backward, and is freed unused."""
    losses = [node.id for node in nodes if node.requires_grad and node.shape == ()]
    if not losses:
        return tuple(nodes)
    producers: dict[int, list[int]] = {}
    for producer, consumer in edges:
        producers.setdefault(consumer, []).append(producer)
    reached, pending = {losses[-1]}, [losses[-1]]
    while pending:
        for producer in producers.get(pending.pop(), ()):
            if producer not in reached:
                reached.add(producer)
                pending.append(producer)
    return tuple(node if node.id in reached or not node.requires_grad else _without_backward(node) for node in nodes)


def _without_backward(node: Node) -> Node:
    nothing = dict.fromkeys(
        (
            "backward_flops",
            "weight_gradient_flops",
            "recomputed_flops",
            "backward_bytes",
            "saved_extra_bytes",
            "num_backward_kernels",
        ),
        0,
    )
    return node.model_copy(update={**nothing, "saves": (), "requires_grad": False})


def with_gradient_sums(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Where a value has several users, their gradients are added: two reads and a write for each further one."""
    uses = [0] * len(nodes)
    for node in nodes:
        if node.requires_grad and node.op != "getitem":  # the elements of a tuple have gradients of their own
            for operand in node.operands:
                if isinstance(operand, int):
                    uses[operand] += 1
    return tuple(
        _with_sums(node, count - 1) if count > 1 and node.requires_grad else node
        for node, count in zip(nodes, uses, strict=True)
    )


def _with_sums(node: Node, sums: int) -> Node:
    moved = sums * 3 * TensorValue(node.shape, node.dtype).num_bytes
    return node.model_copy(
        update={
            "backward_bytes": node.backward_bytes + moved,
            "num_backward_kernels": node.num_backward_kernels + sums,
        }
    )


def saved_bytes(nodes: Sequence[Node]) -> int:
    """Bytes that autograd keeps for ``nodes``: each storage once, and what is kept besides."""
    output_bytes = {node.id: node.output_bytes for node in nodes}
    storages = {storage for node in nodes for storage in node.saves}
    return sum(output_bytes.get(storage, 0) for storage in storages) + sum(node.saved_extra_bytes for node in nodes)
