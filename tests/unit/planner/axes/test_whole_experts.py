"""Experts whole on a rank beside tensor parallelism (ETP 1): closed forms, and torch on parts of a sequence."""

from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from costmodels.recipe import load_recipe
from costmodels.vocabulary.choices import Replicate, Shard
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.terms import Element
from costmodels.vocabulary.workload import CollectiveKind, GroupPlacement, OpClass
from planner.axes.data import DATA
from planner.axes.framework import Framework
from planner.axes.lowered import RankWork, Role, StateKind
from planner.axes.placement import UnitPlacement
from planner.axes.registry import WorkLowering, lowered_states, state_fields, work_fields
from planner.axes.traced import representatives, whole_states, whole_work
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.states import num_updated
from planner.layout.layout import Pins
from planner.models.catalog import find_preset
from planner.models.moe import MixtureOfExperts
from planner.plan.schema import MeshSection
from planner.pricing.decisions import limits_of
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.table.keys import DataKey, TensorSplit, WorkKey
from tests.planning import A100, cluster_of, graph_of, training_of
from tests.unit.planner.pricing.unit_prices import decision_of

SEQ_LEN, BF16, TP = 1024, 2, 4
EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 4096, 14336  # of Mixtral-8x7b
WHOLE, SPLIT = TensorSplit(TP, True, 1), TensorSplit(TP, True)
CORE = load_recipe("megatron-core")


@cache
def placed(split: TensorSplit, model: str = "mixtral-8x7b") -> tuple[int, UnitPlacement]:
    """The block with experts among the kinds of units, and how it is split."""
    graph = graph_of(model, SEQ_LEN)
    units = representatives(graph)
    (place,) = (i for i, unit in enumerate(units) if any(".experts." in fqn for fqn in unit.parameters))
    target = PricingTarget(graph, cluster_of(A100, 8), "bf16")
    return place, decision_of(target, split)[place]


def lowered(key: WorkKey, model: str = "mixtral-8x7b") -> RankWork:
    place, placement = placed(key.tensor, model)
    graph = graph_of(model, SEQ_LEN)
    whole = whole_work(graph, representatives(graph)[place])
    return WorkLowering(whole, Framework.of(CORE, "bf16")).under(work_fields(key), placement)


@pytest.mark.parametrize("ep", [2, 8])
def test_a_rank_sends_the_rows_of_its_own_tokens(ep: int) -> None:
    """Tokens / tp · top_k · hidden · bytes each way, among neighbours; and nothing of the layer over the tp ranks."""
    work = lowered(WorkKey(WHOLE, ep, 1, 1))
    exchanges = [each for each in work.collectives if each.role in (Role.DISPATCH, Role.COMBINE)]
    assert len(exchanges) == 4
    for each in exchanges:
        assert each.kind is CollectiveKind.ALL_TO_ALL
        assert each.group == GroupPlacement(ep, 1)
        assert each.num_bytes(work.unit.tensors) == SEQ_LEN / TP * TOP_K * HIDDEN * BF16
    # Of one sequence: attention's input and output, each gathered or reduced forward and back, and sums of norms' and
    # the router's gradients.
    tensor = [each for each in work.collectives if each.role is Role.PLACEMENT]
    moved = [each.num_bytes(work.unit.tensors) for each in tensor if each.of]
    assert moved == [SEQ_LEN * HIDDEN * BF16] * 4
    assert sorted(each.fixed_bytes for each in tensor if not each.of) == [
        HIDDEN * BF16, HIDDEN * BF16, HIDDEN * EXPERTS * BF16,
    ]  # fmt: skip


@pytest.mark.parametrize("ep", [2, 8])
def test_a_rank_reads_whole_experts_and_works_on_its_part_of_the_rows(ep: int) -> None:
    kernels = {each.id: each for each in lowered(WorkKey(WHOLE, ep, 1, 1)).unit.kernels}
    of_experts = [each for each in kernels.values() if each.operator == "_grouped_mm"]
    assert len(of_experts) == 3
    for each in of_experts:
        # Products of one expert alone are plain products.
        assert each.op_class is (OpClass.GEMM if ep == EXPERTS else OpClass.GROUPED_GEMM)
        assert each.forward.flops == pytest.approx(2 * SEQ_LEN * TOP_K * HIDDEN * WIDTH / TP)
        assert each.forward.weight_bytes == pytest.approx(EXPERTS / ep * HIDDEN * WIDTH * BF16)
        assert each.backward.flops == pytest.approx(2 * each.forward.flops)
    # Columns and rows of the same experts take as many FLOPs, but every rank brings all rows into order.
    among = {each.id: each for each in lowered(WorkKey(SPLIT, ep, 1, 1)).unit.kernels}
    (order,) = (i for i, each in kernels.items() if each.operator == "index_select")
    assert among[order].forward.moved_bytes == pytest.approx(TP * kernels[order].forward.moved_bytes)
    assert sum(each.forward.flops for each in among.values()) == pytest.approx(
        sum(each.forward.flops for each in kernels.values()), rel=1e-4
    )


def test_placements_are_whole_in_the_layer_and_split_around_it() -> None:
    _, placement = placed(WHOLE)
    found = {fqn.split(".", 2)[-1]: each for fqn, each in placement.parameters.items()}
    assert found["attention.query.weight"] == Shard(0)
    assert found["attention.output.weight"] == Shard(1)
    of_layer = {name: each for name, each in found.items() if name.startswith("mlp.")}
    assert len(of_layer) == 4
    assert set(of_layer.values()) == {Replicate()}


def test_shared_experts_are_split_as_any_product() -> None:
    _, placement = placed(WHOLE, "deepseek-v3")
    found = {fqn.split(".mlp.")[-1]: each for fqn, each in placement.parameters.items() if ".mlp." in fqn}
    assert {each for name, each in found.items() if name.startswith("experts.")} == {Replicate()}
    assert all(isinstance(each, Shard) for name, each in found.items() if name.startswith("shared."))


