"""Fewer devices than there are, where that is faster or cheaper; and several numbers of devices side by side."""

from collections.abc import Callable
from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType

from planner.api import find_plan, price_plan
from planner.api.front import cheapest_plan, counts_between, find_front
from planner.errors import InputError, NoLayoutError, PinsError
from planner.graph.graph_file import write_graph
from planner.layout.layout import NO_PINS, Limits, Pins
from planner.render import proof_words, show_plan
from planner.render_front import show_front
from planner.request import Request
from planner.space.device_counts import worthwhile_counts
from tests.planning import graph_of, training_of

Tiny = Callable[..., Request]
A100 = "dgx-a100-80gb"
DATA_PARALLEL = Pins(tp=1, pp=1, cp=1, micro_batch=1)


def limits(num_devices: int) -> Limits:
    """Nodes of 8 and a model of 32 blocks and 32 heads."""
    degrees = frozenset(d for d in (2, 4, 8) if num_devices % d == 0)
    return Limits(num_devices, min(8, num_devices), 32, degrees, degrees, context_splits=True, num_heads=32)


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(graph_of("llama-tiny", 64), path)
    return str(path)


@pytest.fixture
def tiny(graph: str) -> Tiny:
    def request(num_devices: int, batch: int = 16, *, may_idle: bool = True, pins: Pins = NO_PINS) -> Request:
        return Request(
            graph, num_devices, A100, global_batch_size=batch, pins=pins, may_idle=may_idle, num_tokens=10**6
        )

    return request


@pytest.mark.parametrize(("there_are", "richer"), [(25, 24), (67, 64), (127, 120)])
def test_a_number_with_few_divisors_leaves_a_richer_one_below_it(there_are: int, richer: int) -> None:
    assert richer in worthwhile_counts(training_of(240, 1024), NO_PINS, limits(there_are))


def test_where_the_last_node_is_not_filled_it_may_be_filled_less() -> None:
    """Of 23 GPUs 16 were used, and 20 are a quarter faster."""
    assert 20 in worthwhile_counts(training_of(240, 1024), NO_PINS, limits(23))
    counts = worthwhile_counts(training_of(240, 1024), NO_PINS, limits(56))
    assert all(count % 8 == 0 for count in counts if count > 28)


def test_what_is_worth_a_search_for_some_devices_is_for_twice_as_many() -> None:
    for number in (25, 36, 64):
        counts = worthwhile_counts(training_of(240, 1024), NO_PINS, limits(number))
        assert set(counts) | {number} <= set(worthwhile_counts(training_of(240, 1024), NO_PINS, limits(2 * number)))


def test_pins_are_obeyed_where_devices_are_left_idle(tiny: Tiny) -> None:
    assert worthwhile_counts(training_of(240, 1024), Pins(tp=8, pp=2, dp=4, cp=1), limits(64)) == ()
    plan = find_plan(tiny(12, pins=Pins(pp=2, tp=1))).plan
    assert (plan.mesh.pp, plan.mesh.tp) == (2, 1)


def test_devices_that_cannot_share_the_work_stay_idle_and_it_is_said(tiny: Tiny) -> None:
    with pytest.raises(NoLayoutError):
        find_plan(tiny(11, may_idle=False))
    answer = find_plan(tiny(11))
    plan = answer.plan
    assert plan.num_devices + plan.idle_devices == 11
    assert plan.mesh.shape().world_size == plan.num_devices < 11
    assert answer.notes[-1].startswith(f"{plan.num_devices} of 11 GPUs are used: no layout over all 11")


def test_twice_the_devices_are_never_slower(tiny: Tiny) -> None:
    times: list[float] = []
    for number in (4, 8, 16):
        prediction = find_plan(tiny(number, 4)).plan.prediction
        assert prediction is not None
        times.append(prediction.step_time_s)
    for fewer, more in pairwise(times):
        assert more <= fewer * (1 + 1e-3)  # of plans so alike, the simplest is taken


