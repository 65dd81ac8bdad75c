"""GPU names of published runs find the machine that has them."""

from dataclasses import replace

import pytest

from benchmarks.published.data import BLIND_RUNS
from benchmarks.published.machines import cluster_of, profile_name
from hardware_profiles.schema import NetworkTier
from planner.formats.run_table import Hardware, Run, UnpriceableRunError, read_runs


@pytest.mark.parametrize(
    ("gpu", "memory_gb", "profile"),
    [
        ("A100-80GB-SXM", 80, "dgx-a100-80gb"),
        ("A100-40GB-SXM", 40, "dgx-a100-40gb"),
        ("A100-SXM4-40GB", 40, "dgx-a100-40gb"),
        ("NVIDIA A100", 40, "dgx-a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", None, "dgx-a100-80gb"),
        ("A100-80GB-PCIe", 80, "a100-pcie-80gb-x8"),
        ("A800-80GB-SXM", 80, "a800-sxm"),
        ("Tesla V100-SXM2-16GB", 16, "dgx-1-v100-16gb"),
        ("V100-32GB-SXM3", 32, "dgx-2-v100-32gb"),
        ("H100-96GB-HBM2e-SXM(500W)", 96, "h100-hbm2e-96gb-x8"),
        ("GH200-96GB", 96, "dgx-h100-80gb"),
        ("GB200-186GB", 186, "gb200-nvl72"),
        ("GB300-279GB", 279, "gb300-nvl72"),
        ("B300-270GB-SXM", 270, "dgx-b300"),
        ("RTX 4090", 24, "rtx-4090-x8"),
        ("A10G", 24, "aws-g5-48xlarge"),
        ("MI300X-192GB", 192, "mi300x-x8"),
        ("TPU v4", 32, "tpu-v4"),
    ],
)
def test_a_gpu_finds_its_machine(gpu: str, memory_gb: float | None, profile: str) -> None:
    assert profile_name(Hardware(gpu, memory_gb, 8, 8, None)) == profile


@pytest.mark.parametrize("gpu", ["H20-96GB", "RTX A6000", "GB400-300GB", "B400", "accelerator"])
def test_a_gpu_of_no_profile_is_not_taken_for_another(gpu: str) -> None:
    with pytest.raises(UnpriceableRunError, match="no hardware profile"):
        profile_name(Hardware(gpu, None, 8, 8, None))


def test_a_node_of_four_v100_has_as_many_links_between_any_two() -> None:
    """Of the six links of each two go to each of the other three: a pair has a third of them, in a DGX-1 a sixth."""
    run = next(run for run in read_runs(BLIND_RUNS) if isinstance(run, Run))

    def tier(per_node: int) -> NetworkTier:
        hardware = Hardware("V100-32GB-SXM2", 32, 8, per_node, None)
        return cluster_of(replace(run, hardware=hardware)).profile.tiers[0]

    assert {share.num_ranks: share.fraction.value for share in tier(4).share_of_groups} == {2: 1 / 3, 3: 2 / 3}
    assert {share.num_ranks: share.fraction.value for share in tier(8).share_of_groups}[2] == pytest.approx(1 / 6, 0.01)
