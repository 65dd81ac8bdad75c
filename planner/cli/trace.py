"""``planner trace``: the operator DAG of a model, shown as a table and written as graph.json."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from costmodels.vocabulary.bounds import MOST_SEQ_LEN, MOST_SEQUENCES
from costmodels.vocabulary.choices import Precision
from planner.cli.terminal import data_console, talk_console
from planner.errors import ModelError
from planner.graph.graph_cache import default_folder, traced_graph
from planner.graph.graph_file import graph_json, read_graph, write_graph
from planner.graph.model_graph import ModelGraph, Node
from planner.graph.tracing import TraceRequest
from planner.model_file import ModelKind, resolve_model
from planner.output_file import check_output, is_stdout
from planner.render import count, size

NO_RULE = re.compile(r"no rule for operator (\S+)")  # as the tracer's warnings begin
NUMBERS = ("times", "FLOP forward")
TIERS = {
    "export": "export: the whole model by torch.export",
    "modules": "modules: the model was run on tensors without values and watched",
    "config": "config: a generic model of the same sizes stands for it",
}


def register(app: typer.Typer) -> None:
    """Adds ``trace`` to ``app``."""
    app.command(name="trace")(trace)


def trace(  # over 6 arguments: one for each option of the command
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py[:factory], config.json, a preset or graph.json")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the graph here, - for stdout.")] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=MOST_SEQUENCES, help="Sequences in the traced micro-batch.")
    ] = 1,
    seq_len: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEQ_LEN, help="Tokens per sequence; default: the model's.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Dtype of parameters and activations.")] = Precision.BF16,
    check: Annotated[bool, typer.Option("--check", help="What was found, what was not understood, and where.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The graph on stdout, and nothing else there.")] = False,
) -> None:
    """Trace MODEL with its loss into the operator DAG that planning starts from."""
    check_output(output, reads=[model])
    talk = talk_console()
    graph = _graph(model, batch_size, seq_len, precision)
    for warning in graph.warnings:
        talk.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    if output is not None and not is_stdout(output):
        write_graph(graph, output)
        talk.print(f"wrote {escape(str(output))}", soft_wrap=True)
    if as_json or is_stdout(output):
        typer.echo(graph_json(graph))
    else:
        tables = (_summary(graph), *((_operators(graph), _cuts(graph), _doubts(graph)) if check else ()))
        data_console().print(*tables, sep="\n")


def _graph(model: str, batch_size: int, seq_len: int | None, precision: Precision) -> ModelGraph:
    """What was traced before is read, the rest traced."""
    source = resolve_model(model)
    if source.kind is ModelKind.GRAPH:
        if source.path is None:
            raise ModelError(f"{model} names no file")
        return read_graph(source.path)
    return traced_graph(TraceRequest(source, batch_size, seq_len, precision), default_folder())


def _summary(graph: ModelGraph) -> Table:
    table = Table(
        title=f"{graph.source} at {graph.batch_size} x {graph.seq_len} tokens, {graph.dtype}", show_header=False
    )
    blocks = ", ".join(f"{block.count} x {block.modules[0]}" for block in graph.blocks) or "none"
    rows = (
        ("tier", TIERS[graph.tier]),
        ("parameters", f"{graph.num_params:,}"),
        ("trainable", f"{graph.num_trainable_params:,}"),
        ("operators", f"{len(graph.nodes):,}"),
        ("repeated blocks", blocks),
        ("units", f"{len(graph.units):,}"),
        ("forward", f"{count(graph.forward_flops)} FLOP"),
        ("backward", f"{count(graph.backward_flops)} FLOP"),
        ("saved activations", size(graph.saved_activation_bytes)),
        ("digest", graph.digest[:16]),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _operators(graph: ModelGraph) -> Table:
    """Each operator: how often, what it is taken for, and where it stands first."""
    table = Table(title="operators")
    for title in ("operator", "times", "priced as", "FLOP forward", "first seen at"):
        table.add_column(title, justify="right" if title in NUMBERS else "left", overflow="fold")
    first: dict[str, Node] = {}
    for node in graph.nodes:
        first.setdefault(node.op, node)
    times = Counter(node.op for node in graph.nodes)
    flops: Counter[str] = Counter()
    for node in graph.nodes:
        flops[node.op] += node.flops
    unknown = {found.group(1) for warning in graph.warnings if (found := NO_RULE.match(warning))}
    for name, num_calls in sorted(times.items(), key=lambda item: -flops[item[0]]):
        kind = f"no rule: {first[name].op_class}" if name in unknown else str(first[name].op_class)
        table.add_row(name, str(num_calls), kind, count(flops[name]) if flops[name] else "", first[name].source)
    return table


def _doubts(graph: ModelGraph) -> RenderableType:
    """What was not understood, and where; the same sentences as the warnings."""
    if not graph.warnings:
        return Text("everything was understood")
    table = Table(title="what was not understood, or assumed", show_header=False, show_lines=True)
    for warning in graph.warnings:
        table.add_row(warning)
    return table


def _cuts(graph: ModelGraph) -> Table:
    """Where a pipeline may cut, and what it must send there."""
    table = Table(title="places for a pipeline cut")
    for title in ("after", "tensors", "MiB"):
        table.add_column(title, justify="left" if title == "after" else "right")
    seen: set[tuple[int, ...]] = set()
    for unit, cut in zip(graph.units, graph.cut_points, strict=False):
        if (unit.kind, len(cut.tensors), cut.num_bytes) not in seen:
            seen.add((unit.kind, len(cut.tensors), cut.num_bytes))
            table.add_row(cut.after, str(len(cut.tensors)), f"{cut.num_bytes / 2**20:,.1f}")
    return table
