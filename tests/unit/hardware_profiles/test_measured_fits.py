"""The measured efficiencies in the profiles reproduce the measurements they are fitted to."""

import csv
import math
import statistics
from pathlib import Path

import pytest

from costmodels.communication import collective_time_s
from costmodels.vocabulary.workload import Collective, CollectiveKind, GroupPlacement
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import ClusterSpec

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


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize(("profile", "device"), [("dgx-a100-80gb", "A100"), ("dgx-1-v100-32gb", "V100")])
def test_all_reduce_times_inside_a_node_follow_from_the_profile(profile: str, device: str, num_ranks: int):
    """Of all sizes of groups: without a switch two of eight V100 have a sixth of what all have.

    Of 16 MiB and more. Of smaller messages all-reduces of two A100 take up to twice as long as latencies of steps say.
    """
    cluster = ClusterSpec(profile=load_profile(profile), num_devices=8)
    errors: list[float] = []
    for row in _rows("collective_measurements.csv"):
        if (
            row["device"] != device
            or row["ranks"] != str(num_ranks)
            or not row["time_s"]
            or float(row["bytes"]) < 2**24
        ):
            continue
        asked = Collective(CollectiveKind.ALL_REDUCE, float(row["bytes"]), GroupPlacement(num_ranks, 1))
        errors.append(abs(math.log(collective_time_s(asked, cluster) / float(row["time_s"]))))
    assert len(errors) == 7
    assert statistics.mean(errors) < 0.08
