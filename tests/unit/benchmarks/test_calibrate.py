"""The fit finds what runs were made with, says which parameters they tell, and knows what it may not guess."""

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.calibrate import PARAMETERS, Fit, _middle, errors, fit, with_values
from benchmarks.published.pricing import RunPricer
from benchmarks.published.runs import Architecture, Hardware, Layout, Run
from costmodels.recipe import load_recipe
from planner.parallelism import Recompute

NEUTRAL = {name: neutral for name, (neutral, _, _) in PARAMETERS.items()}
RECIPE = ("megatron-lm-2022",)


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
        text="",
        step_time_s=1.0,
        peak_memory_bytes=None,
        peak_memory_kind="",
    )


def test_the_fit_finds_what_runs_were_made_with() -> None:
    pricer = RunPricer()
    made_with = {**NEUTRAL, "product_rate": 0.8, "memory_traffic": 2.0}
    runs = [run_of(*shape) for shape in product((2048, 4096), (1, 4), (1, 2, 4))]
    made = replace(pricer, recipes={RECIPE[0]: with_values(load_recipe(RECIPE[0]), made_with)})
    runs = [replace(run, step_time_s=made.price(run).priced.step_time_s) for run in runs]
    before = max(map(abs, errors(RECIPE, runs, NEUTRAL, pricer)))
    found = fit(RECIPE, runs, pricer)
    assert before > 0.15
    assert max(map(abs, errors(RECIPE, runs, found.values, pricer))) < 0.04
    # The pull towards neutral values trades one parameter for another where times hardly tell them apart.
    assert found.values["product_rate"] == pytest.approx(0.8, rel=0.1)
    assert found.values["memory_traffic"] > NEUTRAL["memory_traffic"]
    assert {"product_rate", "memory_traffic"} <= set(found.told)
    assert "host_s_per_kernel" not in found.told  # large operators: a host twice as fast changes nothing
    assert "host_s_per_collective_rank" not in found.free  # this framework is not known to have it


def test_values_go_only_where_a_recipe_has_the_fact() -> None:
    values = {**NEUTRAL, "host_s_per_collective_rank": 1e-3}
    without, having = (with_values(load_recipe(name), values) for name in ("nanotron", "nanotron-2025"))
    assert without.host_s_per_collective_rank is None
    assert having.host_s_per_collective_rank is not None
    assert having.host_s_per_collective_rank.value == 1e-3


def test_strangers_get_what_others_agree_on() -> None:
    def told(rate: float, *names: str) -> Fit:
        return Fit((), {**NEUTRAL, "product_rate": rate, "host_s_per_collective_rank": 1.0}, 1, (), names, names)

    fits = [told(0.5, "product_rate"), told(2.0, "product_rate"), told(9.0)]
    assert _middle("product_rate", fits) == pytest.approx(1.0)
    assert _middle("memory_traffic", fits) == PARAMETERS["memory_traffic"][0]
    assert _middle("host_s_per_collective_rank", fits) == 0.0  # one framework's own: not to be expected
