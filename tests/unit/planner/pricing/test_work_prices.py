"""Prices of units against closed forms: published counts of activations, rooflines and rings written out."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from costmodels.communication import collective_time_s, dispatch_parts
from costmodels.recipe import HookTimes, attention_kernel, load_recipe
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.terms import Data, Element, Holding, Pass, Term, Time
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement, OpClass
from hardware_profiles.schema import CollectiveName
from planner.axes.framework import Framework
from planner.axes.lowered import Collective as LoweredCollective
from planner.axes.lowered import Kernel, Role, Work
from planner.axes.traced import representatives
from planner.layout.decided import NOTHING
from planner.pricing.kernels import kernel_times
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision, decide
from planner.pricing.rows import data_rows, element_rows, work_rows
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import DataKey, TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of

CLUSTER = cluster_of(A100, 64)
MACHINE = Machine(CLUSTER)
BLOCK = 1  # kinds of units: embedding, block, head
WHOLE = TensorSplit(1, False)
MODES, TIMES, HOLDINGS = list(Recompute), list(Time), list(Holding)


def framework_of(recipe: str = "planner", attention: str | None = None) -> Framework:
    found = load_recipe(recipe)
    return Framework.of(found, "bf16", None if attention is None else attention_kernel(attention))


def reentrant(framework: Framework) -> Framework:
    """The framework with checkpoints that run a whole block again."""
    return replace(framework, recipe=framework.recipe.model_copy(update={"stops_recomputation_early": False}))


@cache
def decision_of(model: str, seq_len: int, split: TensorSplit) -> Decision:
    found = decide(graph_of(model, seq_len), split, NOTHING, MACHINE, framework_of(), CpSatSolver().solve_placement)
    assert found is not None
    return found


class Row:
    """The prices of a model's blocks under one key."""

    def __init__(
        self, model: str, seq_len: int, key: WorkKey, framework: Framework | None = None, machine: Machine = MACHINE
    ) -> None:
        decisions = {key.tensor: decision_of(model, seq_len, key.tensor)}
        rows = work_rows(graph_of(model, seq_len), decisions, [key], machine, framework or framework_of())
        self._time_s, self._num_bytes = rows.time_s[0, :, BLOCK], rows.num_bytes[0, :, BLOCK]

    def seconds(self, time: Time, mode: Recompute = Recompute.NONE) -> float:
        return float(self._time_s[MODES.index(mode), TIMES.index(time)])

    def held(self, holding: Holding, mode: Recompute = Recompute.NONE) -> float:
        return float(self._num_bytes[MODES.index(mode), HOLDINGS.index(holding)])


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_activations_of_a_layer_are_those_that_megatron_counts(
    tp: int, sequence_parallel: bool, micro_batch_size: int
) -> None:
    """Korthikanti et al. (2022), equations 1, 2 and 4, for GPT-3 with attention's scores in memory:

        no parallelism         s b h (34 + 5 a s / h)
        t-way tensor           s b h (10 + 24 / t + 5 a s / (h t))
        with the sequence      s b h (34 / t + 5 a s / (h t))

    Our GPT has no dropout behind attention and the MLP, so their two masks of s b h bytes, whole under tensor
    parallelism, are not kept; both layer norms keep a mean and a deviation of 4 bytes a token besides.
    """
    s, h, a, b, t = 1024, 12288, 96, micro_batch_size, tp
    framework = framework_of("megatron-lm-2022", load_recipe("megatron-lm-2022").plain_kernel)
    assert framework.recipe.dropout > 0
    row = Row("gpt3-175b", s, WorkKey(TensorSplit(tp, sequence_parallel), 1, 1, b), framework)
    whole, statistics = (32 / t, 16 / t) if sequence_parallel else (8 + 24 / t, 16)
    expected = s * b * h * (whole + 5 * a * s / (h * t)) + s * b * statistics
    assert row.held(Holding.KEPT) == pytest.approx(expected, rel=1e-9)
    # Full recomputation keeps the layer's input, 2 s b h; its part where the sequence is split.
    assert row.held(Holding.KEPT, Recompute.FULL) == 2 * s * b * h / (t if sequence_parallel else 1)
    # Selective recomputation of attention's core leaves the 5 a s / h out.
    attention = s * b * h * 5 * a * s / (h * t)
    assert row.held(Holding.KEPT, Recompute.SELECTIVE) == pytest.approx(expected - attention, rel=1e-9)


