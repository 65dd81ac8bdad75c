"""The pricing of units before and after axes had rooms of their own: every number, side by side.

Delete together with the old code.
"""

from dataclasses import astuple, fields, replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from costmodels.recipe import AttentionKernel, attention_kernel, load_recipe
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.axes.placement import UnitPlacement, alternatives
from planner.axes.traced import representatives
from planner.layout.layout import Layout, Training
from planner.parallelism import Optimizer, Precision, Recompute
from planner.pricing.cost_table import CostTable
from planner.pricing.expert_parallel import on_one_rank
from planner.pricing.placements import Decision, decide, placement_problem
from planner.pricing.rows import data_rows, element_rows, work_rows
from planner.pricing.sharded_unit import PlacementModel, ShardedUnit
from planner.pricing.table_builder import Sharding, shard_units, unit_row
from planner.pricing.target import PricingTarget
from planner.pricing.unit_costs import UnitCosts, UnitWork, batch_scale, unit_states
from planner.problems import PlacementProblem, PlacementSolution
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import DataKey, TensorSplit, WorkKey
from planner.table.labels import Holding, Time
from tests.planning import cluster_of, graph_of

TOLERANCE = 1e-12
SPLITS = [
    TensorSplit(1, False),
    TensorSplit(2, False),
    TensorSplit(2, True),
    TensorSplit(8, False),
    TensorSplit(8, True),
]
MODELS = [("llama3-8b", 2048), ("mixtral-8x7b", 2048), ("gpt3-175b", 1024), ("tests/fixtures/hf/qwen3", 1024)]
RECIPES = ["planner", "nanotron", "megatron-core", "megatron-lm-2020", "torchtitan"]
TIMES = {
    "forward_s": Time.COMPUTE_FORWARD,
    "backward_s": Time.COMPUTE_BACKWARD,
    "recompute_s": Time.RECOMPUTE,
    "tensor_forward_s": Time.TENSOR_FORWARD,
    "tensor_backward_s": Time.TENSOR_BACKWARD,
    "context_forward_s": Time.CONTEXT_FORWARD,
    "context_backward_s": Time.CONTEXT_BACKWARD,
    "expert_forward_s": Time.EXPERT_FORWARD,
    "expert_backward_s": Time.EXPERT_BACKWARD,
    "weight_gradient_s": Time.WEIGHT_GRADIENT,
    "split_extra_s": Time.SPLIT_EXTRA,
}
HOLDINGS = {
    "kept_bytes": Holding.KEPT,
    "working_bytes": Holding.WORKING,
    "loss_bytes": Holding.LOSS,
    "buffer_bytes": Holding.BUFFER,
    "collective_bytes": Holding.COLLECTIVE,
    "queued_bytes": Holding.QUEUED,
    "stranded_bytes": Holding.STRANDED,
    "boundary_bytes": Holding.BOUNDARY,
    "waiting_bytes": Holding.WAITING,
}
SOLVER = CpSatSolver()
SOLVED: dict[PlacementProblem, PlacementSolution | None] = {}


def solve(problem: PlacementProblem) -> PlacementSolution | None:
    """Both sides pose the same program: one answer serves both, even where several are best."""
    if problem not in SOLVED:
        SOLVED[problem] = SOLVER.solve_placement(problem)
    return SOLVED[problem]


def target_of(
    model: str,
    seq_len: int,
    recipe: str = "planner",
    *,
    attention: str | None = None,
    precision: str = "bf16",
    once_a_node: bool = False,
    hardware: str = "dgx-h100-80gb",
    num_devices: int = 64,
) -> PricingTarget:
    kernel: AttentionKernel | None = None if attention is None else attention_kernel(attention)
    cluster = cluster_of(hardware, num_devices)
    return PricingTarget(graph_of(model, seq_len), cluster, precision, load_recipe(recipe), kernel, once_a_node)


@cache
def placed(model: str, seq_len: int, split: TensorSplit) -> tuple[Sharding, Decision] | None:
    """Of the recipe and kernel that ``search`` plans for; what it decides holds for the others too."""
    target = target_of(model, seq_len)
    old = shard_units(target, (split.tp, split.sequence_parallel), {}, solve)
    new = decide(target.graph, split, {}, target.machine, target.framework, solve)
    assert (old is None) == (new is None)
    return None if old is None or new is None else (old, new)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
