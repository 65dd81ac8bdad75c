"""NeMo: overrides in YAML for a pretraining recipe of Megatron Bridge, which trains language models for NeMo."""

from __future__ import annotations

from dataclasses import replace

from costmodels.vocabulary.choices import Precision
from costmodels.vocabulary.software import named
from planner.formats import megatron_core
from planner.formats.documents import commented, yaml_text
from planner.formats.settings import Job
from planner.formats.target import Target, Written

VERSION = "NeMo Megatron Bridge v0.6.0"
# Names of registered MixedPrecisionConfigs, in training/mixed_precision.py: none is of 32 bits.
PRECISIONS = {
    Precision.BF16: "bf16_mixed",
    Precision.FP16: "fp16_mixed",
    Precision.FP8: "bf16_with_fp8_current_scaling_mixed",
}
OVERLAPPING = ("nemo", "megatron-bridge")  # whose recipe has these collectives beside the products
ABILITIES = replace(megatron_core.ABILITIES, precisions=tuple(PRECISIONS))


def write(job: Job) -> Written:
    """Fields of ConfigContainer (training/config.py), merged over a recipe with ``--config-file``."""
    layout, shape = job.layout, job.shape
    notes = ["data, learning rate, number of steps and checkpoints are those of the recipe that this is merged into"]
    if shape is None:
        notes.append("the sizes of the model are not known to the planner: take the recipe of that model")
    else:
        notes.append("the recipe must be of a model of the same family: sizes are overridden, its operators are not")
    notes += megatron_core.notes(layout)
    if megatron_core.needs_one_queue(layout):
        notes.append("on GPUs before Blackwell start it with CUDA_DEVICE_MAX_CONNECTIONS=1: communication of tp and cp "
                     "waits behind the products that are to hide it else")  # fmt: skip
    software = named(job.plan.framework)
    overlaps = software.overlaps_tensors or software.name.lower() in OVERLAPPING
    if layout.tp > 1 and layout.sequence_parallel and overlaps:
        notes.append(
            "priced with collectives of tensor parallelism beside the products: the recipe must have comm_overlap = "
            "CommOverlapConfig(tp_comm_overlap=True), which many have not"
        )
    model = {**megatron_core.parallelism(layout), "seq_length": layout.seq_len}
    cut = megatron_core.layout_text(layout)
    if cut is not None:
        model["pipeline_model_parallel_layout"] = cut
    if layout.virtual_stages > 1:
        model["virtual_pipeline_model_parallel_size"] = layout.virtual_stages
    if shape is not None:
        model |= megatron_core.sizes(shape)
        model |= {"vocab_size": shape.vocab, "share_embeddings_and_output_weights": shape.tied}
    document: dict[str, object] = {
        "model": model,
        "train": {"micro_batch_size": layout.micro_batch_size, "global_batch_size": layout.global_batch_size},
        "ddp": megatron_core.data_parallelism(layout),
        "optimizer": {
            **megatron_core.optimizer(layout),
            "use_distributed_optimizer": megatron_core.uses_distributed_optimizer(layout),
            **megatron_core.offload(layout),
        },
        "dataset": {"seq_length": layout.seq_len},
    }
    document["mixed_precision"] = PRECISIONS[layout.precision]
    if layout.zero_stage > 1:
        document |= {"dist": {"use_megatron_fsdp": True}, "checkpoint": {"ckpt_format": "fsdp_dtensor"}}
    head = commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
    return Written(head + yaml_text(document), tuple(notes))


TARGETS = (
    Target(
        name="nemo",
        version=VERSION,
        sources=(
            "NVIDIA-NeMo/Megatron-Bridge@v0.6.0: src/megatron/bridge/training/config.py, mixed_precision.py",
            "src/megatron/bridge/models/gpt_provider.py; NVIDIA/Megatron-LM@core_v0.19.0: transformer_config.py",
        ),
        write=write,
        abilities=ABILITIES,
        limits=megatron_core.limits,
        framework="nemo",
    ),
)