@pytest.mark.parametrize("cp", [1, 2, 8])
def test_context_parallelism_divides_what_is_kept(cp: int) -> None:
    whole, part = (Row("llama3-8b", 2048, WorkKey(WHOLE, 1, each, 2)) for each in (1, cp))
    for mode in (Recompute.NONE, Recompute.FULL):
        assert part.held(Holding.KEPT, mode) == pytest.approx(whole.held(Holding.KEPT, mode) / cp)
    # Attention is one kept product a block of keys: an output of 2 bytes and a statistic of 4 a head for each but one.
    more = (cp - 1) * 2 * 2048 / cp * 32 * (2 * 128 + 4)
    kept = whole.held(Holding.KEPT, Recompute.SELECTIVE) / cp + more
    assert part.held(Holding.KEPT, Recompute.SELECTIVE) == pytest.approx(kept)
    assert part.held(Holding.BOUNDARY) == 2 * 2048 * 4096 * 2 / cp


def test_what_crosses_to_the_next_stage() -> None:
    """b · s · h in 16 bits; a rank's part of it where the sequence is split."""
    for split, share in ((WHOLE, 1), (TensorSplit(8, False), 1), (TensorSplit(8, True), 8)):
        row = Row("llama3-8b", 2048, WorkKey(split, 1, 1, 3))
        assert row.held(Holding.BOUNDARY) == 3 * 2048 * 4096 * 2 / share


def kernel(op_class: OpClass, flops: float, moved: float, weights: float, weight_flops: float = 0.0) -> Kernel:
    work = Work(flops, moved, weights, 1)
    return Kernel(
        0,
        "op",
        op_class,
        False,
        False,
        False,
        work,
        work,
        weight_flops,
        0.0,
        0.0,
        0.0,
        (),
        (),
        0,
        (),
        0.0,
        follows_batch=True,
    )


def test_kernels_take_what_the_roofline_says() -> None:
    """launch + max(FLOPs / (peak · efficiency) and half a size, bytes / bandwidth), with weights read once."""
    device, framework = CLUSTER.profile.device, framework_of("planner")
    recipe = framework.recipe
    sizes = np.array([0.25, 1.0, 8.0])
    gemm = device.efficiency["gemm"]
    half = gemm.half_size_flops.value if gemm.half_size_flops else 0.0
    rate = device.peak_flops_per_s["bf16"].value * gemm.fraction.value
    bandwidth = device.memory_bandwidth_bytes_per_s.value * device.efficiency["memory_bound"].fraction.value
    launch = device.kernel_launch_s.value
    product = kernel(OpClass.GEMM, 3e12, 4e8, 2e8, weight_flops=1e12)
    times = kernel_times([product], sizes, MACHINE, framework)
    for size, forward, backward in zip(sizes, times.forward_s[:, 0], times.backward_s[:, 0], strict=True):
        flops, num_bytes = 3e12 * size / recipe.product_rate.value, 4e8 * size + 2e8
        assert forward == pytest.approx(launch + max((flops + half) / rate, num_bytes / bandwidth), rel=1e-12)
        # The input's gradient and the weight's are a kernel each, with half of the work.
        twice = 2 * (launch + max((flops / 2 + half) / rate, num_bytes / 2 / bandwidth))
        assert backward == pytest.approx(twice, rel=1e-12)
    elementwise = kernel(OpClass.MEMORY_BOUND, 0.0, 1e8, 0.0)
    times = kernel_times([elementwise, kernel(OpClass.MEMORY_BOUND, 0.0, 0.0, 0.0)], sizes, MACHINE, framework)
    np.testing.assert_allclose(
        times.forward_s[:, 0], launch + 1e8 * sizes * recipe.memory_traffic.value / bandwidth, rtol=1e-12
    )
    assert not times.forward_s[:, 1].any()


