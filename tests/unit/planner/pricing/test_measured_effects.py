"""Effects that published runs show: each costs what its closed form, drawn numbers or torch itself say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from costmodels.communication import collective_time_s
from costmodels.recipe import Recipe, attention_kernel, load_recipe
from costmodels.stragglers import expected_wait_s
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Holding, MemoryTerm, Term, Time
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass
from hardware_profiles.schema import DTypeName, Quantity
from planner.axes.framework import Framework
from planner.axes.lowered import Kernel
from planner.axes.recompute import recomputation, stopped_early
from planner.axes.traced import representatives, whole_work
from planner.evaluation.evaluator import Evaluator
from planner.graph.tracer import trace_model
from planner.layout.layout import Pins
from planner.model_file import ModelKind, ModelSource, family_model
from planner.models.config import FamilyConfig, MlpType
from planner.models.gpt import Block
from planner.pricing.kernels import kernel_times
from planner.pricing.machine import Machine
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.search import search
from planner.table.keys import TensorSplit, WorkKey
from planner.table.shared_vocabulary import VocabularySharing, with_shared_vocabulary
from tests.planning import A100, cluster_of, problem_of, training_of
from tests.unit.planner.pricing.test_recipe_facts import (
    MODEL,
    OURS,
    SEQ_LEN,
    choice_of,
    price,
    split_decision,
    target_of,
)
from tests.unit.planner.pricing.unit_prices import Prices, unit_prices

TINY = FamilyConfig(
    family="gpt", layers=2, hidden=64, heads=4, ffn=256, vocab=128, seq_len=32, mlp=MlpType.GELU, tied=True
)


def quantity(value: float) -> Quantity:
    return Quantity(value=value, tag="specified", source="a test")


def block_prices(
    recipe: Recipe, tp: int, mode: Recompute = Recompute.NONE, *, sequence_parallel: bool = False
) -> Prices:
    target, decision = target_of(recipe), split_decision(tp, sequence_parallel)
    prices = unit_prices(target, decision, WorkKey(decision[0].split, 1, 1, 1), mode)
    units = zip(representatives(target.graph), prices, strict=True)
    return next(each for unit, each in units if unit.is_block)


# -- waiting for the last rank ------------------------------------------------------------------------


def test_a_rank_waits_for_the_last_of_its_group() -> None:
    """Against the mean of drawn delays."""
    mean_s = 2e-3
    delays = np.random.default_rng(0).exponential(mean_s, size=(200_000, 8))
    for ranks in (1, 2, 4, 8):
        drawn = float((delays[:, :ranks].max(axis=1) - delays[:, 0]).mean())
        assert expected_wait_s(ranks, mean_s) == pytest.approx(drawn, rel=0.02, abs=1e-6)


@pytest.mark.parametrize(("stops_early", "mode", "waits"), [(True, "none", 4), (False, "full", 6), (True, "full", 5)])
@pytest.mark.parametrize("hidden", [0.0, 1.0])
def test_every_collective_of_tensor_parallelism_waits(stops_early: bool, mode: str, waits: int, hidden: float) -> None:
    """Two all-reduces a block and pass, whatever products hide of them; those of what runs again once more."""
    facts = {"stops_recomputation_early": stops_early, "tensor_overlap": quantity(hidden)}
    issues_at_once = {"host_s_per_kernel": quantity(0.0), "host_s_per_sharded_kernel": None}
    recipe = OURS.model_copy(update={**facts, **issues_at_once, "host_s_per_collective": quantity(0.0)})
    late = recipe.model_copy(update={"collective_delay_s": quantity(2e-3)})
    times = (Time.TENSOR_FORWARD, Time.TENSOR_BACKWARD, Time.RECOMPUTE)
    after, before = (sum(block_prices(each, 4, Recompute(mode))[time] for time in times) for each in (late, recipe))
    assert after - before == pytest.approx(waits * expected_wait_s(4, 2e-3))


def test_collectives_wait_for_as_much_as_the_host_is_ahead() -> None:
    """A host that needs a share of the device's time has issued all of a pass when that share of it has run."""

    def prices(host_s: float) -> Prices:
        host = {"host_s_per_kernel": quantity(host_s), "host_s_per_collective": quantity(0.0)}
        memory = OURS.memory.model_copy(update={"waiting_tensors": quantity(2.0)})
        unset = dict.fromkeys(("host_s_per_sharded_kernel", "host_s_per_launch", "hooks"))
        update = {**host, **unset, "memory": memory}
        return block_prices(OURS.model_copy(update=update), 4, sequence_parallel=True)

    def forward_s(found: Prices) -> float:
        return found[Time.COMPUTE_FORWARD] + found[Time.TENSOR_FORWARD]

    at_once, slow = prices(0.0), prices(1.0)
    num_kernels = forward_s(slow)  # all that it waits for
    whole = at_once[Holding.COLLECTIVE]
    assert whole > 0
    for share in (0.25, 0.9):
        host_s = share * forward_s(at_once) / num_kernels
        assert prices(host_s)[Holding.COLLECTIVE] == pytest.approx((1 - share) * whole)
    assert slow[Holding.COLLECTIVE] == slow[Holding.QUEUED] == 0.0


