"""Many records with the same fields, a column each: what depends on few fields is worked out once a combination.

A column holds the distinct values of a field and, for every record, which of them it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, get_type_hints, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Positions = NDArray[np.intp]
T = TypeVar("T", bound=NamedTuple)
K = TypeVar("K", bound=NamedTuple)


@dataclass(frozen=True)
class _Column:
    values: tuple[object, ...]
    codes: NDArray[np.integer]  # place in ``values`` of each record's value, in the smallest type that holds them
    # Columns of attributes of the values, shared by all columns with the same values.
    _attributes: dict[str, _Column] = field(default_factory=dict[str, "_Column"])

    def attribute(self, name: str) -> _Column:
        """The attribute ``name`` of every one of the values."""
        if name not in self._attributes:
            self._attributes[name] = _Column.of(map(attrgetter(name), self.values))
        return self._attributes[name]

    def take(self, positions: NDArray[np.integer]) -> _Column:
        """Of the records at these positions."""
        if len(self.values) == 1:  # nothing to look up
            return _Column(self.values, np.zeros(len(positions), dtype=np.uint8), self._attributes)
        return _Column(self.values, self.codes.take(positions), self._attributes)

    def repeated(self, times: int) -> _Column:
        """All records, so many times one behind the other."""
        if len(self.values) == 1:
            return _Column(self.values, np.zeros(times * len(self.codes), dtype=np.uint8), self._attributes)
        return _Column(self.values, np.concatenate([self.codes[:0], *[self.codes] * times]), self._attributes)

    @staticmethod
    def of(values: Iterable[object], codes: NDArray[np.integer] | None = None) -> _Column:
        """``values``, of which some may be equal, of the records with ``codes``; without codes one of each."""
        known: dict[object, int] = {}
        places = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)
        places = _slim(places, len(known))
        return _Column(tuple(known), places if codes is None else places[codes])

    @staticmethod
    def joined(parts: Sequence[_Column]) -> _Column:
        """All columns, one below the other."""
        known: dict[object, int] = {}
        places = [[known.setdefault(value, len(known)) for value in part.values] for part in parts]
        if len(known) == 1:
            return _Column(tuple(known), np.zeros(sum(len(part.codes) for part in parts), dtype=np.uint8))
        smallest = np.min_scalar_type(len(known))
        codes = [
            part.codes.astype(smallest, copy=False)
            if own == list(range(len(own)))
            else np.array(own, dtype=smallest)[part.codes]
            for part, own in zip(parts, places, strict=True)
        ]
        return _Column(tuple(known), np.concatenate(codes))


def _slim(codes: NDArray[np.integer], number: int) -> NDArray[np.integer]:
    """Codes of so many values in the smallest type that holds them."""
    return codes.astype(np.min_scalar_type(number), copy=False)


class _Leaf(NamedTuple):
    """A field of a key: the values of a column, or an attribute of them."""

    home: str
    column: _Column  # that is called ``home``
    of_values: _Column | None  # the attribute of each value; None: the values themselves

    @property
    def values(self) -> tuple[object, ...]:
        """The distinct ones."""
        return self.column.values if self.of_values is None else self.of_values.values

    def codes(self, records: Positions | slice) -> NDArray[np.integer]:
        """Which of ``values`` some records have."""
        codes = self.column.codes[records]
        return codes if self.of_values is None else self.of_values.codes[codes]


class Columns(Sequence[T]):
    """A sequence of records of one ``kind``, each made when it is asked for."""

    def __init__(self, kind: type[T], columns: Mapping[str, _Column]) -> None:
        self._kind, self._columns = kind, columns
        self._by: dict[type, tuple[list[Any], Positions]] = {}  # what ``by`` said

    @staticmethod
    def of(kind: type[T], records: Iterable[T]) -> Columns[T]:
        """``records`` in columns; as they are where they lie in columns already."""
        if isinstance(records, Columns):
            return records
        rows = list(records)
        return Columns(kind, {name: _Column.of(row[i] for row in rows) for i, name in enumerate(kind._fields)})

    @staticmethod
    def joined(parts: Sequence[Columns[T]]) -> Columns[T]:
        """All of at least one part, one behind the other."""
        first = parts[0]
        if not any(parts[1:]):
            return first
        columns = {name: _Column.joined([part._columns[name] for part in parts]) for name in first._columns}
        return Columns(first._kind, columns)

    @staticmethod
    def from_codes(kind: type[T], columns: Mapping[str, tuple[Sequence[object], NDArray[np.integer]]]) -> Columns[T]:
        """Records from the values of each field and the place of every record's among them."""
        each = {name: (tuple(values), codes) for name, (values, codes) in columns.items()}
        return Columns(
            kind, {name: _Column(values, _slim(codes, len(values))) for name, (values, codes) in each.items()}
        )

    @staticmethod
    def checked(kind: type[T], columns: Mapping[str, tuple[Sequence[object], NDArray[np.integer]]]) -> Columns[T]:
        """The same of columns that others wrote.

        ValueError where the columns are not those of ``kind``, are not equally long or point beyond their values.
        """
        lengths = {len(codes) for _, codes in columns.values()}
        if tuple(columns) != kind._fields or len(lengths) != 1:
            raise ValueError(f"columns must be {', '.join(kind._fields)}, all of one length")
        if any(codes.ndim != 1 or codes.dtype.kind not in "iu" for _, codes in columns.values()):
            raise ValueError("the places of a column must be a list of whole numbers")
        if any(len(codes) and not 0 <= codes.min() <= codes.max() < len(values) for values, codes in columns.values()):
            raise ValueError("a column points beyond its values")
        return Columns.from_codes(kind, columns)

    def values_of(self, name: str) -> tuple[object, ...]:
        """The distinct values of a field."""
        return self._columns[name].values

    def codes_of(self, name: str) -> NDArray[np.integer]:
        """Which of ``values_of`` every record has."""
        return self._columns[name].codes

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())).codes)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Columns[T]: ...
    def __getitem__(self, index: int | slice) -> T | Columns[T]:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self._kind._make(column.values[column.codes[index]] for column in self._columns.values())

    def at(self, positions: NDArray[np.integer]) -> list[T]:
        """The records at these positions, one by one."""
        columns = [
            [column.values[code] for code in column.codes.take(positions).tolist()] for column in self._columns.values()
        ]
        return list(map(self._kind._make, zip(*columns, strict=True)))

    def take(self, positions: NDArray[np.integer | np.bool]) -> Columns[T]:
        """The records at these positions, or where the mask is set."""
        places: NDArray[Any] = np.flatnonzero(positions) if positions.dtype == np.bool else positions
        return Columns(self._kind, {name: each.take(places) for name, each in self._columns.items()})

    def with_each(self, name: str, values: Sequence[object]) -> Columns[T]:
        """All records with the first of ``values`` in the field, then all with the second, and so on."""
        times = len(values)
        columns = {own: column if times == 1 else column.repeated(times) for own, column in self._columns.items()}
        columns[name] = _Column.of(values, np.repeat(_slim(np.arange(times), times), len(self)))
        return Columns(self._kind, columns)

    def numbers(self, name: str) -> Array:
        """A field of numbers, or an attribute of one field's values."""
        leaf = self._leaf(name)
        return np.array(leaf.values, dtype=np.float64).take(leaf.codes(slice(None)))

    def by(self, key: type[K]) -> tuple[list[K], Positions]:
        """The combinations of the fields of ``key`` that there are, and which of them every record has.

        A field is one of the records', or an attribute of one of their fields' values: ``tp`` of a mesh. Fields that
        are keys themselves are taken apart.
        """
        if key in self._by:
            return self._by[key]
        leaves = self._leaves(key)
        records, which = _combinations(leaves)
        keys = _keys_of(key, leaves, records)
        if len(which) <= MOST_KEPT:
            self._by[key] = keys, which
        return keys, which

    def keys(self, key: type[K]) -> list[K]:
        """The combinations of the fields of ``key`` that there are, in the order of ``by``."""
        return self.one_of_each(key).by(key)[0]

    def one_of_each(self, key: type[K]) -> Columns[T]:
        """For each combination of the fields of ``key`` that there is, one record that has it."""
        return self.take(_last_of_each(*_compact(*_combined(self._leaves(key))))[0])

    def each(self, key: type[K], function: Callable[[K], ArrayLike]) -> Array:
        """``function`` of every record's ``key``, called once for each that there is."""
        if len(self) <= MOST_KEPT:
            keys, which = self.by(key)
            return np.array([function(each) for each in keys]).take(which, axis=0)
        leaves = self._leaves(key)
        combined, total = _compact(*_combined(leaves))
        records, occurs = _last_of_each(combined, total)
        found = np.array([function(each) for each in _keys_of(key, leaves, records)])
        of_numbers = np.zeros((total, *found.shape[1:]), dtype=found.dtype)
        of_numbers[occurs] = found
        return of_numbers.take(combined, axis=0)

    def where(self, key: type[K], condition: Callable[[K], bool]) -> Columns[T]:
        """The records whose ``key`` meets a condition."""
        return self.take(self.each(key, condition).astype(bool))

    def _leaves(self, key: type[K]) -> list[_Leaf]:
        return [self._leaf(name) for name in leaves_of(key)]

    def _leaf(self, name: str) -> _Leaf:
        """The field ``name``, or the attribute of that name of the one field whose values have it."""
        if name in self._columns:
            return _Leaf(name, self._columns[name], None)
        home = next((own for own, hint in _hints(self._kind).items() if hasattr(hint, name)), None)
        if home is None:
            raise AttributeError(f"neither {self._kind.__name__} nor the values of its fields have {name}")
        return _Leaf(home, self._columns[home], self._columns[home].attribute(name))


