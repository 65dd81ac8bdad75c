"""What a framework makes of a run's settings: the overlaps that were asked for, the ZeRO stage that takes effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from costmodels.recipe import Recipe, load_recipe

EXCHANGES_OVERLAP = "megatron-core-expert-overlap"  # the recipe of those who overlap them as Megatron-Core does
# A whole step is one CUDA graph; exchanges of experts overlap; their products and what lies between are one kernel.
WHOLE_STEP_GRAPHS, EXCHANGES_OVERLAPPED, FUSED_EXPERTS = "whole-step-graphs", "exchanges-overlapped", "fused-experts"
FUSED_LOSS = "te-cross-entropy"  # of Transformer Engine: gradients of 16-bit logits are made where these lie
GRAPHS = "cuda-graphs"  # of layers, which the host replays (--enable-cuda-graph of Megatron-LM, TE's graphed callables)
STOPS_EARLY, NO_DROPOUT, DETERMINISTIC = "non-reentrant-recompute", "no-dropout", "deterministic"
_LOGITS = ("logit_kept_bytes", "logit_peak_bytes", "logit_reserved_bytes")
_IN_PLACE = {
    "value": 2.0,
    "tag": "specified",
    "source": "transformer_engine/pytorch/triton/cross_entropy.py: the backward kernel stores where it loads, 16 bits",
}
_REPLAYED = {"value": 0.0, "tag": "specified", "source": "the host replays CUDA graphs"}
_UNFITTED: dict[str, object] = {"fit": None, "date": None}
# CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic products need (PyTorch, torch.use_deterministic_algorithms): 8
# buffers of 4 MiB for each handle. A handle is a thread's own (aten/src/ATen/cuda/CublasHandlePool.cpp:
# ``myPoolWindow`` is thread_local, and workspaces are kept by handle and stream), and autograd runs backward passes in
# a thread of its own for each device (torch/csrc/autograd/engine.cpp).
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
        update |= _exchanges(overlaps=overlap["ep-comm"])
    if overlap.get("tp-comm") is False:
        update["tensor_overlap"] = recipe.tensor_overlap.model_copy(update={"value": 0.0})
    return recipe.model_copy(update=update)


def with_kernels(recipe: Recipe, kernels: Collection[str]) -> Recipe:
    """``recipe`` with what words of a run's kernels say of it; otherwise its own."""
    update: dict[str, object] = {}
    if STOPS_EARLY in kernels:
        update["stops_recomputation_early"] = True
    if NO_DROPOUT in kernels:
        update["dropout"] = 0.0
    if DETERMINISTIC in kernels:
        update["workspace_bytes"] = DETERMINISTIC_WORKSPACE_BYTES
    if EXCHANGES_OVERLAPPED in kernels:
        update |= _exchanges(overlaps=True)
    if FUSED_EXPERTS in kernels:
        update["fuses_experts"] = True
    if FUSED_LOSS in kernels:
        logits = recipe.memory.logit_kept_bytes.model_copy(update=_UNFITTED | _IN_PLACE)
        update["memory"] = recipe.memory.model_copy(update=dict.fromkeys(_LOGITS, logits))
    if GRAPHS in kernels or WHOLE_STEP_GRAPHS in kernels:
        issued = recipe.host_s_per_kernel.model_copy(update=_UNFITTED | _REPLAYED)
        update |= {"host_s_per_kernel": issued}
        update |= dict.fromkeys(("host_s_per_sharded_kernel", "host_s_per_launch", "hooks"))
        if WHOLE_STEP_GRAPHS in kernels:  # collectives of data parallelism, which lie between layers, are in it, too
            update["host_s_per_collective"] = issued
    return recipe.model_copy(update=update)


def _exchanges(*, overlaps: bool) -> dict[str, object]:
    """Facts of a recipe whose experts' exchanges overlap as Megatron-Core does it, or do not."""
    under = load_recipe(EXCHANGES_OVERLAP).exchanges_hide_under if overlaps else ()
    return {"exchanges_hide_under": under, "exchanges_hide_without_pipeline": overlaps}


def effective_zero_stage(recipe: Recipe, zero_stage: int, *, num_ranks: int, pp: int) -> int:
    """The ZeRO stage that ``zero_stage`` amounts to over ``num_ranks`` ranks under ``pp`` pipeline ranks.

    One rank shards nothing. Where a framework gathers once a step under a pipeline, gradients wait for the last
    micro-batch too: what it calls ZeRO 2 or 3 holds what ZeRO 1 holds (torchtitan, fsdp_reshard_after_forward).
    """
    if num_ranks == 1:
        return 0
    return min(zero_stage, 1) if pp > 1 and not recipe.reshards_in_pipelines else zero_stage
