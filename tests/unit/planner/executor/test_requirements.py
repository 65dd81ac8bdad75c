"""What a plan asks of a model that the model does not have is refused by name, before anything is split."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError, ModelError, PlanError
from planner.executor import in_script
from planner.executor.batch_share import check_share
from planner.executor.build import in_training
from planner.executor.glue import REPARAMETRIZES
from planner.executor.gradient_hooks import hooked_parameters
from planner.executor.parallelize import _shared_states
from planner.executor.recorded_build import recorded_model
from planner.executor.recording import UnrecordableError
from planner.executor.requirements import (
    buffers_unchanged,
    check_buffers,
    check_labels,
    check_names,
    check_parameters,
    check_parameters_kept,
    check_whole_sequences,
    notes_on_parts,
    statistics_note,
)
from planner.models.inputs import by_name
from planner.plan.schema import (
    MeshSection,
    ModelSection,
    PipelineSection,
    PlacementSection,
    Plan,
    RecomputeRule,
    StageSection,
    TrainingSection,
)

IDS = {"input_ids": torch.zeros(2, 4, dtype=torch.int64)}


class Toy(nn.Module):
    """What it does with its buffers is up to ``kind``."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "batch norm" else nn.LayerNorm(8)
        self.register_buffer("table", torch.zeros(4), persistent=False)
        self.register_buffer("average", torch.zeros(()))
        self.table: torch.Tensor
        self.average: torch.Tensor
        self.is_ready = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        match self.kind:
            case "cache" if not self.is_ready:
                self.table, self.is_ready = torch.arange(4.0, device=x.device), True
            case "in place":
                self.average.mul_(0.9).add_(x.detach().mean())
            case "by value":
                self.average = self.average * 0.9 + x.detach().mean()
            case "where values are needed":
                if float(x.detach().mean()) < 100:
                    self.average += 1
            case "uncounted":
                self.average.data += 1
            case _:
                pass
        return self.norm(x.flatten(0, 1))


def plan_of(mesh: MeshSection, units: tuple[str, ...] = (), rules: tuple[RecomputeRule, ...] = ()) -> Plan:
    dp = mesh.shape().dp
    return Plan(
        model=ModelSection(source="toy", digest="", num_params=0),
        hardware="cpu-gloo",
        num_devices=mesh.shape().world_size,
        training=TrainingSection(
            global_batch_size=2 * dp, seq_len=4, precision=Precision.FP32, optimizer=Optimizer.SGD
        ),
        mesh=mesh,
        zero_stage=1,
        pipeline=PipelineSection(
            schedule=ScheduleName.ONE_F_ONE_B,
            num_microbatches=1,
            micro_batch_size=2,
            stages=(StageSection(index=0, pp_rank=0, modules=("embedding", "norm")),),
        ),
        placements=PlacementSection(sharded_units=units),
        recompute=rules,
    )


class WithLabels(nn.Module):
    """Its forward cannot do without them."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return input_ids + labels


class MayHaveLabels(nn.Module):
    """Its forward can."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return input_ids if labels is None else input_ids + labels


def test_labels_of_forward_are_refused_where_ranks_share_sequences() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    check_whole_sequences({"input_ids": tokens})
    with pytest.raises(PlanError, match="forward takes labels: under context") as error:
        check_whole_sequences({"input_ids": tokens, "labels": tokens})
    assert "--cp 1" in error.value.hint


def test_a_forward_that_needs_labels_is_refused() -> None:
    """It ended in a TypeError: the data's labels go to the loss function."""
    with pytest.raises(ModelError, match="needs labels: it is given input_ids alone"):
        check_labels(WithLabels(), IDS)
    both = IDS["input_ids"], IDS["input_ids"]
    check_labels(WithLabels(), dict(zip(("input_ids", "labels"), both, strict=True)))  # as a script may give them
    check_labels(WithLabels(), by_name(both))  # in order
    check_labels(MayHaveLabels(), IDS)


