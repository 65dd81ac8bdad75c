"""One world of four processes for all distributed tests: most of a start is importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.random_plans import Draw, Drawn
from tests.distributed.cases import WORLD_SIZE

REPOSITORY = Path(__file__).resolve().parents[2]
WORLD_TIMEOUT_S = 1500.0  # several times what slow, shared cores need: only a world that hangs reaches it
TEST_TIMEOUT_S = WORLD_TIMEOUT_S + 100.0  # pytest-timeout counts a fixture's time as that of the first test that asks
SEED, NUM_PLANS = 2026, 30  # of random plans
Outcome = dict[str, object]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives every test of this folder, whichever comes first, the time to start the world, and puts the world last.

    What waits now and then comes first, while lint runs beside it.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    items.sort(key=lambda item: "outcomes" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    """Random plans, those that planning refuses among them."""
    return list(islice(Draw(tmp_path_factory.mktemp("models") / "models.py", SEED).plans((WORLD_SIZE,)), NUM_PLANS))


@pytest.fixture(scope="session")
def outcomes(drawn: list[Drawn], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What every case came to, and every random plan that may be run, as rank 0 of the world wrote it."""
    folder = tmp_path_factory.mktemp("world")
    plans, out = folder / "plans.json", folder / "outcomes.json"
    runnable = {f"random-{i}": each.plan.model_dump(mode="json") for i, each in enumerate(drawn) if not each.refusals}
    plans.write_text(json.dumps(runnable))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", str(WORLD_SIZE), "--module", "tests.distributed.world", str(out), str(plans)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WORLD_TIMEOUT_S,
        check=False,
    )
    if result.returncode != 0:
        failures = [line for line in result.stderr.splitlines() if not line.startswith(("W", "E"))]
        pytest.fail("the world of four processes failed:\n" + "\n".join(failures[:80]), pytrace=False)
    return json.loads(out.read_text())
