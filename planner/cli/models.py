"""``planner models``: the presets, their sizes and shapes."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from planner.cli.terminal import data_console
from planner.models.catalog import Preset, list_presets


def register(app: typer.Typer) -> None:
    """Adds ``models`` to ``app``."""
    app.command(name="models")(models)


def models(
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
) -> None:
    """List the models that can be named without a file."""
    presets = list_presets()
    if as_json:
        typer.echo(json.dumps([_row(preset) for preset in presets], indent=2))
        return
    table = Table(title="models", padding=(0, 0))
    table.add_column("name", no_wrap=True)
    for title in ("params", "layers", "hidden", "heads", "FFN", "vocab", "tokens"):
        table.add_column(title, justify="right")
    for preset in presets:
        config = preset.config
        size = f"{config.num_params / 1e9:,.2f} B" if config.num_params >= 1e8 else f"{config.num_params / 1e6:,.2f} M"
        grouped = config.num_kv_heads != config.heads
        heads = f"{config.heads}/{config.num_kv_heads}" if grouped else str(config.heads)  # query/key
        numbers = (config.ffn, config.vocab, config.seq_len)
        shown = (size, str(config.layers), f"{config.hidden:,}", heads, *(f"{number:,}" for number in numbers))
        table.add_row(preset.name, *shown)
    data_console().print(table)


def _row(preset: Preset) -> dict[str, object]:
    return {
        "name": preset.name,
        "num_params": preset.config.num_params,
        "source": preset.source,
        **preset.config.model_dump(mode="json"),
    }
