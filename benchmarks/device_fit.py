"""Fits the cost of operators to half of the shapes timed on this device, and predicts the other half.

``python -m benchmarks.device_fit`` times matrix products and attention as ``planner profile`` does, keeps every second
shape from the fit, and writes median errors to ``benchmarks/results/``. It runs on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hardware_profiles.probes.detect import detect, nearest_profile
from hardware_profiles.probes.hosts import host_facts
from hardware_profiles.probes.measurement import ClusterMeasurement, OpTiming
from hardware_profiles.probes.profiler import measure_device
from hardware_profiles.schema import DeviceProfile
from planner.calibration.device import device_of
from planner.calibration.held_back import HELD_CLASSES, predicted_operator_s, without_half_of_operators

RESULTS = Path(__file__).parent / "results"
TARGET_MEDIAN_ERROR = 0.05


@dataclass(frozen=True)
class Row:
    """One shape that the fit has not seen."""

    op_class: str
    dtype: str
    shape: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1)


def measure(*, quick: bool) -> ClusterMeasurement:
    """The device alone, as ``planner profile`` times it."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    detected = detect()
    own = measure_device(device, detected, lambda text: print(text, file=sys.stderr, flush=True), quick=quick)
    return ClusterMeasurement(
        date=datetime.date.today(),
        tool=f"benchmarks.device_fit with torch {torch.__version__.partition('+')[0]}",
        backend="nccl" if device.type == "cuda" else "gloo",
        hosts=(host_facts(detected),),
        devices=(own,),
    )


def predict(device: DeviceProfile, held: Sequence[OpTiming], dtype: str) -> list[Row]:
    """The cost model's answer to each shape in ``dtype``."""
    return [
        Row(op.op_class, op.dtype, op.shape, op.time_s, predicted_operator_s(device, op))
        for op in held
        if op.dtype == dtype
    ]


def main() -> None:
    """Measures, fits, predicts, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--timings", type=Path, help="what `planner profile --timings` wrote, instead of a new run")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    given = parser.parse_args()
    if given.timings is None:
        measurement = measure(quick=given.quick)
    else:
        measurement = ClusterMeasurement.model_validate_json(given.timings.read_text())
    first = measurement.devices[0]
    kept, held = without_half_of_operators(first.operators)
    fitted = measurement.model_copy(update={"devices": (first.model_copy(update={"operators": kept}),)})
    device = device_of(fitted, nearest_profile(detect())[0])
    rows = predict(device, held, "fp32" if first.device_name == "cpu" else "bf16")
    for row in rows:
        print(f"{row.op_class:10} {row.dtype} {row.shape:32} measured {row.measured_s * 1e6:11.1f} us  "
              f"predicted {row.predicted_s * 1e6:11.1f} us  error {row.error:6.1%}")  # fmt: skip
    medians = {name: statistics.median(row.error for row in rows if row.op_class == name) for name in HELD_CLASSES}
    for name, error in medians.items():
        print(f"median error of {name}: {error:.1%} (target {TARGET_MEDIAN_ERROR:.0%})")
    if not given.dry_run:
        write_results(measurement, device, rows, medians)


def write_results(
    measurement: ClusterMeasurement, device: DeviceProfile, rows: Sequence[Row], medians: dict[str, float]
) -> None:
    """One markdown and one JSON file, named after device and day."""
    RESULTS.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    name = f"device_fit_{slug}_{measurement.date}"
    document = {
        "device": measurement.devices[0].device_name,
        "tool": measurement.tool,
        "median_error": medians,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    counts = {group: sum(row.op_class == group for row in rows) for group in HELD_CLASSES}
    lines = [
        f"# Operators predicted at shapes that the fit has not seen: {device.name}, {measurement.date}",
        "",
        f"{measurement.tool}. `python -m benchmarks.device_fit` fits the device's profile to every second shape and",
        "predicts the others with `costmodels.compute`.",
        "",
        "| operators | shapes held back | median error |",
        "|---|---|---|",
        *(f"| {group} | {counts[group]} | {error:.1%} |" for group, error in medians.items()),
        "",
        "Every row stands in the JSON file beside this one.",
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(f"wrote benchmarks/results/{name}.md and .json")


if __name__ == "__main__":
    main()
