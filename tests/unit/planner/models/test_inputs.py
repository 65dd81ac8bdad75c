"""Inputs in nests: their names, what the user's functions get of them, and what is refused."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import NamedTuple, cast

import pytest
import torch
from torch import nn

from planner.models.inputs import by_name, call_model, flattened, taken_by_loss
from planner.models.lazy import give_shapes, has_lazy
from planner.models.loss import TrainingLoss, logits_of
from tests.fixtures.kinds_of_models import HEADER, LAZY

ONE, TWO, THREE = torch.ones(2, 3), torch.zeros(2, 4), torch.ones(2, dtype=torch.int64)


class Pair(NamedTuple):
    """A nest of its own kind."""

    left: torch.Tensor
    right: int


def test_names_are_the_way_to_each_tensor() -> None:
    batch, nest = flattened({"batch": {"vision": {"image": ONE}, "text": [TWO, THREE]}, "pair": Pair(ONE, 3)})
    assert nest is not None
    assert list(batch) == ["batch.vision.image", "batch.text.0", "batch.text.1", "pair.left"]
    assert by_name(({"a": ONE}, TWO)).keys() == {"input_0.a", "input_1"}


def test_what_is_flat_already_is_left_alone() -> None:
    assert flattened({"a": ONE, "b": TWO}) == ({"a": ONE, "b": TWO}, None)
    assert flattened([ONE, TWO]) == ((ONE, TWO), None)


def test_it_comes_back_as_it_was_with_what_is_beside() -> None:
    inputs = {"batch": {"text": (ONE, [TWO]), "mask": None}, "scale": 2}
    batch, nest = flattened({**inputs, "labels": THREE})
    assert nest is not None
    assert isinstance(batch, dict)
    assert nest.nested({"batch.text.0": ONE, "batch.text.1.0": TWO}) == inputs
    assert nest.nested_for_loss(batch) == {**inputs, "labels": THREE}
    assert copy.deepcopy(nest) is nest


@pytest.mark.parametrize("given", [(ONE,), (ONE, {"text": TWO})], ids=["flat", "nested"])
def test_a_loss_finds_inputs_without_names_by_position_beside_the_labels(given: tuple[object, ...]) -> None:
    _, nest = flattened(given)
    seen: list[dict[str | int, object]] = []

    def loss_fn(output: object, batch: object) -> torch.Tensor:
        seen.append(cast("dict[str | int, object]", batch))
        return ONE

    taken_by_loss(nest, TrainingLoss(loss_fn)).function(ONE, {**by_name(given), "labels": THREE})
    (batch,) = seen
    assert [batch[index] for index in range(len(given))] == list(given)
    assert (batch["input_0"], batch["labels"]) == (ONE, THREE)
    with pytest.raises(KeyError, match="7: the batch holds input_0"):
        batch[7]


@dataclass
class Scored:
    scores: torch.Tensor
    kept: list[torch.Tensor]


def test_a_loss_gets_outputs_of_16_bits_in_float32() -> None:
    """Under bf16 the sum over a batch's tokens was rounded to 8 bits: 196 was said where it was 195.06."""
    terms, counts = torch.rand(4, 100), torch.ones(4, dtype=torch.int64)
    output = Scored(terms.bfloat16(), [counts])

    def loss_fn(output: object, batch: object) -> torch.Tensor:
        assert isinstance(output, Scored)
        assert output.kept[0] is counts
        return output.scores.sum()

    loss = taken_by_loss(None, TrainingLoss(loss_fn)).function(output, {})
    torch.testing.assert_close(loss, terms.bfloat16().float().sum())
    assert output.scores.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("inputs", "said"),
    [("x", "a str"), ({"a": {"b": object()}}, "a object among them"), ({"a": [1, None]}, "no tensor at all"),
     ({"a": {"b": ONE}, "a.b": TWO}, "two values of one name"), ([], "nothing")],
)  # fmt: skip
def test_what_is_no_tensor_is_named(inputs: object, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        flattened(inputs)


def test_a_class_that_torch_knows_is_one_argument() -> None:
    made = dataclasses.make_dataclass("Batch", ["image", "ids"])
    torch.export.register_dataclass(made, serialized_type_name="tests.Batch")
    batch, nest = flattened(made(ONE, THREE))
    assert nest is not None
    assert isinstance(batch, dict)
    assert list(batch) == ["input_0.image", "input_0.ids"]
    given = call_model(nest.adapted(OfOne()), batch)
    assert isinstance(given, made)
    assert vars(given) == {"image": ONE, "ids": THREE}


class Module(nn.Module):
    """Hands back what it is given."""

    def forward(self, image: object, mask: object = None) -> object:
        return image, mask


class OfOne(nn.Module):
    """As many models of PyTorch Lightning: one argument."""

    def forward(self, batch: object) -> object:
        return batch


def test_a_module_is_called_as_its_forward_is_written() -> None:
    assert call_model(Module(), {"mask": TWO, "image": ONE}) == (ONE, TWO)
    assert call_model(Module(), {"image": ONE, "labels": THREE}) == (ONE, None)  # labels are for the loss
    assert call_model(Module(), {"x": ONE, "y": TWO}) == (ONE, TWO)
    assert call_model(OfOne(), {"x": ONE, "y": TWO}) == {"x": ONE, "y": TWO}
    assert call_model(OfOne(), {"x": ONE}) is ONE


def test_a_module_takes_its_nest_by_name_and_as_before() -> None:
    batch, nest = flattened({"image": {"left": ONE, "right": [TWO]}})
    assert nest is not None
    module = nest.adapted(Module())
    assert call_model(module, batch) == ({"left": ONE, "right": [TWO]}, None)
    assert module(ONE, TWO) == (ONE, TWO)
    assert call_model(copy.deepcopy(module), batch) == ({"left": ONE, "right": [TWO]}, None)


def test_lazy_parameters_are_those_of_a_first_call() -> None:
    """Shapes and, from the same random numbers, values; buffers are as if nothing had been called."""
    names: dict[str, type[nn.Module]] = {}
    exec(HEADER + LAZY, names)
    image = torch.randn(2, 3, 16, 16)
    found, called = names["Lazy"](), names["Lazy"]()
    torch.manual_seed(0)
    give_shapes(found, (image,))
    torch.manual_seed(0)
    called(image)
    assert not has_lazy(found)
    assert found.state_dict().keys() == called.state_dict().keys()
    for name, parameter in called.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name
    assert float(found.get_buffer("norm.running_mean").abs().sum()) == 0.0
    assert [type(module) for module in found.modules()] == [type(module) for module in called.modules()]


def test_the_default_loss_takes_the_first_tensor_of_a_dataclass() -> None:
    names: dict[str, type] = {}
    exec("from dataclasses import dataclass\n@dataclass\nclass Answer:\n    name: str\n    scores: object\n", names)
    assert logits_of(names["Answer"]("x", ONE)) is ONE
