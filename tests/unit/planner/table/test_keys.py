"""What a row depends on stands in its key: a field left out of a key fails, and no layout gets another one's price."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, make_dataclass
from typing import get_type_hints

import pytest

from costmodels.vocabulary.choices import Offload
from planner.evaluation.evaluator import Evaluator
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.pricing.rows import data_rows, work_rows
from planner.pricing.table_builder import _send_lines, _state_row, build_table
from planner.problem import Problem
from planner.solver.bounds import bounds
from planner.table.keys import DataKey, SendKey, StateKey, WorkKey
from tests.planning import problem_of

PROBLEMS = [
    ("llama-tiny", 8, {"batch": 32, "seq_len": 64}),
    ("moe-tiny", 8, {"batch": 32, "seq_len": 64}),
    ("gpt2-1.5b", 8, {"batch": 64, "pins": Pins(offload=Offload.CPU)}),
]


def problem() -> Problem:
    return problem_of("moe-tiny", 8, batch=32, seq_len=64)


def fill_work(posed: Problem, key: WorkKey) -> object:
    return work_rows(posed.target.graph, posed.decisions, [key], posed.target.machine, posed.target.framework)


def fill_data(posed: Problem, key: DataKey) -> object:
    return data_rows(posed.target.graph, posed.decisions, [key], posed.target.machine, posed.target.framework)


def fill_state(posed: Problem, key: StateKey) -> object:
    return _state_row(key, posed.target, posed.space.training)


def fill_sends(posed: Problem, key: SendKey) -> object:
    return _send_lines(key, posed.target)


FILLERS: dict[type, Callable[..., object]] = {
    WorkKey: fill_work, DataKey: fill_data, StateKey: fill_state, SendKey: fill_sends,
}  # fmt: skip


def without_each_leaf(key: tuple) -> Iterator[tuple[str, object]]:
    """The key without one of its fields, once for each; fields of keys inside it too."""
    hints = get_type_hints(type(key))
    for name in hints:
        value = getattr(key, name)
        if hasattr(value, "_fields"):
            for leaf, reduced in without_each_leaf(value):
                yield f"{name}.{leaf}", key._replace(**{name: reduced})  # type: ignore[attr-defined]
            continue
        left = [other for other in hints if other != name]
        reduced_type = make_dataclass("Reduced", left, frozen=True)
        yield name, reduced_type(*(getattr(key, other) for other in left))


@pytest.mark.parametrize("kind", list(FILLERS))
def test_a_key_without_one_of_its_fields_fills_no_row(kind: type) -> None:
    posed = problem()
    # A layout for which every field matters: sharded experts of a pipeline.
    chosen = next(
        layout for layout in posed.space.layouts if layout.mesh.pp > 1 and layout.mesh.ep > 1 and layout.zero_stage
    )
    (key,), _ = Columns.of(Layout, [chosen]).by(kind)
    FILLERS[kind](posed, key)
    for _, reduced in without_each_leaf(key):
        with pytest.raises((AttributeError, KeyError)):
            FILLERS[kind](posed, reduced)


def numbers_of(evaluator: Evaluator) -> list[float]:
    """Everything that a layout, evenly cut, costs."""
    found = evaluator.evaluate(evaluator.even_starts())
    held = [number for rank in found.memory for _, ledger in rank.phases for _, number in ledger.rows]
    return [found.step_time_s, *found.breakdown.values(), *held]


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS)
def test_a_layout_costs_alone_what_it_costs_in_company(model: str, num_devices: int, options: dict) -> None:
    """A field that a key left out would give a layout the numbers of the first with the same key."""
    posed = problem_of(model, num_devices, **options)
    layouts: Sequence[Layout] = posed.space.layouts
    for index in random.Random(0).sample(range(len(layouts)), 60):
        layout = layouts[index]
        alone = build_table(posed.target, posed.space.training, posed.decisions, [layout])
        assert numbers_of(Evaluator(alone, layout)) == pytest.approx(
            numbers_of(Evaluator(posed.table, layout)), rel=1e-12
        ), layout
        ours, all_bounds = bounds(alone, [layout]), bounds(posed.table, [layout])
        for name, bound in asdict(ours).items():
            assert bound[0] == pytest.approx(getattr(all_bounds, name)[0], rel=1e-12), (name, layout)
