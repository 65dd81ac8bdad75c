"""Which models and losses ranks may share the sequences of, and what each rank is given of a batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

from costmodels.vocabulary.choices import ContextMethod
from planner.errors import ModelError
from planner.executor.context_attention import Blocks
from planner.executor.context_parallel import Context, Sharded, check_model
from planner.executor.recorded_build import recorded_model
from planner.model_file import load_model, resolve_model
from planner.models.loss import NEXT_TOKEN, Batch, Reduction, TrainingLoss, num_targets

SEQ_LEN, HIDDEN, VOCAB = 16, 8, 24


def context_of(rank: int = 0, num_ranks: int = 2, seq_len: int = SEQ_LEN) -> Context:
    """A place in a group that is never sent anything."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: num_ranks)
    return Context(ContextMethod.RING, cast("dist.ProcessGroup", group), seq_len)


class Toy(nn.Module):
    """One layer of attention; how it reads positions is up to ``kind``."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.table = nn.Parameter(torch.zeros(SEQ_LEN, HIDDEN))
        self.convolution = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length, x = input_ids.shape[1], self.embedding(input_ids)
        x = x + (self.table[:length] if self.kind == "slice" else self.table[torch.arange(length)])
        if self.kind == "count":
            x = x + F.one_hot(input_ids, VOCAB).float() @ torch.arange(HIDDEN).float().expand(VOCAB, HIDDEN)
        if self.kind == "documents":  # a token of which the trial made none
            x = x + self.table[(input_ids == VOCAB - 2).cumsum(1)]
        if self.kind == "threshold":
            x = x + self.table[(input_ids > VOCAB - 4).cumsum(1)]
        if self.kind == "convolution":
            x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mask = torch.ones(length, length).tril().bool() if self.kind == "mask" else None
        drop = 0.1 if self.kind == "dropout" else 0.0
        if self.kind == "mean":
            x = x + x.mean(1, keepdim=True)
        if self.kind == "both ways":
            y = (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
        elif self.kind == "by hand":
            scores = (heads @ heads.transpose(-1, -2)).masked_fill(torch.ones(length, length).triu(1).bool(), -1e9)
            y = scores.softmax(-1) @ heads
        else:
            y = F.scaled_dot_product_attention(heads, heads, heads, mask, drop, is_causal=mask is None)
        return self.head(F.dropout(x + y.transpose(1, 2).flatten(2), 0.5, self.training))


def check(kind: str, loss: TrainingLoss = NEXT_TOKEN, num_ranks: int = 4, device: str = "cpu") -> None:
    torch.manual_seed(0)
    ids = {"input_ids": torch.zeros(2, SEQ_LEN, dtype=torch.int64)}
    check_model(Toy(kind).to(device), ids, loss, context_of(num_ranks=num_ranks))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("slice", "it reads positions otherwise than by torch.arange"),  # of a table that is all zeros when new
        ("convolution", "mixes them otherwise than by scaled_dot_product_attention"),
        ("by hand", "mixes them otherwise"),
        ("both ways", "mixes them otherwise"),  # any order of all positions is as good as any other
        ("mean", "mixes them otherwise"),
        ("documents", "it reads positions otherwise"),  # they were trained as if each shard began a sequence
        ("threshold", "it reads positions otherwise"),
        ("mask", "it gives attention a mask of its own"),
        ("dropout", "it drops 0.1 of attention's weights"),
    ],
)
def test_models_that_need_whole_sequences_are_refused(kind: str, says: str, device: str) -> None:
    """Of those on meta it is found out with values that stand in for theirs."""
    with pytest.raises(ModelError, match=says):
        check(kind, device=device)


def test_inputs_that_are_no_token_ids_are_refused_by_name() -> None:
    inputs = {"batch.ids": torch.zeros(2, SEQ_LEN, dtype=torch.int64), "batch.image": torch.zeros(2, 3, 8, 8)}
    with pytest.raises(ModelError, match=r"batch.image is torch.float32 \(2, 3, 8, 8\)"):
        check_model(Toy("plain"), inputs, NEXT_TOKEN, context_of())


def test_what_is_as_long_as_a_shard_but_no_positions_is_refused() -> None:
    check("count", num_ranks=4)
    with pytest.raises(ModelError, match="it counts 8 of something else with torch.arange, and a rank has 8 positions"):
        check("count", num_ranks=2)


@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_models_of_ours_are_shared(name: str, has_values: bool) -> None:
    loaded = load_model(resolve_model(name))
    torch.manual_seed(1)
    module = loaded.build() if has_values else recorded_model(loaded.build).module
    module, inputs = module.float(), loaded.example_inputs(1, 32)
    assert isinstance(inputs, dict)
    before = torch.get_rng_state(), torch.initial_seed(), [p.clone() for p in module.parameters()]
    check_model(module, inputs, loaded.training_loss, context_of(seq_len=32))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == torch.initial_seed()
    assert all(p.is_meta is not has_values for p in module.parameters())
    pairs = zip(before[2], module.parameters(), strict=True)
    assert not has_values or all(torch.equal(one, other) for one, other in pairs)


def _each_sequence(output: object, batch: Batch) -> torch.Tensor:
    """The mean over sequences of each one's mean over labels."""
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    pairs = zip(output, batch["labels"], strict=True)
    return torch.stack([F.cross_entropy(logits, labels) for logits, labels in pairs]).mean()


