"""No small change of a plan fits and is faster than the search says any is: a sample of the perturbation audit."""

from pathlib import Path

import pytest

from benchmarks.judging.audit import TOLERANCE, Auditor, question_of
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.questions import CRASHED, ask

SEED = 0
MOST_EDITS = 20  # of each plan: the command prices all


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("index", range(20))
def test_no_small_change_beats_what_the_search_says(index: int, graphs: Graphs, tmp_path: Path) -> None:
    question = question_of(SEED, index, graphs, is_small=True)
    reply = ask(question)
    assert reply.status != CRASHED, f"{question}: {reply.reason}"
    if reply.plan is None:
        pytest.skip(f"{question}: {reply.status}, which this audit says nothing of")
    verdict = Auditor.of(question, graphs, tmp_path, MOST_EDITS).verdict(reply.plan)
    assert verdict.agrees, f"{question}: the search says {verdict.plan_s} s, the estimate {verdict.estimated_s} s"
    assert sum(verdict.num_edits.values()) > 0
    best = [f"{edit.kind} {edit.text}: {edit.choice}" for edit, _ in verdict.refutations[:1]]
    assert not best, f"{question}: {verdict.best_gain:.2%} faster than said"


def test_a_cut_that_serves_one_schedule_is_tried_under_the_others(graphs: Graphs, tmp_path: Path) -> None:
    """Question 635 of seed 7, over unlike devices: another schedule with another border was 5.4 % faster."""
    question = question_of(7, 635, graphs, is_small=True)
    reply = ask(question)
    assert reply.plan is not None
    verdict = Auditor.of(question, graphs, tmp_path).verdict(reply.plan)
    assert sum(verdict.num_edits.values()) > 0
    assert verdict.improvement <= TOLERANCE, verdict.faster[:1]
