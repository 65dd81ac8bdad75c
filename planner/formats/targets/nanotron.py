"""nanotron: its YAML config, written and read back."""

from __future__ import annotations

import re
from collections.abc import Iterator

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.documents import (
    MAX_LAYERS,
    choice,
    commented,
    flag,
    number,
    read_yaml,
    section,
    unread_note,
    yaml_text,
)
from planner.formats.settings import Asked, Job, Layout, Settings
from planner.formats.target import Abilities, Read, Refusal, Target, Written
from planner.models.config import FamilyConfig, MlpType

VERSION = "nanotron main at 2411b02"  # 2026-04-07; the last tag, v0.5, is of 2024
ENGINES = {ScheduleName.ONE_F_ONE_B: "1f1b", ScheduleName.GPIPE: "afab"}  # config/utils_config.py
TP_MODES = {True: "REDUCE_SCATTER", False: "ALL_REDUCE"}  # with and without sequence parallelism
DTYPES = {Precision.BF16: "bfloat16", Precision.FP32: "float32"}
OPTIMIZERS = {Optimizer.ADAMW: "adamW", Optimizer.SGD: "sgd"}
ON_BY_DEFAULT = ("parallelism.tp_recompute_allgather",)
READ_MODELS = ("is_llama_config", "is_qwen2_config")
RING = "ring"  # _attn_implementation of Qwen2Config: nn/attention.py
ABILITIES = Abilities(
    axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp"}),
    zero_stages=(0, 1),
    schedules=tuple(ENGINES),
    recompute=(Recompute.NONE, Recompute.FULL),
    precisions=tuple(DTYPES),
    optimizers=tuple(OPTIMIZERS),
    cp_methods=(ContextMethod.RING,),
    cuts_unevenly=True,  # as it cuts by itself
)


def stage_blocks(shape: FamilyConfig, pp: int) -> tuple[int, ...]:
    """The blocks of each stage, which nanotron shares out by their cost (models/base.py, get_block_compute_costs).

    A piece is put on the present rank, which is left once the cost so far is above its share of the whole.
    """
    width = shape.hidden // shape.heads
    block = 4 * shape.heads * width * shape.hidden + 3 * shape.ffn * shape.hidden
    whole = shape.layers * block + shape.vocab * shape.hidden
    found, rank = [0] * pp, 0
    for index in range(shape.layers):
        found[rank] += 1
        if (index + 1) * block > whole * ((rank + 1) / pp):
            rank += 1
    return tuple(found)


def limits(job: Asked) -> Iterator[Refusal]:
    """What its models, its optimizer and its cut allow."""
    layout, shape = job.layout, job.shape
    if shape is None:
        yield Refusal(
            "its config holds the model's sizes, which the planner does not know of this model",
            "plan for a preset or a config.json of model_type llama",
        )
        return
    if not _is_llama(shape):
        yield Refusal("it trains Llama and Qwen2 models: rotary positions, RMSNorm, SwiGLU, heads of hidden / heads",
                      "export with --to megatron")  # fmt: skip
    if layout.zero_stage > 0 and layout.dp_replicate > 1:
        yield Refusal("its ZeRO shards over all data-parallel ranks", "search without replicas of shards")
    if layout.cp > 1 and layout.zero_stage > 0:
        yield Refusal("its ZeRO shards over data-parallel ranks alone, the plan's over those of cp too",
                      "search with --zero 0 or --cp 1")  # fmt: skip
    cut = stage_blocks(shape, layout.pp)
    if layout.pp > 1 and layout.stage_blocks not in (None, cut):
        held = ", ".join(map(str, (layout.stage_blocks or ())[:8]))
        yield Refusal(
            f"it cuts this model itself, into stages of {', '.join(map(str, cut[:8]))} blocks; the plan's hold {held}",
            "put these numbers of blocks into pipeline.stages, and planner estimate it",
        )


