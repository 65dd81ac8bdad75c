"""MaxText: a shell script with the options of its training command, over those of base.yml."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from math import gcd

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.formats.documents import commented
from planner.formats.settings import Asked, Job, Layout
from planner.formats.target import Abilities, Refusal, Target, Written
from planner.models.config import FamilyConfig, MlpType

VERSION = "MaxText v0.2.4"
# Presets among src/maxtext/configs/models whose sizes cannot be told one by one.
MODEL_NAMES = {
    "deepseek-v3": "deepseek3-671b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
}
# Policies of layers/decoders.py; this one keeps the results of products and of attention, as our selective does.
REMAT = {Recompute.NONE: "none", Recompute.SELECTIVE: "minimal_with_context", Recompute.FULL: "full"}
STRATEGIES = {ContextMethod.ALL_GATHER: "all_gather", ContextMethod.RING: "ring"}  # "ulysses" is for TPUs alone
# On GPUs no other kernel of layers/attention_op.py shares sequences, and this one does not pack them then.
CONTEXT = ("attention=cudnn_flash_te", "packing=false")
DTYPES = {
    Precision.BF16: ("dtype=bfloat16",),
    Precision.FP32: ("dtype=float32",),
    Precision.FP8: ("dtype=bfloat16", "quantization=fp8"),
}
ACCUMULATED_FP8 = ("dtype=bfloat16", "quantization=te_fp8_currentscaling")  # "fp8" is refused there (configs/types.py)
OPTIMIZERS = {Optimizer.ADAMW: "adamw", Optimizer.SGD: "sgd"}
ACTIVATIONS = {MlpType.GELU: ["gelu"], MlpType.SWIGLU: ["silu", "linear"]}
ABILITIES = Abilities(
    axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}),
    zero_stages=(1, 3),  # shard_optimizer_over_data; the axis fsdp
    schedules=(ScheduleName.GPIPE,),  # layers/pipeline.py runs all micro-batches forward, then all backward
    recompute=tuple(REMAT),
    precisions=tuple(DTYPES),
    optimizers=tuple(OPTIMIZERS),
    cp_methods=tuple(STRATEGIES),
    offloads=(Offload.NONE, Offload.CPU),  # optimizer_memory_host_offload
    fills_rounds=True,  # configs/types.py
)


def limits(job: Asked) -> Iterator[Refusal]:
    """What configs/types.py refuses, and what its axes cannot divide as the plan does."""
    layout, shape = job.layout, job.shape
    if layout.pp > 1 and shape is not None and shape.dense_layers:
        yield Refusal("of models with dense layers first it pipelines only the others", "search with --pp 1")
    if layout.zero_stage == 1 and layout.dp_replicate * layout.cp > 1:
        yield Refusal("its ZeRO 1 shards over the data axis alone", "search with --zero 3, or without replicas and cp")
    if layout.ep > 1 and (layout.dp_shard % layout.ep or layout.cp > 1 or layout.zero_stage != 3):
        yield Refusal(
            f"its expert axis is a part of fully sharded data parallelism: ep {layout.ep} must divide dp_shard "
            f"{layout.dp_shard}, with ZeRO 3 and without cp",
            "search with --zero 3 --cp 1",
        )
    if shape is not None and shape.mlp not in ACTIVATIONS and job.preset not in MODEL_NAMES:
        yield Refusal(f"it has no {shape.mlp.value} feed-forward network", "use a model with gelu or swiglu")


def write(job: Job) -> Written:
    """A bash script that every node runs."""
    layout = job.layout
    notes = ["run_name, output folder, data and number of steps are left to you: give them after the script"]
    model = _model(job)
    if not model:
        notes.append("set model_name: the sizes of the model are not known to the planner")
    if job.num_nodes > 1:
        notes.append("on every node set JAX_COORDINATOR_IP, JAX_COORDINATOR_PORT, NNODES and NODE_RANK")
    options = [*model, *_axes(job), *_batches(layout), *_rest(layout)]
    lines = "".join(f"  {shlex.quote(option)}\n" for option in options)
    text = (
        "#!/usr/bin/env bash\n"
        + commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
        + f"set -euo pipefail\nMAXTEXT_OPTIONS=(\n{lines})\n"
        + 'python3 -m maxtext.trainers.pre_train.train "${MAXTEXT_OPTIONS[@]}" "$@"\n'
    )
    return Written(text, tuple(notes))


def _degrees(layout: Layout) -> dict[str, int]:
    """The mesh as axes of base.yml, innermost first: as our ranks are numbered."""
    sharded = layout.zero_stage == 3
    return {
        "tensor_sequence" if layout.sequence_parallel else "tensor": layout.tp,
        "context": layout.cp,
        "expert": layout.ep,
        "fsdp": layout.dp_shard // layout.ep if sharded else 1,
        "data": layout.dp_replicate if sharded else layout.dp,
        "pipeline": layout.pp,
    }


def _within(job: Job) -> dict[str, int]:
    """The part of each axis that lies within a node, the innermost first: nodes are whole, so these fill one."""
    left = job.devices_on_node
    found: dict[str, int] = {}
    for axis, degree in _degrees(job.layout).items():
        found[axis] = gcd(degree, left)
        left //= found[axis]
    return found


def _axes(job: Job) -> list[str]:
    """ICI is the network of a node, DCN that between nodes; both default to taking what is left."""
    inside = _within(job)
    found = [f"num_slices={job.num_nodes}"]
    for axis, degree in _degrees(job.layout).items():
        if degree > 1 or axis in ("data", "fsdp"):
            found += [f"ici_{axis}_parallelism={inside[axis]}", f"dcn_{axis}_parallelism={degree // inside[axis]}"]
    return found


def _batches(layout: Layout) -> list[str]:
    """A pipeline splits what a device accumulates without one; a device's share of a batch may be a fraction."""
    passes = layout.num_microbatches if layout.pp > 1 else 1
    per_device = layout.micro_batch_size * passes * layout.dp / layout.num_devices
    found = [f"per_device_batch_size={per_device!r}", f"max_target_length={layout.seq_len}"]
    if layout.pp == 1:
        return [*found, f"gradient_accumulation_steps={layout.num_microbatches}"]
    return [
        *found,
        f"num_pipeline_microbatches={layout.num_microbatches}",
        f"num_layers_per_pipeline_stage={(layout.num_blocks or 0) // layout.pp}",
        "num_pipeline_repeats=1",
    ]


