"""Memory of a rank phase by phase, held against closed forms, what must not grow, and torch's own count of FSDP2."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from costmodels.ledger import MemoryLedger, RankMemory
from costmodels.recipe import Recipe, load_recipe
from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm, Phase
from planner.evaluation.evaluator import Evaluator
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout, Training
from planner.model_file import ModelKind, ModelSource, family_model
from planner.models.config import FamilyConfig, MlpType
from planner.models.family import build_family
from planner.models.loss import next_token_loss
from planner.pricing.decisions import decided
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.solver.cp_sat import CpSatSolver
from planner.table.cost_table import CostTable
from planner.table.keys import TensorSplit
from tests.fake_world import fake_world
from tests.planning import A100, BATCH_SIZE, cluster_of, problem_of

CONFIG = FamilyConfig(
    family="gpt", layers=8, hidden=512, heads=8, kv_heads=8, head_dim=None, ffn=1536, vocab=8192, seq_len=512,
    mlp=MlpType.GELU, tied=False,
)  # fmt: skip
STATES = (MemoryTerm.PARAMETERS, MemoryTerm.GRADIENTS, MemoryTerm.OPTIMIZER)
FSDP = Layout(
    mesh=Mesh(1, 1, 8, 1, 1, 1),
    zero_stage=3,
    micro_batch_size=4,
    num_microbatches=1,
    schedule=ScheduleName.ONE_F_ONE_B,
    virtual_stages=1,
    recompute=Recompute.NONE,
    sequence_parallel=False,
)


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    loaded = family_model(ModelSource("toy", ModelKind.PRESET), CONFIG)
    return trace_model(loaded, BATCH_SIZE, CONFIG.seq_len, "bfloat16")


HOST_TIMES = ("host_s_per_kernel", "host_s_per_collective")


def memory_of(graph: ModelGraph, choice: Layout, recipe: Recipe | None = None) -> tuple[RankMemory, ...]:
    target = PricingTarget(graph, cluster_of(A100, choice.mesh.world_size), "bf16", recipe or load_recipe())
    split = TensorSplit(choice.mesh.tp, choice.sequence_parallel)
    decision = decided(target, split, NOTHING, CpSatSolver().solve_placement)
    assert decision is not None
    batch = choice.mesh.dp * choice.micro_batch_size * choice.num_microbatches
    training = Training(batch, CONFIG.seq_len, Precision.BF16, Optimizer.ADAMW)
    point = Evaluator(build_table(target, training, {split: decision}, (choice,)), choice)
    return point.memory(point.even_starts())


def tensors(ledger: MemoryLedger) -> dict[str, float]:
    return {name: num_bytes for name, num_bytes in ledger.rows if num_bytes > 0}


def bytes_counted_by_torch() -> dict[str, float]:
    """Peak of forward and backward under FSDP2 over eight ranks, by torch's own tracker of fake tensors."""
    with fake_world(8):
        mesh = init_device_mesh("cpu", (8,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build_family(CONFIG)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (*model.get_submodule("layers").children(), model):  # as planner.executor.data_parallel
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                tokens = torch.zeros(FSDP.micro_batch_size, CONFIG.seq_len, dtype=torch.int64)
                next_token_loss(model(tokens), {"input_ids": tokens}).backward()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(kind).rpartition(".")[2]: float(num_bytes) for kind, num_bytes in peak.items()}


def test_the_peak_of_fsdp_is_what_torch_counts(graph: ModelGraph) -> None:
    counted = bytes_counted_by_torch()
    (memory,) = memory_of(graph, FSDP)
    ledger = memory.ledger(Phase.BACKWARD)
    moments = graph.num_params * 8 / 8
    libraries = ledger.bytes_of(MemoryTerm.WORKSPACE)  # of which fake tensors have none
    assert ledger.allocated_bytes - moments - libraries == pytest.approx(counted["Total"], rel=0.01)
    assert ledger.bytes_of(MemoryTerm.ACTIVATIONS) == pytest.approx(counted["ACT"], rel=0.01)
    assert ledger.bytes_of(MemoryTerm.WORKING_SET) == pytest.approx(counted["TEMP"], rel=0.01)


def test_phases_hold_what_exists_then(graph: ModelGraph) -> None:
    (memory,) = memory_of(graph, FSDP._replace(num_microbatches=2))
    shard = graph.num_params / 8
    assert tensors(memory.ledger(Phase.INITIALISATION))["optimizer"] == pytest.approx(4 * shard)  # masters, no moments
    assert "activations" not in tensors(memory.ledger(Phase.OPTIMIZER))
    assert tensors(memory.ledger(Phase.OPTIMIZER))["gradients"] == pytest.approx(4 * shard)
    assert "gradients" not in tensors(memory.ledger(Phase.CHECKPOINT))  # set to None, not kept
    assert tensors(memory.ledger(Phase.BACKWARD))["gradients"] == pytest.approx(4 * shard)
    assert memory.peak.total_bytes == memory.ledger(Phase.BACKWARD).total_bytes


def test_one_micro_batch_has_no_gradients_beside_all_activations(graph: ModelGraph) -> None:
    (one,), (two,) = (memory_of(graph, FSDP._replace(zero_stage=1, num_microbatches=m)) for m in (1, 2))
    assert one.ledger(Phase.BACKWARD).bytes_of(MemoryTerm.GRADIENTS) == 0
    added = two.peak.total_bytes - one.peak.total_bytes
    assert added == pytest.approx(4 * graph.num_params)
    kept = load_recipe().memory.model_copy(update={"keeps_gradients": True})
    (always,) = memory_of(graph, FSDP._replace(zero_stage=1), load_recipe().model_copy(update={"memory": kept}))
    assert always.peak.total_bytes == pytest.approx(two.peak.total_bytes)


def test_the_loss_holds_its_copies_of_the_logits(graph: ModelGraph) -> None:
    logits = 4 * CONFIG.seq_len * CONFIG.vocab
    (eager,) = memory_of(graph, FSDP)
    (fused,) = memory_of(graph, FSDP, load_recipe("fsdp-llm-foundry"))
    assert eager.ledger(Phase.FORWARD).bytes_of(MemoryTerm.WORKING_SET) == pytest.approx((12 - 4) * logits)
    assert fused.ledger(Phase.FORWARD).bytes_of(MemoryTerm.WORKING_SET) == pytest.approx((4 - 2) * logits)
    less = eager.ledger(Phase.FORWARD).bytes_of(MemoryTerm.ACTIVATIONS) - fused.ledger(Phase.FORWARD).bytes_of(
        MemoryTerm.ACTIVATIONS
    )
    assert less == pytest.approx((4 - 2) * logits)
    assert eager.peak.bytes_of(MemoryTerm.STRANDED_COPIES) == pytest.approx((14 - 12) * logits)


def test_inputs_of_asynchronous_collectives_wait_as_long_as_launches_queue(graph: ModelGraph) -> None:
    split = FSDP._replace(mesh=Mesh(1, 1, 1, 1, 2, 1), zero_stage=0, sequence_parallel=True)
    whole = 4 * CONFIG.seq_len * CONFIG.hidden * 2
    nanotron = load_recipe("nanotron")
    at_once = {name: getattr(nanotron, name).model_copy(update={"value": 0.0}) for name in HOST_TIMES}
    (memory,) = memory_of(graph, split, nanotron.model_copy(update=at_once))
    assert memory.peak.bytes_of(MemoryTerm.WAITING_COLLECTIVES) == pytest.approx(3 * CONFIG.layers * whole)
    (behind,) = memory_of(graph, split, nanotron)  # its host is slower than the device with so small a model
    assert behind.peak.bytes_of(MemoryTerm.WAITING_COLLECTIVES) == 0
    assert memory.peak.bytes_of(MemoryTerm.GATHER_BUFFERS) == pytest.approx(2 * whole)
    (ours,) = memory_of(graph, split)
    assert ours.peak.bytes_of(MemoryTerm.WAITING_COLLECTIVES) == ours.peak.bytes_of(MemoryTerm.GATHER_BUFFERS) == 0


def test_nanotron_gathers_updated_parameters_through_copies(graph: ModelGraph) -> None:
    (memory,) = memory_of(graph, FSDP._replace(zero_stage=1), load_recipe("nanotron"))
    gathered = memory.ledger(Phase.OPTIMIZER).bytes_of(MemoryTerm.GATHERED_UPDATE)
    assert gathered == pytest.approx(graph.num_params * (2 + 2 / 8))
    lasting = sum(memory.ledger(Phase.OPTIMIZER).bytes_of(name) for name in STATES)
    assert (lasting + gathered) / graph.num_params == pytest.approx(10 + 14 / 8)


@pytest.mark.parametrize("tp", [1, 2])
def test_recomputing_never_takes_more(graph: ModelGraph, tp: int) -> None:
    for micro_batch in (1, 2, 8):
        choice = FSDP._replace(mesh=Mesh(1, 1, 8 // tp, 1, tp, 1), micro_batch_size=micro_batch)
        none, selective, full = (
            memory_of(graph, choice._replace(recompute=mode))[0].peak.total_bytes
            for mode in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
        )
        assert full <= selective <= none


def test_memory_grows_with_the_micro_batch_and_falls_with_sharding() -> None:
    problem = problem_of("llama3-8b", 16, batch=64, seq_len=2048)
    known = dict.fromkeys(problem.space.layouts)
    compared = 0
    for choice in random.Random(3).sample(problem.space.layouts, 400):
        need = _peak(problem.table, choice)
        larger = choice._replace(
            micro_batch_size=2 * choice.micro_batch_size, num_microbatches=choice.num_microbatches // 2
        )
        # Where all forward passes come first, half as many of twice the size keep as much, and free more at once.
        all_in_flight = choice.schedule.rules.forwards_first and choice.mesh.pp > 1
        if larger in known and choice.num_microbatches % 2 == 0 and larger.num_microbatches > 1 and not all_in_flight:
            assert need <= _peak(problem.table, larger) * (1 + 1e-9), choice
            compared += 1
        sharded = choice._replace(zero_stage=choice.zero_stage + 1)
        if choice.zero_stage in (1, 2) and sharded in known:
            lasting = [_states(problem.table, c) for c in (choice, sharded)]
            assert lasting[1] <= lasting[0]
            compared += 1
    assert compared > 50


def _peak(table: CostTable, choice: Layout) -> float:
    point = Evaluator(table, choice)
    return max(ledger.total_bytes for ledger in point.ledgers(point.even_starts()))


def _states(table: CostTable, choice: Layout) -> float:
    point = Evaluator(table, choice)
    ledgers = (memory.ledger(Phase.OPTIMIZER) for memory in point.memory(point.even_starts()))
    return sum(ledger.bytes_of(name) for ledger in ledgers for name in STATES)


def test_reserve_is_of_what_comes_and_goes_and_less_where_nothing_mixes(graph: ModelGraph) -> None:
    share = cluster_of(A100, 8).profile.software.allocator_reserve_fraction.value
    plain, split = (memory_of(graph, replace_mesh(FSDP, tp))[0].peak for tp in (1, 2))
    for ledger, expected in ((plain, share / 4), (split, share)):
        passing = ledger.allocated_bytes - sum(map(ledger.bytes_of, (*STATES, MemoryTerm.WORKSPACE)))
        assert ledger.bytes_of(MemoryTerm.ALLOCATOR_RESERVE) == pytest.approx(expected * passing)


def replace_mesh(choice: Layout, tp: int) -> Layout:
    return choice._replace(mesh=replace(choice.mesh, dp_shard=8 // tp, tp=tp))