def _is_llama(shape: FamilyConfig) -> bool:
    plain = shape.head_dim in (None, shape.hidden // shape.heads) and not shape.qk_norm
    return shape.family == "llama" and shape.mlp is MlpType.SWIGLU and plain


def write(job: Job) -> Written:
    """Classes of src/nanotron/config."""
    layout, shape = job.layout, job.shape
    assert shape is not None  # limits
    notes = (
        "data_stages, tokenizer, learning rate, train_steps and checkpoints are examples: set them",
        f"start it on {job.num_nodes} nodes of {job.devices_on_node} GPUs: CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ... "
        "run_train.py --config-file FILE",
    )
    document = {
        "general": {"project": "planner", "run": "planner", "seed": 42},
        "parallelism": _parallelism(layout),
        "model": {
            "dtype": DTYPES[layout.precision],
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "ddp_bucket_cap_mb": 25,
            "model_config": _model(shape, layout),
        },
        "tokenizer": {"tokenizer_name_or_path": None},
        "tokens": {
            "sequence_length": layout.seq_len,
            "micro_batch_size": layout.micro_batch_size,
            "batch_accumulation_per_replica": layout.num_microbatches,
            "train_steps": 1000,
        },
        "optimizer": _optimizer(layout),
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "data_stages": [
            {
                "name": "Training",
                "start_training_step": 1,
                "data": {"dataset": None, "num_loading_workers": 1, "seed": 42},
            }
        ],
    }
    head = commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
    return Written(head + yaml_text(document), notes)


def _parallelism(layout: Layout) -> dict[str, object]:
    return {
        "dp": layout.dp,
        "pp": layout.pp,
        "tp": layout.tp,
        "context_parallel_size": layout.cp,
        "expert_parallel_size": 1,
        "pp_engine": ENGINES[layout.schedule],
        "tp_mode": TP_MODES[layout.sequence_parallel and layout.tp > 1],
        "tp_linear_async_communication": layout.sequence_parallel and layout.tp > 1,
        "recompute_layer": layout.recompute is Recompute.FULL,
    }


def _model(shape: FamilyConfig, layout: Layout) -> dict[str, object]:
    """LlamaConfig; under context parallelism Qwen2Config, whose attention goes round a ring."""
    return {
        "is_qwen2_config" if layout.cp > 1 else "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": max(layout.seq_len, shape.seq_len),
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocab,
        **({"_attn_implementation": RING} if layout.cp > 1 else {}),
    }


def _optimizer(layout: Layout) -> dict[str, object]:
    factory: dict[str, object] = {"name": OPTIMIZERS[layout.optimizer]}
    if layout.optimizer is Optimizer.ADAMW:
        factory |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1.0e-8, "torch_adam_is_fused": True}
    return {
        "zero_stage": layout.zero_stage,
        "accumulate_grad_in_fp32": True,
        "clip_grad": 1.0,
        "weight_decay": 0.01,
        "optimizer_factory": factory,
        "learning_rate_scheduler": {
            "learning_rate": 3.0e-4,
            "lr_warmup_steps": 100,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": 3.0e-5,
        },
    }


# -- reading ------------------------------------------------------------------------------------


