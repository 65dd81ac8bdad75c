"""Options that several commands share, and how they become values of the API."""

from __future__ import annotations

from typing import Annotated

import typer

Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="A profile (`planner hardware list`) or its file; several as NAME:COUNT,NAME:COUNT.",
    ),
]
Framework = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Price as this framework runs it: megatron-core, deepspeed, ..."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout, and nothing else there.")]
