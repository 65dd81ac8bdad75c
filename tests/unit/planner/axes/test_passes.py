"""What the passes do to a unit: against closed forms, and in every order alike."""

from collections import Counter
from functools import cache
from itertools import permutations

import numpy as np
import pytest

from costmodels.recipe import Recipe, load_recipe
from costmodels.vocabulary.choices import ContextMethod
from costmodels.vocabulary.terms import Pass
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement, OpClass
from planner.axes.context import CONTEXT
from planner.axes.data import DATA
from planner.axes.expert import EXPERT, ExpertKey
from planner.axes.framework import Framework
from planner.axes.lowered import Collective, Hides, RankWork, Role, StateKind
from planner.axes.offload import OFFLOAD
from planner.axes.pipeline import PIPELINE
from planner.axes.placement import UnitPlacement
from planner.axes.recompute import RECOMPUTE
from planner.axes.registry import COLLECTIVE_AXES, STATE_AXES, WORK_AXES, lowered_states, state_fields, work_fields
from planner.axes.tensor import TENSOR
from planner.axes.traced import representatives, whole_states, whole_work
from planner.axes.unlike_devices import UNLIKE_DEVICES
from planner.layout.decided import NOTHING
from planner.pricing.machine import Machine
from planner.pricing.placements import Decision, decide
from planner.pricing.work import Case, price_work
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import DataKey, TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of
from tests.recipes import STUDY_RECIPES

SEQ_LEN, BF16, BLOCK = 1024, 2, 1  # kinds of units: embedding, block, head
WHOLE, PLAIN, SEQUENCE = TensorSplit(1, False), TensorSplit(8, False), TensorSplit(8, True)
MACHINE = Machine(cluster_of(A100, 64))


def framework_of(recipe: str = "planner", imbalance: float | None = None) -> Framework:
    found: Recipe = load_recipe(recipe)
    if imbalance is not None:
        quantity = found.product_rate.model_copy(update={"value": imbalance})
        found = found.model_copy(update={"expert_imbalance": quantity})
    return Framework.of(found, "bf16")


@cache
def decision_of(model: str, split: TensorSplit) -> Decision:
    solve = CpSatSolver().solve_placement
    found = decide(graph_of(model, SEQ_LEN), split, NOTHING, MACHINE, framework_of(), solve)
    assert found is not None
    return found


def whole_of(model: str, kind: int = BLOCK) -> RankWork:
    graph = graph_of(model, SEQ_LEN)
    return whole_work(graph, representatives(graph)[kind])


def lowered(model: str, key: WorkKey, framework: Framework | None = None, kind: int = BLOCK) -> RankWork:
    work = whole_of(model, kind)
    placement = decision_of(model, key.tensor)[kind]
    for axis, own in zip(WORK_AXES, work_fields(key), strict=True):
        work = axis.work(work, own, placement, framework or framework_of())
    return work


def sent(work: RankWork, role: Role) -> Counter[tuple[CollectiveKind, Pass, float]]:
    """Kind, pass and bytes of every collective of one sequence."""
    found = (each for each in work.collectives if each.role is role)
    return Counter((each.kind, each.runs_in, each.num_bytes(work.unit.tensors)) for each in found)


@pytest.mark.parametrize(
    ("recipe", "method"),
    [
        ("planner", ContextMethod.RING),
        ("megatron-core", ContextMethod.ALL_TO_ALL),
        ("megatron-lm-2020", ContextMethod.ALL_GATHER),
        ("torchtitan", ContextMethod.RING),
    ],
)
@pytest.mark.parametrize(("model", "imbalance"), [("gpt3-175b", None), ("mixtral-8x7b", None), ("mixtral-8x7b", 1.25)])
def test_passes_commute(model: str, imbalance: float | None, recipe: str, method: ContextMethod) -> None:
    framework = framework_of(recipe, imbalance)
    key = WorkKey(SEQUENCE, 4, 2, 3, method)
    graph = graph_of(model, SEQ_LEN)
    steps = list(zip(WORK_AXES, work_fields(key), strict=True))
    for unit, placement in zip(representatives(graph), decision_of(model, key.tensor), strict=True):
        prices: list[tuple[np.ndarray, np.ndarray]] = []
        for order in permutations(steps):
            work = whole_work(graph, unit)
            for axis, own in order:
                work = axis.work(work, own, placement, framework)
            prices.append(price_work([Case(work, 3)], MACHINE, framework))
        for time_s, num_bytes in prices[1:]:
            np.testing.assert_allclose(time_s, prices[0][0], rtol=1e-12)
            np.testing.assert_allclose(num_bytes, prices[0][1], rtol=1e-12)


