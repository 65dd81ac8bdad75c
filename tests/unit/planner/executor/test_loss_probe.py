"""What an undeclared loss is, is found by trying it; what cannot be found is not trained in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.errors import InputError, ModelError
from planner.executor import outputs
from planner.executor.loss import check_reduction
from planner.executor.loss_probe import recognised
from planner.model_file import load_model, resolve_model
from planner.models.loss import Reduction, TrainingLoss

VOCAB, SEQ_LEN = 512, 16
Batch = dict[str, torch.Tensor]


class Toy(nn.Module):
    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.embedding(input_ids))}


def tokens(batch_size: int, seq_len: int) -> Batch:
    return {"input_ids": torch.zeros(batch_size, seq_len, dtype=torch.int64)}


def cross_entropy(output: Batch, batch: Batch, **options: object) -> torch.Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch["labels"].flatten(), **options)  # pyright: ignore


def mean_of_sequences(output: Batch, batch: Batch) -> torch.Tensor:
    each = F.cross_entropy(output["logits"].transpose(1, 2), batch["labels"], reduction="none")
    return (each.sum(1) / (batch["labels"] >= 0).sum(1).clamp(min=1)).mean()


def find(function: Callable[..., object], module: nn.Module | None = None) -> TrainingLoss:
    return recognised(TrainingLoss(function), module or Toy(), tokens, SEQ_LEN)  # pyright: ignore[reportArgumentType]


def test_a_mean_over_labels_weighs_by_labels() -> None:
    loss = find(cross_entropy)
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    assert int(loss.weight({"labels": torch.tensor([[1, -100, 2]])})) == 2


def test_a_sum_is_a_sum() -> None:
    loss = find(lambda output, batch: cross_entropy(output, batch, reduction="sum"))
    assert loss.reduction is Reduction.SUM
    assert loss.weight is None


def test_a_mean_over_sequences_weighs_them_alike() -> None:
    loss = find(mean_of_sequences)
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    assert loss.weight({"labels": torch.tensor([[1, -100], [2, 3]])}) == 2


def of_later_labels(output: Batch, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("seq_len", [2, 4, SEQ_LEN])
def test_labels_that_a_loss_shifts_are_counted_as_it_does(seq_len: int) -> None:
    """Each is held against the output before it, as Hugging Face's models do: it could not be trained in parts."""
    loss = recognised(TrainingLoss(of_later_labels), Toy(), tokens, seq_len)  # pyright: ignore[reportArgumentType]
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    batch = {"labels": torch.tensor([[1, -100, 2], [-100, 3, 4]])}
    assert int(loss.weight(batch)) == 3
    parts = [{"labels": batch["labels"][row : row + 1]} for row in range(2)]
    outputs = [{"logits": torch.randn(1, 3, VOCAB)} for _ in parts]
    whole = of_later_labels({"logits": torch.cat([each["logits"] for each in outputs])}, batch)
    weighed = [of_later_labels(out, part) * loss.weight(part) for out, part in zip(outputs, parts, strict=True)]
    torch.testing.assert_close(torch.stack(weighed).sum() / 3, whole)


@pytest.mark.parametrize("num_ignored", [4, 15, SEQ_LEN])
def test_given_labels_of_which_a_prompt_is_ignored_are_counted(num_ignored: int) -> None:
    """The trial ignored what was ignored already, saw halves alike, and took it for a mean over sequences."""
    labels = torch.full((1, SEQ_LEN), 3).index_fill(1, torch.arange(num_ignored), -100)

    def batches(batch_size: int, seq_len: int) -> Batch:
        return {**tokens(batch_size, seq_len), "labels": labels.expand(batch_size, -1).clone()}

    loss = recognised(TrainingLoss(cross_entropy), Toy(), batches, SEQ_LEN)  # pyright: ignore[reportArgumentType]
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    assert int(loss.weight({"labels": torch.tensor([[1, -100, 2]])})) == 2


