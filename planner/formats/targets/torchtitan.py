"""torchtitan: the job config in TOML, written and read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from costmodels.vocabulary.choices import ContextMethod, Offload, Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.software import named
from planner.errors import InputError
from planner.formats.documents import choice, commented, flag, number, read_toml, section, toml_text, unread_note
from planner.formats.settings import Asked, Job, Layout, Settings
from planner.formats.target import Abilities, Read, Refusal, Target, Written
from planner.formats.torchtitan_names import renamed

VERSION = "torchtitan v0.2.2"  # the last release whose job config is TOML: main has Python registries in its place
# Presets among the flavors of torchtitan/models/*/__init__.py.
FLAVORS = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
NO_PIPELINE = ("qwen3",)  # whose TrainSpec has no pipelining_fn
NO_CONTEXT = ("deepseek_v3",)  # whose flavors attend by flex attention, which context parallelism does not take
FP8 = "quantize.linear.float8"
# fsdp_reshard_after_forward. Under a pipeline gradients are reduced behind the last micro-batch, and parameters that
# are never given back are gathered once a step: that divides what ZeRO 1 divides (planner.frameworks.as_run).
RESHARD = {3: "always", 2: "never"}
RESHARD_IN_PIPELINE = {3: "always", 1: "never"}
# torch passes keys and values on by all-to-all, which is a ring; heads are never exchanged.
ROTATE = {ContextMethod.ALL_GATHER: "allgather", ContextMethod.RING: "alltoall"}
DTYPES = {Precision.BF16: "bfloat16", Precision.FP32: "float32", Precision.FP8: "bfloat16"}
OPTIMIZERS = {Optimizer.ADAMW: "AdamW", Optimizer.ADAM: "Adam"}  # components/optimizer.py
ABILITIES = Abilities(
    axes=frozenset({"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}),
    zero_stages=(1, 2, 3),  # FSDP2 shards all states; it may keep parameters gathered from forward to backward
    schedules=tuple(name for name in ScheduleName if name.rules.in_torch),
    recompute=tuple(Recompute),
    precisions=tuple(DTYPES),
    optimizers=tuple(OPTIMIZERS),
    cp_methods=tuple(ROTATE),
    sequence_parallel=(True,),  # apply_tp shards norms along the sequence
    cuts_unevenly=True,  # module_fqns_per_model_part
)


def limits(job: Asked) -> Iterator[Refusal]:
    """What parallelize.py, pipeline_parallel.py and parallel_dims.py refuse."""
    layout, shape = job.layout, job.shape
    if layout.dp_replicate > 1 and layout.dp_shard * layout.cp == 1 and layout.num_devices > layout.dp_replicate:
        yield Refusal(
            "its replicas without sharding are DDP, which goes with no other axis",
            "search with --zero 3, or --tp 1 --pp 1",
        )
    kept = RESHARD_IN_PIPELINE if layout.pp > 1 else RESHARD
    if layout.zero_stage and layout.zero_stage not in kept:
        yield Refusal(
            f"its FSDP2 divides what ZeRO {' or '.join(map(str, sorted(kept)))} divides with pp = {layout.pp}, not "
            f"ZeRO {layout.zero_stage}",
            f"search with --zero {min(kept)}",
        )
    if shape is not None and shape.family == "gpt":
        yield Refusal("it has no model with learned positions and LayerNorm", "export with --to megatron")
    divisor = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if layout.seq_len % divisor:
        yield Refusal(f"tp * 2 cp = {divisor} must divide the {layout.seq_len} tokens", "search with another --seq-len")
    if layout.precision is Precision.FP32 and layout.dp_shard * layout.cp == 1 and layout.dp_replicate > 1:
        yield Refusal("its replicas without sharding run under autocast", "search with --precision bf16 or --zero 3")
    name, _ = FLAVORS.get(job.preset or "", (None, None))
    if layout.pp > 1 and name in NO_PIPELINE:
        yield Refusal(f"its {name} cannot be pipelined, the plan has pp = {layout.pp}", "search with --pp 1")
    if layout.cp > 1 and name in NO_CONTEXT:
        yield Refusal(f"its {name} takes no context parallelism, the plan has cp = {layout.cp}", "search with --cp 1")
    if layout.virtual_stages > 2 and layout.schedule.rules.is_v:
        yield Refusal(f"{layout.schedule} has two stages a rank", "search with --virtual-stages 2")


def write(job: Job) -> Written:
    """Tables of torchtitan/config/job_config.py."""
    layout = job.layout
    notes = ["data, tokenizer, learning rate, number of steps and checkpoints are left to you"]
    name, flavor = FLAVORS.get(job.preset or "", (None, None))
    if name is None:
        notes.append(f"set model.name and model.flavor: {job.plan.model.source} is none of torchtitan's own flavors")
    if layout.recompute is Recompute.SELECTIVE:
        notes.append("selective recomputation is torchtitan's own (selective_ac_option op): every second product, too")
    tables: dict[str, dict[str, object]] = {
        "model": {
            **({} if name is None else {"name": name, "flavor": flavor}),
            **({"converters": [FP8]} if layout.precision is Precision.FP8 else {}),
        },
        "optimizer": {"name": OPTIMIZERS[layout.optimizer]},
        "training": {
            "local_batch_size": _local_batch(layout),
            "global_batch_size": layout.global_batch_size,
            "seq_len": layout.seq_len,
            "mixed_precision_param": DTYPES[layout.precision],
        },
        "parallelism": _parallelism(layout),
        "activation_checkpoint": {
            "mode": str(layout.recompute),
            **({"selective_ac_option": "op"} if layout.recompute is Recompute.SELECTIVE else {}),
        },
    }
    if named(job.plan.framework).is_compiled:
        tables["compile"] = {"enable": True}
    head = commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
    return Written(head + "\n" + toml_text(tables), tuple(notes))


def _local_batch(layout: Layout) -> int:
    """Sequences that a rank takes at once: a pipeline takes all its micro-batches, and nothing is accumulated."""
    return layout.micro_batch_size * (layout.num_microbatches if layout.pp > 1 else 1)


def _parallelism(layout: Layout) -> dict[str, object]:
    found: dict[str, object] = {
        "data_parallel_replicate_degree": layout.dp_replicate,
        "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.dp_shard * layout.cp > 1:
        found["fsdp_reshard_after_forward"] = (RESHARD_IN_PIPELINE if layout.pp > 1 else RESHARD)[layout.zero_stage]
    if layout.cp > 1:
        found["context_parallel_rotate_method"] = ROTATE[layout.cp_method]
    if layout.ep > 1:  # experts are split over tp as the rest is
        found |= {"expert_parallel_degree": layout.ep, "expert_tensor_parallel_degree": layout.tp}
    if layout.pp > 1:
        found |= {
            "pipeline_parallel_schedule": layout.schedule.value,
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "module_fqns_per_model_part": _parts(layout.stage_blocks or ()),
        }
    return found


def _parts(stage_blocks: tuple[int, ...]) -> list[list[str]]:
    """The modules of each stage under torchtitan's names."""
    parts: list[list[str]] = []
    first = 0
    for size in stage_blocks:
        parts.append([f"layers.{index}" for index in range(first, first + size)])
        first += size
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


