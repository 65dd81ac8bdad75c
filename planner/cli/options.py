"""Options that several commands share, and how they become values of the API."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer


class GpuRange(NamedTuple):
    """``--gpus``: one number, or the ends of a range."""

    first: int
    last: int

    @property
    def is_one(self) -> bool:
        """Whether it is one number."""
        return self.first == self.last


def gpu_range(text: str) -> GpuRange:
    """``64`` or ``8..512``; BadParameter where it is neither."""
    first, dots, last = text.partition("..")
    ends = [first, last] if dots else [first, first]
    if not all(end.isascii() and end.isdigit() and int(end) >= 1 for end in ends) or int(ends[0]) > int(ends[1]):
        raise typer.BadParameter(f"{text!r} is neither a number of GPUs, 1 or more, nor a range as 8..512")
    return GpuRange(int(ends[0]), int(ends[1]))


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
WRITES_PLAN = "Write the plan here, - for stdout; known to be writable before the work begins."
Trust = Annotated[
    bool,
    typer.Option("--trust", help="The plan's model may be code outside the plan's own folder: run it as your own."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout, and nothing else there.")]