def test_a_slow_host_is_waited_for() -> None:
    """A block of a few positions takes the host's time to issue its kernels and collectives, less these."""
    recipe = load_recipe("planner")
    slow = recipe.host_s_per_kernel.model_copy(update={"value": 1.0})
    update = {"host_s_per_kernel": slow, "host_s_per_launch": None, "hooks": None}
    framework = Framework.of(recipe.model_copy(update=update), "bf16")
    block = representatives(graph_of("llama3-8b", 2048))[BLOCK]
    nodes = [graph_of("llama3-8b", 2048).nodes[i] for i in block.nodes]
    row = Row("llama3-8b", 2048, WorkKey(WHOLE, 1, 1, 1), framework)
    assert row.seconds(Time.COMPUTE_FORWARD) == pytest.approx(sum(node.num_kernels for node in nodes))
    assert row.seconds(Time.COMPUTE_BACKWARD) == pytest.approx(sum(node.num_backward_kernels for node in nodes))
    # Full recomputation issues what it runs again: all of it, or all but what stands behind the last saved input.
    assert row.seconds(Time.RECOMPUTE, Recompute.FULL) < row.seconds(Time.COMPUTE_FORWARD)
    whole = Row("llama3-8b", 2048, WorkKey(WHOLE, 1, 1, 1), reentrant(framework))
    assert whole.seconds(Time.RECOMPUTE, Recompute.FULL) == whole.seconds(Time.COMPUTE_FORWARD)
    # Selective recomputation repeats kernels without the wait.
    assert row.seconds(Time.RECOMPUTE, Recompute.SELECTIVE) < 0.1


# A power of two each, so that a sum tells which of them it has.
HOOKS = HookTimes(
    sharded_forward_s=1.0,
    sharded_backward_s=2.0,
    cast_forward_s=4.0,
    cast_backward_s=8.0,
    gather_s=16.0,
    reduce_s=32.0,
    checkpoint_forward_s=64.0,
    checkpoint_backward_s=128.0,
    selected_forward_s=256.0,
    selected_backward_s=512.0,
    source="a test",
)


def test_hooks_of_recomputation_and_launches_take_the_hosts_time() -> None:
    """Where the host is waited for, each is added once; the device's own time is nothing beside them."""
    framework = framework_of()
    one = framework.recipe.product_rate.model_copy(update={"value": 1.0})
    issued = {"host_s_per_kernel": one, "host_s_per_launch": one.model_copy(update={"value": 1024.0})}
    recipe = framework.recipe.model_copy(update={"hooks": HOOKS, **issued})
    row = Row("llama3-8b", 2048, WorkKey(WHOLE, 1, 1, 1), replace(framework, recipe=recipe))
    block = representatives(graph_of("llama3-8b", 2048))[BLOCK]
    nodes = [graph_of("llama3-8b", 2048).nodes[i] for i in block.nodes]
    kernels, backward = sum(node.num_kernels for node in nodes), sum(node.num_backward_kernels for node in nodes)
    none, selective, full = (row.seconds(Time.COMPUTE_FORWARD, mode) for mode in Recompute)
    assert none == pytest.approx(kernels * (1 + 1024))
    assert selective == pytest.approx(none + 64 + 256 * kernels)
    assert full == pytest.approx(none + 64)
    for mode in Recompute:
        assert row.seconds(Time.COMPUTE_BACKWARD, mode) == pytest.approx(backward * (1 + 1024))
    assert row.seconds(Time.RECOMPUTE, Recompute.SELECTIVE) == pytest.approx(128 + 512 * kernels, rel=1e-4)
    # Full recomputation stops behind the last input that is saved.
    again = (row.seconds(Time.RECOMPUTE, Recompute.FULL) - 128) / (1 + 1024)
    assert again == pytest.approx(round(again))
    assert kernels - 4 <= again <= kernels


