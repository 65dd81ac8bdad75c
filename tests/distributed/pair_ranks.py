"""One rank of a cluster whose pairs are timed and diagnosed; rank 0 prints what was found, a line each."""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist

from hardware_profiles.probes.communication import QUICK, gathered, pair_rounds, time_pairs
from hardware_profiles.probes.detect import detect
from hardware_profiles.probes.diagnosis import diagnose
from hardware_profiles.probes.hosts import host_facts
from hardware_profiles.probes.measurement import ClusterMeasurement


def main() -> None:
    """Times the pairs of ranks that torchrun started."""
    dist.init_process_group("gloo")
    hosts = gathered(host_facts(detect()))
    rounds = pair_rounds([host.key for host in hosts])
    pairs = time_pairs(rounds, torch.device("cpu"), QUICK, lambda _: None)
    measurement = ClusterMeasurement(
        date=datetime.date.today(), tool="a test", backend="gloo", hosts=tuple(hosts), devices=(), pairs=pairs
    )
    if dist.get_rank() == 0:
        sys.stdout.write("\n".join(diagnose(measurement)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