# Which combination every record has is kept for up to so many records.
MOST_KEPT = 2**16
# Up to so many combinations are marked in an array; more are sorted.
MOST_MARKED = 2**24


def _combinations(leaves: Sequence[_Leaf]) -> tuple[Positions, Positions]:
    """Of each combination of values that occurs a record that has it, and which of them every record has.

    Combinations are in order, with the last leaf fastest.
    """
    return _numbered(*_combined(leaves))


def _combined(leaves: Sequence[_Leaf]) -> tuple[Positions, int]:
    """A number for every record that says its combination, and below which number all are."""
    combined, total = np.zeros(len(leaves[0].column.codes), dtype=np.int64), 1
    for at, part in enumerate(_parts(leaves)):
        size = _num_combinations(part)
        if total * size > MOST_MARKED:
            records, combined = _numbered(combined.astype(np.intp), total)
            total = len(records)
        combined, total = combined * size + _places(part) if at else _places(part), total * size
    return combined.astype(np.intp, copy=False), total  # as numpy wants it where it is used


def _num_combinations(leaves: Sequence[_Leaf]) -> int:
    return prod(max(1, len(leaf.values)) for leaf in leaves)


def _parts(leaves: Sequence[_Leaf]) -> list[list[_Leaf]]:
    """``leaves`` in order, each part of at most ``MOST_MARKED`` combinations or of a single leaf."""
    parts = [[leaves[0]]]
    for leaf in leaves[1:]:
        if _num_combinations([*parts[-1], leaf]) > MOST_MARKED:
            parts.append([])
        parts[-1].append(leaf)
    return parts


