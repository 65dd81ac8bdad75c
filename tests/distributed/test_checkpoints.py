"""One run passes through layouts, a checkpoint between each and the next, as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import CLIP_NORM, JOURNEYS

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", JOURNEYS)
def test_every_layout_goes_on_from_the_one_before(name: str, outcomes: dict[str, Any]) -> None:
    """Losses, norms over all meshes and stages, and evaluations, beside one process that never stops."""
    outcome, steps = outcomes[name], len(JOURNEYS[name])
    for key, expected in outcome["expected"].items():
        assert len(expected) == steps
        assert outcome[key] == pytest.approx(expected, rel=TOLERANCE), key
    assert min(outcome["norms"]) > CLIP_NORM
    assert outcome["losses"][-1] != pytest.approx(outcome["losses"][0], rel=1e-3)  # something was learned


@pytest.mark.parametrize("name", JOURNEYS)
def test_damaged_and_foreign_checkpoints_are_refused(name: str, outcomes: dict[str, Any]) -> None:
    outcome, steps = outcomes[name], len(JOURNEYS[name])
    assert outcome["kept"] == [f"step-{steps - 1}", f"step-{steps}"]
    assert "cannot go on from" in outcome["foreign"]
    assert outcome["taken"] == f"step-{steps - 1}"
    assert outcome["left"] == [f"step-{steps - 1}", f"step-{steps}.damaged"]
