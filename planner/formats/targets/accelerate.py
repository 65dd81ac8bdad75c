"""Hugging Face accelerate: its YAML config with FSDP2 and ND-parallelism, written and read back."""

from __future__ import annotations

from collections.abc import Iterator

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.software import named
from planner.errors import InputError
from planner.formats.documents import choice, commented, flag, number, read_yaml, section, unread_note, yaml_text
from planner.formats.settings import Asked, Job, Layout, Settings
from planner.formats.target import Abilities, Read, Refusal, Target, Written

VERSION = "accelerate v1.14.0"
PRECISIONS = {Precision.BF16: "bf16", Precision.FP16: "fp16", Precision.FP32: "no", Precision.FP8: "fp8"}
# torch passes keys and values on by all-to-all, which is a ring; heads are never exchanged.
ROTATE = {ContextMethod.ALL_GATHER: "allgather", ContextMethod.RING: "alltoall"}
PREFIX = "parallelism_config_"
DATA = ("dp_replicate", "dp_shard", "cp")
NOT_COMPILED = "NO"  # utils/dataclasses.py, DynamoBackend
ABILITIES = Abilities(
    axes=frozenset({"dp_replicate", "dp_shard", "cp", "tp"}),
    zero_stages=(2, 3),  # FSDP2 shards all states; it may keep parameters gathered from forward to backward
    schedules=(),
    recompute=(Recompute.NONE, Recompute.FULL),
    precisions=tuple(PRECISIONS),
    optimizers=tuple(Optimizer),  # the training script's
    cp_methods=tuple(ROTATE),
    sequence_parallel=(False,),  # transformers' tensor-parallel plans keep activations whole
)


def limits(job: Asked) -> Iterator[Refusal]:
    """What ParallelismConfig refuses (parallelism_config.py)."""
    layout = job.layout
    if layout.dp_replicate > 1 and layout.dp_shard * layout.cp == 1 and layout.tp > 1:
        yield Refusal("replicas without sharding (DDP) do not go with tensor parallelism",
                      "search with --zero 3, or --tp 1")  # fmt: skip
    if layout.dp_replicate > 1 and layout.dp_shard == 1 and layout.cp > 1:
        yield Refusal("replicas with context parallelism need dp_shard above 1", "search with --zero 3 or --cp 1")
    if layout.precision is Precision.FP8 and layout.tp * layout.cp > 1:
        yield Refusal("8 bits through Transformer Engine do not go with tp or cp", "search with --precision bf16")


