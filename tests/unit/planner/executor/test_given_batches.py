"""What is asked of the batches of a script, and what of the customs of transformers is taken for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner.errors import InputError
from planner.executor.given_batches import GivenBatches, plain_inputs
from planner.executor.recorded_build import recorded_model
from planner.models.huggingface import shifts_labels
from tests.forked_python import OnRanks

SEQ_LEN, VOCAB = 16, 32
TOKENS = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(TOKENS)
COUNTED = torch.arange(SEQ_LEN).expand(2, -1)
PADDED = torch.where(COUNTED < 12, 1, 0)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ_LEN, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


class Told(nn.Module):
    """A model that positions and mask change, or that cannot do without the mask."""

    def __init__(self, *, needs_mask: bool = False) -> None:
        super().__init__()
        self.embedding, self.needs_mask = nn.Embedding(VOCAB, 8), needs_mask

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        if self.needs_mask:
            assert attention_mask is not None
        return x if position_ids is None else x + position_ids.unsqueeze(-1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"attention_mask": ONES}, {"attention_mask"}),
        ({"attention_mask": ONES.bool(), "position_ids": COUNTED}, {"attention_mask", "position_ids"}),
        ({"attention_mask": PADDED}, set()),
        ({"position_ids": COUNTED.remainder(5)}, set()),
        ({"attention_mask": ONES[:, None, None, :].float()}, set()),
    ],
)
@pytest.mark.parametrize("has_values", [True, False])
def test_a_model_of_transformers_does_without_what_says_nothing(
    given: dict[str, torch.Tensor], expected: set[str], has_values: bool
) -> None:
    module = llama() if has_values else recorded_model(llama).module
    assert plain_inputs(module, {"input_ids": TOKENS, **given}) == expected


@pytest.mark.parametrize(
    ("module", "given"),
    [(Told(), {"position_ids": COUNTED}), (Told(needs_mask=True), {"attention_mask": ONES})],
)
def test_a_model_that_makes_something_of_them_keeps_them(module: nn.Module, given: dict[str, torch.Tensor]) -> None:
    assert plain_inputs(module, {"input_ids": TOKENS, **given}) == set()


def test_what_a_model_was_split_without_has_to_say_nothing_in_each_batch() -> None:
    asked = GivenBatches(frozenset({"attention_mask", "position_ids"}))
    batch = {"input_ids": TOKENS, "attention_mask": ONES, "position_ids": COUNTED}
    assert asked.named(batch).keys() == batch.keys()
    assert asked.named({"input_ids": TOKENS}).keys() == {"input_ids"}
    with pytest.raises(InputError, match="attention_mask hides or moves positions in this batch"):
        asked.named({**batch, "attention_mask": PADDED})
    with pytest.raises(InputError, match="position_ids hides or moves positions in this batch"):
        asked.named({**batch, "position_ids": COUNTED.remainder(8)})


def test_labels_as_transformers_takes_them_are_refused() -> None:
    """They were trained on as if they were the next tokens: the model learned to copy, and its loss fell quickly."""
    asked = GivenBatches(shifts_labels=True)
    behind = nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)
    for labels in (TOKENS, torch.where(COUNTED < 5, -100, TOKENS)):
        with pytest.raises(InputError, match="the labels are the tokens of their own positions"):
            asked.named({"input_ids": TOKENS, "labels": labels})
        assert GivenBatches().named({"input_ids": TOKENS, "labels": labels})
    same = torch.zeros_like(TOKENS)  # of which each is the next one, too
    for tokens, labels in ((TOKENS, behind), (same, same), (TOKENS, torch.full_like(TOKENS, -100))):
        asked.named({"input_ids": tokens, "labels": labels})
    asked.named({"input_ids": TOKENS})


def test_causal_models_of_transformers_shift_labels() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=1))
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
        bert = transformers.BertForMaskedLM(transformers.BertConfig(num_hidden_layers=1))
    assert all(map(shifts_labels, (gpt2, nn.Sequential(llama()))))  # such as one with adapters
    assert not any(map(shifts_labels, (t5, bert, nn.Linear(2, 2))))


SCRIPT = """
import sys, gc, torch, torch.distributed as dist, planner
from torch.nn import functional as F
from tests.unit.planner.executor.test_given_batches import COUNTED, ONES, TOKENS, llama
dist.init_process_group("gloo")
example = {"input_ids": TOKENS[:1], "attention_mask": ONES[:1], "position_ids": COUNTED[:1].contiguous()}
plan = planner.load_plan(sys.argv[1])
labels = torch.where(COUNTED < 3, -100, F.pad(TOKENS[:, 1:], (0, 1), value=-100))
whole = {"input_ids": TOKENS, "attention_mask": ONES, "position_ids": COUNTED.contiguous()}
part = planner.parallelize(llama(), plan, inputs=example)
loss = part.forward_backward({**whole, "labels": labels})
dist.all_reduce(loss)
one = llama()
expected = F.cross_entropy(one(**whole).logits.flatten(0, 1), labels.flatten())
expected.backward()
torch.testing.assert_close(loss / 2, expected.detach())
for name, p in part.roots[0].named_parameters():
    torch.testing.assert_close(p.grad, one.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
try:
    part.forward_backward({**whole, "labels": TOKENS})
except planner.errors.InputError as error:
    print(error.message)
dist.barrier()
del part, p
gc.collect()
dist.destroy_process_group()
"""


def test_a_batch_with_a_mask_of_ones_is_shared_out_as_one_process_takes_it(tmp_path: Path, on_ranks: OnRanks) -> None:
    """Over two ranks of context parallelism, which refused it: "it gives attention a mask of its own"."""
    example = {"input_ids": TOKENS[:1], "attention_mask": ONES[:1], "position_ids": COUNTED[:1].contiguous()}
    plan = planner.search(
        llama(),
        gpus=2,
        hardware="cpu-gloo",
        example_inputs=example,
        global_batch_size=2,
        precision="fp32",
        cp=2,
        zero=0,
    )
    assert any("leaves out a batch's attention_mask where it is all ones" in warning for warning in plan.warnings)
    (tmp_path / "plan.json").write_text(plan.model_dump_json(), encoding="utf-8")
    out, _ = on_ranks(2, SCRIPT, tmp_path / "plan.json")
    assert out.count("the labels are the tokens of their own positions") == 2
