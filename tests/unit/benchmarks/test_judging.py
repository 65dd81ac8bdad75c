"""The judges of the search can fail: what is worse than it says is found out, and what they change is what they say."""

import json
import random
from dataclasses import replace
from math import comb, prod
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.judging import records as recording
from benchmarks.judging.audit import Auditor, question_of
from benchmarks.judging.choice import Choice, Facts, is_legal, obeys, read_choice, written
from benchmarks.judging.edits import AXES, edits, even_cuts, primes
from benchmarks.judging.enumeration import cuts, layouts, num_cuts, ordered_factors, recomputations
from benchmarks.judging.estimate import document_of, estimate
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.makespans import Makespans, places_of
from benchmarks.judging.oracle import SMALL_SHAPES, Best, Oracle, disagreement
from benchmarks.judging.pairs import Pair, lost
from benchmarks.judging.questions import Question, Reply, ask
from benchmarks.judging.rivals import Budget, annealing, best_of, evolution, first_of, megatron_rule, plain_fsdp
from benchmarks.same_answers import differences
from costmodels.vocabulary.choices import Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.layout.layout import NO_PINS, Pins
from planner.plan.schema import Plan

PIECES = Facts(
    modules=(("embedding",), ("layers.0",), ("layers.1",), ("layers.2",), ("norm", "head")),
    blocks=(None, "layers.0", "layers.1", "layers.2", None),
    global_batch_size=8,
    seq_len=64,
    num_devices=8,
    devices_per_node=8,
)
PIPELINE = Choice(
    pp=2, dp_replicate=1, dp_shard=2, cp=1, tp=2, ep=1, zero_stage=1, micro_batch_size=1,
    schedule=ScheduleName.ONE_F_ONE_B, virtual_stages=1, sequence_parallel=False, starts=(0, 3),
    modes=PIECES.modes(Recompute.NONE),
)  # fmt: skip


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def question(graphs: Graphs) -> Question:
    model = graphs.preset("gpt-tiny", None, Precision.BF16)
    return Question("gpt-tiny", str(model), 4, "dgx-a100-80gb", graphs.read(model).seq_len, 8, pins=Pins(pp=2))


@pytest.fixture(scope="module")
def reply(question: Question) -> Reply:
    return ask(question)


def plan_in(reply: Reply) -> Plan:
    assert reply.plan is not None
    return reply.plan


def with_numbers(reply: Reply, step: float, *, status: str = "OPTIMAL", bound: float = 1.0) -> Reply:
    """``reply`` with its step and bound multiplied."""
    plan = plan_in(reply)
    assert plan.prediction is not None
    assert plan.search is not None
    seconds = plan.prediction.step_time_s
    prediction = plan.prediction.model_copy(update={"step_time_s": seconds * step})
    search = plan.search.model_copy(update={"bound_step_time_s": seconds * bound, "status": status})
    return Reply(plan.model_copy(update={"prediction": prediction, "search": search}), status)


# -- the audit ------------------------------------------------------------------------------------------------------


def test_a_plan_that_is_not_the_best_is_refuted(
    question: Question, reply: Reply, graphs: Graphs, tmp_path: Path
) -> None:
    auditor = Auditor.of(question, graphs, tmp_path)
    document = document_of(plan_in(reply), question.model)
    choice = read_choice(document, auditor.facts)
    spoiled = choice._replace(starts=(0, auditor.facts.num_units - 1), schedule=ScheduleName.ONE_F_ONE_B)
    spoiled = spoiled._replace(virtual_stages=1, micro_batch_size=1)
    changed = written(spoiled, document, auditor.facts, auditor.placed.section)
    assert changed is not None
    price = estimate(changed, question.hardware, tmp_path)
    assert price.step_time_s is not None
    prediction = plan_in(reply).prediction
    assert prediction is not None
    worse = Plan.model_validate_json(json.dumps(changed)).model_copy(
        update={"prediction": prediction.model_copy(update={"step_time_s": price.step_time_s})}
    )
    verdict = auditor.verdict(worse)
    assert verdict.agrees
    assert verdict.best_gain > 0.1
    assert "border" in {edit.kind for edit, _ in verdict.refutations}


