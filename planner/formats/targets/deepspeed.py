"""DeepSpeed: its JSON config, written and read back."""

from __future__ import annotations

from collections.abc import Iterator

from costmodels.vocabulary.choices import MOMENTUM, ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.documents import Document, choice, flag, json_text, number, read_json, section, sgd_of, unread_note
from planner.formats.settings import Asked, Job, Settings
from planner.formats.target import Abilities, Read, Refusal, Target, Written

VERSION = "DeepSpeed v0.19.5"
OPTIMIZERS = {Optimizer.ADAMW: "AdamW", Optimizer.ADAM: "Adam", Optimizer.SGD: "SGD", Optimizer.SGD_MOMENTUM: "SGD"}
# Its Adam decouples weight decay, as AdamW does, where nothing else is said (runtime/config.py, ADAM_W_MODE_DEFAULT).
PARAMS: dict[Optimizer, dict[str, object]] = {
    Optimizer.ADAM: {"adam_w_mode": False},
    Optimizer.SGD_MOMENTUM: {"momentum": MOMENTUM},
}
OPTIMIZER_WORDS = {optimizer: name.lower() for optimizer, name in OPTIMIZERS.items()}  # which it lower-cases
DEVICES = {Offload.NONE: "none", Offload.CPU: "cpu", Offload.NVME: "nvme"}  # runtime/zero/offload_config.py
# A pass over all gradients in place of a scatter; whole buckets in place of one buffer: what false makes of them.
ON_BY_DEFAULT = ("zero_optimization.reduce_scatter", "zero_optimization.contiguous_gradients")
NVME_PATH = "/local_nvme"  # left to the user
ABILITIES = Abilities(
    # Stages of a pipeline (PipelineModule) are made in the training script: the JSON has no key.
    axes=frozenset({"dp_replicate", "dp_shard", "cp", "tp", "ep"}),
    zero_stages=(0, 1, 2, 3),
    schedules=(),
    recompute=(Recompute.NONE, Recompute.FULL),
    precisions=(Precision.BF16, Precision.FP16, Precision.FP32),
    optimizers=tuple(OPTIMIZERS),
    cp_methods=(ContextMethod.ALL_TO_ALL,),  # Ulysses
    offloads=tuple(Offload),
    sequence_parallel=(False,),  # AutoTP reduces whole activations
)


def limits(job: Asked) -> Iterator[Refusal]:
    """What does not go together (runtime/zero/config.py, runtime/engine.py, deepspeed/__init__.py)."""
    layout = job.layout
    if layout.dp_replicate > 1 and layout.dp_shard * layout.cp > 1 and layout.zero_stage != 3:
        yield Refusal(
            f"its groups of shards (mics_shard_size) are for ZeRO stage 3, the plan has stage {layout.zero_stage} over "
            f"{layout.dp_shard} ranks in {layout.dp_replicate} replicas",
            "search with --zero 3 or without replicas",
        )
    if layout.dp_replicate > 1 and layout.cp > 1 and layout.zero_stage == 3:
        yield Refusal("its groups of shards do not go with sequence parallelism", "search with --cp 1")
    if layout.cp > 1 and layout.tp > 1:
        yield Refusal("its tensor parallelism does not go with sequence parallelism", "search with --tp 1 or --cp 1")
    if layout.ep > 1 and layout.tp * layout.cp * layout.dp_replicate > 1:
        yield Refusal(
            "its experts (AutoEP) are whole on a rank and go neither with sequence parallelism nor groups of shards",
            "search with --tp 1 --cp 1 and without replicas",
        )
    if layout.offload is not Offload.NONE and layout.zero_stage == 0:
        yield Refusal("offload goes with ZeRO stages 1 to 3", "search with --zero 1")
    if layout.offload is Offload.NVME and layout.zero_stage != 3:
        yield Refusal("NVMe goes with ZeRO stage 3", "search with --zero 3, or --offload cpu")


