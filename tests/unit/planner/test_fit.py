"""Whether a model fits, and the edges of what does: each is held against a search at the edge and beyond it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles.catalog import load_profile
from planner.api import find_plan
from planner.api.fit import Fit, find_fit
from planner.errors import InfeasibleError, InputError
from planner.graph.graph_file import write_graph
from planner.layout.layout import Pins
from planner.request import Request
from tests.planning import graph_of

Asking = Callable[..., Request]


@pytest.fixture(scope="module")
def small_memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A100 nodes whose devices keep so little that the states of 1.5 billion parameters must be split."""
    profile = load_profile("dgx-a100-80gb")
    device = profile.device
    memory = device.memory_bytes.model_copy(update={"value": 16e9})
    path: Path = tmp_path_factory.mktemp("profile") / "small.json"
    small = profile.model_copy(update={"device": device.model_copy(update={"memory_bytes": memory}), "name": "small"})
    path.write_text(small.model_dump_json())
    return str(path)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return str(path)


@pytest.fixture(scope="module")
def large_graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("gpt2-1.5b", 1024), path)
    return str(path)


def searched(request: Request) -> bool:
    try:
        find_plan(replace(request, may_idle=False))
    except (InfeasibleError, InputError):
        return False
    return True


def test_what_fits_fits_and_its_edges_are_edges(graph: str) -> None:
    request = Request(graph, 4, "dgx-a100-80gb", global_batch_size=512, memory_risk=0.5)
    fit = find_fit(request)
    assert fit.fits
    assert sum(fit.ledger_bytes.values()) == pytest.approx(fit.peak_bytes, abs=len(fit.ledger_bytes))
    assert fit.peak_bytes <= fit.room_bytes
    assert fit.least_devices == 1
    assert fit.largest_micro_batch == 64
    assert fit.longest_seq_len == 64  # a graph is known at one length
    assert (fit.reason, fit.change) == ("", "")


def test_what_does_not_fit_says_what_binds_and_what_helps(large_graph: str, small_memory: str) -> None:
    request = Request(large_graph, 1, small_memory, global_batch_size=8, memory_risk=0.5, pins=Pins(micro_batch=8))
    fit = find_fit(request)
    assert not fit.fits
    assert fit.peak_bytes > fit.room_bytes
    assert "memory binds" in fit.reason
    assert fit.change
    assert fit.largest_micro_batch is None
    assert fit.least_devices is not None
    assert searched(replace(request, num_devices=fit.least_devices))
    assert not searched(replace(request, num_devices=fit.least_devices - 1))


def test_the_fewest_devices_need_not_fill_their_nodes(large_graph: str, small_memory: str) -> None:
    """Above one node only whole nodes were looked at."""
    pins = Pins(tp=1, cp=1, dp=3, zero=0, micro_batch=1)
    request = Request(large_graph, 24, small_memory, global_batch_size=48, memory_risk=0.5, pins=pins)
    least = next(n for n in range(1, 33) if searched(replace(request, num_devices=n)))
    assert least > 8
    assert least % 8
    assert find_fit(request).least_devices == least


def test_without_a_number_it_is_one_node(graph: str) -> None:
    fit: Fit = find_fit(Request(graph, None, "dgx-a100-80gb", global_batch_size=16))
    assert fit.num_devices == 8
    assert find_fit(Request(graph, None, "dgx-a100-80gb:2", global_batch_size=16)).num_devices == 2
