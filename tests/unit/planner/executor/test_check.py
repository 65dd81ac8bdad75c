"""A plan is run at full size on tensors without values: what fits is counted, what does not is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from costmodels.vocabulary.choices import Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm
from planner.api import find_plan
from planner.cli.check import allocated_bytes
from planner.executor import check
from planner.executor.build import loaded_model
from planner.executor.check import RankCheck, _check_rank
from planner.executor.largest_sizes import SELECTS_ALL
from planner.executor.sharded_parameters import ShardedParameters
from planner.layout.layout import Pins
from planner.models.loss import Batch, TrainingLoss
from planner.plan.plan_file import read_plan
from planner.request import Request

pytestmark = pytest.mark.usefixtures("traced_here")

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "plans" / "gpt-tiny-pp2-dp2.json"


class Another(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids))


def test_a_rank_takes_a_step_and_its_memory_is_counted() -> None:
    plan = read_plan(EXAMPLE)
    found = _check_rank(plan, loaded_model(plan), 1)
    assert found.problem is None
    assert found.allocated_bytes is not None
    held = 110_000 / 2 * 4 * 3  # about: a half of a stage's parameters, with both moments
    assert 2 * held < found.allocated_bytes < 20 * held


def test_what_does_not_fit_is_told_with_its_reason() -> None:
    plan = read_plan(EXAMPLE)
    found = _check_rank(plan, replace(loaded_model(plan), build=Another), 0)
    assert found.allocated_bytes is None
    assert found.problem is not None
    assert "layers.0" in found.problem  # the plan names modules that this model has not


def test_a_plan_of_another_number_of_parameters_is_told() -> None:
    """It was trained without a word."""
    plan = read_plan(EXAMPLE)
    model = plan.model.model_copy(update={"num_params": 7 * plan.model.num_params})
    found = _check_rank(plan.model_copy(update={"model": model}), loaded_model(plan), 0)
    assert found.problem is not None
    assert f"num_params is {model.num_params:,}" in found.problem


def cross_entropy(output: object, batch: Batch) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def test_a_loss_of_the_users_is_found_out_before_there_are_no_values() -> None:
    """Of every file with a loss_fn it was said that nobody knows how its parts add up: `planner run` trained them."""
    plan = read_plan(EXAMPLE)
    loaded = replace(loaded_model(plan), training_loss=TrainingLoss(cross_entropy))
    assert _check_rank(plan, loaded, 1).problem is None


def test_a_loss_whose_parts_do_not_add_up_is_told() -> None:
    plan = read_plan(EXAMPLE)
    squared = TrainingLoss(lambda output, batch: cross_entropy(output, batch).square())
    found = _check_rank(plan, replace(loaded_model(plan), training_loss=squared), 1)
    assert found.problem is not None
    assert "how the parts add up is not known" in found.problem


WIDE = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def build_model():
    return build_family(FamilyConfig(family="llama", layers=2, hidden=1024, heads=8, kv_heads=4, ffn=2816, vocab=8192,
                                     mlp="swiglu", seq_len=512))
"""
WITHIN = 0.03  # of the ledger


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of ``WIDE``, which is traced once for all plans of it."""
    path = tmp_path_factory.mktemp("wide") / "model.py"
    path.write_text(WIDE)
    return str(path)


@pytest.mark.parametrize(
    "pins",
    [
        *(Pins(zero=zero, pp=1, dp=4, recompute=Recompute.NONE) for zero in (1, 2, 3)),
        Pins(zero=3, pp=1, dp=4, recompute=Recompute.FULL),
        Pins(zero=1, pp=2, dp=2, recompute=Recompute.NONE, schedule=ScheduleName.ONE_F_ONE_B),
        Pins(zero=1, pp=1, cp=2, recompute=Recompute.SELECTIVE),
    ],
    ids=lambda pins: pins.describe().replace(", ", " "),
)
def test_tensors_take_what_the_ledger_says(pins: Pins, wide: str) -> None:
    pins = replace(pins, tp=1, cp=pins.cp or 1, dp_replicate=1, micro_batch=2)
    request = Request(wide, 4, "dgx-a100-80gb", global_batch_size=16, pins=pins, may_idle=False)
    plan = find_plan(request).plan
    found = _check_rank(plan, loaded_model(plan), 0)
    assert found.problem is None
    assert found.allocated_bytes == pytest.approx(allocated_bytes(plan, 0), rel=WITHIN)


@pytest.mark.parametrize(
    "pins",
    [
        Pins(dp=4, dp_replicate=4, pp=1),
        Pins(dp=2, dp_replicate=2, pp=2, schedule=ScheduleName.ONE_F_ONE_B),
    ],
    ids=lambda pins: pins.describe().replace(", ", " "),
)
def test_tensors_take_what_the_ledger_says_where_parameters_are_left_as_they_are(pins: Pins, wide: str) -> None:
    pins = replace(pins, zero=0, tp=1, cp=1, micro_batch=2, recompute=Recompute.NONE)
    request = Request(wide, 4, "dgx-a100-80gb", global_batch_size=16, pins=pins, may_idle=False,
                      precision=Precision.FP32)  # fmt: skip
    plan = find_plan(request).plan
    found = _check_rank(plan, loaded_model(plan), 0)
    assert found.problem is None
    assert found.allocated_bytes == pytest.approx(allocated_bytes(plan, 0), rel=WITHIN)


OF_ALL_KINDS = """
from planner.models.config import FamilyConfig
from planner.models.family import build_family

