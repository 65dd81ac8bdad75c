"""Which framework recipe and attention kernel a published run used, by the columns that say so.

The rules are the product's own (``planner.frameworks``). Beside them stand the recipes of single studies
(``benchmarks/data/recipes``): trainers and states of a cluster's hosts that nobody else can be expected to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from costmodels.recipe import Recipe, load_recipe
from planner.errors import InputError
from planner.formats.run_table import GATED_MLPS, Run
from planner.frameworks.kernels import attention_name_for
from planner.frameworks.registry import Where, framework_of, kernels_of, recipe_for

STUDY_RECIPES = Path(__file__).resolve().parents[1] / "data" / "recipes"
# A row that names no framework, or one that nobody has calibrated, is priced as Megatron-LM of its version's year: most
# published runs are of Megatron or of what grew out of it.
FALLBACK_FRAMEWORK = "megatron-lm"
UNKNOWN = "unknown"
MEGATRON_DROPOUT = 0.1
WRITTEN_OUT_NORM_BYTES = (
    4.0  # an element: the copy in 32 bits and the result in 16, less the input in 16, which is not kept
)
# Aleph Alpha's trainer of the parallel-layout study, and the cluster whose hosts were slow in early 2025.
LAYOUT_STUDY_FRAMEWORK = "aleph-alpha-scaling"
SLOW_HOSTS_CLUSTER = "huggingface-h100-2025"


def framework_name_of(run: Run) -> str:
    """The framework that the row names, or ``unknown`` where it names none that is known."""
    name = run.software.framework
    if name == LAYOUT_STUDY_FRAMEWORK:
        return name
    try:
        framework_of(name)
    except InputError:
        return UNKNOWN
    return name


def recipe_name_of(run: Run) -> str:
    """Name of the recipe of the framework that ran it."""
    software, framework = run.software, framework_name_of(run)
    if framework == LAYOUT_STUDY_FRAMEWORK:
        return "megatron-layouts-2023" + ("-fused-norm" if "fused-norm" in software.kernels else "")
    if framework == "nanotron" and software.cluster == SLOW_HOSTS_CLUSTER:
        return "nanotron-2025"
    name = FALLBACK_FRAMEWORK if framework == UNKNOWN else framework
    return recipe_for(name, software.version, software.kernels, dict(software.overlap)).name


@cache
def recipe_called(name: str) -> Recipe:
    """The recipe of a study, or the shipped one, of that name."""
    of_study = STUDY_RECIPES / f"{name}.json"
    return load_recipe(str(of_study) if of_study.is_file() else name)


def study_recipe_names() -> tuple[str, ...]:
    """Names of all recipes of single studies."""
    return tuple(sorted(path.stem for path in STUDY_RECIPES.glob("*.json")))


def with_dropout(recipe: Recipe, run: Run) -> Recipe:
    """``recipe`` with Megatron-LM's own dropout where the run is of Megatron-Core and of GPT's shape.

    --attention-dropout and --hidden-dropout are 0.1 unless given (megatron/training/arguments.py); models with gated or
    squared activations are trained without, as their papers say, and recipes of Megatron-Core are of these.
    """
    if framework_name_of(run) != "megatron-core" or run.architecture.mlp_type != "gelu":
        return recipe
    return recipe.model_copy(update={"dropout": MEGATRON_DROPOUT})


def with_norms(recipe: Recipe, run: Run) -> Recipe:
    """``recipe`` with what Hugging Face's RMSNorm keeps where DeepSpeed ran a model of theirs and no fused norm.

    ``LlamaRMSNorm.forward`` computes on a copy in 32 bits, which is kept in the place of the input; so is the result in
    16 bits. Models of users are traced as they are written; a row's model is one of ours, whose norms are fused.
    """
    kernels = run.software.kernels
    is_theirs = framework_name_of(run) == "deepspeed" and "eager-mode" in kernels and "fused-norm" not in kernels
    if not is_theirs or run.architecture.mlp_type not in GATED_MLPS:
        return recipe
    kept = recipe.norm_saved_bytes.model_copy(update={"value": WRITTEN_OUT_NORM_BYTES})
    return recipe.model_copy(update={"norm_saved_bytes": kept})


def overlap_of(run: Run) -> Mapping[str, bool]:
    """What the run overlaps, from what the row says."""
    told, name = dict(run.software.overlap), framework_name_of(run)
    return told if name in (UNKNOWN, LAYOUT_STUDY_FRAMEWORK) else framework_of(name).overlap_of(told)


def kernel_words_of(run: Run, where: Where) -> tuple[str, ...]:
    """Words for the run's kernels: the row's, and those that its framework chooses by itself there."""
    software, name = run.software, framework_name_of(run)
    told = software.kernels
    is_known = name not in (UNKNOWN, LAYOUT_STUDY_FRAMEWORK)
    return kernels_of(name, software.version, told, where) if is_known else told


def attention_name_of(run: Run, recipe: Recipe) -> str:
    """Name of the attention kernel that the row's words name, or the recipe's with or without flash attention."""
    return attention_name_for(recipe, run.software.kernels, run.hardware.gpu_type, uses_flash=run.flash_attention)
