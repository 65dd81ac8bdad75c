"""A search in a file: a cost table and its layouts, as arrays that numpy reads without running anything.

One .npz: the arrays by name, and under ``header`` a JSON text with the keys, the facts and the labels of the axes. A
file whose labels are not those of this version is refused, so that no number is read under another name.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import GenericAlias
from typing import Any, cast, get_type_hints

import numpy as np
from pydantic import TypeAdapter, ValidationError

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Data, Element, Holding, Time
from planner.errors import InputError
from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.output_file import write_bytes
from planner.table.cost_table import CostTable

FORMAT = 1
LABELS = {axis.__name__: [label.name for label in axis] for axis in (Time, Holding, Data, Element, Recompute)}
_ARRAYS = ("time_s", "num_bytes", "data_s", "elements", "state_bytes")
_HINTS = get_type_hints(CostTable)
_FACTS = tuple(field.name for field in fields(CostTable) if field.name not in (*_ARRAYS, "sends"))


@dataclass(frozen=True)
class SavedSearch:
    """All that bounds, search and evaluation need."""

    table: CostTable
    layouts: Columns[Layout]


def write_search(path: Path, table: CostTable, layouts: Sequence[Layout]) -> None:
    """Writes both to ``path``, whole or not at all."""
    listed = Columns.of(Layout, layouts)
    header: dict[str, Any] = {
        "format": FORMAT,
        "labels": LABELS,
        "facts": {name: TypeAdapter(_HINTS[name]).dump_python(getattr(table, name), mode="json") for name in _FACTS},
        "columns": {
            name: _values_of(hint).dump_python(listed.values_of(name), mode="json")
            for name, hint in get_type_hints(Layout).items()
        },
    }
    arrays = {name: getattr(table, name) for name in _ARRAYS}
    arrays |= {f"sends.{place}": lines for place, lines in enumerate(table.sends)}
    arrays |= {f"codes.{name}": listed.codes_of(name) for name in header["columns"]}
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez_compressed(buffer, header=text, **arrays)
    write_bytes(path, buffer.getvalue())


def read_search(path: Path) -> SavedSearch:
    """What ``write_search`` wrote; InputError where the file is damaged, foreign or of another version."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        header = json.loads(arrays["header"].tobytes())
        _check_version(path, header)
        return SavedSearch(_table(header["facts"], arrays), _layouts(header["columns"], arrays))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint="write it again") from error
    except (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile, ValidationError) as error:
        raise InputError(f"{path} is not a saved search: {error}", hint="write it again") from error


def _check_version(path: Path, header: dict[str, Any]) -> None:
    if header["format"] != FORMAT or header["labels"] != LABELS:
        raise InputError(
            f"{path} was written by another version: format {header['format']}, this one reads {FORMAT}, "
            f"or with other terms than {', '.join(LABELS)} have now",
            hint="search again and save that",
        )


def _table(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> CostTable:
    known: dict[str, Any] = {name: TypeAdapter(_HINTS[name]).validate_python(facts[name]) for name in _FACTS}
    known |= {name: arrays[name] for name in _ARRAYS}
    sends = tuple(arrays[f"sends.{place}"] for place in range(len(known["send_keys"])))
    return CostTable(**known, sends=sends)


def _values_of(hint: type) -> TypeAdapter[tuple[object, ...]]:
    """Of a column whose values are of this type."""
    return TypeAdapter(cast("type[tuple[object, ...]]", GenericAlias(tuple, (hint, ...))))


def _layouts(columns: dict[str, Any], arrays: dict[str, np.ndarray]) -> Columns[Layout]:
    hints = get_type_hints(Layout)
    return Columns.from_codes(
        Layout,
        {
            name: (_values_of(hint).validate_python(columns[name]), arrays[f"codes.{name}"])
            for name, hint in hints.items()
        },
    )
