"""torchrun: a shell script that starts ``planner run`` on every node."""

from __future__ import annotations

from planner.formats import launch
from planner.formats.documents import commented
from planner.formats.settings import Job
from planner.formats.target import Target, Written

VERSION = "torchrun of torch 2.13"


def write(job: Job) -> Written:
    """A bash script; over several nodes each runs it with its NODE_RANK and the first node's MASTER_ADDR."""
    notes = ["planner, torch and the model's file must be on every node, and the plan at the same path"]
    if job.num_nodes > 1:
        notes.append("on every node set NODE_RANK (0, 1, ...) and MASTER_ADDR (the first node's name)")
    check = ': "${NODE_RANK:?the number of this node, from 0}" "${MASTER_ADDR:?the name of the first node}"\n'
    text = (
        "#!/usr/bin/env bash\n"
        + commented([f"{VERSION}, written by planner export from {job.plan_path}", *notes])
        + "set -euo pipefail\n"
        + (check if job.num_nodes > 1 else "")
        + f'exec torchrun {launch.spread(job)} {launch.RENDEZVOUS} {launch.planner_run(job)} "$@"\n'
    )
    return Written(text, tuple(notes))


TARGETS = (
    Target(
        name="torchrun",
        version=VERSION,
        sources=("pytorch/pytorch@v2.13.0: torch/distributed/run.py",),
        write=write,
        limits=launch.limits,
    ),
)
