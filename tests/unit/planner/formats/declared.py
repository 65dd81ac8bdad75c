"""What the targets' own parsers take, declared again from their sources: names, types and choices, and their rules.

None of this is shared with the writers. Each part names the file that it was read in.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

NUMBER, FLOAT, WORD, SWITCH = "number", "float", "word", "switch"

# NVIDIA/Megatron-LM@core_v0.19.0. Fields of dataclasses become options through ArgumentGroupFactory
# (training/argument_utils.py): a boolean that is False by default is a switch.
MEGATRON: dict[str, str | list[str]] = {
    # core/model_parallel_config.py
    "--tensor-model-parallel-size": NUMBER, "--pipeline-model-parallel-size": NUMBER, "--sequence-parallel": SWITCH,
    "--context-parallel-size": NUMBER, "--expert-model-parallel-size": NUMBER, "--bf16": SWITCH, "--fp16": SWITCH,
    "--microbatch-group-size-per-virtual-pipeline-stage": NUMBER,
    # core/transformer/transformer_config.py
    "--num-layers": NUMBER, "--hidden-size": NUMBER, "--num-attention-heads": NUMBER, "--num-query-groups": NUMBER,
    "--ffn-hidden-size": NUMBER, "--kv-channels": NUMBER, "--hidden-dropout": FLOAT, "--attention-dropout": FLOAT,
    "--norm-epsilon": FLOAT, "--disable-bias-linear": SWITCH, "--normalization": ["LayerNorm", "RMSNorm"],
    "--qk-layernorm": SWITCH, "--recompute-granularity": ["full", "selective"],
    "--recompute-method": ["uniform", "block"], "--recompute-num-layers": NUMBER, "--fp8-format": ["e4m3", "hybrid"],
    "--moe-shared-expert-intermediate-size": NUMBER, "--moe-ffn-hidden-size": NUMBER, "--moe-router-topk": NUMBER,
    "--moe-router-score-function": ["softmax", "sigmoid", "sqrtsoftplus"], "--moe-grouped-gemm": SWITCH,
    "--moe-token-dispatcher-type": ["allgather", "alltoall", "flex"], "--multi-latent-attention": SWITCH,
    # training/arguments.py
    "--pipeline-model-parallel-layout": WORD, "--num-virtual-stages-per-pipeline-rank": NUMBER,
    "--overlap-grad-reduce": SWITCH, "--overlap-param-gather": SWITCH, "--tp-comm-overlap": SWITCH,
    "--use-distributed-optimizer": SWITCH,
    "--data-parallel-sharding-strategy": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "--num-distributed-optimizer-instances": NUMBER, "--expert-tensor-parallel-size": NUMBER,
    "--cp-comm-type": ["p2p", "a2a", "allgather", "a2a+p2p"],
    "--seq-length": NUMBER, "--optimizer": ["adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"],
    "--sgd-momentum": FLOAT,  # of OptimizerConfig, 0.9 where it is not given
    "--optimizer-cpu-offload": SWITCH, "--use-precision-aware-optimizer": SWITCH, "--optimizer-offload-fraction": FLOAT,
    "--group-query-attention": SWITCH, "--max-position-embeddings": NUMBER,
    "--position-embedding-type": ["learned_absolute", "rope", "yarn", "mrope", "relative", "none"],
    "--rotary-base": NUMBER, "--swiglu": SWITCH, "--squared-relu": SWITCH, "--num-experts": NUMBER,
    "--untie-embeddings-and-output-weights": SWITCH, "--moe-layer-freq": WORD, "--q-lora-rank": NUMBER,
    "--kv-lora-rank": NUMBER, "--qk-head-dim": NUMBER, "--qk-pos-emb-head-dim": NUMBER, "--v-head-dim": NUMBER,
    # training/config: training_config.py, common_config.py (DistributedInitConfig), TokenizerConfig
    "--micro-batch-size": NUMBER, "--global-batch-size": NUMBER, "--use-megatron-fsdp": SWITCH, "--vocab-size": NUMBER,
    "--ckpt-format": ["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"],
}  # fmt: skip
# Of torch 2.13's torch/distributed/run.py.
TORCHRUN = ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
            "--rdzv-id", "--rdzv-endpoint")  # fmt: skip


class _Strict(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


def megatron_arguments(words: list[str]) -> dict[str, Any]:
    """The options as Megatron-LM's parser gives them; AssertionError where it would refuse them."""
    parser = _Strict(allow_abbrev=False, add_help=False)
    for name, kind in MEGATRON.items():
        if kind == SWITCH:
            parser.add_argument(name, action="store_true")
        elif isinstance(kind, list):
            parser.add_argument(name, choices=kind)
        else:
            parser.add_argument(name, type={NUMBER: int, FLOAT: float, WORD: str}[kind])
    found = vars(parser.parse_args(words))
    check_megatron(found)
    return found


