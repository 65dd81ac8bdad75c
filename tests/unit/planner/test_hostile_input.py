"""Numbers, files and text of strangers: refused with the bound that they pass, and shown without being obeyed."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from planner.errors import InputError, ModelError, PlanError
from planner.graph.graph_file import read_graph
from planner.json_file import MAX_JSON_BYTES
from planner.model_file import resolve_model
from planner.plan.plan_file import PLAN_FILE, read_plan

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
SEARCH = ("search", "gpt-tiny", "--hardware", "cpu-gloo", "--gpus", "2")
DIGITS = "9" * 5000


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["planner", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("value", ["1" + "0" * 12, "1" + "0" * 30, DIGITS, "-" + DIGITS, "²"])
@pytest.mark.parametrize(
    "option", ["--gpus", "--seq-len", "--global-batch", "--top", "--tp", "--pp", "--dp", "--cp", "--ep",
               "--micro-batch", "--virtual-stages"],
)  # fmt: skip
def test_a_number_beyond_all_is_refused(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SEARCH, option, value) == 2
    said = capsys.readouterr().err
    assert "internal" not in said
    assert len(said) < 1000


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tokens", "inf"), ("--tokens", "nan"), ("--tokens", "1e19"), ("--tokens", "0"), ("--time-limit", "inf"),
     ("--memory-risk", "nan"), ("--gpus", f"1..{DIGITS}"), ("--hardware", f"cpu-gloo:{DIGITS}"),
     ("--hardware", "x" * 5000), ("--hardware", "cpu-gloo:²"), ("--hardware", "cpu-gloo:1,cpu-gloo:²")],
)  # fmt: skip
def test_numbers_that_are_none(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SEARCH, option, value) == 2
    assert "internal" not in capsys.readouterr().err


def test_the_message_names_the_bound(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, *SEARCH, "--seq-len", "1" + "0" * 12)
    assert "--seq-len may be 16,777,216 at most, got 1,000,000,000,000" in capsys.readouterr().err


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where numbers stand in a document."""
    if isinstance(value, dict):
        return [place for key, each in value.items() for place in places(each, (*path, key))]
    if isinstance(value, list):
        return [place for key, each in enumerate(value) for place in places(each, (*path, key))]
    return [path] if isinstance(value, int | float) and not isinstance(value, bool) else []


def with_number(document: str, place: tuple[str | int, ...], number: str) -> str:
    changed = json.loads(document)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    parent[place[-1]] = "HERE"
    return json.dumps(changed).replace('"HERE"', number)


@pytest.mark.parametrize("number", ["1" + "0" * 31, DIGITS, "1e999", "NaN", "Infinity"])
def test_no_number_of_a_plan_is_beyond_all(number: str, tmp_path: Path) -> None:
    path, example = tmp_path / "plan.json", json.loads(EXAMPLE.read_text())
    example["prediction"] = {
        "step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0, "model_flops_per_gpu_per_s": 1.0, "mfu": 0.5,
        "peak_memory_bytes": [1, 1], "memory_capacity_bytes": 1, "breakdown_s": {"compute": 1.0},
    }  # fmt: skip
    document = json.dumps(example)
    found = [place for place in places(json.loads(document)) if place != ("model", "num_params")]
    assert len(found) > 10
    for place in found:
        path.write_text(with_number(document, place, number))
        with pytest.raises(PlanError) as caught:
            read_plan(path)
        assert len(caught.value.message) < 8000


def test_many_stages_are_not_counted_up(tmp_path: Path) -> None:
    """2^31 virtual stages over a million ranks: the message needs no list of them."""
    plan = json.loads(EXAMPLE.read_text())
    plan["mesh"] |= {"pp": 10**6}
    plan["pipeline"] |= {"virtual_stages": 10**4}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="must be stages 0 to 9999999999"):
        read_plan(tmp_path / "plan.json")


