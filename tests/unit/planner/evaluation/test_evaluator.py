"""One point priced: its parts add up, its memory is that of its schedule, and shortened simulations stay true."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest

from costmodels.vocabulary.action import Transfer
from costmodels.vocabulary.choices import KeptOnHost, Recompute
from costmodels.vocabulary.held_counts import ONLY_FIRST, OfPasses
from costmodels.vocabulary.mesh import ZERO_STAGES
from costmodels.vocabulary.schedules import ScheduleName, peak_in_flight
from costmodels.vocabulary.terms import PLACE, Element, Holding, MemoryTerm, Phase, Term
from planner.evaluation.cuts import even_starts
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.fsdp_moments import Sharding, UnitAtWork, fullest_moment
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.table.cost_table import CostTable
from planner.table.keys import TensorSplit, WorkKey
from tests.planning import problem_of, slowed_by_messages, with_slow_sends
from tests.replay import before_each_backward

CASES = [
    ("llama3-8b", 16, {"batch": 64, "seq_len": 2048}),
    ("gpt2-1.5b", 8, {"batch": 64}),
    ("moe-tiny", 16, {"batch": 64, "seq_len": 64}),
]
STATES = (MemoryTerm.PARAMETERS, MemoryTerm.GRADIENTS, MemoryTerm.OPTIMIZER)
every_case = pytest.mark.parametrize(("model", "num_devices", "options"), CASES, ids=["llama", "gpt", "moe"])


def sample(model: str, num_devices: int, options: dict, number: int, slowdown: float | None = None) -> list[Evaluator]:
    """``slowdown``: beside messages, where not that of the machine."""
    problem = problem_of(model, num_devices, **options)
    table = problem.table if slowdown is None else slowed_by_messages(problem.table, slowdown)
    choices = random.Random(0).sample(problem.space.layouts, number)
    rng = random.Random(1)
    modes = [rng.choice(list(Recompute)) for _ in choices]
    return [_in_mode(table, choice, mode) for choice, mode in zip(choices, modes, strict=True)]


def _in_mode(table: CostTable, choice: Layout, mode: Recompute) -> Evaluator:
    """With ``mode`` for all blocks where the layout leaves it open."""
    return Evaluator(table, choice, [choice.recompute or mode] * len(table.units.kinds))


@every_case
def test_the_breakdown_sums_to_the_step(model: str, num_devices: int, options: dict) -> None:
    for point in sample(model, num_devices, options, 120):
        for exact in (False, True):
            priced = point.evaluate(point.even_starts(), exact=exact)
            parts = tuple(priced.breakdown.values())
            assert min(parts) >= 0, priced
            assert sum(parts) == pytest.approx(priced.step_time_s, rel=1e-9), priced
            choice = priced.layout
            assert (priced.breakdown[Term.RECOMPUTE] > 0) == (priced.only_mode is not Recompute.NONE)
            assert (priced.breakdown[Term.TENSOR] > 0) == (choice.mesh.tp > 1)
            assert (priced.breakdown[Term.CONTEXT] > 0) == (choice.mesh.cp > 1)
            assert (priced.breakdown[Term.EXPERT] > 0) == (choice.mesh.ep > 1)
            if choice.mesh.pp == 1:
                assert priced.breakdown[Term.BUBBLE] == priced.breakdown[Term.SEND] == 0


@every_case
def test_the_ledger_sums_to_the_peak(model: str, num_devices: int, options: dict) -> None:
    for point in sample(model, num_devices, options, 120):
        priced = point.evaluate(point.even_starts())
        assert len(priced.ledgers) == priced.layout.mesh.pp
        for ledger in priced.ledgers:
            assert sum(num_bytes for _, num_bytes in ledger.rows) == pytest.approx(ledger.total_bytes)
            names = [name for name, _ in ledger.rows]
            assert len(set(names)) == len(names)
        assert priced.peak_memory_bytes == max(ledger.total_bytes for ledger in priced.ledgers)
        for rank, stages in enumerate(point.stages_of_ranks(point.even_starts())):
            kept = point.activation_bytes(rank, stages)
            assert point.memory_model.peak_bytes(list(stages.values()), kept) == priced.ledgers[rank].total_bytes
        assert priced.fits == (priced.peak_memory_bytes <= point.table.cluster.devices[0].memory_bytes)


def _by_hand(point: Evaluator, slowdown: float) -> tuple[list[float], list[float]]:
    """What messages add to a forward and a backward pass of each stage, message by message."""
    layout, num_stages = point.layout, point.num_stages
    ranks = [layout.schedule.rules.rank_of(stage, layout.mesh.pp) for stage in range(num_stages)]
    times = point.with_modes([Recompute.NONE] * len(point.modes)).unit_times_of(0)
    mean_s = sum(times.forward_s) / num_stages
    forward, backward = [0.0] * num_stages, [0.0] * num_stages
    for border, way in enumerate(point.send_s):
        if ranks[border] == ranks[border + 1]:  # the turn of a V
            continue
        each = slowdown / 2 * min(way, mean_s)
        forward[border] += each  # sends the activation
        backward[border + 1] += each  # sends its gradient
        if layout.schedule not in (ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B):  # torch's others ask ahead
            forward[border + 1] += each
            backward[border] += each
    return forward, backward


@every_case
def test_messages_beside_passes_lengthen_them(model: str, num_devices: int, options: dict) -> None:
    schedules, slowdown = set[ScheduleName](), 0.2
    for point in sample(model, num_devices, options, 300, slowdown):
        if point.layout.mesh.pp == 1 or point.layout.recompute not in (None, Recompute.NONE):
            continue
        schedules.add(point.layout.schedule)
        forward, backward = _by_hand(point, slowdown)
        assert point.beside_s.tolist() == [pytest.approx(forward), pytest.approx(backward)]
        starts = point.even_starts()
        own, ends = point.unit_times_of(0), (*starts[1:], len(point.modes))
        times = point.timeline(starts)
        m = point.layout.num_microbatches
        for rank, busy_s in enumerate(times.busy_s):
            stages = point.stages_of_rank(rank, starts)
            units = [u for stage in stages for u in range(starts[stage], ends[stage])]
            bare = sum(own.forward_s[u] + own.backward_s[u] for u in units)
            assert busy_s == pytest.approx(m * (bare + sum(forward[k] + backward[k] for k in stages)), rel=1e-9)
    assert {ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE} < schedules
    assert {ScheduleName.DUAL_PIPE_V, ScheduleName.ZBV_ZERO_BUBBLE} & schedules


def test_a_rank_that_sends_while_it_waits_is_not_slowed_by_it() -> None:
    point = next(each for each in sample(*CASES[0], 100, slowdown=0.2) if each.layout.mesh.pp > 1)
    assert point.beside_s.any()
    blocking = Evaluator(
        replace(point.table, framework=replace(point.table.framework, transfers=Transfer.BLOCKING)),
        point.layout,
    )
    assert not blocking.beside_s.any()


@every_case
@pytest.mark.parametrize(("slower", "rel"), [(1, 1e-3), (100, 3e-3)], ids=["shipped network", "slow network"])
def test_a_long_pipeline_is_extrapolated_truly(
    model: str, num_devices: int, options: dict, slower: float, rel: float
) -> None:
    problem = problem_of(model, num_devices, **options)
    table = with_slow_sends(problem.table, slower)
    choices = [c for c in problem.space.layouts if c.mesh.pp > 1 and c.num_microbatches > 4 * c.mesh.pp]
    for choice in random.Random(1).sample(choices, 40):
        point = Evaluator(table, choice)
        short, exact = (point.evaluate(point.even_starts(), exact=flag) for flag in (False, True))
        assert short.step_time_s == pytest.approx(exact.step_time_s, rel=rel), choice
        assert short.ledgers == exact.ledgers


@every_case
def test_the_price_is_that_of_the_simulated_schedule(model: str, num_devices: int, options: dict) -> None:
    for point in sample(model, num_devices, options, 60):
        priced = point.evaluate(point.even_starts(), exact=True)
        timeline, parts = point.timeline(point.even_starts()), priced.breakdown
        once = priced.step_time_s - timeline.makespan_s - parts[Term.OPTIMIZER]  # data-parallel work after the pipeline
        assert -1e-9 <= once <= parts[Term.DATA] + 1e-9
        busiest = max(range(point.layout.mesh.pp), key=timeline.busy_s.__getitem__)
        beside_s = point.layout.num_microbatches * point.beside_of_ranks_s()[:, busiest].sum()
        waiting = parts[Term.BUBBLE] + parts[Term.SEND] - beside_s
        assert timeline.makespan_s - max(timeline.busy_s) == pytest.approx(waiting, abs=1e-9 * priced.step_time_s)


@pytest.mark.parametrize("schedule", [ScheduleName.GPIPE, ScheduleName.ONE_F_ONE_B])
@pytest.mark.parametrize(("num_ranks", "m"), [(1, 8), (2, 2), (4, 4), (4, 32), (8, 9)])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: ScheduleName, num_ranks: int, m: int) -> None:
    actions = schedule.rules.actions(num_ranks, 1, m)
    held = tuple(round(peak_in_flight(actions[rank], {rank: 1.0})) for rank in range(num_ranks))
    # Without a pipeline each micro-batch's backward follows its forward, whatever the schedule is called.
    assert schedule.rules.in_flight(num_ranks, m) == (held if num_ranks > 1 else (1,))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "virtual", "m"),
    [
        (ScheduleName.INTERLEAVED_1F1B, 2, 2, 4),
        (ScheduleName.INTERLEAVED_1F1B, 4, 2, 8),
        (ScheduleName.INTERLEAVED_1F1B, 4, 3, 16),
        (ScheduleName.INTERLEAVED_1F1B, 2, 5, 2),
        (ScheduleName.INTERLEAVED_ZERO_BUBBLE, 4, 1, 8),
        (ScheduleName.INTERLEAVED_ZERO_BUBBLE, 4, 3, 16),
        (ScheduleName.ZBV_ZERO_BUBBLE, 4, 2, 9),
        (ScheduleName.DUAL_PIPE_V, 4, 2, 9),
    ],
)
def test_stages_in_flight_are_those_at_the_peak(schedule: ScheduleName, num_ranks: int, virtual: int, m: int) -> None:
    actions = schedule.rules.actions(num_ranks, virtual, m)
    counts, waits = schedule.rules.in_flight_by_stage(num_ranks, virtual, m)
    assert all(wait <= count for wait, count in zip(waits, counts, strict=True))
    assert schedule.rules.splits_backward or not any(waits)
    for rank in range(num_ranks):
        stages = {action.stage for action in actions[rank]}
        assert sum(counts[s] for s in stages) == peak_in_flight(actions[rank], dict.fromkeys(stages, 1.0))


@pytest.mark.parametrize("schedule", [name for name in ScheduleName if name is not ScheduleName.ZB_2P])
def test_the_whole_schedule_is_in_the_ledger_however_long_it_is(schedule: ScheduleName) -> None:
    problem = problem_of("gpt2-1.5b", 8, batch=64)
    few_and_many = [c for c in problem.space.layouts if c.num_microbatches in (4, 8, 16, 64) and c.mesh.pp == 4]
    long = {c.schedule for c in few_and_many if c.num_microbatches == 64}
    assert long == set(ScheduleName) - {ScheduleName.ZB_2P}
    for choice in (each for each in few_and_many if each.schedule is schedule):
        point = Evaluator(problem.table, choice)
        starts = point.even_starts()
        stages = dict(enumerate(_stages(starts)))
        held = {stage: [_held(problem.table, choice, unit) for unit in units] for stage, units in stages.items()}
        kept = {stage: sum(unit[Holding.KEPT] for unit in units) for stage, units in held.items()}
        waiting = {stage: sum(unit[Holding.WAITING] for unit in units) for stage, units in held.items()}
        actions = choice.schedule.rules.actions(4, choice.virtual_stages, choice.num_microbatches)
        at_work = _at_work(problem.table, choice, stages)
        gradients = [_gradients(point, units) for units in stages.values()]
        for rank, memory in enumerate(point.memory(starts)):
            phases, peak = dict(memory.phases), peak_in_flight(actions[rank], kept, waiting)
            every = [
                (held, at_work(stage, before), sum(gradients[each] for each in made))
                for stage, before, made, held in before_each_backward(actions[rank], kept, waiting)
            ]
            forward = phases[Phase.FORWARD]
            found = forward.bytes_of(MemoryTerm.ACTIVATIONS) + forward.bytes_of(MemoryTerm.GRADIENTS)
            assert found == pytest.approx(max(held + made for held, _, made in every)), choice
            assert max(held for held, _, _ in every) == pytest.approx(peak), choice
            fullest = max(map(sum, every))
            own = [stages[stage] for stage in sorted({action.stage for action in actions[rank]})]
            last = point.memory_model.transient(own).last
            once = min(peak, sum(kept[stage] for stage in {action.stage for action in actions[rank]}))
            whole = sum(gradients[stage] for stage in {action.stage for action in actions[rank]})
            expected = max(fullest, 0.0 if last is None else once + last.total + whole)
            passing = sum(map(phases[Phase.BACKWARD].bytes_of, PASSING))
            assert passing == pytest.approx(expected), choice


def _gradients(point: Evaluator, units: range) -> float:
    """Of a rank that holds these units alone, when the optimiser steps."""
    memory = point.memory_model.rank([units], OfPasses(ONLY_FIRST, (0.0,)))
    return memory.ledger(Phase.OPTIMIZER).bytes_of(MemoryTerm.GRADIENTS)


def _at_work(table: CostTable, choice: Layout, stages: Mapping[int, range]) -> Callable[[int, int | None], float]:
    """What FSDP2 needs in a stage's backward pass while gradients of another stage's first unit wait."""
    framework, zero = table.framework, ZERO_STAGES[choice.zero_stage]
    is_sharded = framework.shards(choice.zero_stage, choice.offload)
    sharding = Sharding(
        gathers_units=zero.shards_parameters,
        reduces_each=zero.shards_gradients,
        compute_bytes=framework.item_bytes * is_sharded,
        buffer_bytes=framework.reduction_bytes * is_sharded,
    )
    split = TensorSplit(choice.mesh.tp, choice.sequence_parallel)
    of_kinds = table.elements[table.split_rows([split])[0]]
    elements = of_kinds[:, PLACE[Element.TRAINABLE]] + of_kinds[:, PLACE[Element.FROZEN]]

    def of(unit: int) -> UnitAtWork:
        held = _held(table, choice, unit)
        return UnitAtWork(
            working=held[Holding.WORKING],
            loss=held[Holding.LOSS],
            kept=held[Holding.KEPT],
            elements=float(elements[table.units.kinds[unit]]),
            with_gradients=held[Holding.GRADIENTS],
        )

    @cache
    def total(stage: int, before: int | None) -> float:
        waits = 0.0 if before is None else of(stages[before].start).elements
        return fullest_moment([(of(unit), 1) for unit in stages[stage]], sharding, waits).total

    return total


PASSING = (
    MemoryTerm.GRADIENTS,
    MemoryTerm.ACTIVATIONS,
    MemoryTerm.WORKING_SET,
    MemoryTerm.GATHERED_PARAMETERS,
    MemoryTerm.REDUCTION_BUFFERS,
)


def _held(table: CostTable, choice: Layout, unit: int) -> dict[Holding, float]:
    """What the table says one micro-batch holds in one unit."""
    (row,) = table.work_rows([_work_key(choice)])
    num_bytes = table.num_bytes[row, list(Recompute).index(choice.recompute or Recompute.NONE), table.units.kinds[unit]]
    return dict(zip(Holding, num_bytes.tolist(), strict=True))


@cache
def _work_key(choice: Layout) -> WorkKey:
    ((key,), _) = Columns.of(Layout, [choice]).by(WorkKey)
    return key


def _stages(starts: tuple[int, ...], num_units: int = 50) -> list[range]:
    return [range(a, b) for a, b in zip(starts, (*starts[1:], num_units), strict=True)]


def test_sharding_more_never_takes_more_states() -> None:
    problem = problem_of("llama3-8b", 16, batch=64, seq_len=2048)
    whole = [c for c in problem.space.layouts if c.mesh.pp == 1 and c.mesh.tp == 1 and c.mesh.cp == 1]
    by_stage: dict[int, float] = {}
    for choice in whole:
        if choice.mesh.dp_shard in (1, 16) and choice.micro_batch_size == 1:
            (ledger,) = Evaluator(problem.table, choice).ledgers((0,))
            by_stage[choice.zero_stage] = sum(map(ledger.bytes_of, STATES))
    assert by_stage[0] > by_stage[1] > by_stage[2] > by_stage[3] > 0
    assert by_stage[3] * 16 <= by_stage[0] * (1 + 1e-9)


def test_a_tied_weight_is_held_twice_where_a_pipeline_parts_it() -> None:
    problem = problem_of("gpt2-1.5b", 8, batch=64)

    def states(choice: Layout) -> float:
        point = Evaluator(problem.table, choice)
        return sum(ledger.bytes_of(name) for ledger in point.ledgers(point.even_starts()) for name in STATES)

    plain = [c for c in problem.space.layouts if c.zero_stage == 0 and c.mesh.tp == 1 and c.mesh.cp == 1]
    whole = next(states(c) for c in plain if c.mesh.pp == 1)
    parted = next(states(c) for c in plain if c.mesh.pp == 8)
    (tied,) = {p.num_elements for p in problem.target.graph.parameters if p.aliases}
    assert parted == pytest.approx(whole * (1 + tied / problem.target.graph.num_params))


@pytest.mark.parametrize(("num_blocks", "num_stages"), [(4, 1), (4, 2), (5, 2), (96, 16), (80, 32), (7, 7), (10, 4)])
def test_even_stages_hold_equal_numbers_of_blocks(num_blocks: int, num_stages: int) -> None:
    is_block = (False, *(True,) * num_blocks, False)
    starts = even_starts(is_block, num_stages)
    ends = (*starts[1:], len(is_block))
    held = [sum(is_block[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert starts[0] == 0
    assert len(held) == num_stages
    assert max(held) - min(held) <= 1
    assert held[-1] == min(held)  # the last stage has the head besides


def test_a_pinned_gpipe_without_a_pipeline_holds_one_micro_batch() -> None:
    free = problem_of("gpt2-1.5b", 8, batch=64)
    pinned = problem_of("gpt2-1.5b", 8, batch=64, pins=Pins(schedule=ScheduleName.GPIPE))
    choice = next(c for c in free.space.layouts if c.mesh.pp == 1 and c.num_microbatches == 8)
    ledger, same = (Evaluator(p.table, c).ledgers((0,)) for p, c in ((free, choice), (pinned, _gpipe(choice))))
    assert ledger == same


def _gpipe(choice: Layout) -> Layout:
    return choice._replace(schedule=ScheduleName.GPIPE)


def test_every_term_and_every_holding_is_filled_by_some_layout() -> None:
    """One that is declared and never filled would be left out of every table in silence."""
    seen: set[Term] = set()
    rows: set[MemoryTerm] = set()
    leaving = problem_of("llama3-8b", 16, batch=64, seq_len=2048, pins=Pins(offload_activations=True))
    layout = next(layout for layout in leaving.space.layouts if layout.offloads_activations)
    on_host = Evaluator(leaving.table, layout, [KeptOnHost.NONE] * len(leaving.table.units.kinds))
    for case in ([on_host], *(sample(*case, 120) for case in CASES)):
        for evaluator in case:
            found = evaluator.evaluate(evaluator.even_starts(), exact=True)
            seen.update(term for term, seconds in found.breakdown.items() if seconds > 0)
            phases = (ledger for rank in found.memory for _, ledger in rank.phases)
            rows.update(term for ledger in phases for term, num_bytes in ledger.rows if num_bytes > 0)
    assert seen == set(Term)
    # Our own executor gathers nothing into buffers of its own; frameworks that do are held in test_rank_memory.
    assert set(MemoryTerm) - rows <= {
        MemoryTerm.GATHER_BUFFERS, MemoryTerm.GATHERED_UPDATE, MemoryTerm.WAITING_COLLECTIVES,
    }  # fmt: skip


@pytest.mark.parametrize(("hardware", "is_slowed"), [("cpu-gloo", True), ("dgx-a100-80gb", False)])
def test_messages_slow_what_computes_where_it_moves_them(hardware: str, is_slowed: bool) -> None:
    problem = problem_of("llama-tiny", 4, batch=8, seq_len=64, hardware=hardware)
    layout = next(each for each in problem.space.layouts if each.mesh.pp == 2)
    assert Evaluator(problem.table, layout).beside_s.any() == is_slowed