def test_unknown_modules_are_refused_by_name() -> None:
    rule = RecomputeRule(mode=Recompute.FULL, modules=("layers.7", "norm"))
    with pytest.raises(PlanError) as error:
        check_names(Toy(), plan_of(MeshSection(), ("embeding", "norm"), (rule,)))
    assert "placements.sharded_units names 'embeding' (nearest: 'embedding')" in error.value.message
    assert "recompute names 'layers.7'" in error.value.message
    assert "'norm'" not in error.value.message


@pytest.mark.parametrize(
    ("kind", "buffer"), [("batch norm", "norm.num_batches_tracked"), ("in place", "average"), ("by value", "average")]
)
@pytest.mark.parametrize("mesh", [MeshSection(dp_shard=2), MeshSection(tp=2)], ids=["dp", "tp"])
def test_buffers_that_each_rank_would_change_are_refused(kind: str, buffer: str, mesh: MeshSection) -> None:
    with pytest.raises(ModelError, match="changes its buffers") as error:
        check_buffers(Toy(kind), IDS, plan_of(mesh))
    assert buffer in error.value.message


def test_buffers_that_a_repeated_pass_would_change_again_are_refused() -> None:
    rule = RecomputeRule(mode=Recompute.FULL, modules=("norm",))
    with pytest.raises(ModelError, match="under recomputation"):
        check_buffers(Toy("batch norm"), IDS, plan_of(MeshSection(), rules=(rule,)))


def test_what_is_made_once_or_by_one_process_is_accepted() -> None:
    check_buffers(Toy("cache"), IDS, plan_of(MeshSection(dp_shard=2)))
    check_buffers(Toy(), IDS, plan_of(MeshSection(dp_shard=2)))
    check_buffers(Toy("batch norm"), IDS, plan_of(MeshSection()))


@pytest.mark.parametrize(
    ("kind", "num_parts", "said"),
    [
        ("in place", 4, "changes its buffers average: a step runs it 4 times, on 2 samples each, and one process that "
         "takes all 8 at once runs it once"),
        ("batch norm", 4, "norm: batch normalisation sees 2 samples at a time"),
        ("in place", 1, None), ("cache", 4, None),
    ],
)  # fmt: skip
def test_buffers_that_each_micro_batch_changes_are_told_of(kind: str, num_parts: int, said: str | None) -> None:
    """A spectral norm in a pipeline took a step of its power iteration for each micro-batch, and nobody said so."""
    notes = notes_on_parts(Toy(kind), IDS, plan_of(MeshSection()), num_parts)
    assert [said in note for note in notes if said] == [True] * (said is not None)
    assert len(notes) == (said is not None)


@pytest.mark.parametrize(("num_buffers", "passes"), [(0, 1), (1, 2)])
def test_a_second_pass_is_taken_only_where_there_are_buffers(num_buffers: int, passes: int) -> None:
    seen: list[torch.Size] = []
    model = nn.Sequential(nn.Embedding(16, 8), nn.BatchNorm1d(4, track_running_stats=False))
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for number in range(num_buffers):
        model.register_buffer(f"table_{number}", torch.zeros(4))
    check_buffers(model, {"input": IDS["input_ids"]}, plan_of(MeshSection(dp_shard=2)))
    assert seen == [torch.Size((2, 4, 8))] * passes


def test_batch_norm_without_buffers_is_told_of_where_it_sees_parts() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4))
    assert "1: batch normalisation sees 2 samples at a time, not the 8" in str(statistics_note(model, 4, 2))
    assert statistics_note(model, 1, 8) is None
    assert statistics_note(model.eval(), 4, 2) is None


def test_embeddings_that_count_their_tokens_are_told_of_where_they_see_parts() -> None:
    """Their gradients were those of parts, and nobody said so."""
    model = nn.Sequential(nn.Embedding(16, 8), nn.Embedding(16, 8, scale_grad_by_freq=True))
    assert "1: scale_grad_by_freq sees 2 samples at a time, not the 8" in str(statistics_note(model, 4, 2))
    assert statistics_note(model, 1, 8) is None