def test_a_processor_computes_and_issues_in_turn() -> None:
    """What the host issues beyond the launches that kernels' own times begin with is added, and nothing is spare."""
    machine, framework, key = Machine(cluster_of("cpu-gloo", 4)), framework_of(), WorkKey(WHOLE, 1, 1, 1)
    launch = machine.cluster.profile.device.kernel_launch_s
    recipe = framework.recipe.model_copy(update={"hooks": None, "host_s_per_kernel": launch})
    issued = launch.model_copy(update={"value": 1.0})
    slow = recipe.model_copy(update={"host_s_per_kernel": issued, "host_s_per_launch": issued})
    rows = [Row("llama3-8b", 2048, key, replace(framework, recipe=each), machine) for each in (recipe, slow)]
    nodes = [graph_of("llama3-8b", 2048).nodes[i] for i in representatives(graph_of("llama3-8b", 2048))[BLOCK].nodes]
    assert rows[0].seconds(Time.COMPUTE_FORWARD) > 1.0  # nothing that is issued could hide behind less
    for time, kernels in (
        (Time.COMPUTE_FORWARD, sum(node.num_kernels for node in nodes)),
        (Time.COMPUTE_BACKWARD, sum(node.num_backward_kernels for node in nodes)),
    ):
        more = rows[1].seconds(time) - rows[0].seconds(time)
        assert more == pytest.approx(kernels * (1.0 - launch.value))
    for time in (Time.SPARE_FORWARD, Time.SPARE_BACKWARD):
        assert rows[1].seconds(time, Recompute.FULL) == 0


def test_hooks_take_nothing_where_the_host_has_time_to_spare() -> None:
    """Hooks of a microsecond behind blocks of milliseconds: prices are those without them, but for what is spare."""
    framework = framework_of()
    tiny = HOOKS.scaled(1e-9)
    rows = [
        Row("llama3-8b", 8192, WorkKey(WHOLE, 1, 1, 1), replace(framework, recipe=recipe))
        for recipe in (framework.recipe.model_copy(update={"hooks": hooks}) for hooks in (None, tiny))
    ]
    for mode in Recompute:
        for time in Time:
            if time not in (Time.SPARE_FORWARD, Time.SPARE_BACKWARD):
                assert rows[0].seconds(time, mode) == rows[1].seconds(time, mode)
    graph = graph_of("llama3-8b", 8192)
    spent = 64e-9 + 256e-9 * sum(graph.nodes[i].num_kernels for i in representatives(graph)[BLOCK].nodes)
    left = rows[1].seconds(Time.SPARE_FORWARD, Recompute.SELECTIVE)
    assert rows[0].seconds(Time.SPARE_FORWARD, Recompute.SELECTIVE) - left == pytest.approx(spent, rel=1e-3)


def test_collectives_take_what_their_bytes_take() -> None:
    """Two all-reduces of b · s · h each way, at the recipe's rate, less the share that it hides."""
    framework = framework_of("nanotron")
    row = Row("gpt3-175b", 1024, WorkKey(TensorSplit(8, False), 1, 1, 2), framework)
    rate, overlap = framework.recipe.tensor_parallel_rate.value, framework.recipe.tensor_overlap.value
    size = 2 * 1024 * 12288 * 2 / rate
    one = collective_time_s(Collective(CollectiveKind.ALL_REDUCE, size, GroupPlacement(8, 1)), CLUSTER)
    for time in (Time.TENSOR_FORWARD, Time.TENSOR_BACKWARD):
        assert row.seconds(time) == pytest.approx(2 * one * (1 - overlap), rel=1e-9)


