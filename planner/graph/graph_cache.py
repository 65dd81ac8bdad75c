"""Traces are kept in the user's cache directory: the same model, sizes and software are not traced twice.

An entry's name is a digest of all that is known before a trace: the content of the model, the
micro-batch, the versions of torch and transformers, and the code that traces. Of a user's code it
holds what that read as well, other files and the environment; where any of it is different now, the
entry is passed over. A second, small entry names the first by the digests of those files alone, so that a plan can be
priced without them. An entry is JSON without what equals a default, kept as ``disk_cache`` says. (No torch here.)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from costmodels.vocabulary.choices import Precision
from planner.graph.disk_cache import DiskCache
from planner.graph.model_graph import ModelGraph
from planner.graph.read_files import variables_named_in
from planner.graph.tracing import TracedModel, TraceRequest, trace
from planner.model_file import LoadedModel, ModelKind, content_digest, digest_of
from planner.models.own_code import file_digest

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
        if request.source.kind is ModelKind.PYTHON:
            name = _name_of(Known.of(found.graph), request.batch_size, request.precision)
            _names(folder).write(name, key)
    return found.graph.model_copy(update={"source": request.source.name})


# Graphs of modules that were passed to this process, by their digests: where there is no cache folder they are here.
_HELD: dict[str, ModelGraph] = {}
MOST_HELD = 8


def held_graph(loaded: LoadedModel, batch_size: int, seq_len: int | None, precision: Precision) -> ModelGraph:
    """The graph of a module held in Python, traced here and kept, so that plans made for it can be priced again."""
    from planner.graph.tracer import trace_model, traced_dtype

    graph = trace_model(loaded, batch_size, seq_len or loaded.default_seq_len, traced_dtype(precision))
    content = graph.model_dump_json(exclude={"source", "digest", "warnings"}, exclude_defaults=True)
    graph = graph.model_copy(update={"digest": digest_of("module", content)})
    folder = default_folder()
    if folder is not None:
        written = TracedModel(graph=graph).model_dump_json(exclude_defaults=True)
        DiskCache(folder, SUFFIX, MAX_ENTRIES).write(_held_key(graph.digest), written)
    while len(_HELD) >= MOST_HELD:
        _HELD.pop(next(iter(_HELD)))
    _HELD[graph.digest] = graph
    return graph


def known_held_graph(digest: str) -> ModelGraph | None:
    """The graph of a module that was traced before, by this process or another of the user's; None: there is none."""
    folder = default_folder()
    if digest in _HELD or folder is None:
        return _HELD.get(digest)
    found = _read(DiskCache(folder, SUFFIX, MAX_ENTRIES), _held_key(digest))
    return None if found is None else found.graph


def _held_key(digest: str) -> str:
    return digest_of("held", digest, *_software())


@dataclass(frozen=True)
class Known:
    """Of a Python model that was traced before: what tells its graph from all others without its code."""

    digest: str
    files: Mapping[str, str]
    num_params: int
    seq_len: int

    @staticmethod
    def of(graph: ModelGraph) -> Known:
        """What is known of ``graph``."""
        return Known(graph.digest, graph.files, graph.num_params, graph.seq_len)


def known_graph(known: Known, batch_size: int, precision: Precision, folder: Path | None) -> ModelGraph | None:
    """The graph in ``folder`` of a model of these files, wherever they lie now; None where there is none."""
    if folder is None or not known.files:
        return None
    key = _names(folder).read(_name_of(known, batch_size, precision))
    found = None if key is None else _read(DiskCache(folder, SUFFIX, MAX_ENTRIES), key.decode())
    return found.graph if found is not None and Known.of(found.graph) == known else None


def _names(folder: Path) -> DiskCache:
    """Beside ``folder``: which of its entries has the graph of a known model."""
    return DiskCache(folder.with_name(f"{folder.name}-known"), ".key", MAX_ENTRIES)


def _name_of(known: Known, batch_size: int, precision: Precision) -> str:
    files = (part for item in sorted(known.files.items()) for part in item)
    sizes = (str(known.num_params), str(known.seq_len), str(batch_size), precision.value)
    return digest_of("known", known.digest, *sizes, *_software(), *files)


def _is_current(traced: TracedModel) -> bool:
    """Whether all that the model's code read is as it was."""
    if any(file_digest(path) != digest for path, digest in traced.files.items()):
        return False
    return variables_named_in(traced.files, os.environ) == traced.environment


def _key(request: TraceRequest) -> str:
    digest = content_digest(request.source)
    sizes = (str(request.batch_size), str(request.seq_len), request.precision.value)
    return digest_of(digest, *sizes, *_software())


def _software() -> tuple[str, str, str]:
    """What else decides what a graph is."""
    return _version("torch"), _version("transformers"), _code_digest()


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
