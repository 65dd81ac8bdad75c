"""Activations in host memory: what they take and free, and the choice of modes against every way to choose them."""

from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

import pytest

from costmodels.vocabulary.choices import KeptOnHost, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm, Phase, Term
from planner.api import find_plan, planned_layout, price_plan
from planner.errors import HardwareError, InputError
from planner.evaluation.block_modes import ALL_MODES
from planner.evaluation.evaluator import Evaluated, Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.problem import Problem
from planner.request import Request
from planner.solver.bounds import bounds
from planner.solver.closer_bounds import CloserBounds
from planner.solver.cutting import Pricer, best_cut
from planner.table.facts import HostCopies
from tests.planning import problem_of

H100 = "dgx-h100-80gb"
LEAVING = Pins(offload_activations=True)
ROUNDING = 1 + 1e-9


def changed(problem: Problem, memory_bytes: float, copies: HostCopies | None = None) -> Problem:
    """The same on devices of so much memory, with other hosts."""
    cluster = problem.table.cluster
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices)
    hosts = (
        cluster.hosts if copies is None else tuple(replace(h, ram_bytes=8 * copies.ram_bytes) for h in cluster.hosts)
    )
    facts = replace(cluster, devices=devices, copies=copies or cluster.copies, hosts=hosts)
    return replace(problem, table=replace(problem.table, cluster=facts))


@cache
def tiny(pins: Pins, num_devices: int = 2) -> Problem:
    return problem_of("llama-tiny", num_devices, batch=16, seq_len=512, pins=pins)


@cache
def long() -> Problem:
    """Llama 3 8B with 196,608 tokens on 16 H100, its sequences shared by eight."""
    pins = replace(LEAVING, cp=8, tp=1, pp=1, micro_batch=1)
    return problem_of("llama3-8b", 16, batch=2, seq_len=196_608, hardware=H100, pins=pins)


def every_choice(problem: Problem, layout: Layout, starts: tuple[int, ...]) -> list[Evaluated]:
    units = problem.table.units.is_block
    evaluator = Evaluator(problem.table, layout)
    found: list[Evaluated] = []
    for modes in product(evaluator.free_modes, repeat=sum(units)):
        of_blocks = iter(modes)
        chosen = [next(of_blocks) if is_block else Recompute.NONE for is_block in units]
        found.append(evaluator.with_modes(chosen).evaluate(starts))
    return found


CASES = [
    (replace(LEAVING, pp=1, zero=0, micro_batch=4), 2),
    (replace(LEAVING, pp=2, micro_batch=2, schedule=ScheduleName.ONE_F_ONE_B), 2),
    (replace(LEAVING, pp=2, micro_batch=2, schedule=ScheduleName.GPIPE), 2),
    (replace(LEAVING, pp=1, micro_batch=4, recompute=Recompute.SELECTIVE), 2),
    (replace(LEAVING, pp=2, micro_batch=1, virtual_stages=2, schedule=ScheduleName.INTERLEAVED_1F1B), 2),
]


@pytest.mark.parametrize(("pins", "num_devices"), CASES)
def test_no_other_choice_that_fits_takes_less_and_no_bound_is_above_one(pins: Pins, num_devices: int) -> None:
    random, whole = Random(f"{pins} 0"), tiny(pins, num_devices)
    layout = random.choice(list(whole.space.layouts))
    # From copies that hide to copies that take as long as the block; the host has room for all that is kept.
    copies = HostCopies(10 ** random.uniform(-12, -8.5), random.choice((0.0, 0.02)), 1e12)
    starts = Evaluator(whole.table, layout).even_starts()
    every = every_choice(changed(whole, 1e12, copies), layout, starts)
    needs = sorted(each.peak_memory_bytes for each in every)
    capacity = needs[0] + random.random() ** 2 * (needs[-1] - needs[0])
    problem = changed(whole, capacity, copies)
    fitting = [each for each in every if each.peak_memory_bytes <= capacity]
    found = LeastRecompute(Evaluator(problem.table, layout)).modes(starts)
    assert found is not None
    chosen = Evaluator(problem.table, layout, found).evaluate(starts)
    assert chosen.fits
    best_s = min(each.step_time_s for each in fitting)
    assert chosen.step_time_s == pytest.approx(best_s, rel=1e-9)
    lower = bounds(problem.table, [layout])
    assert lower.step_time_s[0] <= best_s * ROUNDING
    assert lower.memory_bytes[0] <= needs[0] * ROUNDING
    if layout.virtual_stages > 1:
        assert CloserBounds(problem.table).of(Columns.of(Layout, [layout])).most_s[0] <= best_s * ROUNDING


