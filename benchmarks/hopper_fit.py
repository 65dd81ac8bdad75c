"""The share of an H100's peak that 16-bit matrix products reach in training: ``python -m benchmarks.hopper_fit``.

The recipe ``nemo`` has neutral rates, so runs of NeMo tell what the device does. Of every dense model and release in
``benchmarks/data/blind/runs.csv`` that ran in bf16 on H100s under NeMo, the run on the fewest GPUs is priced at several
fractions; the answer is the one at which the median of these runs is predicted without error. Nothing else is moved.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from statistics import median, quantiles

from benchmarks.published.data import BLIND_RUNS
from benchmarks.published.pricing import RunPricer
from hardware_profiles.catalog import load_profile
from hardware_profiles.schema import DeviceProfile
from planner.formats.run_table import Run, read_runs

PROFILE = "dgx-h100-80gb"
FRACTIONS = (0.60, 0.65, 0.70, 0.75, 0.80)


def main() -> int:
    """Exit code 0."""
    device, runs = load_profile(PROFILE).device, dense_runs()
    errors = {fraction: _errors(runs, device, fraction) for fraction in FRACTIONS}
    own = [_without_error([errors[fraction][place] for fraction in FRACTIONS]) for place in range(len(runs))]
    for run, fraction in zip(runs, own, strict=True):
        print(f"{run.id:<48} {run.source[-24:]:<24} {fraction:.3f}")
    middle = _without_error([median(errors[fraction]) for fraction in FRACTIONS])
    low, _, high = quantiles(own, n=4)
    print(f"{len(runs)} runs: median {middle:.3f}, quartiles of the runs' own {low:.3f} and {high:.3f}")
    return 0


def dense_runs() -> list[Run]:
    """Of each dense model and release in bf16 on H100s under NeMo, the run on the fewest GPUs."""
    found: dict[tuple[str, object], Run] = {}
    for run in read_runs(BLIND_RUNS):
        if not isinstance(run, Run) or run.step_time_s is None or run.architecture.experts:
            continue
        wanted = run.precision == "bf16" and run.software.framework == "nemo"
        if not wanted or not run.hardware.gpu_type.startswith("H100"):
            continue
        key = run.source, (run.architecture.hidden, run.architecture.seq_len)
        if key not in found or run.hardware.num_devices < found[key].hardware.num_devices:
            found[key] = run
    return list(found.values())


def with_fraction(device: DeviceProfile, fraction: float) -> DeviceProfile:
    """``device`` whose dense products reach ``fraction`` of the peak in 16 bits."""
    gemm = device.efficiency["gemm"]
    moved = gemm.model_copy(update={"fraction": gemm.fraction.model_copy(update={"value": fraction})})
    return device.model_copy(update={"efficiency": {**device.efficiency, "gemm": moved}})


def _errors(runs: Sequence[Run], device: DeviceProfile, fraction: float) -> list[float]:
    """ln(predicted / measured) of each run."""
    pricer = RunPricer(is_plain=True, devices={device.name: with_fraction(device, fraction)})
    return [math.log(pricer.price(run).priced.step_time_s / (run.step_time_s or 1.0)) for run in runs]


def _without_error(errors: Sequence[float]) -> float:
    """The fraction at which ``errors``, one for each of ``FRACTIONS``, cross zero; beyond these on the last line."""
    place = next((k for k in range(1, len(errors) - 1) if errors[k] <= 0), len(errors) - 1)
    (low, high), (above, below) = FRACTIONS[place - 1 : place + 1], errors[place - 1 : place + 1]
    return low + (high - low) * above / (above - below)


if __name__ == "__main__":
    sys.exit(main())
