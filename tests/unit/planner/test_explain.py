"""Why a plan is as it is: sums that must come out, prices worked out by hand, and what is said of other plans."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Recompute, Searches
from costmodels.vocabulary.terms import MemoryTerm
from hardware_profiles.catalog import load_profile
from planner.api import Answer, Question, find_plan, price_plan
from planner.api.alternatives import Verdict
from planner.api.explain import Binding, Explanation, Wishes, _binding, explain
from planner.api.operators import starred
from planner.api.what_if import Resource, WhatIf
from planner.errors import PlanError, TimeLimitError
from planner.layout.deadline import Deadline
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.pricing.operator_costs import Limit
from planner.render import adding_up, dollars, loss
from planner.render_explain import binding_lines, price_lines, signed
from planner.request import Request

QUICK = Wishes(searches=Searches.NONE)
A100 = "dgx-a100-80gb"
PINS = {
    "free": Pins(),
    "tensor": Pins(tp=2, sequence_parallel=True, recompute=None),
    "pipeline": Pins(pp=2, zero=1),
    "context": Pins(cp=2, tp=1, pp=1),
    "interleaved": Pins(pp=2, virtual_stages=2, micro_batch=1),
}


def request_of(pins: Pins) -> Request:
    return Request("llama-tiny", 4, hardware=A100, global_batch_size=8, seq_len=32, pins=pins, may_idle=False)


@cache
def answer_of(name: str) -> Answer:
    return find_plan(request_of(PINS[name]))


@cache
def explanation_of(name: str, why_not: Pins | None = None) -> Explanation:
    return explain(answer_of(name).plan, wishes=Wishes(why_not, 10**9, Searches.NONE))


# -- sums -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PINS)
def test_the_terms_of_time_add_up_to_the_step_that_the_search_predicted(name: str) -> None:
    found, predicted = explanation_of(name), answer_of(name).plan.prediction
    assert predicted is not None
    assert sum(found.time_s.values()) == pytest.approx(predicted.step_time_s, rel=1e-12)
    assert dict(found.time_s) == pytest.approx(predicted.breakdown_s, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", PINS)
def test_the_terms_of_memory_add_up_to_the_peak_of_the_fullest_rank(name: str) -> None:
    memory, predicted = explanation_of(name).memory, answer_of(name).plan.prediction
    assert predicted is not None
    assert sum(memory.terms_bytes.values()) == memory.peak_bytes == max(predicted.peak_memory_bytes)
    assert memory.peak_bytes == predicted.peak_memory_bytes[memory.rank]
    assert memory.peak_bytes <= memory.room_bytes < memory.device_bytes
    assert all(isinstance(term, MemoryTerm) for term in memory.terms_bytes)


@pytest.mark.parametrize("name", PINS)
def test_operators_and_what_no_operator_takes_add_up_to_the_compute(name: str) -> None:
    found = explanation_of(name)
    compute = found.compute
    operators = sum(row.reached.seconds for row in compute.operators)
    assert operators + compute.other_s == pytest.approx(compute.seconds, rel=1e-9)
    assert sum(row.reached.seconds for row in compute.units) == pytest.approx(compute.seconds, rel=1e-9)
    assert sum(compute.limits.values()) == pytest.approx(operators, rel=1e-9)
    assert compute.other_s >= -1e-12
    if found.plan.mesh.pp == 1:
        assert compute.seconds == pytest.approx(sum(s for t, s in found.time_s.items() if t == "compute"), rel=1e-9)


def test_the_numbers_that_are_shown_add_up_to_the_sum_that_is_shown() -> None:
    shown, unit = adding_up([1.23449, 0.00049, 0.00049, 0.00049, 123.0])
    assert unit == "s"
    assert sum(map(float, shown[:-1])) == pytest.approx(float(shown[-1]), abs=1e-9)
    assert float(shown[-1]) == pytest.approx(124.236, abs=0.06)
    assert adding_up([0.0123])[1] == "ms"
    assert adding_up([1.5e-6]) == (["1.500", "1.500"], "µs")


def test_money_below_a_cent_is_not_none() -> None:
    """A step of a small model was told to cost $0.00."""
    assert [dollars(value) for value in (0.00213, 0.1074, 1.999, 12345.6)] == [
        "$0.00213",
        "$0.107",
        "$2.00",
        "$12,345.60",
    ]


def test_a_loss_that_rounds_to_nothing_has_no_sign_of_a_gain() -> None:
    assert [loss(step, 27.9) for step in (27.8999, 27.9, 28.3, 27.0)] == ["+0.0%", "+0.0%", "+1.4%", "-3.2%"]


def test_what_rounding_leaves_is_no_difference() -> None:
    assert signed(-3.6e-15) == signed(0.0) == "+0 µs"
    assert (signed(-2e-9), signed(0.5)) == ("-0.002 µs", "+500 ms")


# -- operators by hand --------------------------------------------------------------------------------------


@cache
def llama8b() -> tuple[Plan, Explanation]:
    request = Request("llama3-8b", 8, hardware=A100, global_batch_size=8, pins=Pins(tp=1, pp=1, cp=1, zero=3))
    plan = find_plan(request).plan
    return plan, explain(plan, wishes=Wishes(searches=Searches.NONE))


def test_a_large_product_takes_what_its_flops_take_at_the_rate_of_the_profile() -> None:
    plan, found = llama8b()
    device = load_profile(A100).device
    gate = next(row for row in found.compute.operators if row.module == "layers.*.mlp.gate")
    efficiency = device.efficiency["gemm"]
    tokens = plan.pipeline.micro_batch_size * plan.training.seq_len
    flops = 3 * 2 * tokens * 4096 * 14336  # forward, and two products of the same size backward
    half = 0.0 if efficiency.half_size_flops is None else efficiency.half_size_flops.value
    peak = device.peak_flops_per_s["bf16"].value
    each = (flops + 3 * half) / (peak * efficiency.fraction.value) + 3 * device.kernel_launch_s.value
    by_hand = 32 * plan.pipeline.num_microbatches * each
    assert gate.operator == "linear"
    assert gate.reached.limit is Limit.ARITHMETIC
    assert gate.reached.seconds == pytest.approx(by_hand, rel=0.02)  # but for what the recipe says of its kernels
    assert gate.reached.roofline == pytest.approx(flops / peak / each, rel=0.02)
    assert gate.reached.flops_per_s == pytest.approx(flops / each, rel=0.02)


def test_what_only_moves_bytes_waits_for_memory_and_small_kernels_for_their_launch() -> None:
    _, found = llama8b()
    norm = next(row for row in found.compute.operators if row.module == "layers.*.mlp_norm")
    assert norm.reached.limit is Limit.MEMORY
    assert norm.reached.bytes_per_s <= found.compute.peak_bytes_per_s
    tiny = explanation_of("free").compute
    assert tiny.limits[Limit.LAUNCH] > 0
    assert all(row.reached.roofline < 1 for row in (*found.compute.operators, *tiny.operators))


def test_units_of_one_kind_are_one_row() -> None:
    _, found = llama8b()
    assert [(row.name, row.count) for row in found.compute.units] == [
        ("pre", 1),
        ("layers.0 to layers.31", 32),
        ("post", 1),
    ]
    assert starred("model.layers.12") == "model.layers.*"


@pytest.mark.parametrize("name", ["pipeline", "interleaved"])
def test_units_are_named_from_the_first_to_the_last_of_the_model(name: str) -> None:
    """Of ranks with several stages it was from one in the middle to another."""
    rows = explanation_of(name).compute.units
    assert [row.name for row in rows] == ["pre", "layers.0 to layers.3", "post"]


# -- other plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pins"), [("free", Pins(tp=2, pp=2)), ("free", Pins(zero=2)), ("pipeline", Pins(micro_batch=1))], ids=str
)
def test_why_not_is_the_search_with_the_same_pins(name: str, pins: Pins) -> None:
    own = answer_of(name).plan
    assert own.search is not None
    asked = replace(request_of(Pins.of({**own.search.pins, **pins.given()})), may_idle=True)
    searched = find_plan(asked).plan
    found = explanation_of(name, pins).why_not
    assert found is not None
    assert found.plan is not None

    def timeless(plan: Plan) -> Plan:
        assert plan.search is not None
        return plan.model_copy(update={"search": plan.search.model_copy(update={"elapsed_s": 0.0})})

    assert timeless(found.plan) == timeless(searched)
    assert own.prediction is not None
    assert searched.prediction is not None
    assert found.differences_s is not None
    lost_s = searched.prediction.step_time_s - own.prediction.step_time_s
    assert sum(found.differences_s.values()) == pytest.approx(lost_s, abs=1e-12)
    is_slower = lost_s > 1e-3 * own.prediction.step_time_s
    assert (found.verdict is Verdict.SLOWER) == is_slower


def test_a_rule_that_pins_break_is_named() -> None:
    found = explanation_of("free", Pins(tp=3)).why_not
    assert found is not None
    assert found.verdict is Verdict.BREAKS_A_RULE
    assert "tp=3 does not divide the 4 GPUs" in found.reason
    assert found.candidate is None


NO_FIT = Wishes(Pins(zero=0, tp=1, pp=1, cp=1), searches=Searches.NONE)


def test_what_does_not_fit_says_by_how_much() -> None:
    plan, _ = llama8b()
    found = explain(plan.model_copy(update={"search": None}), wishes=NO_FIT).why_not
    assert found is not None
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert found.lacks_bytes is not None
    # At least the fp32 master copy, moments and gradients of every parameter, of a device that has 80 GB.
    assert found.lacks_bytes > plan.model.num_params * 16 - load_profile(A100).device.memory_bytes.value
    assert "memory binds" in found.reason
    assert found.way_out


@pytest.mark.parametrize("name", ["free", "pipeline"])
def test_runners_up_are_those_of_the_plan_and_none_is_faster(name: str) -> None:
    plan = answer_of(name).plan
    assert plan.search is not None
    rows = explanation_of(name).runners_up
    named = [*plan.search.runners_up, plan.search.baseline, plan.search.all_devices, plan.search.roomier]
    assert [row.label for row in rows] == [each.label for each in named if each is not None]
    for row, each in zip(rows, [each for each in named if each is not None], strict=True):
        assert row.candidate is not None
        assert row.differences_s is not None
        step_s = sum(explanation_of(name).time_s.values())
        # The search stops to improve a layout's cut when it cannot become the best.
        assert step_s * (1 - 1e-3) <= row.candidate.step_time_s <= each.step_time_s * (1 + 1e-9)
        assert sum(row.differences_s.values()) == pytest.approx(row.candidate.step_time_s - step_s, abs=1e-12)


def test_runners_up_with_whole_experts_are_priced_with_whole_experts() -> None:
    """They were priced as if experts were split over tp where that could be, which is another step, and else not."""
    asked = replace(request_of(Pins(tp=2, pp=1, cp=1, etp=1)), model="moe-tiny")
    plan = find_plan(asked).plan
    assert plan.search is not None
    rows = explain(plan, wishes=QUICK).runners_up
    others = [each for each in plan.search.runners_up if each.mesh.etp == 1]
    assert len(others) > 2
    for row, each in zip(rows, others, strict=False):
        assert row.candidate is not None
        assert row.differences_s is not None
        assert row.candidate.step_time_s == pytest.approx(each.step_time_s, rel=1e-9)


def test_a_plan_without_a_search_gets_its_runners_up_from_one() -> None:
    plan = find_plan(request_of(Pins(pp=4))).plan.model_copy(update={"search": None})
    rows = explain(plan).runners_up
    assert rows
    assert rows[0].verdict is Verdict.FASTER  # the best of all has fewer stages here
    assert all(row.differences_s is not None for row in rows)


# -- what if ----------------------------------------------------------------------------------------------


def test_twice_of_something_is_what_a_profile_with_twice_of_it_gives(tmp_path: Path) -> None:
    document = json.loads(load_profile(A100).model_dump_json())
    for peak in document["device"]["peak_flops_per_s"].values():
        peak["value"] *= 2
    file = tmp_path / "fast.json"
    file.write_text(json.dumps(document))
    plan, found = llama8b()
    priced = price_plan(plan, str(file)).plan.prediction
    assert priced is not None
    row = next(each for each in found.what_if if each.resource is Resource.ARITHMETIC)
    assert row.priced_s == pytest.approx(priced.step_time_s, rel=1e-9)
    assert found.plan.prediction is not None
    assert priced.step_time_s < found.plan.prediction.step_time_s


def test_what_saves_most_binds() -> None:
    found = explain(answer_of("tensor").plan)
    assert found.plan.prediction is not None
    step_s = found.plan.prediction.step_time_s
    seconds = {
        each.resource: each.searched_s if each.resource is Resource.MEMORY else each.priced_s
        for each in found.what_if
        if each.resource is not None
    }
    assert set(seconds) == set(Resource)
    others_s = [each.candidate.step_time_s for each in found.runners_up if each.candidate is not None]
    here_s = {resource: min([step_s, *others_s]) if resource is Resource.MEMORY else step_s for resource in Resource}
    saved = {resource: 1 - taken / here_s[resource] for resource, taken in seconds.items() if taken is not None}
    assert len(saved) == len(seconds)
    assert found.binding.saves == pytest.approx(max(saved.values()))
    assert found.binding.resource is not None
    assert saved[found.binding.resource] == max(saved.values())


def test_memory_is_not_said_to_save_what_a_search_saves_without_it() -> None:
    """Of a plan by hand, a search with twice the memory finds much: most of it with the same memory, too."""
    pins = Pins(tp=8, pp=1, cp=1, micro_batch=1, recompute=Recompute.FULL)
    plan = find_plan(Request("gpt2-1.5b", 8, hardware=A100, global_batch_size=64, pins=pins)).plan
    found = explain(plan.model_copy(update={"search": None}))  # whatever was pinned is not known
    assert plan.prediction is not None
    others_s = [each.candidate.step_time_s for each in found.runners_up if each.candidate is not None]
    assert min(others_s) < plan.prediction.step_time_s * 0.9
    row = next(each for each in found.what_if if each.resource is Resource.MEMORY)
    assert row.searched_s is not None
    assert found.binding.resource is not Resource.MEMORY
    assert found.binding.saves >= 1 - row.searched_s / min(others_s)
    assert any("A search finds a plan for the same GPUs that takes" in line for line in binding_lines(found))


def test_memory_saves_nothing_where_the_plan_that_is_found_with_more_fits_without() -> None:
    """Searches that the clock ended differ by chance: the one with twice the memory may have come further."""
    quick = WhatIf("more", Resource.MEMORY, searched_s=0.5, needs_change=False)
    rows = (WhatIf("faster", Resource.ARITHMETIC, priced_s=0.75), quick)
    assert _binding(rows, 1.0, 1.0) == Binding(Resource.ARITHMETIC, 0.25)
    needed = replace(quick, needs_change=True)
    assert _binding((rows[0], needed), 1.0, 1.0) == Binding(Resource.MEMORY, 0.5)


def test_a_tiny_model_does_not_need_twice_the_memory() -> None:
    found = explain(answer_of("free").plan)
    assert [row.needs_change for row in found.what_if if row.resource is Resource.MEMORY] == [False]
    assert found.binding.resource is not Resource.MEMORY
    assert not any("not judged" in line for line in binding_lines(found))


def test_what_no_resource_would_save_is_not_said_to_bind() -> None:
    found = replace(explanation_of("free"), binding=Binding(Resource.ARITHMETIC, 0.001))
    said = binding_lines(found)[0]
    assert said.startswith("What binds: nothing that the devices and the network have.")
    assert said.endswith("Memory was not judged: that takes a search.")


def test_each_search_has_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--time-limit``: what the first searches take is not taken from the last."""
    given: list[Deadline] = []

    def searched(question: Question, deadline: Deadline) -> Answer:
        given.append(deadline)
        raise TimeLimitError

    monkeypatch.setattr("planner.api.what_if.answer_of", searched)
    rows = explain(answer_of("tensor").plan, wishes=Wishes(searches=Searches.ALL, time_limit_s=9.0)).what_if
    assert len({id(deadline) for deadline in given}) == len(rows)
    assert {row.says for row in rows} == {TimeLimitError().message}


