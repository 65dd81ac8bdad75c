import pytest

from costmodels.step import optimizer_step_line, update_bytes
from tests.unit.costmodels.toy_cluster import BANDWIDTH, make_device


def test_the_optimiser_step_reads_and_writes_its_state_once() -> None:
    device = make_device()
    latency_s, s_per_element = optimizer_step_line(28, device)
    assert latency_s == device.kernel_launch_s.value
    assert s_per_element == pytest.approx(28 / (0.8 * BANDWIDTH))


def test_what_an_update_moves() -> None:
    assert [update_bytes(name) for name in ("adamw", "adam", "sgd", "sgd-momentum")] == [28, 28, 12, 32]
    assert [update_bytes(name, fuses_momentum=True) for name in ("adamw", "sgd", "sgd-momentum")] == [28, 12, 20]
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adam, sgd, sgd-momentum, got 'lion'"):
        update_bytes("lion")
