"""Anchors: which rows calibrate, and that they are then not priced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fidelity import named_profile
from benchmarks.published.anchors import Comparison, anchored, features, spread_over
from benchmarks.published.pricing import RunPricer
from benchmarks.published.summary import row_of
from planner.formats.run_table import Run, read_runs
from tests.unit.benchmarks.test_published_runs import write

LAYOUTS = [{"dp": "8", "tp": "1", "pp": "1"}, {"dp": "4", "tp": "2", "pp": "1"}, {"dp": "2", "tp": "4", "pp": "1"},
           {"dp": "2", "tp": "2", "pp": "2"}, {"dp": "4", "tp": "1", "pp": "2"}]  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    rows = [{"id": f"row {i}", "cluster": "toys", **layout} for i, layout in enumerate(LAYOUTS)]
    lonely = {"id": "lonely", "cluster": "single"}
    return [run for run in read_runs(write(tmp_path / "runs.csv", *rows, lonely)) if isinstance(run, Run)]


def test_anchors_are_chosen_without_their_times(runs: list[Run]) -> None:
    own = runs[:5]
    slower = [replace(run, step_time_s=100.0 * (place + 1)) for place, run in enumerate(own)]
    chosen = spread_over(own, 3)
    assert [run.id for run in spread_over(slower, 3)] == [run.id for run in chosen]
    assert len({features(run) for run in chosen}) == 3
    assert spread_over(own, 1) == chosen[:1]


def test_clusters_of_too_few_rows_have_no_anchors(runs: list[Run]) -> None:
    pricer = RunPricer()
    cold = {run.id: pricer.price(run).priced.step_time_s for run in runs}
    slow = [replace(run, step_time_s=1.3 * cold[run.id]) for run in runs]
    found = anchored(slow, 2, pricer)
    assert set(found.anchors) == {"toys"}
    assert len(found.ids) == 2
    rest = [run for run in slow if run.id not in found.ids]
    before = tuple(row_of(run, pricer.price(run)) for run in rest)
    after = [row_of(run, found.calibrated(pricer).price(run)) for run in rest]
    every = Comparison(found, before).errors({run.id: run for run in rest}, after)
    anchored_rows, others = every[-2], every[-1]
    assert (anchored_rows.num_rows, others.num_rows) == (3, 1)
    assert anchored_rows.cold == pytest.approx(0.3 / 1.3)
    assert anchored_rows.anchored is not None
    assert anchored_rows.cold is not None
    assert anchored_rows.anchored < anchored_rows.cold
    assert others.anchored == others.cold


def test_a_profile_for_a_cluster_is_named_by_both() -> None:
    assert named_profile("toys=dgx-h100-80gb")[1].name == "dgx-h100-80gb"
    with pytest.raises(ValueError, match="is not CLUSTER=FILE"):
        named_profile("dgx-h100-80gb")
