"""Where numbers that are not finite came from: micro-batches, samples, modules and gradients of one rank."""

from collections.abc import Generator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import InputError
from planner.executor.mesh import build_mesh
from planner.executor.not_finite import ValueWatch, where_not_finite
from planner.executor.options import RunOptions
from planner.executor.parallelize import ParallelModel, parallelize
from planner.models.loss import NEXT_TOKEN
from planner.plan.schema import MeshSection, PlacementSection
from tests.distributed.cases import GLOBAL_BATCH_SIZE, Case
from tests.distributed.toy_models import MODELS, SEQ_LEN

PLAN = (
    Case("gpt", MeshSection(), micro_batch_size=4)
    .plan()
    .model_copy(update={"num_devices": 1, "placements": PlacementSection()})
)
SAMPLES = range(100, 100 + GLOBAL_BATCH_SIZE)


class Ruin(nn.Module):
    """Returns no numbers of a batch in which somebody says 7 first; minus infinity alone is none of those."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = torch.zeros(()).masked_fill(torch.tensor(data=True), -torch.inf)
        return torch.where((x == 7).any(), torch.log(-torch.ones(())), masked.exp()) + torch.zeros(())


class OnFirstToken(nn.Module):
    """A model with a ruin beside it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.ruin = model, Ruin()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids) + self.ruin(input_ids[:, 0].float())


@pytest.fixture(autouse=True)
def one_rank() -> Generator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def taken(model: nn.Module, watch: ValueWatch, ruined: tuple[int, ...]) -> ParallelModel:
    """``model`` after a step of four micro-batches of four samples, of which some are ``ruined``."""
    batch = {name: torch.ones(GLOBAL_BATCH_SIZE, SEQ_LEN, dtype=torch.int64) for name in ("input_ids", "labels")}
    part = parallelize(model, {"input_ids": batch["input_ids"][:4]}, NEXT_TOKEN, PLAN, build_mesh(PLAN, "cpu"))
    batch["input_ids"][list(ruined), 0] = 7
    with watch.over(part.roots):
        part.forward_backward(batch)
    return part


@pytest.mark.parametrize(("is_on", "way_out"), [(True, ""), (False, "--find-nan names the module")])
def test_the_first_micro_batch_and_its_samples_are_named(is_on: bool, way_out: str) -> None:
    watch = ValueWatch(is_on)
    part = taken(OnFirstToken(MODELS["gpt"].build()), watch, ruined=(9, 13))
    text, hint = where_not_finite(part, build_mesh(PLAN, "cpu"), SAMPLES, watch)
    module = "; the first number that is not finite was in ruin, micro-batch 3 on rank 0" * is_on
    assert text == (
        f"it is so in micro-batch 3, 4 of 4 on rank 0, which has sample 108, 109, 110 and 1 more of the data{module}"
    )
    assert hint == way_out
    assert not [hooks for module in part.roots[0].modules() for hooks in module._forward_hooks.values()]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("is_clipped", [False, True])
def test_a_gradient_that_is_none_is_named(value: float, *, is_clipped: bool) -> None:
    """The loss is finite: behind the module that was at fault gradients are as well. Clipped, none was finite."""
    watch = ValueWatch(is_on=False)
    part = taken(MODELS["gpt"].build(), watch, ruined=())
    names = [fqn for fqn, _ in part.roots[0].named_parameters()]
    for parameter in part.parameters()[:3]:
        assert parameter.grad is not None
        parameter.grad[0] = value
    if is_clipped:
        part.clip_gradients(1.0)
    text, _ = where_not_finite(part, build_mesh(PLAN, "cpu"), SAMPLES, watch)
    assert text == f"of {len(names)} gradients 3 are not finite, the last of them that of {names[2]}"


def test_modules_that_are_compiled_cannot_be_looked_at() -> None:
    RunOptions(finds_nan=True).check_watch()
    with pytest.raises(InputError, match="--find-nan looks at modules, and --compile"):
        RunOptions(finds_nan=True, is_compiled=True).check_watch()
