"""Small models for the distributed tests, and the tensor-parallel placements that fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from planner.models.config import FamilyConfig
from planner.models.family import build_family
from planner.models.windowed_attention import WINDOWED_ATTENTION, takes_windows
from planner.plan.schema import ModulePlacement
from tests.fixtures.encoder import Encoder
from tests.fixtures.routed import Routed

SEQ_LEN = 16
VOCAB = 256
NUM_LAYERS = 4
NUM_EXPERTS = 12  # of 16 tokens with two each some get none


@dataclass(frozen=True)
class ToyModel:
    """How to build one, and its modules in the order in which they run."""

    build: Callable[[], nn.Module]
    before: tuple[str, ...]
    blocks: tuple[str, ...]
    after: tuple[str, ...]
    placements: Callable[[bool], tuple[ModulePlacement, ...]]  # (sequence parallel) -> placements.tp
    experts: tuple[str, ...] = ()  # placements.experts


@dataclass
class Output:
    """What a Hugging Face model returns, in short; not known to torch's pytree."""

    logits: torch.Tensor
    hidden: torch.Tensor


class UnusualBlock(nn.Module):
    """A layer with keyword arguments that returns a tuple."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        y = self.out(attended.transpose(1, 2).flatten(-2)) * scale
        return x + y, y


class Backbone(nn.Module):
    """Embedding with a parameter of its own, a mask made of a buffer, and values kept until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.positions = nn.Parameter(torch.randn(SEQ_LEN, 32) * 0.1)
        self.future: torch.Tensor
        self.register_buffer("future", torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1), persistent=False)
        self.layers = nn.ModuleList(UnusualBlock(32, 4) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(32)
        self.unused = nn.Parameter(torch.zeros(3))  # of a module that stages share
        self.register_buffer("unused_angles", torch.tensor([1j, 1 - 1j]))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        mask = torch.zeros(length, length).masked_fill(self.future[:length, :length], float("-inf"))
        x = self.embed(input_ids) + self.positions[:length]
        first = x
        for layer in self.layers:
            x, last = layer(x, mask=mask, scale=0.5)
        return self.norm(x + 0.1 * last) + 0.1 * first  # pyright: ignore[reportPossiblyUnboundVariable]


class Unusual(nn.Module):
    """Returns a dataclass; its logits use the embedding's weight outside the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.scale = nn.Parameter(torch.tensor(0.5))  # without dimensions

    def forward(self, input_ids: torch.Tensor) -> Output:
        hidden = self.backbone(input_ids)
        return Output(
            logits=self.scale * F.linear(hidden, self.backbone.embed.weight, self.bias),
            hidden=hidden,
        )


def _config(family: str, *, tied: bool, dropout: float = 0.0) -> FamilyConfig:
    fields = {
        "family": family,
        "layers": NUM_LAYERS,
        "hidden": 32,
        "heads": 8,
        "ffn": 64,
        "vocab": VOCAB,
        "seq_len": SEQ_LEN,
    }
    extra = {"kv_heads": 4, "mlp": "swiglu"} if family == "llama" else {}
    return FamilyConfig.model_validate({**fields, **extra, "tied": tied, "dropout": dropout})


MIXTURE = FamilyConfig.model_validate(
    {
        "family": "moe", "layers": NUM_LAYERS, "hidden": 32, "heads": 8, "kv_heads": 4, "ffn": 64, "vocab": VOCAB,
        "seq_len": SEQ_LEN, "mlp": "swiglu", "experts": 4, "top_k": 2, "expert_ffn": 32,
    }
)  # fmt: skip

EXPERTS = tuple(f"layers.*.mlp.experts.{name}" for name in ("gate", "up", "down"))


def _starved() -> nn.Module:
    """A mixture of 16 narrow experts, the last eight without tokens."""
    return _without_tokens(build_family(MIXTURE.model_copy(update={"experts": 16, "expert_ffn": 16})))


def _without_tokens(model: nn.Module) -> nn.Module:
    """``model``, whose experts from the ninth on get none: of each two others one has a positive score."""
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            with torch.no_grad():
                parameter[4:8] = -parameter[:4]
                parameter[8:] = 0.0
    return model


def _mixtral() -> nn.Module:
    """Hugging Face's, whose experts have gate and up projection in one parameter (experts, out, in)."""
    from transformers import MixtralConfig, MixtralForCausalLM  # here, for it takes seconds

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=SEQ_LEN,
            use_cache=False,
        )
    )  # fmt: skip


def _gpt_oss() -> nn.Module:
    """Hugging Face's, whose attention has sinks, and in every other layer a window shorter than a rank's positions."""
    from transformers import GptOssConfig, GptOssForCausalLM  # here, for it takes seconds

    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=NUM_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    assert takes_windows(config)
    config._attn_implementation = WINDOWED_ATTENTION
    return GptOssForCausalLM(config)


