"""``planner calibrate``: what it takes as runs, what it writes, and what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import FactorName
from planner.cli.main import app
from planner.errors import InputError, PlannerError
from tests.unit.benchmarks.test_published_runs import ROW

HARDWARE = "dgx-a100-80gb"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    run(
        "search", "llama-tiny", "--gpus", "8", "--hardware", HARDWARE, "--framework", "megatron-core", "--global-batch",
        "64", "--tp", "2", "--pp", "2", "--zero", "1", "--micro-batch", "1", "--recompute", "none", "-o", str(path),
    )  # fmt: skip
    return path


def step_s(path: Path) -> float:
    return json.loads(path.read_text())["prediction"]["step_time_s"]


def test_one_slow_run_makes_the_same_plan_slower_and_the_plan_says_so(plan: Path, tmp_path: Path) -> None:
    profile, again = tmp_path / "profile.json", tmp_path / "again.json"
    before = step_s(plan)
    run("calibrate", f"{plan}:{before * 1.2:.6f}:3", "--hardware", HARDWARE, "-o", str(profile))
    overlay = load_profile(str(profile)).calibration
    assert overlay is not None
    assert overlay.frameworks == ("megatron-core",)
    assert (overlay.num_timed, overlay.num_weighed) == (1, 1)
    assert all(factor.spread < factor.prior_spread for factor in overlay.factors.values())
    run("estimate", str(plan), "--hardware", str(profile), "-o", str(again))
    assert before < step_s(again) < before * 1.25
    prediction = json.loads(again.read_text())["prediction"]
    assert prediction["calibrated_by"].startswith("1 measured run of megatron-core")
    assert "workspace" in prediction["memory_breakdown_bytes"][0]


def test_a_calibration_is_shown_with_its_profile(plan: Path, tmp_path: Path) -> None:
    """`planner hardware show` gave every number as it was before, and nothing of what corrects them."""
    profile = tmp_path / "profile.json"
    told = run("calibrate", f"{plan}:{step_s(plan) * 1.2:.6f}:3", "--hardware", HARDWARE, "-o", str(profile))
    shown = run("hardware", "show", str(profile))
    assert told in shown
    assert "Peak memory of the runs" in told
    overlay = load_profile(str(profile)).calibration
    assert overlay is not None
    (only,) = overlay.runs
    before, after = only.predicted_peak_memory_bytes, only.calibrated_peak_memory_bytes
    assert before is not None
    assert after is not None
    assert before < after < 3 * 2**30 * 1.1
    assert "Peak memory" not in run("calibrate", f"{plan}:1.0", "--hardware", HARDWARE, "-o", str(profile))


def test_a_log_and_what_verify_wrote_are_measurements(plan: Path, tmp_path: Path) -> None:
    before = step_s(plan)
    log = tmp_path / "log.txt"
    line = " iteration        {0}/ 100 | elapsed time per iteration (ms): {1:.4f} | learning rate: 1.0E-04 |\n"
    log.write_text("".join(line.format(step, before * (900 if step == 1 else 1.1) * 1e3) for step in range(1, 8)))
    verified = tmp_path / "measured.json"
    verified.write_text(json.dumps({"plan": str(plan), "step_time_s": before * 1.1, "peak_memory_bytes": [2**30]}))
    overlays: list[dict[FactorName, float]] = []
    for said in (f"{plan}:{log}", str(verified)):
        run("calibrate", said, "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json"))
        overlay = load_profile(str(tmp_path / "profile.json")).calibration
        assert overlay is not None
        overlays.append(overlay.values)
    assert overlays[0] == pytest.approx(overlays[1], rel=1e-3)


def test_a_packed_log_of_two_jobs(plan: Path, tmp_path: Path) -> None:
    log, profile = tmp_path / "log.txt.gz", tmp_path / "profile.json"
    line = " iteration {0}/ 100 | elapsed time per iteration (ms): {1:.4f} |\n"
    steps = [step_s(plan) * 1e3 * (1 if step < 10 else 1.5) for step in range(20)]
    log.write_bytes(gzip.compress("".join(line.format(*each) for each in enumerate(steps)).encode()))
    command = ["calibrate", f"{plan}:{log}", "--hardware", HARDWARE, "-o", str(profile)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "is it one job, by itself?" in result.stderr
    log.write_bytes(log.read_bytes()[:-20])
    assert isinstance(CliRunner().invoke(app, command).exception, InputError)


def test_a_table_of_runs(tmp_path: Path) -> None:
    rows = [
        {"id": "one"},
        {"id": "two", "tp": "4", "pp": "1"},
        {"id": "odd", "dp": "3"},
        {"id": "who", "framework": ""},
        {"id": "else", "gpu_type": "H100"},
    ]
    with (tmp_path / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **row} for row in rows)
    result = CliRunner().invoke(
        app, ["calibrate", str(tmp_path / "runs.csv"), "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json")]
    )
    assert result.exit_code == 0, result.output
    overlay = load_profile(str(tmp_path / "profile.json")).calibration
    assert overlay is not None
    assert [each.name for each in overlay.runs] == ["one", "two", "else"]
    assert "odd: left out" in result.stderr
    assert "else: it ran on H100, and is taken for a run on A100" in result.stderr
    assert "one: it ran on" not in result.stderr
    assert "who: left out, it names no framework" in result.stderr


def test_a_calibrated_profile_is_not_calibrated_twice(plan: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    run("calibrate", f"{plan}:1.0", "--hardware", HARDWARE, "-o", str(profile))
    with pytest.raises(PlannerError, match="calibrated already, by 1 runs"):
        run("calibrate", f"{plan}:1.0", "--hardware", str(profile), "-o", str(profile))


@pytest.mark.parametrize(
    ("times", "peak", "reason"),
    [(1000, "", "30 times off"), (1 / 64, "", "30 times off"), (1, ":61500", "above the 79.")],
)
def test_a_run_in_another_unit_is_left_out(plan: Path, times: float, peak: str, reason: str, tmp_path: Path) -> None:
    """Milliseconds, tokens/s of all GPUs and MiB moved little, and yet gave plans the calibrated band."""
    said = f"{plan}:{step_s(plan) * times:.9f}{peak}"
    result = CliRunner().invoke(app, ["calibrate", said, "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json")])
    assert isinstance(result.exception, InputError)
    assert "plan.json: left out" in result.stderr
    assert reason in result.stderr
    assert not (tmp_path / "profile.json").exists()


def test_a_run_that_nothing_explains_gives_no_band(plan: Path, tmp_path: Path) -> None:
    profile, again = tmp_path / "profile.json", tmp_path / "again.json"
    command = ["calibrate", f"{plan}:{step_s(plan) * 4:.6f}", "--hardware", HARDWARE, "-o", str(profile)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "no likely factor explains it" in " ".join(result.stderr.split())
    run("estimate", str(plan), "--hardware", str(profile), "-o", str(again))
    known = [json.loads(file.read_text())["prediction"]["step_time_band_of"] for file in (plan, again)]
    assert known[0] == known[1]


def test_the_profile_that_is_calibrated_is_not_overwritten(plan: Path, tmp_path: Path) -> None:
    """It was, and the hint to give all runs together with the profile it was made of could no longer be followed."""
    own = tmp_path / "own.json"
    own.write_text(load_profile(HARDWARE).model_dump_json())
    with pytest.raises(InputError, match="which is read"):
        run("calibrate", f"{plan}:{step_s(plan):.6f}", "--hardware", str(own), "-o", str(own))


@pytest.mark.parametrize("said", ["", ":0", ":-1", ":1:2:3", ":nan", ":nowhere.txt"])
def test_what_says_no_step_time_is_refused(plan: Path, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run("calibrate", f"{plan}{said}", "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json"))


def test_a_config_keeps_its_own_optimizer(tmp_path: Path) -> None:
    """AdamW was taken for every config: its states went into the fit of memory."""
    script = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 "
        "--seq-length 512 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16 --optimizer {}\n"
    )
    found: list[float] = []
    for optimizer in ("sgd", "adam"):
        config = tmp_path / f"{optimizer}.sh"
        config.write_text(script.format(optimizer))
        run("calibrate", f"{config}:1", "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json"))
        overlay = load_profile(str(tmp_path / "profile.json")).calibration
        assert overlay is not None
        found.append(overlay.runs[0].predicted_step_time_s or 0.0)
    assert found[0] < found[1]


def test_the_log_of_another_framework_is_said(plan: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "".join(f"step: {step:2d} loss: 1.0 memory: 1.00GiB(1%) tps: 5,000 tflops: 9\n" for step in range(9))
    )
    command = ["calibrate", f"{plan}:{log}", "--hardware", HARDWARE, "-o", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(app, command)
    assert "the log is of torchtitan" in " ".join(result.output.split())
