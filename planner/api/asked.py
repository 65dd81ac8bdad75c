"""What a caller in Python asks for, as a Request: every name is known, every value is of its kind, words are looked up.

The command line has seen to that before it asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from os import PathLike, fspath
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from planner.errors import InputError
from planner.layout.layout import Pins
from planner.model_file import LoadedModel
from planner.request import Request

_EXACT = ConfigDict(strict=True, allow_inf_nan=False)
_NOT_OPTIONS = {  # of a request: they have other names, or are not the user's
    "model", "num_devices", "hardware", "pins", "planned", "held", "shares_over_all",
}  # fmt: skip


def request_of(model: object, gpus: object, hardware: object, options: Mapping[str, object]) -> Request:
    """InputError where a name among ``options`` is neither a field of a request nor a pin, or a value is not its."""
    held = model if isinstance(model, LoadedModel) else None
    name = held.source.name if held else model
    if not isinstance(name, str | PathLike):
        raise InputError(
            f"model must be a name or a path, or an nn.Module, got {type(model).__name__}",
            hint="`planner models` lists names; a path is that of a model.py, a config.json or a graph.json",
        )
    pins, others = get_type_hints(Pins), get_type_hints(Request)
    known = {name: kind for name, kind in {**others, **pins}.items() if name not in _NOT_OPTIONS}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise InputError(f"unknown option {', '.join(unknown)}", hint=f"the options are {', '.join(sorted(known))}")
    given: dict[str, Any] = {name: checked(name, value, known[name]) for name, value in options.items()}
    chosen = Pins(**{name: given.pop(name) for name in given.keys() & pins})
    return Request(fspath(name), *place(gpus, hardware), held=held, pins=chosen, **given)


def place(gpus: object, hardware: object) -> tuple[int | None, str | None]:
    """The number of GPUs and the hardware, which may be the path of a profile. InputError where they are none."""
    num_devices = checked("gpus", gpus, int | None)
    if num_devices is not None and num_devices < 1:
        raise InputError(f"the number of GPUs must be at least 1, got {num_devices}", hint="give as many as there are")
    return num_devices, checked(
        "hardware", fspath(hardware) if isinstance(hardware, PathLike) else hardware, str | None
    )


def checked(name: str, value: object, kind: Any) -> Any:
    """``value`` as the ``kind`` that is asked for; InputError where it is none.

    A whole number may be written as one with a point, such as 15e12, and one of a few words as a text.
    """
    words = next(
        (each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, StrEnum)), None
    )
    if words is not None and isinstance(value, str) and value in set(words):  # a text equals the word that it names
        return words(value)
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        return TypeAdapter(kind, config=_EXACT).validate_python(whole)
    except ValidationError as error:
        wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
    if words is not None:
        wanted = f"one of {', '.join(words)}"
    raise InputError(
        f"{name} must be {wanted}, got {value!r}", hint="choose one of these" if words else "give a value of this kind"
    )


def pins_of(text: object) -> Pins:
    """``tp=4,pp=2``; InputError where that fixes no choices."""
    try:
        if not isinstance(text, str):
            raise TypeError("it is no text")
        return Pins.parsed(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"{text!r} fixes no choice of a plan: {error}", hint="give choices as tp=4,pp=2") from error
