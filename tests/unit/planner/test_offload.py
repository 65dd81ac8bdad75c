"""Offloading in the search: what it costs, what it frees, what a node must have, and when it is named."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm, Phase
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterProfile, ClusterSpec, Quantity
from planner.api import find_plan, price_plan
from planner.api.nothing_fits import no_plan, something_fits
from planner.axes.base import Executed
from planner.axes.offload import OFFLOAD
from planner.errors import HardwareError
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.host import HostStates, fullest_node
from planner.layout.layout import Layout, Pins
from planner.pricing.facts import cluster_facts
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.render import show_plan
from planner.request import Request
from planner.solver.bounds import bounds
from planner.solver.cutting import Pricer, best_cut
from planner.solver.search import search
from planner.translate.infeasible import Attempt
from tests.planning import A100, graph_of, problem_of, training_of

H100 = "dgx-h100-80gb"
ROUNDING = 1 + 1e-9
CPU, NVME = Pins(offload=Offload.CPU), Pins(offload=Offload.NVME)


def quantity(value: float) -> Quantity:
    return Quantity(value=value, tag="datasheet", source="made up for tests")


def with_node(profile: ClusterProfile, **update: float) -> ClusterProfile:
    values = {name: quantity(value) for name, value in update.items()}
    return profile.model_copy(update={"node": profile.node.model_copy(update=values)})


@cache
def gpt2(pins: Pins = CPU, num_devices: int = 16, **update: float) -> Problem:
    """GPT-2 on A100 whose nodes are as ``update`` says, with a disk of 25 GB/s."""
    profile = with_node(load_profile(A100), **{"nvme_bandwidth_bytes_per_s": 25e9, **update})
    cluster = ClusterSpec(profile=profile, num_devices=num_devices)
    target = PricingTarget(graph_of("gpt2-1.5b", 1024), cluster, "bf16")
    return Problem.build(target, training_of(64, 1024), pins)


def sample(problem: Problem, number: int = 60) -> list[Layout]:
    choices = problem.space.layouts
    return [choices[i] for i in range(0, len(choices), max(1, len(choices) // number))]


@cache
def everywhere() -> Problem:
    """``gpt2()`` with prices of a sample of its layouts, their states in each place."""
    problem = gpt2()
    layouts = [choice._replace(offload=place) for choice in sample(problem) for place in Offload]
    return replace(problem, table=build_table(problem.target, problem.space.training, problem.decisions, layouts))


def even(problem: Problem, choice: Layout) -> Evaluated:
    point = Evaluator(problem.table, choice)
    return point.evaluate(point.even_starts())


@pytest.mark.parametrize("offload", [Offload.CPU, Offload.NVME])
def test_the_same_layout_is_slower_and_lighter(offload: Offload) -> None:
    problem = everywhere()
    for choice in sample(problem):
        here, there = (even(problem, choice._replace(offload=place)) for place in (Offload.NONE, offload))
        assert here.step_time_s < there.step_time_s
        assert there.peak_memory_bytes < here.peak_memory_bytes
        for before, after in zip(here.memory, there.memory, strict=True):
            lost = before.ledger(Phase.FORWARD).bytes_of(MemoryTerm.OPTIMIZER)
            gained = after.ledger(Phase.FORWARD).bytes_of(MemoryTerm.PARAMETERS) - before.ledger(
                Phase.FORWARD
            ).bytes_of(MemoryTerm.PARAMETERS)
            assert after.ledger(Phase.FORWARD).bytes_of(MemoryTerm.OPTIMIZER) == 0 < lost
            # ZeRO 3 keeps its shard of the copy for compute: 2 bytes where master and moments had 12.
            assert gained == pytest.approx(lost / 6 if choice.zero_stage == 3 else 0, abs=1)


def test_disks_are_never_faster_than_memory_and_hold_the_states() -> None:
    problem = everywhere()
    for choice in sample(problem):
        ram, disk = (even(problem, choice._replace(offload=place)) for place in (Offload.CPU, Offload.NVME))
        assert ram.step_time_s <= disk.step_time_s
        assert ram.host is not None
        assert disk.host is not None
        assert disk.host.states.nvme_bytes == ram.host.states.optimizer
        assert ram.host.states.ram_bytes == pytest.approx(disk.host.states.ram_bytes + ram.host.states.optimizer)


@pytest.mark.parametrize("pins", [CPU, NVME])
def test_bounds_hold(pins: Pins) -> None:
    problem = gpt2(pins)
    chosen = sample(problem, 25)
    lower = bounds(problem.table, chosen)
    for index, choice in enumerate(chosen):
        point = Evaluator(problem.table, choice)
        cut = best_cut(Pricer(problem.table, choice), problem.solver, None).best
        for starts in {point.even_starts(), point.even_starts() if cut is None else cut.starts}:
            priced = point.evaluate(starts)
            assert priced.host is not None
            assert lower.step_time_s[index] <= priced.step_time_s * ROUNDING, choice
            assert lower.memory_bytes[index] <= priced.peak_memory_bytes * ROUNDING, choice
            assert 0 < lower.host_share[index] <= priced.host.share * ROUNDING, choice


def test_the_search_finds_what_pricing_everything_finds() -> None:
    one = ScheduleName.ONE_F_ONE_B
    # Where only some layouts have the RAM.
    problem = gpt2(replace(CPU, tp=1, pp=2, cp=1, schedule=one), ram_bytes=40e9)
    visited = [best_cut(Pricer(problem.table, choice), problem.solver, None).best for choice in problem.space.layouts]
    found = search(problem.table, problem.space.layouts, problem.solver)
    assert found.best is not None
    assert found.best.fits
    assert found.best.step_time_s == pytest.approx(min(p.step_time_s for p in visited if p is not None), rel=2e-3)
    assert any(even(problem, choice).fits_devices and not even(problem, choice).fits for choice in sample(problem))


@pytest.mark.parametrize("name", ["host_link_bytes_per_s", "host_memory_bandwidth_bytes_per_s", "ram_bytes"])
def test_a_better_host_never_makes_the_best_plan_slower(name: str) -> None:
    known = getattr(load_profile(A100).node, name).value
    times: list[float] = []
    for factor in (0.25, 1.0, 4.0):
        problem = gpt2(replace(CPU, tp=1), **{name: known * factor})
        best = search(problem.table, problem.space.layouts, problem.solver).best
        assert best is not None
        times.append(best.step_time_s)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("num_devices", "each"), [(16, 2), (16, 4), (16, 16), (12, 2), (12, 6), (4, 1)])
def test_the_fullest_node_is_counted_device_by_device(num_devices: int, each: int) -> None:
    cluster = ClusterSpec(profile=load_profile(A100), num_devices=num_devices)
    facts = cluster_facts(PricingTarget(graph_of("llama-tiny", 64), cluster, "bf16"), training_of(32, 64))
    kept = np.random.default_rng(0).uniform(1, 9, num_devices // each)
    found = fullest_node([HostStates(6 * k, 2 * k, k, on_nvme=False) for k in kept], facts, facts.host(Offload.CPU))
    devices = [9 * kept[device // each] for device in range(num_devices)]
    nodes = [sum(devices[first : first + 8]) for first in range(0, num_devices, 8)]
    assert found.states.ram_bytes == pytest.approx(max(nodes))
    assert found.share == pytest.approx(max(nodes) / 2e12)


def test_llama_70b_fits_on_8_gpus_only_with_offload() -> None:
    here = problem_of("llama3-70b", 8, batch=64, seq_len=2048, hardware=H100)
    outcome = search(here.table, here.space.layouts, here.solver)
    assert outcome.best is None
    assert no_plan(here, outcome).hint.startswith("add --offload cpu")
    there = problem_of("llama3-70b", 8, batch=64, seq_len=2048, hardware=H100, pins=CPU)
    best = search(there.table, there.space.layouts, there.solver).best
    assert best is not None
    assert best.host is not None
    # Master and moments, gradients, and parameters on their way up: 12 + 4 + 2 bytes each, on the only node.
    assert best.host.states.ram_bytes >= 18 * 70.5e9


def test_too_little_ram_or_disk_is_named() -> None:
    for pins, name, update in (
        (CPU, "host memory binds", {"ram_bytes": 1e9}),
        (NVME, "NVMe binds", {"nvme_bytes": 1e9}),
    ):
        problem = gpt2(pins, **update)
        outcome = search(problem.table, problem.space.layouts, problem.solver)
        error = no_plan(problem, outcome)
        assert name in error.message
        assert f"offload={pins.offload}" in error.message
        assert error.hint == "drop --offload: without that pin a plan fits"


def test_a_plan_says_what_it_offloads_and_is_priced_again_as_it_was() -> None:
    request = Request("llama-tiny", 8, A100, seq_len=64, global_batch_size=32, pins=CPU)
    plan = find_plan(request).plan
    assert plan.offload is Offload.CPU
    assert plan.prediction is not None
    assert plan.prediction.step_time_low_s is None  # no run that offloads is in the band
    assert plan.prediction.host_memory_bytes.keys() == {
        "initial_values", "optimizer", "arriving_gradients", "updated_parameters"
    }  # fmt: skip
    assert show_plan(plan) is not None
    again = price_plan(plan).plan.prediction
    assert again is not None
    assert again.step_time_s == plan.prediction.step_time_s
    assert again.host_memory_bytes == plan.prediction.host_memory_bytes


@pytest.mark.parametrize(
    ("zero", "offload", "words"),
    [
        (1, Offload.CPU, ()),
        (3, Offload.CPU, ("the shards of parameters",)),
        (2, Offload.NVME, ("moments on NVMe",)),
        (3, Offload.NVME, ("the shards of parameters", "moments on NVMe")),
    ],
)
def test_a_plan_says_where_running_it_differs_from_its_price(
    zero: int, offload: Offload, words: tuple[str, ...]
) -> None:
    layout = sample(gpt2())[0]._replace(zero_stage=zero, offload=offload, offloads_activations=False)
    said = OFFLOAD.unexecuted(Executed(layout, graph_of("gpt2-1.5b", 1024), gpt2().target.cluster))
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("hardware", "offload", "message"),
    [
        ("cpu-gloo", Offload.CPU, "node.host_link_bytes_per_s, node.host_memory_bandwidth_bytes_per_s, node.ram_bytes"),
        (A100, Offload.NVME, "does not say node.nvme_bandwidth_bytes_per_s"),
        ("dgx-a100-80gb:8,dgx-h100-80gb:8", Offload.CPU, "no price on clusters of several kinds"),
    ],
)
def test_what_no_profile_says_is_refused(hardware: str, offload: Offload, message: str) -> None:
    num_devices = None if ":" in hardware else 8
    request = Request("llama-tiny", num_devices, hardware, 64, 32, pins=Pins(offload=offload))
    with pytest.raises(HardwareError, match=message):
        find_plan(request)
    if num_devices is not None:
        cluster = ClusterSpec(profile=load_profile(hardware), num_devices=num_devices)
        pins = replace(request.pins, zero=0)
        target = PricingTarget(graph_of("llama-tiny", 64), cluster, "bf16")
        assert not something_fits(target, Attempt(cluster, training_of(32, 64), pins))