def _places(leaves: Sequence[_Leaf]) -> NDArray[np.int32]:
    """Place of every record's combination among all that there may be.

    What the attributes of one column add to it is summed up for each of its values first.
    """
    found = np.zeros(len(leaves[0].column.codes), dtype=np.int32)
    of_values: dict[str, NDArray[np.int32]] = {}
    for at, leaf in enumerate(leaves):
        step = _num_combinations(leaves[at + 1 :])
        if leaf.of_values is not None:
            added = np.multiply(leaf.of_values.codes, step, dtype=np.int32, casting="unsafe")
            of_values[leaf.home] = of_values[leaf.home] + added if leaf.home in of_values else added
        elif len(leaf.values) > 1:
            found += np.multiply(leaf.column.codes, step, dtype=np.int32, casting="unsafe")
    columns = {leaf.home: leaf.column for leaf in leaves}
    for home, each in of_values.items():
        found += each.take(columns[home].codes)
    return found


def _numbered(combined: Positions, total: int) -> tuple[Positions, Positions]:
    """Of each number below ``total`` that occurs the last record with it, and which of these every record has."""
    combined, total = _compact(combined, total)
    records, occurs = _last_of_each(combined, total)
    return records, (np.cumsum(occurs) - 1).take(combined)


def _compact(combined: Positions, total: int) -> tuple[Positions, int]:
    """The same numbers, or where they may be too large to be marked their places among those that occur."""
    if total <= MOST_MARKED:
        return combined, total
    numbers, places = np.unique(combined, return_inverse=True)
    return places, len(numbers)


def _last_of_each(combined: Positions, total: int) -> tuple[Positions, NDArray[np.bool]]:
    """Of each number below ``total`` that occurs the last record with it, and whether each number does."""
    last = np.full(total, -1, dtype=np.int32)
    last[combined] = np.arange(len(combined), dtype=np.int32)
    occurs = last >= 0
    return last[occurs].astype(np.intp), occurs


@lru_cache(maxsize=64)
def _hints(kind: type[tuple[object, ...]]) -> Mapping[str, type]:
    return get_type_hints(kind)


@lru_cache(maxsize=64)
def leaves_of(key: type[tuple[object, ...]]) -> tuple[str, ...]:
    """The names of a key's fields, those of fields that are keys themselves in their place."""
    found: list[str] = []
    for name, hint in _hints(key).items():
        found += leaves_of(hint) if hasattr(hint, "_fields") else [name]
    return tuple(found)


def key_of(key: type[K], record: NamedTuple) -> K:
    """The ``key`` of one record: its fields, or attributes of their values."""
    homes = _homes(key, type(record))
    return _keys(key, ([getattr(record if place is None else record[place], name)] for name, place in homes))[0]


@lru_cache(maxsize=256)
def _homes(key: type[tuple[object, ...]], kind: type[tuple[object, ...]]) -> tuple[tuple[str, int | None], ...]:
    """For each leaf of ``key`` its name, and the place of the field of ``kind`` that has it; None: it is a field."""
    hints = list(enumerate(_hints(kind).values()))
    homes = {name: place for place, hint in reversed(hints) for name in dir(hint)}  # the first field that has it
    return tuple((name, None if hasattr(kind, name) else homes[name]) for name in leaves_of(key))


def _keys_of(key: type[K], leaves: Sequence[_Leaf], records: Positions) -> list[K]:
    """The ``key`` of each of these records."""
    return _keys(key, ([leaf.values[code] for code in leaf.codes(records).tolist()] for leaf in leaves))


def _keys(key: type[K], columns: Iterator[Sequence[object]]) -> list[K]:
    """Keys from the values of their leaves in order, of all keys one leaf after the other."""
    hints = _hints(key).values()
    return list(map(key, *(_keys(hint, columns) if hasattr(hint, "_fields") else next(columns) for hint in hints)))
