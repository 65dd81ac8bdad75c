"""Bounds of coarse points and of stage programs: never above what a cut really costs."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from costmodels.ledger import SoftwareBytes
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import PLACE, Holding
from hardware_profiles.schema import FactorName
from planner.evaluation.block_modes import held_bytes
from planner.evaluation.cuts import is_allowed
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.unit_times import LayoutRows
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.problems import StageProblem, pipeline_bound_s
from planner.solver.bounds import bounds
from planner.solver.closer_bounds import CloserBounds
from planner.solver.cutting import Pricer, best_cut, probe
from planner.solver.flying import Counted, flying_by_stage
from planner.solver.glance import pipeline_coefficient, rough_bound_s
from planner.solver.memory_bounds import AlikeKey, NumMicroBatches
from planner.solver.of_table import OfTable
from planner.solver.passing_bytes import PassingBytes
from planner.solver.search import search
from planner.solver.time_bounds import AlikeLayouts
from tests.planning import (
    A100,
    cluster_of,
    graph_of,
    problem_of,
    slowed_by_messages,
    training_of,
    with_slow_sends,
)

SAMPLE = 25
ROUNDING = 1 + 1e-9

INTERLEAVED = Pins(schedule=ScheduleName.INTERLEAVED_1F1B)
ALTERNATING = "tests/fixtures/alternating.py"  # blocks of three kinds by turns

PROBLEMS = [
    ("gpt2-1.5b", 8, {"batch": 64}),
    ("llama3-8b", 16, {"batch": 64, "seq_len": 2048}),
    ("llama-tiny", 8, {"batch": 32, "seq_len": 64}),
    ("moe-tiny", 8, {"batch": 32, "seq_len": 64}),
    ("gpt2-1.5b", 8, {"batch": 64, "pins": Pins(schedule=ScheduleName.GPIPE)}),
    ("gpt2-1.5b", 8, {"batch": 16, "pins": INTERLEAVED}),
    ("llama3-8b", 32, {"batch": 256, "seq_len": 2048, "pins": Pins(pp=8)}),
    *(
        ("gpt2-1.5b", 8, {"batch": 64, "pins": Pins(schedule=schedule)})
        for schedule in ScheduleName
        if schedule.rules.splits_backward
    ),
]


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS)
def test_no_choice_is_faster_or_smaller_than_its_bound(model: str, num_devices: int, options: dict) -> None:
    problem = problem_of(model, num_devices, **options)
    choices = list(problem.space.layouts)
    lower, rough_s = bounds(problem.table, choices), rough_bound_s(problem.table, problem.space.layouts)
    sample = random.Random(0).sample(range(len(choices)), min(SAMPLE, len(choices)))
    for index in sample:
        cut = best_cut(Pricer(problem.table, choices[index]), problem.solver, None).best
        found = [
            each for each in (cut, probe(Pricer(problem.table, choices[index]), problem.solver)) if each is not None
        ]
        for priced in found:  # whatever blocks recompute so that it fits
            assert priced.fits
            assert rough_s[index] <= priced.step_time_s * ROUNDING, choices[index]
            assert lower.step_time_s[index] <= priced.step_time_s * ROUNDING, choices[index]
            assert lower.memory_bytes[index] <= priced.peak_memory_bytes * ROUNDING, choices[index]


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS[:4])
@pytest.mark.parametrize("slower", [30, 1000])
def test_bounds_count_what_a_slow_link_carries(model: str, num_devices: int, options: dict, slower: float) -> None:
    """No cut is faster than its bound, and where sends go beside passes neither is faster than the wire."""
    problem, counted = problem_of(model, num_devices, **options), 0
    table = with_slow_sends(problem.table, slower)
    several = [layout for layout in problem.space.layouts if layout.mesh.pp > 1]
    chosen = random.Random(6).sample(several, 100)
    lower = bounds(table, Columns.of(Layout, chosen)).step_time_s
    for layout, bound_s in zip(chosen, lower.tolist(), strict=True):
        evaluator = Evaluator(table, layout)
        priced = evaluator.evaluate(evaluator.even_starts(), exact=True)
        if not priced.fits:  # blocks must recompute
            continue
        assert bound_s <= priced.step_time_s * ROUNDING, layout
        if layout.schedule in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B):
            continue
        counted += 1
        borders = list(pairwise(evaluator.rank_of_stage))
        of_ranks = [
            sum(rank in border and len(set(border)) == 2 for border in borders) for rank in range(layout.mesh.pp)
        ]
        wire_s = max(of_ranks) * layout.num_microbatches * min(evaluator.send_s)
        assert wire_s <= bound_s * ROUNDING
    assert counted


@pytest.mark.parametrize(
    ("model", "num_devices", "options"),
    [
        ("gpt2-1.5b", 8, {"batch": 64, "pins": INTERLEAVED}),
        ("gpt2-1.5b", 8, {"batch": 16, "pins": INTERLEAVED}),
        ("gpt2-1.5b", 8, {"batch": 16, "pins": Pins(schedule=ScheduleName.ONE_F_ONE_B)}),
        ("gpt2-1.5b", 8, {"batch": 16, "pins": Pins(schedule=ScheduleName.GPIPE)}),
        ("gpt2-1.5b", 8, {"batch": 16, "pins": Pins(schedule=ScheduleName.ZBV_ZERO_BUBBLE)}),
        ("llama3-8b", 16, {"batch": 32, "seq_len": 2048, "pins": INTERLEAVED}),
    ],
)
def test_no_rank_holds_less_than_its_bound_at_either_moment(model: str, num_devices: int, options: dict) -> None:
    """States, what is in flight and what passes, where blocks recompute nothing: see ``CloserBounds``."""
    problem, seen = problem_of(model, num_devices, **options), {False: 0, True: 0}
    rng, table = random.Random(3), problem.table
    several = [layout for layout in problem.space.layouts if layout.mesh.pp > 1 and not layout.offloads_activations]
    for layout in rng.sample(several, min(60, len(several))):
        one = Columns.of(Layout, [layout])
        ((key,), _), rows = one.by(AlikeKey), LayoutRows.of(table, one)
        of_table, units, evaluator = OfTable(table), table.units, Evaluator(table, layout)
        of = AlikeLayouts(of_table, key, one, rows, of_table.passes(rows))
        held = np.stack([held_bytes(table, rows.work, np.full_like(rows.mode, mode)) for mode in of.modes], axis=1)
        kept, kinds, m = (
            held[0, 0, :, PLACE[Holding.KEPT]],
            np.array(units.kinds),
            NumMicroBatches(of.num_microbatches[0]),
        )
        for at_moment in [of, *([] if of.at_peak is None else [of.at_peak])]:
            flying, _ = flying_by_stage(
                Counted(key.schedule, key.pp, key.virtual_stages, *m, at_moment.is_at_lowest(m))
            )
            static, passing = at_moment.static_bytes[0], PassingBytes(at_moment, held)
            of_highest = at_moment.highest_bytes[0]
            for starts in Pricer(table, layout).first_cuts():
                for ledger, stages in zip(evaluator.ledgers(starts), evaluator.stages_of_ranks(starts), strict=True):
                    own = [unit for held_units in stages.values() for unit in held_units]
                    ends = tuple(units.kinds[unit] for unit in (0, len(kinds) - 1) if unit in own)
                    least = static[kinds[own]].sum() + of.outside_bytes[0] + passing.while_at_work(ends)[0][0]
                    least += of_highest[kinds[list(stages[max(stages)])]].sum()
                    in_flight = sum(flying[stage] * kept[kinds[list(each)]].sum() for stage, each in stages.items())
                    assert least + in_flight * of.reserve[0] <= ledger.total_bytes * ROUNDING, (layout, starts)
                    seen[at_moment is of] += 1
    assert seen[True] > 0
    assert seen[False] > 0 or "Interleaved1F1B" not in str(options)


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS[:4])
def test_bounds_count_what_messages_add_to_passes(model: str, num_devices: int, options: dict) -> None:
    problem, counted = problem_of(model, num_devices, **options), 0
    table = slowed_by_messages(problem.table, 0.4)
    several = [layout for layout in problem.space.layouts if layout.mesh.pp > 1]
    closer = CloserBounds(table)
    for layout in random.Random(4).sample(several, 100):
        one = Columns.of(Layout, [layout])
        ((key,), _), rows = one.by(AlikeKey), LayoutRows.of(table, one)
        of_table = OfTable(table)
        of = AlikeLayouts(of_table, key, one, rows, of_table.passes(rows))
        bound = of.beside_s[0] * of.num_beside
        pricer = Pricer(table, layout)
        priced = pricer.evaluator.beside_of_ranks_s().sum(axis=0)
        assert (bound <= priced).all()
        assert bound == pytest.approx(priced, rel=1e-9)
        counted += bool(priced.any())
        least_s = max(bounds(table, one).step_time_s[0], closer.of(one).most_s[0])
        for starts in pricer.first_cuts():
            found = pricer.price(starts)
            assert found is None or least_s <= found.step_time_s * ROUNDING, (layout, starts)
    assert counted > 50


def test_a_bound_of_memory_counts_what_lies_outside_tensors() -> None:
    """Communicators as they are counted by hand, the context and the workspace: none of them is any layout's choice."""
    table = problem_of("moe-tiny", 8, batch=32, seq_len=64).table
    layouts = problem_of("moe-tiny", 8, batch=32, seq_len=64).space.layouts
    nothing = SoftwareBytes(table.cluster.software.reserve_fraction, 0.0, 0.0, 0.0)
    bare = replace(table, cluster=replace(table.cluster, software=nothing))
    more = bounds(table, layouts).memory_bytes - bounds(bare, layouts).memory_bytes
    software = table.cluster.software
    for layout, found in zip(layouts, more.tolist(), strict=True):
        mesh = layout.mesh
        sharded = mesh.dp_shard * mesh.cp  # ranks that states are sharded over
        groups = sum(degree > 1 for degree in (mesh.pp, mesh.dp_replicate, sharded, mesh.cp, mesh.tp))
        groups += 0 if mesh.ep == 1 else 1 + (mesh.num_expert_ranks > mesh.ep)
        groups += table.framework.extra_communicators * (groups > 0)
        by_hand = groups * software.communicator_bytes + software.context_bytes + software.workspace_bytes
        assert found == pytest.approx(by_hand, rel=1e-6), layout


