"""The split log-normal against values worked out by hand, and the bands of the shipped recipes."""

from math import exp, inf, log, nan

import pytest

from costmodels.memory_band import MemoryBand, evenly_many, share_within, spreads
from costmodels.recipe import list_recipes, load_recipe

BAND = MemoryBand(spread_above=0.2, spread_below=0.1, num_runs=7, num_sources=2, source="by hand")


def test_the_factor_is_a_quantile() -> None:
    assert BAND.factor(0.5) == 1.0
    assert BAND.factor(0.05) == pytest.approx(exp(0.2 * 1.6448536))
    assert BAND.factor(0.158655254) == pytest.approx(exp(0.2))  # one standard deviation


def test_the_probability_is_its_inverse() -> None:
    assert BAND.fit_probability(100.0, 100.0) == 0.5
    assert BAND.fit_probability(100.0, 100.0 * BAND.factor(0.05)) == pytest.approx(0.95)
    # One standard deviation too little, of the narrower side.
    assert BAND.fit_probability(100.0 * exp(0.1), 100.0) == pytest.approx(0.158655254)
    assert BAND.fit_probability(0.0, 100.0) == 1.0
    assert BAND.fit_probability(1.0, 0.0) == 0.0


@pytest.mark.parametrize("risk", [0.0, -0.1, 0.51, 1.0, nan, inf])
def test_what_is_no_risk_is_refused(risk: float) -> None:
    with pytest.raises(ValueError, match=r"above 0 and at most 0\.5"):
        BAND.factor(risk)


def test_spreads_are_root_mean_squares_of_each_side() -> None:
    above, below = spreads([[exp(0.1), exp(-0.3), exp(0.1), exp(-0.3)]])
    assert (above, below) == (pytest.approx(0.1), pytest.approx(0.3))


def test_every_source_counts_alike() -> None:
    above, below = spreads([[exp(0.1)] * 1000, [exp(0.3)]])
    assert above == pytest.approx(((0.01 + 0.09) / 2) ** 0.5)
    assert below == above  # nothing lies below: the other side's stands for it
    with pytest.raises(ValueError, match="no run differs"):
        spreads([[1.0, 1.0]])


def test_quantiles_keep_the_ends_and_the_middle() -> None:
    many = evenly_many([3.0, 1.0, 2.0])
    assert (len(many), many[0], many[50], many[-1]) == (101, 1.0, 2.0, 3.0)


def test_the_share_of_runs_inside() -> None:
    assert share_within([0.9, 1.0, 1.1, 1.3], 1.1) == 0.75


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_says_its_band_and_what_it_was_fitted_to(name: str) -> None:
    band = load_recipe(name).memory_band
    assert band is not None
    assert "benchmarks/memory_band.py" in band.source
    assert band.num_runs >= 20
    assert 0 < log(band.factor(0.05)) < log(2)


def test_a_recipe_has_a_band_of_its_own_only_where_its_runs_tell_one() -> None:
    ours, nanotron, few = (load_recipe(name).memory_band for name in ("planner", "nanotron", "torchtitan"))
    assert ours is not None
    assert nanotron is not None
    assert few == ours  # four runs tell no band
    assert nanotron.num_sources == 1 < ours.num_sources


def test_a_side_without_runs_has_the_others_spread() -> None:
    above, below = spreads([[exp(-0.2)], [exp(-0.4)]])
    assert above == below == pytest.approx(((0.04 + 0.16) / 2) ** 0.5)
