"""Placements of real models come out as Megatron's, and the collectives that are priced are those that a step runs."""

import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from costmodels.vocabulary.choices import Placement, Precision, Recompute, Replicate, Shard
from costmodels.vocabulary.terms import Pass, Term
from costmodels.vocabulary.workload import CollectiveKind
from planner.api import described
from planner.axes.lowered import Collective
from planner.axes.placement import UnitPlacement
from planner.axes.traced import representatives, tensors_of
from planner.evaluation.evaluator import Evaluator
from planner.executor.mesh import build_mesh
from planner.executor.parallelize import parallelize
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.layout.layout import Pins
from planner.model_file import LoadedModel
from planner.pricing.placements import Decision
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.table.keys import TensorSplit
from tests.fake_world import fake_world
from tests.planning import A100, BATCH_SIZE, cluster_of, graph_of, training_of
from tests.unit.planner.graph.traced import HF_CONFIGS, loaded, loaded_from_code, loaded_from_config
from tests.unit.planner.pricing.unit_prices import decision_of

COLUMNS, ROWS = Shard(0), Shard(1)  # of nn.Linear's weight [out, in]


@cache
def placed(model: str, seq_len: int, degree: int, sequence_parallel: bool) -> Decision:
    target = PricingTarget(graph_of(model, seq_len), cluster_of(A100, 8), "bf16")
    return decision_of(target, TensorSplit(degree, sequence_parallel))


def block_of(model: str, seq_len: int, degree: int, sequence_parallel: bool) -> tuple[str, UnitPlacement]:
    """The repeated block's name and how it is split."""
    units = representatives(graph_of(model, seq_len))
    (index,) = [i for i, unit in enumerate(units) if unit.is_block]
    return units[index].name, placed(model, seq_len, degree, sequence_parallel)[index]


def parameters_of(model: str, seq_len: int, degree: int, sequence_parallel: bool) -> dict[str, Placement]:
    name, sharded = block_of(model, seq_len, degree, sequence_parallel)
    return {fqn.removeprefix(name + "."): placement for fqn, placement in sharded.parameters.items()}


def collectives(sharded: UnitPlacement) -> Counter[tuple[str, str]]:
    """Collectives on activations by kind and direction."""
    return Counter((each.kind.value, each.runs_in.value) for each in sharded.collectives if each.follows_batch)


def num_bytes(graph: ModelGraph, collective: Collective) -> float:
    """Of the traced batch."""
    size = collective.num_bytes(tensors_of(graph, collective.of))
    return size * BATCH_SIZE if collective.follows_batch else size


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("degree", [2, 8])
def test_a_llama_block_is_split_as_megatron_does(degree: int, sequence_parallel: bool) -> None:
    parameters = parameters_of("llama3-8b", 2048, degree, sequence_parallel)
    for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        assert parameters[f"{name}.weight"] == COLUMNS, name
    for name in ("attention.output", "mlp.down"):
        assert parameters[f"{name}.weight"] == ROWS, name
    for name in ("attention_norm.weight", "mlp_norm.weight"):
        assert parameters[name] == Replicate()


@pytest.mark.parametrize("degree", [2, 8])
def test_a_llama_block_all_reduces_twice_each_way(degree: int) -> None:
    _, sharded = block_of("llama3-8b", 2048, degree, False)
    assert collectives(sharded) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}


@pytest.mark.parametrize("degree", [2, 8])
def test_sequence_parallelism_gathers_and_scatters_instead(degree: int) -> None:
    _, sharded = block_of("llama3-8b", 2048, degree, True)
    assert collectives(sharded) == {
        ("all_gather", "forward"): 2,
        ("reduce_scatter", "forward"): 2,
        ("all_gather", "backward"): 2,
        ("reduce_scatter", "backward"): 2,
    }
    # The norms see a part of the sequence each, so their weights' gradients are summed: small, and once a block.
    graph = graph_of("llama3-8b", 2048)
    rest = [each for each in sharded.collectives if not each.follows_batch]
    sums = [(each.kind, each.runs_in, num_bytes(graph, each)) for each in rest]
    assert sums == [(CollectiveKind.ALL_REDUCE, Pass.BACKWARD, 4096 * 2)] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sequence_parallelism_moves_the_same_bytes_and_keeps_less(sequence_parallel: bool) -> None:
    _, sharded = block_of("llama3-8b", 2048, 8, sequence_parallel)
    activations = BATCH_SIZE * 2048 * 4096 * 2
    graph = graph_of("llama3-8b", 2048)
    assert {num_bytes(graph, each) for each in sharded.collectives if each.follows_batch} == {activations}
    name, _ = block_of("llama3-8b", 2048, 8, sequence_parallel)
    nodes = graph_of("llama3-8b", 2048).nodes
    norm = next(n for n in nodes if n.module == f"{name}.attention_norm" and "rms_norm" in n.op)
    operand = norm.operands[0]
    assert isinstance(operand, int)
    assert sharded.local_share(operand) == (1 / 8 if sequence_parallel else 1.0)


