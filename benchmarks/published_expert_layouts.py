"""Published layouts of mixtures of experts beside ours: ``python -m benchmarks.published_expert_layouts``.

Each layout that somebody trained with is priced under its framework's recipe and under ours, and beside it stands what
``planner search`` takes for the same model, batch and devices under either recipe. Writes
``docs/published-expert-layouts.md``. What a source does not say is named as assumed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from costmodels.recipe import OUR_RECIPE, load_recipe
from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import Term
from hardware_profiles.catalog import profile_for
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model, traced_dtype
from planner.layout.deadline import Deadline
from planner.layout.decided import NOTHING
from planner.layout.layout import Layout, Pins, Training
from planner.model_file import load_model, resolve_model
from planner.output_file import write_text
from planner.pricing.decisions import decided
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.solver.cp_sat import CpSatSolver
from planner.table.keys import TensorSplit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "published-expert-layouts.md"
TRACED_BATCH_SIZE = 2
SEARCH_LIMIT_S = 3600.0
GIB = 2**30


@dataclass(frozen=True)
class Published:
    """One layout as it was published. ``measured_s``: its step, from what its source measured, of our FLOPs a step."""

    title: str
    model: str
    hardware: str
    num_devices: int
    training: Training
    layout: Layout
    recipe: str
    measured: str
    measured_s: Callable[[Published, float], float]
    source: str
    assumed: str
    why: str
    stage_layers: tuple[int, ...] = ()  # blocks of each stage; (): as many in each


def _of_gpu_hours(published: Published, flops: float) -> float:
    """180,000 GPU hours for 10^12 tokens."""
    tokens = published.training.global_batch_size * published.training.seq_len
    return 180e3 * 3600 * tokens / 1e12 / published.num_devices


def _of_rate(flops_per_s: float) -> Callable[[Published, float], float]:
    """From FLOP/s of one device."""
    return lambda published, flops: flops / (published.num_devices * flops_per_s)


def _of_seconds(seconds: float) -> Callable[[Published, float], float]:
    return lambda published, flops: seconds


def _training(batch: int, precision: Precision = Precision.BF16) -> Training:
    return Training(batch, 4096, precision, Optimizer.ADAMW)


def _layout(mesh: Mesh, batch: int, schedule: ScheduleName, virtual_stages: int, recompute: Recompute) -> Layout:
    """ZeRO 1 (a distributed optimiser), micro-batches of one sequence, sequence parallelism with tensor parallelism."""
    return Layout(mesh, 1, 1, batch // mesh.dp, schedule, virtual_stages, recompute, mesh.tp > 1)


H100_DENSE_BF16 = 989.5e12  # FLOP/s, as the papers below count; NVIDIA H100 SXM datasheet
FOLDING = (
    "[Liu et al., MoE Parallel Folding (2025)](https://arxiv.org/abs/2504.14960), tables 1 and 3 (PP, TP, EP, ETP, "
    "MFU) and section 6.4 (256 sequences of 4,096 tokens), read on 2026-11-22; tokens above a capacity factor of 1 "
    "were dropped, so that routing is balanced"
)
CARDS = (
    "[NVIDIA-NeMo/Megatron-Bridge](https://github.com/NVIDIA-NeMo/Megatron-Bridge), skills on "
    "expert-parallel overlap (24.7138 s without and 20.9920 s with it, HybridEP, forced balance; with it rank 0"
    " allocated 62.2 GiB), read on 2026-11-22, and rows mbcard-qwen3-30b-h100-* of the table of runs"
)
LAYOUTS = (
    Published(
        title="DeepSeek-V3, 2,048 H800",
        model="deepseek-v3",
        hardware="h800-sxm",
        num_devices=2048,
        training=_training(15_360, Precision.FP8),
        layout=_layout(Mesh(pp=16, dp_shard=128, ep=64), 15_360, ScheduleName.DUAL_PIPE_V, 2, Recompute.NONE),
        recipe="dualpipe",
        measured="180,000 GPU hours for 10^12 tokens",
        measured_s=_of_gpu_hours,
        source="[DeepSeek-AI, DeepSeek-V3 Technical Report (2024)](https://arxiv.org/abs/2412.19437): section 1 (GPU "
        "hours), 3.2 (PP 16, EP 64 over 8 nodes, ZeRO 1, no tensor parallelism, DualPipe), 3.2.2 (at most 4 nodes a "
        "token), 3.2.3 (what is recomputed) and 4.2 (15,360 sequences of 4,096 tokens), read on 2026-11-22",
        assumed="micro-batches of one sequence, which the report does not tell; the V-shaped variant of DualPipe; "
        "nothing recomputed (the report recomputes norms and up-projections of attention); no multi-token prediction",
        why="Priced too fast: grouped products run at the efficiency that the profile has for all "
        "sizes, and with 2,048 columns an expert and 8-bit inputs theirs are small; multi-token "
        "prediction adds about a sixtieth. Exchanges are hidden in the steady part of DualPipeV; what is "
        "left is compute that runs slower beside them, and both ends of the step. Peak memory is that of "
        "a run that recomputes nothing: the report recomputes norms and attention's up-projections and "
        "keeps inputs of products in 8 bits. Schedules that split backward passes cannot recompute here, "
        "so the search splits more.",
        stage_layers=(1, *(2,) * 29, 1, 1),
    ),
    *(
        Published(
            title=f"Mixtral 8x22B, 128 H100, {words}",
            model="mixtral-8x22b",
            hardware="dgx-h100-80gb",
            num_devices=128,
            training=_training(256),
            layout=_layout(mesh, 256, ScheduleName.INTERLEAVED_1F1B, 7, Recompute.NONE),
            recipe="megatron-core-overlap",
            measured=f"{share:.1%} of 989.5 TFLOP/s",
            measured_s=_of_rate(share * H100_DENSE_BF16),
            source=FOLDING,
            assumed="7 virtual stages, as in [the mapping for this model](https://github.com/NVIDIA/Megatron-LM/blob/"
            "main/megatron/core/transformer/moe/README.md) that Megatron-Core 0.8 recommends; micro-batches of one "
            "sequence; ZeRO 1; nothing recomputed: the paper tells none of these",
            why=why,
        )
        for words, mesh, share, why in (
            (
                "experts split over tp",
                Mesh(pp=8, dp_shard=8, tp=2, ep=4),
                0.463,
                "The paper calls it MCore: experts have the tensor parallelism of attention.",
            ),
            (
                "experts whole on a rank",
                Mesh(pp=8, dp_shard=8, tp=2, ep=8, etp=1),
                0.493,
                "The paper calls it MCore with Folding (ETP 1): the 8 ranks of EP are those of one node, and rows are "
                "neither gathered nor summed over tensor-parallel ranks. Measured, it is 6.1 % faster than the "
                "section before; here, as the first rows say.",
            ),
        )
    ),
    Published(
        title="Mixtral 8x7B, 64 H100",
        model="mixtral-8x7b",
        hardware="dgx-h100-80gb",
        num_devices=64,
        training=_training(256),
        layout=_layout(Mesh(pp=4, dp_shard=16, ep=8), 256, ScheduleName.INTERLEAVED_1F1B, 8, Recompute.NONE),
        recipe="megatron-core-overlap",
        measured="468 TFLOP/s a GPU",
        measured_s=_of_rate(468e12),
        source="[NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md](https://github.com/NVIDIA/Megatron-LM/"
        "blob/main/megatron/core/transformer/moe/README.md) at commit 022bcb5a: 468 TFLOP/s in bf16 with Megatron-Core "
        "0.9, and among its reference mappings TP 1, EP 8, PP 4, 8 virtual stages, micro-batch 1, 256 sequences on 64 "
        "H100, read on 2026-11-22",
        assumed="that the rate is of this mapping, which the README gives for Megatron-Core 0.8; ZeRO 1",
        why="Nearly all of the step is compute, whose rate under this recipe was never fitted to products in groups.",
    ),
    *(
        Published(
            title=f"Qwen3 30B-A3B, 16 H100, exchanges {words}",
            model="qwen3-30b-a3b",
            hardware="dgx-h100-80gb",
            num_devices=16,
            training=_training(1024),
            layout=_layout(Mesh(dp_shard=16, ep=16), 1024, ScheduleName.ONE_F_ONE_B, 1, Recompute.NONE),
            recipe=recipe,
            measured="its step time",
            measured_s=_of_seconds(seconds),
            source=CARDS,
            assumed="a token is sent once to each node of its experts (HybridEP)",
            why=why,
        )
        for words, recipe, seconds, why in (
            (
                "exposed",
                "megatron-core-overlap",
                24.71,
                "With the next section this tells what hiding is worth: 15 % measured.",
            ),
            (
                "hidden",
                "megatron-core-expert-overlap",
                20.99,
                "Of 64 micro-batches only the first forward and the last backward pass have none beside them. Two "
                "micro-batches are held at once, which here does not fit, while the run allocated 62 GiB: the source "
                "does not say what it recomputes.",
            ),
        )
    ),
)
ONCE_A_NODE = ("qwen3-30b-a3b",)  # models of layouts above whose runs sent a token once to each node


def main() -> None:
    """Writes the page, or compares it with what it would be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="layouts whose title holds this text, printed and not written")
    only = parser.parse_args().only
    text = "\n".join(page([each for each in LAYOUTS if only in each.title]))
    if only:
        print(text)
    else:
        write_text(PAGE, text + "\n")