def check_megatron(given: dict[str, Any]) -> None:
    """Rules of validate_args (training/arguments.py) and of PipelineParallelLayerLayout."""
    assert given["num_virtual_stages_per_pipeline_rank"] is None or given["pipeline_model_parallel_layout"] is None
    pp = given["pipeline_model_parallel_size"]
    if given["pipeline_model_parallel_layout"] is not None:
        stages = megatron_stages(given["pipeline_model_parallel_layout"])
        assert len(stages) % pp == 0
        whole = "".join(stages)
        assert whole[0] == "E"
        assert whole[-1] == "L"
        assert whole.count("t") == given["num_layers"]
    else:
        assert given["num_layers"] % (pp * (given["num_virtual_stages_per_pipeline_rank"] or 1)) == 0
    if given["recompute_granularity"] == "selective":
        assert given["recompute_method"] is None
    if given["overlap_param_gather"]:
        assert given["use_distributed_optimizer"]
        assert given["overlap_grad_reduce"]
    if given["use_megatron_fsdp"]:
        assert given["ckpt_format"] == "fsdp_dtensor"
    if given["optimizer_cpu_offload"]:
        assert given["use_precision_aware_optimizer"]
    if given["use_precision_aware_optimizer"]:  # core/optimizer/optimizer_config.py
        assert given["optimizer"] == "adam"
        assert given["use_distributed_optimizer"]
    if given["expert_model_parallel_size"] > 1:
        assert given["num_experts"] % given["expert_model_parallel_size"] == 0
        assert given["tensor_model_parallel_size"] == 1 or given["sequence_parallel"]


def megatron_stages(layout: str) -> list[str]:
    """The stages of a layout, unrolled as parse_str_to_list does."""
    layout = re.sub(r"(.)\*(\d+)", lambda found: found.group(1) * int(found.group(2)), layout)
    assert set(layout) <= set("EtL|")
    return layout.split("|")


