import pytest

from costmodels.step import optimizer_step_line
from tests.unit.costmodels.toy_cluster import BANDWIDTH, make_device


def test_the_optimiser_step_reads_and_writes_its_state_once() -> None:
    device = make_device()
    for optimizer, num_bytes in (("adamw", 28), ("sgd", 12), ("sgd-momentum", 32)):
        latency_s, s_per_element = optimizer_step_line(optimizer, device)
        assert latency_s == device.kernel_launch_s.value
        assert s_per_element == pytest.approx(num_bytes / (0.8 * BANDWIDTH))
    _, with_copies = optimizer_step_line("adamw", device, extra_bytes=6)
    assert with_copies == pytest.approx(34 / (0.8 * BANDWIDTH))
    with pytest.raises(ValueError, match="optimizer must be one of adamw, adam, sgd, sgd-momentum, got 'lion'"):
        optimizer_step_line("lion", device)
