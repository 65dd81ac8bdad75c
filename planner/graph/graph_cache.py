"""Traces are kept in the user's cache directory: the same model, sizes and software are not traced twice.

An entry's name is a digest of all that the graph depends on: the content of the model, the
micro-batch, the versions of torch and transformers, and the code that traces. An entry is a line
with the digest of the rest, and the graph as JSON without what equals a default. It is written whole
or not at all; one whose digest differs is traced again. (No torch here.)
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

import planner
from planner.errors import InputError
from planner.graph.model_graph import ModelGraph
from planner.json_file import write_text
from planner.model_file import LoadedModel, ModelSource, digest_of, digest_without_loading, load_model
from planner.parallelism import Precision

SUFFIX = ".graph"
MAX_ENTRIES = 64  # the oldest go; a large model's graph is a few megabytes


@dataclass(frozen=True)
class TraceRequest:
    """What is to be traced: a micro-batch of a model. ``seq_len`` None: the model's own."""

    source: ModelSource
    batch_size: int
    seq_len: int | None
    precision: Precision


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
        return _trace(request, load_model(request.source))
    loaded: LoadedModel | None = None
    digest = digest_without_loading(request.source)
    if digest is None:
        loaded = load_model(request.source)
        digest = loaded.digest
    entry = folder / f"{_key(request, digest)}{SUFFIX}"
    graph = _read(entry)
    if graph is not None:
        return graph.model_copy(update={"source": request.source.name})
    graph = _trace(request, loaded or load_model(request.source))
    with contextlib.suppress(InputError, OSError):  # a full or read-only disk only costs time
        folder.mkdir(parents=True, exist_ok=True)
        content = graph.model_dump_json(exclude_defaults=True)
        write_text(entry, f"{digest_of(content)}\n{content}")
        _drop_oldest(folder)
    return graph


def _trace(request: TraceRequest, loaded: LoadedModel) -> ModelGraph:
    from planner.graph.tracer import trace_model, traced_dtype

    seq_len = request.seq_len or loaded.default_seq_len
    return trace_model(loaded, request.batch_size, seq_len, traced_dtype(request.precision))


def _key(request: TraceRequest, digest: str) -> str:
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
    ]
    return digest_of(*(part for file in files for part in (file.name, file.read_bytes())))


def _read(entry: Path) -> ModelGraph | None:
    try:
        digest, _, content = entry.read_bytes().partition(b"\n")
        return ModelGraph.model_validate_json(content) if digest == digest_of(content).encode() else None
    except (OSError, ValidationError):
        return None


def _drop_oldest(folder: Path) -> None:
    """What a killed writer left goes too: it grows old as the entries do."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[MAX_ENTRIES:]:
        path.unlink(missing_ok=True)
