"""Plans as tables a person reads; the only place that formats units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from costmodels.vocabulary.choices import ContextMethod, Offload
from costmodels.vocabulary.terms import Term
from planner.plan.schema import (
    Candidate,
    MeshSection,
    PipelineSection,
    Plan,
    PredictionSection,
    RunSection,
)

GIB, MIB = 2**30, 2**20
_TAGS = ("fitted", "measured")


def items(seq_len: int) -> str:
    """What a rate counts: tokens, or samples of a model without sequences, each of which counts as one token."""
    return "tokens" if seq_len > 1 else "samples"


def sequences(number: int, seq_len: int) -> str:
    """``256 sequences of 2048 tokens``, or ``256 samples`` of a model without sequences."""
    return f"{number} sequences of {seq_len} tokens" if seq_len > 1 else f"{number} samples"


def loss(step_time_s: float, than_s: float) -> str:
    """By how much a step takes longer, as ``+1.4%``; what rounds to nothing has no minus."""
    return f"{step_time_s / than_s - 1:+z.1%}"


def seconds(value: float) -> str:
    """A duration with three significant digits."""
    if value >= 1:
        return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def dollars(value: float) -> str:
    """An amount of money in cents, or below a dollar with three significant digits."""
    return f"${value:,.2f}" if value >= 1 else f"${value:.3g}"


def adding_up(values: Sequence[float]) -> tuple[list[str], str]:
    """Seconds as numbers of one unit, and that unit; the last is their sum as shown.

    Each number is rounded up or down so that the rounded numbers add up to the rounded sum.
    """
    total = sum(values)
    scale, unit = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if total >= pair[0]), (1e-6, "µs"))
    decimals = max(0, 3 - math.floor(math.log10(max(1.0, total / scale))))
    ends = [round(end / scale, decimals) for end in accumulate(values, initial=0.0)]
    shown = [f"{end - start:,.{decimals}f}" for start, end in pairwise(ends)]
    return [*shown, f"{ends[-1]:,.{decimals}f}"], unit


def size(num_bytes: float) -> str:
    """Bytes in GiB, or MiB below one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def probability(value: float) -> str:
    """In per cent, whole up to 99."""
    return "above 99 %" if value > 0.995 else "below 1 %" if value < 0.005 else f"{value * 100:.0f} %"