@pytest.mark.parametrize(("replicas", "shards", "ep", "zero"), [(2, 4, 8, 3), (1, 2, 2, 1), (3, 1, 4, 0)])
def test_states_of_a_rank_and_who_has_the_same(replicas: int, shards: int, ep: int, zero: int) -> None:
    """Experts / ep of each layer, reduced over dp · cp · tp / ep ranks; the rest as without."""
    key = DataKey(WHOLE, ep, replicas, shards, zero)
    place, placement = placed(WHOLE)
    states = whole_states(graph_of("mixtral-8x7b", SEQ_LEN))[place]
    part = lowered_states(states, state_fields(key), placement)
    assert part.elements(StateKind.EXPERT) == pytest.approx(EXPERTS / ep * 3 * HIDDEN * WIDTH)
    groups = [
        each.group.num_ranks
        for each in DATA.state_collectives(DATA.state_fields(key), Framework.of(CORE, "bf16"))
        if StateKind.EXPERT.value in each.of and each.role is Role.REDUCE
    ]
    # Megatron-Core reduces to all ranks before ZeRO 2.
    expected = [replicas * shards * TP // ep] if zero < 2 else [shards * TP // ep, replicas]
    assert [num_ranks for num_ranks in groups if num_ranks > 1] == expected  # nothing is sent to oneself


def problem(pins: Pins, num_devices: int = 16, recipe: str = "planner") -> Problem:
    graph = graph_of("moe-tiny", 64)
    target = PricingTarget(graph, cluster_of(A100, num_devices), "bf16", load_recipe(recipe))
    return Problem.build(target, training_of(32, 64), pins)


def test_the_ledger_counts_every_expert_of_the_world_as_often_as_it_is_held() -> None:
    """Summed over the ranks of a pipeline rank, experts are held dp · cp · tp / ep times, and updated once (ZeRO 1)."""
    posed = problem(Pins(tp=TP, pp=1, cp=1, dp=4, etp=1, zero=1, micro_batch=1, dp_replicate=1))
    preset = find_preset("moe-tiny")
    assert preset is not None
    experts = 3 * 8 * 3 * 64 * 64  # 3 layers with 8 experts of 3 matrices of 64 x 64
    for layout in posed.space.layouts:
        mesh = layout.mesh
        point = Evaluator(posed.table, layout)
        table = posed.table
        row = table.split_rows([WHOLE])[0]
        per_kind = {element: table.elements[row, :, list(Element).index(element)] for element in Element}
        total, of_experts = (float(per_kind[each] @ table.counts) for each in (Element.TRAINABLE, Element.EXPERT))
        assert of_experts == pytest.approx(experts / TP)
        dense = total - of_experts
        held = total - of_experts * (1 - 1 / mesh.expert_parts)
        assert held == pytest.approx(dense + experts / mesh.ep)
        assert num_updated(layout, total, of_experts) * 4 * TP == pytest.approx(TP * dense + experts)
        assert point.evaluate((0,)).step_time_s > 0


def test_only_frameworks_that_have_it_search_it_and_pins_are_obeyed() -> None:
    ours = problem(Pins(pp=1, cp=1))
    assert {layout.mesh.etp for layout in ours.space.layouts} == {None}
    core = problem(Pins(pp=1, cp=1), recipe="megatron-core")
    found = {layout.mesh for layout in core.space.layouts if layout.mesh.etp == 1}
    by_hand = {
        Mesh(1, replicas, shards, 1, tp, ep, 1)
        for tp in (2, 4, 8)
        for replicas in (1, 2, 4, 8)
        for shards in (1, 2, 4, 8)
        for ep in (2, 4, 8)
        if replicas * shards * tp == 16 and shards * tp % ep == 0
    }
    assert found == by_hand
    assert all(layout.sequence_parallel for layout in core.space.layouts if layout.mesh.etp == 1)
    for pins, expected in ((Pins(etp=1), 1), (Pins(tp=4, etp=4), 4)):
        pinned = problem(replace(pins, pp=1, cp=1)).space.layouts
        assert {layout.mesh.expert_tp for layout in pinned} == {expected}
    assert limits_of(core.target, core.decisions).whole_expert_degrees == {2, 4, 8}


def test_one_expert_layer_on_parts_of_a_sequence_is_the_layer_on_all_of_it() -> None:
    """What the placement says, by torch: outputs side by side, gradients of router and experts added up."""
    preset = find_preset("moe-tiny")
    assert preset is not None
    torch.manual_seed(0)
    layer = MixtureOfExperts(preset.config.model_copy(update={"shared_experts": 0}))
    x, gradient = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    whole = layer(x)
    whole.backward(gradient)
    expected = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    parts = [layer(part) for part in x.chunk(TP, dim=1)]
    for part, own in zip(parts, gradient.chunk(TP, dim=1), strict=True):
        part.backward(own)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
    assert expected.keys() == {"router.gate.weight", "experts.gate", "experts.up", "experts.down"}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4)


def test_the_degree_stands_in_a_plan_where_it_is_not_that_of_attention() -> None:
    for mesh in (Mesh(dp_shard=2, tp=4, ep=8, etp=1), Mesh(dp_shard=2, tp=4, ep=2)):
        section = MeshSection(**asdict(mesh))
        assert ("etp" in section.model_dump_json()) == (mesh.etp is not None)
        assert MeshSection.model_validate_json(section.model_dump_json()).shape() == mesh
    assert MeshSection(tp=4, dp_shard=2, ep=2, etp=4).shape() == Mesh(tp=4, dp_shard=2, ep=2)
