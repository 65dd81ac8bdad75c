"""Unlike devices without a pipeline: replicas that take unlike shares of every batch, found, priced and told."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from itertools import product
from operator import mul
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.judging.enumeration import lists_of_sizes
from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.mixed import cluster_for
from planner.api import find_plan, price_plan, replan, schedule_plan
from planner.api.explain import explain
from planner.cli.main import app
from planner.errors import InputError, PlanError
from planner.evaluation.evaluator import Evaluated
from planner.evaluation.shares import evaluator_of
from planner.layout.columns import Columns
from planner.layout.deadline import Deadline
from planner.layout.layout import Layout, Pins
from planner.plan.checks import contradictions
from planner.plan.plan_file import write_plan
from planner.plan.schema import Plan
from planner.pricing.table_builder import build_table
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.render import show_plan
from planner.request import Request
from planner.solver import shares
from planner.solver.shares import _floor_s, _least_of_parts, _least_s, _lists, _part, priced
from tests.planning import NO_PINS, graph_of, training_of

A100, H100 = "dgx-a100-80gb", "dgx-h100-80gb"
MIXED = f"{A100}:8,{H100}:8"
NO_PIPELINE = Pins(pp=1)
ROUNDING = 1 + 1e-9


@cache
def problem_on(hardware: str, *, model: str = "llama-tiny", batch: int = 12, pins: Pins = NO_PINS) -> Problem:
    seq_len = 64 if model.endswith("tiny") else 2048
    target = PricingTarget(graph_of(model, seq_len), cluster_for(None, hardware), "bf16")
    return Problem.build(target, training_of(batch, seq_len), pins)


@cache
def plan_on(hardware: str = MIXED, pins: Pins = NO_PIPELINE, batch: int = 64) -> Plan:
    request = Request("llama3-8b", None, hardware=hardware, seq_len=2048, global_batch_size=batch, pins=pins)
    return find_plan(request).plan


def seconds_of(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


def every_layout(problem: Problem) -> list[Layout]:
    """All that there are: any size of micro-batch for each group, of any part that is listed with it."""
    groups = problem.target.cluster.mixed.groups  # pyright: ignore[reportOptionalMemberAccess]
    batch, found = problem.space.training.global_batch_size, list[Layout]()
    alike = {part._replace(groups=(), micro_batch_size=0, num_microbatches=0) for part in problem.space.shares}
    for layout in alike:
        replicas = [group.cluster.num_devices // (layout.mesh.cp * layout.mesh.tp) for group in groups]
        for sizes in lists_of_sizes(batch, replicas):
            found.append(
                layout._replace(
                    groups=tuple(group.name for group in groups),
                    shares=sizes,
                    micro_batch_size=max(sizes),
                    num_microbatches=batch // sum(map(mul, replicas, sizes)),
                )
            )
    return found


# -- what comes out ---------------------------------------------------------------------------------


def test_the_faster_group_takes_more_of_the_batch() -> None:
    plan = plan_on()
    shares = {share.device_group: share.micro_batch_size for share in plan.pipeline.batch_shares}
    assert shares[H100] > shares[A100] >= 1
    assert plan.mesh.pp == 1
    assert contradictions(plan) == []
    assert plan.search is not None
    assert plan.search.status == "OPTIMAL"  # though one list of sizes needs recomputation on one group alone
    assert seconds_of(plan) < seconds_of(plan_on(A100 + ":16")) * 0.8
    assert seconds_of(plan) > seconds_of(plan_on(H100 + ":16"))
    assert any("ranks 0 to 7 on" in warning for warning in plan.warnings)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_without_shares_all_count_as_the_weakest() -> None:
    """A pinned micro-batch is one for all replicas."""
    alike = plan_on(MIXED, Pins(pp=1, micro_batch=1))
    assert alike.pipeline.batch_shares == ()
    assert "batch_shares" not in json.loads(alike.model_dump_json())["pipeline"]
    assert seconds_of(alike) == pytest.approx(seconds_of(plan_on(A100 + ":16", Pins(pp=1, micro_batch=1))), rel=0.02)
    assert seconds_of(plan_on()) < seconds_of(alike)


def test_estimate_names_the_same_price() -> None:
    plan = plan_on()
    again = price_plan(plan).plan
    assert again.prediction == plan.prediction
    assert again.pipeline == plan.pipeline


def test_everything_that_shows_a_plan_shows_shares(tmp_path: Path) -> None:
    plan = plan_on()
    assert show_plan(plan)
    timeline, _ = schedule_plan(plan)
    assert timeline.step_time_s == pytest.approx(seconds_of(plan))
    assert timeline.groups == tuple(share.device_group for share in plan.pipeline.batch_shares)
    ends = [max(span.end_s for span in rank.actions if span.action) for rank in timeline.ranks]
    assert max(ends) == pytest.approx(timeline.pipeline_s)
    assert min(ends) > 0.5 * timeline.pipeline_s
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    for target in ("megatron", "deepspeed", "torchtitan", "torchrun"):
        found = CliRunner().invoke(
            app, ["export", str(path), "--to", target, "--gpus-per-node", "8"], standalone_mode=False
        )
        assert isinstance(found.exception, InputError)
        assert "unlike devices" in str(found.exception)


def test_explain_prices_all_that_it_names() -> None:
    plan = plan_on(batch=128)
    found = explain(plan)
    unlike = [each for each in found.runners_up if each.candidate is not None and each.candidate.micro_batch_sizes]
    assert unlike
    assert all(each.differences_s is not None for each in unlike)
    assert sum(found.time_s.values()) == pytest.approx(seconds_of(plan))
    assert found.compute.seconds == pytest.approx(found.time_s[next(t for t in found.time_s if t.value == "compute")])


def test_other_devices_are_refused_and_planned_anew() -> None:
    plan = plan_on()
    with pytest.raises(PlanError, match=r"batch_shares are those of 16 GPUs"):
        price_plan(plan, num_devices=32)
    with pytest.raises(PlanError, match="has no groups"):
        price_plan(plan, hardware=H100)
    assert replan(plan, 8, hardware=H100).plan.pipeline.batch_shares == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batch_size": 9}, "micro_batch_size: must be the largest of batch_shares"),
        ({"num_microbatches": 3}, "is not num_microbatches \\* the sum of"),
    ],
)
def test_shares_that_contradict_the_batch_are_refused(change: dict[str, int], words: str) -> None:
    plan = plan_on()
    pipeline = plan.pipeline.model_copy(update=change)
    (found, *_) = contradictions(plan.model_copy(update={"pipeline": pipeline}))
    assert re.search(words, found)


def test_shares_need_whole_replicas_and_no_pipeline() -> None:
    plan = plan_on()
    first, second = plan.pipeline.batch_shares
    shares = (first.model_copy(update={"num_replicas": first.num_replicas + 1}), second)
    twice = (first, second.model_copy(update={"device_group": first.device_group}))
    for changed, words in ((shares, "must add up to"), (twice, "stands twice")):
        pipeline = plan.pipeline.model_copy(update={"batch_shares": changed})
        found = contradictions(plan.model_copy(update={"pipeline": pipeline}))
        assert any(words in each for each in found), found
    mesh = plan.mesh.model_copy(update={"pp": 2, "dp_shard": plan.mesh.dp_shard // 2})
    assert any("without a pipeline" in each for each in contradictions(plan.model_copy(update={"mesh": mesh})))


# -- held against trying everything -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "batch"),
    [
        (f"{A100}:2,{H100}:2", 12),
        (f"{H100}:4,{A100}:2", 20),  # of 6 devices that do not divide it
        (f"{A100}:1,{H100}:2,{A100}:1", 8),
    ],
)
def test_the_search_finds_what_pricing_every_layout_finds(hardware: str, batch: int) -> None:
    problem = problem_on(hardware, batch=batch, pins=Pins(pp=1, recompute=Recompute.NONE))
    listed = every_layout(problem)
    parts = list(dict.fromkeys(part for layout in listed for part in layout.parts))
    table = build_table(problem.target, problem.space.training, problem.decisions, parts)
    priced = [evaluator_of(table, layout).evaluate((0,)) for layout in listed]
    least_s = min(each.step_time_s for each in priced if each.fits)
    outcome = problem.solved()
    assert outcome.best is not None
    alike = [each for each in outcome.ranking if not each.layout.shares]
    assert outcome.best.step_time_s == pytest.approx(min(least_s, *(each.step_time_s for each in alike)), rel=1e-3)
    assert outcome.is_exhausted
    assert outcome.bound_s <= outcome.best.step_time_s
    assert outcome.num_candidates == len(problem.space.layouts) + len(listed)


def test_where_memory_is_short_the_search_finds_what_pricing_everything_finds() -> None:
    """Every list of sizes in every mode that is one for all blocks; a block may have one of its own."""
    hardware = "l40s-x8:2,dgx-h100-80gb:2"
    problem = problem_on(hardware, model="gpt2-1.5b", batch=24, pins=Pins(pp=1, tp=1, zero=1))
    outcome = problem.solved()
    assert outcome.best is not None
    least_s = float("inf")
    for layout in every_layout(problem):
        for mode in Recompute:
            found = evaluator_of(problem.table, layout, [mode] * len(problem.table.units.kinds)).evaluate((0,))
            least_s = min(least_s, found.step_time_s if found.fits else least_s)
    assert outcome.best.layout.shares
    assert outcome.best.step_time_s <= least_s * (1 + 1e-3)
    assert outcome.bound_s <= least_s


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_cluster_is_never_slower_than_without_shares(seed: int) -> None:
    draw = random.Random(seed)
    kinds = draw.sample([A100, H100, "l40s-x8", "dgx-h200"], 2)
    hardware = ",".join(f"{kind}:{draw.choice((1, 2, 4))}" for kind in kinds)
    problem = problem_on(hardware, batch=draw.choice((12, 16, 30, 48)))
    empty = Columns.of(Layout, ())
    without = replace(problem, space=replace(problem.space, shares=empty)).solved()
    outcome = problem.solved()
    assert outcome.best is not None
    assert without.best is not None
    assert outcome.best.step_time_s <= without.best.step_time_s
    assert outcome.bound_s <= without.best.step_time_s


def test_groups_twice_as_fast_take_twice_as_much() -> None:
    """In closed form: with times that grow with the size alone, t_g = b / rate, all groups end together."""
    replicas, rates = (2, 3), (1.0, 2.0)
    for scale in (1, 2, 5):
        sizes = _lists(scale * (2 * 1 + 3 * 2), replicas, (64, 64))
        times = [max(size / rate for size, rate in zip(each, rates, strict=True)) for each in sizes.tolist()]
        best = sizes[times.index(min(times))].tolist()
        assert best == [scale, 2 * scale]


def test_lists_of_sizes_are_all_there_are() -> None:
    for replicas in ((1, 2), (2, 2), (1, 3, 2)):
        for batch in range(sum(replicas), 30):
            wanted = {
                sizes for sizes in product(range(1, 9), repeat=len(replicas)) if sum(map(mul, replicas, sizes)) == batch
            }
            assert set(map(tuple, _lists(batch, replicas, (8,) * len(replicas)).tolist())) == wanted


@pytest.mark.parametrize(
    ("hardware", "model", "pins"),
    [(f"{A100}:2,{H100}:2", "llama-tiny", NO_PINS), ("l40s-x8:2,dgx-h100-80gb:2", "gpt2-1.5b", Pins(tp=1, pp=1))],
)
def test_no_layout_is_faster_than_what_is_known_of_its_groups(hardware: str, model: str, pins: Pins) -> None:
    """By the bound of each group, and by its price; what is bounded not to fit does not."""
    problem, draw = problem_on(hardware, model=model, batch=24, pins=pins), random.Random(1)
    parts = problem.space.shares
    bound_s = dict(
        zip(parts, _least_of_parts(problem.table, parts, float("inf"), Deadline.never()).tolist(), strict=True)
    )
    known = 0
    for layout in draw.sample(every_layout(problem), 60):
        found: Evaluated | None = priced(problem.table, layout)
        of_groups = [_part(problem.table, part) for part in layout.parts]
        fitting = [part for part in of_groups if part is not None]
        for part, bound in zip(of_groups, (bound_s[part] for part in layout.parts), strict=True):
            if part is not None:
                assert bound <= (part.least_s + part.extra_s + part.data_once_s + part.update_s) * ROUNDING
        if found is not None:
            assert max(bound_s[part] for part in layout.parts) <= _least_s(fitting) * ROUNDING
            assert _least_s(fitting) <= found.step_time_s
            known += 1
    assert known > 20


def test_a_layout_says_what_each_group_runs() -> None:
    layout = Layout(
        Mesh(dp_shard=4), 3, 3, 2, ScheduleName.ONE_F_ONE_B, 1, None, False, groups=("a", "b"), shares=(1, 3)
    )
    assert [(part.groups, part.micro_batch_size, part.shares) for part in layout.parts] == [
        (("a",), 1, ()),
        (("b",), 3, ()),
    ]
    assert layout.parts[0].parts == (layout.parts[0],)


def test_what_is_not_looked_at_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of many lists of one family nor of those that are never listed is anything proved."""
    problem = problem_on(f"{A100}:2,{H100}:2", batch=24, pins=Pins(pp=1, tp=1))
    whole = problem.solved()
    assert whole.best is not None
    for name, number in (("MOST_LISTS", 1), ("MOST_TRIED", 1), ("MOST_PRICED", 1)):
        monkeypatch.setattr(shares, name, number)
        part = problem.solved()
        assert part.best is not None
        assert part.bound_s <= whole.best.step_time_s <= part.best.step_time_s
        assert part.is_exhausted == (part.bound_s >= part.best.step_time_s * (1 - 1e-3))
        monkeypatch.undo()


def test_the_floor_of_a_family_is_below_its_lists() -> None:
    draw = np.random.default_rng(0)
    for replicas, sequences in (((1, 2), 9), ((2, 2), 12), ((1, 3, 2), 17)):
        seconds = np.cumsum(draw.random((len(replicas), 9)), axis=1)
        seconds[:, 0] = np.nan
        lists = _lists(sequences, replicas, (8,) * len(replicas))
        least_s = seconds[np.arange(len(replicas)), lists].max(axis=1).min()
        assert 0.4 * least_s < _floor_s(replicas, sequences, seconds) <= least_s
        assert _floor_s(replicas, 1000, seconds) == float("inf")