def test_experts_exchange_rows_and_hold_them_twice() -> None:
    # Two experts a rank: their products are grouped still.
    whole, shared = (Row("mixtral-8x7b", 1024, WorkKey(WHOLE, ep, 1, 2)) for ep in (1, 4))
    size = 2 * 1024 * 2 * 4096 * 2  # micro-batch, tokens, top_k, hidden, bytes
    one = collective_time_s(Collective(CollectiveKind.ALL_TO_ALL, size, GroupPlacement(4, 1)), CLUSTER)
    assert shared.seconds(Time.EXPERT_FORWARD) == pytest.approx(2 * one, rel=1e-12)
    assert shared.seconds(Time.EXPERT_BACKWARD) == pytest.approx(2 * one, rel=1e-12)
    assert shared.held(Holding.WORKING) == pytest.approx(whole.held(Holding.WORKING) + size)
    # Our selective recomputation keeps the rows that were sent, another makes inputs of products again; full, and back.
    for selective, exchanges in (("products", 0), ("alternate_products", 1)):
        framework = framework_of()
        other = replace(framework, recipe=framework.recipe.model_copy(update={"selective": selective}))
        rows = [Row("mixtral-8x7b", 1024, WorkKey(WHOLE, ep, 1, 2), other) for ep in (1, 4)]
        again = [each.seconds(Time.RECOMPUTE, Recompute.SELECTIVE) for each in rows]
        assert again[1] - again[0] == pytest.approx(exchanges * one, rel=1e-9)
    whole = Row("mixtral-8x7b", 1024, WorkKey(WHOLE, 8, 1, 2), reentrant(framework_of()))
    forward = whole.seconds(Time.COMPUTE_FORWARD) + whole.seconds(Time.EXPERT_FORWARD)
    assert whole.seconds(Time.RECOMPUTE, Recompute.FULL) == pytest.approx(forward, rel=1e-12)


def test_a_node_gets_a_token_once() -> None:
    """16 ranks on 2 nodes, 8 experts of a token: between nodes 2 · (1 - 2^-8) rows of 8."""
    group = GroupPlacement(16, 1)
    (inside, _), (across, share) = dispatch_parts(group, (8, None), CLUSTER)
    assert (inside, across) == (GroupPlacement(8, 1), group)
    assert share == pytest.approx(2 * (1 - 2**-8) / 8, rel=1e-12)


@pytest.mark.parametrize(("ranks", "copies"), [(8, 8), (4, 2), (8, 1), (16, 8)])
def test_a_rank_gets_a_token_once(ranks: int, copies: int) -> None:
    """As many rows as a token's experts lie on ranks, by counting all choices of 2 or a million drawn ones of 8."""
    (_, share), *_ = dispatch_parts(GroupPlacement(ranks, 1), (copies, None), CLUSTER)
    drawn = np.random.default_rng(0).integers(ranks, size=(1_000_000, copies))
    drawn.sort(axis=1)
    distinct = 1 + (np.diff(drawn, axis=1) != 0).sum(axis=1).mean() if copies > 1 else 1.0
    assert share == pytest.approx(distinct / copies, rel=2e-3)


