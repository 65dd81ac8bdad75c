"""Masks of transformers' models are made only where they say more than ``is_causal``, in traces and on shards."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.executor.context_attention import positions_of
from planner.executor.context_parallel import Sharded
from planner.graph.tracer import trace_model
from planner.graph.trainable import unshared_positions
from planner.models.causal_masks import without_plain_masks
from tests.unit.planner.graph.traced import loaded_from_code

SEQ_LEN, SIZES = 32, {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def mistral(window: int | None = None) -> nn.Module:
    """As a user builds one; without a window it is a Llama."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=window)).eval()


@pytest.mark.parametrize(("window", "has_mask"), [(None, False), (SEQ_LEN + 1, False), (SEQ_LEN, True)])
def test_a_script_is_traced_with_the_masks_that_training_makes(
    tmp_path: Path, window: int | None, has_mask: bool
) -> None:
    """Every layer was traced with a mask, and so no context-parallel plan could be trained."""
    code = f"""
from transformers import MistralConfig, MistralForCausalLM

def build_model():
    return MistralForCausalLM(MistralConfig(**{SIZES}, sliding_window={window}))
"""
    graph = trace_model(loaded_from_code(code, tmp_path), 2, SEQ_LEN)
    attention = [node for node in graph.nodes if "scaled_dot_product_attention" in node.op]
    assert [len(node.operands) > 3 for node in attention] == [has_mask] * 2
    assert bool(unshared_positions(graph, 2)) == has_mask


@pytest.mark.parametrize("window", [None, 8])
def test_what_a_caller_says_about_positions_and_padding_is_heard(window: int | None) -> None:
    """Documents that are packed into one sequence do not see each other, and nothing sees what is padded."""
    theirs = mistral(window)
    ours = without_plain_masks(copy.deepcopy(theirs))
    tokens = torch.randint(64, (2, SEQ_LEN))
    packed = torch.cat((torch.arange(20), torch.arange(12))).expand(2, -1)
    padding = torch.ones_like(tokens)
    padding[0, :10] = 0
    with torch.no_grad():
        plain = theirs(tokens).logits
        for given in ({}, {"position_ids": packed}, {"attention_mask": padding}):
            expected = theirs(tokens, **given).logits
            torch.testing.assert_close(ours(tokens, **given).logits, expected)
            assert torch.equal(expected, plain) != bool(given)  # all that is said matters


@pytest.mark.parametrize(("window", "is_taken"), [(None, True), (SEQ_LEN + 1, True), (SEQ_LEN, False), (24, False)])
def test_a_window_is_held_against_the_whole_sequence_not_a_shard(window: int | None, is_taken: bool) -> None:
    """A shard of 16 is shorter than all of them: without its mask, positions would see more than their window."""
    model, positions = without_plain_masks(mistral(window)), positions_of(0, 2, SEQ_LEN)
    assert positions.diff().max() > 1  # both ends of the sequence, which looks like two packed documents
    mode = Sharded(lambda query, _key, _value, _blocks: query, positions, num_shards=2)
    with torch.no_grad(), mode:
        if is_taken:
            model(torch.zeros(1, len(positions), dtype=torch.int64))
        else:
            with pytest.raises(ModelError, match="a mask of its own"):
                model(torch.zeros(1, len(positions), dtype=torch.int64))


def test_an_error_inside_leaves_nothing_behind() -> None:
    """The next model is asked for itself."""
    model = without_plain_masks(mistral())
    with pytest.raises(IndexError):
        model(torch.full((1, 4), 64))
    packed = torch.cat((torch.arange(2), torch.arange(2)))[None]
    tokens = torch.randint(64, (1, 4))
    with torch.no_grad():
        found, expected = (each(tokens, position_ids=packed).logits for each in (model, mistral()))
    torch.testing.assert_close(found, expected)


def test_a_trace_that_fails_leaves_other_models_their_masks(tmp_path: Path) -> None:
    """No hook is called of a pass that is given up in a trace: what it had counted stood in every later model's way."""
    theirs, tokens = mistral(), torch.randint(64, (2, SEQ_LEN))
    packed = torch.cat((torch.arange(20), torch.arange(12))).expand(2, -1)
    with torch.no_grad():
        expected = theirs(tokens, position_ids=packed).logits
    code = f"""
from transformers import MistralConfig, MistralForCausalLM

def fail(*_):
    raise RuntimeError("no layer of this model runs")

def build_model():
    model = MistralForCausalLM(MistralConfig(**{SIZES}))
    model.model.layers[0].register_forward_hook(fail)
    return model
"""
    with pytest.raises(ModelError, match="no layer of this model runs"):
        trace_model(loaded_from_code(code, tmp_path), 2, SEQ_LEN)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens, position_ids=packed).logits, expected)
