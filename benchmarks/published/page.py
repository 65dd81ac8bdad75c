"""docs/accuracy.md and its chart, made from the rows of one fidelity run."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.published.blind import first_prices, lines_by, said_of
from benchmarks.published.data import BLIND_RUNS, ROOT, UNSEEN
from benchmarks.published.frameworks import recipe_called, study_recipe_names
from benchmarks.published.memory_page import memory_sections
from benchmarks.published.pairs import POINTS, Pair, counts_of
from benchmarks.published.summary import Row, Summary, in_figures
from costmodels.bands import held_shares
from costmodels.recipe import list_recipes
from hardware_profiles.sanity import quantities
from planner.formats.run_table import Run, read_runs

INTRODUCTION = """# How close predictions come

Made by `python -m benchmarks.fidelity --page docs/accuracy.md`; do not edit by hand. Every row of the table of
published runs is priced by the planner's own cost models with its layout pinned. The parameters of the framework
recipes (`costmodels/recipes`, and `benchmarks/data/recipes` for single studies) were fitted by
`python -m benchmarks.calibrate` to these rows (and some of the section "Blind"), so the figures here are **in
sample**; rows of sources that no fit names, where there are some, have a section of their own, and the
sections "Bands" and "Blind" say what remains when a source was not known. An error is predicted over measured, less
one.
"""
NOT_MODELLED = """## What is not modelled

- Machines that were sick. In the nanotron sweep's jobs of early 2025 on two or more nodes the host took a fifth of a
  millisecond more over each collective of tensor parallelism for every rank of its group. The recipe `nanotron-2025`
  says so, the cause is not known, and no other cluster is expected to do it. Single jobs were slow without a pattern.
- Running at the edge of the device's memory: PyTorch's allocator then gives blocks back and takes them again every
  micro-batch. Only nanotron's recipe has a price for that, from the five runs of its sweep that are predicted above
  the device's memory and ran all the same, up to six times as slow.
- Why hosts come late. Under DeepSpeed's engine of 2021 and 2022 a rank waits at every collective of tensor
  parallelism for the last of its group, whose delays are taken as exponentially distributed; on one V100 and two A100
  clusters one mean delay comes close (`megatron-deepspeed-2022`). Runs of 2023 show none.
- Contention with other jobs; how a network slows down with scale is the profile's alone. That of the layout study's
  256 GPUs beyond eight nodes is fitted to its own step times (`benchmarks/data/profiles/a100-layout-study.json`).
- Why gradients of groups with several ranks on a node take so long in vTrain's runs. One rate is fitted to all of
  these. Rings that reach a network card through the processor explain groups of two and four ranks a node (two and
  four ways of tensor parallelism), not those of eight, nor the seconds that some runs of 39 B parameters lack besides.
- Which devices are slow. Beyond 512 devices compute is that of the slowest to be expected among them, with one spread
  for all GPUs (`costmodels/stragglers.py`, `benchmarks/results/straggler_fit_published-runs_*.md`). The spread is the
  median over nine sources, between 0 and 0.29; a cluster whose slow hosts were taken out lost nothing with scale.
- Offload: such rows are skipped.
- Routing that is not balanced, also where a row says that it was natural.
- All-to-alls of experts' rows that are hidden behind products. HybridEP and DeepEP send a token once a node; that they
  may also permute rows while these travel is left out.
- Fragmentation as such: the allocator's reserve is one share of what is allocated.
- Caches of the chip: memory-bound kernels move every byte through device memory.
- The host of a published run: each kernel takes the same time to issue, whatever the machine's processor. A profile
  that `planner profile` wrote says how fast its own hosts are.
- Which share of the blocks is recomputed where a source does not say (IBM fms-fsdp, "selective"): all are.
- Rows whose global batch was inferred by the table's makers: in some 13B rows of the layout study step time grows with
  the micro-batch as if there were eight times fewer micro-batches; they are priced as they stand.
