"""The table of runs that nobody had priced before, their first prices, and what is made of the two."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hopper_fit
from benchmarks.published import blind
from benchmarks.published.blind import Said, first_prices, lines_by, write_first_prices
from benchmarks.published.data import BLIND_RUNS, RUNS, shipped
from planner.formats.run_table import Run, read_runs

RUNS_READ = [run for run in read_runs(BLIND_RUNS) if isinstance(run, Run)]
SAID = Said("a", 2.0, 0.9, 1.1, "seen", "nemo", "True", "", "abc1234")


def test_every_row_is_read_and_adds_up() -> None:
    with BLIND_RUNS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(RUNS_READ) == len(rows) == len({run.id for run in RUNS_READ})
    for run in RUNS_READ:
        layout = run.layout
        assert layout.dp * layout.tp * layout.pp * layout.cp == run.hardware.num_devices, run.id
        assert layout.global_batch_size % (layout.dp * layout.micro_batch_size) == 0, run.id
        assert run.step_time_s is not None
    assert all(row["source_ref"] and row["source_confidence"] == "stored" for row in rows)


def test_no_row_is_of_a_source_that_fits_are_made_of() -> None:
    table = shipped(RUNS)
    if table is None:
        pytest.skip("the table of published runs is not at hand")
    assert not {run.source for run in RUNS_READ} & {run.source for run in read_runs(table)}


def test_every_row_has_a_first_price_or_the_reason_why_not() -> None:
    first = first_prices()
    assert {run.id for run in RUNS_READ} == set(first)
    assert all((said.predicted_s is None) == bool(said.skipped) for said in first.values())
    assert all(said.commit for said in first.values())


def test_first_prices_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind, "BLIND_PRICES", tmp_path / "first.csv")
    without = Said("b", None, None, None, "", "", "", 'UnpriceableRunError: x, of "y"', "abc1234")
    write_first_prices([SAID, without])
    assert first_prices() == {"a": SAID, "b": without}


def test_errors_and_what_the_band_holds_by_source() -> None:
    """Predicted 2 s: 2.1 s lies in 1.8 to 2.2 and is 4.8 % under; 1 s does not and is 100 % over."""
    first, second = RUNS_READ[:2]
    runs = [replace(first, source="x", step_time_s=2.1), replace(second, source="x", step_time_s=1.0)]
    said = {runs[0].id: SAID, runs[1].id: SAID}
    assert lines_by(runs, said, lambda run: run.source) == [
        "x  2  52.4%  52.4%  +47.6%  50%",
        "all  2  52.4%  52.4%  +47.6%  50%",
    ]


def test_the_fraction_without_error_lies_where_errors_cross_zero() -> None:
    errors = [-10 * (fraction - 0.72) for fraction in hopper_fit.FRACTIONS]
    assert hopper_fit._without_error(errors) == pytest.approx(0.72)
    beyond = [-10 * (fraction - 0.85) for fraction in hopper_fit.FRACTIONS]
    assert hopper_fit._without_error(beyond) == pytest.approx(0.85)


def test_the_fit_takes_each_dense_model_and_release_once() -> None:
    runs = hopper_fit.dense_runs()
    models = {(run.source, run.architecture.hidden, run.architecture.seq_len) for run in runs}
    assert len(models) == len(runs) >= 20
    assert {run.precision for run in runs} == {"bf16"}
    assert not any(run.architecture.experts for run in runs)
