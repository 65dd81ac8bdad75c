"""Plans for one GPU, measured beside what was predicted: the step, the peak of allocated memory, and what kernels take.

``python -m benchmarks.one_gpu PLAN... --output FILE`` runs some steps of each plan, all in one process, and one more
under torch's profiler. A line of JSON a plan says: ``step_s`` and ``memory_bytes``, measured;
``predicted_step_s`` and ``predicted_memory_bytes``, from the plan; and the longest ``kernels`` by name, in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from costmodels.vocabulary.choices import Offload
from planner.cli.check import allocated_bytes
from planner.executor.build import loaded_model
from planner.executor.options import RunOptions
from planner.executor.ranks import process_group, quiet_torch
from planner.executor.train import Run, prepare, timed_step
from planner.executor.verify import WARM_UP_STEPS
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan

NUM_KERNELS, NAME_LENGTH = 25, 90


@contextlib.contextmanager
def alone(*, offloads: bool = False) -> Generator[torch.device]:
    """A process group of this process, unless torchrun started it; yields its device."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update({name: value for name, value in rank.items() if name not in os.environ})
    with quiet_torch(), process_group(offloads=offloads) as device:
        yield device


def kernels_of(run: Run, step: int) -> dict[str, float]:
    """Seconds of the longest kernels in one step, by name."""
    with torch.profiler.profile() as profiler:
        timed_step(run, step)
    names: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            names[event.key[:NAME_LENGTH]] += event.self_device_time_total / 1e6
    return dict(names.most_common(NUM_KERNELS))


def row(name: str, plan: Plan, device: torch.device, steps: int) -> dict[str, Any]:
    """What one plan came to."""
    assert plan.prediction is not None
    options = RunOptions(steps=WARM_UP_STEPS + steps + 1, seed=0)
    options.check_offload(plan.offload)
    run = prepare(plan, loaded_model(plan), options, device, None)
    for step in range(WARM_UP_STEPS):
        timed_step(run, step)
    torch.cuda.reset_peak_memory_stats(device)
    times = [timed_step(run, WARM_UP_STEPS + step).step_time_s for step in range(steps)]
    memory = torch.cuda.max_memory_allocated(device)
    return {
        "plan": name,
        "predicted_step_s": plan.prediction.step_time_s,
        "step_s": statistics.median(times),
        "steps_s": times,
        "predicted_memory_bytes": allocated_bytes(plan, 0),
        "memory_bytes": memory,
        "kernels": kernels_of(run, WARM_UP_STEPS + steps),
    }


def _forget() -> None:
    """Modules and their hooks refer to each other: the model before is to go before the next one comes."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    """Prints a line a plan, and writes all to ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU")
    plans = {file.stem: read_plan(file, trust=True) for file in options.plans}
    rows: list[dict[str, Any]] = []
    with alone(offloads=any(plan.offload is not Offload.NONE for plan in plans.values())) as device:
        for name, plan in plans.items():
            rows.append(row(name, plan, device, options.steps))
            _forget()
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "kernels"}), flush=True)
            if options.output is not None:
                options.output.write_text("\n".join(json.dumps(each) for each in rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
