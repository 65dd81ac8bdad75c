"""The command line as a user meets it: exit codes, what goes to stdout and what to stderr, and every bad input."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Precision
from planner.graph.graph_file import write_graph
from planner.layout.deadline import Deadline, OutOfTimeError
from planner.plan.schema import Plan
from tests.planning import graph_of
from tests.unit.planner.cli.conftest import Run, ended_by_the_clock

TINY = ("search", "llama-tiny", "--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "16")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="session")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return path


# -- what works -----------------------------------------------------------------------------------------


def test_search_shows_a_table_and_talks_on_stderr(run: Run) -> None:
    code, out, err = run(*TINY[:-4])
    assert code == 0
    assert "llama-tiny (230 k parameters) on 8 GPUs of dgx-h100-80gb" in out
    for part in ("Where the time goes", "Peak memory by pipeline rank", "plain FSDP", "layouts"):
        assert part in out, part
    assert "no --hardware given: planning for dgx-h100-80gb" in err
    assert "no --global-batch given: 8192 sequences of 64 tokens" in err
    assert "note" not in out


def test_without_a_command_there_is_the_help_and_no_empty_error(run: Run) -> None:
    code, out, err = run()
    assert code == 2
    assert "Usage: planner" in out
    assert err == ""


def test_json_is_a_plan_and_nothing_else(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, err = run(*TINY, "--prefer", "fastest", "--json", "-o", file)
    assert code == 0
    plan = Plan.model_validate_json(out)
    assert Plan.model_validate_json(file.read_text()) == plan
    assert f"wrote {file}" in err
    assert plan.search is not None
    assert plan.prediction is not None
    assert plan.search.bound_step_time_s <= plan.prediction.step_time_s
    assert (plan.search.status == "OPTIMAL") == (plan.search.gap <= 1e-3)


def test_check_runs_what_was_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface names it among the options of a search; there was none."""
    row: dict[str, object] = {
        "allocated_bytes": 2**20,
        "problem": None,
        "elapsed_s": 1.0,
        "notes": ("x[i] is assumed",),
    }
    checked: list[Plan] = []

    def check(plan: Plan) -> list[dict[str, object]]:
        checked.append(plan)
        return [row] * plan.mesh.pp

    monkeypatch.setattr("planner.executor.check.check", check)
    code, out, err = run(*TINY, "--pp", "2", "--check", "--json")
    assert (code, checked) == (0, [Plan.model_validate_json(out)])
    assert "runnable: all 2 pipeline ranks took a step" in err
    assert "note: x[i] is assumed" in err
    row["problem"] = "no [/kernel]"
    code, out, err = run(*TINY, "--pp", "2", "--check", "--json")
    assert code == 1
    assert Plan.model_validate_json(out) == checked[1]
    assert "pipeline rank 1: no [/kernel]" in err


@pytest.mark.parametrize("option", [("--framework", "fsdp"), ("--gpus", "2..4")])
def test_check_is_of_one_plan_of_our_executor(run: Run, option: tuple[str, str]) -> None:
    code, out, err = run(*TINY, *option, "--check")
    assert (code, out) == (2, "")
    assert "--check runs one plan by planner's own executor" in err


LOSS = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64))

def loss_fn(output, batch):
    one, other = output.mean(1).chunk(2, -1)
    return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))