def test_idle_devices_are_a_gain_over_all_of_them(tiny: Tiny) -> None:
    plan = find_plan(tiny(16, 4)).plan
    every = find_plan(tiny(16, 4, may_idle=False)).plan
    assert every.idle_devices == 0
    assert plan.prediction is not None
    assert every.prediction is not None
    assert plan.idle_devices > 0
    assert plan.search is not None
    assert plan.search.all_devices is not None
    assert plan.prediction.step_time_s < every.prediction.step_time_s
    assert plan.search.all_devices.step_time_s == pytest.approx(every.prediction.step_time_s, rel=1e-3)


def test_a_whole_run_is_its_steps(tiny: Tiny) -> None:
    plan = find_plan(tiny(4)).plan
    assert plan.run is not None
    assert plan.prediction is not None
    assert plan.prediction.usd_per_step is not None
    assert plan.run.num_steps == -(-(10**6) // (16 * 64))
    assert plan.run.days * 86400 == pytest.approx(plan.run.num_steps * plan.prediction.step_time_s)
    assert plan.run.gpu_hours * 3600 == pytest.approx(plan.run.days * 86400 * plan.num_devices)
    assert plan.run.usd == pytest.approx(plan.run.num_steps * plan.prediction.usd_per_step)


@pytest.mark.parametrize(("hardware", "num_devices"), [("dgx-h100-80gb", None), (None, 8)])
def test_a_run_priced_again_is_that_of_the_new_price(tiny: Tiny, hardware: str | None, num_devices: int | None) -> None:
    """The days and dollars of other devices were those of the plan's own."""
    plan = find_plan(tiny(4, pins=DATA_PARALLEL)).plan
    again = price_plan(plan, hardware, num_devices).plan
    assert again.prediction is not None
    assert again.prediction.usd_per_step is not None
    assert plan.run is not None
    assert again.run is not None
    assert again.run.num_steps == plan.run.num_steps
    assert again.run.days * 86400 == pytest.approx(again.run.num_steps * again.prediction.step_time_s)
    assert again.run.usd == pytest.approx(again.run.num_steps * again.prediction.usd_per_step)


def test_what_is_proved_of_the_cheapest_plan_is_said_of_its_devices(tiny: Tiny) -> None:
    """Beside "none is faster" stood that a plan over more devices was."""
    plan = cheapest_plan(tiny(16)).plan
    assert plan.idle_devices > 0
    assert f"layouts on {plan.num_devices} GPUs" in proof_words(plan)
    assert "GPUs" not in proof_words(find_plan(tiny(16, 4)).plan)  # the fastest over any number of them


def test_devices_are_left_idle_only_where_they_are_those_of_the_plan(tiny: Tiny) -> None:
    """A plan for 4 of 8 GPUs, priced on 8, spoke of 8 and of 4 more that were left idle."""
    plan = find_plan(tiny(4, pins=DATA_PARALLEL)).plan.model_copy(update={"idle_devices": 4})
    found = [price_plan(plan, *where).plan for where in ((None, None), (None, 8), ("dgx-h100-80gb", None))]
    assert [each.idle_devices for each in found] == [4, 0, 0]


@pytest.mark.parametrize(("factor", "was"), [(None, "without a price"), (2.0, "at $5.4 a GPU-hour")])
def test_another_price_than_the_plan_was_made_at_is_said(tiny: Tiny, factor: float | None, was: str) -> None:
    """A profile of the user's that has a shipped one's name is not found again: the shipped one's price was told."""
    plan = find_plan(tiny(4, pins=DATA_PARALLEL)).plan
    assert plan.prediction is not None
    assert plan.prediction.usd_per_step is not None
    usd = None if factor is None else plan.prediction.usd_per_step * factor
    other = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"usd_per_step": usd})})
    said = f"the plan was made with {A100} {was}, and is priced with it at $2.7 a GPU-hour"
    assert [note.partition(":")[0] for note in price_plan(other).notes if "made with" in note] == [said]
    for each, hardware in ((plan, None), (other, A100)):
        assert not any("made with" in note for note in price_plan(each, hardware).notes)


def test_numbers_of_a_range() -> None:
    assert counts_between(8, 64, 8) == (8, 16, 24, 32, 48, 64)
    assert counts_between(1, 9, 8) == (1, 2, 3, 4, 6, 8, 9)
    assert counts_between(5, 5, 8) == (5,)


