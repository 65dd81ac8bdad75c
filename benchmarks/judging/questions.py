"""Random questions to the search: a model, a cluster, a batch and pins, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from costmodels.vocabulary.choices import Optimizer, Precision, Preference, Recompute
from costmodels.vocabulary.schedules import SCHEDULES, ScheduleName
from planner.api import find_plan
from planner.errors import InfeasibleError, InputError, TimeLimitError
from planner.layout.layout import NO_PINS, Pins
from planner.models.config import FamilyConfig
from planner.plan.schema import Plan
from planner.request import Request

# Half of the runs of a plan that just fits run out of memory at this risk: a plan fits where its expected peak does.
EVEN_RISK = 0.5
CRASHED = "crashed"  # where a search ends with an error that is not for the user


@dataclass(frozen=True)
class Question:
    """One search. ``model`` is a graph.json; ``name`` says what was traced for it."""

    name: str
    model: str
    num_devices: int | None
    hardware: str
    seq_len: int
    global_batch_size: int
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    pins: Pins = NO_PINS

    @cached_property
    def request(self) -> Request:
        """As the Python API takes it: the fastest plan is asked for, not a simpler one that is about as fast."""
        request = Request(
            model=self.model,
            num_devices=self.num_devices,
            hardware=self.hardware,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            optimizer=self.optimizer,
            pins=self.pins,
            prefer=Preference.FASTEST,
        )
        if "memory_risk" in {field.name for field in fields(Request)}:
            request = replace(request, **{"memory_risk": EVEN_RISK})
        return request

    def __str__(self) -> str:
        devices = "" if self.num_devices is None else f"{self.num_devices} x "
        parts = [
            f"{self.name} on {devices}{self.hardware}",
            f"{self.global_batch_size} sequences of {self.seq_len}",
            *([] if self.precision is Precision.BF16 else [self.precision.value]),
            *([] if self.optimizer is Optimizer.ADAMW else [self.optimizer.value]),
            *([self.pins.describe()] if self.pins != NO_PINS else []),
        ]
        return ", ".join(parts)


class Reply(NamedTuple):
    """What the search said: a plan, or why there is none."""

    plan: Plan | None
    status: str  # of the plan; or "nothing fits", "refused", "no time", "crashed"
    reason: str = ""


def ask(question: Question) -> Reply:
    """The search's reply to ``question``."""
    try:
        plan = find_plan(question.request).plan
    except InfeasibleError as error:
        return Reply(None, "nothing fits", error.message)
    except TimeLimitError as error:
        return Reply(None, "no time", error.message)
    except InputError as error:
        return Reply(None, "refused", error.message)
    except Exception as error:  # a mistake of ours, which a judge writes down and goes on
        return Reply(None, CRASHED, f"{type(error).__name__}: {error}")
    assert plan.search is not None
    return Reply(plan, plan.search.status)


class Machine(NamedTuple):
    """A profile, or several of them, and the numbers of devices that are asked for."""

    hardware: str
    counts: tuple[int | None, ...]  # None: what ``hardware`` counts
    precision: Precision = Precision.BF16


