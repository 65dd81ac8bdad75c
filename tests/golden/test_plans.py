"""Plans of a few models on shipped profiles, so that a change of the planner's mind shows in review.

`UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/golden` writes them again; read the difference before you commit it.
"""

import json
import os
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Precision
from planner.api import find_plan
from planner.layout.layout import Pins
from planner.plan.schema import Plan
from planner.request import Request

FOLDER = Path(__file__).parent / "plans"
REQUESTS = {
    "llama3-8b-64-h100": Request("llama3-8b", 64, hardware="dgx-h100-80gb"),
    "llama3-70b-64-h100": Request("llama3-70b", 64, hardware="dgx-h100-80gb"),
    "gpt2-1.5b-8-v100": Request("gpt2-1.5b", 8, hardware="dgx-2-v100-32gb", precision=Precision.FP16),
    "llama2-7b-16-a100-tp8": Request("llama2-7b", 16, hardware="dgx-a100-80gb", pins=Pins(tp=8)),
    "gpt-tiny-4-cpu": Request("gpt-tiny", 4, hardware="cpu-gloo", global_batch_size=16, precision=Precision.FP32),
}


def decisions(plan: Plan) -> dict[str, object]:
    """What was decided, and the prediction rounded to what a reader compares."""
    assert plan.prediction is not None
    assert plan.search is not None
    pipeline = plan.pipeline
    return {
        "mesh": plan.mesh.model_dump(),
        "zero_stage": plan.zero_stage,
        "schedule": pipeline.schedule.value,
        "micro_batch_size": pipeline.micro_batch_size,
        "num_microbatches": pipeline.num_microbatches,
        "modules_per_stage": [len(stage.modules) for stage in pipeline.stages],
        "sequence_parallel": plan.placements.sequence_parallel,
        "placements": {e.module: {**e.parameters, "output": e.output} for e in plan.placements.tp},
        "recompute": [rule.mode.value for rule in plan.recompute],
        "step_time_s": float(f"{plan.prediction.step_time_s:.3g}"),
        "peak_memory_gib": round(max(plan.prediction.peak_memory_bytes) / 2**30, 1),
        "status": plan.search.status,
    }


@pytest.mark.parametrize("name", REQUESTS)
def test_plan_is_the_one_on_record(name: str) -> None:
    found = decisions(find_plan(REQUESTS[name]).plan)
    path = FOLDER / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(path.read_text()), "the planner changed its mind; see this file's docstring"


def test_plain_fsdp_never_wins() -> None:
    for name, request in REQUESTS.items():
        plan = find_plan(request).plan
        if request.pins != Pins() or plan.search is None or plan.search.baseline is None:
            continue
        assert plan.prediction is not None
        baseline = plan.search.baseline
        assert not baseline.fits or plan.prediction.step_time_s <= baseline.step_time_s, name