def _gpt_oss_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    """Attention's heads, and with them its sinks; experts are whole."""
    attention = "model.layers.*.self_attn"
    column = dict.fromkeys((f"{attention}.{name}_proj" for name in "qkv"), True)
    entries = _entries(
        column, {f"{attention}.o_proj": True}, "model.embed_tokens", (), sequence_parallel=sequence_parallel
    )
    return (*entries, ModulePlacement(module=attention, parameters={"sinks": "shard(0)"}))


@torch.library.custom_op("toy_models::ramp", mutates_args=())
def _ramp(rows: int, columns: int) -> torch.Tensor:
    return torch.linspace(-0.1, 0.1, rows * columns).view(columns, rows).t()


@_ramp.register_fake
def _(rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns)  # not the strides that it has


def _misdeclared() -> nn.Module:
    """Its last layer's values cannot be made apart from the others, which shows only where they are made."""
    model = build_family(_config("gpt", tied=False))
    with torch.no_grad():
        model.get_parameter(f"layers.{NUM_LAYERS - 1}.mlp.up.weight").copy_(_ramp(64, 32))
    return model


def _looked_at() -> nn.Module:
    """Its code looks at values on one rank alone."""
    model = build_family(_config("gpt", tied=False))
    if dist.get_rank() == 1:
        model.get_parameter("head.weight").sum().item()
    return model


def _checkpointing(model: nn.Module, *, use_reentrant: bool) -> nn.Module:
    """``model``, whose own code repeats its blocks in the backward pass."""
    for index in range(NUM_LAYERS):
        block = model.get_submodule(f"layers.{index}")
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    return model