def test_the_choices_differ_with_the_link() -> None:
    """Copies that cost nothing leave nothing to recompute, and copies that take for ever leave nothing on the host."""
    pins, num_devices = CASES[0]
    whole = tiny(pins, num_devices)
    layout = whole.space.layouts[0]
    seen: list[set[object]] = []
    for s_per_byte in (1e-15, 1.0):
        copies = HostCopies(s_per_byte, 0.0, 1e12)
        needs = sorted(each.peak_memory_bytes for each in every_choice(changed(whole, 1e12, copies), layout, (0,)))
        found = LeastRecompute(Evaluator(changed(whole, needs[len(needs) // 3], copies).table, layout)).modes((0,))
        assert found is not None
        seen.append(set(found))
    assert KeptOnHost.NONE in seen[0]
    assert not seen[0] & {Recompute.FULL, Recompute.SELECTIVE}
    assert not seen[1] & set(KeptOnHost)


def in_mode(problem: Problem, layout: Layout, mode: Recompute | KeptOnHost) -> Evaluated:
    evaluator = Evaluator(problem.table, layout)
    return evaluator.with_modes([mode] * len(problem.table.units.kinds)).evaluate((0,))


def test_a_block_on_the_host_frees_what_it_keeps_but_for_two_buffers() -> None:
    problem = long()
    layout = next(each for each in problem.space.layouts if each.zero_stage == 3)
    here, there = (in_mode(problem, layout, mode) for mode in (Recompute.NONE, KeptOnHost.NONE))
    before, after = (each.memory[0].ledger(Phase.BACKWARD) for each in (here, there))
    freed = before.bytes_of(MemoryTerm.ACTIVATIONS) - after.bytes_of(MemoryTerm.ACTIVATIONS)
    buffers = after.bytes_of(MemoryTerm.OFFLOAD_BUFFERS)
    assert buffers == pytest.approx(2 * freed / 32)  # of 32 blocks
    assert there.host is not None
    assert there.host.states.activations == pytest.approx(8 * freed)  # of the node's eight devices
    # Numbers of 16 bits that a block keeps of a token, over its width of 4096: its input and twice that normed, the sum
    # in between; queries, keys, values and attention's output; and four of the 14336 of the feed-forward.
    by_hand = 1 + 2 + 1 + (1 + 1 / 4 + 1 / 4 + 1) + 4 * 3.5
    assert freed / 32 / (196_608 / 8) / 4096 / 2 == pytest.approx(by_hand, rel=2e-3)  # and a few of 32 bits a token


def test_the_time_of_copies_is_what_the_link_and_the_compute_make_it() -> None:
    """By hand: the host's 614.4 GB/s, of which eight devices reach 45.5 %, bind before the link's 48 GB/s."""
    problem = long()
    layout = next(each for each in problem.space.layouts if each.zero_stage == 0 or each.zero_stage == 1)
    here, there = (in_mode(problem, layout, mode) for mode in (Recompute.NONE, KeptOnHost.NONE))
    rate = min(0.75 * 64e9, 0.455 * 614.4e9 / 8)
    kept = there.memory[0].ledger(Phase.BACKWARD).bytes_of(MemoryTerm.OFFLOAD_BUFFERS) / 2
    copy_s = kept / rate
    blocks, m = 32, layout.num_microbatches
    # Forward passes, a third of the compute, take longer than the copies.
    assert here.breakdown[Term.COMPUTE] / m / blocks / 3 > copy_s
    slowdown = rate / 3.35e12  # of the device's memory
    assert there.breakdown[Term.OFFLOAD] == pytest.approx(2 * m * blocks * copy_s * slowdown)
    slow = replace(problem.table.cluster, copies=HostCopies(1.0, 0.0, 1e15))
    exposed = in_mode(replace(problem, table=replace(problem.table, cluster=slow)), layout, KeptOnHost.NONE)
    hidden = 2 * m * blocks * kept - exposed.breakdown[Term.OFFLOAD]
    assert 0 < hidden < 0.9 * here.breakdown[Term.COMPUTE] * ROUNDING  # the share that hides anything


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_no_device_takes_more_of_its_host_than_its_share(share: float) -> None:
    whole = long()
    layout = next(each for each in whole.space.layouts if each.zero_stage == 3)
    kept = in_mode(whole, layout, KeptOnHost.NONE).host
    assert kept is not None
    most = kept.states.activations / 8
    problem = changed(whole, 80e9, HostCopies(1e-11, 0.0, share * most))
    found = LeastRecompute(Evaluator(problem.table, layout)).modes((0,))
    assert found is not None
    priced = Evaluator(problem.table, layout, found).evaluate((0,))
    assert priced.fits
    assert not Evaluator(problem.table, layout).evaluate((0,)).fits
    on_host = 0.0 if priced.host is None else priced.host.states.activations / 8
    assert on_host <= share * most * ROUNDING
    assert (on_host > 0) == (share > 0)
    assert any(mode in found for mode in (Recompute.SELECTIVE, Recompute.FULL)) == (share < 1)


def test_a_search_takes_it_where_it_is_asked_for_alone() -> None:
    asked = Request("llama3-8b", 8, H100, seq_len=32_768, global_batch_size=8, pins=Pins(tp=1, pp=1, cp=8, zero=3))
    without = find_plan(asked).plan
    assert without.offloaded_activations == ()
    assert without.prediction is not None
    assert Term.OFFLOAD not in without.prediction.breakdown_s
    found = find_plan(replace(asked, pins=replace(asked.pins, offload_activations=True))).plan
    assert found.prediction is not None
    assert found.prediction.step_time_s <= without.prediction.step_time_s * 1.001


def test_a_plan_says_whose_activations_leave_and_is_priced_again_as_it_was() -> None:
    pins = replace(LEAVING, tp=1, pp=1, cp=8, micro_batch=1)
    plan = find_plan(Request("llama3-8b", 16, H100, seq_len=131_072, global_batch_size=2, pins=pins)).plan
    again = price_plan(plan).plan
    assert plan.offloaded_activations
    assert plan.prediction is not None
    assert again.prediction is not None
    assert again.offloaded_activations == plan.offloaded_activations
    assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-12)
    assert again.prediction.peak_memory_bytes == plan.prediction.peak_memory_bytes
    assert plan.prediction.host_memory_bytes["activations"] > 0
    assert any(isinstance(mode, KeptOnHost) for mode in planned_layout(plan, None, None).evaluator.modes)
    foreign = plan.model_copy(update={"offloaded_activations": ("nowhere",)})
    with pytest.raises(InputError, match="offloaded_activations: nowhere"):
        price_plan(foreign)


def test_schedules_that_split_backward_passes_keep_activations_on_the_device() -> None:
    pins = replace(LEAVING, pp=2, schedule=ScheduleName.ZBV_ZERO_BUBBLE)
    layouts = tiny(pins).space.layouts
    assert layouts
    assert not any(layout.offloads_activations for layout in layouts)
    assert best_cut(Pricer(tiny(pins).table, layouts[0]), tiny(pins).solver, None).best is not None


def test_what_no_profile_says_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"--offload-activations: .*host_link_bytes_per_s"):
        find_plan(Request("llama-tiny", 2, "cpu-gloo", 64, 32, pins=LEAVING))


def test_every_mode_has_a_place() -> None:
    assert [mode.name for mode in ALL_MODES] == [mode.name for _ in range(2) for mode in Recompute]
