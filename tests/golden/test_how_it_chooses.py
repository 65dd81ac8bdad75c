"""docs/how-it-chooses.md: its Python blocks print what stands below them, and its prose has no number of its own."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-it-chooses.md"
# A block of Python, and below it what it prints.
STEP = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```", re.DOTALL)
FENCED = re.compile(r"```.*?```", re.DOTALL)
# Numbers that a reader could not check by counting: of three digits or more, or with a decimal point.
TELLING = re.compile(r"\d[\d,]{2,}(?:\.\d+)?|\d+\.\d+")


def printed_by_the_page(text: str) -> list[tuple[str, str]]:
    """For each block what it prints and what the page says that it prints."""
    names: dict[str, object] = {}
    found: list[tuple[str, str]] = []
    for code, shown in STEP.findall(text):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(code, names)
        found.append((printed.getvalue(), shown))
    return found


def test_the_page_shows_what_its_code_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python") == len(STEP.findall(text)) >= 7
    for printed, shown in printed_by_the_page(text):
        assert printed == shown


def test_numbers_of_the_prose_stand_in_a_block() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = "\n".join(FENCED.findall(text))
    prose = re.sub(r"`[^`]*`", "", FENCED.sub("", text))
    told = TELLING.findall(prose)
    assert told
    assert [number for number in told if number.rstrip(",") not in blocks] == []
