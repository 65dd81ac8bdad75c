"""Columns hold what a list of the same records holds, and work out once what records have in common."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.layout.columns import Columns


class Mesh(NamedTuple):
    tp: int
    pp: int


class Record(NamedTuple):
    mesh: Mesh
    size: int
    name: str


records = st.lists(
    st.builds(Record, st.builds(Mesh, *[st.integers(1, 3)] * 2), st.integers(0, 4), st.sampled_from("ab"))
)


def columns(rows: list[Record]) -> Columns[Record]:
    return Columns.of(Record, rows)


@given(records, st.integers(0, 5), st.integers(1, 3))
def test_they_are_the_records_in_order(rows: list[Record], start: int, step: int) -> None:
    held = columns(rows)
    assert list(held) == rows
    assert len(held) == len(rows)
    assert list(held[start::step]) == rows[start::step]
    assert [held[i - len(rows)] for i in range(len(rows))] == rows
    assert Columns.of(Record, held) is held
    assert held.numbers("size").tolist() == [row.size for row in rows]


def test_there_is_no_record_beyond_the_last() -> None:
    with pytest.raises(IndexError):
        columns([Record(Mesh(1, 1), 0, "a")])[1]


@given(records, records)
def test_joined_they_are_one_behind_the_other(first: list[Record], second: list[Record]) -> None:
    assert list(Columns.joined([columns(first), columns(second), columns([])])) == first + second


@given(records, st.lists(st.sampled_from("xyz")))
def test_all_get_the_first_value_then_all_the_second(rows: list[Record], names: list[str]) -> None:
    expected = [row._replace(name=name) for name in names for row in rows]
    assert list(columns(rows).with_each("name", names)) == expected


@given(records)
def test_a_condition_leaves_those_that_meet_it(rows: list[Record]) -> None:
    left = columns(rows).where(lambda row: row.mesh.tp * row.size > 3, "mesh.tp", "size")
    assert list(left) == [row for row in rows if row.mesh.tp * row.size > 3]


@given(records)
def test_a_function_is_called_once_for_each_combination(rows: list[Record]) -> None:
    calls: list[tuple[int, str]] = []

    def value(row: Record) -> float:
        calls.append((row.mesh.pp, row.name))
        return row.mesh.pp + (0.5 if row.name == "a" else 0.0)

    found = columns(rows).each(value, "mesh.pp", "name")
    assert found.tolist() == [row.mesh.pp + (0.5 if row.name == "a" else 0.0) for row in rows]
    assert sorted(calls) == sorted({(row.mesh.pp, row.name) for row in rows})


@given(records)
def test_every_record_has_the_combination_of_the_one_named_for_it(rows: list[Record]) -> None:
    first, which = columns(rows).distinct("mesh", "name")
    assert [(rows[first[w]].mesh, rows[first[w]].name) for w in which] == [(row.mesh, row.name) for row in rows]
    assert len(np.unique(which)) == len(first)
