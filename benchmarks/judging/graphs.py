"""Models traced once, each as a graph.json that both ``search`` and ``estimate`` take as MODEL."""

from __future__ import annotations

from pathlib import Path

from benchmarks.judging.questions import Chain, Shape
from costmodels.vocabulary.choices import Precision
from planner.graph.graph_file import read_graph, write_graph
from planner.graph.model_graph import ModelGraph
from planner.model_file import ModelKind, ModelSource, family_model
from planner.request import TRACED_BATCH_SIZE, load_graph


class Graphs:
    """Graphs in a folder, by what was traced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, ModelGraph] = {}

    def preset(self, name: str, seq_len: int | None, precision: Precision) -> Path:
        """The graph.json of a preset."""
        path = self.folder / f"{name}-{seq_len or 'own'}-{precision.value}.json"
        if not path.exists():
            write_graph(load_graph(name, seq_len, precision), path)
        return path

    def shape(self, shape: Shape, precision: Precision) -> Path:
        """The graph.json of a model of our own family builder."""
        from planner.graph.tracer import trace_model, traced_dtype

        path = self.folder / f"{shape.name}-{precision.value}.json"
        if not path.exists():
            loaded = family_model(ModelSource(shape.name, ModelKind.PRESET), shape.config)
            write_graph(trace_model(loaded, TRACED_BATCH_SIZE, shape.seq_len, traced_dtype(precision)), path)
        return path

    def chain(self, chain: Chain, precision: Precision) -> Path:
        """The graph.json of a model of unlike blocks."""
        path = self.folder / f"{chain.name}-{precision.value}.json"
        if not path.exists():
            code = path.with_suffix(".py")
            code.write_text(chain.code, encoding="utf-8")
            write_graph(load_graph(str(code), chain.seq_len, precision), path)
        return path

    def read(self, path: Path | str) -> ModelGraph:
        """What is in the file."""
        place = Path(path)
        if place not in self._read:
            self._read[place] = read_graph(place)
        return self._read[place]
