"""The cache of traces: the same graph again, without torch where no code has to run; no entry is trusted blindly."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.graph import graph_cache
from planner.graph.graph_cache import default_folder, traced_graph
from planner.graph.tracing import TraceRequest
from planner.layout.layout import Pins
from planner.model_file import resolve_model
from planner.request import Request
from tests.unit.planner.graph.traced import ROOT

REQUEST = TraceRequest(resolve_model("gpt-tiny"), 2, 32, Precision.BF16)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_a_second_time_it_is_read(tmp_path: Path) -> None:
    first = traced_graph(REQUEST, tmp_path)
    (entry,) = entries(tmp_path)
    written = entry.stat().st_mtime_ns
    assert traced_graph(REQUEST, tmp_path) == first == traced_graph(REQUEST, None)
    assert entry.stat().st_mtime_ns == written


def test_what_differs_has_its_own_entry(tmp_path: Path) -> None:
    graphs = [
        traced_graph(request, tmp_path)
        for request in (
            REQUEST,
            replace(REQUEST, batch_size=3),
            replace(REQUEST, seq_len=None),
            replace(REQUEST, precision=Precision.FP32),
            replace(REQUEST, source=resolve_model("llama-tiny")),
        )
    ]
    assert len(entries(tmp_path)) == len(graphs)
    assert [graph.batch_size for graph in graphs[:2]] == [2, 3]


@pytest.mark.usefixtures("traced_by_fork")
def test_a_changed_file_is_traced_again(tmp_path: Path) -> None:
    model, folder = tmp_path / "model.py", tmp_path / "cache"
    code = (
        "from torch import nn\ndef build_model():\n    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, WIDTH))\n"
    )
    counts: list[int] = []
    for width in ("8", "9", "8"):
        model.write_text(code.replace("WIDTH", width))
        request = TraceRequest(resolve_model(str(model)), 2, 8, Precision.BF16)
        counts.append(traced_graph(request, folder).num_params)
    assert counts == [32 + 40, 32 + 45, 32 + 40]
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{}", b'{"schema_version": 1, "nodes": "many"}'])
def test_a_damaged_entry_is_traced_again(content: bytes, tmp_path: Path) -> None:
    graph = traced_graph(REQUEST, tmp_path)
    (entry,) = entries(tmp_path)
    entry.write_bytes(content)
    assert traced_graph(REQUEST, tmp_path) == graph
    assert len(entry.read_bytes()) > 1000


def test_one_changed_digit_is_noticed(tmp_path: Path) -> None:
    graph = traced_graph(REQUEST, tmp_path)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    flops = f'"forward_flops":{graph.forward_flops}'
    assert content.count(flops.encode()) == 1
    entry.write_bytes(content.replace(flops.encode(), f'"forward_flops":{graph.forward_flops + 1}'.encode()))
    assert traced_graph(REQUEST, tmp_path) == graph


def test_writers_at_the_same_time_do_not_disturb_one_another(tmp_path: Path) -> None:
    graph = traced_graph(REQUEST, tmp_path / "seed")
    program = (
        "import sys; from pathlib import Path; from planner.graph.graph_cache import *; "
        "from planner.graph.tracing import TraceRequest; "
        "from planner.model_file import resolve_model; from costmodels.vocabulary.choices import Precision; "
        "traced_graph(TraceRequest(resolve_model('gpt-tiny'), 2, 32, Precision.BF16), Path(sys.argv[1]))"
    )

    def run(_: int) -> int:
        command = [sys.executable, "-c", program, str(tmp_path / "shared")]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [0, 0]
    assert len(entries(tmp_path / "shared")) == 1
    assert traced_graph(REQUEST, tmp_path / "shared") == graph


def test_a_folder_that_cannot_be_made_only_costs_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert traced_graph(REQUEST, tmp_path / "file" / "graphs").num_params > 0


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    for index in range(graph_cache.MAX_ENTRIES):
        (tmp_path / f"{index}.graph").write_text("{}")
        os.utime(tmp_path / f"{index}.graph", (index, index))
    traced_graph(REQUEST, tmp_path)
    assert len(entries(tmp_path)) == graph_cache.MAX_ENTRIES
    assert not (tmp_path / "0.graph").exists()


def test_a_preset_in_the_cache_needs_no_torch(tmp_path: Path) -> None:
    traced_graph(REQUEST, tmp_path)
    program = (
        "import sys; from pathlib import Path; from planner.graph.graph_cache import *; "
        "from planner.graph.tracing import TraceRequest; "
        "from planner.model_file import resolve_model; from costmodels.vocabulary.choices import Precision; "
        "traced_graph(TraceRequest(resolve_model('gpt-tiny'), 2, 32, Precision.BF16), Path(sys.argv[1])); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False).returncode == 0


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PLANNER_CACHE", raising=False)
    assert default_folder() == tmp_path / "planner" / "graphs"
    monkeypatch.setenv("PLANNER_CACHE", "off")
    assert default_folder() is None


def test_one_trace_serves_all_micro_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A scan over micro-batches scales one graph; another sequence length is another trace."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PLANNER_CACHE", raising=False)
    found = [
        find_plan(
            Request("gpt-tiny", 1, "dgx-a100-80gb", seq_len=seq_len, global_batch_size=8, pins=Pins(micro_batch=m))
        )
        for seq_len, m in ((32, 1), (32, 2), (32, 8), (64, 8))
    ]
    assert [answer.plan.pipeline.micro_batch_size for answer in found] == [1, 2, 8, 8]
    assert len(entries(tmp_path / "planner" / "graphs")) == 2
