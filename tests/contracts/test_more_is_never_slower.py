"""More memory, bandwidth, freedom or devices never make the best plan slower: some of ``benchmarks.never_slower``."""

from pathlib import Path

import pytest

from benchmarks.judging.graphs import Graphs
from benchmarks.judging.pairs import idle_question, leaves_devices_idle, lost, pair_of
from benchmarks.judging.questions import ask

SEED = 0


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def may_leave_devices_idle(graphs: Graphs) -> bool:
    return leaves_devices_idle(ask(idle_question(graphs)))


@pytest.mark.parametrize("index", range(12))  # every change once on every shape
def test_a_question_that_offers_more_has_no_slower_plan(
    index: int, graphs: Graphs, tmp_path: Path, may_leave_devices_idle: bool
) -> None:
    pair = pair_of(SEED, index, graphs, tmp_path, is_small=True)
    if pair.change == "twice the devices" and not may_leave_devices_idle:
        pytest.skip("the search uses every device, so more of them may be slower")
    before = ask(pair.before)
    assert lost(pair, before, ask(pair.after)) == "", f"{pair.change}: {pair.before}"