def test_a_fused_qkv_is_split_over_heads() -> None:
    # gpt's QKV weight is laid out head by head, so a split of its rows is a split of the heads: nothing is gathered.
    parameters = parameters_of("gpt3-1.3b", 1024, 8, False)
    assert parameters["attention.qkv.weight"] == parameters["attention.qkv.bias"] == COLUMNS
    assert parameters["attention.output.weight"] == ROWS
    _, sharded = block_of("gpt3-1.3b", 1024, 8, False)
    assert collectives(sharded) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}


@pytest.mark.parametrize("degree", [2, 4])
def test_a_vision_transformer_is_split_as_megatron_does(degree: int) -> None:
    """Nothing of it is listed anywhere: columns, rows, and what is sent once activations are split between blocks."""
    vision = "tests/fixtures/vision.py"
    for sequence_parallel in (False, True):
        parameters = parameters_of(vision, 256, degree, sequence_parallel)
        columns = {name for name, placement in parameters.items() if placement == COLUMNS}
        split = ("attention.query", "attention.key", "attention.value", "up")
        assert columns == {f"{name}.{part}" for name in split for part in ("weight", "bias")}
        rows = {name for name, placement in parameters.items() if placement == ROWS}
        assert rows == {"attention.output.weight", "down.weight"}
        assert all(parameters[name] == Replicate() for name in parameters.keys() - columns - rows)
    _, whole = block_of(vision, 256, degree, False)
    assert collectives(whole) == {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}
    _, parts = block_of(vision, 256, degree, True)
    runs = [(kind, run) for kind in ("all_gather", "reduce_scatter") for run in ("forward", "backward")]
    assert collectives(parts) == dict.fromkeys(runs, 2)


def test_heads_that_a_degree_does_not_divide_stay_whole() -> None:
    # GPT-2 1.5B has 25 heads: its weights are split, its attention is done whole by every rank, after a gather.
    name, sharded = block_of("gpt2-1.5b", 1024, 8, False)
    attention = next(
        n for n in graph_of("gpt2-1.5b", 1024).nodes if "attention" in n.op and n.module.startswith(f"{name}.")
    )
    assert sharded.shares[attention.id] == 1.0
    assert sharded.parameters[f"{name}.mlp.up.weight"] == COLUMNS
    assert sharded.parameters[f"{name}.mlp.down.weight"] == ROWS
    assert collectives(sharded)["all_gather", "forward"] >= 1


def test_hugging_faces_gpt2_pays_for_gathering_its_fused_projection() -> None:
    # Conv1D's output is [q | k | v]: a split of its columns does not follow the chunks.
    parameters = parameters_of("tests/fixtures/hf/gpt2", 1024, 2, False)
    assert parameters["attn.c_attn.weight"] == Shard(1)  # Conv1D's weight is [in, out]
    assert parameters["mlp.c_fc.weight"] == Shard(1)
    assert parameters["mlp.c_proj.weight"] == Shard(0)
    _, sharded = block_of("tests/fixtures/hf/gpt2", 1024, 2, False)
    graph = graph_of("tests/fixtures/hf/gpt2", 1024)
    gathers = [each for each in sharded.collectives if each.kind is CollectiveKind.ALL_GATHER]
    gathered = {num_bytes(graph, each) for each in gathers if each.runs_in is Pass.FORWARD}
    assert BATCH_SIZE * 1024 * 3 * 1600 * 2 in gathered


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_product_whose_parts_nothing_takes_is_whole_and_the_rest_is_split(sequence_parallel: bool) -> None:
    """torch's attention views its fused product in three pieces: `--tp 2` was said to split no parameter at all."""
    parameters = parameters_of("tests/fixtures/encoder.py", 64, 2, sequence_parallel)
    whole = {name for name, placement in parameters.items() if placement == Replicate()}
    assert {"self_attn.in_proj_weight", "self_attn.in_proj_bias"} <= whole
    assert parameters["self_attn.out_proj.weight"] in (COLUMNS, ROWS)
    assert (parameters["linear1.weight"], parameters["linear2.weight"]) == (COLUMNS, ROWS)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_product_that_is_whole_is_fed_with_whole_sequences(tmp_path: Path, norm_first: bool) -> None:
    """DTensor gathers for a product whose weight is split, and goes on with a part where it is whole: attention failed.

    Where the norm comes last, no module ends before attention, where a sequence could be gathered.
    """
    code = f"""
from tests.fixtures.encoder import Encoder

def build_model():
    return Encoder(norm_first={norm_first})
"""
    target = PricingTarget(trace_model(loaded_from_code(code, tmp_path), BATCH_SIZE, 64), cluster_of(A100, 8), "bf16")
    problem = Problem.build(target, training_of(8, 64), Pins(tp=2))
    assert {layout.sequence_parallel for layout in problem.space.layouts} == ({False, True} if norm_first else {False})