@pytest.mark.parametrize("kind", ["where values are needed", "uncounted"])
def test_what_shows_only_with_values_is_found_in_a_step(kind: str) -> None:
    model, plan = Toy(kind), plan_of(MeshSection(dp_shard=2))
    check_buffers(model, IDS, plan)
    with pytest.raises(ModelError, match="changes its buffers average"), buffers_unchanged([model], plan, enabled=True):
        model(**IDS)


def test_a_step_that_changes_no_buffer_is_accepted() -> None:
    model, plan = Toy(), plan_of(MeshSection(dp_shard=2))
    model.average = torch.tensor(float("nan"))
    with buffers_unchanged([model], plan, enabled=True):
        model(**IDS)


def whole(mesh: MeshSection) -> Plan:
    """A plan that leaves parameters as they are, but for its mesh."""
    return plan_of(mesh).model_copy(update={"zero_stage": 0})


def test_hooks_on_gradients_need_whole_parameters() -> None:
    """They were lost without a word where parameters were made anew or divided."""
    model = Toy()
    model.embedding.weight.register_hook(lambda gradient: gradient * 0)
    assert hooked_parameters(model) == ["embedding.weight"]
    check_parameters(model, whole(MeshSection(dp_replicate=2)))
    for plan in (plan_of(MeshSection(dp_shard=2)), whole(MeshSection(tp=2))):
        with pytest.raises(PlanError, match=r"hooks on the gradients of embedding\.weight"):
            check_parameters(model, plan)
    with pytest.raises(UnrecordableError, match="hooks the gradients"):
        recorded_model(hooked)


def hooked() -> nn.Module:
    model = Toy()
    model.embedding.weight.register_hook(lambda gradient: gradient * 0)
    return model


def test_an_embedding_that_cuts_its_own_weights_needs_one_rank() -> None:
    model = nn.Sequential(nn.Embedding(16, 8, max_norm=1.0))
    check_parameters(model, whole(MeshSection()))
    check_parameters(nn.Sequential(nn.Embedding(16, 8)), whole(MeshSection(dp_replicate=2)))
    for plan in (plan_of(MeshSection()), whole(MeshSection(dp_replicate=2)), whole(MeshSection(tp=2))):
        with pytest.raises(PlanError, match="0: an embedding with max_norm"):
            check_parameters(model, plan)


def test_a_layer_of_one_s_own_may_call_itself_sparse() -> None:
    layer = nn.Linear(2, 2)
    setattr(layer, "sparse", True)  # noqa: B010 - a name that a type checker does not know of it
    check_parameters(nn.Sequential(layer), whole(MeshSection()))


@pytest.mark.parametrize("layer", [nn.Embedding(16, 8, sparse=True), nn.EmbeddingBag(16, 8, sparse=True, mode="sum")])
def test_embeddings_with_sparse_gradients_are_refused(layer: nn.Module) -> None:
    """The first step ended in an error of torch's dispatcher."""
    with pytest.raises(PlanError, match="0: an embedding with sparse=True"):
        check_parameters(nn.Sequential(layer), whole(MeshSection()))


class Force(nn.Module):
    """Energy, and the force that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.layer(positions.square()).tanh()
        return energy, torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def test_a_backward_pass_inside_the_forward_needs_whole_parameters() -> None:
    """FSDP's hooks freed them in it: an error about storage."""
    inputs, plan = {"positions": torch.zeros(2, 4)}, whole(MeshSection(dp_replicate=2))
    _shared_states(Force(), inputs, plan, ())
    with pytest.raises(PlanError, match="differentiates what it computes: FSDP frees parameters"):
        _shared_states(Force(), inputs, plan_of(MeshSection(dp_shard=2)), ())


@pytest.mark.parametrize(
    ("mesh", "rules", "why"),
    [
        (MeshSection(dp_replicate=2), (), None),
        (MeshSection(dp_shard=2), (), "FSDP gathers a module's own"),
        (MeshSection(), (RecomputeRule(mode=Recompute.FULL, modules=("norm",)),), "recomputation repeats these calls"),
    ],
)
def test_modules_with_the_parameters_of_others_are_refused(
    mesh: MeshSection, rules: tuple[RecomputeRule, ...], why: str | None
) -> None:
    """FSDP, and a repeated pass, ran torch.func.functional_call with the module's own, without a word."""
    plan = plan_of(mesh, rules=rules).model_copy(update={"zero_stage": int(mesh.dp_shard > 1)})
    with contextlib.nullcontext() if why is None else pytest.raises(PlanError, match=f"than their own.*: {why}"):
        check_parameters_kept((REPARAMETRIZES,), plan)