# NVIDIA-NeMo/Megatron-Bridge@v0.6.0: training/config.py's ConfigContainer, whose sections have the fields of
# Megatron-Core's classes.
NEMO: dict[str, set[str]] = {
    "model": {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "pipeline_model_parallel_layout", "context_parallel_size", "cp_comm_type", "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel", "microbatch_group_size_per_vp_stage", "recompute_granularity", "recompute_method",
        "recompute_num_layers", "seq_length", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
        "num_query_groups", "kv_channels", "hidden_dropout", "attention_dropout", "layernorm_epsilon", "normalization",
        "qk_layernorm", "vocab_size", "share_embeddings_and_output_weights", "num_moe_experts", "moe_router_topk",
        "moe_ffn_hidden_size", "moe_router_score_function", "moe_token_dispatcher_type", "moe_grouped_gemm",
        "moe_shared_expert_intermediate_size", "moe_layer_freq", "multi_latent_attention", "q_lora_rank",
        "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    },
    "train": {"micro_batch_size", "global_batch_size"},
    "ddp": {
        "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "use_megatron_fsdp",
        "data_parallel_sharding_strategy", "num_distributed_optimizer_instances",
    },
    "optimizer": {"optimizer", "sgd_momentum", "use_distributed_optimizer", "optimizer_cpu_offload",
                  "optimizer_offload_fraction", "use_precision_aware_optimizer"},
    "dataset": {"seq_length"},
    "dist": {"use_megatron_fsdp"},
    "checkpoint": {"ckpt_format"},
}  # fmt: skip

# pytorch/torchtitan@v0.2.2: torchtitan/config/job_config.py.
TORCHTITAN: dict[str, dict[str, object]] = {
    "model": {"name": str, "flavor": str, "converters": list},
    "optimizer": {"name": ["Adam", "AdamW"]},
    "training": {
        "local_batch_size": int, "global_batch_size": int, "seq_len": int,
        "mixed_precision_param": ["bfloat16", "float32"],
    },
    "parallelism": {
        "data_parallel_replicate_degree": int, "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": ["default", "always", "never"], "tensor_parallel_degree": int,
        "pipeline_parallel_degree": int, "module_fqns_per_model_part": list, "pipeline_parallel_schedule": str,
        "pipeline_parallel_microbatch_size": int, "context_parallel_degree": int,
        "context_parallel_rotate_method": ["allgather", "alltoall"], "expert_parallel_degree": int,
        "expert_tensor_parallel_degree": int,
    },
    "activation_checkpoint": {"mode": ["selective", "full", "memory_budget", "none"], "selective_ac_option": str},
}  # fmt: skip

# deepspeedai/DeepSpeed@v0.19.5: runtime/config.py, zero/config.py, zero/offload_config.py, tensor_parallel/config.py,
# activation_checkpointing/config.py, module_inject/auto_ep_config.py, deepspeed/__init__.py.
DEEPSPEED: dict[str, object] = {
    "train_batch_size": int, "train_micro_batch_size_per_gpu": int, "gradient_accumulation_steps": int,
    "zero_optimization": {
        "stage": [0, 1, 2, 3], "mics_shard_size": int, "overlap_comm": bool,
        "offload_optimizer": {"device": ["none", "cpu", "nvme"], "nvme_path": str},
    },
    "optimizer": {"type": ["Adam", "AdamW", "SGD"], "params": {"momentum": float, "adam_w_mode": bool}},
    "zero_allow_untested_optimizer": bool,
    "bf16": {"enabled": bool}, "fp16": {"enabled": bool},
    "tensor_parallel": {"autotp_size": int},
    "expert_parallel": {"enabled": bool, "autoep_size": int},
    "sequence_parallel_size": int, "data_parallel_size": int,
    "activation_checkpointing": {"partition_activations": bool, "cpu_checkpointing": bool},
}  # fmt: skip

# huggingface/accelerate@v1.14.0: commands/config/config_args.py (ClusterConfig refuses other keys), launch.py.
ACCELERATE: dict[str, object] = {
    "compute_environment": ["LOCAL_MACHINE"], "distributed_type": ["NO", "MULTI_GPU", "FSDP"],
    "mixed_precision": ["no", "fp16", "bf16", "fp8"], "num_machines": int, "num_processes": int, "machine_rank": int,
    "main_training_function": str, "rdzv_backend": ["static", "c10d"], "same_network": bool, "use_cpu": bool,
    "fsdp_config": {
        "fsdp_version": [1, 2], "fsdp_auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"],
        "fsdp_reshard_after_forward": bool, "fsdp_offload_params": bool, "fsdp_activation_checkpointing": bool,
        "fsdp_state_dict_type": ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"],
        "fsdp_cpu_ram_efficient_loading": bool,
    },
    "parallelism_config": {
        "parallelism_config_dp_replicate_size": int, "parallelism_config_dp_shard_size": int,
        "parallelism_config_tp_size": int, "parallelism_config_cp_size": int,
        "parallelism_config_cp_comm_strategy": ["allgather", "alltoall"],
    },
    "fp8_config": {"backend": ["TE", "MSAMP", "AO"], "fp8_format": ["E4M3", "HYBRID"]},
}  # fmt: skip

# huggingface/nanotron@2411b02: src/nanotron/config: config.py, parallelism_config.py, models_config.py; examples.
NANOTRON: dict[str, object] = {
    "general": {"project": str, "run": str, "seed": int},
    "parallelism": {
        "dp": int, "pp": int, "tp": int, "pp_engine": ["1f1b", "afab"], "tp_mode": ["ALL_REDUCE", "REDUCE_SCATTER"],
        "tp_linear_async_communication": bool, "recompute_layer": bool, "expert_parallel_size": int,
        "context_parallel_size": int,
    },
    "model": {
        "dtype": ["bfloat16", "float32"], "init_method": {"std": float}, "make_vocab_size_divisible_by": int,
        "ddp_bucket_cap_mb": int,
        "model_config": {
            "is_llama_config": bool, "is_qwen2_config": bool, "hidden_act": str, "hidden_size": int,
            "intermediate_size": int, "max_position_embeddings": int, "num_attention_heads": int,
            "num_hidden_layers": int, "num_key_value_heads": int, "rms_norm_eps": float, "rope_theta": float,
            "tie_word_embeddings": bool, "vocab_size": int,
            "_attn_implementation": ["flash_attention_2", "flex_attention", "sdpa", "ring_flash_triton", "ring",
                                     "llama3_ring_attention"],
        },
    },
    "tokenizer": {"tokenizer_name_or_path": None},
    "tokens": {
        "sequence_length": int, "train_steps": int, "micro_batch_size": int, "batch_accumulation_per_replica": int,
    },
    "optimizer": {
        "zero_stage": int, "weight_decay": float, "clip_grad": float, "accumulate_grad_in_fp32": bool,
        "optimizer_factory": {
            "name": ["adamW", "sgd"], "adam_eps": float, "adam_beta1": float, "adam_beta2": float,
            "torch_adam_is_fused": bool,
        },
        "learning_rate_scheduler": {
            "learning_rate": float, "lr_warmup_steps": int, "lr_warmup_style": ["linear", "constant"],
            "lr_decay_style": ["linear", "cosine", "1-sqrt"], "min_decay_lr": float,
        },
    },
    "checkpoints": {"checkpoints_path": str, "checkpoint_interval": int},
    "data_stages": list,
}  # fmt: skip