def write(job: Job) -> Written:
    """The keys of runtime/config.py."""
    layout = job.layout
    notes = ["the learning rate, its schedule, data and number of steps are left to you"]
    zero: dict[str, object] = {"stage": layout.zero_stage}
    if layout.zero_stage in (1, 2):  # of 3 it is the default
        zero["overlap_comm"] = True
    if layout.dp_replicate > 1 and layout.zero_stage == 3:
        zero["mics_shard_size"] = layout.dp_shard
        notes.append("build the model under deepspeed.zero.MiCS_Init, which mics_shard_size needs")
    if layout.offload is not Offload.NONE:
        zero["offload_optimizer"] = {"device": DEVICES[layout.offload]}
        if layout.offload is Offload.NVME:
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": NVME_PATH}
            notes.append(f"set offload_optimizer.nvme_path to your disks: {NVME_PATH} is an example")
    document: dict[str, object] = {
        "train_batch_size": layout.global_batch_size,
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "zero_optimization": zero,
        "optimizer": _optimizer(layout.optimizer),
        "bf16": {"enabled": layout.precision is Precision.BF16},
        "fp16": {"enabled": layout.precision is Precision.FP16},
    }
    if layout.zero_stage > 0 and layout.optimizer in (Optimizer.SGD, Optimizer.SGD_MOMENTUM):
        document["zero_allow_untested_optimizer"] = True  # runtime/engine.py ends without it
    if layout.tp > 1:
        document["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.cp > 1:
        document |= {"sequence_parallel_size": layout.cp, "data_parallel_size": layout.dp}
        notes.append("register Ulysses attention in the model (deepspeed.runtime.sequence_parallel)")
    if layout.ep > 1:
        document["expert_parallel"] = {"enabled": True, "autoep_size": layout.ep}
    if layout.recompute is Recompute.FULL:
        document["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
        notes.append("recomputation is the model's: call deepspeed.checkpointing, or its gradient_checkpointing_enable")
    notes.append(f"sequences of {layout.seq_len} tokens, on {layout.num_devices} GPUs: the JSON says neither")
    return Written(json_text(document), tuple(notes))


def _optimizer(name: Optimizer) -> dict[str, object]:
    params = PARAMS.get(name)
    return {"type": OPTIMIZERS[name], **({} if params is None else {"params": params})}


# -- reading ------------------------------------------------------------------------------------


def read(text: str) -> Read:
    """Settings of a config. Values that are ``auto`` are left to the options of the import."""
    document = read_json(text)
    zero = section(document, "zero_optimization")
    stage = number(zero, "stage", 0) or 0
    if stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization.stage must be 0 to 3, not {stage}", hint="correct the file")
    _check_priced(zero, document)
    flag(document, "zero_allow_untested_optimizer")  # read: it lets a run begin and changes nothing of it
    cp = number(document, "sequence_parallel_size", 1) or 1
    mics = number(zero, "mics_shard_size", -1)
    sharded = None if mics in (None, -1) else mics
    whole = number(document, "train_batch_size")
    # runtime/config.py: of the two that are not there accumulation is 1, and the micro-batch what that leaves
    is_whole = whole is not None and "train_micro_batch_size_per_gpu" not in document
    unsaid = 1 if whole is None or is_whole else None
    settings = Settings(
        pp=1, tp=number(section(document, "tensor_parallel"), "autotp_size", 0) or 1, cp=cp, ep=_experts(document),
        zero_stage=stage,
        dp_shard=1 if stage == 0 else sharded, dp_replicate=None if stage == 0 or sharded else 1,
        micro_batch_size=number(document, "train_micro_batch_size_per_gpu"),
        num_microbatches=number(document, "gradient_accumulation_steps", unsaid),
        global_batch_size=whole,
        precision=_precision(document),
        optimizer=_optimizer_of(section(document, "optimizer")),
        schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1, sequence_parallel=False,
        recompute=Recompute.FULL if "activation_checkpointing" in document else None,
        offload=_offload(zero),
        cp_method=ContextMethod.ALL_TO_ALL if cp > 1 else ContextMethod.ALL_GATHER,
    )  # fmt: skip
    notes: list[str] = []
    if "activation_checkpointing" in document:
        notes.append("activation_checkpointing is there, so the model is taken to recompute every block")
    if stage in (1, 2) and not flag(zero, "overlap_comm"):
        notes.append("priced with gradients reduced beside the backward pass, though overlap_comm is not true")
    if stage == 3 and not flag(zero, "overlap_comm", True):
        notes.append(
            "priced with parameters gathered and gradients reduced beside compute, though overlap_comm is false"
        )
    return Read(settings, notes=(*notes, *unread_note(document, ON_BY_DEFAULT)))


def _optimizer_of(given: Document) -> Optimizer:
    """Adam is AdamW unless ``params`` say otherwise; torch.optim.SGD has no momentum where they say none."""
    found = choice("optimizer.type", str(given.get("type", "AdamW")).lower(), OPTIMIZER_WORDS)
    params = section(given, "params")
    if found is Optimizer.ADAM and flag(params, "adam_w_mode", True):
        return Optimizer.ADAMW
    momentum = params.get("momentum", 0)
    return sgd_of("optimizer.params.momentum", momentum) if found is Optimizer.SGD and momentum != "auto" else found


def _check_priced(zero: dict[str, object], document: dict[str, object]) -> None:
    """InputError for what changes a step and has no price."""
    found = [
        name
        for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
        if flag(zero, name)
    ]
    if (number(zero, "zero_hpz_partition_size", 1) or 1) > 1:
        found.append("zero_hpz_partition_size")
    if section(zero, "offload_param").get("device", "none") != "none":
        found.append("offload_param")
    if found:
        raise InputError(f"zero_optimization.{', '.join(found)}: not priced", hint="leave these out")
    unpriced = [name for name in ("compression_training", "sparse_attention", "elasticity") if name in document]
    if unpriced:
        raise InputError(f"{', '.join(unpriced)}: not priced", hint="leave these out")


def _experts(document: dict[str, object]) -> int:
    """The degree of AutoEP."""
    experts = section(document, "expert_parallel")
    if (number(experts, "expert_tensor_parallel_size", 1) or 1) > 1:
        raise InputError("expert_parallel.expert_tensor_parallel_size is not priced", hint="leave it out")
    return (number(experts, "autoep_size", 1) or 1) if flag(experts, "enabled") else 1


def _precision(document: dict[str, object]) -> Precision | None:
    words = {name: section(document, name).get("enabled", False) for name in ("bf16", "bfloat16", "fp16")}
    if words["bf16"] is True or words["bfloat16"] is True:
        return Precision.BF16
    if words["fp16"] is True:
        return Precision.FP16
    return None if "auto" in words.values() else Precision.FP32


def _offload(zero: dict[str, object]) -> Offload:
    if flag(zero, "cpu_offload"):  # its older name
        return Offload.CPU
    return choice("offload_optimizer.device", section(zero, "offload_optimizer").get("device", "none"), DEVICES)


def is_one(name: str, text: str) -> bool:
    """Whether it looks like a config of DeepSpeed."""
    keys = ('"zero_optimization"', '"train_micro_batch_size_per_gpu"', '"train_batch_size"')
    return name.endswith(".json") and text.lstrip().startswith("{") and any(key in text for key in keys)


TARGETS = (
    Target(
        name="deepspeed",
        version=VERSION,
        sources=(
            "deepspeedai/DeepSpeed@v0.19.5: deepspeed/runtime/config.py, zero/config.py, zero/offload_config.py",
            "runtime/tensor_parallel/config.py, activation_checkpointing/config.py, module_inject/auto_ep_config.py",
        ),
        write=write,
        abilities=ABILITIES,
        limits=limits,
        framework="deepspeed",
        read=read,
        is_one=is_one,
    ),
)
