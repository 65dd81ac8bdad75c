"""A factor of a cluster's hosts reaches every fact of a recipe that says how long they take or how late they come."""

import pytest

from costmodels.calibrated import USUAL_DELAY_S, scaled_recipe
from costmodels.recipe import Recipe, load_recipe
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