# -- reading ------------------------------------------------------------------------------------


def read(text: str) -> Read:
    """Settings of a job config; what it leaves out has the defaults of job_config.py."""
    document = read_toml(text)
    older = renamed(document, FP8)
    model, training = section(document, "model"), section(document, "training")
    parallelism = section(document, "parallelism")
    if flag(training, "enable_cpu_offload"):
        raise InputError("offload of parameters (training.enable_cpu_offload) is not priced", hint="leave it out")
    degrees = _degrees(parallelism)
    pp, tp = max(1, degrees.pp or 1), degrees.tp or 1
    batches, notes = _batches(training, parallelism, degrees)
    rotate = parallelism.get("context_parallel_rotate_method", "allgather")
    settings = Settings(
        zero_stage=_zero_stage(parallelism, degrees),
        recompute=_recompute(section(document, "activation_checkpoint")),
        precision=_precision(model, training),
        optimizer=choice("optimizer.name", section(document, "optimizer").get("name", "AdamW"), OPTIMIZERS),
        sequence_parallel=tp > 1,
        offload=Offload.NONE,
        cp_method=choice("parallelism.context_parallel_rotate_method", rotate, ROTATE),
    ).joined(degrees, batches, _pipeline(parallelism, pp))
    if flag(parallelism, "enable_async_tensor_parallel"):
        notes.append("priced without asynchronous tensor parallelism, which the config turns on")
    presets = {flavor: preset for preset, flavor in FLAVORS.items()}
    preset = presets.get((str(model.get("name", "llama3")), str(model.get("flavor", "debugmodel"))))
    compiled = section(document, "compile")
    has_model = "model" in str(compiled.get("components", "model"))  # they may be the loss alone
    kernels = ("compile",) if flag(compiled, "enable") and has_model else ()
    return Read(settings, preset=preset, notes=(*older, *notes, *unread_note(document)), kernels=kernels)