def _shifted(output: object, batch: Batch) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")


def _counted(output: object, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    value = NEXT_TOKEN.function(output, batch)
    assert isinstance(value, torch.Tensor)
    return value, num_targets(batch)


def _mean(output: object, batch: Batch) -> torch.Tensor:
    value, count = _counted(output, batch)
    return value / count


def _looked_up(output: object, batch: Batch) -> torch.Tensor:
    """Of sequences as wholes, and an error at labels of -100."""
    assert isinstance(output, torch.Tensor)
    assert isinstance(batch, dict)
    return -F.logsigmoid(output.log_softmax(-1).gather(-1, batch["labels"][..., None]).sum(1)).mean()


@pytest.mark.parametrize(
    ("loss", "is_taken"),
    [
        (TrainingLoss(_mean, Reduction.MEAN, num_targets), True),
        (TrainingLoss(_counted, Reduction.COUNTED), True),
        (TrainingLoss(_shifted, Reduction.SUM), False),
        (TrainingLoss(_each_sequence, Reduction.MEAN, lambda batch: 2.0), False),
        (TrainingLoss(_looked_up, Reduction.MEAN, lambda batch: 2.0), False),
    ],
    ids=["mean", "counted", "shifts by itself", "mean of sequences", "error at ignored labels"],
)
def test_losses_of_whole_sequences_are_refused(loss: TrainingLoss, is_taken: bool) -> None:
    if is_taken:
        return check("", loss)
    with pytest.raises(ModelError, match="this loss cannot be computed"):
        check("", loss)


def test_a_shard_has_both_ends_and_the_labels_behind_its_borders() -> None:
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    first = context_of(0).shard({"input_ids": tokens, "weight": torch.ones(2)})
    assert first["input_ids"][0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert first["labels"][0].tolist() == [1, 2, 3, 4, 13, 14, 15, -100]
    assert first["weight"].shape == (2,)
    second = context_of(1).shard({"input_ids": tokens, "labels": tokens + 100})
    assert second["input_ids"][1].tolist() == [*range(20, 28)]
    assert second["labels"][1].tolist() == [*range(120, 128)]


def test_labels_are_the_next_tokens_whatever_comes_before_the_tokens() -> None:
    tokens = torch.arange(100, 100 + SEQ_LEN).expand(2, SEQ_LEN)
    positions = torch.arange(SEQ_LEN).remainder(5).expand(2, SEQ_LEN)
    for batch in ({"position_ids": positions, "input_ids": tokens}, {"0.mask": positions, "0.input_ids": tokens}):
        found = context_of(0).shard(batch)
        assert found["labels"][0].tolist() == [101, 102, 103, 104, 113, 114, 115, -100]


@pytest.mark.parametrize(
    ("call", "is_positions"),
    [
        (lambda: torch.arange(4), True),
        (lambda: torch.arange(0, 4, device="cpu"), True),
        (lambda: torch.arange(end=4, dtype=torch.float32), True),
        (lambda: torch.arange(0, 8, 2), False),
        (lambda: torch.arange(1, 5), False),
        (lambda: torch.arange(5), False),
    ],
)
def test_positions_are_those_of_the_shard(call: Callable[[], torch.Tensor], is_positions: bool) -> None:
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        return query

    mode = Sharded(attention, torch.tensor([2, 3, 4, 5]))
    with mode, mode:  # recomputation enters it again
        found = call()
    plain = call()
    assert found.dtype == plain.dtype
    assert found.tolist() == ([2, 3, 4, 5] if is_positions else plain.tolist())
