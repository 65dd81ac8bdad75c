"""Columns hold what a list of the same records holds, and work out once what records have in common."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.layout import columns as module
from planner.layout.columns import Columns, leaves_of


@dataclass(frozen=True)
class Mesh:
    tp: int = 1
    pp: int = 1


class Record(NamedTuple):
    mesh: Mesh
    size: int
    name: str


class WidthAndSize(NamedTuple):
    tp: int
    size: int


class DepthAndName(NamedTuple):
    pp: int
    name: str


class MeshAndName(NamedTuple):
    mesh: Mesh
    name: str


class Nested(NamedTuple):
    inner: WidthAndSize
    name: str


class Unknown(NamedTuple):
    height: int


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
    left = columns(rows).where(WidthAndSize, lambda key: key.tp * key.size > 3)
    assert list(left) == [row for row in rows if row.mesh.tp * row.size > 3]


@given(records)
def test_a_function_is_called_once_for_each_combination(rows: list[Record]) -> None:
    calls: list[tuple[int, str]] = []

    def value(key: DepthAndName) -> float:
        calls.append((key.pp, key.name))
        return key.pp + (0.5 if key.name == "a" else 0.0)

    found = columns(rows).each(DepthAndName, value)
    assert found.tolist() == [row.mesh.pp + (0.5 if row.name == "a" else 0.0) for row in rows]
    assert sorted(calls) == sorted({(row.mesh.pp, row.name) for row in rows})


@given(records)
def test_every_record_has_the_combination_that_is_named_for_it(rows: list[Record]) -> None:
    keys, which = columns(rows).by(MeshAndName)
    assert [(keys[w].mesh, keys[w].name) for w in which] == [(row.mesh, row.name) for row in rows]
    assert len(np.unique(which)) == len(keys) == len(set(keys))


@given(records)
def test_one_record_stands_for_each_combination(rows: list[Record]) -> None:
    found = list(columns(rows).one_of_each(MeshAndName))
    assert set(found) <= set(rows)
    named = [(row.mesh, row.name) for row in found]
    assert len(named) == len(set(named))
    assert set(named) == {(row.mesh, row.name) for row in rows}


@given(records)
def test_keys_within_keys_are_taken_apart_and_put_together_again(rows: list[Record]) -> None:
    keys, which = columns(rows).by(Nested)
    assert [keys[w] for w in which] == [Nested(WidthAndSize(r.mesh.tp, r.size), r.name) for r in rows]
    assert leaves_of(Nested) == ("tp", "size", "name")


def test_a_field_that_records_have_not_is_an_error() -> None:
    with pytest.raises(AttributeError, match="neither Record nor the values of its fields have height"):
        columns([Record(Mesh(1, 1), 0, "a")]).by(Unknown)


@given(records, st.integers(1, 40))
def test_so_many_combinations_that_they_are_sorted_are_the_same(rows: list[Record], most: int) -> None:
    held = columns(rows)
    keys, which = held.by(Nested)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MOST_MARKED", most)
        few_keys, few_which = held.by(Nested)
        alone = list(held.one_of_each(MeshAndName))
    assert few_keys == keys
    assert few_which.tolist() == which.tolist()
    assert alone == list(held.one_of_each(MeshAndName))


@given(records)
def test_combinations_are_in_order_with_the_last_leaf_fastest(rows: list[Record]) -> None:
    def first_seen(values: list[object]) -> dict[object, int]:
        return {value: place for place, value in enumerate(dict.fromkeys(values))}

    meshes = list(dict.fromkeys(row.mesh for row in rows))
    seen = (
        first_seen([mesh.tp for mesh in meshes]),
        first_seen([r.size for r in rows]),
        first_seen([r.name for r in rows]),
    )
    keys, _ = columns(rows).by(Nested)
    places = [(seen[0][key.inner.tp], seen[1][key.inner.size], seen[2][key.name]) for key in keys]
    assert places == sorted(places)
