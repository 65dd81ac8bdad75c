"""Many records with the same fields, a column each: what depends on few fields is worked out once a combination.

A column holds the distinct values of a field and, for every record, which of them it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, TypeVar, get_type_hints, overload

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
        """The attribute ``name`` of every record's value."""
        if name not in self._attributes:
            self._attributes[name] = _Column.of(map(attrgetter(name), self.values))
        of_values = self._attributes[name]
        return _Column(of_values.values, of_values.codes[self.codes])

    def take(self, positions: NDArray[np.integer | np.bool]) -> _Column:
        """Of the records at these positions, or where the mask is set."""
        return _Column(self.values, self.codes[positions], self._attributes)

    @staticmethod
    def of(values: Iterable[object], codes: NDArray[np.integer] | None = None) -> _Column:
        """``values``, of which some may be equal, of the records with ``codes``; without codes one of each."""
        known: dict[object, int] = {}
        places = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int64)
        places = places.astype(np.min_scalar_type(len(known)))
        return _Column(tuple(known), places if codes is None else places[codes])

    @staticmethod
    def joined(parts: Sequence[_Column]) -> _Column:
        """All columns, one below the other."""
        starts = np.cumsum([0, *(len(part.values) for part in parts)], dtype=np.int32)
        codes = [part.codes.astype(np.int32) + start for part, start in zip(parts, starts[:-1], strict=True)]
        return _Column.of((value for part in parts for value in part.values), np.concatenate(codes))


class Columns(Sequence[T]):
    """A sequence of records of one ``kind``, each made when it is asked for."""

    def __init__(self, kind: type[T], columns: Mapping[str, _Column]) -> None:
        self._kind, self._columns = kind, columns

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
        columns = {name: _Column.joined([part._columns[name] for part in parts]) for name in first._columns}
        return Columns(first._kind, columns)

    @staticmethod
    def from_codes(kind: type[T], columns: Mapping[str, tuple[Sequence[object], NDArray[np.integer]]]) -> Columns[T]:
        """Records from the values of each field and the place of every record's among them.

        ValueError where the columns are not those of ``kind``, are not equally long or point beyond their values.
        """
        lengths = {len(codes) for _, codes in columns.values()}
        if tuple(columns) != kind._fields or len(lengths) != 1:
            raise ValueError(f"columns must be {', '.join(kind._fields)}, all of one length")
        if any(codes.ndim != 1 or codes.dtype.kind not in "iu" for _, codes in columns.values()):
            raise ValueError("the places of a column must be a list of whole numbers")
        if any(len(codes) and not 0 <= codes.min() <= codes.max() < len(values) for values, codes in columns.values()):
            raise ValueError("a column points beyond its values")
        return Columns(kind, {name: _Column(tuple(values), codes) for name, (values, codes) in columns.items()})

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

    def take(self, positions: NDArray[np.integer | np.bool]) -> Columns[T]:
        """The records at these positions, or where the mask is set."""
        return Columns(self._kind, {name: each.take(positions) for name, each in self._columns.items()})

    def with_each(self, name: str, values: Sequence[object]) -> Columns[T]:
        """All records with the first of ``values`` in the field, then all with the second, and so on."""
        columns = {
            own: _Column(column.values, np.tile(column.codes, len(values))) for own, column in self._columns.items()
        }
        columns[name] = _Column.of(values, np.repeat(np.arange(len(values), dtype=np.int32), len(self)))
        return Columns(self._kind, columns)

    def numbers(self, name: str) -> Array:
        """A field of numbers, or an attribute of one field's values."""
        column = self._column(name)
        return np.array(column.values, dtype=np.float64)[column.codes]

    def by(self, key: type[K]) -> tuple[list[K], Positions]:
        """The combinations of the fields of ``key`` that there are, and which of them every record has.

        A field is one of the records', or an attribute of one of their fields' values: ``tp`` of a mesh. Fields that
        are keys themselves are taken apart.
        """
        columns = [self._column(name) for name in leaves_of(key)]
        first, which = _combinations(columns, len(self))
        return _keys(key, ([c.values[i] for i in c.codes[first].tolist()] for c in columns)), which

    def one_of_each(self, key: type[K]) -> Columns[T]:
        """For each combination of the fields of ``key`` that there is, one record that has it."""
        return self.take(_combinations([self._column(name) for name in leaves_of(key)], len(self))[0])

    def each(self, key: type[K], function: Callable[[K], ArrayLike]) -> Array:
        """``function`` of every record's ``key``, called once for each that there is."""
        keys, which = self.by(key)
        return np.array([function(each) for each in keys])[which]

    def where(self, key: type[K], condition: Callable[[K], bool]) -> Columns[T]:
        """The records whose ``key`` meets a condition."""
        return self.take(self.each(key, condition).astype(bool))

    def _column(self, name: str) -> _Column:
        """The field ``name``, or the attribute of that name of the one field whose values have it."""
        if name in self._columns:
            return self._columns[name]
        home = next((own for own, hint in _hints(self._kind).items() if hasattr(hint, name)), None)
        if home is None:
            raise AttributeError(f"neither {self._kind.__name__} nor the values of its fields have {name}")
        return self._columns[home].attribute(name)


# Up to so many combinations are marked in an array; more are sorted.
MOST_MARKED = 2**24


def _combinations(columns: Sequence[_Column], num_records: int) -> tuple[Positions, Positions]:
    """Of each combination of values that occurs a record that has it, and which of them every record has.

    Combinations are in order, with the last column fastest.
    """
    combined, total = np.zeros(num_records, dtype=np.int64), 1
    for column in columns:
        size = max(1, len(column.values))
        if total * size > MOST_MARKED:
            combined, total = _numbered(combined, total)
        combined, total = combined * size + column.codes, total * size
    combined, total = _numbered(combined, total)
    records = np.zeros(total, dtype=np.intp)
    records[combined] = np.arange(num_records)
    return records, combined


def _numbered(combined: Positions, total: int) -> tuple[Positions, int]:
    """Numbers below ``total`` in the same order without those that do not occur, and how many there are."""
    if total > MOST_MARKED:
        numbers, which = np.unique(combined, return_inverse=True)
        return which, len(numbers)
    occurs = np.zeros(total, dtype=bool)
    occurs[combined] = True
    places = np.cumsum(occurs)
    return (places - 1)[combined], int(places[-1])


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


def _keys(key: type[K], columns: Iterator[Sequence[object]]) -> list[K]:
    """Keys from the values of their leaves in order, of all keys one leaf after the other."""
    hints = _hints(key).values()
    return list(map(key, *(_keys(hint, columns) if hasattr(hint, "_fields") else next(columns) for hint in hints)))
