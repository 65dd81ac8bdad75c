"""Which framework recipe and attention kernel a published run used, told from its source, notes and columns."""

from __future__ import annotations

import re

from benchmarks.published.runs import Run
from costmodels.recipe import Recipe, attention_kernel

# Words of a row's title, notes or sharding column, and the recipe they stand for; the first match counts.
RECIPE_OF_WORDS = (
    ("nanotron", "nanotron"),
    ("llm-foundry", "fsdp-llm-foundry"),
    ("composer", "fsdp-llm-foundry"),
    ("fms-fsdp", "fsdp-compiled"),
    ("internevo", "internevo"),
    ("comm overlap off", "megatron-core"),
    ("megatron-core", "megatron-core-overlap"),
    ("megatron core", "megatron-core-overlap"),
    ("nemo", "nemo"),
    ("megatron-bridge", "nemo"),
    ("transformer engine", "megatron-core-overlap"),
    ("parallelization layouts", "megatron-layouts-2023"),
    ("hagemann", "megatron-layouts-2023"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("bigscience", "megatron-deepspeed"),
    ("deepspeed", "megatron-deepspeed"),
    ("gpt-neox", "megatron-deepspeed"),
    ("torchtitan", "torchtitan"),
    ("fsdp", "fsdp-compiled"),
)
# Megatron's own generations by the year in the source's title, where nothing more is said.
MEGATRON_GENERATIONS = ((2021, "megatron-lm-2020"), (2023, "megatron-lm-2022"))
NEWEST_MEGATRON = "megatron-core-overlap"
# Jobs of the nanotron sweep from this number on ran in early 2025; no earlier one has a pipeline.
JOB_OF_2025 = 14_000_000
# GPUs on which cuDNN's attention is faster than the kernel that the profile's efficiency is of.
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Dispatchers of experts' rows that send a token once to a node.
ONCE_A_NODE = ("hybridep", "deepep")
# Names that sources give to attention kernels.
KERNEL_OF_WORDS = (
    ("flash_attention2", "flash2"),
    ("flash_attentionv1", "flash1"),
    ('kernel "fused"', "fused_softmax"),
    ('kernel "torch"', "eager"),
    ("fused softmax", "fused_softmax"),
    ("triton", "triton"),
)


def recipe_name_of(run: Run) -> str:
    """Name of the recipe of the framework that ran it: by the words of its text, else Megatron-LM of its year."""
    text = run.text.lower()
    name = next((recipe for word, recipe in RECIPE_OF_WORDS if word in text), None)
    if name is None:
        years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", run.source)]
        year = min(years, default=2022)
        name = next((recipe for last, recipe in MEGATRON_GENERATIONS if year <= last), NEWEST_MEGATRON)
    if name == "torchtitan" and "torch.compile" in text:
        name = "torchtitan-compiled"
    if name == "megatron-layouts-2023" and "rms kernel" in text:
        name = "megatron-layouts-2023-fused-norm"
    job = re.search(r"slurm job (\d+)", text)
    if name == "nanotron" and job is not None and int(job.group(1)) >= JOB_OF_2025:
        name = "nanotron-2025"
    return name


def dispatches_once_a_node(run: Run) -> bool:
    """Whether the row names a dispatcher that sends a token once to each node of its experts."""
    text = run.text.lower()
    return any(word in text for word in ONCE_A_NODE)


def attention_name_of(run: Run, recipe: Recipe) -> str:
    """Name of the attention kernel that the notes name, or the recipe's with or without flash attention."""
    text = run.text.lower()
    named = next((kernel for word, kernel in KERNEL_OF_WORDS if word in text), None)
    uses_flash = recipe.uses_flash if run.flash_attention is None else run.flash_attention
    if named is not None and (run.flash_attention is None or attention_kernel(named).is_fused == uses_flash):
        return named
    if uses_flash and recipe.flash_kernel == "cudnn" and not run.hardware.gpu_type.upper().startswith(HOPPER):
        return "flash2"
    return recipe.flash_kernel if uses_flash else recipe.plain_kernel