# -- what autograd runs again -------------------------------------------------------------------------


def flops_of_torch(*, reentrant: bool | None) -> float:
    """Forward and backward of one block in torch, under a checkpoint of that kind, or under none."""
    block, x = Block(TINY), torch.randn(1, TINY.seq_len, TINY.hidden, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run: Any = block if reentrant is None else lambda y: checkpoint(block, y, use_reentrant=reentrant)
        run(x).sum().backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_runs_again_is_what_torch_runs_again(reentrant: bool) -> None:
    graph = trace_model(family_model(ModelSource("tiny", ModelKind.PRESET), TINY), 2, TINY.seq_len, "float32")
    unit = next(whole_work(graph, unit).unit for unit in representatives(graph) if unit.is_block)
    mode = recomputation(unit, Recompute.FULL, "products")
    mode = mode if reentrant else stopped_early(unit, mode)
    again = sum(kernel.forward.flops for kernel in unit.kernels if kernel.id in mode.kernels)
    assert again == flops_of_torch(reentrant=reentrant) - flops_of_torch(reentrant=None)
    forward = sum(kernel.forward.flops for kernel in unit.kernels)
    assert again == forward if reentrant else again < 0.7 * forward


# -- products whose sides tensor cores do not take -----------------------------------------------------


WIDE = TINY.model_copy(update={"hidden": 2048, "heads": 16})  # so that no product waits for memory


def head_of(vocab: int) -> Kernel:
    graph = trace_model(
        family_model(ModelSource("tiny", ModelKind.PRESET), WIDE.model_copy(update={"vocab": vocab})),
        2, WIDE.seq_len, "bfloat16",
    )  # fmt: skip
    units = [whole_work(graph, unit).unit for unit in representatives(graph)]
    return next(each for unit in units for each in unit.kernels if unit.loss is not None and each.id == unit.loss.head)


@pytest.mark.parametrize(
    ("hardware", "precision", "recipe", "times"),
    [
        (A100, "bf16", "planner", 3.0),
        (A100, "fp16", "fsdp-eager", 3.0),
        (A100, "bf16", "megatron-lm-2022", 1.0),  # which pads its vocabulary
        (A100, "bf16", "fsdp-compiled", 1.0),  # as Inductor does
        (A100, "fp32", "planner", 1.0),
        ("cpu-gloo", "bf16", "planner", 1.0),
    ],
)
def test_a_side_that_tensor_cores_do_not_take_triples_a_product(
    hardware: str, precision: DTypeName, recipe: str, times: float
) -> None:
    """Of its FLOPs; what each kernel begins with stays."""
    machine, framework = Machine(cluster_of(hardware, 1)), Framework.of(load_recipe(recipe), precision)
    odd = head_of(8001)
    assert not odd.is_aligned
    assert head_of(8000).is_aligned
    size = np.array([2.0**20])
    found = kernel_times([odd, replace(odd, is_aligned=True)], size, machine, framework)
    device, rate = machine.cluster.profile.device, framework.recipe.product_rate.value
    full = device.peak_flops_per_s[precision].value * device.efficiency["gemm"].fraction.value * rate
    for work, seconds in ((odd.forward, found.forward_s), (odd.backward, found.backward_s)):
        more = (times - 1) * work.flops * size[0] / full
        assert seconds[0, 0] - seconds[0, 1] == pytest.approx(more, rel=1e-6)


def test_gpt_2_is_a_quarter_faster_with_a_padded_vocabulary() -> None:
    """As nanoGPT was: "~25% speedup" of GPT-2 124M on A100 from 50,304 instead of 50,257 entries (its author, 2023)."""
    small = FamilyConfig(
        family="gpt", layers=12, hidden=768, heads=12, ffn=3072, vocab=50257, seq_len=1024, mlp=MlpType.GELU, tied=True
    )

    def step_s(vocab: int) -> float:
        config = small.model_copy(update={"vocab": vocab})
        graph = trace_model(family_model(ModelSource("gpt2", ModelKind.PRESET), config), 2, 1024, "bfloat16")
        target = PricingTarget(graph, cluster_of("dgx-a100-40gb", 1), "bf16")
        problem = Problem.build(target, training_of(12, 1024), Pins(micro_batch=12, recompute=Recompute.NONE))
        outcome = search(problem.table, problem.space.layouts, problem.solver)
        assert outcome.best is not None
        return outcome.best.step_time_s

    assert step_s(50257) / step_s(50304) == pytest.approx(1.25, abs=0.05)


# -- attention ----------------------------------------------------------------------------------------


def attention_of(model: FamilyConfig) -> Kernel:
    graph = trace_model(family_model(ModelSource("tiny", ModelKind.PRESET), model), 2, model.seq_len, "bfloat16")
    unit = next(whole_work(graph, unit).unit for unit in representatives(graph) if unit.is_block)
    return next(kernel for kernel in unit.kernels if kernel.op_class is OpClass.ATTENTION)


def test_heads_that_tensor_cores_do_not_take_run_at_the_rate_of_fp32() -> None:
    """The additional time is that of the same FLOPs at 19.5 instead of 312 TFLOP/s; a fused kernel pads its heads."""
    machine, size = Machine(cluster_of(A100, 8)), np.array([64.0])
    fused, plain = (Framework.of(OURS, "bf16", attention_kernel(name)) for name in ("flash2", "fused_softmax"))
    odd = attention_of(TINY.model_copy(update={"hidden": 1008, "seq_len": 1024}))
    assert not odd.is_aligned
    assert attention_of(TINY).is_aligned
    aligned = replace(odd, is_aligned=True)
    times = kernel_times([odd, aligned], size, machine, plain)
    device = machine.cluster.profile.device
    fraction, peaks = device.efficiency["gemm"].fraction.value, device.peak_flops_per_s
    half = device.efficiency["gemm"].half_size_flops
    for run, seconds, products in ((odd.forward, times.forward_s, 2), (odd.backward, times.backward_s, 4)):
        flops = run.flops * size[0] + products * (half.value if half else 0.0)
        slower = flops / fraction * (1 / peaks["fp32"].value - 1 / peaks["bf16"].value)
        assert seconds[0, 0] - seconds[0, 1] == pytest.approx(slower, rel=1e-6)
    in_fused = kernel_times([odd, aligned], size, machine, fused)
    assert in_fused.forward_s[0, 0] == in_fused.forward_s[0, 1]


def test_attention_of_few_rows_does_not_fill_the_device() -> None:
    """Its time is that of its FLOPs at the full rate, and of as many as half the rows bring, once more."""
    machine = Machine(cluster_of(A100, 8))
    attention = machine.cluster.profile.device.efficiency["attention"]
    assert attention.half_rows is not None
    kernel, framework = attention_of(TINY.model_copy(update={"seq_len": 2048})), Framework.of(OURS, "bf16")
    rate = machine.cluster.profile.device.peak_flops_per_s["bf16"].value * attention.fraction.value
    launch = machine.cluster.profile.device.kernel_launch_s.value
    for size in (1.0, 16.0, 64.0):
        rows = size * 4 * 2048
        expected = launch + size * kernel.forward.flops * (1 + attention.half_rows.value / rows) / rate
        assert kernel_times([kernel], np.array([size]), machine, framework).forward_s[0, 0] == pytest.approx(expected)


# -- sharded data parallelism -------------------------------------------------------------------------


def test_parameters_gathered_one_by_one_each_wait_for_a_ring() -> None:
    """Of ZeRO 1 that hides nothing: one more latency for every parameter but one of each unit."""
    together = OURS.model_copy(update={"overlaps_gather": False})
    one_by_one = together.model_copy(update={"gathers_each_tensor": True})
    layout = choice_of(dp=16, zero_stage=1)
    before, after = (price(recipe, layout).breakdown[Term.DATA] for recipe in (together, one_by_one))
    graph = target_of(OURS).graph
    more = sum(len(unit.parameters) - 1 for unit in graph.units)
    ring = Collective(CollectiveKind.ALL_GATHER, 0.0, GroupPlacement(16, 1))
    assert after - before == pytest.approx(more * collective_time_s(ring, cluster_of(A100, 16)), rel=1e-6)


def test_parameters_gathered_in_fp32_take_twice_as_long_on_the_links() -> None:
    """Of ZeRO 1 that hides nothing: two bytes more for every parameter; the ring's steps stay."""
    in_sixteen = OURS.model_copy(update={"overlaps_gather": False})
    state = OURS.state.model_copy(update={"gathered_bytes": quantity(4)})
    layout = choice_of(dp=16, zero_stage=1)
    before, after = (
        price(recipe, layout).breakdown[Term.DATA]
        for recipe in (in_sixteen, in_sixteen.model_copy(update={"state": state}))
    )
    num_bytes = 2.0 * sum(each.num_elements for each in target_of(OURS).graph.parameters)
    ring, nothing = (Collective(CollectiveKind.ALL_GATHER, size, GroupPlacement(16, 1)) for size in (num_bytes, 0.0))
    cluster = cluster_of(A100, 16)
    more = collective_time_s(ring, cluster) - collective_time_s(nothing, cluster)
    assert after - before == pytest.approx(more, rel=1e-6)


def test_zero_3_that_hides_nothing_gathers_for_recomputation_too() -> None:
    """Each micro-batch: two gathers and a reduction, and a third gather where blocks run again; all in full."""
    bare = OURS.model_copy(update={"overlaps_micro_batches": False})
    thrice = bare.model_copy(update={"gathers_to_recompute": True})
    layout = choice_of(dp=16, zero_stage=3)
    kept, full = layout, layout._replace(recompute=Recompute.FULL)
    assert price(bare, kept).breakdown[Term.DATA] > price(OURS, kept).breakdown[Term.DATA]
    assert price(thrice, kept).breakdown[Term.DATA] == price(bare, kept).breakdown[Term.DATA]
    more = price(thrice, full).breakdown[Term.DATA] - price(bare, full).breakdown[Term.DATA]
    graph = target_of(OURS).graph
    kinds = {unit.kind: unit for unit in graph.units}
    elements = {name: each.num_elements for each in graph.parameters for name in each.names}
    of_blocks = [sum(elements[name] for name in kinds[u.kind].parameters) for u in graph.units if u.is_block]
    gathers = (Collective(CollectiveKind.ALL_GATHER, 2.0 * each, GroupPlacement(16, 1)) for each in of_blocks)
    expected = layout.num_microbatches * sum(collective_time_s(each, cluster_of(A100, 16)) for each in gathers)
    assert more == pytest.approx(expected, rel=1e-6)


def test_buckets_have_one_size_whatever_the_model_has() -> None:
    """Two of 5e8 elements in 16 bits, or of all elements where there are fewer."""
    state = OURS.state.model_copy(update={"bucket_elements": quantity(5e8)})
    bucketed = OURS.model_copy(update={"state": state})
    for zero_stage, expected in ((1, 2 * 5e8 * 2), (0, 0.0)):
        layout = choice_of(dp=16, zero_stage=zero_stage)
        before, after = (price(recipe, layout).ledgers[0] for recipe in (OURS, bucketed))
        more = after.bytes_of(MemoryTerm.GRADIENTS) - before.bytes_of(MemoryTerm.GRADIENTS)
        assert more == pytest.approx(expected)


def test_no_collective_is_waited_for_where_the_host_is_slower_than_the_device() -> None:
    memory = OURS.memory.model_copy(update={"waiting_tensors": quantity(3)})
    fast = OURS.model_copy(update={"memory": memory, "host_s_per_sharded_kernel": None})
    slow = fast.model_copy(update={"host_s_per_kernel": quantity(1.0)})
    target, decision = target_of(fast), split_decision(4, True)
    for recipe, waits in ((fast, True), (slow, False)):
        prices = unit_prices(replace(target, recipe=recipe), decision, WorkKey(TensorSplit(4, True), 1, 1, 8))
        assert any(each[Holding.COLLECTIVE] > 0 for each in prices) == waits


# -- the vocabulary over all stages -------------------------------------------------------------------


def test_stages_that_share_the_vocabulary_do_the_same() -> None:
    """(m + p - 1) times a stage's part of the blocks and of what lies around them."""
    problem = problem_of(MODEL, 16, batch=64, seq_len=SEQ_LEN)
    layout = choice_of(pp=4)._replace(num_microbatches=16)
    recipe = problem.target.recipe.model_copy(update={"hooks": None})  # they go with units, which are fewer then
    target = replace(problem.target, recipe=recipe)
    table = build_table(target, problem.space.training, {TensorSplit(1, False): split_decision(1)}, (layout,))
    shared, starts = with_shared_vocabulary(table, 4, VocabularySharing.ONE_BARRIER, 1e9)
    stage_s = sum(Evaluator(table, layout._replace(mesh=choice_of().mesh))._stage_times((0,)).forward_s) / 4
    times = Evaluator(shared, layout)._stage_times(starts)
    assert times.forward_s == pytest.approx([stage_s] * 4)
    evaluator = Evaluator(shared, layout)
    makespan = evaluator._makespan_s(times, 0.0, exact=True)
    assert makespan == pytest.approx((16 + 3) * (times.forward_s[0] + times.backward_s[0]))
    counts = shared.elements[0][[shared.units.kinds[unit] for unit in range(len(shared.units.kinds))]]
    whole = table.elements[0][list(table.units.kinds)]
    assert counts.sum() == pytest.approx(whole.sum())


def test_interlaced_passes_wait_for_their_exchanges() -> None:
    problem = problem_of(MODEL, 16, batch=64, seq_len=SEQ_LEN)
    layout = choice_of(pp=4)._replace(num_microbatches=16)
    table = build_table(problem.target, problem.space.training, {TensorSplit(1, False): split_decision(1)}, (layout,))
    ways = (VocabularySharing.ONE_BARRIER, VocabularySharing.INTERLACED)
    steps = []
    for sharing in ways:
        shared, starts = with_shared_vocabulary(table, 4, sharing, 0.1)
        steps.append(Evaluator(shared, layout).evaluate(starts).step_time_s)
    assert steps[1] - steps[0] == pytest.approx((16 + 3) * 2 * 0.1)


def test_blocks_that_cannot_be_divided_are_refused() -> None:
    problem = problem_of(MODEL, 16, batch=64, seq_len=SEQ_LEN)
    layout = choice_of(pp=4)
    table = build_table(problem.target, problem.space.training, {TensorSplit(1, False): split_decision(1)}, (layout,))
    with pytest.raises(ValueError, match="32 blocks cannot be divided evenly over 5 stages"):
        with_shared_vocabulary(table, 5, VocabularySharing.TWO_BARRIERS, 0.0)
