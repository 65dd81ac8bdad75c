"""SLURM: an sbatch script that starts ``planner run`` with one torchrun on every node."""

from __future__ import annotations

from planner.formats import launch
from planner.formats.documents import commented
from planner.formats.settings import Job
from planner.formats.target import Target, Written

VERSION = "SLURM, 19.05 or later"  # the first with --gpus-per-node


def write(job: Job) -> Written:
    """The script; its options are those of sbatch's manual page, its torchruns meet at the first node."""
    notes = (
        "partition, account and time limit are left to you: sbatch --partition=... --account=... --time=... FILE",
        "planner, torch and the model's file must be on every node, and the plan at the same path",
    )
    directives = "".join(
        f"#SBATCH --{option}\n"
        for option in (
            f"job-name={launch.job_name(job)}",
            f"nodes={job.num_nodes}",
            "ntasks-per-node=1",
            f"gpus-per-node={job.devices_on_node}",
            "exclusive",
        )
    )
    text = (
        "#!/usr/bin/env bash\n"
        + directives
        + commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
        + "set -euo pipefail\n"
        + 'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        + "MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
        + f"srun --kill-on-bad-exit=1 torchrun {launch.spread(job)} "
        + '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" '
        + f'{launch.planner_run(job)} "$@"\n'
    )
    return Written(text, notes)


TARGETS = (
    Target(
        name="slurm",
        version=VERSION,
        sources=(
            "pytorch/pytorch@v2.13.0: torch/distributed/run.py",
            "sbatch(1), srun(1), scontrol(1): options in general use, their pages not read for this file",
        ),
        write=write,
        limits=launch.limits,
    ),
)