def test_a_million_micro_batches_of_a_pipeline_are_not_simulated(tmp_path: Path) -> None:
    plan = json.loads(EXAMPLE.read_text())
    plan["training"]["global_batch_size"] = 2 * 10**6
    plan["pipeline"] |= {"num_microbatches": 10**6, "micro_batch_size": 1}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="no more than 1,048,576 forward passes"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("read", [read_plan, read_graph])
def test_only_regular_files_are_read(read: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="is no regular file"):
            read(path)


def test_a_file_is_no_larger_than_a_plan(tmp_path: Path) -> None:
    with (tmp_path / "plan.json").open("wb") as file:
        file.truncate(PLAN_FILE.max_bytes + 1)  # of zeros that take no room
    with pytest.raises(PlanError, match=r"larger than 8,388,608 bytes"):
        read_plan(tmp_path / "plan.json")
    with (tmp_path / "graph.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(InputError, match="larger than"):
        read_graph(tmp_path / "graph.json")


def test_a_config_of_a_model_is_no_larger_than_configs_are(tmp_path: Path) -> None:
    """One of 4 MB, nested as deep as JSON may be: collecting garbage while it is read took most of the time."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"family": "gpt"})[:-1] + ', "layers": [' + ", ".join(["[" * 900 + "]" * 900] * 2500) + "]}"
    )
    already = num_collections()
    with pytest.raises(ModelError, match=r"larger than the 1,048,576 bytes that a model's config may have"):
        resolve_model(str(path))
    assert num_collections() - already < 100  # of 4.5 million lists; Python looks after every 700


def num_collections() -> int:
    return sum(each["collections"] for each in gc.get_stats())


@pytest.mark.parametrize(
    "content", ["[" * 10**5, '{"a":' * 10**5, "[1" + ",1" * 10**5 + "]", "\ud800".encode("utf-8", "surrogatepass")]
)
def test_deep_and_long_documents(content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanError) as caught:
        read_plan(tmp_path / "plan.json")
    assert len(caught.value.message) < 1000


EVIL = "\x1b[2J\x9b31m\u202egnp\u2066\x07[/bold]\u2028\x7f"


def hostile_plan(tmp_path: Path) -> Path:
    plan = json.loads(EXAMPLE.read_text())
    plan["warnings"] = [EVIL]
    plan["framework"] = "planner"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "plan.json"


def is_harmless(text: str) -> bool:
    return all(each.isprintable() or each == "\n" for each in text)


def test_warnings_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(hostile_plan(tmp_path))
    assert run(monkeypatch, "estimate", plan) == 0
    captured = capsys.readouterr()
    assert is_harmless(captured.out)
    assert is_harmless(captured.err)
    assert r"\x1b[2J\x9b31m\u202e" in captured.err
    assert run(monkeypatch, "estimate", plan, "--json") == 0
    captured = capsys.readouterr()
    assert is_harmless(captured.out)
    assert json.loads(captured.out)["warnings"] == [EVIL]


@pytest.mark.parametrize("place", ["source", "hardware", "key", "framework", "name"])
def test_what_is_refused_is_quoted_and_not_obeyed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, path = json.loads(EXAMPLE.read_text()), tmp_path / "plan.json"
    match place:
        case "source":
            plan["model"]["source"] = EVIL
        case "key":
            plan[EVIL] = 1
        case "name":
            path = tmp_path / (EVIL.replace("/", "") + "\udcff.json")
        case _:
            plan[place] = EVIL
    path.write_text(json.dumps(plan) if place != "name" else "{")
    assert run(monkeypatch, "estimate", str(path)) == 2
    captured = capsys.readouterr()
    assert is_harmless(captured.err)
    assert "internal" not in captured.err
    assert r"\x1b[2J" in captured.err


@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
                                         {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])  # fmt: skip
def test_every_locale_can_print_a_plan(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planner", "estimate", str(hostile_plan(tmp_path))]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=variables, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"where the time goes" in done.stdout.lower()
    if environment.get("PYTHONIOENCODING") != "latin-1":
        assert done.stdout.isascii()
