"""Settings that every test shares."""

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# The same examples on every run and machine, so that a red test stays red; shared cores make deadlines meaningless.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Configurations are files of ours: a test that reaches for a model hub is wrong, and says so at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection of garbage is to look through all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kept_traces(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Traces are kept for this session alone: the user's cache is left alone, and no model is traced twice.

    Processes of pytest-xdist share them; each has a folder of its own inside the session's.
    """
    own = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"))
        yield
