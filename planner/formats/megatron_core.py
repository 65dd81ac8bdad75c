"""What Megatron-Core can run, for the targets that are built on it: Megatron-LM's command line and NeMo's recipes.

Read in NVIDIA/Megatron-LM at core_v0.19.0: megatron/training/arguments.py, megatron/core/model_parallel_config.py,
megatron/core/transformer/transformer_config.py and pipeline_parallel_layer_layout.py, megatron/core/optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from costmodels.vocabulary.choices import MOMENTUM, ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.settings import Asked, Layout
from planner.formats.target import Abilities, Refusal
from planner.models.config import FamilyConfig, MlpType

ABILITIES = Abilities(
    axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}),
    zero_stages=(0, 1, 2, 3),  # DDP; the distributed optimizer; Megatron-FSDP's optim_grads and optim_grads_params
    schedules=(ScheduleName.ONE_F_ONE_B, ScheduleName.INTERLEAVED_1F1B),  # core/pipeline_parallel/schedules.py
    recompute=tuple(Recompute),
    precisions=(Precision.BF16, Precision.FP16, Precision.FP32, Precision.FP8),
    optimizers=(Optimizer.ADAMW, Optimizer.SGD, Optimizer.SGD_MOMENTUM),  # its adam decouples weight decay
    cp_methods=(ContextMethod.RING, ContextMethod.ALL_GATHER, ContextMethod.ALL_TO_ALL),
    offloads=(Offload.NONE, Offload.CPU),  # --optimizer-cpu-offload
    cuts_unevenly=True,  # --pipeline-model-parallel-layout
    mixes_recompute=True,  # --recompute-method block, within limits
    has_whole_experts=True,  # --expert-tensor-parallel-size 1
)
CP_TYPES = {ContextMethod.RING: "p2p", ContextMethod.ALL_GATHER: "allgather", ContextMethod.ALL_TO_ALL: "a2a"}
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
MLPS = (MlpType.GELU, MlpType.SQUARED_RELU, MlpType.SWIGLU)  # of those that a preset may have
MAX_LAYOUT_STAGES = 100_000  # of a layout that is read; published runs have hundreds


def limits(job: Asked) -> Iterator[Refusal]:
    """What does not go together."""
    layout = job.layout
    if layout.pp > 1 and layout.zero_stage > 1 and layout.dp_shard * layout.cp > 1:
        # Megatron-FSDP is written for one model chunk a rank, and pp with it is in none of its tests or recipes.
        yield Refusal(
            f"ZeRO stage {layout.zero_stage} is Megatron-FSDP, which is not run under a pipeline (pp = {layout.pp})",
            "search with --zero 1 or --pp 1",
        )
    if layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel:
        yield Refusal("experts under tensor parallelism need sequence parallelism", "search with --sequence-parallel")
    yield from _offload_limits(layout)
    if isinstance(layout.recompute, tuple) and recomputed_a_stage(layout) is None:
        yield Refusal(
            "of each stage it recomputes the same number of blocks, fully (recompute_method block); the plan's stages "
            "differ in that number or recompute selectively",
            "search with --recompute full or none",
        )
    shape = job.shape
    if shape is not None and shape.mlp not in MLPS:
        yield Refusal(f"it has no {shape.mlp.value} feed-forward network", "use a model with gelu or swiglu")


def _offload_limits(layout: Layout) -> Iterator[Refusal]:
    """Its offload is of the distributed optimizer (arguments.py), and of Adam alone (optimizer_config.py)."""
    if layout.offload is Offload.NONE:
        return
    if layout.zero_stage > 1:
        yield Refusal(
            f"its optimizer offload goes with the distributed optimizer, not with Megatron-FSDP (ZeRO "
            f"{layout.zero_stage})",
            "search with --zero 1",
        )
    if layout.zero_stage == 0 and layout.dp * layout.cp > 1:
        yield Refusal("its optimizer offload goes with the distributed optimizer (ZeRO 1), the plan has ZeRO 0",
                      "search with --zero 1")  # fmt: skip
    if layout.optimizer is not Optimizer.ADAMW:
        yield Refusal(f"its optimizer offload is for Adam alone, the plan has {layout.optimizer}",
                      "search with --optimizer adamw, or --offload none")  # fmt: skip


def layout_text(layout: Layout) -> str | None:
    """The stages as ``--pipeline-model-parallel-layout`` has them; None where equal stages need none."""
    blocks = layout.stage_blocks
    if layout.pp == 1 or blocks is None or layout.is_cut_evenly:
        return None
    last = len(blocks) - 1
    return "|".join(
        f"{'E' if index == 0 else ''}{'t*' + str(size) if size else ''}{'L' if index == last else ''}"
        for index, size in enumerate(blocks)
    )


def blocks_of_layout(text: str) -> tuple[int, ...]:
    """Blocks of each stage of a ``--pipeline-model-parallel-layout``; InputError where it is none."""
    unrolled = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]*)\)\*(\d{1,6})", r"([^()*|\d])\*(\d{1,6})", r"(\|)\*(\d{1,6})"):
        size = sum(int(count) * max(1, len(group)) for group, count in re.findall(pattern, unrolled))
        if size > MAX_LAYOUT_STAGES:
            raise InputError(f"the pipeline layout {text!r:.60} is too long", hint="correct the layout")
        unrolled = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), unrolled)
    if not re.fullmatch(r"[EtmL|]*", unrolled) or not unrolled.startswith("E") or not unrolled.endswith("L"):
        raise InputError(
            f"the pipeline layout {text!r:.60} is not made of E, t, m, L and |, E first and L last",
            hint="correct the layout",
        )
    if "m" in unrolled:
        raise InputError("layers of multi-token prediction (m) are not priced", hint="leave them out of the layout")
    return tuple(stage.count("t") for stage in unrolled.split("|"))


def recomputed_a_stage(layout: Layout) -> int | None:
    """Blocks of every stage that are recomputed fully, all if there are fewer; None where stages differ in that."""
    stages = layout.modes_by_stage()
    if stages is None or any(Recompute.SELECTIVE in modes for modes in stages):
        return None
    full = [modes.count(Recompute.FULL) for modes in stages]
    most = max(full)
    same = all(count == min(most, len(modes)) for count, modes in zip(full, stages, strict=True))
    return most if same else None


def recompute_by_stage(stage_blocks: tuple[int, ...], num_full: int) -> tuple[Recompute, ...]:
    """The modes of all blocks where the first ``num_full`` of each stage are recomputed."""
    starts = [0, *accumulate(stage_blocks)][:-1]
    firsts = {start + i for start, size in zip(starts, stage_blocks, strict=True) for i in range(min(num_full, size))}
    return tuple(Recompute.FULL if block in firsts else Recompute.NONE for block in range(sum(stage_blocks)))


def notes(layout: Layout) -> list[str]:
    """Where it recomputes something else than the plan, as much of it."""
    found: list[str] = []
    if layout.recompute is Recompute.SELECTIVE:
        found.append(
            "selective recomputation is Megatron-Core's own, of core attention: the plan's repeats everything but "
            "products and attention"
        )
    if isinstance(layout.recompute, tuple) and layout.stage_blocks is not None:
        first = recompute_by_stage(layout.stage_blocks, recomputed_a_stage(layout) or 0)
        if first != layout.recompute:
            found.append("of each stage the first blocks are recomputed: the plan's are others, as many of them")
    return found


def parallelism(layout: Layout) -> dict[str, object]:
    """Fields of TransformerConfig that say how the model is split and what it recomputes."""
    found: dict[str, object] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
    }
    if layout.ep > 1 and layout.tp > 1:  # its default is tp in some versions, 1 in others
        found["expert_tensor_parallel_size"] = layout.etp or layout.tp
    if layout.cp > 1:
        found["cp_comm_type"] = CP_TYPES[layout.cp_method]
    group = layout.num_microbatches // max(1, layout.num_microbatches // layout.pp)
    if layout.virtual_stages > 1 and group != layout.pp:  # its default is pp
        found["microbatch_group_size_per_vp_stage"] = group
    return {**found, **recomputation(layout)}


def recomputation(layout: Layout) -> dict[str, object]:
    """Fields of TransformerConfig about activation checkpointing."""
    if layout.recompute is Recompute.FULL:
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if layout.recompute is Recompute.SELECTIVE:
        return {"recompute_granularity": "selective"}
    if layout.recompute is Recompute.NONE:
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": recomputed_a_stage(layout),
    }


def needs_one_queue(layout: Layout) -> bool:
    """Whether kernels are to start in the order they are given: CUDA_DEVICE_MAX_CONNECTIONS=1, before Blackwell.

    Communication of tp and cp is to begin before the products that hide it; Megatron-FSDP refuses it.
    """
    return layout.tp * layout.cp > 1 and layout.zero_stage <= 1


def data_parallelism(layout: Layout) -> dict[str, object]:
    """Fields of DistributedDataParallelConfig: what is sharded over data-parallel ranks, and what overlaps."""
    found: dict[str, object] = {"overlap_grad_reduce": layout.dp * layout.cp > 1}
    if uses_distributed_optimizer(layout):
        found["use_distributed_optimizer"] = True
    if layout.zero_stage > 0:
        found["overlap_param_gather"] = True
    if layout.zero_stage > 1:
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": FSDP_STRATEGIES[layout.zero_stage]}
    if layout.zero_stage > 0 and layout.dp_replicate > 1:
        found["num_distributed_optimizer_instances"] = layout.dp_replicate
    return found


def uses_distributed_optimizer(layout: Layout) -> bool:
    """Whether it is asked for: where there is something to shard, and where states leave the GPU."""
    return layout.zero_stage > 0 or layout.offload is not Offload.NONE


def offload(layout: Layout) -> dict[str, object]:
    """Fields of OptimizerConfig that keep all states in host memory: its own share of them is none."""
    if layout.offload is Offload.NONE:
        return {}
    return {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "use_precision_aware_optimizer": True}


def optimizer(layout: Layout) -> dict[str, object]:
    """Fields of OptimizerConfig: its SGD has a momentum of 0.9 where none is said."""
    if layout.optimizer is Optimizer.ADAMW:
        return {"optimizer": "adam"}
    return {"optimizer": "sgd", "sgd_momentum": MOMENTUM if layout.optimizer is Optimizer.SGD_MOMENTUM else 0.0}


def sizes(shape: FamilyConfig) -> dict[str, object]:
    """Fields of TransformerConfig that say what the model is, under the names of that class."""
    found: dict[str, object] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "hidden_dropout": shape.dropout,
        "attention_dropout": shape.dropout,
        "layernorm_epsilon": shape.norm_eps,
    }
    if shape.kv_heads is not None and shape.kv_heads != shape.heads:
        found["num_query_groups"] = shape.kv_heads
    if shape.head_dim is not None:
        found["kv_channels"] = shape.head_dim
    if shape.family != "gpt":
        found["normalization"] = "RMSNorm"
    if shape.qk_norm or shape.latent_attention is not None:  # there it makes the norms of what is compressed
        found["qk_layernorm"] = True
    return {**found, **_experts(shape), **_latent_attention(shape)}


def _experts(shape: FamilyConfig) -> dict[str, object]:
    if shape.experts is None:
        return {}
    width = shape.expert_ffn or shape.ffn
    found: dict[str, object] = {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": width,
        "moe_router_score_function": shape.router,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    if shape.shared_experts:
        found["moe_shared_expert_intermediate_size"] = shape.shared_experts * width
    if shape.dense_layers:
        found["moe_layer_freq"] = [0] * shape.dense_layers + [1] * (shape.layers - shape.dense_layers)
    return found


def _latent_attention(shape: FamilyConfig) -> dict[str, object]:
    latent = shape.latent_attention
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_head_dim,
        "qk_pos_emb_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
    }