def test_a_price_that_estimate_does_not_name_is_seen(
    question: Question, reply: Reply, graphs: Graphs, tmp_path: Path
) -> None:
    verdict = Auditor.of(question, graphs, tmp_path, most=0).verdict(plan_in(with_numbers(reply, 1.001)))
    assert not verdict.agrees


def test_what_estimate_refuses_is_no_price(question: Question, reply: Reply, tmp_path: Path) -> None:
    document = document_of(plan_in(reply), question.model)
    document["training"]["global_batch_size"] = 7
    price = estimate(document, question.hardware, tmp_path)
    assert (price.step_time_s, price.fits) == (None, False)
    assert "global_batch_size" in price.refused


# -- choices and their changes --------------------------------------------------------------------------------------


def test_a_choice_is_read_back_as_it_was_written(question: Question, reply: Reply, graphs: Graphs) -> None:
    facts = Auditor.of(question, graphs, Path()).facts
    document = document_of(plan_in(reply), question.model)
    choice = read_choice(document, facts)
    assert is_legal(choice, facts)
    for edit in edits(choice, facts):
        changed = written(edit.choice, document, facts, lambda tp, pp, flag: {"sequence_parallel": flag})
        assert changed is not None
        assert read_choice(changed, facts) == edit.choice, edit.text


def test_every_change_is_legal_keeps_the_devices_and_is_made_once() -> None:
    found = edits(PIPELINE, PIECES)
    assert len({edit.choice for edit in found}) == len(found)
    assert PIPELINE not in {edit.choice for edit in found}
    for edit in found:
        assert prod(getattr(edit.choice, axis) for axis in AXES) == PIECES.num_devices
        assert is_legal(edit.choice, PIECES)


def test_changes_of_every_kind_are_made() -> None:
    found = edits(PIPELINE, PIECES)
    by_kind = {kind: [e.choice for e in found if e.kind == kind] for kind in {e.kind for e in found}}
    assert {choice.starts for choice in by_kind["border"]} == {(0, 2), (0, 4)}
    assert {(c.pp, c.dp, c.cp, c.tp) for c in by_kind["degree"]} == {
        (1, 4, 1, 2), (1, 2, 2, 2), (1, 2, 1, 4), (4, 1, 1, 2), (2, 1, 2, 2), (2, 1, 1, 4), (4, 2, 1, 1), (2, 4, 1, 1),
        (2, 2, 2, 1), (2, 2, 1, 2),  # the last: replicas in place of shards
    }  # fmt: skip
    assert {choice.micro_batch_size for choice in by_kind["micro-batch"]} == {2}
    assert {choice.zero_stage for choice in by_kind["ZeRO"]} == {2, 3}  # 0 needs replicas: a degree
    assert {choice.schedule for choice in by_kind["schedule"]} >= {ScheduleName.GPIPE, ScheduleName.INTERLEAVED_1F1B}
    assert len(by_kind["recompute of a block"]) == 2 * 3 - 2  # a block alone on its stage is that stage
    assert len(by_kind["recompute of a stage"]) == 2 * 2


@pytest.mark.parametrize(
    ("pins", "change", "obeyed"),
    [
        (NO_PINS, {}, True),
        (Pins(tp=2, pp=2, dp=2, cp=1, ep=1, zero=1, micro_batch=1), {}, True),
        (Pins(tp=4), {}, False),
        (Pins(zero=2), {}, False),
        (Pins(zero=2), {"dp_shard": 1, "cp": 2, "zero_stage": 0}, False),
        (Pins(zero=2), {"dp_shard": 1, "cp": 1, "zero_stage": 0}, False),  # nothing to shard over
        (Pins(schedule=ScheduleName.GPIPE), {}, False),
        (Pins(schedule=ScheduleName.GPIPE), {"pp": 1, "starts": (0,)}, True),  # without a pipeline all are alike
        (Pins(schedule=ScheduleName.DUAL_PIPE_V), {"pp": 1, "starts": (0,)}, False),
        (Pins(recompute=Recompute.FULL), {}, False),
        (Pins(recompute=Recompute.FULL), {"modes": PIECES.modes(Recompute.FULL)}, True),
        (Pins(recompute=Recompute.NONE), {"modes": PIECES.modes(Recompute.FULL)}, False),
    ],
)
def test_a_pin_is_obeyed_or_not(pins: Pins, change: dict[str, Any], obeyed: bool) -> None:
    assert obeys(PIPELINE._replace(**change), pins, PIECES) is obeyed


