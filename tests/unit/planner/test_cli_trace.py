"""``planner trace``: the graph on stdout or in a file, the talk on stderr."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from planner.cli import models, trace
from planner.errors import InputError, ModelError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    trace.register(app)
    models.register(app)  # a second command, so that the first is named
    return app


def test_json_is_all_there_is_on_stdout(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    result = CliRunner().invoke(app, ["trace", "gpt-tiny", "--batch-size", "2", "--json", "-o", str(file)])
    assert result.exit_code == 0
    graph = json.loads(result.stdout)
    assert (graph["batch_size"], graph["seq_len"], graph["dtype"]) == (2, 64, "bfloat16")
    assert json.loads(file.read_text()) == graph


def test_a_graph_can_be_shown_again(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    CliRunner().invoke(app, ["trace", "llama-tiny", "-o", str(file), "--precision", "fp32"])
    result = CliRunner().invoke(app, ["trace", str(file)])
    assert result.exit_code == 0
    assert "229,952" in result.stdout
    assert "4 x layers.0" in result.stdout


def test_an_unwritable_output_is_an_input_error(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "gpt-tiny", "-o", str(tmp_path / "absent" / "graph.json")])
    assert isinstance(result.exception, InputError)


def test_an_unknown_model_is_a_model_error(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["trace", "no-such-model"])
    assert isinstance(result.exception, ModelError)
    assert result.stdout == ""


@pytest.mark.usefixtures("traced_by_fork")
def test_check_says_what_was_understood_and_where(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.embedding = nn.Embedding(8, 4)\n        self.head = nn.Parameter(torch.zeros(4, 8))\n"
        "    def forward(self, ids):\n        rows = self.embedding(ids).flatten(0, 1)\n"
        "        return torch.linalg.multi_dot([rows, self.head]).unflatten(0, ids.shape)\n"
    )
    command = ["trace", str(tmp_path / "model.py"), "--check", "--seq-len", "8"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    assert result.exit_code == 0
    assert "no rule for operator aten.linalg_multi_dot.default (model.py:10)" in result.stderr
    row = next(line for line in result.stdout.splitlines() if "aten.linalg_multi_dot" in line)
    assert "no rule: gemm" in row
    assert "model.py:10" in row


def test_check_shows_each_kind_of_cut_once(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["trace", "gpt-tiny", "--check"], env={"COLUMNS": "160"})
    cuts = result.stdout.partition("places for a pipeline cut")[2]
    assert "layers.0" in cuts
    assert "layers.1" not in cuts


def test_check_says_that_everything_was_understood(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["trace", "gpt-tiny", "--check"], env={"COLUMNS": "160"})
    assert "export: the whole model by torch.export" in result.stdout
    assert result.stdout.endswith("everything was understood\n")
    assert result.stderr == ""


@pytest.mark.usefixtures("traced_by_fork")
def test_check_says_why_and_how_a_model_was_run(app: typer.Typer) -> None:
    command = ["trace", "tests/fixtures/routed.py", "--check", "--seq-len", "8"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert "modules: the model was run on tensors without values and watched" in result.stdout
    why, spread = result.stderr.splitlines()
    assert why.startswith("warning: traced by running the modules, since torch.export stopped: ")
    assert "at routed.py:39 `if token.shape[0] == 0:`" in why
    assert spread.startswith("warning: routed.py:33 chooses by value (aten.topk.default)")
    doubts = result.stdout.partition("what was not understood, or assumed")[2]
    assert all(line.removeprefix("warning: ") in doubts for line in (why, spread))
    assert "no rule" not in result.stdout
