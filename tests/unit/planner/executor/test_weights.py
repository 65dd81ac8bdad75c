"""Initial weights: safetensors by FQN, and by Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import InputError
from planner.executor.weights import load_weights, matched_weights, read_safetensors
from planner.model_file import load_model, resolve_model

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(3)
        self.head.weight = self.embedding.weight


def test_everything_is_filled_by_its_name(tmp_path: Path) -> None:
    source, target = Tied(), Tied()
    values = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    values["norm.bias"] = torch.full((3,), 0.5, dtype=torch.bfloat16)
    safetensors_torch.save_file(values, tmp_path / "model.safetensors")
    load_weights(target, tmp_path / "model.safetensors")
    assert torch.equal(target.head.weight, source.embedding.weight)
    assert target.norm.bias.tolist() == [0.5] * 3


def test_weights_are_found_for_a_module_without_values_and_are_not_read(tmp_path: Path) -> None:
    source = Tied()
    with torch.device("meta"):
        target = Tied()
    values = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    safetensors_torch.save_file(values, tmp_path / "model.safetensors")
    found = matched_weights(target, tmp_path / "model.safetensors")
    assert found.keys() == source.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())
    addresses = {value.untyped_storage().data_ptr() for value in found.values()}
    assert len(addresses) == 1  # all are parts of the mapped file


def test_names_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    safetensors_torch.save_file(
        {"embedding.weight": torch.zeros(5, 3), "x": torch.zeros(1)}, tmp_path / "w.safetensors"
    )
    with pytest.raises(InputError, match=r"2 tensors of the model are not in it.*norm\.bias.*1 of its.*first x"):
        load_weights(Tied(), tmp_path / "w.safetensors")


def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    safetensors_torch.save_file({"a": torch.zeros(5, 3)}, path)
    whole = path.read_bytes()
    for end in (4, 20, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match="not a whole safetensors file"):
            read_safetensors(path)


def test_weights_that_are_not_there_or_of_another_kind_are_not_called_broken(tmp_path: Path) -> None:
    """Both were to be downloaded again."""
    path = tmp_path / "w.safetensors"
    with pytest.raises(InputError, match="No such file") as error:
        read_safetensors(path)
    assert error.value.hint == "check the path of the weights"
    safetensors_torch.save_file({"a": torch.zeros(5, 3).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(InputError, match="a is F8_E4M3") as error:
        read_safetensors(path)
    assert "BF16" in (error.value.hint or "")


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    """Whole numbers were taken for weights as they stood, and training began at a loss of thousands."""
    path = tmp_path / "w.safetensors"
    safetensors_torch.save_file({"weight": torch.ones(3, 5, dtype=torch.int8)}, path)
    with pytest.raises(InputError, match="weight is stored as int8"):
        matched_weights(nn.Linear(5, 3, bias=False), path)


def test_hugging_face_s_names_and_layouts(tmp_path: Path) -> None:
    """A mixture: its file has a matrix for each expert, transformers' module one tensor for all."""
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    source = transformers.MixtralForCausalLM(config).float()
    source.save_pretrained(tmp_path)
    torch.manual_seed(1)
    loaded = load_model(resolve_model(str(tmp_path)))
    module = loaded.build().float()
    load_weights(module, tmp_path)
    expected = source.state_dict()
    assert set(module.state_dict()) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