"""


@pytest.mark.usefixtures("started_by_fork")
def test_a_loss_that_a_run_would_refuse_is_said(run: Run, tmp_path: Path) -> None:
    """One that compares the samples of a batch: the plan was found without a word."""
    file = tmp_path / "model.py"
    file.write_text(LOSS)
    options = ("--gpus", 2, "--hardware", "cpu-gloo", "--seq-len", 16, "--global-batch", 8, "--json")
    code, out, err = run("search", file, *options, "--dp", 2)
    assert code == 0
    assert json.loads(out)["mesh"]["dp_replicate"] * json.loads(out)["mesh"]["dp_shard"] == 2
    assert "planner run refuses this plan: a step computes the loss in 2 parts" in err


def test_estimate_says_what_search_said(run: Run, tmp_path: Path) -> None:
    file, again = tmp_path / "plan.json", tmp_path / "again.json"
    run(*TINY, "-o", file)
    code, out, err = run("estimate", file, "--json", "-o", again)
    assert (code, err) == (0, f"wrote {again}\n")
    made, priced = Plan.model_validate_json(file.read_text()), Plan.model_validate_json(out)
    assert made.prediction is not None
    assert priced.prediction is not None
    assert priced.prediction.step_time_s == pytest.approx(made.prediction.step_time_s, rel=1e-6)
    assert priced.prediction.peak_memory_bytes == pytest.approx(made.prediction.peak_memory_bytes, rel=1e-6)
    assert Plan.model_validate_json(again.read_text()) == priced


def test_schedule_draws_the_predicted_step(run: Run, tmp_path: Path) -> None:
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    run(*TINY, "--pp", "2", "--schedule", "ZBVZeroBubble", "-o", file)
    plan = Plan.model_validate_json(file.read_text())
    code, out, err = run("schedule", file, "--trace", trace)
    assert (code, err) == (0, f"wrote {trace}\n")
    assert out.startswith("ZBVZeroBubble on 2 pipeline ranks: ")
    assert "rank   1 " in out
    events = json.loads(trace.read_text())["traceEvents"]
    assert plan.prediction is not None
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(plan.prediction.step_time_s * 1e6, rel=1e-6)


def test_every_pin_is_kept(run: Run) -> None:
    pins = "--tp 2 --pp 2 --dp 2 --cp 1 --ep 1 --zero 1 --micro-batch 2 --schedule Interleaved1F1B --virtual-stages 2"
    more = "--recompute full --offload none --sequence-parallel --optimizer sgd"
    code, out, _ = run(*TINY, *pins.split(), *more.split(), "--json")
    assert code == 0
    plan = Plan.model_validate_json(out)
    mesh, pipeline = plan.mesh, plan.pipeline
    assert (mesh.tp, mesh.pp, mesh.dp_replicate * mesh.dp_shard, mesh.cp, mesh.ep) == (2, 2, 2, 1, 1)
    assert (plan.zero_stage, pipeline.micro_batch_size, pipeline.virtual_stages) == (1, 2, 2)
    assert pipeline.schedule == "Interleaved1F1B"
    assert plan.recompute[0].mode == "full"
    assert plan.placements.sequence_parallel
    assert plan.training.optimizer == "sgd"


def test_top_gives_that_many_runners_up(run: Run) -> None:
    for top in (1, 3):
        _, out, _ = run(*TINY, "--top", top, "--json")
        search = Plan.model_validate_json(out).search
        assert search is not None
        assert len(search.runners_up) == top


def test_a_graph_gives_the_plan_of_its_model(run: Run, graph_file: Path) -> None:
    plans = [Plan.model_validate_json(run("search", m, *TINY[2:], "--json")[1]) for m in ("llama-tiny", graph_file)]
    for plan in plans:
        assert plan.search is not None
    unlike = {"search": None, "model": None}
    assert plans[0].model_copy(update=unlike) == plans[1].model_copy(update=unlike)


@pytest.mark.usefixtures("traced_by_fork")
def test_a_config_and_a_user_file_are_planned(run: Run) -> None:
    for model in ("tests/fixtures/hf/llama", "examples/tiny_gpt.py"):
        code, out, _ = run("search", model, "--gpus", 8, "--seq-len", 64, "--global-batch", 16, "--json")
        assert code == 0
        assert Plan.model_validate_json(out).model.source == model


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp8"])
def test_other_precisions(run: Run, precision: str) -> None:
    code, out, _ = run("search", "llama-tiny", "--gpus", 8, "--global-batch", 16, "--precision", precision, "--json")
    assert code == 0
    assert Plan.model_validate_json(out).training.precision == Precision(precision)


# -- what does not ----------------------------------------------------------------------------------------


def refused(run: Run, *arguments: object) -> str:
    """What a wrong command line is told; nothing on stdout, no traceback."""
    code, out, err = run(*arguments)
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert "\nhint: " in err
    return err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("absent.py", "no such file: absent.py"),
        ("absent.json", "no such file: absent.json"),
        ("llama3-7b", "nearest presets: llama3-70b, llama3-8b"),
        ("tests", "folder tests holds no config.json"),
        ("pyproject.toml", "pyproject.toml is no model"),
    ],
)
def test_a_model_that_cannot_be_found(run: Run, model: str, message: str) -> None:
    assert message in refused(run, "search", model, "--gpus", 8)


@pytest.mark.usefixtures("traced_by_fork")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\n", "has no build_model()"),
        ("def build_model(\n", "model.py:1: '(' was never closed"),
        ("raise RuntimeError('not today')\n", "not today"),
        ("def build_model():\n    return 3\n", "int"),
    ],
)
def test_a_file_without_a_model(run: Run, code: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(code)
    assert message in refused(run, "search", path, "--gpus", 8)


BRANCHES_ON_VALUES = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        if x.sum() > 0:
            x = x + 1
        return self.head(x)
"""