def test_states_move_as_rings_move_them() -> None:
    """n ranks of one node: (n - 1) / n of the bytes and n - 1 latencies each, twice for an all-reduce."""
    model, seq_len, n = "llama3-8b", 2048, 8
    graph, decisions = graph_of(model, seq_len), {WHOLE: decision_of(model, seq_len, WHOLE)}
    framework = framework_of()
    recipe, tier, device = framework.recipe, CLUSTER.profile.tiers[0], CLUSTER.profile.device
    elements = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    (row,) = element_rows(graph, decisions, [WHOLE])
    assert row[BLOCK].tolist() == [elements, 0.0, 0.0, 0.0]
    assert [each.name for each in Element] == ["TRAINABLE", "FROZEN", "TIED", "EXPERT"]
    keys = [DataKey(WHOLE, 1, 1, n, 3), DataKey(WHOLE, 1, n, 1, 0), DataKey(WHOLE, 1, 1, 1, 0)]
    sharded, replicated, alone = data_rows(graph, decisions, keys, MACHINE, framework)[:, BLOCK]
    assert [each.name for each in Data] == ["GATHER", "REDUCE", "ACCUMULATE", "REPLICAS"]

    def ring_s(kind: CollectiveName, num_bytes: float, passes: int) -> float:
        rate = tier.collectives.get(kind)
        latency = (rate or tier).latency_s.value
        general = tier.efficiency if kind != "all_reduce" else tier.all_reduce_efficiency or tier.efficiency
        efficiency = (rate.efficiency if rate else general).value
        bus = tier.bandwidth_bytes_per_s.value * efficiency * tier.links_per_node / CLUSTER.profile.node.num_devices
        moved = num_bytes / recipe.data_parallel_rate.value
        return device.kernel_launch_s.value + passes * ((n - 1) * latency + (n - 1) / n * moved / bus)

    reduced = elements * recipe.state.reduction_bytes.value
    assert sharded[0] == pytest.approx(ring_s("all_gather", elements * 2, 1), rel=1e-9)
    assert sharded[1] == pytest.approx(ring_s("reduce_scatter", reduced, 1), rel=1e-9)
    assert replicated[0] == 0.0
    assert replicated[1] == pytest.approx(ring_s("all_reduce", reduced, 2), rel=1e-9)
    assert alone[:2].tolist() == [0.0, 0.0]
    bandwidth = device.memory_bandwidth_bytes_per_s.value * device.efficiency["memory_bound"].fraction.value
    added = elements * recipe.accumulation_bytes.value / bandwidth
    assert [row[2] for row in (sharded, replicated, alone)] == pytest.approx([added] * 3, rel=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_one_rank_a_node_reduces_gradients_at_what_the_links_sustain(tp: int) -> None:
    """Eight nodes of eight GPUs, each gradient on 64 / tp ranks: 2 (n - 1) / n of its bytes over the node's cards.

    A framework's own rate slows all but the groups with one rank on each node.
    """
    ranks, num_bytes, rate = GroupPlacement(64 // tp, tp), 1e10, 0.25
    slow = LoweredCollective(
        CollectiveKind.ALL_REDUCE, ranks, Term.DATA, Pass.BACKWARD, Role.REDUCE, fixed_bytes=num_bytes, rate=rate
    )
    network, n = CLUSTER.profile.tiers[1], ranks.num_ranks
    node = network.bandwidth_bytes_per_s.value * network.efficiency.value * network.links_per_node
    moved_s = 2 * (n - 1) / n * num_bytes / (node / tp)
    found = float(MACHINE.collective_s(slow, np.array([num_bytes]))[0])
    assert found == pytest.approx(moved_s / (1.0 if tp == 8 else rate), rel=0.01)  # latencies are the rest


def test_rows_stand_where_their_keys_do() -> None:
    """Many keys at once give what each gives alone."""
    model, seq_len = "mixtral-8x7b", 1024
    splits = (WHOLE, TensorSplit(2, True))
    decisions = {split: decision_of(model, seq_len, split) for split in splits}
    graph, framework = graph_of(model, seq_len), framework_of()
    keys = [WorkKey(split, ep, cp, mb) for mb in (3, 1) for cp in (2, 1) for ep in (8, 1) for split in splits]
    together = work_rows(graph, decisions, keys, MACHINE, framework)
    for row, key in enumerate(keys):
        alone = work_rows(graph, decisions, [key], MACHINE, framework)
        np.testing.assert_allclose(together.time_s[row], alone.time_s[0], rtol=1e-12)
        np.testing.assert_allclose(together.num_bytes[row], alone.num_bytes[0], rtol=1e-12)
    states = [DataKey(split, ep, 1, 8, zero) for zero in (3, 1) for ep in (8, 1) for split in splits]
    many = data_rows(graph, decisions, states, MACHINE, framework)
    for row, key in enumerate(states):
        np.testing.assert_allclose(many[row], data_rows(graph, decisions, [key], MACHINE, framework)[0], rtol=1e-12)


def test_attention_that_no_causal_mask_halves_takes_twice_as_long() -> None:
    """Profiles rate attention by causal kernels, and count all pairs of those."""
    whole = replace(kernel(OpClass.ATTENTION, 3e14, 0.0, 0.0), query_rows=1e6)
    launch = CLUSTER.profile.device.kernel_launch_s.value
    for times in kernel_times(
        [replace(whole, is_causal=True), whole], np.array([1.0]), MACHINE, framework_of("planner")
    ):
        causal, full = times[0] - launch
        assert full == pytest.approx(2 * causal, rel=1e-12)