@pytest.mark.parametrize("model", ["gpt2-1.5b", "gpt3-1.3b", "tests/fixtures/hf/gpt2", "gpt3-175b"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tied_embeddings_have_one_placement(model: str, sequence_parallel: bool) -> None:
    graph = graph_of(model, 1024)
    (tied,) = [p for p in graph.parameters if p.aliases]
    names = {tied.fqn, *tied.aliases}
    placements = [
        placement
        for sharded in placed(model, 1024, 2, sequence_parallel)
        for fqn, placement in sharded.parameters.items()
        if fqn in names
    ]
    assert len(placements) == 2
    assert placements[0] == placements[1]


TIED_BY_A_CALL = """
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1024, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(x, self.embedding.weight)

def build_model():
    return Model()
"""


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_weight_that_two_units_use_under_one_name_has_one_placement(tmp_path: Path, sequence_parallel: bool) -> None:
    """The head divided what the embedding had whole: `planner run` looked up partial sums that nobody added up."""
    graph = trace_model(loaded_from_code(TIED_BY_A_CALL, tmp_path), BATCH_SIZE, 64)
    target = PricingTarget(graph, cluster_of(A100, 8), "bf16")
    decision = decision_of(target, TensorSplit(2, sequence_parallel))
    placements = [sharded.parameters.get("embedding.weight") for sharded in decision]
    assert [each for each in placements if each is not None] == [Shard(0), Shard(0)]
    (embedding,) = [sharded.module_outputs for sharded in decision if "embedding" in sharded.module_outputs]
    assert embedding["embedding"] == (Shard(1) if sequence_parallel else Replicate())


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_every_big_weight_is_split_where_its_dims_divide(degree: int) -> None:
    for model, seq_len in (("llama3-8b", 2048), ("gpt3-1.3b", 1024)):
        parameters = {p.fqn: p for p in graph_of(model, seq_len).parameters}
        for sharded in placed(model, seq_len, degree, False):
            for fqn, placement in sharded.parameters.items():
                if fqn in parameters and len(parameters[fqn].shape) == 2 and "embedding" not in fqn:
                    assert isinstance(placement, Shard), fqn


def test_one_rank_replicates_everything_and_sends_nothing() -> None:
    for sharded in placed("llama3-8b", 2048, 1, False):
        assert not sharded.collectives
        assert not sharded.module_outputs
        assert set(sharded.shares.values()) <= {1.0}
        assert all(placement == Replicate() for placement in sharded.parameters.values())


# -- what is priced is what runs ----------------------------------------------------------------------

MANY_ELEMENTS = 2048  # activations have more; gradients of norms and statistics of the loss have fewer
KINDS = {"all_gather_into_tensor": "gather", "all_reduce": "reduce", "reduce_scatter_tensor": "reduce"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


@cache
def small_model(name: str, folder: Path) -> tuple[LoadedModel, ModelGraph]:
    """A model whose steps take milliseconds, and its graph."""
    if not name.startswith("hf "):
        model = loaded(name)
    else:
        (folder / name).mkdir()
        model = loaded_from_config(HF_CONFIGS[name[3:]], folder / name)
    return model, trace_model(model, BATCH_SIZE, 64, "bfloat16")


class _Counter(TorchDispatchMode):
    """The collectives of this process by kind, those of many elements."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks, self.counts = num_ranks, Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor comes back with what it does to its local tensors
        name = str(func).split(".")[1]
        if name in KINDS:
            size = max(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
            whole = size * (self.num_ranks if KINDS[name] == "gather" else 1)
            self.counts[KINDS[name]] += whole > MANY_ELEMENTS
        return func(*args, **(kwargs or {}))


def priced_and_run(
    model: LoadedModel, graph: ModelGraph, degree: int, sequence_parallel: bool
) -> tuple[Counter[str], Counter[str]]:
    """Collectives of one micro-batch's forward and backward: those in the price and those that run."""
    pins = Pins(tp=degree, micro_batch=2, sequence_parallel=sequence_parallel, recompute=Recompute.NONE)
    target = PricingTarget(graph, cluster_of(A100, degree), "bf16")
    problem = Problem.build(target, training_of(2, 64), pins)
    (choice,) = problem.space.layouts
    decision = decision_of(target, TensorSplit(degree, sequence_parallel))
    priced = Counter[str]()
    for kind in problem.table.units.kinds:
        for each in decision[kind].collectives:
            name = "gather" if each.kind is CollectiveKind.ALL_GATHER else "reduce"
            priced[name] += num_bytes(graph, each) / 2 > MANY_ELEMENTS
    plan = described(problem, Evaluator(problem.table, choice).evaluate((0,)))
    whole = plan.training.model_copy(update={"precision": Precision.FP32})
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    counter = _Counter(degree)
    with fake_world(degree), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")
        plan = plan.model_copy(update={"training": whole})
        parallel = parallelize(
            model.build().float(), {"input_ids": tokens}, model.training_loss, plan, build_mesh(plan, "cpu")
        )
        with counter:
            parallel.forward_backward({"input_ids": tokens, "labels": tokens})
    return priced, counter.counts


# Under sequence parallelism the gradient of GPT's positions is gathered in the price and summed in the run; where
# attention is not split, its gradient and its output are gathered, one more than priced in each of 3 blocks. Of torch's
# attention, which has one weight that is whole, DTensor reduces a partial gradient on each of the ways that it takes:
# two more than priced in each of 4 blocks, or as many gathers.
ENCODER = "tests/fixtures/encoder.py"
EXTRA = {
    ("gpt-tiny", True): {"gather": -1, "reduce": 1},
    ("hf gpt2", True): {"gather": 3, "reduce": 0},
    (ENCODER, False): {"gather": 0, "reduce": 8},
    (ENCODER, True): {"gather": 7, "reduce": 1},
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["TP", "TP and SP"])
@pytest.mark.parametrize(
    ("name", "degree"),
    # By 4, the two key-value heads of the Llama-like ones stay whole.
    [
        ("gpt-tiny", 2),
        ("llama-tiny", 2),
        ("llama-tiny", 4),
        ("moe-tiny", 2),
        (ENCODER, 2),
        ("hf gpt2", 2),
        ("hf llama", 2),
        ("hf qwen3", 4),
    ],
)
def test_the_collectives_that_are_priced_are_those_that_run(
    name: str, degree: int, sequence_parallel: bool, folder: Path
) -> None:
    model, graph = small_model(name, folder)
    priced, run = priced_and_run(model, graph, degree, sequence_parallel)
    assert sum(run.values()) > 10
    extra = EXTRA.get((name, sequence_parallel), {})
    assert {k: run[k] for k in ("gather", "reduce")} == {k: priced[k] + extra.get(k, 0) for k in ("gather", "reduce")}


def test_placements_never_lose_to_replication_by_more_than_the_split_weights_cost() -> None:
    """On fast links a block split eight ways must be much faster than the same block done whole by every rank."""
    target = PricingTarget(graph_of("llama3-8b", 2048), cluster_of(A100, 8), "bf16")
    problem = Problem.build(target, training_of(8, 2048), Pins(pp=1, cp=1, micro_batch=1))
    table = problem.table
    times = {}
    for choice in problem.space.layouts:
        if choice.recompute is None and not choice.sequence_parallel:
            parts = Evaluator(table, choice).evaluate((0,)).breakdown
            times[choice.mesh.tp] = (parts[Term.COMPUTE] + parts[Term.TENSOR]) / choice.num_microbatches
    assert times[8] < times[4] < times[2] < times[1]
