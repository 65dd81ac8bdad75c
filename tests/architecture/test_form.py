"""The form of the code: each module opens with a sentence, files and functions stay small, values are never global."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("planner", "costmodels", "hardware_profiles")
    for path in (ROOT / package).rglob("*.py")
)

MAX_LINES_OF_FILE = 420  # "about 400"
MAX_LINES_OF_FUNCTION = 60  # "about 50"
MAX_ARGUMENTS = 6
FORBIDDEN_NAMES = {"utils", "helpers", "common", "util", "helper"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree_of(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def functions_of(source: str) -> list[Function]:
    return [node for node in ast.walk(tree_of(source)) if isinstance(node, Function)]


def is_command(function: Function) -> bool:
    """A command of the command line has one argument for each option."""
    return any("command" in ast.unparse(d) or "callback" in ast.unparse(d) for d in function.decorator_list)


def gives_a_reason(source: str, function: Function) -> bool:
    """Whether a comment on the ``def`` line says why the function is over a limit."""
    return "# over " in (ROOT / source).read_text(encoding="utf-8").splitlines()[function.lineno - 1]


@pytest.mark.parametrize("source", SOURCES)
def test_a_module_opens_with_a_sentence(source: str) -> None:
    text = ast.get_docstring(tree_of(source))
    if source.endswith("__init__.py") and text is None:
        assert not tree_of(source).body, "an __init__ with code says what it is for"
        return
    assert text is not None
    first = text.split("\n\n")[0]
    assert first.rstrip().endswith((".", ":")), f"not a sentence: {first!r}"


@pytest.mark.parametrize("source", SOURCES)
def test_pieces_stay_small(source: str) -> None:
    num_lines = len((ROOT / source).read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES_OF_FILE
    for function in functions_of(source):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        num_arguments = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if is_command(function) or gives_a_reason(source, function):
            continue
        assert length <= MAX_LINES_OF_FUNCTION, f"{function.name} has {length} lines"
        assert num_arguments <= MAX_ARGUMENTS, f"{function.name} takes {num_arguments} arguments"


@pytest.mark.parametrize("source", SOURCES)
def test_names_say_something(source: str) -> None:
    assert not FORBIDDEN_NAMES & set(Path(source).with_suffix("").parts)


@pytest.mark.parametrize("source", SOURCES)
def test_nothing_is_set_globally(source: str) -> None:
    assert not [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Global)]
