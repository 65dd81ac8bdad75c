"""The words of a command line or a shell script that somebody else wrote; nothing of it is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from planner.errors import InputError

MAX_WORD = 2**16  # characters: variables that are put into each other must not grow without end


def option_words(text: str) -> list[str]:
    """The words of a command line; in a script, variables that it sets to plain words are put in their places."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"the command line cannot be read: {error}", hint="is a quote missing?") from error
    values: dict[str, str] = {}
    found: list[str] = []
    for word in words:
        assigned = re.fullmatch(r"([A-Za-z_]\w*)\+?=(.*)", word, re.DOTALL)
        if assigned and not assigned.group(2).lstrip().startswith(("-", "(")):
            values[assigned.group(1)] = _filled(assigned.group(2), values)
            continue
        word = assigned.group(2).lstrip("( ") if assigned else word  # an array or a string of options
        # A quoted string of several options counts as these options; one that begins with none is a value.
        pieces = word.split() if word.lstrip().startswith("--") else [word]
        found += [_filled(piece.rstrip(")") if piece.count("(") < piece.count(")") else piece, values)
                  for piece in pieces]  # fmt: skip
    return [word for word in found if word]


def _filled(word: str, values: Mapping[str, str]) -> str:
    """``word`` with ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` replaced where they are known."""

    def value(found: re.Match[str]) -> str:
        return values.get(found.group(1) or found.group(3) or "", found.group(2) or found.group(0))

    found = re.sub(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)", value, word)
    if len(found) > MAX_WORD:
        raise InputError(f"a word of the command line has more than {MAX_WORD:,} characters", hint="shorten the script")
    return found