def test_no_layout_is_visited_where_software_alone_takes_the_device() -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    cluster = problem.table.cluster
    software = cluster.software
    too_little = software.context_bytes + software.workspace_bytes + software.communicator_bytes  # of one group alone
    small = cluster.with_memory_factor(cluster.memory_factor * cluster.devices[0].memory_bytes / too_little)
    several = [layout for layout in problem.space.layouts if layout.mesh.world_size > 1]
    outcome = search(replace(problem.table, cluster=small), several, problem.solver)
    assert outcome.best is None
    assert outcome.is_exhausted
    assert outcome.num_visited == 0


@pytest.mark.parametrize(
    ("model", "num_devices", "options"),
    [
        ("llama3-8b", 16, {"batch": 32, "seq_len": 2048, "hardware": "rtx-4090-x8"}),
        ("llama3-8b", 16, {"batch": 16, "seq_len": 2048, "hardware": "rtx-4090-x8", "pins": INTERLEAVED}),
        ("llama3-70b", 64, {"batch": 128, "seq_len": 4096}),
        ("llama3-70b", 64, {"batch": 64, "seq_len": 4096, "pins": INTERLEAVED}),
        ("llama-tiny", 8, {"batch": 32, "seq_len": 64}),
        ("moe-tiny", 8, {"batch": 32, "seq_len": 64}),
        (ALTERNATING, 16, {"batch": 64, "seq_len": 2048, "hardware": "rtx-4090-x8"}),
        (ALTERNATING, 16, {"batch": 64, "seq_len": 2048, "hardware": "rtx-4090-x8", "pins": INTERLEAVED}),
        ("deepseek-v3", 256, {"batch": 1024, "seq_len": 4096, "hardware": "dgx-h200"}),
    ],
)
def test_no_random_cut_is_faster_than_the_closer_bound(model: str, num_devices: int, options: dict) -> None:
    """Cuts anywhere, with what blocks must recompute: where memory is short that is most of what the bound counts."""
    problem = problem_of(model, num_devices, **options)
    rng, tried = random.Random(5), 0
    several = [layout for layout in problem.space.layouts if layout.mesh.pp > 1]
    closer = CloserBounds(problem.table)
    for layout in rng.sample(several, min(120, len(several))):
        pricer, units = Pricer(problem.table, layout), problem.table.units
        num_units = len(units.kinds)
        one = Columns.of(Layout, [layout])
        bound_s = closer.of(one).most_s[0]
        assert bound_s == CloserBounds(problem.table).of(one).most_s[0]  # whatever is known of other layouts
        cuts = pricer.first_cuts()
        for _ in range(4):
            cuts.append((0, *sorted(rng.sample(range(1, num_units), pricer.evaluator.num_stages - 1))))
        for starts in cuts:
            if not layout.schedule.rules.has_one_stage and not is_allowed(
                starts, units, are_alike=layout.has_alike_stages
            ):
                continue
            priced = pricer.price(starts)
            if priced is not None:
                tried += 1
                assert bound_s <= priced.step_time_s * ROUNDING, (layout, starts)
    assert tried >= 40