MACHINES = (
    Machine("dgx-a100-80gb", (2, 4, 8, 12, 16, 24, 32, 48, 64)),
    Machine("dgx-a100-40gb", (3, 4, 6, 8, 16, 32)),
    Machine("dgx-h100-80gb", (1, 2, 4, 7, 8, 16, 40, 64, 128)),
    Machine("rtx-4090-x8", (2, 3, 4, 5, 6, 8, 10, 16, 24)),
    Machine("rtx-3090-x8", (4, 8, 9, 16)),
    Machine("l40s-x8", (4, 8, 12, 16)),
    Machine("a100-pcie-40gb-x8", (2, 4, 8, 15, 16)),
    Machine("aws-g5-48xlarge", (4, 8, 16)),
    Machine("dgx-2-v100-32gb", (4, 8, 16, 32), Precision.FP16),
    Machine("dgx-1-v100-16gb", (2, 4, 6, 8, 16), Precision.FP16),
    Machine("mi250x-x8", (8, 16)),
    Machine("h100-pcie-x8", (4, 8, 18)),
    Machine("tpu-v4", (4, 8, 16)),
    Machine("dgx-a100-80gb:8,dgx-h100-80gb:8", (None,)),
    Machine("dgx-a100-40gb:4,dgx-a100-80gb:4", (None,)),
    Machine("dgx-a100-80gb:16,dgx-h100-80gb:8", (None,)),
    Machine("rtx-3090-x8:4,rtx-4090-x8:8", (None,)),
)
SMALL_MACHINES = (
    Machine("dgx-a100-80gb", (2, 4, 6, 8)),
    Machine("rtx-4090-x8", (2, 3, 4, 8)),
    Machine("dgx-1-v100-16gb", (2, 4, 6), Precision.FP16),
    Machine("a100-pcie-40gb-x8", (3, 4, 8)),
    Machine("dgx-a100-40gb:2,dgx-h100-80gb:2", (None,)),
    Machine("rtx-3090-x8:4,rtx-4090-x8:4", (None,)),
)

