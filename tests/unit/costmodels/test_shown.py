import json

import pytest

from costmodels.vocabulary.shown import ascii_json, shown


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain, ünï and 中", "plain, ünï and 中"),
        ("two\nlines", "two\nlines"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\u202eb", "a\\u202eb"),
        ("\x7f\t", "\\x7f\\t"),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(text: str, seen: str) -> None:
    assert shown(text) == seen


@pytest.mark.parametrize("value", ["plain", "ünï", "\x7f", "\u202e", "\U0001f600", "\x1b"])
def test_json_in_ascii_is_the_same_json(value: str) -> None:
    written = ascii_json(json.dumps([value, 1], ensure_ascii=False))
    assert json.loads(written) == [value, 1]
    assert all(" " <= each <= "~" for each in written)