def test_no_plan_of_a_front_is_beaten_in_everything(tiny: Tiny) -> None:
    front = find_front(tiny(16, may_idle=False), 4)
    assert front.chosen in front.plans
    rows = [(p.num_devices, p.prediction.step_time_s) for p in front.plans if p.prediction is not None]
    assert [number for number, _ in rows] == sorted(number for number, _ in rows)
    assert {*(number for number, _ in rows), *front.dominated, *(n for n, _ in front.refused)} == {4, 6, 8, 16}
    chosen = front.chosen.prediction
    assert chosen is not None
    assert chosen.step_time_s == min(seconds for _, seconds in rows)


def text_of(shown: RenderableType) -> str:
    console = Console(width=140, file=StringIO(), record=True)
    console.print(shown)
    return console.export_text()


def test_a_front_shows_the_whole_run_that_was_asked_about(tiny: Tiny) -> None:
    """Days and dollars of --tokens were shown of one number of GPUs, and nowhere of a range."""
    plan = find_plan(tiny(4, pins=DATA_PARALLEL)).plan
    assert plan.run is not None
    run = plan.run.model_copy(update={"days": 1234.5, "usd": 6.78e6, "num_tokens": 3 * 10**11})
    whole, none = (plan.model_copy(update={"run": each}) for each in (run, None))
    shown, plain = (text_of(show_front([each], each, by_cost=False)) for each in (whole, none))
    assert all(text in shown for text in ("days", "$ in all", "1,234.5", "6.78 M", "300 B tokens"))
    assert "days" not in plain
    assert "$ a step" in plain


def test_the_fullest_rank_is_among_those_that_are_shown(tiny: Tiny) -> None:
    """Of 8 ranks 0, 1, 6 and 7 were shown, and the heading told what rank 5 takes."""
    plan = find_plan(tiny(4, pins=DATA_PARALLEL)).plan
    assert plan.prediction is not None
    ledger = plan.prediction.memory_breakdown_bytes[0]
    peaks = (2**30,) * 5 + (2**31,) + (2**30,) * 2
    update = {"peak_memory_bytes": peaks, "memory_breakdown_bytes": (ledger,) * 8, "memory_phases_bytes": ()}
    shown = text_of(show_plan(plan.model_copy(update={"prediction": plan.prediction.model_copy(update=update)})))
    columns = next(line for line in shown.splitlines() if "rank 0" in line)
    assert [int(text.split()[0]) for text in columns.split("rank")[1:]] == [0, 1, 5, 6, 7]


@pytest.mark.parametrize("by_cost", [True, False])
def test_numbers_that_cannot_have_a_pin_are_left_out_of_a_range(tiny: Tiny, by_cost: bool) -> None:
    """The first number that tp 2 does not divide, which nobody had asked for, ended the whole range."""
    front = find_front(tiny(6, may_idle=False, pins=Pins(tp=2)), 1, by_cost=by_cost)
    assert {plan.num_devices for plan in front.plans} | set(front.dominated) == {2, 4, 6}
    assert {number for number, _ in front.refused} == {1, 3}
    assert all("tp=2 does not divide" in why for _, why in front.refused)
    with pytest.raises(PinsError, match="does not divide"):
        find_front(tiny(7, may_idle=False, pins=Pins(tp=2)), 7, by_cost=by_cost)


def test_a_cost_needs_a_price(graph: str) -> None:
    with pytest.raises(InputError, match="has no price"):
        find_front(Request(graph, 2, "cpu-gloo", global_batch_size=4), 1, by_cost=True)


def test_runners_up_differ_in_something_that_matters(graph: str) -> None:
    asked = Request(graph, 8, A100, global_batch_size=16, num_runners_up=12, may_idle=False)
    plan = find_plan(asked).plan
    assert plan.search is not None
    rows = plan.search.runners_up
    assert len(rows) == 12
    assert [row.step_time_s for row in rows] == sorted(row.step_time_s for row in rows)
    differ = {(row.mesh.shape(), row.zero_stage, row.schedule) for row in rows}
    assert len(differ) == 12
    assert (plan.mesh.shape(), plan.zero_stage, plan.pipeline.schedule) not in differ