def test_programs_and_decisions(model: str, seq_len: int) -> None:
    target = target_of(model, seq_len)
    compared = 0
    for split in SPLITS:
        decided: dict[str, object] = {}
        found = placed(model, seq_len, split)
        for kind, unit in enumerate(reversed(representatives(target.graph))):
            old = PlacementModel(target, unit, split.tp, split.sequence_parallel, decided)  # type: ignore[arg-type]
            new = alternatives(target.graph, unit, split, decided)  # type: ignore[arg-type]
            assert old.is_possible == new.is_possible
            if not old.is_possible:
                break
            assert old.problem() == placement_problem(new, target.machine, target.framework)
            compared += 1
            assert found is not None
            same_decision(found[0][-1 - kind], found[1][-1 - kind])
            for fqn, placement in found[0][-1 - kind].parameters.items():
                parameter = target.graph.parameter_of[fqn]
                if parameter.aliases:
                    decided.update(dict.fromkeys(parameter.names, placement))
    assert compared >= 12


def same_decision(old: ShardedUnit, new: UnitPlacement) -> None:
    assert old.fractions == new.shares
    assert old.placements == new.placements
    assert old.parameters == new.parameters
    assert old.module_outputs == new.module_outputs
    assert len(old.communication) == len(new.collectives)
    assert old.is_proved == new.is_proved


def check_work(
    target: PricingTarget,
    model: str,
    seq_len: int,
    micro_batches: tuple[int, ...] = (1, 3),
    eps: tuple[int, ...] = (1, 8),
) -> int:
    pairs = {split: found for split in SPLITS if (found := placed(model, seq_len, split)) is not None}
    keys = [WorkKey(split, ep, cp, mb) for split, ep, cp, mb in product(pairs, eps, (1, 2), micro_batches)]
    decisions = {split: found[1] for split, found in pairs.items()}
    rows = work_rows(target.graph, decisions, keys, target.machine, target.framework)
    assert {f.name for f in fields(UnitCosts)} == {*TIMES, *HOLDINGS}
    kinds = representatives(target.graph)
    on_ranks = {ep: on_one_rank(target, ep) for ep in eps}
    for row, key in enumerate(keys):
        scale = batch_scale(target.graph, key.micro_batch_size, key.cp)
        for column, (unit, sharded) in enumerate(zip(kinds, pairs[key.tensor][0], strict=True)):
            work = UnitWork(on_ranks[key.ep], unit, sharded, scale, key.ep)
            for mode, recompute in enumerate(Recompute):
                old = work.costs(recompute, key.cp)
                for name, time in TIMES.items():
                    value = rows.time_s[row, mode, column, list(Time).index(time)]
                    close(getattr(old, name), value, (key, unit.name, recompute, name))
                for name, holding in HOLDINGS.items():
                    value = rows.num_bytes[row, mode, column, list(Holding).index(holding)]
                    close(getattr(old, name), value, (key, unit.name, recompute, name))
    return len(keys) * len(kinds) * len(Recompute) * 20


def close(old: float, new: float, where: object) -> None:
    assert abs(old - new) <= TOLERANCE * max(abs(old), abs(new)), (where, old, new)


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_costs_of_units(model: str, seq_len: int, recipe: str) -> None:
    assert check_work(target_of(model, seq_len, recipe), model, seq_len) > 5000


@pytest.mark.parametrize(("model", "seq_len"), MODELS[1:3])
@pytest.mark.parametrize("recipe", ["megatron-core", "megatron-lm-2020", "torchtitan"])
def test_costs_of_plain_attention(model: str, seq_len: int, recipe: str) -> None:
    kernel = load_recipe(recipe).plain_kernel
    check_work(target_of(model, seq_len, recipe, attention=kernel), model, seq_len)


@pytest.mark.parametrize("recipe", ["planner", "megatron-core", "nemo"])
def test_costs_in_8_bits(recipe: str) -> None:
    for model, seq_len in MODELS[:2]:
        check_work(target_of(model, seq_len, recipe, precision="fp8"), model, seq_len)


def test_costs_of_dispatching_once_a_node() -> None:
    target = target_of("mixtral-8x7b", 2048, once_a_node=True)
    check_work(target, "mixtral-8x7b", 2048, eps=(1, 4, 8))