def count(value: float) -> str:
    """A large number with three significant digits: 8.03 B."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {name}"
    return f"{value:.0f}"


def show_plan(plan: Plan) -> RenderableType:
    """The whole answer: the plan, where its time and memory go, and what it was compared with."""
    parts: list[RenderableType] = [_headline(plan), _layout(plan)]
    if plan.prediction is not None:
        parts += [_time(plan.prediction), _memory(plan, plan.prediction), _phases(plan, plan.prediction)]
    if plan.search is not None:
        parts += [_candidates(plan), _proof(plan)]
    return Group(*parts)


def degrees(mesh: MeshSection) -> str:
    """``PP 4 · DP 8 · TP 2``: the degrees above 1."""
    named = {
        "PP": mesh.pp,
        "DP": mesh.dp_replicate if mesh.dp_shard == 1 else 1,
        "DP replicate": mesh.dp_replicate if mesh.dp_shard > 1 else 1,
        "DP shard": mesh.dp_shard,
        "CP": mesh.cp,
        "TP": mesh.tp,
        "EP": mesh.ep,
    }
    parts = [f"{name} {degree}" for name, degree in named.items() if degree > 1]
    parts += [] if mesh.etp is None else [f"ETP {mesh.etp}"]
    return " · ".join(parts) or "one GPU"


def _headline(plan: Plan) -> Text:
    text = Text()
    text.append(f"{plan.model.source}", style="bold")
    text.append(f" ({count(plan.model.num_params)} parameters) on {plan.num_devices} GPUs of {plan.hardware}")
    text.append(f", {plan.idle_devices} left idle\n" if plan.idle_devices else "\n")
    if plan.prediction is not None:
        p, unit = plan.prediction, items(plan.training.seq_len)
        text.append(f"{seconds(p.step_time_s)} a step", style="bold green")
        if p.step_time_low_s is not None and p.step_time_high_s is not None:
            held = f"{p.step_time_coverage:.0%} of held-out runs" if p.step_time_coverage else "held-out runs"
            text.append(f" (band of {held}: {seconds(p.step_time_low_s)} to {seconds(p.step_time_high_s)}")
            text.append(f"; known: {p.step_time_band_of})" if p.step_time_band_of else ")")
        text.append(
            f", {p.tokens_per_s_per_gpu:,.0f} {unit}/s/GPU, {p.model_flops_per_gpu_per_s / 1e12:.3g} model TFLOP/s/GPU "
            f"(MFU {p.mfu:.1%}), {fullest_text(p)} on the fullest GPU"
        )
        if p.fit_probability is not None:
            text.append(f" (fits with {probability(p.fit_probability)})")
        if p.usd_per_step is not None:
            text.append(f", {dollars(p.usd_per_step)} a step")
    if plan.prediction is not None and plan.prediction.calibrated_by:
        text.append(f"\ncalibrated by {plan.prediction.calibrated_by}")
    if plan.run is not None:
        text.append(f"\n{run_text(plan.run, plan.training.seq_len)}")
    return text


def run_text(run: RunSection, seq_len: int) -> str:
    """``15 T tokens: 1.79 M steps, 180 days, 276 k GPU-hours, $603 k without interruptions``"""
    cost = "" if run.usd is None else f", ${count(run.usd)}"
    days = f"{run.days:,.1f} days" if run.days >= 1 else f"{run.days * 24:.3g} hours"
    return (
        f"{count(run.num_tokens)} {items(seq_len)}: {count(run.num_steps)} steps, {days}, "
        f"{count(run.gpu_hours)} GPU-hours{cost} without interruptions"
    )


def _layout(plan: Plan) -> Table:
    table = Table(title="Plan", title_justify="left", show_header=False)
    for name, value in plan_rows(plan):
        table.add_row(name, value)
    return table


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """What is chosen, each with its name."""
    pipeline, training = plan.pipeline, plan.training
    rows = [
        ("device mesh", degrees(plan.mesh)),
        ("data parallelism", _ZERO[plan.zero_stage] if plan.mesh.shape().is_replicated else "none"),
        (
            "batch",
            f"{sequences(training.global_batch_size, training.seq_len)}; {_micro_batches(pipeline)}",
        ),
    ]
    if plan.mesh.cp > 1:
        rows.append(("context parallelism", _CONTEXT[plan.cp_method]))
    if plan.mesh.tp > 1:
        rows.append(("sequence parallelism", "on" if plan.placements.sequence_parallel else "off"))
    if plan.mesh.pp > 1:
        virtual = f", {pipeline.virtual_stages} stages a rank" if pipeline.virtual_stages > 1 else ""
        rows.append(("pipeline schedule", pipeline.schedule.value + virtual))
        rows.append(("modules per stage", _stages(plan)))
    if any(stage.device_group for stage in pipeline.stages):
        rows.append(("devices of the stages", _devices(plan)))
    rows.append(
        ("recomputation", ", ".join(f"{r.mode.value}: {len(r.modules)} blocks" for r in plan.recompute) or "none")
    )
    rows.append(("offload", plan.offload.value))
    if plan.offloaded_activations:
        rows.append(("activations in host memory", f"of {len(plan.offloaded_activations)} blocks"))
    rows.append(("precision, optimiser", f"{training.precision.value}, {training.optimizer.value}"))
    return rows


_CONTEXT = {
    ContextMethod.ALL_GATHER: "keys and values gathered before attention (all-gather)",
    ContextMethod.RING: "keys and values passed on behind attention (ring)",
    ContextMethod.ALL_TO_ALL: "heads exchanged for positions around attention (all-to-all, Ulysses)",
}
_ZERO = {
    0: "replicas, gradients all-reduced (ZeRO 0)",
    1: "optimiser states sharded (ZeRO 1)",
    2: "optimiser states and gradients sharded (ZeRO 2)",
    3: "parameters, gradients and optimiser states sharded (ZeRO 3, FSDP)",
}


def fullest_text(prediction: PredictionSection) -> str:
    """``62.6 GiB of 79.2 GiB``, of the fullest GPU."""
    rank = fullest_rank(prediction)
    return f"{size(prediction.peak_memory_bytes[rank])} of {size(prediction.rooms_bytes[rank])}"


def fullest_rank(prediction: PredictionSection) -> int:
    """The one that takes most of its device, which need not be the one that takes most."""
    shares = [need / room for need, room in zip(prediction.peak_memory_bytes, prediction.rooms_bytes, strict=True)]
    return shares.index(max(shares))


def _micro_batches(pipeline: PipelineSection) -> str:
    """``each data-parallel rank runs 8 x 2 of them``; of unlike shares, each with its replicas and devices."""
    if not pipeline.batch_shares:
        return f"each data-parallel rank runs {pipeline.num_microbatches} x {pipeline.micro_batch_size} of them"
    each = pipeline.batch_shares
    shares = (f"{s.micro_batch_size} on each of {s.num_replicas} replicas on {s.device_group}" for s in each)
    return f"{pipeline.num_microbatches} micro-batches, of {', '.join(shares)}"


def sizes_text(pipeline: PipelineSection) -> str:
    """``2``, sequences in a micro-batch; ``1 and 3`` where replicas differ."""
    sizes = [share.micro_batch_size for share in pipeline.batch_shares] or [pipeline.micro_batch_size]
    return " and ".join(map(str, sizes))


def kind_of_rows(plan: Plan) -> str:
    """What each row of the prediction is of."""
    return "replica group" if plan.pipeline.batch_shares else "pipeline rank"


def rank_name(plan: Plan, rank: int, kind: str = "rank") -> str:
    """What a row of the prediction is of: ``rank 0`` of the pipeline, or ``replicas on`` a group with a share."""
    shares = plan.pipeline.batch_shares
    return f"replicas on {shares[rank].device_group}" if shares else f"{kind} {rank}"


def _devices(plan: Plan) -> str:
    """``0 to 3 on old, 4 to 7 on new``."""
    found: list[str] = []
    for name, stages in groupby(plan.pipeline.stages, key=lambda stage: stage.device_group):
        indices = [stage.index for stage in stages]
        found.append(f"{indices[0]} to {indices[-1]} on {name}" if len(indices) > 1 else f"{indices[0]} on {name}")
    return ", ".join(found)


def _stages(plan: Plan) -> str:
    counts = [str(len(stage.modules)) for stage in plan.pipeline.stages]
    return " ".join(counts) if len(counts) <= 32 else f"{' '.join(counts[:16])} ... {' '.join(counts[-4:])}"


def _time(prediction: PredictionSection) -> Table:
    table = Table(title="Where the time goes", title_justify="left")
    table.add_column("part")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for term in Term:
        value = prediction.breakdown_s.get(term, 0.0)
        if value > 0:
            table.add_row(term.label, seconds(value), f"{value / prediction.step_time_s:.1%}")
    table.add_section()
    table.add_row("step", seconds(prediction.step_time_s), "100.0%")
    return table


def _memory(plan: Plan, prediction: PredictionSection) -> Table:
    table = Table(title=f"Peak memory by {kind_of_rows(plan)}", title_justify="left")
    scale, unit = (GIB, "GiB") if max(prediction.peak_memory_bytes) >= GIB else (MIB, "MiB")
    table.add_column(unit)
    ranks = list(range(len(prediction.peak_memory_bytes)))
    shown = ranks if len(ranks) <= 4 else sorted({0, 1, fullest_rank(prediction), ranks[-2], ranks[-1]})
    for rank in shown:
        table.add_column(rank_name(plan, rank), justify="right")
    if prediction.memory_breakdown_bytes:
        ledgers = [prediction.memory_breakdown_bytes[rank] for rank in shown]
        for name in dict.fromkeys(name for ledger in ledgers for name in ledger):
            values = [ledger.get(name, 0) for ledger in ledgers]
            table.add_row(name.replace("_", " "), *(f"{v / scale:.2f}" for v in values))
        table.add_section()
    table.add_row("total", *(f"{prediction.peak_memory_bytes[rank] / scale:.2f}" for rank in shown))
    return table


def _phases(plan: Plan, prediction: PredictionSection) -> RenderableType:
    """The fullest rank's memory phase by phase, and how each term is known."""
    if not prediction.memory_phases_bytes:
        return Text("")
    peaks, rank = prediction.peak_memory_bytes, fullest_rank(prediction)
    phases = prediction.memory_phases_bytes[rank]
    scale, unit = (GIB, "GiB") if peaks[rank] >= GIB else (MIB, "MiB")
    table = Table(title=f"Memory of {rank_name(plan, rank)}, the fullest, phase by phase", title_justify="left")
    table.add_column(unit, no_wrap=True)
    for phase in phases:
        table.add_column(phase.label, justify="right", no_wrap=True)
    fullest = max(phases.values(), key=lambda ledger: sum(ledger.values()))
    for name in dict.fromkeys((*fullest, *(name for ledger in phases.values() for name in ledger))):
        values = (f"{ledger[name] / scale:.2f}" if name in ledger else "" for ledger in phases.values())
        table.add_row(name.replace("_", " "), *values)
    table.add_section()
    table.add_row("total", *(f"{sum(ledger.values()) / scale:.2f}" for ledger in phases.values()))
    lines = _host_lines(prediction)
    return Group(table, Text("\n".join(lines))) if lines else table


