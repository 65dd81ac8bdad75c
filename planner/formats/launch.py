"""Starting one process a GPU on every node, for the targets that start ``planner run`` and those that need torchrun."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from planner.formats.settings import Job
from planner.formats.target import Refusal

# Of torchrun (torch 2.13, torch/distributed/run.py), from the variables that its own workers, Kubeflow and many
# clusters set. One node needs none of them.
RENDEZVOUS = (
    '--node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"'
)
NAME = re.compile(r"[^a-z0-9]+")
LONGEST_NAME = 40  # Kubernetes allows 63 with what it appends


def spread(job: Job) -> str:
    """How many processes run on how many nodes, as options of torchrun."""
    return f"--nnodes {job.num_nodes} --nproc-per-node {job.devices_on_node}"


def planner_run(job: Job) -> str:
    """What torchrun starts: the plan's path quoted for a shell."""
    return f"-m planner run {shlex.quote(_path(job))}"


def planner_run_words(job: Job) -> list[str]:
    """The same as words that no shell reads."""
    return ["-m", "planner", "run", _path(job)]


def _path(job: Job) -> str:
    """The plan's path, which no option can be mistaken for."""
    return f"./{job.plan_path}" if job.plan_path.startswith("-") else job.plan_path


def job_name(job: Job) -> str:
    """A name for the job, of small letters, digits and dashes: what Kubernetes takes."""
    name = NAME.sub("-", f"planner-{job.plan.model.source.rpartition('/')[2]}".lower()).strip("-")
    return name[:LONGEST_NAME].strip("-")


def limits(job: Job) -> Iterator[Refusal]:
    """What no launcher can say."""
    if not job.plan_path.isprintable():
        yield Refusal(f"the path {job.plan_path!r} has characters that cannot be printed", "rename the plan's file")