def test_passes_over_states_commute() -> None:
    key = DataKey(SEQUENCE, 8, 1, 8, 3)
    steps = list(zip(STATE_AXES, state_fields(key), strict=True))
    for states, placement in zip(
        whole_states(graph_of("mixtral-8x7b", SEQ_LEN)), decision_of("mixtral-8x7b", SEQUENCE), strict=True
    ):
        found: list[list[float]] = []
        for order in permutations(steps):
            part = states
            for axis, own in order:
                part = axis.states(part, own, placement)
            found.append([part.elements(kind) for kind in StateKind])
        assert all(each == found[0] for each in found)


def test_axes_of_degree_one_leave_work_as_it_is() -> None:
    work = whole_of("mixtral-8x7b")
    placement = decision_of("mixtral-8x7b", TensorSplit(1, False))[BLOCK]
    own = work_fields(WorkKey(TensorSplit(1, False), 1, 1, 1))
    for axis, fields in zip(WORK_AXES, own, strict=True):
        if axis is not RECOMPUTE:
            assert axis.work(work, fields, placement, framework_of()) is work
    for axis in (PIPELINE, OFFLOAD, UNLIKE_DEVICES):
        assert axis.work_fields(WorkKey(PLAIN, 2, 2, 2)) is None
        assert axis.state_fields(DataKey(PLAIN, 2, 2, 4, 1)) is None


def test_every_field_of_a_key_but_the_micro_batch_is_read() -> None:
    """The micro-batch is an axis of the pricer: no pass knows it."""
    key = WorkKey(PLAIN, 2, 2, 2)
    others = {"tensor": SEQUENCE, "ep": 4, "cp": 4, "micro_batch_size": 3, "cp_method": ContextMethod.RING}
    assert others.keys() == set(WorkKey._fields)
    changed = {name for name, other in others.items() if work_fields(key._replace(**{name: other})) != work_fields(key)}  # type: ignore[arg-type]
    assert changed == {"tensor", "ep", "cp", "cp_method"}
    data = DataKey(PLAIN, 2, 2, 4, 1)
    rest = {"tensor": SEQUENCE, "ep": 4, "dp_replicate": 4, "num_shards": 8, "zero_stage": 2}
    assert rest.keys() == set(DataKey._fields)
    axes = (*STATE_AXES, *COLLECTIVE_AXES)

    def read(each: DataKey) -> list[object]:
        return [axis.state_fields(each) for axis in axes]

    for name, other in rest.items():
        assert read(data._replace(**{name: other})) != read(data), name  # type: ignore[arg-type]


def test_megatron_reduces_twice_each_way() -> None:
    """Shoeybi et al. (2019): two all-reduces of b·s·h forward and two backward in every layer."""
    size = SEQ_LEN * 12288 * BF16
    work = lowered("gpt3-175b", WorkKey(PLAIN, 1, 1, 1))
    assert sent(work, Role.PLACEMENT) == {
        (CollectiveKind.ALL_REDUCE, Pass.FORWARD, size): 2,
        (CollectiveKind.ALL_REDUCE, Pass.BACKWARD, size): 2,
    }
    assert all(each.group == GroupPlacement(8, 1) and each.issued_by_host for each in work.collectives)


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """Korthikanti et al. (2022): two of each forward, the same backward; all else reduces a few gradients of norms."""
    size = SEQ_LEN * 12288 * BF16
    found = sent(lowered("gpt3-175b", WorkKey(SEQUENCE, 1, 1, 1)), Role.PLACEMENT)
    for kind, run in [
        (kind, run) for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER) for run in Pass
    ]:
        assert found.pop((kind, run, size)) >= 2
    assert all(num_bytes < size / SEQ_LEN * 8 for _, _, num_bytes in found)


