"""A loss that looks into the model is refused where what it reads is not there, or another number than of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.errors import ModelError
from planner.executor.loss_beside import check_beside
from planner.executor.loss_probe import recognised
from planner.models.inputs import Batch
from planner.models.loss import NEXT_TOKEN, Beside, Reduction, TrainingLoss
from planner.plan.schema import MeshSection, Plan
from tests.unit.planner.executor.test_requirements import plan_of

SEQ_LEN = 8


class Balanced(nn.Module):
    """Leaves how even its choices were in an attribute; ``is_set``: it is there before the first call, too."""

    def __init__(self, *, is_set: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.kept: list[torch.Tensor] = []
        if is_set:
            self.balance: float | torch.Tensor = 0.0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        self.balance = x.softmax(-1).mean((0, 1)).square().sum()
        self.kept = [x]  # which no loss reads
        return self.head(x)


Made = Callable[[Balanced], Callable[[object, Batch], torch.Tensor]]


def plain(_: Balanced) -> Callable[[object, Batch], torch.Tensor]:
    def loss(output: object, batch: Batch) -> torch.Tensor:
        assert isinstance(output, torch.Tensor)
        assert isinstance(batch, dict)
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    return loss


def balanced(module: Balanced) -> Callable[[object, Batch], torch.Tensor]:
    return lambda output, batch: plain(module)(output, batch) + module.balance


def penalised(module: Balanced) -> Callable[[object, Batch], torch.Tensor]:
    return lambda output, batch: plain(module)(output, batch) + module.head.weight.square().sum()


def tempered(module: Balanced) -> Callable[[object, Batch], torch.Tensor]:
    scale = nn.Parameter(torch.ones(()))
    return lambda output, batch: plain(module)(output, batch) * scale


def tokens(batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.int64)}


def found(made: Made, *, is_set: bool = True, reduction: Reduction = Reduction.UNKNOWN) -> TrainingLoss:
    module = Balanced(is_set=is_set)
    return recognised(TrainingLoss(made(module), reduction), module, tokens, SEQ_LEN)


@pytest.mark.parametrize("reduction", [Reduction.UNKNOWN, Reduction.SUM])  # found out, and said
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (plain, Beside()),
        (balanced, Beside(left=("balance",))),
        (penalised, Beside(parameters=("head.weight",))),
        (tempered, Beside(num_own=1)),
    ],
    ids=["nothing", "an attribute", "a parameter", "a parameter of its own"],
)
def test_what_a_loss_reads_besides_its_arguments_is_found(made: Made, expected: Beside, reduction: Reduction) -> None:
    assert found(made, reduction=reduction).beside == expected


def test_a_loss_that_draws_reads_nothing() -> None:
    """Every value of it was another, so that all that forward leaves was said to be read."""

    def noisy(module: Balanced) -> Callable[[object, Batch], torch.Tensor]:
        return lambda output, batch: plain(module)(output, batch) * torch.rand(())

    assert found(noisy).beside == Beside()


def test_an_attribute_that_is_there_only_after_a_pass_is_found() -> None:
    assert found(balanced, is_set=False).beside == Beside(left=("balance",))


def test_the_model_is_left_as_it_was() -> None:
    module = Balanced(is_set=True)
    recognised(TrainingLoss(balanced(module)), module, tokens, SEQ_LEN)
    assert module.balance == 0.0
    assert module.kept == []


def test_the_default_loss_is_not_tried() -> None:
    assert recognised(NEXT_TOKEN, nn.Linear(1, 1), tokens, SEQ_LEN) is NEXT_TOKEN


ALONE, PP2, DP2 = plan_of(MeshSection()), plan_of(MeshSection(pp=2)), plan_of(MeshSection(dp_shard=2))
ZERO3 = DP2.model_copy(update={"zero_stage": 3})


@pytest.mark.parametrize(
    ("made", "plan", "words"),
    [
        (plain, PP2, ""),
        (balanced, PP2, "balance: under a pipeline ranks have that of their own stages alone"),
        (balanced, DP2, "balance: of each of the 2 parts of a step it is another number"),
        (balanced, ALONE, ""),
        (penalised, PP2, "parameters of the model, head.weight, and under a pipeline no rank has all"),
        (penalised, ZERO3, "parameters of the model, head.weight, and under ZeRO 3 no rank has all"),
        (penalised, DP2, ""),
        (tempered, DP2, "1 trained parameters that are none of the model's: under dp=2 nobody averages"),
        (tempered, ALONE, ""),
    ],
)
def test_it_is_refused_where_it_would_be_lost(made: Made, plan: Plan, words: str) -> None:
    """Under a pipeline the penalty and the balance had no gradients on the stages before the last, without a word."""
    if not words:
        check_beside(found(made), plan)
        return
    with pytest.raises(ModelError, match=words):
        check_beside(found(made), plan)