def test_loads_of_blocks_of_several_kinds_are_bounded() -> None:
    """They were not: of 61 blocks on 32 ranks, three of them dense, the mean of the ranks was all that was known."""
    pins = Pins(pp=32, tp=1, cp=1, ep=8, zero=1, schedule=ScheduleName.ONE_F_ONE_B, micro_batch=1)
    problem = problem_of("deepseek-v3", 1024, batch=8192, seq_len=4096, hardware="dgx-h100-80gb", pins=pins)
    layouts, tried = list(problem.space.layouts), 0
    first_s, closer = bounds(problem.table, layouts).step_time_s, CloserBounds(problem.table)
    for index, layout in enumerate(layouts):
        best = Pricer(problem.table, layout).fastest(Pricer(problem.table, layout).first_cuts())
        if best is not None:
            tried += 1
            assert first_s[index] < 0.8 * best.step_time_s
            loads_s = closer.of(Columns.of(Layout, [layout])).loads_s[0]
            assert 0.9 * best.step_time_s < loads_s <= best.step_time_s * ROUNDING
    assert tried


@pytest.mark.parametrize(
    "schedule",
    [ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE, ScheduleName.INTERLEAVED_1F1B, ScheduleName.ZBV_ZERO_BUBBLE],
)
def test_bounds_hold_and_are_of_use_where_sends_take_most_of_a_step(schedule: ScheduleName) -> None:
    slow: dict[FactorName, float] = {"network_inside": 1e-4, "network_between": 1e-4}
    target = PricingTarget(graph_of("llama-tiny", 64), cluster_of(A100, 8), "bf16").scaled(slow)
    problem = Problem.build(target, training_of(16, 64), Pins(schedule=schedule, tp=1, cp=1))
    several = [layout for layout in problem.space.layouts if layout.mesh.pp > 1]
    first_s = bounds(problem.table, several).step_time_s
    closer_s = CloserBounds(problem.table).of(Columns.of(Layout, several)).most_s
    ratios: list[tuple[float, float]] = []  # of the first bound and of the closer one to a step
    for layout, bounds_s in zip(several, zip(first_s, closer_s, strict=True), strict=True):
        pricer = Pricer(problem.table, layout)
        best = pricer.fastest(pricer.first_cuts())
        if best is not None:
            ratios.append((float(bounds_s[0]) / best.step_time_s, float(bounds_s[1]) / best.step_time_s))
    assert len(ratios) >= 9
    assert np.max(ratios) <= ROUNDING
    assert np.median(ratios, axis=0).min() > 0.7


