"""Which band counts, by what is known of a cluster."""

import datetime

from costmodels.bands import Tier, time_tier, with_bands
from costmodels.recipe import load_recipe
from hardware_profiles.schema import Calibration, CalibrationRun


def test_a_recipe_on_a_gpu_that_it_was_compared_on_keeps_its_own_band() -> None:
    recipe = load_recipe("nanotron")
    assert time_tier(recipe, "H100-SXM5-80GB", None, "nanotron") is Tier.SEEN
    assert with_bands(recipe, "H100-SXM5-80GB", None, "nanotron") == recipe


def test_on_another_gpu_the_band_is_that_of_sources_of_which_nothing_was_known() -> None:
    recipe = load_recipe("nanotron")
    apart = with_bands(recipe, "B200-SXM-180GB", None, "nanotron")
    assert time_tier(recipe, "B200-SXM-180GB", None, "nanotron") is Tier.UNSEEN
    assert apart.error_band is not None
    assert recipe.error_band is not None
    assert "no other tells" in apart.error_band.source
    assert apart.error_band.between_layouts == recipe.error_band.between_layouts
    assert apart.memory_band == recipe.memory_band


def test_runs_of_a_framework_count_whichever_kernels_they_chose() -> None:
    run = CalibrationRun(name="a run", framework="torchtitan+compile", step_time_s=1.0)
    found = Calibration(runs=(run,), date=datetime.date(2026, 11, 22), prior="a test")
    recipe = load_recipe("torchtitan")
    for software in ("torchtitan", "torchtitan@2025+compile"):
        assert time_tier(recipe, "A100-SXM4-80GB", found, software) is Tier.CALIBRATED


def test_runs_of_another_framework_calibrate_no_band() -> None:
    run = CalibrationRun(name="a run", framework="nanotron", step_time_s=1.0)
    found = Calibration(runs=(run,), date=datetime.date(2026, 11, 22), prior="a test")
    recipe = load_recipe("torchtitan")
    assert time_tier(recipe, "A100-SXM4-80GB", found, "torchtitan") is Tier.SEEN
