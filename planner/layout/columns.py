"""Many records with the same fields, a column each: what depends on few fields is worked out once a combination.

A column holds the distinct values of a field and, for every record, which of them it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Positions = NDArray[np.intp]
T = TypeVar("T", bound=NamedTuple)


@dataclass(frozen=True)
class _Column:
    values: tuple[object, ...]
    codes: NDArray[np.int32]  # place in ``values`` of each record's value

    @staticmethod
    def of(values: Iterable[object], codes: NDArray[np.int32] | None = None) -> _Column:
        """``values``, of which some may be equal, of the records with ``codes``; without codes one of each."""
        known: dict[object, int] = {}
        places = np.array([known.setdefault(value, len(known)) for value in values], dtype=np.int32)
        return _Column(tuple(known), places if codes is None else places[codes])

    @staticmethod
    def joined(parts: Sequence[_Column]) -> _Column:
        """All columns, one below the other."""
        starts = np.cumsum([0, *(len(part.values) for part in parts)], dtype=np.int32)
        codes = [part.codes + start for part, start in zip(parts, starts[:-1], strict=True)]
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
        columns = {name: _Column(each.values, each.codes[positions]) for name, each in self._columns.items()}
        return Columns(self._kind, columns)

    def with_each(self, name: str, values: Sequence[object]) -> Columns[T]:
        """All records with the first of ``values`` in the field, then all with the second, and so on."""
        columns = {
            own: _Column(column.values, np.tile(column.codes, len(values))) for own, column in self._columns.items()
        }
        columns[name] = _Column.of(values, np.repeat(np.arange(len(values), dtype=np.int32), len(self)))
        return Columns(self._kind, columns)

    def numbers(self, name: str) -> Array:
        """A field of numbers."""
        column = self._columns[name]
        return np.array(column.values, dtype=np.float64)[column.codes]

    def distinct(self, *names: str) -> tuple[Positions, Positions]:
        """Position of a record with each combination of the fields, and which combination every record has.

        A field may be an attribute of another: ``mesh.tp``.
        """
        combined = np.zeros(len(self), dtype=np.int64)
        for name in names:
            column = self._column(name)
            combined = combined * max(1, len(column.values)) + column.codes
        _, first, which = np.unique(combined, return_index=True, return_inverse=True)
        return first, which

    def each(self, function: Callable[[T], ArrayLike], *names: str) -> Array:
        """``function`` of every record, called once for each combination of the fields it depends on, ``names``."""
        first, which = self.distinct(*names)
        return np.array([function(self[i]) for i in first])[which]

    def where(self, condition: Callable[[T], bool], *names: str) -> Columns[T]:
        """The records that meet a condition on the fields ``names``."""
        return self.take(self.each(condition, *names).astype(bool))

    def _column(self, name: str) -> _Column:
        field, _, attribute = name.partition(".")
        column = self._columns[field]
        return _Column.of(map(attrgetter(attribute), column.values), column.codes) if attribute else column