def test_some_blocks_under_a_pinned_mode_do_not_obey_it() -> None:
    full = PIECES.modes(Recompute.FULL)
    mixed = (*full[:2], Recompute.NONE, *full[3:])
    assert not obeys(PIPELINE._replace(modes=mixed), Pins(recompute=Recompute.FULL), PIECES)


def test_even_cuts_leave_no_stage_empty() -> None:
    assert even_cuts(2, PIECES) == [(0, 2), (0, 3)]
    assert even_cuts(5, PIECES) == [(0, 1, 2, 3, 4)]
    assert even_cuts(6, PIECES) == []
    assert (primes(1), primes(12), primes(49)) == ([], [2, 3], [7])


# -- the oracle -----------------------------------------------------------------------------------------------------


def test_everything_is_enumerated() -> None:
    assert len(set(ordered_factors(8, 5))) == len(list(ordered_factors(8, 5))) == comb(3 + 4, 4)
    assert all(prod(degrees) == 12 for degrees in ordered_factors(12, 5))
    assert len(list(cuts(PIPELINE, PIECES))) == num_cuts(PIPELINE, PIECES) == 4
    small = replace(PIECES, num_devices=2, global_batch_size=2)
    found = list(layouts(small))
    assert len(set(found)) == len(found)
    assert all(is_legal(choice, small) for choice in found)
    # Replicas; shards under three stages of ZeRO, of data or of sequences; tensor parallelism with and without SP.
    alone = [c for c in found if c.pp == 1 and c.micro_batch_size == 1 and c.modes == small.modes(Recompute.NONE)]
    degrees = [(c.dp_replicate, c.dp_shard, c.cp, c.tp, c.zero_stage, c.sequence_parallel) for c in alone]
    ways = len({c.cp_method for c in alone if c.cp > 1})
    assert ways == 3
    assert sorted(degrees) == sorted(
        [
            (2, 1, 1, 1, 0, False),
            *((1, 2, 1, 1, zero, False) for zero in (1, 2, 3)),
            *((1, 1, 2, 1, zero, False) for zero in (0, 1, 2, 3) for _ in range(ways)),
            *((1, 1, 1, 2, 0, flag) for flag in (False, True)),
        ]
    )


def test_the_oracle_finds_what_pricing_every_cut_of_every_layout_finds(question: Question, graphs: Graphs) -> None:
    small = replace(question, num_devices=2, global_batch_size=2)
    oracle = Oracle.of(small, graphs)
    best = oracle.best()
    facts, price = oracle.evaluations.facts, oracle.evaluations.price
    modes = [facts.modes(mode) for mode in Recompute]
    everything = [
        price(changed)
        for choice in oracle.choices()
        for starts in cuts(choice, facts)
        for mode in modes
        if is_legal(changed := choice._replace(starts=starts, modes=mode), facts)
    ]
    assert best.is_whole
    assert best.step_time_s == min(everything)  # blocks that differ are no faster: everything fits
    assert best.num_priced > 0


def test_shares_of_a_batch_are_enumerated_edited_and_judged(graphs: Graphs, tmp_path: Path) -> None:
    model = graphs.shape(SMALL_SHAPES[0], Precision.BF16)
    question = Question(
        "llama", str(model), None, "dgx-a100-80gb:2,dgx-h100-80gb:2", graphs.read(model).seq_len, 4,
        pins=Pins(pp=1, tp=1),
    )  # fmt: skip
    reply, best = ask(question), Oracle.of(question, graphs).best()
    assert best.is_whole
    assert best.choice is not None
    assert [share.size for share in best.choice.shares] == [1, 3]
    assert disagreement(reply, best) == ""
    auditor = Auditor.of(question, graphs, tmp_path)
    document = document_of(plan_in(reply), question.model)
    choice = read_choice(document, auditor.facts)
    assert choice.shares == best.choice.shares
    assert written(choice, document, auditor.facts, auditor.placed.section) == document
    changed = [edit.choice for edit in edits(choice, auditor.facts) if edit.kind == "shares"]
    assert {tuple(share.size for share in each.shares) for each in changed} == {(2, 2), ()}
    alike = choice._replace(shares=(), micro_batch_size=2)
    changed = [edit.choice for edit in edits(alike, auditor.facts) if edit.kind == "shares"]
    assert {tuple(share.size for share in each.shares) for each in changed} == {(1, 3), (3, 1)}
    verdict = auditor.verdict(plan_in(reply))
    assert verdict.agrees
    assert verdict.refutations == ()


