"""What must hold of every price, whatever layout and machine: nothing better is slower, nothing beats physics."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from costmodels.compute import peak_flops_per_s
from costmodels.recipe import list_recipes, load_recipe
from costmodels.vocabulary.terms import Term
from hardware_profiles.schema import ClusterProfile, ClusterSpec, Quantity
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.layout.layout import Layout
from planner.pricing.table_builder import build_table
from planner.problem import Problem
from planner.table.keys import TensorSplit
from tests.planning import problem_of

MODEL, SEQ_LEN, BATCH = "gpt2-1.5b", 1024, 64
CLUSTERS = (("dgx-a100-80gb", 16), ("dgx-h100-80gb", 32), ("aws-g5-48xlarge", 16))
factors = st.floats(1, 20)
ROUNDING = 1 + 1e-9


@cache
def problem(hardware: str, num_devices: int) -> Problem:
    return problem_of(MODEL, num_devices, batch=BATCH, seq_len=SEQ_LEN, hardware=hardware)


def times(quantity: Quantity, factor: float) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value * factor})


def improved(
    profile: ClusterProfile, *, flops: float, memory: float, network: float, capacity: float
) -> ClusterProfile:
    """``profile`` with faster arithmetic, memory and links, and with more memory."""
    device = profile.device
    faster = device.model_copy(
        update={
            "peak_flops_per_s": {name: times(peak, flops) for name, peak in device.peak_flops_per_s.items()},
            "memory_bandwidth_bytes_per_s": times(device.memory_bandwidth_bytes_per_s, memory),
            "memory_bytes": times(device.memory_bytes, capacity),
        }
    )
    tiers = tuple(
        tier.model_copy(update={"bandwidth_bytes_per_s": times(tier.bandwidth_bytes_per_s, network)})
        for tier in profile.tiers
    )
    return profile.model_copy(update={"device": faster, "tiers": tiers})


def price(posed: Problem, choice: Layout, cluster: ClusterSpec, recipe: str) -> Evaluated:
    """``choice`` on ``cluster``, operators placed as in ``posed`` and stages of equal numbers of blocks."""
    target = replace(posed.target, cluster=cluster, recipe=load_recipe(recipe))
    split = TensorSplit(choice.mesh.tp, choice.sequence_parallel)
    table = build_table(target, posed.space.training, {split: posed.decisions[split]}, (choice,))
    point = Evaluator(table, choice)
    return point.evaluate(point.even_starts())


# Which cluster, which of its layouts (counted around), which framework.
clusters, numbers, recipes = st.sampled_from(CLUSTERS), st.integers(0, 10**6), st.sampled_from(list_recipes())


def choice_of(posed: Problem, number: int) -> Layout:
    return posed.space.layouts[number % len(posed.space.layouts)]


@settings(max_examples=60, deadline=None)
@given(clusters, numbers, recipes, st.tuples(factors, factors, factors, factors))
def test_a_better_machine_is_never_slower(
    on: tuple[str, int], number: int, recipe: str, factor: tuple[float, float, float, float]
) -> None:
    posed = problem(*on)
    choice, cluster = choice_of(posed, number), posed.target.cluster
    flops, memory, network, capacity = factor
    profile = improved(cluster.profile, flops=flops, memory=memory, network=network, capacity=capacity)
    before = price(posed, choice, cluster, recipe)
    after = price(posed, choice, cluster.model_copy(update={"profile": profile}), recipe)
    assert after.step_time_s <= before.step_time_s * ROUNDING
    assert after.fits or not before.fits


@settings(max_examples=60, deadline=None)
@given(clusters, numbers, recipes)
def test_no_price_beats_the_roofline(on: tuple[str, int], number: int, recipe: str) -> None:
    posed = problem(*on)
    cluster, graph = posed.target.cluster, posed.target.graph
    priced = price(posed, choice_of(posed, number), cluster, recipe)
    peak = peak_flops_per_s(cluster.profile.device, posed.target.precision)
    flops_per_sequence = (graph.forward_flops + graph.backward_flops) / graph.batch_size
    ideal_s = flops_per_sequence * BATCH / cluster.num_devices / peak
    assert priced.step_time_s > ideal_s
    parts = priced.breakdown
    assert min(parts[Term.COMPUTE], parts[Term.DATA], parts[Term.BUBBLE]) >= -1e-12


@pytest.mark.parametrize("recipe", list_recipes())
def test_one_device_does_not_communicate(recipe: str) -> None:
    posed = problem("dgx-a100-80gb", 1)
    for choice in posed.space.layouts:
        parts = price(posed, choice, posed.target.cluster, recipe).breakdown
        assert parts[Term.TENSOR] == parts[Term.DATA] == parts[Term.CONTEXT] == 0
        assert parts[Term.SEND] == parts[Term.BUBBLE] == 0


@settings(max_examples=40, deadline=None)
@given(clusters, numbers, recipes, st.sampled_from([2, 3, 4]))
def test_more_sequences_take_longer_and_no_longer_each(
    on: tuple[str, int], number: int, recipe: str, factor: int
) -> None:
    posed = problem(*on)
    choice = choice_of(posed, number)
    assume(choice.num_microbatches > 1)  # one alone adds no gradients up
    longer = choice._replace(num_microbatches=choice.num_microbatches * factor)
    before = price(posed, choice, posed.target.cluster, recipe)
    after = price(posed, longer, posed.target.cluster, recipe)
    # GPipe holds all micro-batches, and in nanotron each of them waits for what lies above the device's memory.
    assume(after.fits or after.peak_memory_bytes <= before.peak_memory_bytes)
    assert before.step_time_s < after.step_time_s <= factor * before.step_time_s * ROUNDING
