import pytest

from costmodels.step import optimizer_step_s
from tests.unit.costmodels.toy_cluster import BANDWIDTH, make_device


def test_the_optimiser_step_reads_and_writes_its_state_once() -> None:
    device = make_device()
    assert optimizer_step_s(1e9, "adamw", device) == pytest.approx(28e9 / (0.8 * BANDWIDTH))
    assert optimizer_step_s(1e9, "sgd", device) == pytest.approx(12e9 / (0.8 * BANDWIDTH))
    assert optimizer_step_s(0, "adamw", device) == 0
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adam, sgd, got 'lion'"):
        optimizer_step_s(1, "lion", device)
