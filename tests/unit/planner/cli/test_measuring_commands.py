"""``planner parity`` and ``planner verify`` without ranks: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hardware_profiles.catalog import load_profile
from planner.api import candidates
from planner.cli import verify
from planner.cli.main import app
from planner.errors import HardwareError, InputError, PlanError
from planner.executor import outcome
from planner.plan.plan_file import read_plan

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"
MEASURED = {"step_times_s": [1.0, 3.0, 2.0], "step_time_s": 2.0, "optimizer_s": 0.5, "collectives_s": {"send": 0.25},
            "memory_bytes": [3 * 2**20, 2**20], "memory_is": "held"}  # fmt: skip


def row(error: float, copies: int = 2) -> dict[str, Any]:
    return {"fqn": "a.weight", "gradient_norm": 1.0, "gradient_error": error, "parameter_error": 0.0,
            "num_copies": copies}  # fmt: skip


def invoke(monkeypatch: pytest.MonkeyPatch, value: object, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(outcome, "on_all_ranks", lambda plan, work: value)
    result = CliRunner().invoke(app, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.stdout


@pytest.mark.parametrize(
    ("found", "loss", "code"),
    [(row(1e-7), 2.0, 0), (row(1e-3), 2.0, 1), (row(0.0, copies=0), 2.0, 1), (row(float("nan")), 2.0, 1),
     (row(1e-7), 2.1, 1)],
)  # fmt: skip
def test_parity_s_exit_code_says_whether_all_is_equal(
    found: dict[str, Any], loss: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"loss": loss, "expected_loss": 2.0, "rows": [found]}
    returned, text = invoke(monkeypatch, value, "parity", str(EXAMPLE))
    assert returned == code
    assert ("NOT equal" in text) == bool(code)


def test_verify_puts_predicted_beside_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = json.loads(EXAMPLE.read_text())
    plan["prediction"] = {
        "step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0, "model_flops_per_gpu_per_s": 1.0, "mfu": 0.5,
        "peak_memory_bytes": [2**21, 2**21], "memory_capacity_bytes": 2**30,
        "memory_breakdown_bytes": [{"parameters": 2**20, "allocator_reserve": 2**20}, {"parameters": 2**20}],
        "breakdown_s": {"compute": 0.75, "optimizer": 0.25},
    }  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    code, text = invoke(monkeypatch, MEASURED, "verify", str(path), "--json")
    found = json.loads(text)
    assert code == 0
    ratios = {line["part"]: line["ratio"] for line in found["time"] + found["memory"]}
    assert ratios == {"step": 2.0, "optimiser step": 2.0, "all but the optimiser": 2.0, "  of it compute": None,
                      "  send in flight, waiting included": None, "rank 0": 3.0, "rank 1": 1.0}  # fmt: skip
    assert "2.00" in invoke(monkeypatch, MEASURED, "verify", str(path))[1]


def test_verify_needs_a_prediction(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = json.loads(EXAMPLE.read_text())
    plan["prediction"] = None
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match="no prediction"):
        invoke(monkeypatch, MEASURED, "verify", str(tmp_path / "plan.json"))


def test_several_plans_are_shown_the_fastest_first_and_those_that_cannot_run_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = json.loads(EXAMPLE.read_text())
    other = {**plan, "zero_stage": 3}
    refused = {**plan, "zero_stage": 2}
    faster = {**MEASURED, "step_times_s": [0.5, 0.75, 0.25], "step_time_s": 0.5}
    value = {"plans": [plan, refused, other], "found": [MEASURED, {"refused": "no such thing"}, faster]}
    kept = tmp_path / "kept.json"
    arguments = ("verify", str(EXAMPLE), "--top", "3", "--keep", str(kept))
    code, text = invoke(monkeypatch, value, *arguments, "--json")
    rows = json.loads(text)["plans"]
    assert code == 0
    assert [row["measured_s"] for row in rows] == [0.5, 2.0, None]
    assert [row["is_given"] for row in rows] == [False, True, False]
    assert (rows[0]["fastest_s"], rows[0]["slowest_s"], rows[2]["refused"]) == (0.25, 0.75, "no such thing")
    assert read_plan(kept).zero_stage == 3
    assert "no such thing" in invoke(monkeypatch, value, *arguments)[1]


def test_other_plans_are_searched_on_the_plan_s_own_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan of a profile that `planner profile` or `calibrate` wrote could not be held against others."""
    own, plan = tmp_path / "own.json", tmp_path / "plan.json"
    own.write_text(load_profile("cpu-gloo").model_copy(update={"name": "mine", "aliases": ()}).model_dump_json())
    plan.write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "hardware": "mine"}))
    searched: list[object] = []
    monkeypatch.setattr(candidates, "other_plans", lambda *given: searched.append(given[2]))
    monkeypatch.setattr(verify, "_measured_each", lambda plan, others, options: others())
    monkeypatch.setattr(outcome, "on_all_ranks", lambda plan, work: work())
    command = ["verify", str(plan), "--top", "2"]
    assert CliRunner().invoke(app, [*command, "--hardware", str(own)], standalone_mode=False).return_value == 0
    assert searched == [str(own)]
    with pytest.raises(HardwareError, match="unknown hardware profile 'mine'"):
        invoke(monkeypatch, MEASURED, *command)
    with pytest.raises(InputError, match="was priced on mine"):
        invoke(monkeypatch, MEASURED, *command, "--hardware", "cpu-gloo")
    with pytest.raises(InputError, match="of several plans"):
        invoke(monkeypatch, MEASURED, "verify", str(plan), "--hardware", str(own))