# AI-Hypercomputer/maxtext@maxtext-v0.2.4: src/maxtext/configs/base.yml and types.py.
_AXES = ("data", "fsdp", "context", "tensor", "tensor_sequence", "pipeline", "expert")
MAXTEXT: dict[str, object] = {
    "model_name": str, "decoder_block": ["llama2", "gpt3", "mixtral"], "num_slices": int, "hardware": ["gpu"],
    "dtype": ["bfloat16", "float32"], "weight_dtype": ["float32"], "quantization": ["fp8", "te_fp8_currentscaling"],
    "opt_type": ["adamw", "adam_pax", "sgd", "muon"], "remat_policy": ["none", "minimal_with_context", "full"],
    "context_parallel_strategy": ["all_gather", "ring", "ulysses", "usp"], "max_target_length": int,
    "attention": ["autoselected", "dot_product", "flash", "cudnn_flash_te"], "packing": bool,
    "per_device_batch_size": float, "gradient_accumulation_steps": int, "num_pipeline_microbatches": int,
    "num_layers_per_pipeline_stage": int, "num_pipeline_repeats": int, "head_dim": int, "vocab_size": int,
    "mlp_activations": list, "logits_via_embedding": bool, "normalization_layer_epsilon": float, "num_experts": int,
    "num_experts_per_tok": int, "base_moe_mlp_dim": int, "rope_max_timescale": int, "trainable_position_size": int,
    "fused_qkv": bool, "enable_dropout": bool, "shard_optimizer_over_data": bool,
    "optimizer_memory_host_offload": bool,
    **{f"base_{name}": int for name in ("num_decoder_layers", "emb_dim", "num_query_heads", "num_kv_heads", "mlp_dim")},
    **{f"{network}_{axis}_parallelism": int for network in ("ici", "dcn") for axis in _AXES},
}  # fmt: skip


def check(document: object, declared: object, place: str = "") -> None:
    """AssertionError where ``document`` has a key that is not declared, or a value of another type or choice."""
    if isinstance(declared, dict):
        assert isinstance(document, dict), place
        for key, value in document.items():
            assert key in declared, f"{place}.{key} is not declared"
            check(value, declared[key], f"{place}.{key}")
    elif isinstance(declared, list):
        assert document in declared, f"{place} is {document!r}"
    elif declared is not None:
        assert isinstance(declared, type)
        assert type(document) is declared, f"{place} is {document!r}"


def words_of_script(text: str) -> list[str]:
    """What a script gives to torchrun or python3, as bash makes words of it."""
    assert subprocess.run(["bash", "-n"], input=text.encode(), check=False).returncode == 0
    shellcheck = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", "-"]
    found = subprocess.run(shellcheck, input=text.encode(), capture_output=True, check=False)
    assert found.returncode == 0, found.stdout.decode()
    stubs = (
        "scontrol() { echo node1; }; srun() { shift; \"$@\"; }; python3() { torchrun \"$@\"; }; exec() { \"$@\"; }; "
        "torchrun() { printf '%s\\0' \"$@\"; }; SLURM_JOB_NODELIST=n SLURM_JOB_ID=1 NODE_RANK=0 MASTER_ADDR=node1; "
        "SKYPILOT_NODE_RANK=0 SKYPILOT_NODE_IPS=node1; "
    )  # fmt: skip
    ran = subprocess.run(["bash", "-c", stubs + text], capture_output=True, check=True)
    assert ran.stderr == b""
    return ran.stdout.decode().split("\0")[:-1]


def torchrun_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options of torchrun with their values, and what it starts."""
    options: dict[str, str] = {}
    while words and words[0] in TORCHRUN:
        options[words[0]], words = words[1], words[2:]
    return options, words
