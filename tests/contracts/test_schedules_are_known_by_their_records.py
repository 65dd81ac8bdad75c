"""What search and prices know of a schedule stands in its record: a new one is its actions and its line."""

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from costmodels.vocabulary.schedules import SCHEDULES, Schedule, ScheduleName, peak_in_flight
from planner.executor import pipeline

ROOT = Path(__file__).resolve().parents[2]
# The records themselves; the executor, which names torch's class for each.
AT_HOME = {ROOT / "costmodels/vocabulary/schedules.py", ROOT / "planner/executor/pipeline.py"}
# What other frameworks call them, and which of them they have.
FORMATS = ROOT / "planner/formats"
# What a layout without a pipeline is said to run.
WITHOUT_PIPELINE = "ONE_F_ONE_B"


def schedules_named_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ScheduleName":
            yield node.attr


def test_nobody_else_names_a_schedule() -> None:
    files = [path for package in ("planner", "costmodels") for path in (ROOT / package).rglob("*.py")]
    files = [path for path in files if not path.is_relative_to(FORMATS)]
    named = {
        (path.relative_to(ROOT), name) for path in files if path not in AT_HOME for name in schedules_named_in(path)
    }
    assert {(path, name) for path, name in named if name != WITHOUT_PIPELINE} == set()


def test_the_executor_has_a_class_of_torch_for_each_schedule_that_torch_has() -> None:
    classes = {**pipeline._OF_ONE_STAGE, **pipeline._OF_SEVERAL_STAGES}
    assert set(classes) == {name for name, rules in SCHEDULES.items() if rules.in_torch}


def legal_numbers(rules: Schedule) -> Iterator[tuple[int, int, int]]:
    for p, v, m in product((2, 3, 4), (1, 2, 3), (1, 4, 7, 12, 24, 40)):
        if not rules.violations(p, v, m):
            yield p, v, m


@pytest.mark.parametrize("name", ScheduleName)
def test_a_shortened_schedule_sees_the_peak_of_activations(name: ScheduleName) -> None:
    rules = SCHEDULES[name]
    numbers = list(legal_numbers(rules))
    assert numbers
    for p, v, m in numbers:
        bytes_of = dict.fromkeys(range(p * v), 1.0)
        whole = [peak_in_flight(actions, bytes_of) for actions in rules.actions(p, v, m)]
        short = [peak_in_flight(actions, bytes_of) for actions in rules.actions(p, v, rules.shortened_to_peak(p, m))]
        assert short == whole, (p, v, m)
        if rules.has_one_stage:
            assert tuple(whole) == rules.in_flight(p, m), (p, v, m)
