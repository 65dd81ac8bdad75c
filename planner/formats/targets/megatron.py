"""Megatron-LM: a shell script with the arguments of ``pretrain_gpt.py``, and such command lines read back."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import takewhile
from typing import TypeVar

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.software import TENSOR_OVERLAP, named
from planner.errors import InputError
from planner.formats import megatron_core
from planner.formats.documents import MAX_LAYERS, MAX_NUMBER, commented, sgd_of
from planner.formats.launch import RENDEZVOUS, spread
from planner.formats.megatron_arguments import SIZES, Arguments, arguments
from planner.formats.settings import Job, Layout, Settings
from planner.formats.target import Read, Target, Written
from planner.models.config import FamilyConfig, MlpType

Value = TypeVar("Value")

VERSION = "Megatron-LM core_v0.19.0"
# Flags that are not their field with dashes: ``arg_names`` of the fields' metadata, and arguments.py.
FLAG_OF_FIELD = {
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "layernorm_epsilon": "--norm-epsilon",
    "num_moe_experts": "--num-experts",
}
PRECISION_FLAGS = {
    Precision.BF16: ("--bf16",),
    Precision.FP16: ("--fp16",),
    Precision.FP32: (),
    Precision.FP8: ("--bf16", "--fp8-format", "hybrid"),
}
OPTIMIZERS = {"adam": Optimizer.ADAMW, "sgd": Optimizer.SGD_MOMENTUM}
LEFT = "data, tokenizer, learning rate, number of steps and checkpoints are left to you: give them after the script"


def write(job: Job) -> Written:
    """A bash script that every node runs, with NODE_RANK and MASTER_ADDR set."""
    layout, shape = job.layout, job.shape
    notes = [LEFT]
    if shape is None:
        notes.append(
            "the sizes of the model are not known to the planner: give --num-layers, --hidden-size and the rest"
        )
    notes += megatron_core.notes(layout)
    arguments = [*_layout_arguments(job), *([] if shape is None else _model_arguments(shape, layout.seq_len))]
    lines = "".join(f"  {' '.join(map(shlex.quote, group))}\n" for group in arguments)
    text = (
        "#!/usr/bin/env bash\n"
        + commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
        + "set -euo pipefail\n"
        + _environment(layout)
        + f"MEGATRON_ARGUMENTS=(\n{lines})\n"
        + f'torchrun {spread(job)} {RENDEZVOUS} pretrain_gpt.py "${{MEGATRON_ARGUMENTS[@]}}" "$@"\n'
    )
    return Written(text, tuple(notes))


def _environment(layout: Layout) -> str:
    """What validate_args asks of the environment."""
    if not megatron_core.needs_one_queue(layout):
        return ""
    return 'export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"\n'


def _layout_arguments(job: Job) -> list[tuple[str, ...]]:
    layout = job.layout
    fields = {**megatron_core.parallelism(layout), **megatron_core.data_parallelism(layout)}
    found = _flags(fields)
    cut = megatron_core.layout_text(layout)
    if cut is not None:
        found.append(("--pipeline-model-parallel-layout", cut))
    elif layout.virtual_stages > 1:
        found.append(("--num-virtual-stages-per-pipeline-rank", str(layout.virtual_stages)))
    if named(job.plan.framework).overlaps_tensors and fields["sequence_parallel"]:
        found.append(("--tp-comm-overlap",))
    if layout.zero_stage > 1:
        found.append(("--ckpt-format", "fsdp_dtensor"))  # arguments.py asks for it with Megatron-FSDP
    found += [
        *_flags(megatron_core.offload(layout)),
        ("--micro-batch-size", str(layout.micro_batch_size)),
        ("--global-batch-size", str(layout.global_batch_size)),
        ("--seq-length", str(layout.seq_len)),
        *_flags(megatron_core.optimizer(layout)),
    ]
    if PRECISION_FLAGS[layout.precision]:
        found.append(PRECISION_FLAGS[layout.precision])
    return found


def _model_arguments(shape: FamilyConfig, seq_len: int) -> list[tuple[str, ...]]:
    fields = megatron_core.sizes(shape)
    found: list[tuple[str, ...]] = []
    if "num_query_groups" in fields:
        found.append(("--group-query-attention",))
    if "moe_layer_freq" in fields:
        fields["moe_layer_freq"] = f"([0]*{shape.dense_layers}+[1]*{shape.layers - shape.dense_layers})"
    found += _flags(fields)
    if shape.family == "gpt":
        found.append(("--max-position-embeddings", str(max(seq_len, shape.seq_len))))
    else:
        found += [
            ("--disable-bias-linear",),
            ("--position-embedding-type", "rope"),
            ("--rotary-base", str(round(shape.rope_theta))),
            ("--max-position-embeddings", str(max(seq_len, shape.seq_len))),
        ]
    if shape.mlp is MlpType.SWIGLU:
        found.append(("--swiglu",))
    if shape.mlp is MlpType.SQUARED_RELU:
        found.append(("--squared-relu",))
    if not shape.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    return [*found, ("--vocab-size", str(shape.vocab))]


def _flags(fields: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Fields as options: a truth value by its name alone."""
    found: list[tuple[str, ...]] = []
    for name, value in fields.items():
        flag = FLAG_OF_FIELD.get(name, "--" + name.replace("_", "-"))
        if value is True:
            found.append((flag,))
        elif value is not False:
            found.append((flag, str(value)))
    return found


