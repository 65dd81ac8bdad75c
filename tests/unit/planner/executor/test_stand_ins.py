"""Values that stand in for those of a model without any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.executor.recording import UnrecordableError
from planner.executor.stand_ins import stood_in


def model() -> nn.Sequential:
    """Six matrices of which two are one, with norms and biases and a buffer."""
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    found = nn.Sequential(nn.Embedding(512, 64), *layers, nn.Linear(64, 512, bias=False))
    found[-1].weight = found[0].weight
    found.register_buffer("scale", torch.full((3,), 7.0))
    return found


def on_meta() -> nn.Sequential:
    """Parameters are without values, as a recorded model has them; its buffers have some."""
    found = model()
    buffers = dict(found.named_buffers())
    found = found.to("meta")
    found[-1].weight = found[0].weight
    for name, value in buffers.items():
        found.register_buffer(name, value)
    return found


def test_all_have_values_in_the_memory_of_the_largest() -> None:
    torch.manual_seed(0)
    found = stood_in(on_meta())
    assert isinstance(found, nn.Sequential)
    parameters = dict(found.named_parameters())
    assert parameters.keys() == dict(model().named_parameters()).keys()
    assert found[0].weight is found[-1].weight
    assert torch.equal(found.get_buffer("scale"), torch.full((3,), 7.0))
    tables = [value for value in parameters.values() if value.ndim > 1]
    assert len(tables) == 5
    (storage,) = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tables}.values()
    assert storage <= 4 * (512 * 64 + 8 * len(parameters))
    assert sum(value.nbytes for value in tables) > 2.9 * storage


def test_they_are_as_a_model_s_are() -> None:
    """What comes out is as large as what goes in, and no two tables are the same."""
    torch.manual_seed(0)
    parameters = {fqn: value.detach() for fqn, value in stood_in(on_meta()).named_parameters()}
    assert float(parameters["1.0.weight"].mean()) == pytest.approx(1.0, abs=0.1)
    assert float(parameters["1.0.bias"].mean()) == pytest.approx(0.0, abs=0.1)
    assert float(parameters["1.1.weight"].std()) == pytest.approx(256**-0.5, rel=0.05)
    assert not torch.equal(parameters["1.1.weight"], parameters["2.1.weight"])


def test_what_may_be_an_index_has_no_stand_in() -> None:
    found = model()
    found.places = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(UnrecordableError, match=r"places is of torch\.int64"):
        stood_in(found.to("meta"))


def test_a_vector_may_be_the_largest() -> None:
    found = nn.Linear(4, 4)
    found.flat = nn.Parameter(torch.empty(10_000))
    values = dict(stood_in(found.to("meta")).named_parameters())
    assert values["flat"].shape == (10_000,)
    assert float(values["flat"].detach().mean()) == pytest.approx(1.0, abs=0.1)
