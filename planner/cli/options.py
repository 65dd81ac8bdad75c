"""Options that several commands share, and how they become values of the API."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from costmodels.vocabulary.bounds import MOST_DEVICES, MOST_TOKENS


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
    counts = [int(end) if len(end) < 10 and end.isascii() and end.isdigit() else 0 for end in ends]
    if not 1 <= counts[0] <= counts[1] <= MOST_DEVICES:
        shown = text if len(text) < 30 else f"{text[:30]}..."
        raise typer.BadParameter(
            f"{shown!r} is neither a number of GPUs, between 1 and {MOST_DEVICES:,}, nor a range as 8..512"
        )
    return GpuRange(*counts)


def whole_tokens(tokens: float) -> int:
    """``--tokens 15e12`` as a number; BadParameter where it is none."""
    if not 1 <= tokens <= MOST_TOKENS:
        raise typer.BadParameter(f"--tokens must be between 1 and {MOST_TOKENS:.0e}, got {tokens:g}")
    return round(tokens)


Hardware = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FILE",
        help="A profile (`planner hardware list`) or its file; several as NAME:COUNT,NAME:COUNT.",
    ),
]
OtherGpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, max=MOST_DEVICES, help="Another number of GPUs: changes the data-parallel degree."),
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
