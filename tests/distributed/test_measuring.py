"""What ``planner parity`` and ``planner verify`` find on four ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.cli.verify import plan_row
from planner.layout.layout import Pins
from planner.plan.plan_file import read_plan, write_plan
from planner.request import Request

TOLERANCE = 1e-5


def test_a_plan_that_is_right_has_parity(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["parity-equal"]
    assert outcome["loss"] == pytest.approx(outcome["expected_loss"], rel=TOLERANCE)
    rows = outcome["rows"]
    assert {"token_embedding.weight", "head.weight", "layers.3.mlp.down.weight"} <= {row["fqn"] for row in rows}
    for row in rows:
        assert max(row["gradient_error"], row["parameter_error"]) <= TOLERANCE, row
        assert row["num_copies"] == 2, row  # of two data-parallel ranks
    assert max(row["gradient_norm"] for row in rows) > 0.1


def test_unlike_shares_of_a_batch_have_parity(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["parity-shares"]
    assert outcome["loss"] == pytest.approx(outcome["expected_loss"], rel=TOLERANCE)
    for row in outcome["rows"]:
        assert max(row["gradient_error"], row["parameter_error"]) <= TOLERANCE, row
        assert row["num_copies"] == 4, row
    assert max(row["gradient_norm"] for row in outcome["rows"]) > 0.1


def test_verify_tells_the_memory_of_every_share(outcomes: dict[str, Any]) -> None:
    small, large = outcomes["verify-shares"]["memory_bytes"]
    assert large > small > 4 * 220544 / 4 * 4  # shards of a quarter, moments, and what is gathered


def test_a_model_that_cannot_be_split_has_none(outcomes: dict[str, Any]) -> None:
    assert max(row["gradient_error"] for row in outcomes["parity-coupled"]["rows"]) > 100 * TOLERANCE


def test_verify_measures_every_part(outcomes: dict[str, Any]) -> None:
    outcome = outcomes["verify"]
    assert len(outcome["step_times_s"]) == 2
    assert outcome["step_time_s"] > outcome["optimizer_s"] > 0
    assert {"all_gather", "send", "recv"} <= set(outcome["collectives_s"])
    states = 220544 / 2 / 2 * 4  # about: a half of the parameters a stage, a half of these a rank, in float32
    assert all(memory > 4 * states for memory in outcome["memory_bytes"])  # shards, moments, and what is gathered
    assert len(outcome["memory_bytes"]) == 2


@pytest.mark.quiet
def test_the_fastest_of_several_plans_is_kept(tmp_path: Path) -> None:
    """Two ranks measure a pipeline and what a search finds besides. Any may win: the machine is noisy."""
    request = Request("gpt-tiny", 2, "cpu-gloo", seq_len=64, global_batch_size=8, precision=Precision.FP32,
                      pins=Pins(pp=2, micro_batch=1))  # fmt: skip
    given = find_plan(request).plan
    free = given.model_copy(update={"search": given.search and given.search.model_copy(update={"pins": {}})})
    write_plan(free, tmp_path / "plan.json")
    command = [sys.executable, "-c", "from planner.cli.main import main; main()", "verify", str(tmp_path / "plan.json")]
    result = subprocess.run(
        [*command, "--top", "3", "--steps", "3", "--keep", str(tmp_path / "kept.json"), "--json"],
        env=os.environ, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)["plans"]
    assert len(rows) == 3
    assert len({row["layout"] for row in rows}) == 3
    times = [row["measured_s"] for row in rows]
    assert times == sorted(times)
    assert all(row["fastest_s"] <= row["measured_s"] <= row["slowest_s"] for row in rows)
    (mine,) = [row for row in rows if row["is_given"]]
    assert mine["layout"].startswith("pp=2")
    kept = read_plan(tmp_path / "kept.json")
    assert any(not row["layout"].startswith("pp=2") for row in rows)  # a search without pins found more than pipelines
    assert plan_row(kept, {})["layout"] == rows[0]["layout"]
    assert kept.prediction is not None
    assert kept.prediction.step_time_s == rows[0]["predicted_s"]
