"""Options that several commands share, and how they become values of the API."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from costmodels.vocabulary.bounds import MOST_DEVICES, MOST_TOKENS

if TYPE_CHECKING:
    from planner.layout.layout import Pins


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


_SCALES = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def token_count(text: str) -> int:
    """``15e12``, ``15T``, ``300B`` or ``5000000``; BadParameter where it is no number of tokens."""
    from decimal import Decimal

    number, scale = (text[:-1], _SCALES[text[-1:].lower()]) if text[-1:].lower() in _SCALES else (text, 1)
    try:
        exact = Decimal(number) * scale
        tokens = int(exact) if exact == exact.to_integral_value() else 0
    except (ArithmeticError, ValueError):  # infinite, or no number
        tokens = 0
    if not 1 <= tokens <= MOST_TOKENS:
        shown = text if len(text) < 30 else f"{text[:30]}..."
        raise typer.BadParameter(f"{shown!r} is no number of tokens up to {MOST_TOKENS:.0e}: give 15e12, 15T or 300B")
    return tokens


def pins_of(text: str) -> Pins:
    """``tp=4,pp=2``: options of ``planner search`` that fix a choice; InputError where one is none of them."""
    from planner.errors import InputError
    from planner.layout.layout import Pins

    try:
        return Pins.parsed(text)
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name.replace("_", "-") for field in fields(Pins))
        raise InputError(f"{text!r} fixes no choice of a plan: {error}", hint=f"give {names}, as tp=4,pp=2") from error


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
    typer.Option(
        "--framework",
        "--within",
        metavar="NAME",
        help="Search what this framework can run, priced as it runs it: megatron-core, torchtitan+compile, "
        "deepspeed@2021, ...; default: planner run.",
    ),
]
WRITES_PLAN = "Write the plan here, - for stdout; known to be writable before the work begins."
TokenCount = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        parser=token_count,
        metavar="N",
        help="Tokens of the whole run, as 15e12 or 15T: its days, GPU-hours, dollars.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="The plan's model may be code outside the plan's own folder: run it as your own."),
]
AsJson = Annotated[bool, typer.Option("--json", help="The plan as JSON on stdout, and nothing else there.")]