def test_parts_that_are_put_into_evaluation_mode_stay_there() -> None:
    model = Toy()
    model.norm.eval()
    assert (in_training(model).training, model.norm.training) == (True, False)
    loaded = Toy().eval()  # as libraries hand out what they have loaded
    in_training(loaded)
    assert loaded.norm.training


def check_part(part: torch.Tensor, pp: int = 1, cp: int = 1) -> None:
    """As a part of four samples of eight tokens."""
    pipeline = SimpleNamespace(batch_shares=(), micro_batch_size=2, num_microbatches=2)
    plan: Any = SimpleNamespace(pipeline=pipeline, mesh=SimpleNamespace(pp=pp, cp=cp))
    mesh: Any = None
    check_share({"input_ids": part, "labels": part}, {"input_ids": torch.Size([8])}, plan, mesh)


@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_a_part_of_another_size_is_refused(size: int) -> None:
    expected = pytest.raises(InputError, match="2 micro-batches of 2 = 4") if size != 4 else contextlib.nullcontext()
    with expected:
        check_part(torch.zeros(size, 8))


@pytest.mark.parametrize(("pp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_samples_of_another_shape_are_refused_where_sizes_are_fixed(pp: int, cp: int) -> None:
    """Half a sequence was taken for a rank's share of one, and torch's pipelines gave an error of their own."""
    expected = contextlib.nullcontext()
    if pp * cp > 1:
        expected = pytest.raises(InputError, match=r"input_ids are \(4,\), and the model was split for \(8,\)")
    with expected:
        check_part(torch.zeros(4, 4), pp, cp)


def test_other_values_on_another_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank trained its own replica, with its own seed, to the end."""
    others = [repr([(float(t.sum()), float(t.flatten()[0])) for t in Toy().state_dict().values()])]

    def gather(found: list[object], own: object) -> None:
        found[:] = [own, *others]

    monkeypatch.setattr(in_script.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(in_script.dist, "all_gather_object", gather)
    with pytest.raises(InputError, match="other values on rank 1"):
        in_script._check_equal(Toy())
    monkeypatch.setattr(
        in_script.dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), [own, own])
    )
    in_script._check_equal(Toy())


def test_a_script_s_model_in_16_bits_is_refused() -> None:
    """It was updated in 16 bits without a word, and a pipeline's second stage ended in an error of torch's."""
    in_script._check_dtypes(Toy(), plan_of(MeshSection()))
    with pytest.raises(ModelError, match="is bfloat16: parameters") as error:
        in_script._check_dtypes(Toy().bfloat16(), plan_of(MeshSection()))
    assert "model.float()" in (error.value.hint or "")


class Filter(nn.Module):
    """With complex weights, as of a Fourier neural operator."""

    def __init__(self, *values: complex) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))


def test_complex_parameters_need_whole_ones() -> None:
    """FSDP ended in an assertion, or cast them to real numbers."""
    check_parameters(Filter(1j), whole(MeshSection(dp_replicate=2)))
    for plan in (plan_of(MeshSection(dp_shard=2)), plan_of(MeshSection())):
        with pytest.raises(PlanError, match="complex parameters weight: FSDP"):
            check_parameters(Filter(1j), plan)


def test_complex_values_of_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """To sum them up as real numbers was an error."""
    seen: list[object] = []

    def gather(found: list[object], own: object) -> None:
        seen.append(own)
        found[:] = [seen[0], own]

    monkeypatch.setattr(in_script.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(in_script.dist, "all_gather_object", gather)
    in_script._check_equal(Filter(1, 2 + 1j))
    with pytest.raises(InputError, match="other values on rank 1"):
        in_script._check_equal(Filter(1, 2 + 3j))