@pytest.mark.usefixtures("traced_by_fork")
def test_a_model_that_branches_on_values_is_planned_and_the_line_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(BRANCHES_ON_VALUES)
    code, _, err = run("search", path, "--gpus", 8, "--seq-len", 8)
    assert code == 0
    assert "traced by running the modules, since torch.export stopped" in err
    assert "model.py:12 `if x.sum() > 0:`" in err
    assert "model.py:12 asks for a condition that depends on values: taken as True" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hardware", "dgx-a10"), "the nearest names are dgx-a100-80gb"),
        (("--hardware", "absent-profile.json"), "cannot be read"),
        (("--hardware", "pyproject.toml"), "is not a valid hardware profile"),
        (("--hardware", "dgx-2-v100-32gb"), "has no bf16 arithmetic"),
        (("--tp", 3), "tp=3 does not divide the 8 GPUs; allowed: 1, 2, 4, 8"),
        (("--pp", 8), "pp 8 * virtual stages 1 exceeds the 6 pieces of the model"),
        (("--tp", 4, "--pp", 4), "pp * tp = 16 does not divide the 8 GPUs"),
        (("--dp", 8, "--global-batch", 12), "dp=8 does not divide the global batch of 12 sequences"),
        (("--global-batch", 12, "--micro-batch", 8), "micro-batch 8 * dp 1 does not divide the global batch of 12"),
        (("--seq-len", 63, "--tp", 2, "--sequence-parallel"), "cannot split activations along the sequence of 63"),
        (("--zero", 4), "--zero"),
        (("--schedule", "2F2B"), "'GPipe', '1F1B', 'Interleaved1F1B'"),
        (("--ep", 2), "ep=2 needs layers of experts"),
        (("--offload", "nvme"), "does not say node.nvme_bandwidth_bytes_per_s"),
        (("--gpus", 0), "--gpus"),
        (("--gpus", 10**7), "between 1 and 1,000,000"),
        (("--frobnicate",), "No such option: --frobnicate"),
        (("-o", "no/such/folder/plan.json"), "no/such/folder is no folder"),
    ],
)
def test_bad_options(run: Run, options: tuple[object, ...], message: str) -> None:
    assert message in refused(run, "search", "llama-tiny", "--gpus", 8, *options)


def test_all_contradictions_at_once(run: Run) -> None:
    message = refused(run, *TINY, "--tp", 3, "--pp", 5, "--micro-batch", 7)
    assert message.count("\n  - ") == 3
    assert all(part in message for part in ("tp=3", "pp=5", "micro-batch 7"))


def test_a_missing_number_of_gpus(run: Run) -> None:
    assert "--gpus" in refused(run, "search", "llama-tiny")


def test_a_graph_of_another_length_is_refused_with_the_way_out(run: Run, graph_file: Path) -> None:
    message = refused(run, "search", graph_file, "--gpus", 8, "--seq-len", 128)
    assert "was traced with sequences of 64 tokens, not 128" in message
    assert "planner trace MODEL --seq-len 128" in message


def test_nothing_fits(run: Run) -> None:
    code, out, err = run("search", "llama3-70b", "--gpus", 1, "--hardware", "dgx-a100-80gb")
    assert (code, out) == (3, "")
    assert "nothing fits: memory binds" in err
    assert "optimizer" in err
    assert "on that many of these GPUs a plan fits" in err
    assert "Traceback" not in err


def test_nothing_fits_where_not_every_cut_was_tried(run: Run) -> None:
    """No time limit was given: that none was found in time would be wrong, and that none fits is not proved."""
    pins = ("--micro-batch", 1, "--virtual-stages", 3, "--no-sequence-parallel")
    code, _, err = run(
        "search", "gpt3-13b", "--gpus", 8, "--hardware", "tpu-v4", "--seq-len", 2048, "--global-batch", 8, *pins
    )
    assert code == 3
    assert "nothing fits: memory binds" in err
    assert "not every cut was tried" in err
    assert "in time" not in err


def test_a_pin_that_prevents_fitting_is_named(run: Run) -> None:
    small = ("--gpus", 8, "--hardware", "dgx-a100-80gb", "--seq-len", 2048, "--global-batch", 8)
    code, _, err = run("search", "llama3-8b", *small, "--zero", 0, "--tp", 1, "--pp", 1, "--cp", 1)
    assert code == 3
    assert "with tp=1, pp=1, cp=1, zero=0" in err
    assert "without that pin a plan fits" in err


@ended_by_the_clock
def test_no_time(run: Run) -> None:
    code, out, err = run(*TINY, "--time-limit", 0)
    assert (code, out) == (4, "")
    assert "no plan was found in time" in err
    assert "--time-limit" in err


