"""JSON files of ours and of others, read with care."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import InputError

Value = TypeVar("Value", bound=BaseModel)

MAX_JSON_BYTES = 2**30  # a graph.json of a thousand layers stays far below
MAX_VIOLATIONS = 20  # shown at once


def read_object(path: Path, error_class: type[InputError]) -> dict[str, object]:
    """The JSON object in ``path``; ``error_class`` where it is none."""
    return _object_in(read_content(path, error_class), path, error_class)


def read_content(path: Path, error_class: type[InputError]) -> bytes:
    """What ``path`` holds; ``error_class`` where it cannot be read or is too large to be one of ours."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise error_class(f"{path} is larger than {MAX_JSON_BYTES:,} bytes", hint="is it the right file?")
        return path.read_bytes()
    except OSError as error:
        raise error_class(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error


def _object_in(content: bytes, path: Path, error_class: type[InputError]) -> dict[str, object]:
    try:
        value = json.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise error_class(f"{path} is not JSON: {error}", hint="is it damaged, or another kind of file?") from error
    if not isinstance(value, dict):
        raise error_class(f"{path} holds a JSON {type(value).__name__}, not an object", hint="is it the right file?")
    return value


def violations_of(error: ValidationError) -> list[str]:
    """Every violation as ``key.path: what is wrong``."""
    return [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]


def listed(violations: Iterable[str]) -> str:
    """Violations as one text, the first of many."""
    found = list(violations)
    more = f"; and {len(found) - MAX_VIOLATIONS} more" if len(found) > MAX_VIOLATIONS else ""
    return "; ".join(found[:MAX_VIOLATIONS]) + more


@dataclass(frozen=True)
class FileFormat(Generic[Value]):
    """One kind of file: a versioned model, what its schema cannot say, and the way out where a file is none."""

    name: str
    model: type[Value]
    version: int
    contradictions: Callable[[Value], list[str]]
    error_class: type[InputError]
    way_out: str

    def read(self, path: Path) -> Value:
        """The value in ``path``; ``error_class`` with every violation where it is none."""
        content = read_content(path, self.error_class)
        try:
            value = self.model.model_validate_json(content)
        except ValidationError as error:
            self._check_version(content, path)  # says more than the violations of another version would
            raise self._refused(path, violations_of(error)) from error
        if "schema_version" not in value.model_fields_set:
            self._check_version(content, path)
        found = self.contradictions(value)
        if found:
            raise self._refused(path, found)
        return value

    def _check_version(self, content: bytes, path: Path) -> None:
        version = _object_in(content, path, self.error_class).get("schema_version")
        if version != self.version:
            raise self.error_class(
                f"{path} is no {self.name} of this planner: schema_version is {version!r}, this planner reads "
                f"{self.version}",
                hint=self.way_out,
            )

    def _refused(self, path: Path, violations: list[str]) -> InputError:
        return self.error_class(f"{path} is not a valid {self.name}: {listed(violations)}", hint=self.way_out)