# -- reading ------------------------------------------------------------------------------------


def read(text: str) -> Read:
    """Settings of a command line or of a shell script that holds one."""
    said = arguments(text)
    given = said.given
    numbers = _numbers(given)
    etp = numbers.get("expert_tensor_parallel_size")
    if etp not in (None, 1, _tp(numbers)):
        raise InputError(f"layouts with --expert-tensor-parallel-size {etp} are not priced", hint="leave it out")
    blocks = _stage_blocks(given, numbers)
    settings = Settings(stage_blocks=blocks, recompute=_recompute(given, numbers, blocks))
    settings = settings.joined(_degrees(said, numbers), _batches(said, numbers))
    notes = ["data parallelism takes the GPUs that tensor, pipeline and context parallelism leave", *said.notes]
    if not given["overlap_grad_reduce"]:
        notes.append(
            "priced with gradients reduced beside the backward pass, though --overlap-grad-reduce is not given"
        )
    kernels = (TENSOR_OVERLAP,) if given["tp_comm_overlap"] else ()
    shape = None if said.open_names & SIZES else _shape(given, numbers)
    return Read(settings, shape, notes=tuple(notes), kernels=kernels)


def _numbers(given: Mapping[str, object]) -> dict[str, int]:
    """The whole numbers that are given; 0 says nothing, as it does to Megatron-LM."""
    found = {name: value for name, value in given.items() if isinstance(value, int) and not isinstance(value, bool)}
    for name, value in found.items():
        most = MAX_LAYERS if "layers" in name or "pipeline" in name else MAX_NUMBER
        if not 0 <= value <= most:
            raise InputError(f"--{name.replace('_', '-')} is {value}, not 0 to {most}", hint="correct the command")
    return {name: value for name, value in found.items() if value > 0}


def _tp(numbers: Mapping[str, int]) -> int:
    return numbers.get("tensor_model_parallel_size", 1)


def _degrees(said: Arguments, numbers: Mapping[str, int]) -> Settings:
    given = said.given
    tp, pp = _tp(numbers), numbers.get("pipeline_model_parallel_size", 1)
    cp, per_node = numbers.get("context_parallel_size", 1), numbers.get("nproc_per_node")
    devices = None if per_node is None or "nnodes" in said.open_names else per_node * numbers.get("nnodes", 1)
    # Scripts have placeholders of one node: --gpus says how many there are.
    dp = None if devices is None or devices % (tp * pp * cp) else devices // (tp * pp * cp)
    instances, zero = numbers.get("num_distributed_optimizer_instances", 1), _zero_stage(given)
    if zero > 0 and dp is not None and dp * cp == instances:
        zero = 0  # one rank shards nothing
    etp = numbers.get("expert_tensor_parallel_size", tp)
    return Settings(
        num_devices=devices, tp=tp, pp=pp, cp=cp, ep=numbers.get("expert_model_parallel_size", 1), zero_stage=zero,
        etp=None if etp == tp else etp,
        dp_replicate=instances if zero > 0 else dp,
        dp_shard=1 if zero == 0 else None if dp is None else _quotient(dp, instances),
        sequence_parallel=bool(given["sequence_parallel"]) and tp > 1,
        offload=Offload.CPU if given["optimizer_cpu_offload"] else Offload.NONE, cp_method=_cp_method(given),
    )  # fmt: skip


def _quotient(whole: int, part: int) -> int:
    if part < 1 or whole % part:
        raise InputError(f"{whole} GPUs are no multiple of {part}", hint="correct the degrees, or give --gpus N")
    return whole // part


def _zero_stage(given: Mapping[str, object]) -> int:
    if given["use_megatron_fsdp"]:
        stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        strategy = str(given["data_parallel_sharding_strategy"] or "optim_grads_params")
        return _one_of("--data-parallel-sharding-strategy", strategy, stages)
    return 1 if given["use_distributed_optimizer"] else 0


