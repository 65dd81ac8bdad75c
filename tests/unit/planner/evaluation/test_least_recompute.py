"""What blocks recompute so that a rank fits, against every way in which they could."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest

from costmodels.vocabulary.choices import BlockMode, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.evaluation.block_modes import MODES
from planner.evaluation.evaluator import Evaluator
from planner.evaluation.least_recompute import LeastRecompute
from planner.layout.layout import Pins
from planner.problem import Problem
from tests.planning import problem_of


def scaled(problem: Problem, memory_bytes: float) -> Problem:
    """The same on devices of so much memory."""
    devices = tuple(replace(device, memory_bytes=memory_bytes) for device in problem.table.cluster.devices)
    table = replace(problem.table, cluster=replace(problem.table.cluster, devices=devices))
    return replace(problem, table=table)


@pytest.mark.parametrize("pins", [Pins(pp=1, zero=0, micro_batch=4), Pins(pp=2, micro_batch=2)])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_no_other_choice_that_fits_takes_less(pins: Pins, share: float) -> None:
    whole = problem_of("llama-tiny", 2, batch=16, seq_len=512, pins=pins)
    layout = next(c for c in whole.space.layouts if c.schedule.rules.has_one_stage and c.recompute is None)
    evaluator = Evaluator(whole.table, layout)
    starts = evaluator.even_starts()
    blocks = [unit for unit, is_block in enumerate(whole.table.units.is_block) if is_block]
    every = [
        evaluator.with_modes([of_blocks.get(unit, Recompute.NONE) for unit in range(len(evaluator.modes))])
        for modes in product(Recompute, repeat=len(blocks))
        for of_blocks in [dict(zip(blocks, modes, strict=True))]
    ]
    needs = sorted(max(ledger.total_bytes for ledger in each.ledgers(starts)) for each in every)
    capacity = needs[0] + share * (needs[-1] - needs[0])
    problem = scaled(whole, capacity)
    found = LeastRecompute(Evaluator(problem.table, layout)).modes(starts)
    fitting = [each for each in every if max(ledger.total_bytes for ledger in each.ledgers(starts)) <= capacity]
    assert 0 < len(fitting) <= len(every)
    assert found is not None
    chosen = Evaluator(problem.table, layout, found).evaluate(starts)
    assert chosen.fits
    best_s = min(each.evaluate(starts).step_time_s for each in fitting)
    assert chosen.step_time_s == pytest.approx(best_s, rel=1e-9)


def test_where_nothing_fits_there_is_no_choice() -> None:
    problem = scaled(problem_of("llama-tiny", 2, batch=16, seq_len=512, pins=Pins(pp=1, zero=0)), 1e6)
    layout = problem.space.layouts[0]
    assert LeastRecompute(Evaluator(problem.table, layout)).modes((0,)) is None


@pytest.mark.parametrize("name", ["Interleaved1F1B", "GPipe", "1F1B"])
def test_ranks_that_share_an_answer_would_find_it_alone(name: str) -> None:
    """Where ranks hold as much, what is found for the first is right for each by itself, with nothing known."""
    pins = Pins(pp=4, schedule=ScheduleName(name), micro_batch=1)
    whole = problem_of("gpt2-1.5b", 4, batch=4, seq_len=512, pins=pins)
    layout = next(c for c in whole.space.layouts if c.recompute is None)
    evaluator = Evaluator(whole.table, layout)
    starts = evaluator.even_starts()
    least = evaluator.with_modes([Recompute.FULL] * len(evaluator.modes))
    most, fewest = (max(ledger.total_bytes for ledger in each.ledgers(starts)) for each in (evaluator, least))
    problem = scaled(whole, (most + fewest) / 2)
    together = LeastRecompute(Evaluator(problem.table, layout))
    recomputing = 0
    for rank, stages in enumerate(evaluator.stages_of_ranks(starts)):
        alone = LeastRecompute(Evaluator(problem.table, layout)).of_rank(rank, stages)
        assert together.of_rank(rank, stages) == alone, rank
        recomputing += alone is not None and any(mode != Recompute.NONE for mode in alone.modes.values())
    assert recomputing


def test_ranks_are_alike_only_if_they_hold_as_much() -> None:
    problem = problem_of("gpt2-1.5b", 4, batch=8, seq_len=512, pins=Pins(pp=4))
    for layout in {(c.schedule, c.virtual_stages, c.num_microbatches): c for c in problem.space.layouts}.values():
        evaluator = Evaluator(problem.table, layout)
        first: dict[object, list[float]] = {}
        for rank, stages in enumerate(evaluator.stages_of_ranks(evaluator.even_starts())):
            kept = {stage: float(1 + place) for place, stage in enumerate(stages)}
            held = list(evaluator.in_flight.most_bytes(rank, kept, kept).numbers)
            assert first.setdefault(evaluator.in_flight.like(rank), held) == held, (layout, rank)


# Ranks of few blocks: of two kinds, with experts, with sequences that several ranks share, and with blocks on the host.
OF_FEW_BLOCKS = {
    "pipelines": ("gpt2-1.5b", 16, Pins(pp=8)),
    "tensors": ("gpt3-175b", 256, Pins(pp=16, tp=8)),
    "sequences": ("llama3-8b", 32, Pins(pp=8, cp=2)),
    "experts": ("mixtral-8x7b", 64, Pins(pp=8, ep=4)),
    "two kinds": ("deepseek-v3", 512, Pins(pp=16, ep=16)),
    "kinds by turns": ("tests/fixtures/alternating.py", 16, Pins(pp=4)),
    "host": ("llama3-8b", 16, Pins(pp=16, offload_activations=True)),
}


@cache
def of_few_blocks(name: str) -> Problem:
    model, num_devices, pins = OF_FEW_BLOCKS[name]
    return problem_of(model, num_devices, batch=4 * num_devices, pins=pins)


@dataclass(frozen=True)
class Rank:
    """A rank of a layout drawn at random, on a device that one of its choices fills just so."""

    evaluator: Evaluator
    rank: int
    stages: dict[int, range]

    @staticmethod
    def drawn(name: str, draw: Random) -> "Rank":
        whole = of_few_blocks(name)
        free = [layout for layout in whole.space.layouts if layout.recompute is None]
        one = Evaluator(whole.table, draw.choice(free))
        rank = draw.randrange(one.layout.mesh.pp)
        stages = dict(one.stages_of_ranks(one.even_starts())[rank])
        roomy = Rank(one, rank, stages)
        needed = roomy.excess(tuple(draw.choice(one.free_modes) for _ in roomy.blocks))
        room = one.table.cluster.devices[0].memory_bytes + needed
        return replace(roomy, evaluator=Evaluator(scaled(whole, room).table, one.layout))

    @property
    def blocks(self) -> list[int]:
        return [u for held in self.stages.values() for u in held if self.evaluator.table.units.is_block[u]]

    def excess(self, modes: tuple[BlockMode, ...]) -> float:
        """Bytes that the ledger says are too many if the blocks are in these modes."""
        return self.evaluator.excess_bytes(self.rank, self.stages, dict(zip(self.blocks, modes, strict=True)))

    def extra_s(self, modes: tuple[BlockMode, ...]) -> float:
        """Seconds that these modes take more than the fastest ones."""
        times, kinds = self.evaluator.extra_of_modes(self.rank), self.evaluator.table.units.kinds
        free = [MODES[mode] for mode in self.evaluator.free_modes]
        fastest = {unit: times[free, kinds[unit]].min() for unit in self.blocks}
        pairs = zip(self.blocks, modes, strict=True)
        return sum(float(times[MODES[mode], kinds[unit]] - fastest[unit]) for unit, mode in pairs)


@pytest.mark.parametrize("name", OF_FEW_BLOCKS)
def test_of_all_ways_in_which_blocks_could_recompute_none_that_fits_takes_less(name: str) -> None:
    """Every mode of every block, with the ledger of each: nothing is said of an order of blocks, modes or choices.

    One choice fills the device just so: it may fit in one order of blocks and lack some megabytes in another.
    """
    draw, found, unsure = Random(name), 0, 0
    for _ in range(200):
        if found == 12:
            break
        of = Rank.drawn(name, draw)
        if len(of.evaluator.free_modes) ** len(of.blocks) > 800:
            continue
        found += 1
        choice = LeastRecompute(of.evaluator).of_rank(of.rank, of.stages)
        every = list(product(of.evaluator.free_modes, repeat=len(of.blocks)))
        best_s = min((of.extra_s(modes) for modes in every if of.excess(modes) <= 0), default=None)
        assert (choice is None) == (best_s is None), of.evaluator.layout
        if choice is None or best_s is None:
            continue
        chosen = tuple(choice.modes[unit] for unit in of.blocks)
        assert of.excess(chosen) <= 0
        assert of.extra_s(chosen) == pytest.approx(choice.least_s + choice.slack_s, rel=1e-9, abs=1e-15)
        assert choice.least_s <= best_s * (1 + 1e-9), of.evaluator.layout
        if choice.slack_s == 0:
            assert choice.least_s == pytest.approx(best_s, rel=1e-9, abs=1e-15), of.evaluator.layout
        unsure += choice.slack_s > 0
    assert found == 12
    assert unsure <= 2


def test_few_of_many_choices_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama 4 Maverick, whose blocks are of three kinds, up to 2,000 of a rank's were, and a search took 80 s."""
    whole = problem_of("tests/fixtures/alternating.py", 8, batch=64, pins=Pins(pp=2))
    of_several_stages = [each for each in whole.space.layouts if each.recompute is None and each.virtual_stages > 1]
    asked: list[int] = []
    excess_bytes = Evaluator.excess_bytes

    def counted(self: Evaluator, rank: int, *others: Any) -> float:
        asked.append(rank)
        return excess_bytes(self, rank, *others)

    monkeypatch.setattr(Evaluator, "excess_bytes", counted)
    layouts = of_several_stages[:400:40]
    for layout in layouts:
        one = Evaluator(whole.table, layout)
        starts, num_units = one.even_starts(), len(one.modes)
        each = [one.with_modes([mode] * num_units).ledgers(starts) for mode in one.free_modes]
        needs = [max(ledger.total_bytes for ledger in ledgers) for ledgers in each]
        room = min(needs) + 0.3 * (max(needs) - min(needs))
        assert LeastRecompute(Evaluator(scaled(whole, room).table, layout)).modes(starts) is not None
    assert len(layouts) == 10
    assert len(asked) < 180  # of tens of thousands; 361 before what passes was counted


@pytest.mark.parametrize("name", OF_FEW_BLOCKS)
def test_what_is_not_listed_is_not_said_to_take_longer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many combinations to list, the bound is below them all, and says something."""
    monkeypatch.setattr("planner.evaluation.least_recompute.MOST_COMBINATIONS", 2)
    draw, found, positive = Random(name), 0, 0
    for _ in range(200):
        if found == 12:
            break
        of = Rank.drawn(name, draw)
        if len(of.blocks) < 2 or len(of.evaluator.free_modes) ** len(of.blocks) > 800:
            continue
        choice = LeastRecompute(of.evaluator).of_rank(of.rank, of.stages)
        every = product(of.evaluator.free_modes, repeat=len(of.blocks))
        best_s = min((of.extra_s(modes) for modes in every if of.excess(modes) <= 0), default=None)
        if choice is None or not best_s:
            continue
        found += 1
        positive += choice.least_s > 0
        assert choice.least_s <= best_s * (1 + 1e-9), of.evaluator.layout
    assert found
    assert positive