def test_gradients_that_products_reduce_apart() -> None:
    framework = framework_of(STUDY_RECIPES["megatron-layouts-2023"])
    separate = framework.recipe.separate_reductions
    assert separate is not None
    again = [
        each
        for each in lowered("gpt3-175b", WorkKey(PLAIN, 1, 1, 1), framework).collectives
        if each.role is Role.SEPARATE_REDUCTION
    ]
    assert [each.repeats for each in again] == [separate.value]
    assert not again[0].issued_by_host


@pytest.mark.parametrize("imbalance", [None, 1.5])
def test_rows_of_every_chosen_expert_travel(imbalance: float | None) -> None:
    """Tokens · top_k · hidden · bytes each way; products of experts read 1 / ep of the weights, and do what they did.

    Of one expert alone they are plain products.
    """
    rows = imbalance or 1.0
    work = lowered("mixtral-8x7b", WorkKey(TensorSplit(1, False), 8, 1, 1), framework_of(imbalance=imbalance))
    for role in (Role.DISPATCH, Role.COMBINE):
        size = SEQ_LEN * 2 * 4096 * BF16 * rows
        assert sent(work, role) == {(CollectiveKind.ALL_TO_ALL, run, size): 1 for run in Pass}
    before = {kernel.id: kernel for kernel in whole_of("mixtral-8x7b").unit.kernels}
    of_experts = [kernel for kernel in work.unit.kernels if before[kernel.id].op_class is OpClass.GROUPED_GEMM]
    assert len(of_experts) == 3
    for kernel in of_experts:
        assert kernel.op_class is OpClass.GEMM
        assert kernel.forward.flops == before[kernel.id].forward.flops * rows
        assert kernel.forward.weight_bytes == 4096 * 14336 * BF16  # one of eight experts
        assert kernel.backward.weight_bytes == 2 * 4096 * 14336 * BF16


def test_what_is_sent_shrinks_with_its_tensor() -> None:
    """Under tensor parallelism a rank has its heads' keys and values alone, whichever pass ran first."""
    for split, share in ((TensorSplit(1, False), 1), (PLAIN, 8)):
        work = lowered("llama3-8b", WorkKey(split, 1, 4, 1))
        size = SEQ_LEN * 8 * 128 * BF16 / share  # 8 heads of 128: keys, and as many values
        assert work.part_of_sequence == 1 / 4
        assert sent(work, Role.ATTENTION) == {
            (CollectiveKind.ALL_GATHER, Pass.FORWARD, size * 4): 2,  # of four times what a rank has of each sequence
            (CollectiveKind.ALL_GATHER, Pass.BACKWARD, size * 4): 2,
            (CollectiveKind.REDUCE_SCATTER, Pass.BACKWARD, size * 4): 2,
        }
        assert {each.group for each in work.collectives if each.role is Role.ATTENTION} == {GroupPlacement(4, split.tp)}


def moves(key: DataKey, recipe: str = "planner") -> list[tuple[CollectiveKind, int, int, float]]:
    framework = framework_of(recipe)
    fields = DATA.state_fields(key)
    found: tuple[Collective, ...] = DATA.state_collectives(fields, framework)
    return [(each.kind, each.group.num_ranks, each.group.stride, each.times) for each in found]