def _degrees(parallelism: dict[str, object]) -> Settings:
    shard = number(parallelism, "data_parallel_shard_degree", -1)
    found = Settings(
        pp=number(parallelism, "pipeline_parallel_degree", 1),
        dp_replicate=number(parallelism, "data_parallel_replicate_degree", 1),
        dp_shard=None if shard == -1 else shard,
        cp=number(parallelism, "context_parallel_degree", 1),
        tp=number(parallelism, "tensor_parallel_degree", 1),
        ep=number(parallelism, "expert_parallel_degree", 1),
    )
    etp = number(parallelism, "expert_tensor_parallel_degree", 1)
    if (found.ep or 1) > 1 and etp != found.tp:
        raise InputError(
            f"experts split over {etp} of the {found.tp} tensor-parallel ranks are not priced",
            hint="set parallelism.expert_tensor_parallel_degree to tensor_parallel_degree",
        )
    return found


def _zero_stage(parallelism: dict[str, object], degrees: Settings) -> int:
    """``default`` gathers parameters once a step under a pipeline, and for each pass without one."""
    if degrees.dp_shard == 1 and degrees.cp == 1:
        return 0
    kept = 1 if (degrees.pp or 1) > 1 else 2
    stages = {"always": 3, "never": kept, "default": 3 if kept == 2 else kept}
    word = str(parallelism.get("fsdp_reshard_after_forward", "default"))
    if word not in stages:
        raise InputError(f"parallelism.fsdp_reshard_after_forward {word!r:.40} is unknown", hint="correct the file")
    return stages[word]