def read(text: str) -> Read:
    """Settings of a config; what it leaves out has the defaults of ParallelismArgs."""
    document = read_yaml(text)
    parallelism, tokens = section(document, "parallelism"), section(document, "tokens")
    optimizer, model = section(document, "optimizer"), section(document, "model")
    degrees = {name: number(parallelism, name) for name in ("dp", "pp", "tp")}
    wrong = [name for name, value in degrees.items() if value is None or not 1 <= value <= MAX_LAYERS]
    if wrong:
        raise InputError(f"parallelism.{', '.join(wrong)} must be 1 to {MAX_LAYERS}", hint="correct the file")
    dp, pp, tp = (degrees[name] or 1 for name in ("dp", "pp", "tp"))
    cp = number(parallelism, "context_parallel_size", 1) or 1
    if (number(parallelism, "expert_parallel_size", 1) or 1) > 1:
        raise InputError("experts of nanotron (expert_parallel_size) are not read", hint="set it to 1")
    # helpers.py: any stage above 0 is one. Over the ranks of context parallelism our stage 1 shards too.
    zero = min(1, number(optimizer, "zero_stage", 0) or 0) if dp > 1 else 0
    mode = str(parallelism.get("tp_mode") or "ALL_REDUCE").upper()
    engine = parallelism.get("pp_engine") or "afab"
    shape = _shape(section(model, "model_config"), section(document, "model"), tokens)
    cut = _cut(shape, pp)
    settings = Settings(
        num_devices=dp * pp * tp * cp, pp=pp, cp=cp, tp=tp, ep=1, zero_stage=zero,
        dp_replicate=1 if zero else dp, dp_shard=dp if zero else 1,
        micro_batch_size=number(tokens, "micro_batch_size"),
        num_microbatches=number(tokens, "batch_accumulation_per_replica"),
        seq_len=number(tokens, "sequence_length"),
        precision=choice("model.dtype", model.get("dtype") or "bfloat16", DTYPES),
        optimizer=choice("optimizer.optimizer_factory.name",
                         section(optimizer, "optimizer_factory").get("name", "adamW"), OPTIMIZERS),
        schedule=choice("parallelism.pp_engine", engine, ENGINES) if pp > 1 else ScheduleName.ONE_F_ONE_B,
        virtual_stages=1, stage_blocks=cut,
        recompute=Recompute.FULL if flag(parallelism, "recompute_layer") else Recompute.NONE,
        sequence_parallel=tp > 1 and choice("parallelism.tp_mode", mode, TP_MODES), offload=Offload.NONE,
        cp_method=ContextMethod.RING if cp > 1 else ContextMethod.ALL_GATHER,
    )  # fmt: skip
    notes: list[str] = []
    if cp > 1 and zero:
        notes.append("ZeRO is priced as sharding over the ranks of context parallelism too, which nanotron's does not")
    if not flag(optimizer, "accumulate_grad_in_fp32", True) and settings.precision is not Precision.FP32:
        notes.append("priced with gradients added up and reduced in 32 bits, though accumulate_grad_in_fp32 is false")
    return Read(settings, shape, notes=(*notes, *unread_note(document, ON_BY_DEFAULT)))


def _shape(config: dict[str, object], model: dict[str, object], tokens: dict[str, object]) -> dict[str, object] | None:
    """Sizes with the defaults of LlamaConfig; None for models that are not of its family."""
    if not config:
        return None
    families = [name for name in [*config] if re.fullmatch(r"is_\w+_config", name) and config.get(name) is not False]
    others = {*families} - {*READ_MODELS}
    if config.get("moe_config") is not None or "activation_function" in config or others:
        raise InputError(
            "models of nanotron other than Llama and dense Qwen2 are not read",
            hint="search for the model: planner search MODEL --framework nanotron",
        )
    names = {
        "layers": ("num_hidden_layers", 32), "hidden": ("hidden_size", 4096), "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", None), "ffn": ("intermediate_size", 11008), "vocab": ("vocab_size", 32000),
    }  # fmt: skip
    sizes = {field: number(config, name, default) for field, (name, default) in names.items()}
    divisor = number(model, "make_vocab_size_divisible_by", 1) or 1
    sizes["vocab"] = -(-(sizes["vocab"] or 1) // divisor) * divisor
    sizes["seq_len"] = number(tokens, "sequence_length")
    return {
        "family": "llama",
        "mlp": MlpType.SWIGLU,
        "tied": flag(config, "tie_word_embeddings"),
        **{name: size for name, size in sizes.items() if size is not None},
    }


def _cut(shape: dict[str, object] | None, pp: int) -> tuple[int, ...] | None:
    """How nanotron cuts the model."""
    if shape is None or pp == 1:
        layers = None if shape is None else shape.get("layers")
        return (layers,) if isinstance(layers, int) else None
    try:
        return stage_blocks(FamilyConfig.model_validate({"seq_len": 1, **shape}), pp)
    except ValueError as error:
        raise InputError(f"model.model_config is no model: {error!s:.200}", hint="correct the file") from error


def is_one(name: str, text: str) -> bool:
    """Whether it looks like a config of nanotron."""
    return name.endswith((".yaml", ".yml")) and "batch_accumulation_per_replica" in text


TARGETS = (
    Target(
        name="nanotron",
        version=VERSION,
        sources=(
            "huggingface/nanotron@2411b02: src/nanotron/config/config.py, parallelism_config.py, models_config.py",
            "src/nanotron/models/base.py (the cut), llama.py, qwen.py, helpers.py (ZeRO), parallel/context.py",
        ),
        write=write,
        abilities=ABILITIES,
        limits=limits,
        framework="nanotron",
        read=read,
        is_one=is_one,
    ),
)
