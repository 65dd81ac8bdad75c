"""SkyPilot: a task YAML that starts ``planner run`` with one torchrun on every node."""

from __future__ import annotations

import re
from collections.abc import Iterator

from planner.formats import launch
from planner.formats.documents import commented, yaml_text
from planner.formats.settings import Job
from planner.formats.target import Refusal, Target, Written

VERSION = "SkyPilot task YAML, documents at 0048bbf"
# SkyPilot's names of accelerators, by words that a profile's name of the GPU begins with and holds.
ACCELERATORS = (
    ("A100", "80GB", "A100-80GB"), ("A100", "40GB", "A100"), ("V100", "32GB", "V100-32GB"), ("V100", "16GB", "V100"),
    ("H100", "", "H100"), ("H200", "", "H200"), ("A10G", "", "A10G"), ("L40S", "", "L40S"),
    ("L4", "", "L4"),
)  # fmt: skip


def accelerator(device: str | None) -> str | None:
    """What SkyPilot calls the GPU; None where it is not known to have a name there."""
    words = re.split(r"[^A-Z0-9]+", (device or "").upper())
    return next((name for first, size, name in ACCELERATORS if words[0] == first and (not size or size in words)), None)


def limits(job: Job) -> Iterator[Refusal]:
    """A task names its accelerator."""
    yield from launch.limits(job)
    if accelerator(job.device) is None:
        known = ", ".join(name for *_words, name in ACCELERATORS)
        yield Refusal(f"it has no accelerator for {job.device or 'a GPU of no known name'} ({known} are known)",
                      "export with --to slurm, kubernetes or torchrun")  # fmt: skip


def write(job: Job) -> Written:
    """The task: the folder it is launched from, with the plan, is copied to every node."""
    notes = (
        "launch it from the folder that the plan's path is relative to: its files are copied to every node (workdir)",
        "cloud, region, disks, checkpoints and setup (planner and torch must be installed) are left to you",
    )
    run = (
        'MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        f"torchrun {launch.spread(job)} "
        '--node-rank "$SKYPILOT_NODE_RANK" --master-addr "$MASTER_ADDR" --master-port 29500 '
        f"{launch.planner_run(job)}\n"
    )
    document = {
        "name": launch.job_name(job),
        "workdir": ".",
        "num_nodes": job.num_nodes,
        "resources": {
            "accelerators": f"{accelerator(job.device)}:{job.devices_on_node}",
            **({"network_tier": "best"} if job.num_nodes > 1 else {}),
        },
        "run": run,
    }
    head = commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
    return Written(head + yaml_text(document), notes)


TARGETS = (
    Target(
        name="skypilot",
        version=VERSION,
        sources=(
            "skypilot-org/skypilot@0048bbf: docs/source/reference/yaml-spec.rst",
            "docs/source/running-jobs/distributed-jobs.rst; names of GPUs: docs/source/compute/gpus.rst, in part",
        ),
        write=write,
        limits=limits,
    ),
)