def _host_lines(prediction: PredictionSection) -> list[str]:
    """Memory of one node's host: at the start, and from then on."""
    offloaded = dict(prediction.host_memory_bytes)
    built, kept = offloaded.pop("initial_values", 0), sum(offloaded.values())
    found: list[str] = []
    if built:
        found.append(f"Host memory of one node while processes make initial values: {size(built)}")
    if kept:
        parts = ", ".join(f"{name.replace('_', ' ')} {size(num_bytes)}" for name, num_bytes in offloaded.items())
        found.append(f"Host memory of one node for what is offloaded: {size(kept)} ({parts})")
    if prediction.nvme_bytes:
        found.append(f"NVMe of one node for what is offloaded: {size(prediction.nvme_bytes)}")
    return found


def _candidates(plan: Plan) -> Table:
    search, prediction = plan.search, plan.prediction
    assert search is not None
    table = Table(title="Compared with", title_justify="left")
    table.add_column("")
    table.add_column("layout")
    for name in ("step", "loses", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = list(search.runners_up)
    if search.baseline is not None:
        rows.append(search.baseline)
    rows += [each for each in (search.all_devices, search.roomier) if each is not None]
    for row in rows:
        loses = "" if prediction is None else loss(row.step_time_s, prediction.step_time_s)
        memory = size(row.peak_memory_bytes) + ("" if row.fits else ", too much")
        table.add_row(row.label, layout_line(row), seconds(row.step_time_s), loses, memory)
    return table


def layout_line(row: Candidate) -> str:
    """A candidate in one line: its degrees, and whatever else tells it from others."""
    sizes = " and ".join(map(str, row.micro_batch_sizes)) or row.micro_batch_size
    parts = [degrees(row.mesh), f"ZeRO {row.zero_stage}", f"micro-batch {sizes}"]
    if row.mesh.cp > 1:
        parts.append(f"CP by {row.cp_method}")
    if row.device_groups:
        parts.append((" and " if row.micro_batch_sizes else " then ").join(row.device_groups))
    if row.mesh.pp > 1:
        parts.append(row.schedule.value + (f" x{row.virtual_stages}" if row.virtual_stages > 1 else ""))
    if row.sequence_parallel:
        parts.append("SP")
    recompute = row.recompute.value if row.recompute is not None else "mixed"
    if recompute != "none":
        parts.append(f"recompute {recompute}")
    if row.offload is not Offload.NONE:
        parts.append(f"offload {row.offload.value}")
    if row.offloads_activations:
        parts.append("activations to the host")
    return ", ".join(parts)


def proof_words(plan: Plan) -> str:
    """What the search says of the plan against every other layout; where it is for cost, of as many devices."""
    search = plan.search
    assert search is not None
    over = f" on {plan.num_devices} GPUs" if plan.idle_devices and search.all_devices is None else ""
    limit = f"none can be faster than {seconds(search.bound_step_time_s)} (gap {search.gap:.1%})"
    if search.preferred_within > 0 and search.error_between_layouts is not None and search.runners_up:
        return (
            f"of {search.num_candidates:,} layouts{over} {search.runners_up[0].label} is fastest within the cost model,"
            f" by at most {search.preferred_within:.1%}. This one is simpler and is taken: so small a difference does "
            "not tell which is faster. Between layouts, predictions are off by "
            f"{search.error_between_layouts:.1%} on published runs (--prefer fastest takes the other)"
        ) + ("" if search.status == "OPTIMAL" else f"; {limit}")
    if search.status == "OPTIMAL":
        return f"none of {search.num_candidates:,} layouts{over} is faster within the cost model"
    return f"best of those tried among {search.num_candidates:,} layouts{over}; {limit}"


def _proof(plan: Plan) -> Text:
    search = plan.search
    assert search is not None
    text = Text()
    text.append(search.status, style="bold green" if search.status == "OPTIMAL" else "bold yellow")
    text.append(f": {proof_words(plan)}")
    text.append(f" (searched in {seconds(search.elapsed_s)})")
    text.append(_room(plan))
    for case in search.cases:
        text.append(f"\n{case.case}: {seconds(case.step_time_s)}")
        text.append(f" (the plan that is fastest as predicted: {seconds(case.fastest_step_time_s)})")
    return text


def _room(plan: Plan) -> str:
    """What it costs to leave a tenth of the memory that a plan may take."""
    search, prediction = plan.search, plan.prediction
    if search is None or prediction is None or search.roomier is None:
        return ""
    roomier = search.roomier
    fits = "" if roomier.fit_probability is None else f" and fits with {probability(roomier.fit_probability)}"
    return (
        f"\nThe fastest plan found that leaves a tenth of the memory that a plan may take here loses "
        f"{loss(roomier.step_time_s, prediction.step_time_s).lstrip('+')}{fits} (the row {roomier.label})"
    )
