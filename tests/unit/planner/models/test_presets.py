"""Presets and families: published sizes, real modules, and they learn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from planner.cli import models, trace
from planner.models.catalog import Preset, find_preset, list_presets
from planner.models.config import FamilyConfig
from planner.models.family import build_family
from planner.models.loss import next_token_loss

ROOT = Path(__file__).resolve().parents[4]

SHAPE: dict[str, object] = {
    "family": "gpt",
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "ffn": 64,
    "vocab": 16,
    "seq_len": 16,
}

PUBLISHED = {  # model cards and checkpoints
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2-1.5b": 1_557_611_200,
}


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_parameters_in_closed_form_equal_the_module(preset: Preset) -> None:
    with torch.device("meta"):
        module = build_family(preset.config)
    assert sum(p.numel() for p in module.parameters()) == preset.config.num_params


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED.items())
def test_published_sizes(name: str, num_params: int) -> None:
    preset = find_preset(name)
    assert preset is not None
    assert preset.config.num_params == num_params


def test_narayanan_sizes_are_in_the_names() -> None:
    """Table 1 of the paper prints the sizes that the presets are named after."""
    for preset in list_presets():
        if preset.name.startswith("megatron-"):
            billions = float(preset.name.removeprefix("megatron-").removesuffix("b"))
            assert preset.config.num_params / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("mlp", ["gelu", "relu", "squared_relu", "swiglu", "geglu"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_member_of_a_family_learns(family: str, mlp: str, kv_heads: int) -> None:
    config = FamilyConfig.model_validate({**SHAPE, "family": family, "mlp": mlp, "kv_heads": kv_heads})
    torch.manual_seed(0)
    module = build_family(config)
    assert sum(p.numel() for p in module.parameters()) == config.num_params
    ids = torch.arange(32).view(2, 16) % 16
    batch = {"input_ids": ids, "labels": (ids + 1) % 16}
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses: list[float] = []
    for _ in range(20):
        loss = next_token_loss(module(ids), batch)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in module.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_no_position_sees_a_later_one(name: str) -> None:
    preset = find_preset(name)
    assert preset is not None
    torch.manual_seed(0)
    module = build_family(preset.config).eval()
    ids = torch.randint(0, 256, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 256
    before, after = module(ids), module(changed)
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-5)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads must divide hidden"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"family": "llama", "head_dim": 7}, "even head size"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FamilyConfig.model_validate({**SHAPE, **changes})


def test_listed_as_json_without_torch() -> None:
    program = (
        "import sys; from planner.cli.models import models; models(as_json=True); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["llama3-70b"]["layers"] == 80
    assert all(row["source"] for row in rows.values())


def test_listed_as_a_table() -> None:
    app = typer.Typer()
    models.register(app)
    trace.register(app)  # a second command, so that the first is named
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == 0
    assert "llama3-405b" in result.stdout