"""
WORST_ROWS = 25
CHART_SIZE, CHART_MARGIN = 560, 50


@dataclass(frozen=True)
class Sections:
    """What the page says besides errors row by row."""

    summary: Summary
    pairs: tuple[Pair, ...]
    failed: tuple[Row, ...]  # that ran out of memory
    unseen: tuple[Row, ...]  # of a table that had no part in any fit


def write_page(path: Path, runs: Mapping[str, Run], rows: Sequence[Row], sections: Sections) -> None:
    """Writes the page and, beside it, the chart and the table of all rows of the same name."""
    priced = [row for row in rows if row.error is not None]
    chart = path.with_suffix(".svg")
    chart.write_text(_chart(priced), encoding="utf-8")
    table = path.with_suffix(".csv")
    _write_rows(table, rows)
    parts = [
        INTRODUCTION,
        _summary(sections.summary),
        f"![measured against predicted step time]({chart.name})\n",
        f"Every row stands in [{table.name}]({table.name}).\n",
        _bands({row.recipe for row in priced}),
        memory_sections({row.recipe for row in priced}, rows, sections.failed),
        _unfitted(priced),
        _unseen(sections.unseen),
        _blind(),
        _pairs(sections.pairs),
        _by("source", priced, lambda row: row.source),
        _by("framework", priced, lambda row: row.framework),
        _by("recipe", priced, lambda row: row.recipe),
        _by("GPU", priced, lambda row: runs[row.id].hardware.gpu_type),
        _by("model size (hidden width)", priced, lambda row: _width(runs[row.id])),
        _by("parallel mode", priced, lambda row: _mode(runs[row.id])),
        _by("recomputation", priced, lambda row: runs[row.id].layout.recompute.value),
        _worst(priced),
        NOT_MODELLED,
    ]
    path.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _summary(summary: Summary) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    tau = summary.kendall_tau_within_groups
    wrong, ran = summary.num_ran_called_infeasible, summary.num_ran_priced
    right, failed = summary.num_oom_called_infeasible, summary.num_oom_priced
    lines = [
        "| figure | value |",
        "|---|---|",
        f"| rows, skipped | {summary.num_rows}, {summary.num_skipped} |",
        f"| step time MAPE, median, 90th percentile | {percent(summary.mape)}, {percent(summary.median_ape)}, "
        f"{percent(summary.p90_ape)} |",
        f"| step time bias | {percent(summary.bias)} |",
        f"| Kendall's tau inside {summary.num_groups} groups | {'-' if tau is None else f'{tau:.3f}'} |",
        f"| regret of the layout predicted fastest, mean and worst | {percent(summary.mean_regret)}, "
        f"{percent(summary.max_regret)} |",
        f"| peak memory MAPE | {percent(summary.memory_mape)} ("
        + ", ".join(f"{kind} {percent(error)}" for kind, error in summary.memory_mape_by_kind.items())
        + ") |",
        f"| ran, but called infeasible | {wrong} of {ran} |",
        f"| out of memory, and called infeasible | {right} of {failed} |",
    ]
    return "\n".join(lines) + "\n"


def _bands(names: set[str]) -> str:
    """What was measured of runs whose sources were not known when they were priced, over what was predicted."""
    lines = [
        "## Bands\n",
        "A band holds 80 % of measured over predicted step times of runs that the planner did not know",
        "(`python -m benchmarks.bands --write`): first prices, where a run was priced blind (below); else prices with",
        "the run's source left out of every fit. What stays when a source is left out: facts that its framework's code",
        "and documents say. What goes: every fitted parameter, and the profiles of clusters. Every source counts",
        "alike, and with a recipe's own sources all others as one more: one to three sources are more like each other",
        "than the next is like them. A recipe that no source used, as our executor's (`planner`), has the band of all.",
        "Errors by source left out of the fit stand in `benchmarks/results/calibration_published-runs_*.md`.\n",
        "Of the runs that it is made of a band holds more: as much as it takes for 80 % of a source that had no part",
        "in it. What is held of such sources, each alike, by what was known of their runs:\n",
        "| known | share of runs inside |",
        "|---|---|",
        *(f"| {kind} | {share:.1%} |" for kind, share in held_shares().items()),
        "",
        "| recipe | band | runs |",
        "|---|---|---|",
    ]
    for name in ("planner", *sorted(names - {"planner"})):
        band = recipe_called(name).error_band
        if band is not None:
            lines.append(f"| {name} | {band.low:.2f} to {band.high:.2f} | {band.num_runs} |")
    return "\n".join(lines) + "\n"


def _unfitted(rows: Sequence[Row]) -> str:
    """Rows of the table whose sources no recipe was fitted to."""
    names = {*list_recipes(), *study_recipe_names()}
    fits = [quantity.fit for name in names for _, quantity in quantities(recipe_called(name))]
    fitted_to = " ".join(fit.to for fit in fits if fit is not None)
    found = [row for row in rows if row.source not in fitted_to]
    if not found:
        return ""
    lines = [
        "## Rows of sources that no recipe was fitted to\n",
        "| source | rows | MAPE | median | bias |",
        "|---|---|---|---|---|",
        *_accuracy_lines(found, lambda row: row.source),
    ]
    return "\n".join(lines) + "\n"


def _unseen(rows: Sequence[Row]) -> str:
    """Rows of other precisions: accuracy by source, and why some have no price."""
    priced = [row for row in rows if row.error is not None]
    reasons: dict[str, int] = defaultdict(int)
    for row in rows:
        if row.skipped is not None:
            reasons[row.skipped] += 1
    lines = [
        "## Rows of 8-bit precision, which no parameter was fitted to\n",
        f"`{UNSEEN}`: {len(rows)} rows, {len(priced)} priced. What their frameworks overlap their documents say.",
        "They are not blind. When they had been priced without, it was looked up that NeMo's gradients have 16",
        "bits and its products' inputs 8; that logits are made in 16 bits; that Megatron-Core fuses activations",
        "of gated layers, and keeps less then; that some dispatchers send a token once a node and once a rank;",
        "how many bytes Transformer Engine and torchao move to make 8-bit copies; how fast cuDNN's attention was",
        "measured on GB200 and GB300; and what Megatron-Bridge chooses by release, in the files of its",
        "repository: HybridEP on Blackwell, and since June 2026, for MXFP8 there, exchanges that overlap, a step",
        "as one CUDA graph and fused experts. On Hopper its files choose HybridEP for some models and plain",
        "all-to-alls for others: rows that name neither have these. Not known: why context parallelism of",
        "torchtitan over 4 and 8 ranks takes half as long again as its share of attention; torchao's products",
        "scaled by rows; what the host needs for the 8-bit products of experts on small micro-batches.",
        "",
        "| source | rows | MAPE | median | bias |",
        "|---|---|---|---|---|",
        *_accuracy_lines(priced, lambda row: row.source),
        "",
        f"{sum(row.fits is False for row in rows)} of them are called infeasible though they ran; few of these sources",
        "say what they recompute.",
    ]
    if reasons:
        skipped = "; ".join(f"{number} × {reason}" for reason, number in sorted(reasons.items()))
        lines += ["", f"Skipped: {skipped}."]
    return "\n".join(lines) + "\n"


def _blind() -> str:
    """Rows that were priced before anybody looked at them: what was said then, and what is said today."""
    if not BLIND_RUNS.is_file():
        return ""
    runs, first = list(read_runs(BLIND_RUNS)), first_prices()
    head = ["", "| source | rows | MAPE | median | bias | inside the 80 % band |", "|---|---|---|---|---|---|"]
    tables = (
        [*head, *(f"| {line} |" for line in lines_by(runs, said, lambda run: run.source, " | "))]
        for said in (first, {said.run: said for said in said_of(runs)})
    )
    then, today = tables
    skipped = sorted({said.skipped for said in first.values() if said.skipped})
    lines = [
        "## Blind\n",
        f"`{BLIND_RUNS.relative_to(ROOT)}`: {len(runs)} rows, gathered by readers who saw neither this code nor its",
        "predictions, and priced on the plain profiles of their GPUs, as users have them",
        "(`python -m benchmarks.blind_runs`), when no recipe was fitted to their sources. The first price of each row",
        "is kept and never written again:",
        *then,
        "",
        "Today, when those errors are known: recipes that the shared table has next to no row of are fitted to these,",
        "21 of NeMo's have told what share of its peak an H100 reaches (`python -m benchmarks.hopper_fit`), and what",
        "else was changed with them in view stands in `README.md` beside the rows. This table is no blind one:",
        *today,
    ]
    if skipped:
        lines += ["", f"Without a first price: {'; '.join(skipped)}."]
    return "\n".join(lines) + "\n"


def _pairs(pairs: Sequence[Pair]) -> str:
    """Runs that differ in one choice: how often the order is right, and the ratio of step times."""
    lines = [
        "## Controlled pairs\n",
        "Runs of one source that differ in exactly one choice. Right order: the faster run is predicted faster. Close:",
        f"the ratios of their step times, measured and predicted, agree within {POINTS * 100:.0f} points. Clear: the",
        f"measured times differ by more than {POINTS * 100:.0f} %; nearer ones are ordered by chance.\n",
        "| choice | pairs | right order | clear | right order of the clear | close | median distance in points |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, found in counts_of(pairs).items():
        distance = median(abs(p.measured_ratio - p.predicted_ratio) for p in pairs if p.kind == kind)
        cells = (found.number, found.ordered, found.clear, found.clear_ordered, found.close, f"{100 * distance:.1f}")
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _by(title: str, rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    lines = [f"## By {title}\n", f"| {title} | rows | MAPE | median | bias |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *_accuracy_lines(rows, key)]) + "\n"


def _accuracy_lines(rows: Sequence[Row], key: Callable[[Row], str]) -> list[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row.error or 0.0)
    return [f"| {name} | {in_figures(errors)} |" for name, errors in sorted(groups.items())]


def _width(run: Run) -> str:
    hidden = run.architecture.hidden
    return next((f"{low:>5} and more" for low in (12288, 8192, 4096, 2048) if hidden >= low), " below 2048")


def _mode(run: Run) -> str:
    layout = run.layout
    names = [f"ZeRO {layout.zero_stage}" if layout.zero_stage else "", "TP" if layout.tp > 1 else ""]
    names += ["SP" if layout.sequence_parallel else "", "PP" if layout.pp > 1 else "", "DP" if layout.dp > 1 else ""]
    return " + ".join(name for name in names if name) or "one GPU"


def _worst(rows: Sequence[Row]) -> str:
    lines = ["## The worst rows\n", "| run | measured s | predicted s | error |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: -abs(math.log1p(row.error or 0.0)))[:WORST_ROWS]:
        lines.append(
            f"| {row.id} | {row.measured_step_time_s:.4g} | {row.predicted_step_time_s:.4g} | {row.error:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One line a row: seconds, relative errors, or why there is no price."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "measured_s", "predicted_s", "error", "memory_error", "skipped"))
        for row in rows:
            times = (row.measured_step_time_s, row.predicted_step_time_s)
            seconds = ("" if value is None else f"{value:.4g}" for value in times)
            errors = ("" if value is None else f"{value:+.4f}" for value in (row.error, row.memory_error))
            writer.writerow((row.id, *seconds, *errors, row.skipped or ""))


def _chart(rows: Sequence[Row]) -> str:
    """Measured (across) against predicted (up), both logarithmic, with the line of equality."""
    points = [(row.measured_step_time_s or 1.0, row.predicted_step_time_s or 1.0) for row in rows]
    low = math.log10(min(min(point) for point in points)) if points else 0.0
    high = math.log10(max(max(point) for point in points)) if points else 1.0
    span = CHART_SIZE - 2 * CHART_MARGIN

    def place(seconds: float) -> float:
        return CHART_MARGIN + span * (math.log10(seconds) - low) / (high - low)

    dots = "".join(
        f'<circle cx="{place(measured):.1f}" cy="{CHART_SIZE - place(predicted):.1f}" r="2" fill-opacity="0.4"/>'
        for measured, predicted in points
    )
    ticks = "".join(
        f'<text x="{place(10.0**k):.0f}" y="{CHART_SIZE - 30}" text-anchor="middle">{10.0**k:g}</text>'
        f'<text x="{CHART_MARGIN - 8}" y="{CHART_SIZE - place(10.0**k) + 4:.0f}" text-anchor="end">{10.0**k:g}</text>'
        for k in range(math.ceil(low), math.floor(high) + 1)
    )
    first, last = CHART_MARGIN, CHART_SIZE - CHART_MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{CHART_SIZE}" height="{CHART_SIZE}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<line x1="{first}" y1="{last}" x2="{last}" y2="{first}" stroke="gray"/>{dots}{ticks}'
        f'<text x="{CHART_SIZE / 2}" y="{CHART_SIZE - 8}" text-anchor="middle">measured step time, s</text>'
        f'<text x="14" y="{CHART_SIZE / 2}" text-anchor="middle" transform="rotate(-90 14 {CHART_SIZE / 2})">'
        f"predicted step time, s</text></svg>\n"
    )
