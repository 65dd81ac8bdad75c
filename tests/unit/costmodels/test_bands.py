"""Which band counts, by what is known of a cluster."""

import datetime
import json
from importlib.resources import files

from costmodels.bands import Tier, held_shares, time_tier, with_bands
from costmodels.recipe import load_recipe
from hardware_profiles.schema import Calibration, CalibrationRun
from planner.frameworks.registry import FRAMEWORKS


def test_a_recipe_on_a_gpu_that_it_was_compared_on_keeps_its_own_band() -> None:
    recipe = load_recipe("nanotron")
    assert time_tier(recipe, "H100-SXM5-80GB", None, "nanotron") is Tier.SEEN
    assert with_bands(recipe, "H100-SXM5-80GB", None, "nanotron") == recipe


def test_a_framework_that_borrows_a_recipe_was_never_compared() -> None:
    """Before, torchtune's runs were said to be known: torchtitan's on that GPU are."""
    recipe = load_recipe("torchtitan-compiled")
    assert time_tier(recipe, "H100-SXM5-80GB", None, "torchtitan+compile") is Tier.SEEN
    assert time_tier(recipe, "H100-SXM5-80GB", None, "torchtune+compile") is Tier.UNSEEN
    assert with_bands(recipe, "H100-SXM5-80GB", None, "torchtune+compile") != recipe


def test_frameworks_with_a_recipe_of_their_own_are_those_of_the_registry() -> None:
    text = (files("costmodels") / "recipes" / "bands.json").read_text(encoding="utf-8")
    own = {name for each in FRAMEWORKS if not each.borrows for name in each.names}
    assert set(json.loads(text)["frameworks"]) == own


def test_bands_hold_of_strangers_what_they_say() -> None:
    """80 %, within 5 points, of sources that had no part in them, whatever is known of a run."""
    held = held_shares()
    assert held.keys() == {"unseen", "seen", *(f"calibrated by {number}" for number in (1, 3, 10))}
    assert all(0.75 <= share <= 0.85 for share in held.values())


def test_on_another_gpu_the_band_is_that_of_all_sources() -> None:
    recipe = load_recipe("nanotron")
    apart = with_bands(recipe, "B200-SXM-180GB", None, "nanotron")
    assert time_tier(recipe, "B200-SXM-180GB", None, "nanotron") is Tier.UNSEEN
    assert apart.error_band is not None
    assert recipe.error_band is not None
    assert apart.error_band != recipe.error_band
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


def test_a_run_far_off_what_its_calibration_predicts_gives_no_band() -> None:
    """Two runs four times slower than even the calibrated price gave a band in which neither of them lay."""
    recipe = load_recipe("torchtitan")
    for calibrated_s, tier in ((1.0, Tier.SEEN), (3.0, Tier.CALIBRATED)):
        run = CalibrationRun(name="r", framework="torchtitan", step_time_s=4.0, calibrated_step_time_s=calibrated_s)
        found = Calibration(runs=(run,), date=datetime.date(2026, 11, 22), prior="a test")
        assert time_tier(recipe, "A100-SXM4-80GB", found, "torchtitan") is tier
