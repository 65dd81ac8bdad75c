"""Halves of a made-up batch that differ in every input, from rows that are alike: losses that do not add up show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.errors import InputError
from planner.executor.loss_probe import recognised
from planner.executor.unlike_inputs import unlike_halves
from planner.models.loss import Reduction, TrainingLoss

WIDTH, CLASSES, LENGTH = 6, 5, 12
Batch = dict[str, torch.Tensor]
Loss = Callable[[torch.Tensor, Batch], torch.Tensor]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def given(mask: torch.Tensor) -> Batch:
    """A micro-batch of one sample, whose rows a trial repeats."""
    generator = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(1, LENGTH, WIDTH, generator=generator),
        "labels": torch.randint(0, CLASSES, (1, LENGTH), generator=generator),
        "mask": mask[None],
        "target": torch.rand(1, LENGTH, CLASSES, generator=generator),
        "cls": torch.randint(0, CLASSES, (1,), generator=generator),
        "weight": torch.ones(1),
    }


def find(function: Loss, batch: Batch) -> TrainingLoss:
    def repeated(batch_size: int, seq_len: int) -> Batch:
        return {name: tensor[torch.arange(batch_size) % len(tensor)] for name, tensor in batch.items()}

    return recognised(TrainingLoss(function), Tagger(), repeated, 1)  # pyright: ignore[reportArgumentType]


def each(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")


def masked_mean(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    kept = batch["mask"].bool()
    return each(output, batch)[kept].sum() / kept.sum()


SOME = torch.arange(LENGTH) < 7
MASKS = {
    "float": SOME.float(),
    "float, all kept": torch.ones(LENGTH),
    "float, none kept": torch.zeros(LENGTH),
    "bool": SOME,
    "bool, all kept": torch.ones(LENGTH, dtype=torch.bool),
    "integers": SOME.long(),
    "integers, all kept": torch.ones(LENGTH, dtype=torch.int64),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_a_mean_over_what_a_mask_keeps_is_no_mean_over_sequences(mask: torch.Tensor) -> None:
    """From one row, and so two equal halves, it was taken for one: gradients were wrong by more than 100 %."""
    assert find(masked_mean, given(mask)).reduction is Reduction.UNKNOWN


def test_a_mean_over_what_a_mask_leaves_out_is_none_either() -> None:
    def loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        return each(output, batch)[~batch["mask"]].mean()

    assert find(loss, given(torch.zeros(LENGTH, dtype=torch.bool))).reduction is Reduction.UNKNOWN


LOSSES: dict[str, tuple[Loss, Reduction]] = {
    "by weights": (lambda o, b: (each(o, b).mean(1) * b["weight"]).sum() / b["weight"].sum(), Reduction.UNKNOWN),
    "by weights, mean": (lambda o, b: (each(o, b).mean(1) * b["weight"]).mean(), Reduction.MEAN),
    "masked sum": (lambda o, b: (each(o, b) * b["mask"]).sum(), Reduction.SUM),
    "masked mean of each": (
        lambda o, b: ((each(o, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
        Reduction.MEAN,
    ),
    "over labels": (lambda o, b: F.cross_entropy(o.flatten(0, 1), b["labels"].flatten()), Reduction.MEAN),
    "squares": (lambda o, b: F.mse_loss(o, b["target"]), Reduction.MEAN),
    "logarithms of what is given": (lambda o, b: (o - b["target"].log()).square().mean(), Reduction.MEAN),
    "probabilities": (
        lambda o, b: F.binary_cross_entropy_with_logits(o, b["target"], reduction="sum"),
        Reduction.SUM,
    ),
    "divergence": (lambda o, b: F.kl_div(o.log_softmax(-1), b["target"], reduction="batchmean"), Reduction.MEAN),
    "another label": (lambda o, b: each(o, b).mean() + F.cross_entropy(o.mean(1), b["cls"]), Reduction.MEAN),
    "inputs rebuilt": (lambda o, b: (o.mean(-1) - b["x"].mean(-1)).abs().mean(), Reduction.MEAN),
    "a norm of inputs": (lambda o, b: o.square().mean() / b["x"].norm(), Reduction.UNKNOWN),
}


@pytest.mark.parametrize(("function", "reduction"), LOSSES.values(), ids=LOSSES.keys())
def test_what_adds_up_is_known_on_inputs_of_its_kind(function: Loss, reduction: Reduction) -> None:
    assert find(function, given(SOME.float())).reduction is reduction


def test_means_weigh_as_one_process_does() -> None:
    """Held against the loss of the whole batch, cut where parts have as many labels as they like."""
    function = LOSSES["over labels"][0]
    loss = find(function, given(SOME.float()))
    labels = torch.randint(0, CLASSES, (4, LENGTH))
    labels[1:, 2:] = -100
    output = torch.randn(4, LENGTH, CLASSES)
    assert loss.weight is not None
    batches = [{"labels": labels[:1]}, {"labels": labels[1:]}]
    weights = [float(loss.weight(batch)) for batch in batches]
    parts = [function(out, batch) for out, batch in zip((output[:1], output[1:]), batches, strict=True)]
    whole = sum(w * part for w, part in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(whole, function(output, {"labels": labels}))


@pytest.mark.parametrize(
    ("name", "function", "missing"),
    [
        ("cls", lambda o, b: F.cross_entropy(o.mean(1), b["cls"]), -100),
        ("target", lambda o, b: (o - b["target"]).square()[~b["target"].isnan()].mean(), torch.nan),
    ],
)
def test_a_batch_with_missing_values_that_would_not_add_up_is_refused(
    name: str, function: Loss, missing: float
) -> None:
    loss, batch = find(function, given(SOME.float())), given(SOME.float())
    assert loss.weight is not None
    assert loss.weight(batch) == 1
    batch[name].view(-1)[0] = missing
    with pytest.raises(InputError, match=f"the batch has {name} that are"):
        loss.weight(batch)


def test_what_no_other_values_could_be_tried_of_is_said() -> None:
    def picky(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        assert bool((batch["weight"] == 1).all())
        return (each(output, batch).mean(1) * batch["weight"]).mean()

    loss = find(picky, given(SOME.float()))
    assert loss.reduction is Reduction.UNKNOWN
    assert "'weight'" in loss.doubt


@pytest.mark.parametrize("tensor", [torch.ones(4), torch.zeros(4, 3), torch.ones(4, 2) > 0, torch.zeros(4, 1).long()])
def test_halves_differ_and_nothing_is_invented(tensor: torch.Tensor) -> None:
    found = list(unlike_halves(tensor))
    assert found
    for changed in found:
        assert changed.dtype == tensor.dtype
        assert float(changed[:2].sum()) < float(changed[2:].sum())
        assert float(changed.min()) >= 0
        assert float(changed.max()) <= 1
