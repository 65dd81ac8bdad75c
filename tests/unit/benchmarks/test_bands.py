"""Bands hold what was measured over what had been predicted before the source was known."""

import random
from collections.abc import Sequence
from dataclasses import replace
from math import exp

import pytest

from benchmarks import bands
from benchmarks.bands import (
    Priced,
    Shares,
    band_of_all,
    band_of_recipe,
    enough,
    held_by_tier,
    held_without,
    layout_error,
    shares_of,
)
from benchmarks.published.blind import first_prices
from benchmarks.published.data import BLIND_RUNS
from costmodels.recipe import ErrorBand
from planner.formats.run_table import Run, Software, read_runs

RUNS = {run.id: run for run in read_runs(BLIND_RUNS) if isinstance(run, Run)}
ANY = RUNS["flashattn-train-gpt3-125m"]
TITAN, OTHER, UNKNOWN = Software("torchtitan", "2025"), Software("nanotron", ""), Software("a new one", "2024")
EIGHTY = Shares(0.8, 0.8)
TUNE = Software("torchtune", "2025")  # priced by torchtitan's recipe, which nobody held against its runs


def priced(software: Software, *ratios: float, group: str = "") -> list[Priced]:
    return [Priced(replace(ANY, software=software, group=group), ratio) for ratio in ratios]


def ends(band: ErrorBand) -> tuple[float, float]:
    return band.low, band.high


def test_runs_priced_blind_count_by_what_was_said_first() -> None:
    found = bands.first_said()
    said = first_prices()
    assert sum(map(len, found.values())) == sum(each.predicted_s is not None for each in said.values())
    for source, rows in found.items():
        for each in rows[:3]:
            assert each.run.source == source
            assert each.ratio == (each.run.step_time_s or 0) / (said[each.run.id].predicted_s or 0)


def test_what_a_prediction_says_to_know_is_of_frameworks_with_a_recipe_of_their_own() -> None:
    kinds = [each.kind for each in (*priced(TITAN, 1), *priced(TUNE, 1), *priced(UNKNOWN, 1))]
    assert kinds == [("torchtitan", "A100"), None, None]


def test_a_recipe_has_its_sources_and_all_others_as_one_more() -> None:
    """Half of the weight is the source's own: the lowest tenth lies in it, and the highest in the others."""
    evidence = {
        "titan": priced(TITAN, *[0.9] * 5),
        "tune": priced(TUNE, *[1.3] * 5),
        "new": priced(UNKNOWN, *[1.3] * 5),
    }
    assert ends(band_of_recipe("torchtitan", evidence, None, EIGHTY)) == (0.9, 1.3)
    assert ends(band_of_recipe("nanotron", evidence, None, EIGHTY)) == (0.9, 1.3)
    assert ends(band_of_all(evidence, None, 0.8)) == (0.9, 1.3)
    alone = {"titan": priced(TITAN, *[0.9] * 5)}
    assert ends(band_of_recipe("torchtitan", alone, None, EIGHTY)) == (0.9, 1.0)


def test_what_is_held_is_asked_of_bands_made_without_the_source() -> None:
    """Two sources of one recipe at 1 and 1.1, and a stranger at 2 that no band of theirs holds.

    The band of the first is of the second and the stranger, so it holds 1; the second's holds 1.1; the stranger's is of
    the two.
    """
    one, two, stranger = priced(TITAN, 1.0), priced(TITAN, 1.1), priced(UNKNOWN, 2.0)
    assert held_by_tier({"one": one, "two": two, "new": stranger}, EIGHTY) == {"seen": 1.0, "unseen": 0.0}
    assert held_by_tier({"one": one, "two": two}, EIGHTY) == {"seen": 0.5}  # 1.1 is not held by the other's 1
    assert held_without({"a, one": [1.0], "b, one": [1.1], "c, two": [1.05]}, 0.8) == 0.75
    assert held_without({"a, one": [1.0], "b, one": [1.1]}, 0.8) is None


def test_a_band_is_as_wide_as_it_takes_for_strangers() -> None:
    """Of its own runs it holds more than 80 %."""
    assert enough(lambda share: share - 0.025) == (0.83, pytest.approx(0.805))
    assert enough(lambda share: 0.9) == (0.8, 0.9)
    assert enough(lambda share: None) == (0.8, None)
    assert enough(lambda share: 0.5) == (0.95, 0.5)  # no share is enough: the largest that is tried
    drawn = random.Random(0)
    evidence = {f"source {n}": priced(UNKNOWN, *(exp(drawn.gauss(0, 0.1)) for _ in range(20))) for n in range(20)}
    shares = shares_of(evidence)
    before, after = (held_by_tier(evidence, each)["unseen"] for each in (EIGHTY, shares))
    assert before < 0.8 <= after < 0.83
    narrow, wide = (ends(band_of_all(evidence, None, share)) for share in (0.8, shares.unseen))
    assert wide[0] <= narrow[0] < narrow[1] <= wide[1]


def test_how_far_two_layouts_lie_apart_is_of_groups() -> None:
    """Ratios 1, 1.1, 1.2, 1.3: pairs are 0.095, 0.087, 0.080, 0.182, 0.167, 0.262 apart in logarithms."""
    evidence = {"a": priced(OTHER, 1.0, 1.1, 1.2, 1.3, group="g"), "b": priced(OTHER, 5.0, group="h")}
    assert layout_error(evidence) == pytest.approx(0.1312, abs=1e-4)
    assert layout_error({"b": priced(OTHER, 5.0, 6.0, 7.0, 8.0)}) is None  # of no group


def test_shipped_bands_are_of_what_was_said_and_hold_what_they_say() -> None:
    """Of the runs that were priced blind alone, which stand in the repository: three quarters at least are held."""
    evidence: dict[str, Sequence[Priced]] = dict(bands.first_said())
    assert all(0.7 < share < 0.9 for share in held_by_tier(evidence, EIGHTY).values())
