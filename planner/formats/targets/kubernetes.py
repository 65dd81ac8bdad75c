"""Kubernetes: a TrainJob of Kubeflow Trainer, or a PyTorchJob of the Training Operator, that runs ``planner run``."""

from __future__ import annotations

from collections.abc import Mapping

from planner.formats import launch
from planner.formats.documents import commented, yaml_text
from planner.formats.settings import Job
from planner.formats.target import Target, Written

TRAIN_JOB = "Kubeflow Trainer v2.3.0, TrainJob trainer.kubeflow.org/v1alpha1"
PYTORCH_JOB = "Kubeflow Training Operator v1.9.4, PyTorchJob kubeflow.org/v1"
IMAGE = "IMAGE"  # left to the user: one with planner and the plan in it
GPU = "nvidia.com/gpu"
NOTES = (
    "replace IMAGE by one that holds planner, torch, the model's file and the plan at that path",
    "volumes for data and checkpoints are left to you",
)


def write_train_job(job: Job) -> Written:
    """The runtime ``torch-distributed`` (manifests/base/runtimes) gives every node the PET_ variables of torchrun."""
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": launch.job_name(job)},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": IMAGE,
                "command": ["torchrun"],
                "args": launch.planner_run_words(job),
                "numNodes": job.num_nodes,
                "numProcPerNode": job.devices_on_node,
                "resourcesPerNode": {"limits": {GPU: job.devices_on_node}},
            },
        },
    }
    return _written(job, TRAIN_JOB, document)


def write_pytorch_job(job: Job) -> Written:
    """The operator gives every pod the variables of torchrun: PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and others."""
    container = {
        "name": "pytorch",  # the name that the operator looks for
        "image": IMAGE,
        "command": ["torchrun"],
        "args": launch.planner_run_words(job),
        "resources": {"limits": {GPU: job.devices_on_node}},
    }
    replica = {"restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    replicas: dict[str, object] = {"Master": {"replicas": 1, **replica}}
    if job.num_nodes > 1:
        replicas["Worker"] = {"replicas": job.num_nodes - 1, **replica}
    document = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": launch.job_name(job)},
        "spec": {"nprocPerNode": str(job.devices_on_node), "pytorchReplicaSpecs": replicas},
    }
    return _written(job, PYTORCH_JOB, document)


def _written(job: Job, version: str, document: Mapping[str, object]) -> Written:
    head = commented([f"{version}, written by planner export from {job.plan_path}", *NOTES])
    return Written(head + yaml_text(document), NOTES)


TARGETS = (
    Target(
        name="kubernetes",
        version=TRAIN_JOB,
        sources=(
            "kubeflow/trainer@v2.3.0: pkg/apis/trainer/v1alpha1/trainjob_types.go",
            "manifests/base/runtimes/torch_distributed.yaml",
        ),
        write=write_train_job,
        limits=launch.limits,
    ),
    Target(
        name="kubernetes-pytorchjob",
        version=PYTORCH_JOB,
        sources=("kubeflow/trainer@v1.9.4: pkg/apis/kubeflow.org/v1/pytorch_types.go, common_types.go",),
        write=write_pytorch_job,
        limits=launch.limits,
    ),
)