def test_a_mean_that_ignored_labels_would_change_is_one_without_them() -> None:
    """As with a penalty on logits at all positions: it could not be trained in parts at all."""
    loss = find(lambda output, batch: cross_entropy(output, batch) + output["logits"].logsumexp(-1).square().mean())
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    assert loss.weight({"labels": torch.tensor([[1, 0], [2, 3]])}) == 2
    with pytest.raises(InputError, match="labels that are -100"):
        loss.weight({"labels": torch.tensor([[1, -100], [2, 3]])})


@pytest.mark.parametrize("width", [2, 4])
def test_a_loss_over_neighbours_is_none_of_what_ranks_take_by_turns(width: int) -> None:
    """Pairs of a better and a worse answer, or groups: they were trained as a mean over sequences, torn apart."""

    def of_groups(output: Batch, batch: Batch) -> torch.Tensor:
        assert batch["input_ids"].shape[0] % width == 0
        scores = output["logits"].mean((1, 2)).view(-1, width)
        return -F.logsigmoid(scores[:, 0] - scores[:, 1:].mean(1)).mean()

    assert find(of_groups).reduction is Reduction.UNKNOWN


class Classes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :5]


@pytest.mark.parametrize("is_number", [False, True])
def test_labels_of_minus_one_are_refused_where_a_loss_leaves_them_out(is_number: bool) -> None:
    """A micro-batch of them alone made no number, and others were weighed by all of their samples."""

    def inputs(batch_size: int, seq_len: int) -> Batch:
        labels = torch.ones(batch_size) if is_number else torch.ones(batch_size, dtype=torch.int64)
        return {"x": torch.randn(batch_size, 8), "labels": labels}

    def function(output: torch.Tensor, batch: Batch) -> torch.Tensor:
        known = batch["labels"] >= 0
        each = F.cross_entropy(output, batch["labels"].long().clamp(min=0), reduction="none")
        return (each * known).sum() / known.sum()

    loss = recognised(TrainingLoss(function), Classes(), inputs, 1)  # pyright: ignore[reportArgumentType]
    assert loss.weight is not None
    assert loss.weight({"labels": torch.tensor([0, 2, 1])}) == 3
    with pytest.raises(InputError, match="labels that are -1,"):
        loss.weight({"labels": torch.tensor([0, -1, 2])})


def test_a_loss_of_probabilities_is_tried_on_some() -> None:
    """Torch refuses others, or makes no number of them: such losses were said to be no mean."""

    def of_probabilities(output: Batch, batch: Batch) -> torch.Tensor:
        return F.binary_cross_entropy(output["logits"], torch.ones_like(output["logits"]))

    def entropy(output: Batch, batch: Batch) -> torch.Tensor:
        return -(output["logits"] * output["logits"].log()).sum(-1).mean()

    for function in (of_probabilities, entropy):
        found = find(function)
        assert found.reduction is Reduction.MEAN
        assert found.weight is not None
        assert found.weight(tokens(3, SEQ_LEN)) == 3


def test_a_pair_counts_for_itself() -> None:
    loss = find(lambda output, batch: (cross_entropy(output, batch, reduction="sum"), (batch["labels"] >= 0).sum()))
    assert loss.reduction is Reduction.COUNTED


@pytest.mark.parametrize("ignored", [0, 7, 255, 500])
def test_a_mean_that_ignores_another_label_is_not_taken_for_one(ignored: int) -> None:
    loss = find(lambda output, batch: cross_entropy(output, batch, ignore_index=ignored))
    assert loss.reduction is Reduction.UNKNOWN