def write(job: Job) -> Written:
    """The keys of commands/config/config_args.py and commands/launch.py."""
    layout = job.layout
    notes = (
        f"the training script's own: per-device batch {layout.micro_batch_size}, gradient accumulation "
        f"{layout.num_microbatches}, sequences of {layout.seq_len} tokens, optimizer {layout.optimizer}",
        *(("load the model split over tp, as from_pretrained(..., tp_plan='auto', tp_size=..., device_mesh="
           "accelerator.torch_device_mesh) does: accelerate does not split it",) if layout.tp > 1 else ()),
        *(("on every node give its --machine_rank and the first node's --main_process_ip",)
          if job.num_nodes > 1 else ()),
    )  # fmt: skip
    sharded = layout.dp_shard * layout.cp > 1
    document: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if sharded else "MULTI_GPU" if layout.num_devices > 1 else "NO",
        "mixed_precision": PRECISIONS[layout.precision],
        "num_machines": job.num_nodes,
        "num_processes": layout.num_devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if sharded:
        document["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": layout.zero_stage == 3,
            "fsdp_offload_params": False,
            "fsdp_activation_checkpointing": layout.recompute is Recompute.FULL,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    elif layout.recompute is Recompute.FULL:
        notes += ("recomputation is the script's: gradient_checkpointing_enable()",)
    if layout.tp * layout.cp > 1 or (sharded and layout.dp_replicate > 1):
        document["parallelism_config"] = _parallelism(layout)
    if named(job.plan.framework).is_compiled:
        document["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if layout.precision is Precision.FP8:
        document["fp8_config"] = {"backend": "TE", "fp8_format": "HYBRID"}
    head = commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
    return Written(head + yaml_text(document), notes)


def _parallelism(layout: Layout) -> dict[str, object]:
    found: dict[str, object] = {
        f"{PREFIX}dp_replicate_size": layout.dp_replicate,
        f"{PREFIX}dp_shard_size": layout.dp_shard,
        f"{PREFIX}tp_size": layout.tp,
        f"{PREFIX}cp_size": layout.cp,
    }
    if layout.cp > 1:
        found[f"{PREFIX}cp_comm_strategy"] = ROTATE[layout.cp_method]
    return found


# -- reading ------------------------------------------------------------------------------------


def read(text: str) -> Read:
    """Settings of a config file. Batches and sequences are the script's, so options of the import say them."""
    document = read_yaml(text)
    kind = str(document.get("distributed_type", "NO"))
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise InputError(
            f"distributed_type {kind!r:.40} is not read here",
            hint="import DeepSpeed's JSON or Megatron's command line itself; FSDP, MULTI_GPU and NO are read",
        )
    fsdp, parallel = section(document, "fsdp_config"), section(document, "parallelism_config")
    if flag(fsdp, "fsdp_offload_params"):
        raise InputError("offload of parameters (fsdp_offload_params) is not priced", hint="leave it out")
    is_tp_alone = kind == "MULTI_GPU" and all((number(parallel, f"{PREFIX}{axis}_size", 1) or 1) == 1 for axis in DATA)
    if parallel and not is_tp_alone and (kind != "FSDP" or number(fsdp, "fsdp_version", 1) != 2):
        raise InputError(
            f"parallelism_config goes with distributed_type FSDP and fsdp_version 2 alone, or with MULTI_GPU where it "
            f"is of tp alone, not with {kind} and version {number(fsdp, 'fsdp_version', 1)}",
            hint="set both, or leave parallelism_config out",
        )
    if (number(parallel, f"{PREFIX}sp_size", 1) or 1) > 1:
        raise InputError("sequence parallelism through DeepSpeed (sp_size) is not priced here", hint="use cp_size")
    devices = number(document, "num_processes", 1 if kind == "NO" else None)
    tp, cp = number(parallel, f"{PREFIX}tp_size", 1) or 1, number(parallel, f"{PREFIX}cp_size", 1) or 1
    strategy = parallel.get(f"{PREFIX}cp_comm_strategy", "allgather")
    replicate, shard, zero = _data(kind, fsdp, parallel, (devices, number(document, "num_machines", 1) or 1))
    made = (replicate or 1) * (shard or 1) * cp * tp
    if kind != "NO" and parallel and devices and made != devices:
        raise InputError(
            f"the degrees of parallelism_config make {made} processes, num_processes is {devices}",
            hint="correct the file: accelerate takes no other product",
        )
    precision, notes = _precision(document)
    settings = Settings(
        num_devices=devices, pp=1, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=1, zero_stage=zero,
        precision=precision,
        schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1, sequence_parallel=False, offload=Offload.NONE,
        recompute=_recompute(kind, fsdp),
        cp_method=choice("cp_comm_strategy", strategy, ROTATE),
    )  # fmt: skip
    older = document.get("dynamo_backend")  # which it makes a dynamo_config of, where there is none
    backend = str(section(document, "dynamo_config").get("dynamo_backend", older or NOT_COMPILED))
    kernels = () if backend.upper() == NOT_COMPILED else ("compile",)
    return Read(settings, notes=(*notes, *unread_note(document)), kernels=kernels)


def _precision(document: dict[str, object]) -> tuple[Precision, tuple[str, ...]]:
    """What accelerate takes, and a note where the file does not say it (commands/config/config_args.py)."""
    word = document.get("mixed_precision", "fp16" if document.get("fp16") is True else None)
    if word is None:
        assumed = (
            "mixed_precision is not said: fp32 is assumed, as accelerate does (planner import --precision: another)"
        )
        return Precision.FP32, (assumed,)
    return choice("mixed_precision", "no" if word is False else word, PRECISIONS), ()


def _data(
    kind: str, fsdp: dict[str, object], parallel: dict[str, object], size: tuple[int | None, int]
) -> tuple[int | None, int | None, int]:
    """Replicas, shards and ZeRO stage; ``size``: GPUs and nodes."""
    devices, nodes = size
    if kind != "FSDP":
        return (1 if parallel else devices), 1, 0
    stage = _zero_stage(fsdp)
    if not parallel:
        if str(fsdp.get("fsdp_sharding_strategy", "")).upper().startswith("HYBRID"):
            if devices is None or devices % nodes:
                raise InputError(
                    "fsdp_sharding_strategy HYBRID_SHARD makes a replica of every node, and the file does not say its "
                    f"GPUs: num_processes {devices}, num_machines {nodes}",
                    hint="correct num_processes and num_machines",
                )
            return nodes, devices // nodes, stage
        return 1, devices, stage
    replicate = number(parallel, f"{PREFIX}dp_replicate_size", 1)
    shard = number(parallel, f"{PREFIX}dp_shard_size", 1)
    sharded = (shard or 1) * (number(parallel, f"{PREFIX}cp_size", 1) or 1) > 1
    return replicate, shard, stage if sharded else 0


# fsdp_sharding_strategy of FSDP1, by name or number.
_STRATEGIES = {"FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3, "4": 3,
               "HYBRID_SHARD_ZERO2": 2, "5": 2}  # fmt: skip


def _zero_stage(fsdp: dict[str, object]) -> int:
    """FSDP2 says by a truth value whether parameters are given back after forward, FSDP1 by a strategy."""
    reshard = fsdp.get("fsdp_reshard_after_forward")
    if number(fsdp, "fsdp_version", 1) == 2 and str(reshard).upper() not in _STRATEGIES:
        return 3 if flag(fsdp, "fsdp_reshard_after_forward", True) else 2
    strategy = str(fsdp.get("fsdp_sharding_strategy", reshard or "FULL_SHARD")).upper()
    if strategy not in _STRATEGIES:
        raise InputError(f"fsdp_sharding_strategy {strategy!r:.40} is unknown", hint="correct the file")
    return _STRATEGIES[strategy]


def _recompute(kind: str, fsdp: dict[str, object]) -> Recompute | None:
    """None where the training script says it."""
    if kind != "FSDP":
        return None
    if "fsdp_activation_checkpointing" not in fsdp:
        return None
    return Recompute.FULL if flag(fsdp, "fsdp_activation_checkpointing") else Recompute.NONE


def is_one(name: str, text: str) -> bool:
    """Whether it looks like a config of accelerate."""
    return name.endswith((".yaml", ".yml")) and "distributed_type" in text


TARGETS = (
    Target(
        name="accelerate",
        version=VERSION,
        sources=(
            "huggingface/accelerate@v1.14.0: src/accelerate/parallelism_config.py, commands/config/config_args.py",
            "src/accelerate/commands/launch.py, examples/torch_native_parallelism/configs/tp_hsdp.yaml",
        ),
        write=write,
        abilities=ABILITIES,
        limits=limits,
        framework="accelerate",
        read=read,
        is_one=is_one,
    ),
)
