"""A shell script followed from its first command to its last; nothing of it is run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from planner.formats.shell_values import SPACE, Values, is_unknown
from planner.formats.shell_words import Array, Token, lexed

MOST_SCRIPTS = 4  # inside one another: bash -c '...'
_SEPARATORS = ("\n", ";", ";;", "&&", "||", "|", "&", "(", ")")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_TALKING = ("echo", "printf", ":")
_LEADING = ("then", "elif", "else", "do", "{", "!", "time", "if", "while", "until")
_TESTS = ("[", "[[", "test")
_COMPARED = {
    "=": lambda a, b: a == b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip
_NUMBERS_COMPARED = {
    "-eq": lambda a, b: a == b, "-ne": lambda a, b: a != b, "-lt": lambda a, b: a < b, "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b, "-ge": lambda a, b: a >= b,
}  # fmt: skip


@dataclass
class _Condition:
    """An ``if`` or ``case`` that is open: whether the present branch is followed, and what came before it."""

    subject: str | None = None  # of ``case``; None of an ``if``
    is_followed: bool = True
    is_over: bool = False  # a branch was taken for sure
    num_open: int = 0  # branches so far of which the script does not say whether they are taken
    awaits_pattern: bool = False
    patterns: tuple[str, ...] = ()  # of the branch that begins, A|B) has two

    @property
    def is_case(self) -> bool:
        """Whether patterns open its branches."""
        return self.subject is not None


@dataclass
class Reading:
    """What a script says where each condition that it leaves open takes its branch ``branch``."""

    branch: int
    commands: list[list[str]] = field(default_factory=list[list[str]])
    heredocs: list[str] = field(default_factory=list[str])
    num_branches: int = 1
    values: Values = field(default_factory=Values)
    _open: list[_Condition] = field(default_factory=list[_Condition])
    _status: bool | None = True  # of the last command: True, False, or not known
    _verdict: bool | None = None  # of the condition that is read: None where the script does not say

    def read(self, text: str, depth: int = 0) -> None:
        """Follows ``text``; InputError where it cannot be read."""
        pieces = lexed(text)
        self.heredocs += pieces.heredocs
        command: list[Token] = []
        before = "\n"
        for token in [*pieces.tokens, "\n"]:
            if not (isinstance(token, str) and token in _SEPARATORS):
                command.append(token)
                continue
            self._command(command, before, token, depth)
            command, before = [], token

    def _command(self, command: list[Token], before: str, after: str, depth: int) -> None:
        top = self._open[-1] if self._open else None
        if top is not None and top.is_case and top.awaits_pattern:
            if command and _plain(command[0]) == "esac":
                self._open.pop()
            elif after in (")", "|") and command:
                top.patterns = (*top.patterns, _text(command[-1]))
                if after == ")":
                    self._pattern(top)
            return
        if command:
            self._begun(command, before, depth)
        top = self._open[-1] if self._open else None
        begins = len(command) > 0 and _plain(command[0]) == "case"
        if top is not None and top.is_case and (after == ";;" or begins):
            top.awaits_pattern = True
            if begins:  # the first pattern may stand on its line
                self._command(command[3:], before, after, depth)

    def _begun(self, command: list[Token], before: str, depth: int) -> None:
        """A command behind the words that open and close conditions."""
        if before not in ("&&", "||") and _plain(command[0]) != "then":
            self._status = True
        while command and _plain(command[0]) in (*_LEADING, "fi", "esac", "done", "}"):
            word = _plain(command.pop(0))
            self._keyword(word)
        if not command:
            return
        first = _plain(command[0])
        if first == "case":
            subject = self.values.text(command[1]) if len(command) > 1 and isinstance(command[1], tuple) else "$"
            self._open.append(_Condition(subject, is_followed=False))
        elif all(each.is_followed for each in self._open) and self._goes_on(before):
            if first == "for":
                self._loop(command)
            else:
                self._followed(command, depth)

    def _goes_on(self, before: str) -> bool:
        """Whether a command behind ``&&`` or ``||`` is followed."""
        if before not in ("&&", "||"):
            return True
        if self._status is None:
            self._verdict = None
            self.num_branches = max(self.num_branches, 2)
            return (self.branch == 0) == (before == "&&")
        return self._status == (before == "&&")

    def _keyword(self, word: str) -> None:
        if word in ("if", "elif"):
            self._verdict = None
        if word == "if":
            self._open.append(_Condition())
        top = self._open[-1] if self._open else None
        if top is None:
            return
        if word in ("fi", "esac"):
            self._open.pop()
        elif word == "elif":
            top.is_followed = True
        elif word == "then":
            self._branch(top, self._verdict)
        elif word == "else":
            top.is_followed = not top.is_over and self.branch >= top.num_open
            self.num_branches = max(self.num_branches, top.num_open + 1)

    def _branch(self, top: _Condition, is_taken: bool | None) -> None:
        """Goes into the next branch of a condition: ``is_taken`` None where the script does not say."""
        if is_taken is None:
            top.is_followed = not top.is_over and top.num_open == self.branch
            top.num_open += 1
            self.num_branches = max(self.num_branches, top.num_open + 1)
            return
        top.is_followed = is_taken and not top.is_over and self.branch >= top.num_open
        top.is_over = top.is_over or is_taken

    def _pattern(self, top: _Condition) -> None:
        patterns, top.patterns, top.awaits_pattern = top.patterns, (), False
        if "*" in patterns:
            self._branch(top, True)
        elif is_unknown(top.subject or "$") or any(re.search(r"[*?\[$]", each) for each in patterns):
            self._branch(top, None)
        else:
            self._branch(top, top.subject in patterns)

    def _loop(self, command: list[Token]) -> None:
        """``for NAME in WORD ...``: the branch of that number is the word of that number."""
        items = [word for each in command[3:] if isinstance(each, tuple) for word in self.values.words(each)]
        if items and isinstance(command[1], tuple):
            self.num_branches = max(self.num_branches, len(items))
            self.values.assign(_plain(command[1]), items[min(self.branch, len(items) - 1)], is_more=False)

    def _followed(self, command: list[Token], depth: int) -> None:
        """Assignments, then the words of a command."""
        if _plain(command[0]) in _DECLARING:
            command = [each for each in command[1:] if isinstance(each, Array) or _ASSIGNMENT.match(_text(each))]
        while command:
            first = command[0]
            assigned = _ASSIGNMENT.match(first[0].text) if isinstance(first, tuple) and first else None
            if isinstance(first, Array):
                words = [word for each in first.words for word in self.values.words(each)]
                self.values.assign(first.name, words, is_more=first.is_more)
            elif isinstance(first, tuple) and assigned and first[0].kind == "plain":
                value = self.values.text(first, assigned.end())
                self.values.assign(assigned[1], value, is_more=bool(assigned[2]))
            else:
                break
            command = command[1:]
        words = [word for each in command if isinstance(each, tuple) for word in self.values.words(each)]
        if words:
            self._words(words, depth)

    def _words(self, words: list[str], depth: int) -> None:
        name = words[0].rpartition("/")[2]
        is_test = name in _TESTS or name in ("true", "false")
        self._verdict = None if self._status is None or not is_test else _verdict(words)
        self._status = self._verdict if is_test else True
        if is_test or name in _TALKING:
            return
        found: list[str] = []
        inner: list[str] = []
        for last, word in zip(["", *words], words, strict=False):
            has_options = re.search(r"(?:^|\s)--\w", word) is not None and re.search(r"\s", word) is not None
            if has_options and word.lstrip().startswith("--"):
                found += word.split()  # options in quotes
            elif has_options and not last.startswith("--"):
                inner.append(word)
            else:
                found.append(word)
        found = [word.replace(SPACE, " ") for word in found]
        if words[0].startswith("--") and self.commands:
            self.commands[-1] += found  # lines of options without a \\ between them
        else:
            self.commands.append(found)
        for script in inner if depth < MOST_SCRIPTS else ():
            self.read(script.replace(SPACE, " "), depth + 1)


def _plain(token: Token) -> str:
    """A word without quotes as it stands; empty of anything else."""
    return token[0].text if isinstance(token, tuple) and len(token) == 1 and token[0].kind == "plain" else ""


def _text(token: Token) -> str:
    """All of a word as it stands, quotes left out."""
    return "".join(part.text for part in token) if isinstance(token, tuple) else ""


def _verdict(words: list[str]) -> bool | None:
    """What ``[ A = B ]`` and its like come to; None where the script does not say."""
    if words in (["true"], ["false"]):
        return words == ["true"]
    inner = [word for word in words[1:] if word not in ("]", "]]")]
    if any(is_unknown(word) for word in inner):
        return None
    if inner and inner[0] in ("-z", "-n") and len(inner) <= 2:
        return (len(inner) == 1) == (inner[0] == "-z")
    if len(inner) != 3:
        return None
    left, how, right = inner
    if how in _COMPARED and not re.search(r"[*?\[]", right):
        return _COMPARED[how](left, right)
    if how in _NUMBERS_COMPARED and left.isdecimal() and right.isdecimal():
        return _NUMBERS_COMPARED[how](int(left[:18]), int(right[:18]))
    return None