def tied():
    return build_family(FamilyConfig(family="gpt", layers=4, hidden=1024, heads=8, ffn=4096, vocab=16384, tied=True,
                                     seq_len=256))

def experts():
    return build_family(FamilyConfig(family="moe", layers=4, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=1024,
                                     mlp="swiglu", experts=32, top_k=2, expert_ffn=1024, seq_len=128))

def deep():
    return build_family(FamilyConfig(family="llama", layers=8, hidden=512, heads=8, kv_heads=4, ffn=1408, vocab=1024,
                                     mlp="swiglu", seq_len=256))
"""
IN_PARTS = Pins(tp=1, cp=1, dp_replicate=1, micro_batch=2, recompute=Recompute.FULL)


@pytest.mark.parametrize(
    ("model", "batch", "pins"),
    [
        # The weight that embedding and head share stays gathered; shards of gradients grow in the only micro-batch.
        ("tied", 8, replace(IN_PARTS, zero=3, pp=1, dp=4)),
        ("tied", 16, replace(IN_PARTS, zero=3, pp=1, dp=4)),
        # Gradients of experts are there while attention runs again; shards of experts are not those of the others.
        ("experts", 16, replace(IN_PARTS, zero=1, pp=2, dp=2, ep=2, schedule=ScheduleName.ONE_F_ONE_B)),
        # What stages have sent is theirs no more.
        ("deep", 64, replace(IN_PARTS, zero=1, pp=2, dp=2, micro_batch=8, schedule=ScheduleName.INTERLEAVED_1F1B,
                              virtual_stages=2)),
    ],
    ids=["tied weight, one micro-batch", "tied weight", "experts", "sent"],
)  # fmt: skip
def test_tensors_take_what_the_ledger_says_of_every_kind_of_model(
    model: str, batch: int, pins: Pins, tmp_path: Path
) -> None:
    path = tmp_path / "model.py"
    path.write_text(OF_ALL_KINDS)
    request = Request(f"{path}:{model}", 4, "dgx-a100-80gb", global_batch_size=batch, pins=pins, may_idle=False,
                      seq_len=128 if model == "experts" else 256)  # fmt: skip
    plan = find_plan(request).plan
    found, predicted = _check_rank(plan, loaded_model(plan), 0), allocated_bytes(plan, 0)
    assert found.problem is None
    assert plan.prediction is not None
    assert predicted is not None
    workspace = plan.prediction.memory_breakdown_bytes[0][MemoryTerm.WORKSPACE]  # of cuBLAS, on real devices alone
    assert found.allocated_bytes == pytest.approx(predicted - workspace, rel=0.01)


def test_a_pipeline_holds_no_more_for_more_micro_batches() -> None:
    plan = read_plan(EXAMPLE)
    counted: list[int | None] = []
    for num_microbatches in (4, 12):
        pipeline = plan.pipeline.model_copy(update={"num_microbatches": num_microbatches})
        batch = num_microbatches * plan.pipeline.micro_batch_size * plan.mesh.shape().dp
        training = plan.training.model_copy(update={"global_batch_size": batch})
        longer = plan.model_copy(update={"pipeline": pipeline, "training": training})
        counted.append(_check_rank(longer, loaded_model(longer), 1).allocated_bytes)
    assert counted[0] is not None
    assert counted[1] is not None
    sequence = plan.training.seq_len * 8  # bytes of one sequence of token ids, which a step holds with their labels
    assert counted[1] - counted[0] <= 8 * plan.pipeline.micro_batch_size * 2 * sequence * 1.1


@pytest.mark.parametrize(
    "pins",
    [
        Pins(pp=1, dp=4, zero=3, micro_batch=1),
        Pins(pp=2, zero=2, schedule=ScheduleName.ONE_F_ONE_B, micro_batch=1),
        Pins(pp=2, zero=1, schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=2, micro_batch=1),
        Pins(pp=2, zero=1, schedule=ScheduleName.INTERLEAVED_ZERO_BUBBLE, micro_batch=1),
        Pins(pp=2, zero=1, schedule=ScheduleName.ZBV_ZERO_BUBBLE, micro_batch=1),
        Pins(pp=2, zero=1, schedule=ScheduleName.DUAL_PIPE_V, micro_batch=1),
    ],
    ids=lambda pins: pins.describe().replace(", ", " "),
)
def test_a_long_step_holds_what_its_first_micro_batches_do(pins: Pins, monkeypatch: pytest.MonkeyPatch) -> None:
    """13 B parameters on 16 GPUs took 216 s, of which all but a few micro-batches repeated themselves."""
    pins = replace(pins, tp=1, cp=1, dp_replicate=1)
    plan = find_plan(Request("llama-tiny", 4, "dgx-a100-80gb", global_batch_size=96, pins=pins, may_idle=False)).plan
    rows = range(plan.mesh.pp)
    assert check.shorter(plan).pipeline.num_microbatches < plan.pipeline.num_microbatches
    found = [_check_rank(plan, loaded_model(plan), row).allocated_bytes for row in rows]
    monkeypatch.setattr(check, "shorter", lambda plan: plan)
    whole = [_check_rank(plan, loaded_model(plan), row).allocated_bytes for row in rows]
    for short, long in zip(found, whole, strict=True):
        assert short is not None
        assert long is not None
        assert abs(long - short) <= 64 * plan.pipeline.num_microbatches  # the loss of each


def test_stages_of_a_rank_have_one_buffer_of_gradients_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.py"
    model.write_text(WIDE.replace("layers=2", "layers=4").replace("vocab=8192", "vocab=256"))
    pins = Pins(zero=2, pp=2, dp=2, tp=1, cp=1, dp_replicate=1, micro_batch=1, recompute=Recompute.NONE,
                schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=2)  # fmt: skip
    request = Request(str(model), 4, "dgx-a100-80gb", global_batch_size=8, pins=pins, may_idle=False)
    plan = find_plan(request).plan
    together = _check_rank(plan, loaded_model(plan), 0).allocated_bytes
    monkeypatch.setattr(ShardedParameters, "share_reductions", lambda data, reductions: None)
    apart = _check_rank(plan, loaded_model(plan), 0).allocated_bytes
    assert together is not None
    assert apart is not None
    block = 1024 * (1024 + 2 * 512 + 1024 + 3 * 2816) + 2 * 1024  # parameters
    assert apart - together > block  # gradients are reduced in float32; the peak is another moment than it was


def test_every_share_of_a_batch_takes_what_its_ledger_says(wide: str) -> None:
    pins = Pins(zero=2, pp=1, tp=1, cp=1, dp_replicate=1, recompute=Recompute.NONE)
    hardware = "dgx-a100-80gb:2,dgx-h100-80gb:2"
    plan = find_plan(Request(wide, 4, hardware, global_batch_size=24, pins=pins, may_idle=False)).plan
    sizes = [share.micro_batch_size for share in plan.pipeline.batch_shares]
    assert sizes[0] < sizes[1]
    assert plan.prediction is not None
    for row, ledger in enumerate(plan.prediction.memory_breakdown_bytes):
        predicted = (allocated_bytes(plan, row) or 0) - ledger[MemoryTerm.WORKSPACE]  # of cuBLAS, on real devices alone
        found = _check_rank(plan, loaded_model(plan), row)
        assert found.problem is None
        assert found.allocated_bytes == pytest.approx(predicted, rel=WITHIN)


MASKED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 256)
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        x = x + self.down(torch.relu(self.up(x)))
        chosen = {chosen}
        return self.head(x + chosen.sum(0))

build_model = Model
"""


