from pathlib import Path

import pytest

import costmodels
from costmodels.memory import state_bytes
from costmodels.recipe import OUR_RECIPE, attention_kernel, list_recipes, load_recipe

NAMES = list_recipes()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_called_as_its_file_and_names_kernels_that_exist(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert attention_kernel(recipe.flash_kernel).is_fused
    assert not attention_kernel(recipe.plain_kernel).is_fused


def test_all_files_are_listed() -> None:
    folder = Path(costmodels.__file__).parent / "recipes"
    assert {path.stem for path in folder.glob("*.json")} == {*NAMES, "attention"}


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no recipe 'horovod'; shipped are .*nanotron"):
        load_recipe("horovod")
    with pytest.raises(ValueError, match="no attention kernel 'linear'"):
        attention_kernel("linear")


def test_our_recipe_keeps_the_bytes_of_fsdp2() -> None:
    ours = state_bytes(
        1e9,
        precision="bf16",
        optimizer="adamw",
        zero_stage=1,
        num_shards=8,
        facts=load_recipe(OUR_RECIPE).state,
        is_replicated=True,
    )
    assert ours == state_bytes(1e9, precision="bf16", optimizer="adamw", zero_stage=1, num_shards=8)


@pytest.mark.parametrize(
    ("dp", "zero_stage", "bytes_per_parameter"),
    # static memory of the nanotron sweep: 18 on one data-parallel rank, 20 on several
    [(1, 0, 18), (4, 0, 20)],
)
def test_nanotron_keeps_the_bytes_that_were_measured(dp: int, zero_stage: int, bytes_per_parameter: float) -> None:
    state = state_bytes(
        1e9,
        precision="bf16",
        optimizer="adamw",
        zero_stage=zero_stage,
        num_shards=dp,
        facts=load_recipe("nanotron").state,
        is_replicated=dp > 1,
    )
    assert state.total == pytest.approx(bytes_per_parameter * 1e9)