def _cp_method(given: Mapping[str, object]) -> ContextMethod:
    kinds = given["cp_comm_type"]
    by_type = {name: method for method, name in megatron_core.CP_TYPES.items()}
    first, *others = [str(each) for each in kinds] if isinstance(kinds, list) else ["p2p"]
    # in a script the words behind it may belong to another command; a+b is a type that is not priced
    others = takewhile(lambda word: word.split("+")[0] in by_type, others)
    if {first, *others} != {first}:
        raise InputError("layers that differ in --cp-comm-type are not priced", hint="name one for all layers")
    found = _one_of("--cp-comm-type", first, by_type)
    return found if given["context_parallel_size"] not in (None, 1) else ContextMethod.ALL_GATHER


def _one_of(option: str, word: str, known: Mapping[str, Value]) -> Value:
    if word not in known:
        raise InputError(f"{option} {word!r:.40} is not priced ({', '.join(known)} are)", hint="correct the command")
    return known[word]


def _batches(said: Arguments, numbers: Mapping[str, int]) -> Settings:
    given = said.given
    stages = _virtual_stages(given, numbers)
    precision = Precision.FP16 if given["fp16"] else Precision.BF16 if given["bf16"] else Precision.FP32
    optimizer = _one_of("--optimizer", str(given["optimizer"] or "adam"), OPTIMIZERS)
    if optimizer is Optimizer.SGD_MOMENTUM and given["sgd_momentum"] is not None:
        optimizer = sgd_of("--sgd-momentum", given["sgd_momentum"])
    # validate_args: without a global batch it is one micro-batch of every replica
    is_alone = "micro_batch_size" in numbers and not {"global_batch_size", "micro_batch_size"} & said.open_names
    return Settings(
        micro_batch_size=numbers.get("micro_batch_size"),
        num_microbatches=1 if is_alone and "global_batch_size" not in numbers else None,
        global_batch_size=numbers.get("global_batch_size"),
        seq_len=numbers.get("seq_length"),
        precision=Precision.FP8 if given["fp8_format"] else precision,
        optimizer=None if "optimizer" in said.open_names else optimizer,
        virtual_stages=stages,
        schedule=ScheduleName.INTERLEAVED_1F1B if stages > 1 else ScheduleName.ONE_F_ONE_B,
    )


def _virtual_stages(given: Mapping[str, object], numbers: Mapping[str, int]) -> int:
    pp = numbers.get("pipeline_model_parallel_size", 1)
    if given["pipeline_model_parallel_layout"] is not None:
        stages = len(megatron_core.blocks_of_layout(str(given["pipeline_model_parallel_layout"])))
        return _quotient_of_stages(stages, pp)
    if "num_virtual_stages_per_pipeline_rank" in numbers:
        return numbers["num_virtual_stages_per_pipeline_rank"]
    if "num_layers_per_virtual_pipeline_stage" in numbers:
        return _quotient_of_stages(numbers.get("num_layers", 0), pp * numbers["num_layers_per_virtual_pipeline_stage"])
    return 1


def _quotient_of_stages(whole: int, part: int) -> int:
    if part < 1 or whole < 1 or whole % part:
        raise InputError(f"{whole} stages or layers cannot be shared out to {part}", hint="correct the pipeline")
    return whole // part


def _stage_blocks(given: Mapping[str, object], numbers: Mapping[str, int]) -> tuple[int, ...] | None:
    """Blocks of every stage: as laid out, with other numbers on the first and last rank, or all alike."""
    if given["pipeline_model_parallel_layout"] is not None:
        return megatron_core.blocks_of_layout(str(given["pipeline_model_parallel_layout"]))
    layers, pp = numbers.get("num_layers"), numbers.get("pipeline_model_parallel_size", 1)
    if layers is None:
        return None
    v = _virtual_stages(given, numbers)
    first, last = numbers.get("decoder_first_pipeline_num_layers"), numbers.get("decoder_last_pipeline_num_layers")
    named = [each for each in (first, last) if each is not None]
    others = pp - len(named)
    between = _quotient_of_stages(layers - sum(named), others) if others else 0
    ranks = [between] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return tuple(_quotient_of_stages(blocks, v) for blocks in ranks) * v


