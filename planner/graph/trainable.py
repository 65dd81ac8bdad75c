"""What in a traced model `planner run` cannot train, or nobody can: told when planning, not when running."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.vocabulary.choices import Shard
from planner.errors import InputError
from planner.graph.model_graph import ModelGraph, Node, OpClass
from planner.graph.node_operators import strategies
from planner.operators.record import Trait
from planner.operators.registry import base_of, op_name, operator_of


def untrainable(graph: ModelGraph) -> tuple[str, ...]:
    """A sentence for each: inputs beside token ids."""
    return tuple(_inputs(graph))


def changing_buffers(graph: ModelGraph) -> tuple[str, ...]:
    """Modules whose forward pass writes to a tensor that was there before: one that is no parameter, a buffer."""
    found = [
        node.module or "the model"
        for node in graph.nodes
        if node.operands and node.operands[0] is None and base_of(op_name(node.op)) != op_name(node.op)
    ]
    return tuple(dict.fromkeys(found))


def check_positions(graph: ModelGraph) -> None:
    """InputError where sequences are longer than a table of positions: the forward pass would look beyond its end."""
    for node in graph.nodes:
        looked_in, at = node.operands[:2] if len(node.operands) >= 2 else (None, None)
        if not operator_of(node.op).has(Trait.LOOKS_UP) or not isinstance(looked_in, str):
            continue
        table, last = graph.parameter_of.get(looked_in), _last_position(graph, at)
        if table is not None and last is not None and last >= table.shape[0]:
            longest = table.shape[0] - (last + 1 - graph.seq_len)
            raise InputError(
                f"sequences of {graph.seq_len} tokens are longer than the {longest} positions of {table.fqn}",
                hint=f"give --seq-len {longest} or less, or build the model with more positions",
            )


def _last_position(graph: ModelGraph, operand: int | str | None) -> int | None:
    """The largest of numbers that count up along a sequence; None where ``operand`` does something else."""
    if not isinstance(operand, int):
        return None
    node = graph.nodes[operand]
    name, given = op_name(node.op), node.attributes
    if name == "arange":
        start = given.get("start") or 0
        if node.shape != (graph.seq_len,) or given.get("step") not in (None, 1) or not isinstance(start, int):
            return None
        return start + graph.seq_len - 1
    if len(node.operands) != 1:
        return None
    before = _last_position(graph, node.operands[0])
    if name == "add":
        added = given.get("other")
        return before + added if before is not None and isinstance(added, int) else None
    return before if node.op_class is OpClass.VIEW or name == "repeat" else None


def unshared_positions(graph: ModelGraph, num_shards: int) -> tuple[str, ...]:
    """What keeps `planner run` from giving each of ``num_shards`` ranks a shard of a sequence, once a kind: as clauses.

    It answers calls of attention and of ``arange``; what else depends on positions it does not see. It knows an
    ``arange`` over positions by its length, that of a shard.
    """
    length = graph.seq_len // num_shards
    attention = [node for node in graph.nodes if node.op_class is OpClass.ATTENTION]
    plain = [node for node in attention if op_name(node.op) == "scaled_dot_product_attention"]
    other = [op_name(node.op) for node in attention if node not in plain and not operator_of(node.op).has(Trait.CAUSAL)]
    masked = [node.module or "its forward" for node in plain if len(node.operands) > 3]
    dropping = [node.module or "its forward" for node in attention if node.attributes.get("dropout_p", 0.0)]
    tables = [node.module or "its forward" for node in graph.nodes if _is_first_of_table(node, graph.seq_len)]
    counted = [
        node.module or "its forward" for node in graph.nodes if op_name(node.op) == "arange" and node.shape == (length,)
    ]
    along = [f"{op_name(node.op)} {_place_of(node)}" for node in graph.nodes if _runs_along(node, graph, num_shards)]
    tokens = [node for node in graph.nodes if node.op == "input" and node.shape == (graph.batch_size, graph.seq_len)]
    left_out = " (planner.parallelize leaves out a batch's attention_mask where it is all ones)" if tokens[2:] else ""
    found = {
        "attention is {}, not scaled_dot_product_attention": other,
        f"attention in {{}} is given a mask of its own{left_out}": masked,
        "{} drops weights of attention": dropping,
        "{} takes the first positions of a table by a slice, not by torch.arange": tables,
        f"{{}} counts {length} of something else with torch.arange, as many as a rank has positions": counted,
        "{} takes positions of a sequence together, or some of them": along,
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


def _place_of(node: Node) -> str:
    return f"at {node.source}" if node.source else "in loss_fn"


def _runs_along(node: Node, graph: ModelGraph, num_shards: int) -> bool:
    """Whether the dim that the operator is told is the sequence's, known by its length, and may not be divided."""
    dims, counts = node.attributes.get("dim"), op_name(node.op) == "cumsum"  # ones, to number positions
    if dims is None or not (node.batch_dependent or counts):
        return False
    for place, operand in enumerate(node.operands):
        shape = graph.nodes[operand].shape if isinstance(operand, int) else ()
        takes_all = node.op_class is OpClass.VIEW and node.shape == shape
        if shape.count(graph.seq_len) != 1 or takes_all or len(node.shape) > len(shape):  # a new dim is none of these
            continue
        at = shape.index(graph.seq_len)
        told = [dim % len(shape) for dim in (dims if isinstance(dims, Sequence) else [dims]) if isinstance(dim, int)]
        if at in told and all(rule.operands[place] != Shard(at) for rule in strategies(node, graph, num_shards)):
            return True
    return False


def _inputs(graph: ModelGraph) -> list[str]:
    consumers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            if isinstance(operand, int):
                consumers.setdefault(operand, []).append(node)

    def is_label(node: Node) -> bool:
        """Whether no parameter has a part in what comes of it: labels, which are there also where no loss wants any."""
        left, seen = [node.id], {node.id}
        while left:
            users = consumers.get(left.pop(), [])
            if any(isinstance(operand, str) for user in users for operand in user.operands):
                return False
            new = {user.id for user in users} - seen
            left += new
            seen |= new
        return True

    inputs = [node for node in graph.nodes if node.op == "input"]
    labels = [node for node in inputs if is_label(node)]
    found = [node for node in inputs if node not in labels[:1]]
    if len(found) == 1 and found[0].dtype == "int64":
        return []
    kinds = ", ".join(f"{node.dtype} {tuple(node.shape)}" for node in found) or "none"
    return [
        f"planner run trains models whose one input is token ids, and this one takes {kinds}: "
        "train it with planner.parallelize in a script of your own"
    ]
