"""A factor of a cluster's hosts reaches every fact of a recipe that says how long they take or how late they come."""

import pytest

from costmodels.calibrated import USUAL_DELAY_S, host_factor, recipe_on, scaled_recipe
from costmodels.recipe import Recipe, load_recipe
from hardware_profiles.calibrated import scaled
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterProfile, Quantity
from tests.recipes import STUDY_RECIPES


def delays(recipe: Recipe) -> tuple[float | None, float | None]:
    facts = (recipe.collective_delay_s, recipe.host_s_per_collective_rank)
    return tuple(None if fact is None else fact.value for fact in facts)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "place"),
    [("megatron-deepspeed-2022", 0), (STUDY_RECIPES["nanotron-2025"], 1), ("torchtitan", None)],
)
def test_a_delay_doubles_in_whatever_form_the_recipe_has_it(name: str, place: int | None) -> None:
    recipe = load_recipe(name)
    before, after = delays(recipe), delays(scaled_recipe(recipe, {"collective_delay": 2.0}))
    known = 0.0 if place is None else before[place]
    assert known is not None
    expected = list(before)
    expected[1 if place is None else place] = 2 * (known + USUAL_DELAY_S) - USUAL_DELAY_S
    assert after == pytest.approx(tuple(expected))
    assert delays(scaled_recipe(recipe, {})) == before


def test_slow_hosts_take_longer_for_all_that_they_do_themselves() -> None:
    recipe = load_recipe("planner")
    slow = scaled_recipe(recipe, {"host_time": 3.0})
    assert slow.host_s_per_kernel.value == 3 * recipe.host_s_per_kernel.value
    assert slow.host_s_per_collective.value == 3 * recipe.host_s_per_collective.value
    assert recipe.host_s_per_sharded_kernel is not None
    assert slow.host_s_per_sharded_kernel is not None
    assert slow.host_s_per_sharded_kernel.value == 3 * recipe.host_s_per_sharded_kernel.value


def read(name: str, host_s: float) -> ClusterProfile:
    """A shipped profile, as if a host's time of a kernel had been read."""
    profile = load_profile(name)
    reading = Quantity(value=host_s, tag="measured", source="a test")
    return profile.model_copy(update={"node": profile.node.model_copy(update={"host_s_per_kernel": reading})})


def test_the_profiles_reading_of_its_hosts_scales_all_that_hosts_do() -> None:
    """A host read to be three times as slow takes three times as long for everything, launches on a GPU included."""
    recipe = load_recipe("planner")
    assert recipe.host_reading_s is not None
    assert recipe.host_s_per_launch is not None
    assert recipe.hooks is not None
    known = recipe.host_reading_s.value
    launched = known + recipe.host_s_per_launch.value
    for profile in (read("cpu-gloo", 3 * known), read("dgx-h100-80gb", 3 * launched)):
        assert host_factor(recipe, profile) == pytest.approx(3.0)
        slow = recipe_on(recipe, profile)
        assert slow.host_s_per_kernel.value == pytest.approx(3 * recipe.host_s_per_kernel.value)
        assert slow.host_s_per_launch is not None
        assert slow.host_s_per_launch.value == pytest.approx(3 * recipe.host_s_per_launch.value)
        assert slow.hooks is not None
        assert slow.hooks.reduce_s == pytest.approx(3 * recipe.hooks.reduce_s)
    assert recipe_on(recipe, load_profile("cpu-gloo")) == recipe
    # Nothing is known of the hosts that other recipes' times were fitted on.
    assert recipe_on(load_recipe("torchtitan"), read("dgx-h100-80gb", 1.0)) == load_recipe("torchtitan")


def test_a_factor_of_products_reaches_those_in_eight_bits() -> None:
    profile = load_profile("dgx-h100-80gb")
    before = profile.device.efficiency["gemm"].eight_bit_fraction
    after = scaled(profile, {"product_rate": 0.9}).device.efficiency["gemm"].eight_bit_fraction
    assert before is not None
    assert after is not None
    assert after.value == pytest.approx(0.9 * before.value)
