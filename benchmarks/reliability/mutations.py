"""Inputs made from sound ones: a value, a key, a line or some bytes are changed, and what is left is as it was.

``Documents`` know what they change: values, keys and lists of JSON. ``changed_text`` knows words, numbers and lines of
any text, ``changed_bytes`` nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from benchmarks.reliability.hostile_text import PIECES

Path = tuple[str | int, ...]

# As they are written into JSON: numbers at the borders of 8 to 64 bits and beyond, and what is no number of JSON.
NUMBERS = (
    "0", "-0", "1", "-1", "2", "3", "7", "127", "255", "256", "65535", "65536", "1000003", "2147483647", "2147483648",
    "4294967296", "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616",
    "-9223372036854775809", "1" + "0" * 30, "1" + "0" * 400, "9" * 5000, "0.5", "-0.0", "1.5", "1e-320", "5e-324",
    "1e308", "1e309", "-1e309", "1e-9", "3.0", "NaN", "Infinity", "-Infinity",
)  # fmt: skip
OTHERS = ("null", "true", "false", "[]", "{}", '""', "[[]]", '{"":{}}', "[null]", '"0"', '"1e999"', '{"a":1,"a":2}')
DEEP = (
    "[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 60 + "]" * 60, "[" * 20000,
    "[0" + ",0" * 2000 + "]",
)  # fmt: skip
MARKS = (":", "=", " ", "-", '"', "'", "[", "{")
BYTES = (b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x00\x00\x00\x80", b"\xef\xbb\xbf", b"\xed\xa0\x80")
_RAW = re.compile(r'"@raw(\d+)@"')
_TWICE = re.compile(r"@twice\d+@")
_TOKEN = re.compile(r"[A-Za-z_]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?|\s+|[^\sA-Za-z_\d]")


class Document:
    """A JSON document whose parts are changed one by one. ``texts`` are written in place of marks in the end."""

    def __init__(self, value: Any) -> None:
        self.value, self.raw = value, list[str]()

    def changed(self, draw: random.Random) -> None:
        """One change of one part."""
        *parents, key = self._place(draw)
        change = draw.choice(_CHANGES)
        self.value = _with(self.value, tuple(parents), lambda part: change(self, draw, part, key))

    def text(self) -> str:
        """The document as JSON, or what was made of it."""
        text = json.dumps(self.value)
        text = _TWICE.sub("", text)
        return _RAW.sub(lambda found: self.raw[int(found[1])], text)

    def written(self, text: str) -> str:
        """A mark for ``text``, which need not be JSON."""
        self.raw.append(text)
        return f"@raw{len(self.raw) - 1}@"

    def _place(self, draw: random.Random) -> Path:
        """Where some part stands; a walk from the top, so that few long lists do not hide the rest."""
        place: Path = ()
        part = self.value
        while True:
            keys: list[Any] = list(part) if isinstance(part, dict) else list(range(len(part)))
            if not keys:
                return place or ("",)
            key = draw.choice(keys)
            place, part = (*place, key), part[key]
            if not isinstance(part, dict | list) or not part or draw.random() < 0.15:
                return place


def _with(part: Any, parents: Path, change: Callable[[Any], Any]) -> Any:
    """A copy of ``part`` in which what stands at ``parents`` is changed; the rest is shared."""
    if not parents:
        return change(part)
    copied: Any = dict(part) if isinstance(part, dict) else list(part)
    copied[parents[0]] = _with(part[parents[0]], parents[1:], change)
    return copied


def _put(part: Any, key: Any, value: Any) -> Any:
    copied = dict(part) if isinstance(part, dict) else list(part)
    if isinstance(copied, dict) or 0 <= key < len(copied):
        copied[key] = value
    return copied


def _number(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    return _put(part, key, document.written(draw.choice(NUMBERS)))


def _near(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    value = part.get(key) if isinstance(part, dict) else part[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return _number(document, draw, part, key)
    return _put(
        part, key, draw.choice((value + 1, value - 1, value * 2, value // 2, -value, value * 1000, value + 0.5))
    )


def _other(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    return _put(part, key, document.written(draw.choice(OTHERS)))


def _deep(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    return _put(part, key, document.written(draw.choice(DEEP)))


def _text(_document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    return _put(part, key, draw.choice(PIECES))


def _moved(_document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    """The value of a neighbour."""
    values = list(part.values()) if isinstance(part, dict) else list(part)
    return _put(part, key, draw.choice(values)) if values else part


def _without(_document: Document, _draw: random.Random, part: Any, key: Any) -> Any:
    if isinstance(part, dict):
        return {own: value for own, value in part.items() if own != key}
    return [value for place, value in enumerate(part) if place != key]


def _added(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    if isinstance(part, dict):
        return {**part, draw.choice((*PIECES, str(key) + "s")): document.written(draw.choice(OTHERS + NUMBERS))}
    return [*part, draw.choice(part)] if part else [None]


def _twice(document: Document, draw: random.Random, part: Any, key: Any) -> Any:
    if not isinstance(part, dict):
        return part * draw.choice((2, 50))
    mark = document.written(draw.choice(NUMBERS + OTHERS))
    return {**part, f"{key}@twice{len(document.raw)}@": mark}


def _shuffled(_document: Document, draw: random.Random, part: Any, _key: Any) -> Any:
    if isinstance(part, dict):
        return dict(draw.sample(list(part.items()), len(part)))
    return draw.sample(part, len(part))


_CHANGES = (_number, _number, _near, _near, _other, _deep, _text, _moved, _without, _added, _twice, _shuffled)


def changed_text(text: str, draw: random.Random) -> str:
    """A word, a number or a line of ``text`` is another, is twice there or is gone."""
    if draw.random() < 0.4:
        return _changed_lines(text, draw)
    if not text:
        return draw.choice(PIECES)
    (begin, end), (other_begin, other_end) = _token(text, draw), _token(text, draw)
    new = draw.choice((
        "", text[begin:end] * 2, text[other_begin:other_end], draw.choice(PIECES), draw.choice(NUMBERS),
        draw.choice(NUMBERS), draw.choice(OTHERS), draw.choice(DEEP), draw.choice(MARKS),
    ))  # fmt: skip
    return text[:begin] + new + text[end:]


def _token(text: str, draw: random.Random) -> tuple[int, int]:
    """Where some word, number or mark begins and ends: the first one behind a random place."""
    found = _TOKEN.search(text, draw.randrange(len(text)))
    return found.span() if found else (0, len(text))


def _changed_lines(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    place, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(6):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, lines[other])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case 3:
            lines[place] = "  " * draw.randrange(4) + lines[place].lstrip()
        case 4:
            lines[place:place] = [lines[place]] * 200
        case _:
            lines[place] = lines[place].partition(draw.choice((":", "=", " ")))[0] + draw.choice((":", " =", "")) + " "
            lines[place] += draw.choice(NUMBERS + OTHERS + PIECES)
    return "\n".join(lines)


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits are flipped, bytes are put in, taken out or cut off."""
    if not content:
        return bytes([draw.randrange(256)])
    place = draw.randrange(len(content))
    match draw.randrange(5):
        case 0:
            return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        case 1:
            return content[:place]
        case 2:
            return content[:place] + draw.randbytes(draw.choice((1, 2, 4, 8))) + content[place:]
        case 3:
            return content[:place] + content[place + draw.choice((1, 2, 8, 64)) :]
        case _:
            new = draw.choice(BYTES)
            return content[:place] + new + content[place + len(new) :]
