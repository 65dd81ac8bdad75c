"""Traces are kept in the user's cache directory: the same model, sizes and software are not traced twice.

An entry's name is a digest of all that is known before a trace: the content of the model, the
micro-batch, the versions of torch and transformers, and the code that traces. Of a user's code it
holds what that read as well, other files and the environment; where any of it is different now, the
entry is passed over. An entry is JSON without what equals a default, kept as ``disk_cache`` says. (No torch here.)
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from planner.graph.disk_cache import DiskCache
from planner.graph.model_graph import ModelGraph
from planner.graph.read_files import file_digest, variables_named_in
from planner.graph.tracing import TracedModel, TraceRequest, trace
from planner.model_file import content_digest, digest_of

SUFFIX = ".graph"
MAX_ENTRIES = 64  # the oldest go; a large model's graph is a few megabytes


def default_folder(kind: str = "graphs") -> Path | None:
    """Where entries of one kind lie; None where the user has no home, or sets PLANNER_CACHE=off."""
    if os.environ.get("PLANNER_CACHE") == "off":
        return None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "planner" / kind
    except RuntimeError:
        return None


def traced_graph(request: TraceRequest, folder: Path | None) -> ModelGraph:
    """The graph of ``request``, from ``folder`` where it is there, else traced and put there."""
    if folder is None:
        return trace(request).graph
    cache, key = DiskCache(folder, SUFFIX, MAX_ENTRIES), _key(request)
    found = _read(cache, key)
    if found is None or not _is_current(found):
        found = trace(request)
        cache.write(key, found.model_dump_json(exclude_defaults=True))
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
    folder = Path(__file__).parents[1]
    files = [
        folder / "model_file.py",
        *sorted((folder / "graph").rglob("*.py")),
        *sorted((folder / "models").rglob("*.py")),
        *sorted((folder / "operators").rglob("*.py")),
    ]
    return digest_of(*(part for file in files for part in (file.name, file.read_bytes())))


def _read(cache: DiskCache, key: str) -> TracedModel | None:
    content = cache.read(key)
    try:
        return None if content is None else TracedModel.model_validate_json(content)
    except ValidationError:
        return None
