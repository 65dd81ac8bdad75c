"""What a plan asks of a model that the model does not have is refused by name, before anything is split."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import ModelError, PlanError
from planner.executor.requirements import buffers_unchanged, check_buffers, check_names
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


@pytest.mark.parametrize(("num_buffers", "passes"), [(0, 1), (1, 2)])
def test_a_second_pass_is_taken_only_where_there_are_buffers(num_buffers: int, passes: int) -> None:
    seen: list[torch.Size] = []
    model = nn.Sequential(nn.Embedding(16, 8), nn.BatchNorm1d(4, track_running_stats=False))
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    for number in range(num_buffers):
        model.register_buffer(f"table_{number}", torch.zeros(4))
    check_buffers(model, {"input": IDS["input_ids"]}, plan_of(MeshSection(dp_shard=2)))
    assert seen == [torch.Size((2, 4, 8))] * passes


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
