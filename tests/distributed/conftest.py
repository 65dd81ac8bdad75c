"""One world of four processes for all distributed tests: most of a start is importing torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
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


IS_WANTED = pytest.StashKey[bool]()  # whether any test that is run asks the world


@pytest.hookimpl(trylast=True)  # behind what leaves tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test of this folder, whichever comes first, the time to start the world, and puts the world last.

    What needs a quiet machine comes first; beside the other tests, which wait now and then, the world is at work.
    """
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    config.stash[IS_WANTED] = any(map(_asks_the_world, own))
    items.sort(key=lambda item: (_asks_the_world(item), item.get_closest_marker("quiet") is None))


def _asks_the_world(item: pytest.Item) -> bool:
    return "outcomes" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    """Random plans, those that planning refuses among them."""
    return list(islice(Draw(tmp_path_factory.mktemp("models") / "models.py", SEED).plans((WORLD_SIZE,)), NUM_PLANS))


@dataclass(frozen=True)
class World:
    """The launcher of the four processes, and the files that it and rank 0 write."""

    launcher: subprocess.Popen[bytes]
    words: Path
    outcomes: Path


@pytest.fixture(scope="session")
def world(drawn: list[Drawn], tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    """Every case, and every random plan that may be run, at work."""
    folder = tmp_path_factory.mktemp("world")
    plans, out, words = folder / "plans.json", folder / "outcomes.json", folder / "words"
    runnable = {f"random-{i}": each.plan.model_dump(mode="json") for i, each in enumerate(drawn) if not each.refusals}
    plans.write_text(json.dumps(runnable))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(WORLD_SIZE), "--module", "tests.distributed.world", str(out), str(plans)]
    with words.open("wb") as talk:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=talk, stderr=talk)
    yield World(launcher, words, out)
    launcher.terminate()
    launcher.wait(timeout=TEST_TIMEOUT_S)


@pytest.fixture(autouse=True)
def _world_beside(request: pytest.FixtureRequest) -> None:
    if request.config.stash[IS_WANTED] and request.node.get_closest_marker("quiet") is None:
        request.getfixturevalue("world")


@pytest.fixture(scope="session")
def outcomes(world: World) -> dict[str, Outcome]:
    """What every case came to, and every random plan, as rank 0 of the world wrote it."""
    if world.launcher.wait(timeout=WORLD_TIMEOUT_S) != 0:
        lines = world.words.read_text(errors="replace").splitlines()
        failures = [line for line in lines if not line.startswith(("W", "E"))]
        pytest.fail("the world of four processes failed:\n" + "\n".join(failures[:80]), pytrace=False)
    return json.loads(world.outcomes.read_text())
