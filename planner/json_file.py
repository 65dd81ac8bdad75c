"""JSON files of ours and of others, read with care."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import InputError

Value = TypeVar("Value", bound=BaseModel)

MAX_JSON_BYTES = 2**25  # ten times the graphs of the largest presets, Llama 3 405B and DeepSeek-V3: 3 MB
_PART_BYTES = 2**20  # read at once
MAX_VIOLATIONS = 20  # shown at once
MAX_VIOLATION = 300  # characters of one


def read_object(path: Path, error_class: type[InputError]) -> dict[str, object]:
    """The JSON object in ``path``; ``error_class`` where it is none."""
    return _object_in(read_content(path, error_class), path, error_class)


def read_content(path: Path, error_class: type[InputError], max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """What ``path`` holds; ``error_class`` where it is no regular file, cannot be read or has over ``max_bytes``.

    A pipe may never end, and a device has no end.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise error_class(f"{path} is no regular file", hint="write it to a file first")
            content = bytearray()
            while len(content) <= max_bytes and (part := file.read(_PART_BYTES)):  # all at once takes room for the most
                content += part
    except (OSError, ValueError) as error:  # a ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise error_class(f"cannot read {path}: {reason}", hint="check the path and its permissions") from error
    if len(content) > max_bytes:
        raise error_class(f"{path} is larger than {max_bytes:,} bytes", hint="is it the right file?")
    return bytes(content)


def _object_in(content: bytes, path: Path, error_class: type[InputError]) -> dict[str, object]:
    try:
        with _not_collecting():
            value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not only of JSON: a number of more digits than Python converts
        raise error_class(f"{path} is not JSON: {error}", hint="is it damaged, or another kind of file?") from error
    if not isinstance(value, dict):
        raise error_class(f"{path} holds a JSON {type(value).__name__}, not an object", hint="is it the right file?")
    return value


@contextlib.contextmanager
def _not_collecting() -> Generator[None]:
    """No garbage is looked for: JSON holds no cycles, and looking for them takes most of the time of a large file."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


def violations_of(error: ValidationError) -> list[str]:
    """Every violation as ``key.path: what is wrong``."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in found]


def listed(violations: Iterable[str]) -> str:
    """Violations as one text, the first of many."""
    found = list(violations)
    more = f"; and {len(found) - MAX_VIOLATIONS} more" if len(found) > MAX_VIOLATIONS else ""
    return "; ".join(map(_shortened, found[:MAX_VIOLATIONS])) + more


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_VIOLATION else f"{text[: MAX_VIOLATION // 2]} ... {text[-MAX_VIOLATION // 2 :]}"


@dataclass(frozen=True)
class FileFormat(Generic[Value]):
    """One kind of file: a versioned model, what its schema cannot say, and the way out where a file is none."""

    name: str
    model: type[Value]
    version: int
    contradictions: Callable[[Value], list[str]]
    error_class: type[InputError]
    way_out: str
    max_bytes: int = MAX_JSON_BYTES

    def read(self, path: Path) -> Value:
        """The value in ``path``; ``error_class`` with every violation where it is none."""
        content = _object_in(read_content(path, self.error_class, self.max_bytes), path, self.error_class)
        try:  # of Python's own values: of JSON text, each error would keep a copy of what it stands in
            value = self.model.model_validate(content)
        except ValidationError as error:
            self._check_version(content, path)  # says more than the violations of another version would
            raise self._refused(path, violations_of(error)) from error
        self._check_version(content, path)  # a missing one, or one that only equals a version, such as true
        found = self.contradictions(value)
        if found:
            raise self._refused(path, found)
        return value

    def _check_version(self, content: dict[str, object], path: Path) -> None:
        version = content.get("schema_version")
        if type(version) is not int or version != self.version:
            raise self.error_class(
                f"{path} is no {self.name} of this planner: schema_version is {_shortened(repr(version))}, this "
                f"planner reads {self.version}",
                hint=self.way_out,
            )

    def _refused(self, path: Path, violations: list[str]) -> InputError:
        return self.error_class(f"{path} is not a valid {self.name}: {listed(violations)}", hint=self.way_out)
