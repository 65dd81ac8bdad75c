"""A search over a small instance finds what trying everything finds: ``benchmarks.optimality_oracle`` on a sample."""

import pytest

from benchmarks.judging.graphs import Graphs
from benchmarks.judging.oracle import Oracle, disagreement, instance_of
from benchmarks.judging.questions import ask

SEED = 0


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.mark.parametrize("index", range(10))
def test_the_search_says_what_the_oracle_says(index: int, graphs: Graphs) -> None:
    question = instance_of(SEED, index, graphs, is_small=True)
    best = Oracle.of(question, graphs).best()
    assert best.is_whole
    assert disagreement(ask(question), best) == "", f"{question}: the oracle's plan is {best.choice}"