def test_bounds_are_of_use() -> None:
    """Half of the points must be bounded to within a quarter of their price, or best-first would visit them all."""
    problem = problem_of("llama3-8b", 16, batch=64, seq_len=2048, pins=Pins(recompute=Recompute.NONE))
    choices = list(problem.space.layouts)
    lower = bounds(problem.table, choices)
    times: list[float] = []
    memories: list[float] = []
    for index in random.Random(1).sample(range(len(choices)), min(SAMPLE, len(choices))):
        cut = best_cut(Pricer(problem.table, choices[index]), problem.solver, None).best
        if cut is not None:
            times.append(lower.step_time_s[index] / cut.step_time_s)
            memories.append(lower.memory_bytes[index] / cut.peak_memory_bytes)
    assert np.median(times) > 0.75
    assert np.median(memories) > 0.6


def test_bounds_do_not_depend_on_the_company() -> None:
    problem = problem_of("gpt2-1.5b", 8, batch=64)
    choices = list(problem.space.layouts)[::97]
    together = bounds(problem.table, choices)
    for index, choice in enumerate(choices):
        alone = bounds(problem.table, [choice])
        assert alone.step_time_s[0] == pytest.approx(together.step_time_s[index], rel=1e-12)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[index], rel=1e-12)


@pytest.mark.parametrize("schedule", [ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B])
@pytest.mark.parametrize(
    ("num_ranks", "m"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (5, 40), (16, 16), (16, 17), (8, 2)]
)
def test_equal_stages_are_never_shorter_than_the_coefficient(schedule: ScheduleName, num_ranks: int, m: int) -> None:
    # Equal stages take (m + p - 1) / p times the work of all stages; unequal ones must not fall below the coefficient.
    coefficient = pipeline_coefficient(schedule, num_ranks, m)
    assert m / num_ranks <= coefficient <= (m + num_ranks - 1) / num_ranks + 1e-12
    rng = random.Random(m)
    for _ in range(50):
        work = tuple(rng.uniform(0.0, 1.0) ** 3 for _ in range(num_ranks))
        problem = _stages(work, m, windowed=schedule is ScheduleName.ONE_F_ONE_B)
        assert pipeline_bound_s(problem, tuple(range(num_ranks))) >= coefficient * sum(work) / ROUNDING


