"""``planner explain`` as a user meets it: 80 columns, exit codes, JSON, and names that are no markup."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from costmodels.vocabulary.choices import Searches
from planner.api import find_plan
from planner.api.explain import Wishes, explain
from planner.cli.options import pins_of, token_count
from planner.errors import InputError
from planner.graph.graph_file import write_graph
from planner.layout.layout import Pins
from planner.plan.plan_file import read_plan, write_plan
from planner.render_explain import show_explanation
from planner.request import Request
from tests.planning import graph_of
from tests.unit.planner.cli.conftest import Run

QUICK = ("--search", "none")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest terminal."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    graph = folder / "graph.json"
    write_graph(graph_of("llama-tiny", 32), graph)
    request = Request(str(graph), 4, hardware="dgx-a100-80gb", global_batch_size=8, pins=Pins(tp=2), may_idle=False)
    file = folder / "plan.json"
    write_plan(find_plan(request).plan, file)
    return file


def test_everything_is_said_in_eighty_columns(run: Run, plan_file: Path) -> None:
    code, out, err = run("explain", plan_file, "--why-not", "tp=1", "--tokens", "1T", *QUICK)
    assert (code, err) == (0, "")
    for part in (
        "What binds: ",
        "Where the time of a step goes",
        "Memory of the fullest GPU",
        "Operators that take most of the compute",
        "Units of the model",
        "Runners-up",
        "Why not tp=1?",
        "Term by term, with tp=1",
        "What would change it",
        "10^9 tokens: $",
        "1 T tokens: ",
        "kWh",
    ):
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_a_plan_that_does_not_fit_is_not_nearly_full(run: Run, plan_file: Path, tmp_path: Path) -> None:
    content = json.loads(plan_file.read_text())
    large = {**content["training"], "global_batch_size": 8 * 2**18}
    pipeline = {**content["pipeline"], "micro_batch_size": content["pipeline"]["micro_batch_size"] * 2**18}
    path = tmp_path / "large.json"
    path.write_text(json.dumps({**content, "training": large, "pipeline": pipeline, "prediction": None}))
    _, out, _ = run("explain", path, *QUICK)
    assert "The plan does not fit." in " ".join(out.split())
    assert "nearly full" not in out


def test_names_are_no_markup(plan_file: Path) -> None:
    found = explain(read_plan(plan_file), wishes=Wishes(searches=Searches.NONE))
    rows = tuple(replace(row, module="[red]m") for row in found.compute.operators)
    units = tuple(replace(row, name="[/]u") for row in found.compute.units)
    model = found.plan.model.model_copy(update={"source": "[bold]a.py"})
    plan = found.plan.model_copy(update={"model": model})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(
        show_explanation(replace(found, plan=plan, compute=replace(found.compute, operators=rows, units=units)))
    )
    text = console.export_text()
    for name in ("[bold]a.py", "[red]m", "[/]u"):
        assert name in text, name


@pytest.mark.parametrize("pin", ["tp", "pp", "dp", "cp"])
def test_a_degree_of_zero_is_refused_by_its_rule(run: Run, plan_file: Path, pin: str) -> None:
    code, _, err = run("search", "llama-tiny", "--gpus", "4", "--hardware", "dgx-a100-80gb", f"--{pin}", "0")
    assert code == 2
    assert f"{pin}=0 does not divide the 4 GPUs" in err


def test_json_is_all_of_it_and_nothing_else(run: Run, plan_file: Path) -> None:
    code, out, _ = run("explain", plan_file, "--why-not", "tp=1", "--json", *QUICK)
    found = json.loads(out)
    assert code == 0
    assert sum(found["time_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-12)
    assert sum(found["memory"]["terms_bytes"].values()) == found["memory"]["peak_bytes"]
    assert found["why_not"]["plan"]["mesh"]["tp"] == 1
    assert found["why_not"]["verdict"] in ("faster", "slower", "as fast")
    assert {row["change"] for row in found["what_if"]} >= {"twice the network between nodes"}


def test_a_rule_that_is_broken_is_an_answer_and_a_pin_that_is_none_an_error(run: Run, plan_file: Path) -> None:
    code, out, _ = run("explain", plan_file, "--why-not", "tp=3", *QUICK)
    assert code == 0
    assert "tp=3 does not divide the 4 GPUs" in " ".join(out.split())
    code, out, err = run("explain", plan_file, "--why-not", "tpp=3", *QUICK)
    assert (code, out) == (2, "")
    assert "'tpp=3' fixes no choice of a plan" in err


@pytest.mark.parametrize(
    ("text", "tokens"), [("1T", 10**12), ("15e12", 15 * 10**12), ("300b", 3 * 10**11), ("1.5M", 1_500_000), ("7", 7)]
)
def test_tokens_are_written_as_people_write_them(text: str, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "0", "-1T", "nan", "inf", "1e400T", "many", "1.5"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no number of tokens"):
        token_count(text)


def test_pins_are_written_as_the_options_of_search() -> None:
    found = pins_of("tp=4, micro-batch=2,recompute=full,sequence-parallel=on,cp-method=ring")
    assert found.given() == {
        "tp": 4,
        "micro_batch": 2,
        "recompute": "full",
        "sequence_parallel": True,
        "cp_method": "ring",
    }


@pytest.mark.parametrize("text", ["tp", "tp=", "tp=two", "recompute=some", "=4", "tp=4,tq=2", "zero=on"])
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="fixes no choice of a plan"):
        pins_of(text)


def test_a_report_is_written_whole_with_a_chart_over_numbers_of_gpus(run: Run, plan_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    code, out, err = run("report", plan_file, "-o", file, "--gpus", "4", *QUICK)
    assert (code, out) == (0, "")
    assert f"wrote {file}" in " ".join(err.split())
    text = file.read_text(encoding="utf-8")
    assert text.endswith("</html>")
    assert "Step time over numbers of GPUs" in text
    code, _, err = run("report", plan_file, "-o", tmp_path / "none" / "report.html")
    assert code == 2
    assert "is no folder" in err