def checked(chosen: str, tp: int, folder: Path) -> RankCheck:
    """A model that picks ``chosen`` of its activations."""
    file = folder / "model.py"
    file.write_text(MASKED.format(chosen=chosen))
    pins = Pins(tp=tp, zero=0)
    plan = find_plan(Request(str(file), tp, "cpu-gloo", 16, 2, Precision.FP32, pins=pins)).plan
    return _check_rank(plan, loaded_model(plan), 0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chosen", ["x[x.sum(-1) > 0]", "x.masked_select(x > 0)", "x[torch.where(x[..., 0] > 0)]"])
def test_a_mask_selects_the_most_that_it_can(chosen: str, tp: int, tmp_path: Path) -> None:
    """Whatever masks selected could not be checked, and `planner run` trained it."""
    found, whole = checked(chosen, tp, tmp_path), checked("x.flatten(0, 1)", tp, tmp_path)
    assert (found.problem, whole.problem, whole.notes) == (None, None, ())
    assert found.notes == (SELECTS_ALL,)
    assert found.allocated_bytes is not None
    assert whole.allocated_bytes is not None
    assert found.allocated_bytes >= whole.allocated_bytes


def test_what_depends_on_other_values_is_told(tmp_path: Path) -> None:
    found = checked("x.new_zeros(len(torch.bincount(input_ids.flatten())), 64)", 1, tmp_path)
    assert found.problem is not None
    assert "bincount.default depends on values" in found.problem
    assert "planner parity" in found.problem


UNNORMED = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def build_model():
    return nn.Sequential(nn.Embedding(256, 64), Block(), Block(), nn.Linear(64, 256))
"""


def test_a_linear_layer_takes_split_sequences(tmp_path: Path) -> None:
    """It makes rows of them, split within each sequence; torch finds a rank's by tensors, which had no values."""
    file = tmp_path / "model.py"
    file.write_text(UNNORMED)
    pins = Pins(tp=2, zero=0, sequence_parallel=True)
    plan = find_plan(Request(str(file), 2, "cpu-gloo", 16, 2, Precision.FP32, pins=pins)).plan
    assert _check_rank(plan, loaded_model(plan), 0).problem is None


def test_a_factory_may_give_its_model_another_dtype(tmp_path: Path) -> None:
    """Torch changes parameters in place, which those without values do not let it; tied ones stay tied."""
    tie = "\n    model[3].weight = model[0].weight\n    return model{}\n"
    found: list[RankCheck] = []
    for name, converted in (("plain", ""), ("converted", ".to(torch.bfloat16).double()")):
        (file := tmp_path / f"{name}.py").write_text(
            "import torch\n"
            + UNNORMED.replace("return nn.Sequential", "model = nn.Sequential").rstrip()
            + tie.format(converted)
        )
        plan = find_plan(Request(str(file), 1, "cpu-gloo", 16, 2, Precision.FP32)).plan
        found.append(_check_rank(plan, loaded_model(plan), 0))
    assert [each.problem for each in found] == [None, None]
    assert found[0].allocated_bytes == found[1].allocated_bytes


SHARED_OUT = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.place, self.qkv, self.head = (
            nn.Embedding(256, 16), nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 256))

    def forward(self, input_ids):
        size = input_ids.shape[1]
        x = self.embedding(input_ids)
        x = x + PLACES
        q, k, v = self.qkv(x).view(*x.shape[:2], 2, 24).transpose(1, 2).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

