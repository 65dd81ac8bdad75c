"""Values that are played back are, bit by bit, those of building the model; what cannot be played back is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import nn

from planner.executor.recorded_build import RecordedModel, recorded_model
from planner.executor.recording import UnrecordableError
from tests.distributed.toy_models import MODELS, UNRECORDABLE

BEFORE = torch.arange(12.0)


def whole(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def recorded(build: Callable[[], nn.Module]) -> RecordedModel:
    torch.manual_seed(3)
    return recorded_model(build)


def played(built: RecordedModel, names: list[str]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    built.recording.play([built.parameters[name] for name in names], lambda i, v: found.update({names[i]: v.clone()}))
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 20), nn.Linear(20, 8), nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.full((8,), 0.1))


class Elaborate(nn.Module):
    """Most of what people do: a pass over all modules, copies, parts, orthogonal and cut-off values, tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, padding_idx=2)
        template = Block()
        self.blocks = nn.ModuleList(copy.deepcopy(template) for _ in range(3))
        self.mixed = nn.Parameter(torch.randn(3, 8) / math.sqrt(8) + torch.tensor([0.5]))
        self.square = nn.Parameter(torch.empty(8, 8))
        self.fused = nn.Linear(8, 24)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(6), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
        self.register_buffer("angles", angles.cos(), persistent=False)
        self.register_buffer("noise", torch.rand(5))
        self.register_buffer("before", BEFORE)
        self.apply(self._initialise)
        nn.init.orthogonal_(self.square)
        with torch.no_grad():
            self.fused.weight[8:16].mul_(0.5)
            self.fused.weight[16:] = self.square
            self.get_parameter("blocks.1.up.weight").copy_(BEFORE.repeat(14)[:160].view(20, 8))
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(6))
        self.double()

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.5, a=-1.0, b=0.7)
            module.weight.data = module.weight.data.t().contiguous().t()
            if module.bias is not None:
                nn.init.uniform_(module.bias)


class Reseeding(nn.Module):
    """Draws from the same numbers again, and returns to where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(3)
            self.forked = nn.Linear(5, 3)
        self.after = nn.Linear(5, 3)
        state = torch.get_rng_state()
        self.once = nn.Parameter(torch.randn(7))
        torch.set_rng_state(state)
        self.again = nn.Parameter(torch.randn(7))
        torch.manual_seed(torch.initial_seed() + 1)
        self.seeded = nn.Parameter(torch.randn(20))
        self.last = nn.Parameter(torch.rand(3))


@pytest.mark.parametrize(
    "build", [Elaborate, Reseeding, *(MODELS[name].build for name in sorted(MODELS.keys() - UNRECORDABLE))]
)
def test_values_are_those_of_building(build: Callable[[], nn.Module]) -> None:
    expected, built = whole(build), recorded(build)
    values = dict(expected.named_parameters(remove_duplicate=False))
    assert built.parameters.keys() == values.keys()
    found = played(built, list(values))
    for name, value in values.items():
        assert torch.equal(found[name], value), name
        target = built.module.get_parameter(name)
        assert target.is_meta
        for kind in ("shape", "dtype", "requires_grad"):
            assert getattr(target, kind) == getattr(value, kind), name
    for (name, one), (other_name, other) in zip(built.module.named_buffers(), expected.named_buffers(), strict=True):
        assert name == other_name
        assert torch.equal(one, other), name
    assert dict(built.module.named_parameters()).keys() == dict(expected.named_parameters()).keys()  # ties


def test_a_part_is_the_same_as_in_the_whole_and_the_generator_is_left_alone() -> None:
    expected = dict(whole(Elaborate).named_parameters(remove_duplicate=False))
    built = recorded(Elaborate)
    state = torch.get_rng_state()
    for name, value in expected.items():
        assert torch.equal(played(built, [name])[name], value), name
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.initial_seed() == 3


def test_no_more_than_a_few_parameters_are_there_at_once() -> None:
    size, count = 2**22, 48  # 16 MiB each: mapped, and given back when they are let go

    def build() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(2**11, 2**11, bias=False) for _ in range(count)))
        for layer in layers:
            nn.init.normal_(layer.get_parameter("weight"))
        return layers

    process = psutil.Process()
    before = process.memory_info().rss
    built = recorded(build)
    seen: list[int] = []
    names = list(built.parameters)
    wanted = [built.parameters[name] for name in names]
    built.recording.play(wanted, lambda index, value: seen.append(process.memory_info().rss - before))
    assert len(seen) == count
    assert max(seen) < 6 * 4 * size < 4 * size * count / 4


def reads_a_value() -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.bias, layer.weight.abs().max().item())
    return layer


def handles_what_it_meets() -> nn.Module:
    layer = nn.Linear(3, 3)
    try:
        scale = float(layer.weight.norm())
    except Exception:
        scale = 1.0
    nn.init.constant_(layer.bias, scale)
    return layer


def draws_from_its_own_generator() -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return layer


def keeps_a_tensor() -> nn.Module:
    layer = nn.Linear(3, 3)
    vars(layer)["scales"] = [torch.rand(3)]
    return layer


def has_values_from_before() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.bias = nn.Parameter(BEFORE)
    return layer


def draws_by_values() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.bernoulli(torch.rand(3, 3))
    return layer


def fills_by_numpy() -> nn.Module:
    layer = nn.Linear(3, 3)
    layer.weight.detach().numpy()[:] = 1.0
    return layer


def looks_at_addresses() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    if first.weight.data_ptr() == second.weight.data_ptr():
        second.weight = first.weight
    return nn.Sequential(first, second)


def test_what_an_operator_misdeclares_shows_where_it_is_played() -> None:
    built = recorded(MODELS["gpt-misdeclared"].build)
    with pytest.raises(UnrecordableError, match=r"ramp.* makes .* strides \(1, 64\) where it declares"):
        played(built, ["layers.3.mlp.up.weight"])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (reads_a_value, "_local_scalar_dense"),
        (handles_what_it_meets, "_local_scalar_dense"),
        (draws_from_its_own_generator, "a Generator"),
        (keeps_a_tensor, "neither parameters nor buffers"),
        (has_values_from_before, "came about otherwise"),
        (draws_by_values, "bernoulli"),
        (fills_by_numpy, "numpy"),
        (looks_at_addresses, "data_ptr"),
    ],
)
def test_what_cannot_be_played_back_is_refused(build: Callable[[], nn.Module], reason: str) -> None:
    whole(build)
    with pytest.raises(UnrecordableError, match=reason):
        recorded(build)
