"""What a plan may run: nothing but the code that it was made for, from its own folder or where the user trusts it."""

import hashlib
import importlib.util
import json
import os
import py_compile
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from planner.cli.main import app
from planner.errors import ModelError, PlanError, UntrustedModelError
from planner.model_file import load_model, planned_source
from planner.plan.plan_file import read_plan
from planner.plan.schema import ModelSection, Origin

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
COMMANDS = (
    ("estimate",), ("schedule",), ("run", "--steps", "1"), ("check",), ("verify",), ("parity",),
    ("replan", "--gpus", "8"),
)  # fmt: skip
MODEL = """from torch import nn
import helper
def build_model():
    return nn.Sequential(nn.Embedding(256, helper.WIDTH), nn.Linear(helper.WIDTH, 256))
"""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def marker_code(folder: Path) -> str:
    """Code that leaves a file when it is run."""
    return f"open({str(folder / 'was-run')!r}, 'w').close()\n"


def was_run(folder: Path) -> bool:
    return (folder / "was-run").exists()


def plan_with(path: Path, source: str, files: dict[str, str] | None = None, digest: str = "0" * 64) -> Path:
    plan: dict[str, Any] = json.loads(EXAMPLE.read_text())
    plan["model"] |= {"source": source, "digest": digest} | ({} if files is None else {"files": files})
    plan["prediction"] = {  # which `verify` wants
        "step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0, "model_flops_per_gpu_per_s": 1.0, "mfu": 0.5,
        "peak_memory_bytes": [1, 1], "memory_capacity_bytes": 1, "breakdown_s": {"compute": 1.0},
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(plan))
    return path


