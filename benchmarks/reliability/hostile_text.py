"""Texts that a stranger may give as a name, each with something that an output could obey rather than show."""

from __future__ import annotations

import random

# What shells, YAML, TOML, JSON, HTML, terminals and file systems give a meaning to.
PIECES: tuple[str, ...] = (
    "'", '"', "\\", "`", "$(id)", "${HOME}", "$HOME", "; rm -rf x", "&& false", "|| true", "| cat", "> out", "<in",
    "\n", "\r\n", "\r", "\t", "\v", "\f", "\n#SBATCH --wrap=id", "\n- name: x", "\nEOF\n", "%s", "%n", "{}", "{0}",
    "{{ 7*7 }}", "{% raw %}", "*", "?", "[a-z]", "~", "!", "!!python/object/apply:os.system ['id']", "&a", "*a", "- x",
    ": ", "# x", "|", ">", "---", "...", "yes", "null", "~", "1e3", "0x10", "0o17", "1_000", "2001-01-01", "=", "<<",
    "<script>alert(1)</script>", "</script>", "<img src=x onerror=alert(1)>", '" onmouseover="x', "javascript:x",
    "-->", "<!--", "]]>", "&lt;", "&#x3c;", "<style>", "</style>", "</title>", "\x1b[2J", "\x1b]0;title\x07",
    "\x1b[31m", "\x9b31m", "\x07", "\x08\x08", "\x7f", "\x00", "\u0000", "\x01", "\u202e", "\u2066", "\u2069",
    "\u200b", "\ufeff", "\u2028", "\u2029", "\x85", "\xa0", "\ud800", "\udcff", "\U0001f600", "e\u0301" * 3, "\uffff",
    "[bold]", "[/bold]", "[link=file:///etc]", "-o", "--trust", "-", "--", "../", "..", "/", "//", "a/../b", ".", " ",
    "con", "a" * 5000, "(" * 300, "[" * 300, "\u0661", "\u00b2", "NaN", "Infinity", "True", "None", "__class__",
)  # fmt: skip
_AROUND = ("layers.0", "h100", "model", "plan", "0", "")


def hostile_texts(num: int, seed: int) -> list[str]:
    """``num`` different texts: each piece alone, then between ordinary words, then several together."""
    draw, found = random.Random(seed), dict[str, None].fromkeys(PIECES)
    while len(found) < num:
        pieces = [draw.choice(PIECES) for _ in range(draw.choice((1, 1, 2, 3)))]
        found[draw.choice(_AROUND) + draw.choice(("", " ", ".")).join(pieces) + draw.choice(_AROUND)] = None
    return list(found)[:num]