def _recompute(
    given: Mapping[str, object], numbers: Mapping[str, int], blocks: tuple[int, ...] | None
) -> Recompute | tuple[Recompute, ...]:
    granularity = str(given["recompute_granularity"] or ("selective" if given["recompute_activations"] else "none"))
    kinds = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    found = _one_of("--recompute-granularity", granularity, kinds)
    if found is not Recompute.FULL or given["recompute_method"] != "block":
        return found
    if blocks is None:
        raise InputError("--recompute-method block needs --num-layers", hint="add it")
    modes = megatron_core.recompute_by_stage(blocks, numbers.get("recompute_num_layers", 1))
    return modes[0] if len(set(modes)) == 1 else modes


def _shape(given: Mapping[str, object], numbers: Mapping[str, int]) -> dict[str, object] | None:
    """The model's sizes under the names of a family config; those that the command leaves out are absent."""
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= numbers.keys():
        return None
    hidden = numbers["hidden_size"]
    gated = bool(given["swiglu"])
    rotary = given["position_embedding_type"] == "rope" or bool(given["use_rotary_position_embeddings"])
    ffn = numbers.get("ffn_hidden_size", int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden)
    found: dict[str, object] = {
        "family": "moe" if "num_experts" in numbers else "llama" if rotary or gated else "gpt",
        "layers": numbers["num_layers"], "hidden": hidden, "heads": numbers["num_attention_heads"], "ffn": ffn,
        "mlp": MlpType.SWIGLU if gated else MlpType.SQUARED_RELU if given["squared_relu"] else MlpType.GELU,
        "tied": not given["untie_embeddings_and_output_weights"],
    }  # fmt: skip
    is_latent = bool(given["multi_latent_attention"])  # where --qk-layernorm is of what is compressed, not of heads
    optional = {
        "kv_heads": numbers.get("num_query_groups") if given["group_query_attention"] else None,
        "head_dim": numbers.get("kv_channels"),
        "vocab": numbers.get("vocab_size"),
        "seq_len": numbers.get("seq_length"),
        "qk_norm": True if given["qk_layernorm"] and not is_latent else None,
        "latent_attention": _latent_attention(numbers) if is_latent else None,
    }
    if "num_experts" in numbers:
        optional |= _experts(given, numbers, ffn)
    return {**found, **{name: value for name, value in optional.items() if value is not None}}


def _experts(given: Mapping[str, object], numbers: Mapping[str, int], ffn: int) -> dict[str, object]:
    width, shared = numbers.get("moe_ffn_hidden_size", ffn), numbers.get("moe_shared_expert_intermediate_size", 0)
    if shared % width:
        raise InputError(
            f"a shared expert of width {shared} (--moe-shared-expert-intermediate-size) beside experts of {width} is "
            "not priced: only whole multiples are",
            hint=f"give a multiple of {width}, or search for the model itself: planner search model.py --framework "
            "megatron-core",
        )
    dense = re.fullmatch(r"\(?\[0\]\*(\d+)\+\[1\]\*\d+\)?", str(given["moe_layer_freq"] or "([0]*0+[1]*1)"))
    if dense is None and given["moe_layer_freq"] != "1":
        raise InputError("only dense layers before all others are priced (--moe-layer-freq)", hint="use a model file")
    return {
        "experts": numbers["num_experts"],
        "top_k": numbers.get("moe_router_topk", 2),
        "expert_ffn": width,
        "shared_experts": shared // width,
        "dense_layers": int(dense.group(1)) if dense else 0,
        "router": given["moe_router_score_function"] or "softmax",
    }


def _latent_attention(numbers: Mapping[str, int]) -> dict[str, object]:
    """Defaults of MLATransformerConfig's arguments; without a query rank queries are projected at once."""
    return {
        "query_rank": numbers.get("q_lora_rank"),
        "kv_rank": numbers.get("kv_lora_rank", 32),
        "nope_head_dim": numbers.get("qk_head_dim", 128),
        "rope_head_dim": numbers.get("qk_pos_emb_head_dim", 64),
        "value_head_dim": numbers.get("v_head_dim", 128),
    }


def is_one(_name: str, text: str) -> bool:
    """Whether it looks like a command line of Megatron-LM."""
    return "--tensor-model-parallel-size" in text or ("--num-layers" in text and "--hidden-size" in text)


TARGETS = (
    Target(
        name="megatron",
        version=VERSION,
        sources=(
            "NVIDIA/Megatron-LM@core_v0.19.0: megatron/training/arguments.py",
            "megatron/core/model_parallel_config.py, transformer_config.py, pipeline_parallel_layer_layout.py",
        ),
        write=write,
        abilities=megatron_core.ABILITIES,
        limits=megatron_core.limits,
        framework="megatron-core",
        read=read,
        is_one=is_one,
    ),
)
