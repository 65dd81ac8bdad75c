"""A search in a file: a cost table and its layouts, as arrays that numpy reads without running anything.

One .npz: the arrays by name, and under ``header`` a JSON text with the keys, the facts and the labels of the axes. A
file whose labels are not those of this version is refused, so that no number is read under another name. So is one
whose arrays are not as large as its keys say. Nothing is unpacked that says that it is larger than any search.
"""

from __future__ import annotations

import io
import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Any, NamedTuple, cast, get_type_hints

import numpy as np
from pydantic import TypeAdapter

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Data, Element, Holding, Time
from planner.errors import InputError
from planner.json_file import listed, read_content
from planner.layout.columns import Columns
from planner.layout.layout import Layout
from planner.output_file import write_bytes
from planner.table.cost_table import CostTable, KindOfElement
from planner.table.keys import DataKey, SendKey, StateKey, TensorSplit, WorkKey

FORMAT = 2
MOST_BYTES = 2**29  # of a file and of its arrays: those of DeepSeek-V3 over 2,048 devices have some 80 MB
LABELS = {axis.__name__: [label.name for label in axis] for axis in (Time, Holding, Data, Element, Recompute)}
_ARRAYS = ("time_s", "num_bytes", "data_s", "elements", "state_bytes")
_HINTS = get_type_hints(CostTable)
_STATES = ("parameters", "gradients", "optimizer", "moments")  # of ``state_bytes``
# What the readers of zip, numpy and JSON, and of what these hold, raise for content that is none.
_DAMAGED = (
    ValueError, TypeError, LookupError, ArithmeticError, AttributeError, EOFError, OSError, RuntimeError,
    tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
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
    content = read_content(path, InputError, MOST_BYTES)
    try:
        arrays = _arrays_in(content)
        header = json.loads(arrays.pop("header").tobytes())
        _check_version(path, header)
        table, layouts = _table(header["facts"], arrays), _layouts(header["columns"], arrays)
        wrong = [*_wrong_shapes(table), *_wrong_rows(table, layouts)]
        if wrong:
            raise ValueError(listed(wrong))
        return SavedSearch(table, layouts)
    except _DAMAGED as error:
        raise InputError(f"{path} is not a saved search: {error}", hint="write it again") from error


def _arrays_in(content: bytes) -> dict[str, np.ndarray]:
    """The arrays of an .npz, each of the size that it says it has."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > MOST_BYTES:
            raise ValueError(f"its arrays have more than {MOST_BYTES:,} bytes")
        return {member.filename.removesuffix(".npy"): _array_in(archive.read(member)) for member in members}


def _array_in(content: bytes) -> np.ndarray:
    """An array of numbers as numpy writes it; ValueError where it is none, or is not all there."""
    stream = io.BytesIO(content)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is of another version of numpy's format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    values = stream.read()
    if dtype.kind not in "biuf" or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"an array of shape {shape} and type {dtype} has {len(values)} bytes")
    return np.frombuffer(values, dtype).reshape(shape, order="F" if is_fortran else "C")


def _check_version(path: Path, header: dict[str, Any]) -> None:
    if header["format"] != FORMAT or header["labels"] != LABELS:
        raise InputError(
            f"{path} was written by another version: format {header['format']}, this one reads {FORMAT}, "
            f"or with other terms than {', '.join(LABELS)} have now",
            hint="search again and save that",
        )


@cache
def _adapter_of(fact: str) -> TypeAdapter[Any]:
    return TypeAdapter(_HINTS[fact])


def _table(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> CostTable:
    known: dict[str, Any] = {name: _adapter_of(name).validate_python(facts[name]) for name in _FACTS}
    known |= {name: arrays[name] for name in _ARRAYS}
    sends = tuple(arrays[f"sends.{place}"] for place in range(len(known["send_keys"])))
    return CostTable(**known, sends=sends)


def _wrong_shapes(table: CostTable) -> Iterator[str]:
    """Which arrays are not as large as the keys and labels say, or hold what is no number.

    What a kind of device does not run is not priced for it, but for another.
    """
    units = table.units
    if not len(units.kinds) == len(units.names) == len(units.is_block) or min(units.kinds) < 0:
        yield "kinds, names and is_block must be of the same units"
    devices, kinds = len(table.cluster.devices), max(table.units.kinds) + 1
    modes = len(Recompute)
    wanted = {
        "time_s": (devices, len(table.work_keys), modes, kinds, len(Time)),
        "num_bytes": (len(table.work_keys), modes, kinds, len(Holding)),
        "data_s": (devices, len(table.data_keys), kinds, len(Data)),
        "elements": (len(table.splits), kinds, len(Element)),
        "state_bytes": (len(table.state_keys), KindOfElement.EXPERT + 1, len(_STATES)),
    }
    arrays = [(name, getattr(table, name), shape) for name, shape in wanted.items()]
    pairs = zip(table.send_keys, table.sends, strict=True)
    arrays += [("sends", lines, (key.pp if key.groups and key.pp > 1 else key.pp - 1, 2)) for key, lines in pairs]
    for name, array, shape in arrays:
        missing = np.isnan(array).all(axis=0) if name in ("time_s", "data_s") else np.isnan(array)
        if array.shape != shape or array.dtype != np.float64 or np.isinf(array).any() or missing.any():
            yield f"{name} must hold numbers in the shape {shape}, not {array.dtype} in {array.shape}"


def _wrong_rows(table: CostTable, layouts: Columns[Layout]) -> Iterator[str]:
    """Which keys of the layouts have no row, and which pipelines no schedule can run."""
    rows: dict[type[Any], Sequence[object]] = {
        WorkKey: table.work_keys, DataKey: table.data_keys, TensorSplit: table.splits, StateKey: table.state_keys,
        SendKey: table.send_keys,
    }  # fmt: skip
    for kind, known in rows.items():
        missing = set(layouts.by(kind)[0]) - set(known)
        if missing:
            yield f"its layouts have {len(missing)} of {kind.__name__} without a row"
    for each in layouts.by(_Pipeline)[0]:
        yield from each.schedule.rules.violations(each.pp, each.virtual_stages, each.num_microbatches)
        if each.pp == 1 and each.virtual_stages > 1:
            yield f"without a pipeline a rank has one stage, not {each.virtual_stages}"


class _Pipeline(NamedTuple):
    schedule: ScheduleName
    pp: int
    virtual_stages: int
    num_microbatches: int


@cache
def _values_of(hint: type) -> TypeAdapter[tuple[object, ...]]:
    """Of a column whose values are of this type."""
    return TypeAdapter(cast("type[tuple[object, ...]]", GenericAlias(tuple, (hint, ...))))


def _layouts(columns: dict[str, Any], arrays: dict[str, np.ndarray]) -> Columns[Layout]:
    hints = get_type_hints(Layout)
    return Columns.checked(
        Layout,
        {
            name: (_values_of(hint).validate_python(columns[name]), arrays[f"codes.{name}"])
            for name, hint in hints.items()
        },
    )
