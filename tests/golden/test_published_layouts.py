"""Layouts that were published: priced when pinned, and never faster than what the search chooses on the same GPUs."""

import pytest

from planner.api import find_plan
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request

HARDWARE = "dgx-a100-80gb"
BATCH = 1536  # sequences: GPT-3's 3.2 million tokens in 2048s

# "GPT-3 175B, variant A": 64 stages x 6 data parallel x 8 tensor parallel; "variant B": DP 8 x PP 16 x TP 8.
LAYOUTS = {"variant A": (3072, Pins(pp=64, dp=6, tp=8)), "variant B": (1024, Pins(pp=16, dp=8, tp=8))}


def plan(num_devices: int, pins: Pins) -> Plan:
    request = Request("gpt3-175b", num_devices, hardware=HARDWARE, global_batch_size=BATCH, pins=pins)
    return find_plan(request).plan


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_published_degrees_are_kept_and_priced_and_the_chosen_plan_is_no_slower(name: str) -> None:
    num_devices, pins = LAYOUTS[name]
    assert pins.pp is not None
    found, chosen = plan(num_devices, pins), plan(num_devices, Pins())
    mesh = found.mesh
    assert (mesh.pp, mesh.dp_replicate * mesh.dp_shard, mesh.tp, mesh.cp) == (pins.pp, pins.dp, pins.tp, 1)
    assert found.prediction is not None
    assert max(found.prediction.peak_memory_bytes) <= found.prediction.memory_capacity_bytes
    # No run reaches the peak; below a tenth of it something would be priced twice.
    assert 0.1 < found.prediction.mfu < 1
    modules = [module for stage in found.pipeline.stages for module in stage.modules]
    assert len(found.pipeline.stages) == pins.pp * found.pipeline.virtual_stages
    assert sum(module.startswith("layers.") for module in modules) == 96
    assert chosen.prediction is not None
    assert chosen.search is not None
    assert chosen.search.status in ("OPTIMAL", "FEASIBLE")
    assert chosen.prediction.step_time_s <= found.prediction.step_time_s


def test_eight_by_eight() -> None:
    """The 2-D example: 8 nodes of 8 GPUs, data parallel between nodes and tensor parallel inside."""
    request = Request("gpt3-13b", 64, hardware=HARDWARE, global_batch_size=512, pins=Pins(dp=8, tp=8, pp=1))
    mesh = find_plan(request).plan.mesh
    assert mesh.dp_replicate * mesh.dp_shard == 8
    assert mesh.tp == 8