def test_costs_of_deepseek() -> None:
    target = target_of("deepseek-v3", 4096, "megatron-core", num_devices=256)
    check_work(target, "deepseek-v3", 4096, micro_batches=(2,), eps=(1, 64))
    target = target_of("deepseek-v3", 4096, once_a_node=True, num_devices=256)
    check_work(target, "deepseek-v3", 4096, micro_batches=(1,), eps=(256,))


MESHES = [
    Mesh(dp_shard=64),
    Mesh(dp_replicate=64),
    Mesh(dp_replicate=4, dp_shard=16),
    Mesh(pp=2, dp_replicate=2, dp_shard=8, cp=2),
    Mesh(dp_replicate=2, dp_shard=4, tp=8),
    Mesh(dp_shard=8, cp=4, tp=2, ep=8),
    Mesh(dp_replicate=2, dp_shard=16, tp=2, ep=8),
    Mesh(dp_replicate=4, dp_shard=2, cp=8, ep=8),
    Mesh(dp_replicate=8, cp=8, ep=4),
    Mesh(dp_shard=64, ep=8),
    Mesh(pp=8, tp=8),
]


@pytest.mark.parametrize(("model", "seq_len"), MODELS)
@pytest.mark.parametrize("recipe", ["planner", "megatron-core", "nanotron", "megatron-lm-2020"])
def test_states(model: str, seq_len: int, recipe: str) -> None:
    target = target_of(model, seq_len, recipe)
    graph = target.graph
    pairs = {split: found for split in SPLITS if (found := placed(model, seq_len, split)) is not None}
    table = CostTable(
        training=Training(64, seq_len, Precision.BF16, Optimizer.ADAMW),
        cluster=target.cluster,
        units=unit_row(graph),
        costs={},
        states={
            (split.tp, split.sequence_parallel): tuple(
                unit_states(graph, unit, each) for unit, each in zip(representatives(graph), old, strict=True)
            )
            for split, (old, _) in pairs.items()
        },
        flops_per_sequence=1.0,
        recipe=target.recipe,
    )
    decisions = {split: new for split, (_, new) in pairs.items()}
    for split, found in zip(decisions, element_rows(graph, decisions, list(decisions)), strict=True):
        old = [[s.trainable, s.frozen, s.tied, s.experts] for s in table.states[split.tp, split.sequence_parallel]]
        np.testing.assert_allclose(found, old, rtol=TOLERANCE)
    compared = 0
    for mesh, split in product(MESHES, decisions):
        if mesh.tp != split.tp:
            continue
        stages = [0] if mesh.dp_shard == 1 else [1, 2, 3]
        for zero in stages:
            key = DataKey(split, mesh.ep, mesh.dp_replicate, mesh.dp_shard, mesh.cp, zero)
            (row,) = data_rows(graph, decisions, [key], target.machine, target.framework)
            one_f_one_b = ScheduleName.ONE_F_ONE_B
            choice = Layout(mesh, zero, 1, 1, one_f_one_b, 1, Recompute.NONE, split.sequence_parallel)
            old = astuple(table.data_parallel_times(choice))
            np.testing.assert_allclose(row.T, old, rtol=TOLERANCE)
            compared += 1
    assert compared > 20


def test_unbalanced_experts_agree_but_for_whole_rows() -> None:
    """The old pass rounded to whole rows: 9830 of 9830.4."""
    target = target_of("mixtral-8x7b", 2048)
    quantity = target.recipe.product_rate.model_copy(update={"value": 1.2})
    uneven = replace(target, recipe=target.recipe.model_copy(update={"expert_imbalance": quantity}))
    found = placed("mixtral-8x7b", 2048, SPLITS[0])
    assert found is not None
    key = WorkKey(SPLITS[0], 8, 1, 1)
    rows = work_rows(uneven.graph, {SPLITS[0]: found[1]}, [key], uneven.machine, uneven.framework)
    unit = representatives(uneven.graph)[1]
    old = UnitWork(on_one_rank(uneven, 8), unit, found[0][1], 0.5, 8).costs(Recompute.NONE, 1)
    for name, time in TIMES.items():
        assert rows.time_s[0, 0, 1, list(Time).index(time)] == pytest.approx(getattr(old, name), rel=5e-5)
    for name, holding in HOLDINGS.items():
        assert rows.num_bytes[0, 0, 1, list(Holding).index(holding)] == pytest.approx(getattr(old, name), rel=5e-5)
