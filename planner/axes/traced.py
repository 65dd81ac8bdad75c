"""A unit of the traced model as the passes start with it: whole, on one device, for one sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from planner.axes.lowered import (
    ExpertRows,
    Kernel,
    Loss,
    RankStates,
    RankUnit,
    RankWork,
    State,
    StateKind,
    Tensor,
    Work,
)
from planner.graph.experts import expert_parameters, expert_weight, expert_work
from planner.graph.model_graph import ModelGraph, Node, OpClass, Unit
from planner.graph.node_operators import (
    are_heads_aligned,
    are_sides_aligned,
    is_cast,
    is_causal,
    is_kept_by_selective_recomputation,
    is_loss,
    is_norm,
    num_scores,
    runs_in_eight_bits,
)
from planner.operators.call import FLOATING, ITEM_BYTES
from planner.operators.registry import op_name


def representatives(graph: ModelGraph) -> list[Unit]:
    """The first unit of each kind, in order of appearance."""
    seen: dict[int, Unit] = {}
    for unit in graph.units:
        seen.setdefault(unit.kind, unit)
    return list(seen.values())


def whole_work(graph: ModelGraph, unit: Unit) -> RankWork:
    """The work of ``unit``, nothing split."""
    nodes = [graph.nodes[i] for i in unit.nodes]
    inside = set(unit.nodes)
    entering = {
        graph.nodes[o].storage
        for node in nodes
        for o in node.operands
        if isinstance(o, int) and o not in inside and is_floating(graph.nodes[o])
    }
    loss = _loss(graph, nodes)
    # Who trains in 8 bits leaves the product that makes the logits in 16: Megatron-LM's output layer is none of
    # Transformer Engine's (megatron/core/models/gpt/gpt_model.py), and torchtitan's configs for float8 leave it out.
    kernels = tuple(
        replace(kernel, is_eight_bit=False) if loss is not None and kernel.id == loss.head else kernel
        for kernel in (kernel_of(graph, node) for node in nodes)
    )
    known = {*inside, *entering, *unit.boundary}
    known.update(i for kernel in kernels for i in (*kernel.inputs, *kernel.saves, kernel.storage))
    experts = _experts(graph, unit)
    if experts is not None:
        known.update(experts.dispatched)
    return RankWork(
        RankUnit(
            kernels=kernels,
            tensors=tensors_of(graph, known),
            entering=frozenset(entering),
            boundary=dict.fromkeys(unit.boundary, 1.0),
            is_block=unit.is_block,
            loss=loss,
            experts=experts,
        )
    )


def whole_states(graph: ModelGraph) -> list[RankStates]:
    """The parameters of one unit of each kind, nothing split."""
    of_experts = expert_parameters(graph)

    def state(fqn: str, kind: StateKind | None = None) -> State:
        parameter = graph.parameter_of[fqn]
        trained = StateKind.EXPERT if fqn in of_experts else StateKind.DENSE
        found = kind or (trained if parameter.trainable else StateKind.FROZEN)
        return State(parameter.names, found, float(parameter.num_elements))

    return [
        RankStates(
            (
                *(state(fqn) for fqn in unit.parameters),
                *(state(fqn, StateKind.TIED) for fqn in unit.tied_parameters),
            )
        )
        for unit in representatives(graph)
    ]


def kernel_of(graph: ModelGraph, node: Node) -> Kernel:
    """The operator ``node`` for one sequence."""
    per_sequence = 1 / graph.batch_size if node.batch_dependent else 1.0
    # A parameter is read for the input's gradient, and its own gradient is written.
    forward = _work(node.flops, node.bytes_read + node.bytes_written, node.param_bytes_read, node.num_kernels)
    backward = _work(node.backward_flops, node.backward_bytes, 2 * node.param_bytes_read, node.num_backward_kernels)
    is_attention = node.op_class is OpClass.ATTENTION
    is_view = node.op_class is OpClass.VIEW
    return Kernel(
        id=node.id,
        operator=op_name(node.op),
        op_class=OpClass.MEMORY_BOUND if is_view else node.op_class,
        is_view=is_view,
        is_kept_product=is_kept_by_selective_recomputation(node),
        is_eight_bit=runs_in_eight_bits(node),
        forward=_of_sequence(forward, per_sequence),
        backward=_of_sequence(backward, per_sequence),
        weight_gradient_flops=node.weight_gradient_flops * per_sequence,
        scores=num_scores(node, graph) * per_sequence if is_attention else 0.0,
        query_rows=prod(node.shape[:-1]) * per_sequence if is_attention else 0.0,
        norm_elements=prod(node.shape) * per_sequence if is_norm(node) else 0.0,
        inputs=tuple(o for o in node.operands if isinstance(o, int)),
        keys_and_values=tuple(o for o in node.operands[1:3] if isinstance(o, int)) if is_attention else (),
        storage=node.storage,
        saves=tuple(dict.fromkeys(graph.nodes[i].storage for i in node.saves)),
        saved_extra_bytes=node.saved_extra_bytes * per_sequence,
        follows_batch=node.batch_dependent,
        is_aligned=are_heads_aligned(node, graph) if is_attention else are_sides_aligned(node, graph),
        is_causal=is_attention and is_causal(node),
    )


def tensors_of(graph: ModelGraph, ids: Iterable[int]) -> dict[int, Tensor]:
    """The outputs of these operators, whole."""
    return {i: _tensor(graph.nodes[i], graph.batch_size) for i in sorted(ids)}


def is_floating(node: Node) -> bool:
    """Whether the output is a floating-point tensor."""
    return node.dtype in FLOATING


def _tensor(node: Node, batch_size: int) -> Tensor:
    size = prod(node.shape) * ITEM_BYTES[node.dtype] / (batch_size if node.batch_dependent else 1)
    return Tensor(node.id, size, size, size, ITEM_BYTES[node.dtype], is_floating(node), node.batch_dependent)


def _work(flops: float, moved_bytes: float, parameter_bytes: float, launches: int) -> Work:
    of_parameters = min(parameter_bytes, moved_bytes)
    return Work(flops, moved_bytes - of_parameters, of_parameters, launches)


def _of_sequence(work: Work, per_sequence: float) -> Work:
    """Parameters are read whole however small the micro-batch is."""
    return Work(work.flops * per_sequence, work.moved_bytes * per_sequence, work.weight_bytes, work.launches)


def _loss(graph: ModelGraph, nodes: list[Node]) -> Loss | None:
    """The loss, and the casts and views before it: a framework's facts count their gradients as the logits'."""
    loss = next((node for node in nodes if is_loss(node)), None)
    if loss is None:
        return None
    copies: set[int] = set()
    node: Node | None = loss
    while node is not None and (node is loss or node.op_class is OpClass.VIEW or is_cast(node)):
        copies.add(node.id)
        node = next((graph.nodes[o] for o in node.operands if isinstance(o, int)), None)
    logits = next(o for o in loss.operands if isinstance(o, int))
    return Loss(loss.id, logits, frozenset(copies), None if node is None else node.id)


def _experts(graph: ModelGraph, unit: Unit) -> ExpertRows | None:
    work = expert_work(graph, unit)
    if work is None:
        return None
    rows = graph.nodes[work.dispatched[0]].shape[0] / (graph.batch_size * graph.seq_len)
    counts = expert_parameters(graph)
    weights = (expert_weight(graph.nodes[i], graph) for i in work.inside)
    most_experts = max((counts[fqn] for fqn in weights if fqn in counts), default=0)
    return ExpertRows(frozenset(work.inside), work.dispatched, work.combined, rows, most_experts)
