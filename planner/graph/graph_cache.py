"""Traces are kept in the user's cache directory: the same model, sizes and software are not traced twice.

An entry's name is a digest of all that is known before a trace: the content of the model, the
micro-batch, the versions of torch and transformers, and the code that traces. Of a user's code it
holds what that read as well, other files and the environment; where any of it is different now, the
entry is passed over. An entry is a line with the digest of the rest, and JSON without what equals a
default. It is written whole or not at all; one whose digest differs is traced again. (No torch here.)
"""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

import planner
from planner.errors import InputError
from planner.graph.model_graph import ModelGraph
from planner.graph.read_files import file_digest, variables_named_in
from planner.graph.tracing import TracedModel, TraceRequest, trace
from planner.json_file import write_text
from planner.model_file import content_digest, digest_of

SUFFIX = ".graph"
MAX_ENTRIES = 64  # the oldest go; a large model's graph is a few megabytes


def default_folder() -> Path | None:
    """Where entries lie; None where the user has no home, or sets PLANNER_CACHE=off."""
    if os.environ.get("PLANNER_CACHE") == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "planner" / "graphs"
    except RuntimeError:
        return None


def traced_graph(request: TraceRequest, folder: Path | None) -> ModelGraph:
    """The graph of ``request``, from ``folder`` where it is there, else traced and put there."""
    if folder is None:
        return trace(request).graph
    entry = folder / f"{_key(request)}{SUFFIX}"
    found = _read(entry)
    if found is None or not _is_current(found):
        found = trace(request)
        with contextlib.suppress(InputError, OSError):  # a full or read-only disk only costs time
            folder.mkdir(parents=True, exist_ok=True)
            content = found.model_dump_json(exclude_defaults=True)
            write_text(entry, f"{digest_of(content)}\n{content}")
            _drop_oldest(folder)
    return found.graph.model_copy(update={"source": request.source.name})


def _is_current(traced: TracedModel) -> bool:
    """Whether all that the model's code read is as it was."""
    if any(file_digest(path) != digest for path, digest in traced.files.items()):
        return False
    return variables_named_in(traced.files, os.environ) == traced.environment


def _key(request: TraceRequest) -> str:
    digest = content_digest(request.source)
    sizes = (str(request.batch_size), str(request.seq_len), request.precision.value)
    return digest_of(digest, *sizes, _version("torch"), _version("transformers"), _code_digest())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _code_digest() -> str:
    """Of the modules that decide what a graph is."""
    folder = Path(planner.__file__).parent
    files = [
        folder / "model_file.py",
        *sorted((folder / "graph").rglob("*.py")),
        *sorted((folder / "models").rglob("*.py")),
        *sorted((folder / "operators").rglob("*.py")),
    ]
    return digest_of(*(part for file in files for part in (file.name, file.read_bytes())))


def _read(entry: Path) -> TracedModel | None:
    try:
        digest, _, content = entry.read_bytes().partition(b"\n")
        return TracedModel.model_validate_json(content) if digest == digest_of(content).encode() else None
    except (OSError, ValidationError):
        return None


def _drop_oldest(folder: Path) -> None:
    """What a killed writer left goes too: it grows old as the entries do."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[MAX_ENTRIES:]:
        path.unlink(missing_ok=True)