@pytest.mark.parametrize(
    ("model", "hardware", "num_devices"),
    [
        ("gpt-tiny", "rtx-4090-x8", 4),
        ("moe-tiny", "dgx-a100-80gb", 2),
        ("gpt-tiny", "rtx-3090-x8:2,rtx-4090-x8:2", None),
    ],
)
def test_plans_simulated_together_take_what_each_takes_alone(
    graphs: Graphs, model: str, hardware: str, num_devices: int | None
) -> None:
    graph = graphs.preset(model, None, Precision.BF16)
    asked = Question(model, str(graph), num_devices, hardware, graphs.read(graph).seq_len, 8)
    oracle, draw = Oracle.of(asked, graphs), random.Random(0)
    everything, facts = oracle.evaluations, oracle.evaluations.facts
    listed = [c for c in oracle.choices() if c.pp > 1 and not (c.groups and c.virtual_stages > 1)]
    several = [choice for choice in listed if choice.virtual_stages > 1]
    compared = 0
    for choice in [*draw.sample(listed, 12), *draw.sample(several, min(12, len(several)))]:
        allowed = [m for m in recomputations(facts) if is_legal(choice._replace(modes=m), facts)]
        recomputed, starts_of = draw.sample(allowed, min(3, len(allowed))), list(cuts(choice, facts))[-3:]
        (free,) = everything.free(choice).parts
        spans = Makespans(choice, free)
        places, m = places_of(recomputed), facts.num_microbatches(choice)
        together, least_s = spans.of(places, starts_of, m), spans.least_work_s(places, m)
        for row, modes in enumerate(recomputed):
            (evaluator,) = everything.evaluator(choice._replace(modes=modes)).parts
            for column, starts in enumerate(starts_of):
                once = evaluator.once_a_step(starts)
                once_s = max(data for data, _ in once) + max(update for _, update in once)
                alone = evaluator.evaluate(starts, exact=True)
                assert together[row, column] + once_s == pytest.approx(alone.step_time_s, rel=1e-12)
                assert least_s[row] <= together[row, column] * (1 + 1e-12)
                ranks = enumerate(free.stages_of_ranks(starts))
                needs = [
                    free.excess_bytes(r, stages, {u: modes[u] for us in stages.values() for u in us})
                    for r, stages in ranks
                ]
                pairs = zip(alone.ledgers, alone.capacity_bytes, strict=True)
                assert needs == pytest.approx([ledger.total_bytes - room for ledger, room in pairs])
                compared += 1
    assert compared > 60


def test_replies_that_cannot_be_true_are_told(reply: Reply) -> None:
    prediction = plan_in(reply).prediction
    assert prediction is not None
    seconds = prediction.step_time_s
    best = Best(plan_in(reply).num_devices, seconds, PIPELINE, 1, 1, 0, is_whole=True)
    assert disagreement(with_numbers(reply, 1.0), best) == ""
    assert "refuted by 1.96%" in disagreement(with_numbers(reply, 1.02), best)
    assert disagreement(with_numbers(reply, 1.02, status="FEASIBLE"), best) == ""
    assert "bound is above" in disagreement(with_numbers(reply, 1.1, status="FEASIBLE", bound=1.02), best)
    assert "not in the oracle's space" in disagreement(with_numbers(reply, 0.98, bound=0.98), best)
    assert disagreement(with_numbers(reply, 0.98, bound=0.98), best._replace(num_devices=64)) == ""  # some are idle
    assert "but a plan fits" in disagreement(Reply(None, "nothing fits"), best)
    assert disagreement(Reply(None, "nothing fits"), best._replace(step_time_s=None)) == ""