def test_what_the_given_plan_came_to_is_written_beside_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --top -o was taken, and nothing was written: `planner calibrate` had nothing to read."""
    plan, written = json.loads(EXAMPLE.read_text()), tmp_path / "measured.json"
    value = {"plans": [plan, {**plan, "zero_stage": 3}], "found": [MEASURED, {**MEASURED, "step_time_s": 0.5}]}
    code, _ = invoke(monkeypatch, value, "verify", str(EXAMPLE), "--top", "2", "-o", str(written))
    found = json.loads(written.read_text())
    assert (code, found["step_time_s"]) == (0, MEASURED["step_time_s"])
    assert (tmp_path / found["plan"]).resolve() == EXAMPLE.resolve()


def test_nothing_is_kept_of_one_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="several plans"):
        invoke(monkeypatch, MEASURED, "verify", str(EXAMPLE), "--keep", str(tmp_path / "kept.json"))


def test_verify_reads_tokens_of_a_dtype_as_run_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Raw tokens, which `planner run` trains on, could not be measured with."""
    asked: list[object] = []
    monkeypatch.setattr(verify, "_measured_each", lambda plan, others, options: asked.append(options.data.dtype))
    monkeypatch.setattr(outcome, "on_all_ranks", lambda plan, work: work())
    arguments = ["verify", str(EXAMPLE), "--top", "2", "--data", str(tmp_path / "tokens.bin"), "--data-dtype", "uint16"]
    assert CliRunner().invoke(app, arguments, standalone_mode=False).return_value == 0
    assert asked == ["uint16"]


@pytest.mark.parametrize(
    ("command", "option", "needed"),
    [
        ("run", ("--eval-batches", "2"), "--eval-every"),
        ("run", ("--keep", "2"), "--checkpoint-dir"),
        ("run", ("--profile-dir", "traces"), "--profile-step"),
        ("run", ("--data-dtype", "uint16"), "--data"),
        ("verify", ("--data-dtype", "uint16"), "--data"),
        ("parity", ("--data-dtype", "uint16"), "--data"),
    ],
)
def test_an_option_without_the_one_it_belongs_to_is_refused(
    command: str, option: tuple[str, str], needed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It did nothing, without a word."""
    plan = json.loads(EXAMPLE.read_text())
    plan["prediction"] = {
        "step_time_s": 1.0, "tokens_per_s_per_gpu": 1.0, "model_flops_per_gpu_per_s": 1.0, "mfu": 0.5,
        "peak_memory_bytes": [2**21, 2**21], "memory_capacity_bytes": 2**30, "breakdown_s": {"compute": 1.0},
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(InputError, match=f"{option[0]} does nothing without {needed}"):
        invoke(monkeypatch, MEASURED, command, str(tmp_path / "plan.json"), *option)
