"""Optimiser states in host memory or in a file are those that an optimiser keeps itself, to the last bit."""

# pyright: reportPrivateUsage=false
# FSDP has no public name for where it keeps a parameter.

import resource
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from costmodels.vocabulary.choices import Offload, Optimizer
from planner.errors import InputError, PlannerError
from planner.executor.build import build_model, example_batch, loaded_model
from planner.executor.check import check
from planner.executor.mesh import build_mesh
from planner.executor.optimizer import build_optimizer
from planner.executor.options import RunOptions
from planner.executor.parallelize import parallelize
from planner.executor.states_on_disk import put_on_disk
from planner.plan.plan_file import read_plan
from planner.plan.schema import Plan
from tests.fake_world import fake_world

EXAMPLE = Path("examples/plans/gpt-tiny-pp2-dp2.json")
LARGE = 2**20


def plan_with(offload: Offload) -> Plan:
    return read_plan(EXAMPLE).model_copy(update={"offload": offload})


@pytest.fixture
def small_files() -> Generator[None]:
    """Files of this process may not grow above a megabyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("offload", Offload)
def test_fsdp_keeps_the_shards_of_offloaded_states_on_the_host(offload: Offload) -> None:
    plan = plan_with(offload)
    with fake_world(4):
        loaded = loaded_model(plan)
        mesh = build_mesh(plan, "cpu")
        whole = build_model(loaded, 0)
        model = parallelize(whole, example_batch(loaded, plan, whole), loaded.training_loss, plan, mesh)
        units = [unit for root in model.roots for unit in root.modules() if isinstance(unit, FSDPModule)]
        kept = {p.offload_to_cpu for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups
                for p in group.fsdp_params}  # fmt: skip
    assert kept == {offload is not Offload.NONE}


def trained(name: Optimizer, folder: Path | None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    optimizer = build_optimizer(list(model.parameters()), name, 0.1)
    if folder is not None:
        put_on_disk(optimizer, name, folder)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
    return list(model.parameters()), optimizer


@pytest.mark.parametrize("name", Optimizer)
def test_states_in_a_file_are_those_in_memory(name: Optimizer, tmp_path: Path) -> None:
    expected, theirs = trained(name, None)
    found, ours = trained(name, tmp_path / "new")
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for one, other in zip(found, expected, strict=True):
        assert ours.state[one].keys() == theirs.state[other].keys()
        assert all(torch.equal(ours.state[one][key], value) for key, value in theirs.state[other].items())
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(maps) == (name is not Optimizer.SGD)
    assert all("(deleted)" in line for line in maps)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.usefixtures("small_files")
def test_a_disk_without_room_is_told_before_the_first_step(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(LARGE))
    optimizer = build_optimizer([parameter], Optimizer.ADAMW, None)
    with pytest.raises(PlannerError, match=f"has no room for the {8 * LARGE} bytes that this rank keeps on disk"):
        put_on_disk(optimizer, Optimizer.ADAMW, tmp_path)
    assert not list(tmp_path.iterdir())
    assert not optimizer.state


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    optimizer = build_optimizer([nn.Parameter(torch.zeros(3))], Optimizer.ADAMW, None)
    with pytest.raises(InputError, match="cannot write to"):
        put_on_disk(optimizer, Optimizer.ADAMW, tmp_path / "file")


def test_a_folder_and_a_plan_for_it_go_together(tmp_path: Path) -> None:
    RunOptions(offload_dir=tmp_path).check_offload(Offload.NVME)
    RunOptions().check_offload(Offload.CPU)
    with pytest.raises(InputError, match="on NVMe, and nobody says where"):
        RunOptions().check_offload(Offload.NVME)
    with pytest.raises(InputError, match="offload = cpu"):
        RunOptions(offload_dir=tmp_path).check_offload(Offload.CPU)


def test_memory_of_hosts_is_not_checked_for_that_of_devices() -> None:
    with pytest.raises(PlannerError, match="cannot tell it from that of hosts"):
        check(plan_with(Offload.CPU))
