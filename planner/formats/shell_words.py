"""The words and operators of a shell script, quotes and comments as bash has them; nothing of it is run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import InputError

_OPERATOR = re.compile(r"\d*[<>]+[&|]?|&>>?|;;|&&|\|\||[;&|()]")
_HEREDOC = re.compile(r"<<(?!<)(-?)[ \t]*(['\"\\]?)([\w.-]+)['\"]?")
_STAGES = re.compile(r"[EtmL*|(),\d]+")  # a pipeline's layout, as printed without its quotes
_PLAIN = re.compile(r"[^\s'\"\\$`;&|()<>]+")
_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Part:
    """A piece of a word: values are put in unless it is ``literal``, and part words at their spaces where ``plain``."""

    text: str
    kind: Literal["plain", "quoted", "literal"]


Word = tuple[Part, ...]


@dataclass(frozen=True)
class Array:
    """``NAME=(...)``, or ``NAME+=(...)`` where ``is_more``."""

    name: str
    words: tuple[Word, ...]
    is_more: bool


Token = Word | Array | str  # a string is an operator, or the end of a line


@dataclass
class Lexed:
    """A script in pieces, and the texts of its heredocs."""

    tokens: list[Token] = field(default_factory=list[Token])
    heredocs: list[str] = field(default_factory=list[str])


def lexed(text: str) -> Lexed:
    """The pieces of ``text``; InputError where a quote or a bracket is not closed."""
    lexer = _Lexer(text.replace("\r\n", "\n"))
    lexer.read(None)
    return lexer.found


def end_of(text: str, start: int) -> int:
    """Where the bracket at ``start`` is closed, quotes and inner brackets passed over."""
    opening = text[start]
    closing, depth, at = _CLOSING[opening], 0, start
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in "'\"":
            at = _after_quote(text, at) - 1
        elif char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise _unclosed(opening)


def _after_quote(text: str, at: int) -> int:
    quote = text[at]
    end = at + 1
    while end < len(text) and text[end] != quote:
        end += 2 if quote == '"' and text[end] == "\\" else 1
    if end >= len(text):
        raise _unclosed(quote)
    return end + 1


def _unclosed(mark: str) -> InputError:
    return InputError(f"the command line cannot be read: a {mark} is never closed", hint="is one missing?")


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.found = text, 0, Lexed()
        self._awaited: list[tuple[str, bool]] = []  # ends of heredocs whose text begins on the next line
        self._drops_next = False  # the name of a file behind < or >

    def read(self, closing: str | None) -> None:
        """Reads on to the end, or past ``closing``."""
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "\n":
                self.at += 1
                self.found.tokens.append("\n")
                self._skip_heredocs()
            elif char.isspace():
                self.at += 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == closing:
                self.at += 1
                return
            else:
                self._operator_or_word()
        if closing is not None:
            raise _unclosed("(")

    def _operator_or_word(self) -> None:
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc:
            self._awaited.append((heredoc[3], bool(heredoc[1])))
            self.at = heredoc.end()
            return
        operator = _OPERATOR.match(self.text, self.at)
        if operator and not self.text.startswith("([", self.at):
            self.at = operator.end()
            self._drops_next = "<" in operator[0] or ">" in operator[0]
            if not self._drops_next:
                self.found.tokens.append(operator[0])
            return
        word = self._word()
        array = self._array_of(word)
        if array is not None:
            self.found.tokens.append(array)
        elif not self._drops_next:
            self.found.tokens.append(word)
        self._drops_next = False

    def _array_of(self, word: Word) -> Array | None:
        named = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=", word[0].text) if len(word) == 1 else None
        if named is None or not self.text.startswith("(", self.at):
            return None
        self.at += 1
        outer, self.found.tokens = self.found.tokens, []
        self.read(")")
        words = tuple(token for token in self.found.tokens if isinstance(token, tuple))
        self.found.tokens = outer
        return Array(named[1], words, bool(named[2]))

    def _skip_heredocs(self) -> None:
        for mark, strips in self._awaited:
            lines: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], end + 1
                if (line.lstrip("\t") if strips else line).rstrip("\r") == mark:
                    break
                lines.append(line)
            self.found.heredocs.append("\n".join(lines))
        self._awaited.clear()

    def _word(self) -> Word:
        parts: list[Part] = []
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char.isspace():
                break
            if char in ";&|()<>":
                depth += (char == "(") - (char == ")")
                if depth < 0 or not self._is_of_word(char, parts):
                    break
                parts.append(Part(char, "literal"))
                self.at += 1
            else:
                self._part(parts)
        return tuple(parts)

    def _is_of_word(self, char: str, parts: list[Part]) -> bool:
        """Whether an operator belongs to the word: printed commands have ``Et|tL`` and ``([0]*1+[1]*2)`` unquoted."""
        if char == "(":
            return not (parts and parts[-1].text.endswith("="))
        if char == "|":
            return _STAGES.fullmatch("".join(part.text for part in parts)) is not None
        return char == ")"

    def _part(self, parts: list[Part]) -> None:
        """The next piece of a word outside double quotes."""
        char, text = self.text[self.at], self.text
        if text.startswith("\\\n", self.at):
            self.at += 2
        elif char == "\\":
            parts.append(Part(text[self.at + 1 : self.at + 2], "literal"))
            self.at += 2
        elif char == "'" or text.startswith("$'", self.at):
            start = self.at + (char == "$")
            self.at = _after_quote(text, start)
            parts.append(Part(text[start + 1 : self.at - 1], "literal"))
        elif char == '"':
            self._double_quotes(parts)
        elif char in "$`":
            parts.append(Part(self._substitution(), "plain"))
        else:
            found = _PLAIN.match(text, self.at)
            assert found is not None
            parts.append(Part(found[0], "plain"))
            self.at = found.end()

    def _double_quotes(self, parts: list[Part]) -> None:
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                if escaped != "\n":
                    parts.append(Part(escaped if escaped in '$`"\\' else "\\" + escaped, "literal"))
                self.at += 2
            elif char in "$`":
                parts.append(Part(self._substitution(), "quoted"))
            else:
                found = _IN_QUOTES.match(self.text, self.at)
                assert found is not None
                parts.append(Part(found[0], "literal"))
                self.at = found.end()
        raise _unclosed('"')

    def _substitution(self) -> str:
        """``$NAME``, ``${...}``, ``$(...)`` or ``...`` in back quotes, as it stands."""
        start, text = self.at, self.text
        if text[start] == "`":
            self.at = _after_quote(text, start)
        elif text[start + 1 : start + 2] in _CLOSING and start + 1 < len(text):
            self.at = end_of(text, start + 1) + 1
        else:
            found = re.compile(r"\$(?:[A-Za-z_]\w*|[\d@*#?$!-])?").match(text, start)
            assert found is not None
            self.at = found.end()
        return text[start : self.at]
