"""graph.json: written whole or not at all, refused by name where it is damaged or foreign (no torch here)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from costmodels.vocabulary.shown import ascii_json
from costmodels.vocabulary.workload import OpClass
from planner.errors import ModelError
from planner.graph.model_graph import SCHEMA_VERSION, ModelGraph, Node
from planner.json_file import FileFormat
from planner.operators.call import ITEM_BYTES
from planner.output_file import write_text

WITHOUT_FLOPS = (OpClass.VIEW, OpClass.MEMORY_BOUND)  # only products are counted


def graph_json(graph: ModelGraph) -> str:
    """``graph`` as JSON text."""
    return ascii_json(graph.model_dump_json())


def write_graph(graph: ModelGraph, path: Path) -> None:
    """Writes ``graph`` to ``path``, replacing what is there in one step."""
    write_text(path, graph_json(graph))


def read_graph(path: Path) -> ModelGraph:
    """The graph in ``path``; ModelError with every violation where it is none.

    A file that was read last is not read again as long as it is the same by its time and size: whoever prices many
    plans of a model would spend most of the time on that.
    """
    try:
        now = path.stat()
    except (OSError, ValueError):  # such as one that is not there, which the format says in its own words
        return _read(path)
    return _read_once(path, now.st_mtime_ns, now.st_size, now.st_ino)


@lru_cache(maxsize=2)
def _read_once(path: Path, _time_ns: int, _size: int, _inode: int) -> ModelGraph:
    return _read(path)


def _read(path: Path) -> ModelGraph:
    return FileFormat(
        name="graph",
        model=ModelGraph,
        version=SCHEMA_VERSION,
        contradictions=_inconsistencies,
        error_class=ModelError,
        way_out="trace the model again: planner trace MODEL -o graph.json",
    ).read(path)


def _inconsistencies(graph: ModelGraph) -> list[str]:
    """What the schema cannot say: ids, references and the partition into units."""
    count = len(graph.nodes)
    problems = [f"nodes.{i}: id is {node.id}" for i, node in enumerate(graph.nodes) if node.id != i]
    unknown = {graph.dtype, *(node.dtype for node in graph.nodes)} - ITEM_BYTES.keys()
    problems += [f"dtype {dtype!r} is none of {', '.join(ITEM_BYTES)}" for dtype in sorted(unknown)]
    problems += [problem for node in graph.nodes for problem in _wrong_in(node, graph)]
    problems += [f"edge {a} -> {b} does not lead forward" for a, b in graph.edges if not 0 <= a < b < count]
    problems += _wrong_totals(graph)
    placed = sorted(node for unit in graph.units for node in unit.nodes)
    if placed != list(range(count)):
        problems.append("units do not hold each node exactly once")
    beyond = [unit.name for unit in graph.units if any(node >= count for node in unit.boundary)]
    problems += [f"unit {name}: boundary names no node" for name in beyond]
    owned = sorted(fqn for unit in graph.units for fqn in unit.parameters)
    if owned != sorted(p.fqn for p in graph.parameters):
        problems.append("units do not hold each parameter exactly once")
    return problems


def _wrong_in(node: Node, graph: ModelGraph) -> list[str]:
    problems: list[str] = []
    for operand in node.operands:
        if isinstance(operand, str) and operand not in graph.parameter_of:
            problems.append(f"node {node.id}: unknown parameter {operand!r}")
        elif isinstance(operand, int) and not 0 <= operand < node.id:
            problems.append(f"node {node.id}: operand {operand} does not come before it")
    if node.op_class in WITHOUT_FLOPS and (node.flops or node.backward_flops):
        problems.append(f"node {node.id}: an operator of class {node.op_class.value} counts no FLOPs")
    if node.weight_gradient_flops > node.backward_flops:
        problems.append(f"node {node.id}: weight_gradient_flops are a part of backward_flops, and more than these")
    count = len(graph.nodes)
    if not 0 <= node.storage < count or any(not 0 <= s < count for s in node.saves):
        problems.append(f"node {node.id}: storage or saves name no node")
    return problems


def _wrong_totals(graph: ModelGraph) -> list[str]:
    """Totals that are none of the nodes and parameters: a plan's rates and its share of the peak are made from them."""
    sums = {
        "forward_flops": sum(node.flops for node in graph.nodes),
        "backward_flops": sum(node.backward_flops for node in graph.nodes),
        "num_params": sum(p.num_elements for p in graph.parameters),
        "num_trainable_params": sum(p.num_elements for p in graph.parameters if p.trainable),
    }
    given = {name: getattr(graph, name) for name in sums}
    return [
        f"{name} is {given[name]}, the sum over the file is {total}"
        for name, total in sums.items()
        if given[name] != total
    ]
