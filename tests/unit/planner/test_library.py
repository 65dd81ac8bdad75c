"""Planner as a library: what stands in ``planner`` itself."""

import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner.errors import InputError
from planner.graph.graph_file import write_graph
from planner.plan.plan_file import write_plan
from tests.planning import graph_of


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return path


def test_a_plan_is_found_kept_and_priced(graph: Path, tmp_path: Path) -> None:
    plan = planner.search(
        graph, gpus=4, hardware="dgx-a100-80gb", global_batch_size=8, precision="fp16", tp=2, pp=1, zero=1
    )
    assert (plan.mesh.tp, plan.mesh.pp, plan.zero_stage) == (2, 1, 1)
    write_plan(plan, tmp_path / "plan.json")
    assert planner.load_plan(tmp_path / "plan.json") == plan
    again = planner.estimate(tmp_path / "plan.json")
    assert again.prediction is not None
    assert plan.prediction is not None
    assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)


def test_what_is_no_option_is_refused(graph: Path) -> None:
    with pytest.raises(InputError, match="unknown option zeroo"):
        planner.search(graph, gpus=4, zeroo=1)
    with pytest.raises(InputError, match="precision must be one of bf16, .* got 'bf17'"):
        planner.search(graph, gpus=4, precision="bf17")
    with pytest.raises(InputError, match="must be a name or a path, got int"):
        planner.search(4, gpus=4)  # type: ignore[arg-type]


def test_the_import_is_light() -> None:
    program = (
        "import sys, planner; print(planner.__version__); "
        "print(sorted({'torch', 'numpy', 'pandas', 'ortools', 'pydantic'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split("\n")
    assert out[0].count(".") == 2
    assert out[1] == "[]"