def _stages(work: tuple[float, ...], m: int, *, windowed: bool) -> StageProblem:
    p = len(work)
    free, half = np.zeros((p, p, p + 1)), (tuple(w / 2 for w in work),) * p
    return StageProblem(half, half, free, free, m, (0.0,) * (p - 1), windowed, ((0.0, 0.0),) * p)


@pytest.mark.parametrize(
    ("model", "num_devices", "options"),
    [
        ("llama3-70b", 64, {"batch": 128, "seq_len": 4096}),
        ("moe-tiny", 8, {"batch": 32, "seq_len": 64}),
        (ALTERNATING, 16, {"batch": 64, "seq_len": 2048, "hardware": "rtx-4090-x8"}),
    ],
)
def test_closer_bounds_of_many_layouts_are_those_of_each_alone(model: str, num_devices: int, options: dict) -> None:
    """Also of layouts of every shape in any order, and where no path is asked for beyond what is enough."""
    problem = problem_of(model, num_devices, **options)
    layouts = random.Random(3).sample(list(problem.space.layouts), min(150, len(problem.space.layouts)))
    together = CloserBounds(problem.table).of(Columns.of(Layout, layouts))
    for place, layout in enumerate(layouts):
        alone = CloserBounds(problem.table).of(Columns.of(Layout, [layout]))
        assert together.loads_s[place] == pytest.approx(float(alone.loads_s[0]), rel=1e-12)
        assert together.path_s[place] == pytest.approx(float(alone.path_s[0]), rel=1e-12)
    enough_s = float(np.median(together.most_s))
    limited = CloserBounds(problem.table).of(Columns.of(Layout, layouts), enough_s)
    is_less = together.loads_s < enough_s
    assert (limited.loads_s[is_less] == together.loads_s[is_less]).all()
    assert (limited.loads_s[~is_less] >= enough_s).all()
    assert (limited.loads_s <= together.loads_s).all()
    assert (limited.path_s == np.where(is_less, together.path_s, 0.0)).all()
