"""Whether a model fits, and the edges of what does: each is held against a search at the edge and beyond it."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hardware_profiles.catalog import load_profile
from planner.api import Question, find_plan, nothing_fits
from planner.api.fit import Fit, find_fit
from planner.api.nothing_fits import no_plan
from planner.errors import InfeasibleError, InputError
from planner.graph.graph_file import write_graph
from planner.layout.deadline import Deadline
from planner.layout.layout import NO_PINS, Pins
from planner.problem import Problem
from planner.render_fit import show_fit
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


def test_what_was_not_looked_for_is_not_called_none() -> None:
    """The fewest of unlike devices were none, beside "fits"."""
    fits = Fit(True, 16, "both", 64, 16, "dp=16", {}, 1, 2, None, None, 8, "", "", ())
    shown = [Console(width=120, file=StringIO(), record=True) for _ in range(2)]
    for console, fit in zip(shown, (fits, replace(fits, fits=False, largest_micro_batch=None)), strict=True):
        console.print(show_fit(fit, "model"))
    assert [console.export_text(clear=False).count("not looked for") for console in shown] == [2, 0]
    assert [console.export_text().count("none") for console in shown] == [0, 3]


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


def test_what_would_help_is_looked_for_no_longer_than_there_is_time(
    large_graph: str, small_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that nothing fits went on without end, whatever its --time-limit, to find what would."""
    question = Question.of(Request(large_graph, 1, small_memory, global_batch_size=8))
    problem = Problem.build(question.target, question.training, NO_PINS, 0.05)
    outcome = problem.solved()
    assert outcome.best is None
    assert no_plan(problem, outcome).hint.endswith("a plan fits")

    def never(*_: object, **__: object) -> Problem:
        raise AssertionError("there is no time for another search")

    monkeypatch.setattr(Problem, "build", never)
    error = no_plan(problem, outcome, Deadline.within(0))
    assert error.exit_code == 3  # that nothing fits is known all the same
    assert "more memory" in error.hint


def test_the_hint_and_the_least_number_are_one(large_graph: str, small_memory: str, tmp_path: Path) -> None:
    """Sixteen devices, say, that share one sequence: the hint asked for more devices, and for a sequence for each."""
    profile = load_profile(small_memory)
    assert profile.node.ram_bytes is not None
    ram = profile.node.ram_bytes.model_copy(update={"value": 1e9})  # nothing can be offloaded
    without_ram = profile.model_copy(update={"node": profile.node.model_copy(update={"ram_bytes": ram})})
    (tmp_path / "cluster.json").write_text(without_ram.model_dump_json())
    request = Request(large_graph, 1, str(tmp_path / "cluster.json"), global_batch_size=1)
    fit = find_fit(request)
    assert fit.least_devices is not None
    assert fit.change.startswith(f"use --gpus {fit.least_devices}:")
    assert searched(replace(request, num_devices=fit.least_devices))


def test_the_least_number_is_the_change_where_no_time_is_left_to_look_for_it_again(
    large_graph: str, small_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model it was told beside the number that fits to use other devices."""
    monkeypatch.setattr(nothing_fits, "HINT_S", 0.0)
    fit = find_fit(Request(large_graph, 1, small_memory, global_batch_size=64))
    assert fit.least_devices is not None
    assert fit.change == f"use --gpus {fit.least_devices}: on that many of these GPUs a plan fits"