def test_the_clock_rings_on_the_way_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def late(_deadline: Deadline) -> Generator[None]:
        yield
        raise OutOfTimeError

    monkeypatch.setattr("planner.cli.search.interruptible", late)
    code, _, err = run(*TINY)
    assert code == 4
    assert "no plan was found in time" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "holds a JSON list"),
        ('{"model": "llama"}', "schema_version is None"),
        ('{"schema_version": 2}', "schema_version is 2, this planner reads 1"),
        ('{"schema_version": 1}', "mesh: Field required"),
    ],
)
def test_what_is_no_plan(run: Run, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    assert message in refused(run, "estimate", path)


def test_a_missing_plan_and_a_foreign_key(run: Run, tmp_path: Path) -> None:
    assert "cannot read" in refused(run, "estimate", tmp_path / "plan.json")
    _, out, _ = run(*TINY, "--json")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(out), "strategy": "best"}))
    assert "strategy: Extra inputs are not permitted" in refused(run, "estimate", path)


def test_a_plan_of_a_model_that_is_gone(run: Run, tmp_path: Path) -> None:
    _, out, _ = run(*TINY, "--json")
    plan = json.loads(out)
    plan["model"]["source"] = "gone.py"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert f"no such file: {tmp_path / 'gone.py'}" in refused(run, "estimate", tmp_path / "plan.json")


def test_debug_shows_the_traceback(run: Run) -> None:
    code, _, err = run("search", "absent.py", "--gpus", 8, "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "no such file: absent.py" in err


def test_markup_in_names_is_shown_as_it_is(run: Run) -> None:
    assert "no model 'a[red]b'" in refused(run, "search", "a[red]b", "--gpus", 8)


# -- without torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("hardware", "list"),
        ("hardware", "show", "dgx-h100-80gb"),
        ("models",),
        ("search", "GRAPH", "--gpus", "8", "--hardware", "dgx-a100-80gb", "--global-batch", "16"),
        ("search", "absent", "--gpus", "8"),
        ("estimate", "absent.json"),
        ("--help",),
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_neither_torch_nor_pandas_is_imported(arguments: tuple[str, ...], graph_file: Path) -> None:
    program = (
        "import sys\n"
        "from planner.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "sys.exit(7 if {'torch', 'pandas'} & set(sys.modules) else 0)"
    )
    given = [str(graph_file) if a == "GRAPH" else a for a in arguments]
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr


def test_the_program_exits_with_the_code_of_its_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "planner", "search", "absent.py", "--gpus", "8"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no such file: absent.py\nhint: ")


# -- frameworks -----------------------------------------------------------------------------------------

PINS = ("--tp", "2", "--pp", "2", "--zero", "1", "--micro-batch", "2", "--recompute", "none", "--schedule", "1F1B")
PINNED = (*TINY, *PINS, "--no-sequence-parallel", "--json")


def test_attention_that_is_not_fused_is_said(run: Run) -> None:
    """DeepSpeed does not choose the model's attention: with SDPA the same config takes a quarter of the memory."""
    assert "say deepspeed+flash" in run(*TINY, "--framework", "deepspeed", "--json")[2]
    for name in ("deepspeed+flash", "deepspeed+eager", "torchtitan"):
        assert "scores in memory" not in run(*TINY, "--framework", name, "--json")[2]


def test_a_framework_prices_by_its_own_recipe(run: Run, tmp_path: Path) -> None:
    """Which estimate then keeps, until another is named."""
    path = tmp_path / "plan.json"
    ours, theirs = (
        json.loads(run(*PINNED, "--framework", name, "-o", path)[1]) for name in ("planner", "megatron-core")
    )
    assert (ours["framework"], theirs["framework"]) == ("planner", "megatron-core")
    assert ours["prediction"]["step_time_s"] != theirs["prediction"]["step_time_s"]
    code, out, err = run("estimate", path, "--json")
    assert code == 0
    assert json.loads(out)["prediction"]["step_time_s"] == theirs["prediction"]["step_time_s"]
    assert "priced as megatron-core runs a layout (recipe megatron-core-overlap)" in err
    again = json.loads(run("estimate", path, "--framework", "planner", "--json")[1])
    assert again["prediction"]["step_time_s"] == pytest.approx(ours["prediction"]["step_time_s"], rel=1e-12)
    assert again["framework"] == "planner"


def test_an_unknown_framework_is_refused_with_those_that_are_known(run: Run) -> None:
    code, _, err = run(*TINY, "--framework", "megatron-cor")
    assert code == 2
    assert "no framework 'megatron-cor' is known" in err
    assert "megatron-core" in err


def test_the_risk_of_memory_is_kept_in_the_plan_and_refused_out_of_range(run: Run) -> None:
    code, out, _ = run(*TINY, "--memory-risk", "0.2", "--json")
    assert code == 0
    search = Plan.model_validate_json(out).search
    assert search is not None
    assert search.memory_risk == 0.2
    code, out, err = run(*TINY, "--memory-risk", "0.7")
    assert (code, out) == (2, "")
    assert "above 0 and at most 0.5, got 0.7" in err
    assert "--memory-risk 0.05" in err
