"""The values of a shell script's variables, put into its words; what a script takes from elsewhere stays as it is."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import InputError
from planner.formats.shell_words import Word, end_of

MAX_WORD = 2**16  # characters: variables that are put into each other must not grow without end
MAX_ALL = 2**20  # of all words of a script
MOST_NESTED = 16  # ``${A:-${B:-...}}``
MOST_ARITHMETIC = 200  # characters of ``$((...))``
BETWEEN, SPACE = "\0", "\1"  # parts two words of a value; a space of what is not known, which parts none
_NAME = re.compile(r"\$([A-Za-z_]\w*)")
_BRACES = re.compile(r"([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?[-=])(.*))?", re.DOTALL)
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def is_unknown(word: str) -> bool:
    """Whether a word has a value that the script does not say: of its environment, or of a command that it runs."""
    return "$" in word or "`" in word


@dataclass
class Values:
    """Variables by name: a text, or the words of an array."""

    known: dict[str, str | list[str]] = field(default_factory=dict[str, "str | list[str]"])
    size: int = 0

    def words(self, word: Word) -> list[str]:
        """The words that bash makes of ``word``."""
        found = "".join(self._filled(part.text, part.kind) for part in word)
        self._check(found)
        return [piece for piece in found.split(BETWEEN) if piece]

    def text(self, word: Word, start: int = 0) -> str:
        """``word`` from its character ``start`` on as one text, as on the right of ``NAME=``."""
        found = self._filled(word[0].text[start:], _as_quoted(word[0].kind)) if word else ""
        found += "".join(self._filled(part.text, _as_quoted(part.kind)) for part in word[1:])
        self._check(found)
        return found.replace(BETWEEN, " ")

    def assign(self, name: str, value: str | list[str], *, is_more: bool) -> None:
        """``NAME=value``; behind what it holds where ``is_more``."""
        old = self.known.get(name) if is_more else None
        if isinstance(value, list) or isinstance(old, list):
            before = old if isinstance(old, list) else [old] if old else []
            self.known[name] = [*before, *(value if isinstance(value, list) else [value])]
        else:
            self.known[name] = (old or "") + value
        held = self.known[name]
        self._check(held if isinstance(held, str) else " ".join(held))

    def _check(self, text: str) -> None:
        self.size += len(text)
        if len(text) > MAX_WORD:
            raise InputError(
                f"a word of the command line has more than {MAX_WORD:,} characters", hint="shorten the script"
            )
        if self.size > MAX_ALL:
            raise InputError(f"the script's words have more than {MAX_ALL:,} characters", hint="shorten the script")

    def _filled(self, text: str, kind: Literal["plain", "quoted", "literal"]) -> str:
        if kind == "literal" or not text.startswith(("$", "`")):
            return text
        value = self._value(text, 0)
        if value is None:
            return re.sub(r"\s", SPACE, text)
        if isinstance(value, list):
            value = (" " if kind == "quoted" and "[*]" in text else BETWEEN).join(value)
        return re.sub(r"[ \t\n]+", BETWEEN, value) if kind == "plain" else value

    def _value(self, text: str, depth: int) -> str | list[str] | None:
        """What ``text``, which begins with ``$``, stands for; None where that is not known."""
        if depth > MOST_NESTED:
            return None
        if text.startswith("$(("):
            return self._arithmetic(text[3:-2], depth)
        if not text.startswith("${"):
            named = _NAME.fullmatch(text)
            return self.known.get(named[1]) if named else None
        if re.fullmatch(r"\$\{#[A-Za-z_]\w*\[[@*]\]\}", text):
            held = self.known.get(text[3:-4])
            return str(len(held)) if isinstance(held, list) else None
        found = _BRACES.fullmatch(text[2:-1])
        if found is None:
            return None
        value = self.known.get(found[1])
        is_unset = value is None or (isinstance(value, str) and (is_unknown(value) or value == ""))
        if not is_unset or found[2] is None:
            return value
        default = self._within(found[3], depth + 1).strip("\"'")
        if found[2].endswith("="):
            self.known[found[1]] = default
        return default

    def _within(self, text: str, depth: int) -> str:
        """``text`` with what it names put in; what is not known stays."""
        pieces: list[str] = []
        at = 0
        for found in re.finditer(r"\$(?:[({]|[A-Za-z_]\w*)", text):
            if found.start() < at:
                continue
            end = found.end() if found[0][-1] not in "({" else end_of(text, found.end() - 1) + 1
            value = self._value(text[found.start() : end], depth)
            value = " ".join(value) if isinstance(value, list) else value
            whole = text[found.start() : end]
            pieces += [text[at : found.start()], re.sub(r"\s", SPACE, whole) if value is None else value]
            at = end
        return "".join([*pieces, text[at:]])

    def _arithmetic(self, text: str, depth: int) -> str | None:
        """The whole number that ``text`` comes to; None where it has anything but known numbers, + - * / % and ()."""
        filled = self._within(text, depth + 1)

        def named(found: re.Match[str]) -> str:
            value = self.known.get(found[0])
            return value if isinstance(value, str) else found[0]

        filled = re.sub(r"[A-Za-z_]\w*", named, filled).strip()
        if len(filled) > MOST_ARITHMETIC or not re.fullmatch(r"[\d\s()*/%+-]+", filled) or "**" in filled:
            return None
        try:
            number = _number(ast.parse(re.sub(r"\s", "", filled), mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        return None if number is None else str(number)


def _as_quoted(kind: Literal["plain", "quoted", "literal"]) -> Literal["quoted", "literal"]:
    return "quoted" if kind == "plain" else kind


def _number(node: ast.expr) -> int | None:
    """The value of sums and products of whole numbers that are not below 0; None of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    left, right = _number(node.left), _number(node.right)
    if left is None or right is None or (right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod)):
        return None
    found = _OPERATORS[type(node.op)](left, right)
    return found if 0 <= found < 2**63 else None