def invoke(*arguments: str) -> None:
    """The command in this process; raises what it raises."""
    result = CliRunner().invoke(app, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception


every_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@every_command
def test_code_outside_the_folder_of_the_plan_is_not_run(command: tuple[str, ...], tmp_path: Path) -> None:
    evil = tmp_path / "elsewhere.py"
    evil.write_text(marker_code(tmp_path))
    plan = plan_with(tmp_path / "plan" / "plan.json", str(evil), {"elsewhere.py": sha256(evil)})
    with pytest.raises(UntrustedModelError, match="outside the plan's own folder") as caught:
        invoke(command[0], str(plan), *command[1:])
    assert caught.value.exit_code == 2
    assert not was_run(tmp_path)


@every_command
@pytest.mark.parametrize("trusted", [(), ("--trust",)], ids=["", "trusted"])
def test_code_that_the_plan_was_not_made_for_is_not_run(
    command: tuple[str, ...], trusted: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(marker_code(tmp_path))
    plan = plan_with(tmp_path / "plan.json", "model.py", {"model.py": "1" * 64})
    with pytest.raises(PlanError, match="not the model that this plan was made for") as caught:
        invoke(command[0], str(plan), *command[1:], *trusted)
    assert caught.value.exit_code == 2
    assert not was_run(tmp_path)


@pytest.mark.parametrize("source", ["../model.py", "link.py", "link/model.py"])
def test_ways_out_of_the_folder(source: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(marker_code(tmp_path))
    folder = tmp_path / "plan"
    folder.mkdir()
    (folder / "link.py").symlink_to(tmp_path / "model.py")
    (folder / "link").symlink_to(tmp_path)
    plan = plan_with(folder / "plan.json", source, {"model.py": sha256(tmp_path / "model.py")})
    with pytest.raises(UntrustedModelError):
        planned_source(read_plan(plan).model)
    assert planned_source(read_plan(plan, trust=True).model).recorded is not None


@pytest.mark.parametrize(
    "files",
    [{"other.py": "0" * 64}, {"../plan.json": "0" * 64}, {"/etc/hostname": "0" * 64}, {"": "0" * 64}],
)
def test_a_record_that_does_not_cover_the_file_is_none(files: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(marker_code(tmp_path))
    for recorded in (files, files | {"model.py": sha256(model)}):
        plan = plan_with(tmp_path / "plan.json", "model.py", recorded)
        with pytest.raises(PlanError, match="not the model"):
            planned_source(read_plan(plan).model)


def test_the_module_beside_it_is_held_to_its_record_when_it_is_imported(tmp_path: Path) -> None:
    """As where it is changed, or put there, after the check: each file is checked again as it is compiled."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text(marker_code(tmp_path))
    model = ModelSection(source="", digest="", num_params=0, files={"model.py": sha256(tmp_path / "model.py")})
    source = planned_source(model.found_in(Origin(tmp_path, False), str(tmp_path / "model.py")))
    with pytest.raises(ModelError, match=r"helper\.py is not among the files that the plan was made with"):
        load_model(source)
    assert not was_run(tmp_path)


def test_what_python_compiled_before_is_not_taken_for_the_source(tmp_path: Path) -> None:
    """A .pyc that asks not to be checked against its source (PEP 552) would be taken for any source."""
    for name, code in (("model.py", MODEL), ("helper.py", "WIDTH = 4\n")):
        path = tmp_path / name
        path.write_text(marker_code(tmp_path))
        cached = importlib.util.cache_from_source(str(path))
        py_compile.compile(str(path), cached, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        path.write_text(code)
    program = (
        "import sys; from planner.model_file import *; "
        "print(sum(p.numel() for p in load_model(resolve_model(sys.argv[1])).build().parameters()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.py")]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert int(found) == 256 * 4 + 4 * 256 + 256
    assert not was_run(tmp_path)


def test_a_plan_of_an_earlier_version_runs_the_one_file_it_was_made_for(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("from torch import nn\ndef build_model():\n    return nn.Embedding(8, 4)\n")
    content, factory = model.read_bytes(), b"build_model"
    parts = b"".join(len(part).to_bytes(8, "big") + part for part in (b"python", factory, content))
    plan = plan_with(tmp_path / "plan.json", "model.py", digest=hashlib.sha256(parts).hexdigest())
    assert planned_source(read_plan(plan).model).path == model
    model.write_text(marker_code(tmp_path))
    with pytest.raises(PlanError, match="earlier versions"):
        planned_source(read_plan(plan).model)


def test_a_config_runs_no_code_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(marker_code(tmp_path) + "from transformers import PretrainedConfig as Evil\n")
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = "import sys; from planner.model_file import *; load_model(resolve_model(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, input="y\ny\n")
    assert "ModelError" in done.stderr
    assert not was_run(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with a model of two files and its plan, as ``search -o`` wrote it, and the cache of that search."""
    folder, cache = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("cache")
    (folder / "model.py").write_text(MODEL)
    (folder / "helper.py").write_text("WIDTH = 4\n")
    planner(
        "search", "model.py", "--gpus", "1", "--hardware", "cpu-gloo", "--seq-len", "8", "--global-batch", "2",
        "--precision", "fp32", "-o", "plan.json", cwd=folder, cache=cache,
    )  # fmt: skip
    return folder, cache


def planner(*arguments: str, cwd: Path, cache: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    if cache is not None:
        environment.pop("PLANNER_CACHE", None)
    command = [sys.executable, "-m", "planner", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)


def copied(folder: Path, target: Path, *names: str) -> Path:
    target.mkdir()
    for name in names:
        (target / name).write_bytes((folder / name).read_bytes())
    return target


def test_the_plan_names_its_model_from_its_folder_and_records_its_files(made: tuple[Path, Path]) -> None:
    folder, _ = made
    model = json.loads((folder / "plan.json").read_text())["model"]
    assert model["source"] == "model.py"
    assert model["files"] == {name: sha256(folder / name) for name in ("helper.py", "model.py")}


def test_a_plan_and_its_model_can_be_moved_together_and_run_from_anywhere(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    moved = copied(made[0], tmp_path / "moved", "plan.json", "model.py", "helper.py")
    done = planner("run", str(moved / "plan.json"), "--steps", "1", cwd=tmp_path, cache=None)
    assert done.returncode == 0, done.stderr
    assert "step    1" in done.stdout
    (moved / "helper.py").write_text(marker_code(tmp_path) + "WIDTH = 4\n")
    done = planner("run", str(moved / "plan.json"), "--steps", "1", cwd=tmp_path, cache=None)
    assert done.returncode == 2
    assert "helper.py is not the file it records" in done.stderr
    assert not was_run(tmp_path)


def test_pricing_needs_no_code_where_the_graph_is_in_the_cache(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder, cache = made
    alone = copied(folder, tmp_path / "alone", "plan.json")
    done = planner("estimate", str(alone / "plan.json"), "--json", cwd=tmp_path, cache=cache)
    assert done.returncode == 0, done.stderr
    assert "cached graph" in done.stderr
    priced, planned = json.loads(done.stdout), json.loads((folder / "plan.json").read_text())
    assert priced["prediction"]["step_time_s"] == pytest.approx(planned["prediction"]["step_time_s"])
    without = planner("estimate", str(alone / "plan.json"), cwd=tmp_path, cache=tmp_path / "empty")
    assert without.returncode == 2
    assert "no such file" in without.stderr
