"""What commands print: text of files and models is shown, not obeyed, and every locale can print it."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from costmodels.vocabulary.shown import shown

_PLAIN = {"µ": "u", "·": "."}


class _ShowingConsole(Console):
    """Writes out what a terminal would obey, before lines are measured."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


def talk_console() -> Console:
    """For people, on stderr; ``[bold]`` and the like are markup, so text of others is to be escaped."""
    return _ShowingConsole(stderr=True, highlight=False)


def data_console() -> Console:
    """For tables, on stdout; nothing in their text is markup."""
    return _ShowingConsole(highlight=False, markup=False)


def markup_console() -> Console:
    """For tables whose text of others is escaped by who makes them, on stdout."""
    return _ShowingConsole(highlight=False)


def speak_any_locale() -> None:
    """From now on, what the locale cannot encode is written in ASCII: our own signs as others, the rest by number."""
    codecs.register_error("planner", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="planner")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each) or ascii(each)[1:-1] for each in text), error.end