@pytest.mark.parametrize("vocab", [10, 64])
def test_a_loss_of_few_classes_is_tried_on_labels_that_there_are(vocab: int) -> None:
    """Every such loss was refused in parts, a pair too: torch's cross entropy takes no label 255 of 64."""
    assert Toy(vocab).head.out_features == vocab
    mean = find(cross_entropy, Toy(vocab))
    assert mean.weight is not None
    assert int(mean.weight({"labels": torch.tensor([[1, -100, 2]])})) == 2
    pair = find(lambda o, b: (cross_entropy(o, b, reduction="sum"), (b["labels"] >= 0).sum()), Toy(vocab))
    assert pair.reduction is Reduction.COUNTED
    assert find(lambda o, b: cross_entropy(o, b, ignore_index=7), Toy(vocab)).reduction is Reduction.UNKNOWN


class Telling(Toy):
    """Returns hidden values beside its logits."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.embedding(input_ids), **super().forward(input_ids)}


def test_an_ignored_label_is_seen_whatever_else_the_model_returns() -> None:
    """Labels were tried up to the size of the narrowest output: of padding beyond it nobody knew, and it counted."""
    padded = find(lambda o, b: cross_entropy(o, b, ignore_index=VOCAB - 1), Telling())
    assert padded.reduction is Reduction.UNKNOWN
    assert find(cross_entropy, Telling()).reduction is Reduction.MEAN


def masked_by(inputs_but: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A mean over the positions of those inputs."""

    def loss(output: Batch, batch: Batch) -> torch.Tensor:
        each, wanted = cross_entropy(output, batch, reduction="none"), inputs_but(batch["input_ids"]).flatten()
        return (each * wanted).sum() / wanted.sum()

    return loss


