"""The fit finds what priced runs were made with, and every recipe says which of its numbers a fit gave it."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.calibrate import RECIPES, extended_first, fit, put, residuals_of
from benchmarks.published.frameworks import recipe_called
from benchmarks.published.pricing import RunPricer
from costmodels.recipe import list_recipes, load_recipe
from costmodels.vocabulary.choices import Recompute
from hardware_profiles.sanity import quantities
from hardware_profiles.schema import Quantity
from planner.calibration import recipe_fit
from planner.calibration.recipe_fit import FITTED_FACTS, neutral_values, with_values
from planner.formats.run_table import Architecture, Hardware, Layout, Run, Software
from tests.recipes import STUDY_RECIPES

NEUTRAL = neutral_values()
RECIPE = ("megatron-lm-2022",)
# Recipes of whose numbers no fit ever had runs: ours is measured and defined, the others start from neutral values.
NEVER_FITTED = ("planner", "megatron-core-overlap", "megatron-core-expert-overlap", "dualpipe", "nemo")


def run_of(hidden: int, micro_batch_size: int, tp: int) -> Run:
    layout = Layout(
        dp=8 // tp,
        tp=tp,
        pp=1,
        virtual_stages=1,
        cp=1,
        ep=1,
        sequence_parallel=False,
        zero_stage=1,
        shard_size=None,
        global_batch_size=64,
        micro_batch_size=micro_batch_size,
        schedule="none",
        recompute=Recompute.NONE,
        offload="none",
    )
    return Run(
        id=f"{hidden}-{micro_batch_size}-{tp}",
        source="A toy of 2022",
        group="",
        architecture=Architecture(2, hidden, 16, 16, None, 4 * hidden, 4096, 1024, "gelu", True),
        hardware=Hardware("A100-80GB-SXM", 80, 8, 8, None),
        layout=layout,
        precision="bf16",
        flash_attention=True,
        software=Software("megatron-lm", "2022"),
        step_time_s=1.0,
        peak_memory_bytes=None,
        peak_memory_kind="",
    )


def test_the_fit_finds_what_runs_were_made_with() -> None:
    pricer = RunPricer()
    made_with = {**NEUTRAL, "product_rate": 0.8, "memory_traffic": 2.0}
    runs = [run_of(*shape) for shape in product((2048, 4096), (1, 4), (1, 4))]
    made = replace(pricer, recipes={RECIPE[0]: with_values(load_recipe(RECIPE[0]), made_with)})
    runs = [replace(run, step_time_s=made.price(run).priced.step_time_s) for run in runs]
    residuals = residuals_of(RECIPE, runs, pricer)
    found = fit(RECIPE, runs, pricer).fit
    assert max(map(abs, residuals(NEUTRAL))) > 0.15
    assert max(map(abs, residuals(found.values))) < 0.04
    # The pull towards neutral values trades one parameter for another where times hardly tell them apart.
    assert found.values["product_rate"] == pytest.approx(0.8, rel=0.1)
    assert found.values["memory_traffic"] > NEUTRAL["memory_traffic"]
    assert {"product_rate", "memory_traffic"} <= set(found.told)
    assert "host_s_per_kernel" not in found.told  # large operators: a host twice as fast changes nothing
    assert "host_s_per_collective_rank" not in found.free  # this framework is not known to have it


@pytest.mark.parametrize("name", [*list_recipes(), *STUDY_RECIPES])
def test_no_number_that_a_fit_gives_is_tagged_otherwise(name: str) -> None:
    recipe = recipe_called(name)
    for fact in FITTED_FACTS:
        quantity: Quantity | None = getattr(recipe, fact)
        if quantity is None:
            continue
        by_fit = "calibrate" in quantity.source
        assert (quantity.tag == "fitted") == by_fit or name == "planner", f"{fact}: {quantity}"
        if not by_fit and name not in NEVER_FITTED:
            assert quantity.source == (recipe_fit.OF_OTHERS if fact == "host_s_per_kernel" else recipe_fit.NEUTRAL), (
                fact
            )
            assert quantity.tag == "specified", fact


@pytest.mark.parametrize("name", [*list_recipes(), *STUDY_RECIPES])
def test_each_fitted_number_names_what_it_was_fitted_to(name: str) -> None:
    fitted = [quantity for _, quantity in quantities(recipe_called(name)) if quantity.tag == "fitted"]
    assert fitted or name in NEVER_FITTED
    for quantity in fitted:
        assert quantity.fit is not None
        assert len(quantity.fit.to.split()) >= 3
        if "benchmarks.calibrate" in quantity.source:
            assert quantity.fit.to.startswith("step times of published runs: ")
            assert quantity.fit.held_out_error is not None


@pytest.mark.parametrize("name", [*list_recipes(), *STUDY_RECIPES])
def test_no_number_speaks_of_a_fit_without_saying_so(name: str) -> None:
    for place, quantity in quantities(recipe_called(name)):
        assert quantity.tag == "fitted" or "fitted" not in quantity.source, place


def test_what_is_written_states_only_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtitan", "torchtitan-compiled"):
        shutil.copy(RECIPES / f"{name}.json", tmp_path)
    monkeypatch.setattr(calibrate, "STUDY_RECIPES", tmp_path)
    assert extended_first(["torchtitan-compiled", "torchtitan"]) == ["torchtitan", "torchtitan-compiled"]
    rate = {"value": 0.9, "tag": "specified", "source": "a test"}
    for name in ("torchtitan", "torchtitan-compiled"):
        put(name, {"product_rate": rate, "memory_traffic": {**rate, "value": 3 if name == "torchtitan" else 4}})
    compiled = json.loads((tmp_path / "torchtitan-compiled.json").read_text())
    assert "product_rate" not in compiled
    assert compiled["memory_traffic"]["value"] == 4
    again = load_recipe(str(tmp_path / "torchtitan-compiled.json"))
    assert (again.product_rate.value, again.memory_traffic.value) == (0.9, 4)


def test_blind_rows_join_the_fit_of_recipes_that_next_to_no_other_row_is_of() -> None:
    run = run_of(1024, 1, 1)
    assert calibrate.is_fitted_to(run, {})
    assert calibrate.is_fitted_to(run, {"megatron-lm-2022": 2, "megatron-core": 40})
    assert not calibrate.is_fitted_to(run, {"megatron-lm-2022": 3})
    assert not calibrate.is_fitted_to(replace(run, software=Software("nemo", "24.09")), {})


def test_work_side_by_side_has_what_this_process_has_and_keeps_its_order() -> None:
    factor = 3
    assert list(calibrate.side_by_side(lambda key: factor * key, [4, 1, 2])) == [12, 3, 6]