def test_groups_that_hold_the_same_states() -> None:
    """2 replicas of 4 shards, each of 2 ranks of context and 2 of tensor parallelism: 32 ranks."""
    reduce_bytes = load_recipe().state.reduction_bytes.value
    dense = [
        (CollectiveKind.ALL_GATHER, 8, 2, 2),
        (CollectiveKind.REDUCE_SCATTER, 8, 2, reduce_bytes),
        (CollectiveKind.ALL_REDUCE, 2, 16, reduce_bytes / 8),
    ]
    of_experts = [
        (CollectiveKind.ALL_GATHER, 2, 8, 2),
        (CollectiveKind.REDUCE_SCATTER, 2, 8, reduce_bytes),
        (CollectiveKind.ALL_REDUCE, 2, 16, reduce_bytes / 2),
    ]
    for zero in (1, 2, 3):
        assert moves(DataKey(TensorSplit(2, False), 1, 2, 8, zero)) == dense
        assert moves(DataKey(TensorSplit(2, False), 4, 2, 8, zero)) == [*dense, *of_experts]
    assert moves(DataKey(TensorSplit(2, False), 1, 4, 2, 0)) == [(CollectiveKind.ALL_REDUCE, 8, 2, reduce_bytes)]
    assert moves(DataKey(TensorSplit(2, False), 4, 4, 2, 0)) == [
        (CollectiveKind.ALL_REDUCE, 8, 2, reduce_bytes),
        (CollectiveKind.ALL_REDUCE, 2, 8, reduce_bytes),
    ]


def test_what_zero_moves_every_micro_batch_hides_behind_it() -> None:
    """ZeRO 3 gathers for every pass of a unit, from ZeRO 2 on each micro-batch's gradients are reduced; else once.

    Over replicas our executor sums once a step in any case, as tests/distributed/test_communication.py counts.
    """
    once = [(Role.GATHER, Hides.FIRST_FORWARD), *[(Role.REDUCE, Hides.LAST_BACKWARD)] * 2]
    each = (Role.REDUCE, Hides.UNIT)
    for recipe, replicas in (("planner", (Role.REPLICAS, Hides.LAST_BACKWARD)), ("torchtitan", each)):
        expected = {
            0: [(Role.REDUCE, Hides.LAST_BACKWARD)],
            1: once,
            2: [(Role.GATHER, Hides.FIRST_FORWARD), each, replicas],
            3: [(Role.GATHER, Hides.UNIT), each, replicas],
        }
        for zero, hides in expected.items():
            fields = DATA.state_fields(DataKey(WHOLE, 1, 8, 1, 0) if zero == 0 else DataKey(WHOLE, 1, 2, 4, zero))
            found = DATA.state_collectives(fields, framework_of(recipe))
            assert [(moved.role, moved.hides) for moved in found] == hides


def test_a_rank_holds_its_experts_and_its_part_of_the_rest() -> None:
    graph, hidden, width = graph_of("mixtral-8x7b", SEQ_LEN), 4096, 14336
    states = whole_states(graph)[BLOCK]
    placement: UnitPlacement = decision_of("mixtral-8x7b", TensorSplit(1, False))[BLOCK]
    part = lowered_states(states, state_fields(DataKey(TensorSplit(1, False), 8, 1, 8, 3)), placement)
    assert states.elements(StateKind.EXPERT) == 8 * 3 * hidden * width
    assert part.elements(StateKind.EXPERT) == 3 * hidden * width
    assert part.elements(StateKind.DENSE) == states.elements(StateKind.DENSE)
    split = lowered_states(states, state_fields(DataKey(PLAIN, 1, 1, 8, 3)), decision_of("mixtral-8x7b", PLAIN)[BLOCK])
    attention, norms_and_router = 2 * hidden * hidden + 2 * hidden * 1024, 2 * hidden + 8 * hidden
    assert split.elements(StateKind.DENSE) == pytest.approx(attention / 8 + norms_and_router, rel=0.01)


def test_context_is_not_gathered_where_nothing_attends() -> None:
    for kind in (0, 2):
        work = lowered("llama3-8b", WorkKey(TensorSplit(1, False), 1, 2, 1), kind=kind)
        assert not work.collectives
        assert work.part_of_sequence == 1 / 2
    assert CONTEXT.work_fields(WorkKey(PLAIN, 1, 2, 1, ContextMethod.RING)) == (2, 8, ContextMethod.RING)
    # One rank shares with nobody, whatever the way.
    assert len({CONTEXT.work_fields(WorkKey(PLAIN, 1, 1, 1, method)) for method in ContextMethod}) == 1
    assert EXPERT.work_fields(WorkKey(PLAIN, 4, 1, 1)) == ExpertKey(4, 8)
    assert TENSOR.work_fields(WorkKey(PLAIN, 1, 1, 1)) == PLAIN
