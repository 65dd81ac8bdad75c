import json
import os
from pathlib import Path

import pytest

import costmodels
from costmodels.ledger import StateBytes
from costmodels.memory import Division, KeptStates, state_bytes
from costmodels.recipe import (
    OUR_RECIPE,
    OWN_FACTS,
    attention_kernel,
    list_recipes,
    load_recipe,
    resolved_content,
    stated_content,
)
from tests.recipes import FROZEN_FILE, STUDY_RECIPES, values_of

NAMES = list_recipes()
RECORDED = (*NAMES, *STUDY_RECIPES)
KERNELS = ("flash2", "cudnn", "flash1", "triton", "fused_softmax", "eager")


def states_of(trainable: float, frozen: float = 0.0, **choices: object) -> StateBytes:
    """State bytes for choices given by name."""
    names = ("precision", "optimizer", "facts")
    kept = KeptStates(**{name: choices[name] for name in names if name in choices})  # type: ignore[arg-type]
    left = {name: value for name, value in choices.items() if name not in names}
    return state_bytes(trainable, frozen, kept, Division(**left))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_called_as_its_file_and_names_kernels_that_exist(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert attention_kernel(recipe.flash_kernel).is_fused
    assert not attention_kernel(recipe.plain_kernel).is_fused


def test_all_files_are_listed() -> None:
    folder = Path(costmodels.__file__).parent / "recipes"
    assert {path.stem for path in folder.glob("*.json")} == {*NAMES, "attention", "bands"}


def test_unknown_names_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="no recipe 'horovod'; shipped are .*nanotron"):
        load_recipe("horovod")
    with pytest.raises(ValueError, match="no attention kernel 'linear'"):
        attention_kernel("linear")


@pytest.mark.parametrize("key", ["flash_kernel", "plain_kernel"])
def test_a_recipe_with_an_unknown_attention_kernel_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no attention kernel 'linear'; known are"):
        load_recipe(write(tmp_path, "mine", extends="nanotron", **{key: "linear"}))


def test_our_recipe_keeps_the_bytes_of_fsdp2() -> None:
    ours = states_of(
        1e9,
        precision="bf16",
        optimizer="adamw",
        zero_stage=1,
        num_shards=8,
        facts=load_recipe(OUR_RECIPE).state,
        is_replicated=True,
    )
    assert ours == states_of(1e9, precision="bf16", optimizer="adamw", zero_stage=1, num_shards=8)


@pytest.mark.parametrize(
    ("dp", "zero_stage", "bytes_per_parameter"),
    # static memory of the nanotron sweep: 18 on one data-parallel rank, 20 on several
    [(1, 0, 18), (4, 0, 20)],
)
def test_nanotron_keeps_the_bytes_that_were_measured(dp: int, zero_stage: int, bytes_per_parameter: float) -> None:
    state = states_of(
        1e9,
        precision="bf16",
        optimizer="adamw",
        zero_stage=zero_stage,
        num_shards=dp,
        facts=load_recipe("nanotron").state,
        is_replicated=dp > 1,
    )
    assert state.total == pytest.approx(bytes_per_parameter * 1e9)


def test_recipes_and_kernels_have_the_values_that_were_recorded() -> None:
    """So that none changes by accident; UPDATE_GOLDEN=1 records them again after a fit."""
    found: dict[str, object] = {name: values_of(load_recipe(STUDY_RECIPES.get(name, name))) for name in RECORDED}
    found["attention kernels"] = {name: values_of(attention_kernel(name)) for name in KERNELS}
    if os.environ.get("UPDATE_GOLDEN"):
        FROZEN_FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert json.loads(FROZEN_FILE.read_text(encoding="utf-8")) == json.loads(json.dumps(found))


@pytest.mark.parametrize("name", [*NAMES, *STUDY_RECIPES])
def test_a_file_states_only_what_differs_from_the_recipe_that_it_extends(name: str) -> None:
    stated = stated_content(STUDY_RECIPES.get(name, name))
    extended = stated.get("extends")
    if extended is None:
        return
    base = resolved_content(STUDY_RECIPES.get(str(extended), str(extended)))

    def repeated(part: dict[str, object], of: dict[str, object], place: str) -> list[str]:
        found: list[str] = []
        for key, value in part.items():
            below = of.get(key)
            if isinstance(value, dict) and isinstance(below, dict) and "value" not in value:
                found += repeated(value, below, f"{place}{key}.")
            elif value == below:
                found.append(place + key)
        return found

    facts = {key: value for key, value in stated.items() if key not in (*OWN_FACTS, "schema_version")}
    assert not repeated(facts, base, "")


def write(folder: Path, name: str, **content: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, "description": f"the recipe {name}", **content}))
    return str(path)


def test_a_recipe_may_extend_one_that_extends_another(tmp_path: Path) -> None:
    write(tmp_path, "middle", extends="nanotron", dropout=0.1, overflow_s_per_byte=None)
    top = load_recipe(write(tmp_path, "top", extends="middle", memory={"gathers_logits": True}))
    base = load_recipe("nanotron")
    assert (top.dropout, top.overflow_s_per_byte, top.memory.gathers_logits) == (0.1, None, True)
    assert base.overflow_s_per_byte is not None
    assert top.memory == base.memory.model_copy(update={"gathers_logits": True})
    assert top.state == base.state
    assert top.error_band is None  # that runs were near the base's predictions says nothing of this one


def test_recipes_that_extend_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "one", extends="two")
    write(tmp_path, "two", extends="three")
    path = write(tmp_path, "three", extends="one")
    with pytest.raises(ValueError, match=r"in a circle: .*three.json extends .*one.json extends .*two.json extends"):
        load_recipe(path)
    with pytest.raises(ValueError, match="no recipe 'nothing'"):
        load_recipe(write(tmp_path, "four", extends="nothing"))


@pytest.mark.parametrize("content", ["[]", "{", "[" * 10**5, "1" * 5000, "\ud800", None])
def test_a_file_that_is_no_recipe_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(ValueError, match="the recipe .*mine.json"):
        load_recipe(str(path))
    with pytest.raises(ValueError, match="no recipe 'xxx"):
        load_recipe(write(tmp_path, "five", extends="x" * 5000))
