"""Text of others as it may be shown: a terminal obeys escape sequences, and reads some characters backwards."""

from __future__ import annotations

import json
import re

_BEYOND_ASCII = re.compile(r"[^\x00-\x7e]")


def shown(text: str) -> str:
    """``text`` with each character that is not printed, other than a new line, written out as Python would."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def ascii_json(text: str) -> str:
    """The same JSON in ASCII. Beyond it are characters that a terminal obeys, and some that it cannot encode."""
    return _BEYOND_ASCII.sub(lambda found: json.dumps(found[0])[1:-1] if found[0] != "\x7f" else r"\u007f", text)