def page(layouts: list[Published]) -> Iterator[str]:
    """The page, line by line."""
    yield "# Published expert layouts\n"
    yield "Made by `python -m benchmarks.published_expert_layouts`; every figure but the measured ones is priced by the"
    yield "code as it stands. *Pick*: the fastest layout that fits for the same model, batch, precision and devices,"
    yield "under the same recipe. None of these runs had a part in any fit. DBRX published no layout."
    for published in layouts:
        began = time.process_time()
        yield from _section(published)
        sys.stderr.write(f"{published.title}: {time.process_time() - began:.0f} CPU s\n")


def _section(published: Published) -> Iterator[str]:
    graph = _graph(published)
    flops = (graph.forward_flops + graph.backward_flops) / graph.batch_size * published.training.global_batch_size
    measured_s, training = published.measured_s(published, flops), published.training
    yield f"\n## {published.title}\n"
    yield f"Measured: {published.measured}, so {measured_s:.2f} s a step of {training.global_batch_size:,} sequences."
    yield f"Source: {published.source}. Assumed: {published.assumed}.\n"
    yield "| recipe | layout | step | against measured | exposed exchanges | bubble | peak memory |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for recipe in (published.recipe, OUR_RECIPE):
        target = _target(published, graph, recipe)
        yield _row(recipe, f"published: {_words(published.layout)}", _priced(published, target), measured_s)
        outcome = Problem.build(target, published.training, Pins()).solved(Deadline.within(SEARCH_LIMIT_S))
        if outcome.best is not None:
            open_share = 1 - outcome.bound_s / outcome.best.step_time_s
            proved = "" if outcome.is_exhausted else f" (none is faster by more than {open_share:.1%})"
            yield _row(recipe, f"pick: {_words(outcome.best.layout)}{proved}", outcome.best, measured_s)
    yield f"\n{published.why}"


