"""What a framework makes of a run's settings: the overlaps that were asked for, the ZeRO stage that takes effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from costmodels.recipe import Recipe, load_recipe

EXCHANGES_OVERLAP = "megatron-core-expert-overlap"  # the recipe of those who overlap them as Megatron-Core does
STOPS_EARLY, NO_DROPOUT, DETERMINISTIC = "non-reentrant-recompute", "no-dropout", "deterministic"
# CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic products need (PyTorch, torch.use_deterministic_algorithms): 8
# buffers of 4 MiB for each handle, and the threads of the forward pass and of autograd have one each.
DETERMINISTIC_WORKSPACE_BYTES = 2 * 8 * 4096 * 1024.0


def with_overlap(recipe: Recipe, overlap: Mapping[str, bool]) -> Recipe:
    """``recipe`` with what a run says of its overlaps (``Framework.overlap_of``), where it says it.

    That tensor-parallel communication is overlapped leaves the recipe's own share; that it is not leaves none.
    """
    update: dict[str, object] = {}
    if "grad-reduce" in overlap:
        update["overlaps_reduction"] = overlap["grad-reduce"]
    if "param-gather" in overlap:
        update["overlaps_gather"] = overlap["param-gather"]
    if "ep-comm" in overlap:
        overlapped = load_recipe(EXCHANGES_OVERLAP)
        update["exchanges_hide_under"] = overlapped.exchanges_hide_under if overlap["ep-comm"] else ()
        update["exchanges_hide_without_pipeline"] = overlap["ep-comm"]
    if overlap.get("tp-comm") is False:
        update["tensor_overlap"] = recipe.tensor_overlap.model_copy(update={"value": 0.0})
    return recipe.model_copy(update=update)


def with_kernels(recipe: Recipe, kernels: Collection[str]) -> Recipe:
    """``recipe`` with what words of a run's kernels say of recomputation, dropout and workspaces; otherwise its own."""
    update: dict[str, object] = {}
    if STOPS_EARLY in kernels:
        update["stops_recomputation_early"] = True
    if NO_DROPOUT in kernels:
        update["dropout"] = 0.0
    if DETERMINISTIC in kernels:
        update["workspace_bytes"] = DETERMINISTIC_WORKSPACE_BYTES
    return recipe.model_copy(update=update)


def effective_zero_stage(recipe: Recipe, zero_stage: int, *, num_ranks: int, pp: int) -> int:
    """The ZeRO stage that ``zero_stage`` amounts to over ``num_ranks`` ranks under ``pp`` pipeline ranks.

    One rank shards nothing. Where a framework gathers once a step under a pipeline, gradients wait for the last
    micro-batch too: what it calls ZeRO 2 or 3 holds what ZeRO 1 holds (torchtitan, fsdp_reshard_after_forward).
    """
    if num_ranks == 1:
        return 0
    return min(zero_stage, 1) if pp > 1 and not recipe.reshards_in_pipelines else zero_stage
