"""What ``planner parity`` and ``planner verify`` find on four ranks."""

from __future__ import annotations

from typing import Any

import pytest

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