# Presets by what a search over them takes: the large ones are left to the command, out of the tests.
PRESETS = (
    "gpt-tiny", "llama-tiny", "moe-tiny", "gpt3-125m", "gpt3-350m", "gpt3-760m", "gpt3-1.3b", "gpt2-1.5b",
    "megatron-1.7b", "gpt3-2.7b", "megatron-3.6b", "gpt3-6.7b", "megatron-7.5b", "gpt3-13b", "megatron-18.4b",
    "llama2-7b", "llama3-8b", "qwen3-8b", "llama2-13b", "qwen3-32b", "llama2-70b", "llama3-70b", "qwen3-30b-a3b",
    "mixtral-8x7b",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model of our own family builder, and the length of its sequences."""

    family: str
    layers: int
    hidden: int
    vocab: int
    seq_len: int

    @property
    def name(self) -> str:
        """In one word."""
        return f"{self.family}-{self.layers}x{self.hidden}-v{self.vocab}-s{self.seq_len}"

    @property
    def config(self) -> FamilyConfig:
        """Heads of 64, a feed-forward network four times as wide; experts: four of half the width, two a token."""
        experts = {"experts": 4, "top_k": 2, "expert_ffn": self.hidden * 2} if self.family == "moe" else {}
        return FamilyConfig.model_validate(
            {
                "family": self.family, "layers": self.layers, "hidden": self.hidden, "heads": max(1, self.hidden // 64),
                "ffn": 4 * self.hidden, "vocab": self.vocab, "seq_len": self.seq_len,
                "mlp": "gelu" if self.family == "gpt" else "swiglu", "tied": self.family == "gpt", **experts,
            }
        )  # fmt: skip


# A user's own model whose blocks have from once to sixteen times the work of each other.
_CHAIN = """import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.heads, self.norm = hidden // 64, nn.LayerNorm(hidden)
        self.attended, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (each.unflatten(-1, (self.heads, 64)).transpose(1, 2) for each in self.attended(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding({vocab}, {hidden})
        self.blocks = nn.ModuleList(Block({hidden}, inner) for inner in {inner})
        self.norm, self.head = nn.LayerNorm({hidden}), nn.Linear({hidden}, {vocab})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return Chain()


def example_batch(batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    return {{"tokens": torch.randint(0, {vocab}, (batch_size, seq_len))}}
"""


@dataclass(frozen=True)
class Chain:
    """A model of a user's own whose blocks are unlike, and the length of its sequences."""

    factors: tuple[int, ...]  # how many times the hidden size is inside of each block
    hidden: int
    vocab: int
    seq_len: int

    @property
    def name(self) -> str:
        """In one word."""
        return f"chain-{'-'.join(map(str, self.factors))}x{self.hidden}-v{self.vocab}-s{self.seq_len}"

    @property
    def code(self) -> str:
        """Its model.py."""
        inner = [factor * self.hidden for factor in self.factors]
        return _CHAIN.format(vocab=self.vocab, hidden=self.hidden, inner=inner)


def random_chain(draw: random.Random, layers: Sequence[int]) -> Chain:
    """Of every two blocks one may have up to sixteen times the work of the other."""
    return Chain(
        factors=tuple(draw.choice((1, 2, 4, 8, 16)) for _ in range(draw.choice(layers))),
        hidden=draw.choice((512, 1024, 2048)),
        vocab=draw.choice((8_000, 32_000, 128_000)),
        seq_len=draw.choice((512, 2048, 4096)),
    )


def random_shape(draw: random.Random, layers: Sequence[int]) -> Shape:
    """A model whose states and activations fill devices of 16 to 80 GB to very different degrees."""
    return Shape(
        family=draw.choice(("gpt", "llama", "llama", "moe")),
        layers=draw.choice(layers),
        hidden=draw.choice((512, 1024, 2048, 4096)),
        vocab=draw.choice((8_000, 32_000, 128_000)),
        seq_len=draw.choice((512, 2048, 4096)),
    )


class Drawn(NamedTuple):
    """A cluster, a batch and pins for some model."""

    machine: Machine
    num_devices: int | None
    global_batch_size: int
    optimizer: Optimizer
    pins: Pins

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.num_devices or sum(int(part.rpartition(":")[2]) for part in self.machine.hardware.split(","))


def drawn(draw: random.Random, machines: Sequence[Machine], most_microbatches: int) -> Drawn:
    """Everything of a question but its model. Half of the questions have no pin, the rest up to four."""
    machine = draw.choice(machines)
    num_devices = draw.choice(machine.counts)
    count = Drawn(machine, num_devices, 1, Optimizer.ADAMW, NO_PINS).world_size
    factor = draw.choice([n for n in (1, 2, 3, 4, 6, 8, 12, 16, 32) if n <= most_microbatches])
    batch = max(1, count * factor // draw.choice((1, 1, 1, 2, 4)))
    optimizer = draw.choice((Optimizer.ADAMW, Optimizer.ADAMW, Optimizer.ADAMW, Optimizer.SGD))
    pins = random_pins(draw, count) if draw.random() < 0.5 else NO_PINS
    return Drawn(machine, num_devices, batch, optimizer, pins)


def random_pins(draw: random.Random, num_devices: int) -> Pins:
    """One to four pins; degrees are divisors of the devices, and may contradict each other."""
    degrees = [d for d in range(1, min(num_devices, 16) + 1) if num_devices % d == 0]
    searched: list[ScheduleName] = [name for name, rules in SCHEDULES.items() if rules.in_torch]
    options: dict[str, Sequence[object]] = {
        "tp": degrees, "pp": degrees, "pp ": degrees, "dp": degrees, "cp": degrees[:3], "zero": (0, 1, 2, 3),
        "micro_batch": (1, 2, 4), "schedule": searched, "virtual_stages": (1, 2, 3), "recompute": list(Recompute),
        "sequence_parallel": (True, False),
    }  # fmt: skip
    names = draw.sample(list(options), draw.choice((1, 1, 2, 2, 3, 4)))
    chosen = {name.strip(): draw.choice(options[name]) for name in names}
    return replace(NO_PINS, **chosen)


def pins_of_a_pipeline(draw: random.Random, num_devices: int) -> Pins:
    """A pipeline, with half of the time one more pin: small models seldom get one by themselves."""
    pp = draw.choice([d for d in range(2, num_devices + 1) if num_devices % d == 0])
    more = draw.choice(({}, {}, {}, {"zero": 1}, {"micro_batch": 1}, {"recompute": Recompute.FULL}))
    return replace(NO_PINS, pp=pp, **more)


def as_data(question: Question) -> dict[str, object]:
    """``question`` for a JSON file, without defaults and places on this machine."""
    pins = {name: value for name, value in asdict(question.pins).items() if value is not None}
    found: dict[str, object] = {
        "model": question.name,
        "num_devices": question.num_devices,
        "hardware": question.hardware,
        "seq_len": question.seq_len,
        "global_batch_size": question.global_batch_size,
        "precision": question.precision.value,
        "optimizer": question.optimizer.value,
    }
    return {**found, "pins": pins} if pins else found