def _accumulates(layout: Layout) -> bool:
    """Whether gradients of several passes are added up: a pipeline takes all micro-batches in one."""
    return layout.pp == 1 and layout.num_microbatches > 1


def _rest(layout: Layout) -> list[str]:
    assert isinstance(layout.recompute, Recompute)  # it does not mix them
    found = [
        "hardware=gpu",
        *(ACCUMULATED_FP8 if layout.precision is Precision.FP8 and _accumulates(layout) else DTYPES[layout.precision]),
        "weight_dtype=float32",
        f"opt_type={OPTIMIZERS[layout.optimizer]}",
        f"remat_policy={REMAT[layout.recompute]}",
    ]
    if layout.zero_stage == 1:
        found.append("shard_optimizer_over_data=true")
    if layout.cp > 1:
        found += [f"context_parallel_strategy={STRATEGIES[layout.cp_method]}", *CONTEXT]
    if layout.offload is Offload.CPU:
        found.append("optimizer_memory_host_offload=true")
    return found


def _model(job: Job) -> list[str]:
    """A model of its own by name, another one by its sizes; nothing where these are not known or not enough."""
    shape = job.shape
    if job.preset in MODEL_NAMES:
        return [f"model_name={MODEL_NAMES[job.preset]}"]
    if shape is None or shape.qk_norm or shape.latent_attention or shape.shared_experts or shape.dense_layers:
        return []
    found = [
        f"decoder_block={_block(shape)}",
        f"base_num_decoder_layers={shape.layers}",
        f"base_emb_dim={shape.hidden}",
        f"base_num_query_heads={shape.heads}",
        f"base_num_kv_heads={shape.num_kv_heads}",
        f"head_dim={shape.size_per_head}",
        f"base_mlp_dim={shape.ffn}",
        f"mlp_activations={ACTIVATIONS[shape.mlp]}".replace("'", '"'),
        f"vocab_size={shape.vocab}",
        f"logits_via_embedding={str(shape.tied).lower()}",
        f"normalization_layer_epsilon={shape.norm_eps}",
        "enable_dropout=false",
    ]
    if shape.family == "gpt":
        return [*found, f"trainable_position_size={max(shape.seq_len, job.layout.seq_len)}", "fused_qkv=true"]
    found.append(f"rope_max_timescale={round(shape.rope_theta)}")
    if shape.experts is not None:
        width = shape.expert_ffn or shape.ffn
        found += [f"num_experts={shape.experts}", f"num_experts_per_tok={shape.top_k}", f"base_moe_mlp_dim={width}"]
    return found


def _block(shape: FamilyConfig) -> str:
    return {"gpt": "gpt3", "llama": "llama2", "moe": "mixtral"}[shape.family]


TARGETS = (
    Target(
        name="maxtext",
        version=VERSION,
        sources=(
            "AI-Hypercomputer/maxtext@maxtext-v0.2.4: src/maxtext/configs/base.yml, types.py, models/*.yml",
            "src/maxtext/layers/decoders.py, utils/max_utils.py",
        ),
        write=write,
        abilities=ABILITIES,
        limits=limits,
        framework="maxtext",
    ),
)
