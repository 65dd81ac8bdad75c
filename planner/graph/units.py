"""The pieces a pipeline may not cut: each block, and what lies before, between and after.

Where repeated blocks are not most of a model, the modules that its work divides into stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.graph.blocks import BlockFinder, ModuleTree, ancestors
from planner.graph.model_graph import Block, Node, Parameter, Unit
from planner.graph.pieces import find_pieces
from planner.graph.signature import Signature, signature_of


@dataclass(frozen=True)
class _Range:
    """Nodes ``first`` to ``stop`` - 1 as one unit."""

    name: str
    first: int
    stop: int
    block: str | None = None


def find_units(
    nodes: Sequence[Node], edges: Sequence[tuple[int, int]], parameters: Sequence[Parameter]
) -> tuple[tuple[Block, ...], tuple[Unit, ...]]:
    """Partitions nodes, parameters and modules; ``blocks`` are the repeated ones by kind."""
    by_name = {name: p for p in parameters for name in p.names}
    tree = ModuleTree.of(nodes, parameters)
    consumers: dict[int, list[int]] = {}
    for producer, consumer in edges:
        consumers.setdefault(producer, []).append(consumer)
    finder = BlockFinder(nodes, by_name, tree, consumers)
    blocks = finder.find()
    pieces = blocks if finder.dominates(blocks) else find_pieces(nodes, consumers, tree, blocks)
    ranges = _ranges(nodes, pieces, tree)
    unit_of_node = [index for index, piece in enumerate(ranges) for _ in range(piece.first, piece.stop)]
    owners = _parameter_owners(nodes, parameters, by_name, unit_of_node, tree)
    modules = _maximal_modules(parameters, owners, unit_of_node, tree)
    boundaries = _boundaries(nodes, consumers, ranges)
    kinds: dict[Signature, int] = {}
    units = tuple(
        Unit(
            name=piece.name,
            kind=kinds.setdefault(_unit_signature(piece, nodes, by_name), len(kinds)),
            modules=tuple(module for module, owner in modules.items() if owner == index),
            nodes=tuple(range(piece.first, piece.stop)),
            parameters=tuple(p.fqn for p in parameters if owners[p.fqn] == index),
            tied_parameters=_tied(piece, index, nodes, by_name, owners),
            is_block=piece.block is not None,
            boundary=boundaries[index],
        )
        for index, piece in enumerate(ranges)
    )
    kinds_of_blocks: dict[Signature, list[str]] = {}
    for block in blocks:
        kinds_of_blocks.setdefault(signature_of(tree.node_ids[block], nodes, by_name, block), []).append(block)
    return tuple(Block(modules=tuple(names), count=len(names)) for names in kinds_of_blocks.values()), units


def _ranges(nodes: Sequence[Node], blocks: Sequence[str], tree: ModuleTree) -> tuple[_Range, ...]:
    """Contiguous ranges of nodes: ``pre``, the blocks with ``glue`` between them, ``post``.

    What has no weights joins the block before it (before the first, that one): it could be no stage.
    """
    if not blocks:
        return (_Range("model", 0, len(nodes)),)
    spans = [tree.span(block) for block in blocks]
    starts = [first for first, _ in spans[1:]]
    stops = [last + 1 for _, last in spans[:-1]]
    ranges = [_Range("pre", 0, spans[0][0])] if _has_weights(nodes[: spans[0][0]]) else []
    first = ranges[-1].stop if ranges else 0
    glue: Sequence[Node] = ()
    for block, stop, next_first in zip(blocks, stops, starts, strict=False):
        between = nodes[stop:next_first]
        if _has_weights(between):
            ranges.append(_Range(block, first, stop, block))
            ranges.append(_Range(f"glue.{sum(r.block is None for r in ranges)}", stop, next_first))
            glue = ()
        else:
            ranges.append(_Range(block, first, next_first, block))
            glue = between
        first = next_first
    stop = spans[-1][1] + 1
    if [node.op for node in nodes[stop : stop + len(glue)]] == [node.op for node in glue]:
        stop += len(glue)
    has_post = _has_weights(nodes[stop:])
    ranges.append(_Range(blocks[-1], first, stop if has_post else len(nodes), blocks[-1]))
    return (*ranges, _Range("post", stop, len(nodes))) if has_post else tuple(ranges)


def _has_weights(nodes: Sequence[Node]) -> bool:
    return any(isinstance(operand, str) for node in nodes for operand in node.operands)


def _parameter_owners(
    nodes: Sequence[Node],
    parameters: Sequence[Parameter],
    by_name: Mapping[str, Parameter],
    unit_of_node: Sequence[int],
    tree: ModuleTree,
) -> dict[str, int]:
    """The unit that first uses each parameter; an unused one goes where its nearest module runs."""
    owners: dict[str, int] = {}
    for node in nodes:
        for operand in node.operands:
            if isinstance(operand, str):
                owners.setdefault(by_name[operand].fqn, unit_of_node[node.id])
    for parameter in parameters:
        if parameter.fqn not in owners:
            path = reversed(ancestors(parameter.fqn.rpartition(".")[0]))
            nearest = next(module for module in path if tree.node_ids[module])
            owners[parameter.fqn] = unit_of_node[tree.node_ids[nearest][-1]]
    return owners


def _maximal_modules(
    parameters: Sequence[Parameter], owners: Mapping[str, int], unit_of_node: Sequence[int], tree: ModuleTree
) -> dict[str, int]:
    """Modules that lie wholly in one unit and whose parent does not, with that unit."""
    units: dict[str, set[int]] = {
        module: {unit_of_node[node_id] for node_id in ids} for module, ids in tree.node_ids.items()
    }
    direct: dict[str, int] = {}
    for parameter in parameters:
        for module in ancestors(parameter.fqn.rpartition(".")[0]):
            units[module].add(owners[parameter.fqn])
        direct.setdefault(parameter.fqn.rpartition(".")[0], owners[parameter.fqn])
    found: dict[str, int] = {}
    pending = list(reversed(tree.children[""])) or [""]
    while pending:
        module = pending.pop()
        if len(units[module]) == 1:
            found[module] = next(iter(units[module]))
        elif tree.children[module]:
            pending.extend(reversed(tree.children[module]))
        elif module in direct:  # called from several units: it belongs where its parameters do
            found[module] = direct[module]
    return found


def _boundaries(
    nodes: Sequence[Node], consumers: Mapping[int, Sequence[int]], ranges: Sequence[_Range]
) -> tuple[tuple[int, ...], ...]:
    """What is alive after each range and derives from parameters: the rest any stage can compute itself."""
    derives = [False] * len(nodes)
    for node in nodes:
        derives[node.id] |= any(isinstance(operand, str) for operand in node.operands)
        if derives[node.id]:
            for consumer in consumers.get(node.id, ()):
                derives[consumer] = True
    last_use = {producer: max(users) for producer, users in consumers.items()}
    alive: list[int] = []
    result: list[tuple[int, ...]] = []
    for piece in ranges:
        produced = [n for n in range(piece.first, piece.stop) if derives[n]]
        alive = [n for n in (*alive, *produced) if last_use.get(n, -1) >= piece.stop]
        result.append(tuple(alive))
    return tuple(result)


def _unit_signature(piece: _Range, nodes: Sequence[Node], parameters: Mapping[str, Parameter]) -> Signature:
    ids = range(piece.first, piece.stop)
    return (piece.block is not None, *signature_of(ids, nodes, parameters, piece.block or ""))


def _tied(
    piece: _Range,
    index: int,
    nodes: Sequence[Node],
    parameters: Mapping[str, Parameter],
    owners: Mapping[str, int],
) -> tuple[str, ...]:
    used = dict.fromkeys(
        parameters[operand].fqn
        for node in nodes[piece.first : piece.stop]
        for operand in node.operands
        if isinstance(operand, str)
    )
    return tuple(fqn for fqn in used if owners[fqn] != index)