build_model = Model
"""


@pytest.mark.parametrize(
    ("places", "problem"),
    [
        ("self.place(torch.arange(size, device=x.device))", None),
        ("self.place.weight[:size]", "ModelError: under context"),
    ],
)
def test_sequences_that_ranks_cannot_share_are_found(places: str, problem: str | None, tmp_path: Path) -> None:
    """`planner run` refused what was said to be runnable."""
    file = tmp_path / "model.py"
    file.write_text(SHARED_OUT.replace("PLACES", places))
    pins = Pins(tp=1, pp=1, cp=2, dp=1, micro_batch=1)
    plan = find_plan(Request(str(file), 2, "cpu-gloo", 16, 2, Precision.FP32, pins=pins)).plan
    found = _check_rank(plan, loaded_model(plan), 0)
    assert (found.problem or "").startswith(problem or "")
    assert (found.problem is None, found.notes) == (problem is None, ())


def test_a_model_that_is_too_large_to_be_tried_is_told_of(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MOST_TRIED", 1000)
    pins = Pins(zero=1, pp=1, cp=2, tp=1, dp_replicate=1, micro_batch=2)
    plan = find_plan(Request(wide, 4, "dgx-a100-80gb", global_batch_size=16, pins=pins, may_idle=False)).plan
    (note,) = _check_rank(plan, loaded_model(plan), 0).notes
    assert note.startswith(
        "whether the model reads positions as context parallelism needs it was not tried, for it has "
    )
