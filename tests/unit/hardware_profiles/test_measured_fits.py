"""The measured efficiencies in the profiles reproduce the measurements they are fitted to."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from hardware_profiles.catalog import load_profile

ROOT = Path(__file__).parents[3]
DATA_FOLDERS = (ROOT / "shared" / "data", ROOT.parent / "shared" / "data")  # inside the checkout, or beside it


def _rows(name: str) -> list[dict[str, str]]:
    path = next((folder / name for folder in DATA_FOLDERS if (folder / name).is_file()), None)
    if path is None:
        pytest.skip(f"shared/data/{name} is neither in this checkout nor beside it")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("profile", "device", "largest_error"),
    [("a100-pcie-80gb", "A100-80GB-PCIe", 0.05), ("dgx-b200", "B200-180GB-SXM", 0.115)],
)
def test_gemm_times_follow_from_the_profile(profile: str, device: str, largest_error: float):
    shape = load_profile(profile).device
    fit = shape.efficiency["gemm"]
    half = fit.half_size_flops.value if fit.half_size_flops else 0.0
    errors: list[float] = []
    for row in _rows("operator_measurements.csv"):
        if row["device"] != device or row["op"] != "gemm" or not row["efficiency"]:
            continue
        flops = 2.0 * int(row["m"]) * int(row["k"]) * int(row["n"])
        peak = float(row["peak_flops_per_s"])
        assert peak == shape.peak_flops_per_s["bf16"].value
        measured_s = flops / (peak * float(row["efficiency"]))
        predicted_s = shape.kernel_launch_s.value + (flops + half) / (peak * fit.fraction.value)
        errors.append(abs(predicted_s / measured_s - 1))
    assert len(errors) > 150
    assert statistics.mean(errors) < largest_error


@pytest.mark.parametrize(("profile", "device"), [("dgx-a100-80gb", "A100"), ("dgx-1-v100-32gb", "V100")])
def test_all_reduce_times_inside_a_node_follow_from_the_profile(profile: str, device: str):
    tier = load_profile(profile).tiers[0]
    errors: list[float] = []
    for row in _rows("collective_measurements.csv"):
        if row["device"] != device or row["ranks"] != "8" or not row["time_s"]:
            continue
        num_ranks, num_bytes = 8, float(row["bytes"])
        wire_s = 2 * num_bytes * (num_ranks - 1) / num_ranks
        wire_s /= tier.bandwidth_bytes_per_s.value * tier.efficiency.value
        predicted_s = 2 * (num_ranks - 1) * tier.latency_s.value + wire_s
        errors.append(abs(math.log(predicted_s / float(row["time_s"]))))
    assert len(errors) == 11
    assert statistics.mean(errors) < 0.15
