"""The fit of a recipe finds what residuals were made with, and says what each number was fitted to."""

import math
from statistics import fmean

import pytest

from costmodels.recipe import load_recipe
from hardware_profiles.schema import Fit
from planner.calibration.recipe_fit import (
    FITTED_FACTS,
    KERNELS_PER_COLLECTIVE,
    OWN_PARAMETERS,
    PARAMETERS,
    PULL,
    RecipeFit,
    Values,
    error_band,
    facts_of,
    fit_recipe,
    neutral_values,
    what_others_say,
    with_values,
)
from tests.recipes import STUDY_RECIPES

NUM_RUNS = 40


def residuals(values: Values) -> list[float]:
    """Runs of products and memory-bound kernels in turn, made with a product rate of 0.8 and a traffic of 2."""
    products, memory = 0.8 / values["product_rate"], values["memory_traffic"] / 2.0
    return [math.log(share * products + (1 - share) * memory) for share in (0.9, 0.1) for _ in range(NUM_RUNS // 2)]


def test_a_fit_finds_what_runs_were_made_with_and_leaves_the_rest() -> None:
    found = fit_recipe(["product_rate", "memory_traffic", "host_s_per_kernel"], residuals)
    assert found.values["product_rate"] == pytest.approx(0.8, rel=0.03)
    assert found.values["memory_traffic"] == pytest.approx(2.0, rel=0.03)
    assert found.told == ("product_rate", "memory_traffic")
    assert {name: found.values[name] for name in PARAMETERS if name not in found.told} == {
        name: parameter.neutral for name, parameter in PARAMETERS.items() if name not in found.told
    }


def test_a_single_sick_run_moves_nothing() -> None:
    def one_is_sick(values: Values) -> list[float]:
        return [0.0, math.log(5 / values["memory_traffic"])]

    assert fit_recipe(["memory_traffic"], one_is_sick, {**neutral_values(), "memory_traffic": 1.3}).values == {
        **neutral_values(),
        "memory_traffic": 1.3,
    }
    assert PULL > 0


def test_every_number_that_is_written_says_what_it_was_fitted_to() -> None:
    found = fit_recipe(["product_rate", "memory_traffic"], residuals)
    fit = Fit(to="step times of toys", num_rows=NUM_RUNS, held_out_error=0.1)
    facts = facts_of(found, load_recipe("nanotron"), fit, "a test")
    assert set(facts) == set(FITTED_FACTS) - set(OWN_PARAMETERS)  # which nanotron is not known to have
    for name in ("product_rate", "memory_traffic", "host_s_per_collective"):
        assert (facts[name].tag, facts[name].fit) == ("fitted", fit)
    assert facts["data_parallel_rate"].tag == "specified"
    assert facts["host_s_per_collective"].value == KERNELS_PER_COLLECTIVE * facts["host_s_per_kernel"].value


def test_values_go_only_where_a_recipe_has_the_fact() -> None:
    values = {**neutral_values(), "product_rate": 0.9, "host_s_per_collective_rank": 1e-3}
    without, having = (
        with_values(load_recipe(recipe), values) for recipe in ("nanotron", STUDY_RECIPES["nanotron-2025"])
    )
    assert without.product_rate.value == having.product_rate.value == 0.9
    assert without.host_s_per_collective_rank is None
    assert having.host_s_per_collective_rank is not None
    assert having.host_s_per_collective_rank.value == 1e-3


def test_strangers_get_what_others_agree_on() -> None:
    def told(rate: float, *names: str) -> RecipeFit:
        values = {**neutral_values(), "product_rate": rate, "host_s_per_collective_rank": 1.0}
        return RecipeFit(values, names, names, neutral_values())

    fits = [told(0.5, "product_rate"), told(2.0, "product_rate"), told(9.0)]
    assert what_others_say("product_rate", fits) == pytest.approx(1.0)
    assert what_others_say("memory_traffic", fits) == PARAMETERS["memory_traffic"].neutral
    assert what_others_say("host_s_per_collective_rank", fits) == 0.0  # one framework's own: not to be expected


def test_a_band_counts_each_source_alike_however_many_runs_it_has() -> None:
    few, many = [1.5, 1.5], [1.0] * 500
    band = error_band([few, many], "a test", 0.05)
    assert (band.low, band.high, band.num_runs) == (1.0, 1.5, 502)
    assert error_band([many, many, [fmean(few)]], "a test", 0.05).high == 1.5


def test_all_other_sources_count_as_one_more() -> None:
    """Two runs of one source are no band of 80 %; of many sources a few strangers do not move it."""
    alone, strangers = [[1.01, 1.02]], [[0.9] * 3, [1.2] * 40]
    assert error_band(alone, "a test", None).high == 1.02
    band = error_band(alone, "a test", None, strangers)
    assert (band.low, band.high, band.num_runs) == (0.9, 1.2, 2)
    assert error_band(alone * 20, "a test", None, strangers) == error_band(alone * 20, "a test", None)