def test_searching_again_is_never_slower_than_the_same_plan_there() -> None:
    rows = explain(answer_of("tensor").plan, wishes=Wishes(searches=Searches.ALL)).what_if
    for row in rows:
        assert row.priced_s is not None
        assert row.searched_s is not None, row
        assert row.searched_s <= row.priced_s * 1.002, row  # the simplest of those within a thousandth is taken


# -- dollars and energy -----------------------------------------------------------------------------------


def test_prices_are_devices_times_hours_times_rates() -> None:
    plan, found = llama8b()
    device = load_profile(A100).device
    assert plan.prediction is not None
    assert device.usd_per_hour is not None
    assert device.watts is not None
    hours = 1e9 / (8 * plan.training.seq_len) * plan.prediction.step_time_s * 8 / 3600
    assert found.prices.usd_per_billion_tokens == pytest.approx(hours * device.usd_per_hour.value)
    assert found.prices.kwh_per_billion_tokens == pytest.approx(hours * device.watts.value / 1000)
    assert found.prices.run is None
    run = explanation_of("free").prices
    assert run.run is not None
    assert run.run_kwh == pytest.approx(run.run.gpu_hours * device.watts.value / 1000)


# -- what changed since -----------------------------------------------------------------------------------


def test_a_model_without_tokens_is_paid_by_the_sample() -> None:
    prices = explanation_of("free").prices
    for seq_len, unit in ((1, "samples"), (2048, "tokens")):
        priced, run, *_ = price_lines(prices, seq_len)
        assert priced.startswith(f"10^9 {unit}: $")
        assert run.split(":")[0].endswith(f" {unit}")


def test_a_plan_that_predicts_something_else_is_said_to(tmp_path: Path) -> None:
    plan = answer_of("free").plan
    assert plan.prediction is not None
    old = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"step_time_s": 1.0})})
    assert "the plan predicts a step of 1 s" in explain(old, wishes=QUICK).notes[-1]
    assert explanation_of("free").notes == ()


def test_pins_of_a_plan_that_are_none_are_refused() -> None:
    plan = answer_of("free").plan
    assert plan.search is not None
    broken = plan.model_copy(update={"search": plan.search.model_copy(update={"pins": {"tpp": 3}})})
    with pytest.raises(PlanError, match=r"search\.pins is not what a search writes"):
        explain(broken, wishes=QUICK)