# -- pairs, rivals, records -----------------------------------------------------------------------------------------


def test_a_slower_plan_for_more_is_told(question: Question, reply: Reply) -> None:
    pair = Pair("more memory", question, question)
    assert lost(pair, reply, reply) == ""
    assert "slower by" in lost(pair, reply, with_numbers(reply, 1.01))
    assert lost(pair, reply, with_numbers(reply, 1.01, status="FEASIBLE")) == ""  # within the gap that it states
    assert "slower by" in lost(pair, reply, with_numbers(reply, 1.02, status="FEASIBLE", bound=1.01))
    assert "nothing fits" in lost(pair, reply, Reply(None, "nothing fits", "too large"))
    assert lost(pair, Reply(None, "nothing fits"), reply) == ""


def test_rivals_stay_within_their_evaluations_and_find_good_plans() -> None:
    def price(choice: Choice) -> float:
        return choice.pp + choice.cp + 8 / choice.tp + abs(choice.micro_batch_size - 2) + choice.zero_stage / 8

    least = min(price(choice) for choice in layouts(PIECES) if choice.tp == 8)
    for way in (annealing, evolution):
        budget = Budget(price, 400)
        seconds, choice = way(PIECES, budget, random.Random(0))
        assert choice is not None
        assert is_legal(choice, PIECES)
        assert len(budget.known) <= 400 + 1
        assert seconds == price(choice) <= least * 1.2


def test_rules_of_hand_take_what_they_say() -> None:
    def room_for_four(choice: Choice) -> float:
        return 1.0 / choice.micro_batch_size if choice.tp * choice.pp >= 4 else float("inf")

    _, least = first_of(megatron_rule(PIECES, whole_node=False), PIECES, room_for_four)
    _, whole = first_of(megatron_rule(PIECES, whole_node=True), PIECES, room_for_four)
    assert least is not None
    assert whole is not None
    assert (least.tp, least.pp, least.dp, least.micro_batch_size) == (4, 1, 2, 4)
    assert (whole.tp, whole.pp, whole.dp) == (8, 1, 1)
    seconds, fsdp = best_of(plain_fsdp(PIECES), PIECES, lambda choice: 1.0 / choice.micro_batch_size)
    assert fsdp is not None
    assert (seconds, fsdp.dp_shard, fsdp.zero_stage) == (1.0, 8, 3)


def test_a_run_that_was_stopped_goes_on_and_other_code_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, judged = tmp_path / "records.json", []
    monkeypatch.setattr(recording, "code_digest", lambda: "now")

    def judge(index: int) -> dict[str, Any]:
        if index == 2 and len(judged) == 2:
            raise KeyboardInterrupt
        judged.append(index)
        return {"index": index}

    console = Console(quiet=True)
    assert not recording.run(recording.Records(path, {"seed": 0}), range(4), judge, console)
    assert judged == [0, 1]
    judged.append(-1)
    again = recording.Records(path, {"seed": 0})
    assert recording.run(again, range(4), judge, console)
    assert judged == [0, 1, -1, 2, 3]
    assert [record["index"] for record in again.ordered()] == [0, 1, 2, 3]
    assert recording.Records(path, {"seed": 1}).by_index == {}
    monkeypatch.setattr(recording, "code_digest", lambda: "later")
    assert recording.Records(path, {"seed": 0}).by_index == {}


def test_an_answer_that_is_not_the_judged_one_is_told(tmp_path: Path) -> None:
    """Of a record of today none differs; of one with another step time, status or bound that one does."""
    plan = ask(question_of(0, 1, Graphs(tmp_path))).plan  # llama-tiny on 8 devices, pp=1, ZeRO 2
    assert plan is not None
    assert plan.prediction is not None
    step_s = plan.prediction.step_time_s
    record = {"index": 1, "status": "OPTIMAL", "step_time_s": step_s, "bound_s": step_s}
    assert not list(differences("audit", 0, [record]))
    for changed in ({"step_time_s": step_s * (1 + 1e-9)}, {"status": "FEASIBLE"}, {"bound_s": step_s / 2}):
        ((_, before, now),) = differences("audit", 0, [{**record, **changed}])
        assert before != now
        assert now.step_time_s == [step_s]
