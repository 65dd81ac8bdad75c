"""A search over a small instance finds what trying everything finds: ``benchmarks.optimality_oracle`` on a sample."""

import pytest

from benchmarks.judging.graphs import Graphs
from benchmarks.judging.oracle import Oracle, disagreement, instance_of
from benchmarks.judging.questions import Question, ask

SEED = 0


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("index", range(10))
def test_the_search_says_what_the_oracle_says(index: int, graphs: Graphs) -> None:
    says_as_the_oracle(instance_of(SEED, index, graphs, is_small=True), graphs)


@pytest.mark.parametrize("index", [9, 43])
def test_one_stage_a_rank_holds_any_blocks_where_backward_passes_are_split(index: int, graphs: Graphs) -> None:
    """The search cut InterleavedZeroBubble as nearly even with one stage a rank as with several, and said OPTIMAL."""
    says_as_the_oracle(instance_of(29, index, graphs, is_small=False), graphs)


def says_as_the_oracle(question: Question, graphs: Graphs) -> None:
    best = Oracle.of(question, graphs).best()
    assert best.is_whole
    assert disagreement(ask(question), best) == "", f"{question}: the oracle's plan is {best.choice}"
