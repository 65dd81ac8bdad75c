"""The words of a command line or a shell script that somebody else wrote; nothing of it is run.

Variables, arrays, defaults and sums of whole numbers are put in their places, and conditions are decided where the
script itself says their values. Where it does not, the script is read once for each of their branches: what all
branches say alike counts, and what they say differently is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from planner.errors import InputError
from planner.formats.shell_reading import Reading
from planner.formats.shell_values import SPACE

MOST_BRANCHES = 16  # of one condition
ONE_COMMAND = "keep one of them, or give the command alone, as `set -x` or echo prints it"


@dataclass(frozen=True)
class Command:
    """The words of the command that trains, and which of its options stand under a condition of the script."""

    words: list[str]
    conditional: tuple[str, ...] = ()


def command_of(text: str, options: Mapping[str, bool]) -> Command:
    """The one command of ``text`` with any of ``options``; InputError where commands or branches contradict.

    ``options``: by name whether a value stands behind it.
    """
    worlds = [_world(text, 0, options)]
    worlds += [_world(text, branch, options) for branch in range(1, min(MOST_BRANCHES, worlds[0].num_branches))]
    chosen = [_chosen(world.commands, options) for world in worlds]
    found = [_options(words, options) for words in chosen]
    words, conditional = [*chosen[0]], list[str]()
    for name in dict.fromkeys(name for each in found for name in each):
        values = list(dict.fromkeys(each[name] for each in found if name in each))
        if len(values) > 1:
            raise InputError(
                f"{name} is {_listed(values)}: conditions of the script decide, which is not run", hint=ONE_COMMAND
            )
        if any(name not in each for each in found):
            conditional.append(name)
        if name not in found[0]:
            words += [name, *values] if values[0] else [name]
    return Command(words, tuple(conditional))


def _world(text: str, branch: int, options: Mapping[str, bool]) -> Reading:
    """The script where all conditions that it leaves open take their branch of that number."""
    found = Reading(branch)
    found.read(text)
    if not any(_options(words, options) for words in found.commands):
        for heredoc in found.heredocs:
            found.read(heredoc)
    if not any(_options(words, options) for words in found.commands):  # options alone, which no command takes
        held = [value.split() if isinstance(value, str) else value for value in found.values.known.values()]
        found.commands.append([word for words in held if words and words[0].startswith("--") for word in words])
    return found


def _chosen(commands: list[list[str]], options: Mapping[str, bool]) -> list[str]:
    """The command with most of ``options``; InputError where another one gives one of them another value."""
    counted = [(words, found) for words in commands if (found := _options(words, options))]
    if not counted:
        return commands[0] if commands else []
    words, most = max(counted, key=lambda each: len(each[1]))
    for other, found in counted:
        for name, value in found.items():
            if other is not words and most.get(name, value) != value:
                raise InputError(
                    f"{name} is {_listed([most[name], value])}: several commands of the script give it",
                    hint=ONE_COMMAND,
                )
    return words


def _options(words: list[str], options: Mapping[str, bool]) -> Mapping[str, str]:
    """The ``options`` among ``words`` with the first word behind each: the last counts where one is there twice."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in options:
            is_switch = not options[name] or following.startswith("--")
            found[name] = value if equals else "" if is_switch else following
    return found


def _listed(values: list[str]) -> str:
    shown = [re.sub(rf"[\s{SPACE}]+", " ", value)[:40] or "given" for value in values[:4]]
    return " or ".join(shown)
