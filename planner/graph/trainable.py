"""What in a traced model `planner run` cannot train: told when planning, not when running."""

from __future__ import annotations

from planner.graph.model_graph import ModelGraph, Node, OpClass
from planner.operators.record import Trait
from planner.operators.registry import op_name, operator_of


def untrainable(graph: ModelGraph) -> tuple[str, ...]:
    """A sentence for each: inputs beside token ids, and sequences longer than a table of positions."""
    return (*_inputs(graph), *_positions(graph))


def unshared_positions(graph: ModelGraph, num_shards: int) -> tuple[str, ...]:
    """What keeps `planner run` from giving each of ``num_shards`` ranks a shard of a sequence, once a kind: as clauses.

    It answers calls of attention and of ``arange``; what else depends on positions it does not see. It knows an
    ``arange`` over positions by its length, that of a shard.
    """
    length = graph.seq_len // num_shards
    attention = [node for node in graph.nodes if node.op_class is OpClass.ATTENTION]
    other = [op_name(node.op) for node in attention if op_name(node.op) != "scaled_dot_product_attention"]
    masked = [node.module or "its forward" for node in attention if len(node.operands) > 3]
    dropping = [node.module or "its forward" for node in attention if node.attributes.get("dropout_p", 0.0)]
    tables = [node.module or "its forward" for node in graph.nodes if _is_first_of_table(node, graph.seq_len)]
    counted = [
        node.module or "its forward" for node in graph.nodes if op_name(node.op) == "arange" and node.shape == (length,)
    ]
    found = {
        "attention is {}, not scaled_dot_product_attention": other,
        "attention in {} is given a mask of its own": masked,
        "{} drops weights of attention": dropping,
        "{} takes the first positions of a table by a slice, not by torch.arange": tables,
        f"{{}} counts {length} of something else with torch.arange, as many as a rank has positions": counted,
    }
    return tuple(text.format(where[0]) for text, where in found.items() if where)


def _is_first_of_table(node: Node, seq_len: int) -> bool:
    """Whether this is ``table[:seq_len]``; the last dim of a table is no position."""
    if node.batch_dependent or op_name(node.op) != "slice":
        return False
    given = node.attributes
    dim, is_first = given.get("dim", 0), given.get("start") in (None, 0)
    return (
        is_first
        and given.get("end") == seq_len
        and isinstance(dim, int)
        and dim % len(node.shape) < len(node.shape) - 1
    )


def _inputs(graph: ModelGraph) -> list[str]:
    consumers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            if isinstance(operand, int):
                consumers.setdefault(operand, []).append(node)

    def is_label(node: Node) -> bool:
        used_by = consumers.get(node.id, [])
        return bool(used_by) and all(
            operator_of(user.op).has(Trait.TAKES_LABELS) or (user.op_class is OpClass.VIEW and is_label(user))
            for user in used_by
        )

    found = [node for node in graph.nodes if node.op == "input" and not is_label(node)]
    if len(found) == 1 and found[0].dtype == "int64":
        return []
    kinds = ", ".join(f"{node.dtype} {tuple(node.shape)}" for node in found) or "none"
    return [f"planner run trains models whose one input is token ids, not one of {len(found)} inputs yet ({kinds})"]


def _positions(graph: ModelGraph) -> list[str]:
    """Tables that are looked up by ``arange``: positions, from 0 to the last."""
    found: list[str] = []

    def is_arange(operand: int | str | None) -> bool:
        if not isinstance(operand, int):
            return False
        node = graph.nodes[operand]
        if node.op_class is OpClass.VIEW and node.operands:
            return is_arange(node.operands[0])
        return op_name(node.op) == "arange"

    for node in graph.nodes:
        if op_name(node.op) != "embedding" or not isinstance(node.operands[0], str) or not is_arange(node.operands[1]):
            continue
        table = graph.parameter_of.get(node.operands[0])
        if table is not None and table.shape[0] < graph.seq_len <= max(node.shape[:-1], default=0):
            found.append(
                f"planner run will fail: sequences of {graph.seq_len} tokens are longer than the {table.shape[0]} "
                f"positions of {table.fqn}: plan with --seq-len {table.shape[0]}"
            )
    return found
