"""Fits the cost of collectives to half of the sizes timed on a virtual cluster, and predicts the other half.

``python -m benchmarks.collective_fit`` starts 2 hosts with 2 processes each and a 500 Mbit/s link between them, runs
``planner profile`` there, keeps every second size from the fit, and writes median errors to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.virtual_cluster import virtual_cluster, why_unavailable
from hardware_profiles.probes.detect import detect, nearest_profile
from hardware_profiles.probes.measurement import ClusterMeasurement, CollectiveTiming
from hardware_profiles.schema import ClusterProfile, ClusterSpec
from planner.calibration.held_back import predicted_collective_s, without_half_of_collectives
from planner.calibration.profile import profile_of

RESULTS = Path(__file__).parent / "results"
TARGET_MEDIAN_ERROR = 0.15


@dataclass(frozen=True)
class Row:
    """One timing that the fit has not seen, beside its prediction."""

    kind: str
    num_ranks: int
    stride: int
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1)


def predict(profile: ClusterProfile, held: Sequence[CollectiveTiming], num_devices: int) -> list[Row]:
    """The cost model's answer to each timing."""
    cluster = ClusterSpec(profile=profile, num_devices=num_devices)
    return [
        Row(
            kind=t.kind,
            num_ranks=t.num_ranks,
            stride=t.stride,
            num_bytes=t.num_bytes,
            measured_s=t.time_s,
            predicted_s=predicted_collective_s(cluster, t),
        )
        for t in held
    ]


def measure(num_hosts: int, processes: int, link_mbit: float) -> ClusterMeasurement:
    """``planner profile`` on a virtual cluster."""
    with tempfile.TemporaryDirectory() as folder, virtual_cluster(num_hosts, link_mbit * 1e6) as cluster:
        timings = Path(folder) / "timings.json"
        profile = Path(folder) / "profile.json"
        cluster.torchrun(processes, ["-m", "planner", "profile", "-o", str(profile), "--timings", str(timings)])
        return ClusterMeasurement.model_validate_json(timings.read_text())


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Median error over all rows, and by kind and placement."""
    groups: dict[str, list[float]] = {"all": [row.error for row in rows]}
    for row in rows:
        groups.setdefault(row.kind, []).append(row.error)
        groups.setdefault(f"{row.num_ranks} ranks at distance {row.stride}", []).append(row.error)
    return {name: statistics.median(errors) for name, errors in groups.items()}


def main() -> None:
    """Measures, fits, predicts, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2, help="ranks on every host")
    parser.add_argument("--link-mbit", type=float, default=500.0)
    parser.add_argument("--timings", type=Path, help="what `planner profile --timings` wrote, instead of a new run")
    parser.add_argument("--dry-run", action="store_true", help="write no results")
    given = parser.parse_args()
    if given.timings is None:
        reason = why_unavailable()
        if reason is not None:
            print(f"skipped: {reason}")
            return
        measurement = measure(given.hosts, given.processes, given.link_mbit)
    else:
        measurement = ClusterMeasurement.model_validate_json(given.timings.read_text())
    fitted, held = without_half_of_collectives(measurement)
    profile = profile_of(fitted, nearest_profile(detect())[0])
    rows = predict(profile, held, measurement.num_ranks)
    for row in rows:
        print(f"{row.kind:15}{row.num_ranks:3} ranks at distance {row.stride:2}{row.num_bytes:12,} bytes  "
              f"measured {row.measured_s * 1e3:9.3f} ms  predicted {row.predicted_s * 1e3:9.3f} ms  "
              f"error {row.error:6.1%}")  # fmt: skip
    medians = summary(rows)
    for name, error in medians.items():
        print(f"median error, {name}: {error:.1%}")
    verdict = "met" if medians["all"] <= TARGET_MEDIAN_ERROR else "MISSED"
    print(f"target of {TARGET_MEDIAN_ERROR:.0%}: {verdict}")
    if not given.dry_run:
        write_results(given, measurement, profile, rows)


def write_results(
    given: argparse.Namespace, measurement: ClusterMeasurement, profile: ClusterProfile, rows: Sequence[Row]
) -> None:
    """One markdown and one JSON file, named after cluster and day."""
    RESULTS.mkdir(exist_ok=True)
    name = f"collective_fit_gloo-{given.hosts}x{given.processes}_{measurement.date}"
    medians = summary(rows)
    link = profile.tiers[-1].bandwidth_bytes_per_s.value * 8 / 1e6
    document = {
        "cluster": {"hosts": given.hosts, "processes_per_host": given.processes, "link_mbit_per_s": given.link_mbit},
        "tool": measurement.tool,
        "date": str(measurement.date),
        "domains": measurement.domains,
        "measured_link_mbit_per_s": link,
        "median_error": medians,
        "rows": [{**asdict(row), "error": row.error} for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        f"# Collectives predicted at sizes that the fit has not seen, {measurement.date}",
        "",
        f"Virtual cluster of {given.hosts} hosts (network namespaces) with {given.processes} gloo processes each, "
        f"links of {given.link_mbit:g} Mbit/s between hosts; {measurement.tool}.",
        "`python -m benchmarks.collective_fit` runs `planner profile`, fits the profile to every second size, and",
        "predicts the others with `costmodels.communication`.",
        "",
        f"Tiers found, in devices: {list(measurement.domains)}. Bandwidth found for the link: {link:.0f} Mbit/s.",
        "",
        "| held-back timings | number | median error |",
        "|---|---|---|",
        *(f"| {group} | {_count(rows, group)} | {error:.1%} |" for group, error in medians.items()),
        "",
        "Every row stands in the JSON file beside this one.",
    ]
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
    print(f"wrote {(RESULTS / name).relative_to(RESULTS.parents[1])}.md and .json")


def _count(rows: Sequence[Row], group: str) -> int:
    return sum(group in ("all", row.kind, f"{row.num_ranks} ranks at distance {row.stride}") for row in rows)


if __name__ == "__main__":
    main()
