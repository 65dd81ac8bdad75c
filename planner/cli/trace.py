"""``planner trace``: the operator DAG of a model, shown as a table and written as graph.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from planner.errors import ModelError
from planner.graph.graph_file import graph_json, read_graph, write_graph
from planner.graph.model_graph import ModelGraph
from planner.model_file import ModelKind, load_model, resolve_model
from planner.parallelism import Precision


def register(app: typer.Typer) -> None:
    """Adds ``trace`` to ``app``."""
    app.command(name="trace")(trace)


def trace(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="model.py[:factory], config.json, a preset or graph.json")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the graph here.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in the traced micro-batch.")] = 1,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; default: the model's.")] = None,
    precision: Annotated[Precision, typer.Option(help="Dtype of parameters and activations.")] = Precision.BF16,
    as_json: Annotated[bool, typer.Option("--json", help="The graph on stdout, and nothing else there.")] = False,
) -> None:
    """Trace MODEL with its loss into the operator DAG that planning starts from."""
    talk = Console(stderr=True, highlight=False)
    source = resolve_model(model)
    if source.kind is ModelKind.GRAPH:
        if source.path is None:
            raise ModelError(f"{model} names no file")
        graph = read_graph(source.path)
    else:
        from planner.graph.tracer import trace_model, traced_dtype

        loaded = load_model(source)
        graph = trace_model(loaded, batch_size, seq_len or loaded.default_seq_len, traced_dtype(precision))
    for warning in graph.warnings:
        talk.print(f"[yellow]warning:[/] {warning}", soft_wrap=True, markup=True)
    if output is not None:
        write_graph(graph, output)
        talk.print(f"wrote {output}", soft_wrap=True)
    if as_json:
        typer.echo(graph_json(graph))
    else:
        Console(highlight=False).print(_summary(graph))


def _summary(graph: ModelGraph) -> Table:
    table = Table(
        title=f"{graph.source} at {graph.batch_size} x {graph.seq_len} tokens, {graph.dtype}", show_header=False
    )
    blocks = ", ".join(f"{block.count} x {block.modules[0]}" for block in graph.blocks) or "none"
    rows = (
        ("tier", graph.tier),
        ("parameters", f"{graph.num_params:,}"),
        ("trainable", f"{graph.num_trainable_params:,}"),
        ("operators", f"{len(graph.nodes):,}"),
        ("repeated blocks", blocks),
        ("units", f"{len(graph.units):,}"),
        ("forward", f"{graph.forward_flops / 1e12:,.2f} TFLOP"),
        ("backward", f"{graph.backward_flops / 1e12:,.2f} TFLOP"),
        ("saved activations", f"{graph.saved_activation_bytes / 2**30:,.2f} GiB"),
        ("digest", graph.digest[:16]),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table