def _graph(published: Published) -> ModelGraph:
    model, training = load_model(resolve_model(published.model)), published.training
    return trace_model(model, TRACED_BATCH_SIZE, training.seq_len, traced_dtype(training.precision))


def _target(published: Published, graph: ModelGraph, recipe: str) -> PricingTarget:
    cluster = profile_for(published.num_devices, published.hardware)
    return PricingTarget(
        graph,
        cluster,
        published.training.precision.value,
        load_recipe(recipe),
        dispatches_once_a_node=published.model in ONCE_A_NODE,
    )


def _priced(published: Published, target: PricingTarget) -> Evaluated:
    layout = published.layout
    split = TensorSplit(layout.mesh.tp, layout.sequence_parallel, layout.mesh.etp)
    decision = decided(target, split, NOTHING, CpSatSolver().solve_placement)
    assert decision is not None, published.title
    evaluator = Evaluator(build_table(target, published.training, {split: decision}, (layout,)), layout)
    blocks = [unit for unit, is_block in enumerate(evaluator.table.units.is_block) if is_block]
    before = list(accumulate(published.stage_layers))[:-1]
    starts = (0, *(blocks[number] for number in before)) if before else evaluator.starts()
    return evaluator.evaluate(starts, exact=True)


def _row(recipe: str, words: str, priced: Evaluated, measured_s: float) -> str:
    terms, step_s = priced.breakdown, priced.step_time_s
    peak = priced.peak_memory_bytes / GIB
    fits = "" if priced.fits else ", does not fit"
    return (
        f"| {recipe} | {words} | {step_s:.2f} s | {step_s / measured_s - 1:+.0%} | {terms[Term.EXPERT] / step_s:.0%} | "
        f"{terms[Term.BUBBLE] / step_s:.0%} | {peak:.0f} GiB{fits} |"
    )


def _words(layout: Layout) -> str:
    mesh = layout.mesh
    degrees = [("PP", mesh.pp), ("DP", mesh.dp), ("CP", mesh.cp), ("TP", mesh.tp), ("EP", mesh.ep)]
    words = [f"{name} {degree}" for name, degree in degrees if degree > 1]
    words += [] if mesh.etp is None else [f"ETP {mesh.etp}"]
    words.append(f"ZeRO {layout.zero_stage}")
    if mesh.pp > 1:
        stages = f" x {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.schedule.value}{stages}")
    words.append(f"micro-batch {layout.micro_batch_size}")
    if layout.recompute not in (None, Recompute.NONE):
        words.append(f"{layout.recompute.value} recomputation")
    return " · ".join(words)


if __name__ == "__main__":
    main()