@pytest.mark.parametrize(
    "inputs_but",
    [lambda ids: ids != 3, lambda ids: ids != torch.tensor(500), lambda ids: ~torch.eq(ids, 17)],
    ids=["3", "500 in a tensor", "17"],
)
def test_a_mean_over_what_inputs_say_is_not_taken_for_one_over_labels(
    inputs_but: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Padding that is left out by the inputs: a mean of means was 0.4 % off."""
    assert find(masked_by(inputs_but)).reduction is Reduction.UNKNOWN


@pytest.mark.parametrize(
    "function",
    [
        lambda output, batch: cross_entropy(output, batch).square(),
        lambda output, batch: output["logits"].std(),
        lambda output, batch: output["logits"].sum() * 0,
        lambda output, batch: cross_entropy(output, batch).clamp(max=1.0),
        lambda output, batch: output["nothing"].mean(),
    ],
    ids=["square", "deviation", "always zero", "bounded", "error"],
)
def test_what_is_none_of_these_is_not_known(function: Callable[..., object]) -> None:
    loss = find(function)
    assert loss.reduction is Reduction.UNKNOWN
    check_reduction(loss, 1)  # a batch in one part needs no rule
    with pytest.raises(ModelError, match=r"in 4 parts.*not known") as error:
        check_reduction(loss, 4)
    assert "loss_weight(batch)" in error.value.hint


class Routed(Toy):
    """Also returns a number of its batch as a whole, and numbers of each of 32 rows that are no samples."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(input_ids)["logits"]
        load = logits.mean((0, 1))[:32]
        return {"logits": logits, "balance": load.square().sum(), "load": load}


@pytest.mark.parametrize("name", ["balance", "load"])
@pytest.mark.parametrize("coefficient", [1e-4, 1.0])
def test_a_number_of_the_whole_batch_is_no_mean_of_those_of_its_parts(name: str, coefficient: float) -> None:
    """A balance loss was taken for a mean: two parts trained otherwise than one process, without a word."""

    def balanced(output: Batch, batch: Batch) -> torch.Tensor:
        return cross_entropy(output, batch) + coefficient * output[name].mean()

    def found(function: Callable[..., torch.Tensor]) -> Reduction:
        return recognised(TrainingLoss(function), Routed(), tokens, SEQ_LEN).reduction

    assert SEQ_LEN * 32 == 2 * 256  # the batch of the trial has as many samples as ``load`` has rows
    assert found(balanced) is Reduction.UNKNOWN
    assert found(cross_entropy) is Reduction.MEAN


MODEL = """
import torch
from torch import nn

def build_model():
    return nn.Embedding(256, 256)
"""


def loaded_loss(folder: Path, text: str) -> TrainingLoss:
    path = folder / "model.py"
    path.write_text(MODEL + text)
    return load_model(resolve_model(str(path))).training_loss


def test_a_file_says_what_its_loss_is_the_mean_of(tmp_path: Path) -> None:
    loss = loaded_loss(
        tmp_path,
        "def loss_fn(output, batch):\n    return output.mean()\n"
        "def loss_weight(batch):\n    return (batch['labels'] != 3).sum()\n",
    )
    assert loss.reduction is Reduction.MEAN
    assert loss.weight is not None
    assert int(loss.weight({"labels": torch.tensor([3, 4, 5])})) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def loss_weight(batch):\n    return 1\n", "no loss_fn"),
        (
            "def loss_fn(o, b):\n    return o.sum(), 3\ndef loss_weight(b):\n    return 1\n",
            "a tuple beside loss_weight",
        ),
        ("def loss_fn(o, b):\n    return o.sum(), 'many'\n", "returned tuple"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        loaded_loss(tmp_path, text).function(torch.ones(2), {"labels": torch.ones(2)})


def test_a_pair_is_divided_for_the_loss_of_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL + "def loss_fn(output, batch):\n    return output.sum(), 4\n")
    assert float(load_model(resolve_model(str(path))).loss_fn(torch.ones(8), {})) == 2.0


class LooksForPackedSequences(Toy):
    """Reads values to take a short cut, which compiled code leaves out, as transformers' models do."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        assert torch.compiler.is_compiling() or not bool((input_ids < 0).any())
        return super().forward(input_ids)


def test_the_loss_of_a_model_that_reads_values_for_a_short_cut_is_known() -> None:
    """The probe's model has no values: of plain cross entropy it was not known how its parts add up."""
    assert find(cross_entropy, LooksForPackedSequences()).reduction is Reduction.MEAN


class LosesItself(Toy):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        output = super().forward(input_ids)
        return output if labels is None else {**output, "loss": cross_entropy(output, {"labels": labels})}


def test_a_loss_of_forwards_own_is_said_to_be_untried() -> None:
    def with_labels(batch_size: int, seq_len: int) -> Batch:
        return {**tokens(batch_size, seq_len), "labels": torch.zeros(batch_size, seq_len, dtype=torch.int64)}

    def own(output: Batch, batch: Batch) -> torch.Tensor:
        return output["loss"]

    loss = recognised(TrainingLoss(own), LosesItself(), with_labels, SEQ_LEN)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="forward takes labels, and a loss that it computes itself") as error:
        check_reduction(loss, 2)
    assert "loss_weight(batch)" in error.value.hint


class AsksForCausality(Toy):
    """Reads values of a mask, as torch's own transformer does: it does not run on the meta device."""

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = torch.ones(input_ids.shape[1], input_ids.shape[1]).triu(1)
        if not bool((mask == mask.triu(1)).all()):
            raise AssertionError
        return super().forward(input_ids + torch.multinomial(torch.ones(2), 1))


def test_the_loss_of_a_model_that_reads_values_is_known_where_it_is_small() -> None:
    """Of plain cross entropy it was said that it is neither a sum nor a mean."""
    module = AsksForCausality()
    before = torch.get_rng_state()
    assert find(cross_entropy, module).reduction is Reduction.MEAN
    assert torch.equal(before, torch.get_rng_state())  # what the model draws then is not missing later


def test_a_model_that_reads_values_and_is_large_is_said_to_be_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_BYTES", 1000)
    loss = find(cross_entropy, AsksForCausality())
    with pytest.raises(ModelError, match=r"could not be found out: .*does not run without values.*too large") as error:
        check_reduction(loss, 2)
    assert "neither" not in str(error.value)