def _hooked() -> nn.Module:
    """What its hooks do before a block, behind another and at its ends is a part of it."""

    def halved(_: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5

    def backwards(
        _: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        return tuple(value.flip(1) for value in args), {name: value.flip(1) for name, value in kwargs.items()}

    model = build_family(_config("gpt", tied=False))
    model.get_submodule("layers.1").register_forward_pre_hook(lambda _, args: (args[0] + 1.0, *args[1:]))
    model.get_submodule("layers.2").register_forward_hook(halved)
    model.register_forward_pre_hook(backwards, with_kwargs=True)
    model.register_forward_hook(halved)
    return model


def _entries(
    column: dict[str, bool], row: dict[str, bool], embedding: str, norms: tuple[str, ...], *, sequence_parallel: bool
) -> list[ModulePlacement]:
    """Column- and row-parallel linears (name -> has a bias), the vocabulary-parallel embedding, the norms."""
    reduced = "shard(1)" if sequence_parallel else "replicate"
    entries = [
        ModulePlacement(module=name, parameters={"weight": "shard(0)"} | ({"bias": "shard(0)"} if bias else {}))
        for name, bias in column.items()
    ]
    entries += [
        ModulePlacement(
            module=name, parameters={"weight": "shard(1)"} | ({"bias": "replicate"} if bias else {}), output=reduced
        )
        for name, bias in row.items()
    ]
    entries += [ModulePlacement(module=name, output="replicate") for name in norms]
    return [*entries, ModulePlacement(module=embedding, parameters={"weight": "shard(0)"}, output=reduced)]


def _llama_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    column = [f"layers.*.attention.{name}" for name in ("query", "key", "value")]
    column += [f"layers.*.mlp.{name}" for name in ("gate", "up")]
    row = ("layers.*.attention.output", "layers.*.mlp.down")
    norms = ("layers.*.attention_norm", "layers.*.mlp_norm", "norm")
    entries = _entries(
        dict.fromkeys(column, False), dict.fromkeys(row, False), "embedding", norms, sequence_parallel=sequence_parallel
    )
    return (*entries, ModulePlacement(module="head", parameters={"weight": "shard(0)"}, output="shard(2)"))


def _gpt_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    column = ("layers.*.attention.qkv", "layers.*.mlp.up")
    row = ("layers.*.attention.output", "layers.*.mlp.down")
    norms = ("layers.*.attention_norm", "layers.*.mlp_norm", "norm")
    entries = _entries(
        dict.fromkeys(column, True),
        dict.fromkeys(row, True),
        "token_embedding",
        norms,
        sequence_parallel=sequence_parallel,
    )
    return (*entries, ModulePlacement(module="head", parameters={"weight": "shard(0)"}, output="shard(2)"))


def _unusual_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    column = [f"backbone.layers.*.{name}" for name in ("query", "key", "value")]
    entries = _entries(
        dict.fromkeys(column, True),
        {"backbone.layers.*.out": True},
        "backbone.embed",
        ("backbone.layers.*.norm", "backbone.norm"),
        sequence_parallel=sequence_parallel,
    )
    return tuple(entries)


def _routed_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    entries: list[ModulePlacement] = []
    for index in range(NUM_EXPERTS):
        expert = f"layers.*.experts.{index}"
        entries.append(ModulePlacement(module=f"{expert}.up", parameters={"weight": "shard(0)"}))
        entries.append(ModulePlacement(module=f"{expert}.down", parameters={"weight": "shard(1)"}, output="replicate"))
    return tuple(entries)


def _encoder_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    """Attention's fused weight is whole; of what behind it is split, parts are gathered where the module ends."""
    entries = _entries(
        {"layers.*.linear1": True, "head": True},
        {"layers.*.linear2": True},
        "embedding",
        ("layers.*.norm1", "layers.*.norm2"),
        sequence_parallel=sequence_parallel,
    )
    attention = "layers.*.self_attn"
    return (
        *entries,
        ModulePlacement(module=f"{attention}.out_proj", parameters={"weight": "shard(0)", "bias": "shard(0)"}),
        ModulePlacement(module=attention, output="shard(1)" if sequence_parallel else "replicate"),
    )


def _mixture_placements(sequence_parallel: bool) -> tuple[ModulePlacement, ...]:
    """Attention as in Llama, and of every expert's matrices a part on each rank; reduced once for each token."""
    entries = [entry for entry in _llama_placements(sequence_parallel) if ".mlp." not in entry.module]
    split = {"gate": "shard(2)", "up": "shard(2)", "down": "shard(1)"}
    return (
        *entries,
        ModulePlacement(module="layers.*.mlp.experts", parameters=split),
        ModulePlacement(module="layers.*.mlp.router", output="replicate"),
        ModulePlacement(module="layers.*.mlp", output="shard(1)" if sequence_parallel else "replicate"),
    )


def _layers(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}layers.{index}" for index in range(NUM_LAYERS))


def _family(family: str, *, tied: bool, dropout: float = 0.0) -> ToyModel:
    is_gpt = family == "gpt"
    return ToyModel(
        build=lambda: build_family(_config(family, tied=tied, dropout=dropout)),
        before=("token_embedding", "position_embedding", "dropout") if is_gpt else ("embedding",),
        blocks=_layers(""),
        after=("norm", "head"),
        placements=_gpt_placements if is_gpt else _llama_placements,
    )


UNRECORDABLE = ("gpt-looked-at", "gpt-misdeclared")  # on some ranks
MODELS = {
    "gpt": _family("gpt", tied=False),
    "gpt-tied": _family("gpt", tied=True),
    "gpt-dropout": _family("gpt", tied=False, dropout=0.5),
    "gpt-looked-at": replace(_family("gpt", tied=False), build=_looked_at),
    "gpt-misdeclared": replace(_family("gpt", tied=False), build=_misdeclared),
    "gpt-hooked": replace(_family("gpt", tied=False), build=_hooked),
    "llama": _family("llama", tied=False),
    "llama-checkpointing": replace(
        _family("llama", tied=False),
        build=lambda: _checkpointing(build_family(_config("llama", tied=False)), use_reentrant=False),
    ),
    "mixture": ToyModel(
        lambda: build_family(MIXTURE), ("embedding",), _layers(""), ("norm", "head"), _mixture_placements, EXPERTS
    ),
    "mixture-checkpointing": ToyModel(
        lambda: _checkpointing(build_family(MIXTURE), use_reentrant=True),
        ("embedding",),
        _layers(""),
        ("norm", "head"),
        _mixture_placements,
        EXPERTS,
    ),
    "mixture-starved": ToyModel(_starved, ("embedding",), _layers(""), ("norm", "head"), _mixture_placements, EXPERTS),
    "mixtral": ToyModel(
        _mixtral,
        ("model.embed_tokens",),
        _layers("model."),
        ("model.norm", "lm_head"),
        lambda sequence_parallel: (),
        tuple(f"model.layers.*.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")),
    ),
    "gpt-oss": ToyModel(
        _gpt_oss, ("model.embed_tokens",), _layers("model."), ("model.norm", "lm_head"), _gpt_oss_placements
    ),
    "encoder": ToyModel(lambda: Encoder(NUM_LAYERS), ("embedding",), _layers(""), ("head",), _encoder_placements),
    "routed": ToyModel(
        lambda: Routed(NUM_LAYERS, NUM_EXPERTS), ("embedding",), _layers(""), ("head",), _routed_placements
    ),
    "routed-starved": ToyModel(
        lambda: _without_tokens(Routed(NUM_LAYERS, NUM_EXPERTS)),
        ("embedding",),
        _layers(""),
        ("head",),
        _routed_placements,
    ),
    "unusual": ToyModel(Unusual, ("backbone.embed",), _layers("backbone."), ("backbone.norm",), _unusual_placements),
}
