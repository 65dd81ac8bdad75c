"""Of plans that are predicted alike the simplest is taken, and it is said; the fastest is always beside it."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from costmodels.recipe import Recipe, load_recipe
from costmodels.vocabulary.choices import Preference, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import find_plan
from planner.layout.complexity import complexity
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.pricing.facts import framework_facts
from planner.problem import Problem
from planner.render import show_plan
from planner.request import Request
from planner.solver.cutting import Pricer, best_cut
from planner.solver.preference import MOST_TIE, simplest, tie_share
from planner.solver.search import Outcome, search
from tests.planning import problem_of

# Small enough that every point can be priced.
PROBLEMS = {
    "llama-tiny": problem_of("llama-tiny", 8, batch=16, seq_len=64, pins=Pins(cp=1, pp=1)),
    "gpt2": problem_of("gpt2-1.5b", 2, batch=8, pins=Pins(cp=1, schedule=ScheduleName.ONE_F_ONE_B)),
}


def outcome_of(problem: Problem) -> Outcome:
    return search(problem.table, problem.space.layouts, problem.solver)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("share", [0.002, 0.01])
def test_nothing_simpler_is_as_fast(name: str, share: float) -> None:
    """Held against every point of the space, cut and priced."""
    problem = PROBLEMS[name]
    outcome = outcome_of(problem)
    assert outcome.best is not None
    limit_s = outcome.best.step_time_s * (1 + share)
    priced = [best_cut(Pricer(problem.table, choice), problem.solver, None).best for choice in problem.space.layouts]
    alike = [p for p in priced if p is not None and p.step_time_s <= limit_s]
    expected = min(alike, key=lambda p: (complexity(p.layout), p.step_time_s))
    found = simplest(problem.table, outcome, limit_s, problem.solver) or outcome.best
    assert complexity(found.layout) == complexity(expected.layout)
    assert found.step_time_s == pytest.approx(expected.step_time_s)


def test_only_a_measured_error_makes_plans_equal() -> None:
    recipe = load_recipe()
    assert recipe.error_band is not None
    assert share_of(recipe) == MOST_TIE
    narrow = recipe.error_band.model_copy(update={"between_layouts": 0.0004})
    assert share_of(recipe.model_copy(update={"error_band": narrow})) == 0.0004
    assert share_of(recipe.model_copy(update={"error_band": None})) == 0.0


def share_of(recipe: Recipe) -> float:
    posed = PROBLEMS["llama-tiny"]
    return tie_share(replace(posed.table, framework=framework_facts(replace(posed.target, recipe=recipe))))


def asked(prefer: Preference) -> Plan:
    request = Request("gpt2-1.5b", 8, hardware="dgx-a100-80gb", global_batch_size=512, seq_len=1024, prefer=prefer)
    return find_plan(request).plan


def test_the_simplest_is_no_slower_than_what_counts_as_equal() -> None:
    simple, fastest = asked(Preference.SIMPLE), asked(Preference.FASTEST)
    for plan in (simple, fastest):
        assert plan.search is not None
        assert plan.prediction is not None
        assert plan.search.status == "OPTIMAL"
        assert plan.search.gap <= MOST_TIE  # nothing is called optimal beside a larger gap
        assert plan.search.baseline is not None
        assert plan.prediction.step_time_s <= plan.search.baseline.step_time_s * (1 + 1e-9)
    assert simple.prediction is not None
    assert fastest.prediction is not None
    assert fastest.prediction.step_time_s <= simple.prediction.step_time_s
    assert simple.prediction.step_time_s <= fastest.prediction.step_time_s * (1 + MOST_TIE)


def test_the_choice_is_explained() -> None:
    plan = asked(Preference.SIMPLE)
    assert plan.search is not None
    console = Console(file=StringIO(), width=400, no_color=True)
    console.print(show_plan(plan))
    assert "layouts is faster within the cost model" in console.file.getvalue()  # type: ignore[attr-defined]
    (first, *others) = plan.search.runners_up
    close = first.model_copy(update={"step_time_s": 0.9995 * first.step_time_s})
    preferred = plan.search.model_copy(update={"preferred_within": MOST_TIE, "runners_up": (close, *others)})
    console.print(show_plan(plan.model_copy(update={"search": preferred})))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "#2 is fastest within the cost model, by at most 0.1%" in text
    assert "This one is simpler" in text


def test_what_is_simpler() -> None:
    choice = PROBLEMS["llama-tiny"].space.layouts[0]
    plain = choice._replace(
        mesh=replace(choice.mesh, pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1), zero_stage=3, recompute=Recompute.NONE
    )
    harder = [
        plain._replace(zero_stage=2),
        plain._replace(recompute=Recompute.FULL),
        plain._replace(mesh=replace(plain.mesh, dp_shard=4, dp_replicate=2)),
        plain._replace(mesh=replace(plain.mesh, dp_shard=4, tp=2)),
        plain._replace(mesh=replace(plain.mesh, dp_shard=4, pp=2)),
    ]
    numbers = [complexity(c) for c in (plain, *harder)]
    assert numbers[0] == min(numbers)
    assert complexity(harder[-1]) > complexity(harder[0])