def _batches(
    training: dict[str, object], parallelism: dict[str, object], degrees: Settings
) -> tuple[Settings, list[str]]:
    local = number(training, "local_batch_size", 8) or 1
    whole = number(training, "global_batch_size", -1)
    seq_len = number(training, "seq_len", 2048)
    if (degrees.pp or 1) > 1:
        micro = max(1, number(parallelism, "pipeline_parallel_microbatch_size", 1) or 1)
        if local % micro:
            raise InputError(
                f"pipeline_parallel_microbatch_size {micro} does not divide local_batch_size {local}",
                hint="correct the file: torchtitan refuses it",
            )
        found = Settings(seq_len=seq_len, micro_batch_size=micro, num_microbatches=local // micro)
        if whole == -1:
            return found, []
        found = replace(found, global_batch_size=whole)
        if whole == (degrees.dp_replicate or 1) * (degrees.dp_shard or 0) * local:
            return found, []
        return found, ["training.global_batch_size is of several local batches, or may be: torchtitan empties the "
                       "pipeline after each, and is priced as if it did not"]  # fmt: skip
    if whole == -1:
        found = Settings(seq_len=seq_len, micro_batch_size=local, num_microbatches=1)
        return found, ["no training.global_batch_size: one local batch a step"]
    return Settings(seq_len=seq_len, micro_batch_size=local, global_batch_size=whole), []


def _pipeline(parallelism: dict[str, object], pp: int) -> Settings:
    if pp == 1:
        return Settings(schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1)
    schedules = {name: name.value for name in ABILITIES.schedules}
    schedule = choice("parallelism.pipeline_parallel_schedule",
                     parallelism.get("pipeline_parallel_schedule", "1F1B"), schedules)  # fmt: skip
    parts = parallelism.get("module_fqns_per_model_part")
    if isinstance(parts, list) and parts and all(isinstance(part, list) for part in parts):
        blocks = tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)
        if len(blocks) % pp:
            raise InputError(f"{len(blocks)} model parts cannot be shared out to {pp} ranks", hint="correct the file")
        return Settings(schedule=schedule, virtual_stages=len(blocks) // pp, stage_blocks=blocks)
    if parallelism.get("pipeline_parallel_layers_per_stage") is not None:
        raise InputError(
            "parallelism.pipeline_parallel_layers_per_stage is not read",
            hint="name the stages: parallelism.module_fqns_per_model_part",
        )
    # pipeline_parallel.py: schedules of several stages a rank have two of them where nothing else is said, and blocks
    # are shared out evenly with the embedding and the head as one of them each (generate_llm_fqn_per_model_part)
    ends = [number(parallelism, f"pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")]
    first, last = (1 if each is None else each for each in ends)
    if min(first, last) < 0:
        raise InputError(f"pipeline_parallel_..._stage_less_layers must be 0 or more, not {min(first, last)}",
                         hint="correct the file")  # fmt: skip
    return Settings(
        schedule=schedule, virtual_stages=1 if schedule.rules.max_stages == 1 else 2, end_blocks=(first, last)
    )


def _recompute(section_of: dict[str, object]) -> Recompute:
    mode = str(section_of.get("mode", "selective"))
    if mode == "selective" and str(section_of.get("selective_ac_option", "2")) != "op":
        raise InputError(
            "recomputing every nth layer (activation_checkpoint.selective_ac_option) is not priced",
            hint='set it to "op", or mode to "full" or "none"',
        )
    if mode not in [each.value for each in Recompute]:
        raise InputError(f"activation_checkpoint.mode {mode!r:.40} is not priced", hint="full, selective or none are")
    return Recompute(mode)


def _precision(model: dict[str, object], training: dict[str, object]) -> Precision:
    converters = model.get("converters")
    named = [str(each) for each in converters] if isinstance(converters, list) else []
    if any("float8" in name for name in named):
        return Precision.FP8
    if named:
        raise InputError(f"model.converters {', '.join(named)[:80]} are not priced", hint="leave them out")
    word = training.get("mixed_precision_param", "bfloat16")
    return choice("training.mixed_precision_param", word, {p: DTYPES[p] for p in (Precision.BF16, Precision.FP32)})


def is_one(name: str, text: str) -> bool:
    """Whether it looks like a job config."""
    return name.endswith(".toml") and "[training]" in text


TARGETS = (
    Target(
        name="torchtitan",
        version=VERSION,
        sources=(
            "pytorch/torchtitan@v0.2.2: torchtitan/config/job_config.py, distributed/parallel_dims.py",
            "distributed/pipeline_parallel.py, models/llama3/infra/parallelize.py, models/*/__init__.py",
        ),
        write=write,
        abilities=ABILITIES,
        limits=limits,
        framework="torchtitan",
        read=read,
        is_one=is_one,
    ),
)
