"""The price of a plan that a user edited: written as plan.json, read again, priced as ``planner estimate`` does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from planner.api import price_plan
from planner.errors import InputError
from planner.plan.plan_file import plan_json, read_plan
from planner.plan.schema import Plan, PredictionSection

CRASHED = "estimate crashed"
Document = dict[str, Any]  # plan.json as Python reads it


class Price(NamedTuple):
    """What ``estimate`` says of a plan: its step, or why it has none."""

    step_time_s: float | None
    fits: bool
    refused: str = ""


def document_of(plan: Plan, model: str) -> Document:
    """plan.json with its graph named as the model, and without what a search and an estimate add."""
    document: Document = json.loads(plan_json(plan))
    document["model"]["source"] = model
    return {**document, "prediction": None, "search": None, "warnings": []}


def estimate(document: Mapping[str, Any], hardware: str, folder: Path) -> Price:
    """The price of ``document`` on ``hardware``; ``folder`` takes the file."""
    file = folder / "plan.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    try:
        answer = price_plan(read_plan(file), hardware)
    except InputError as error:
        return Price(None, fits=False, refused=error.message)
    except (ValueError, LookupError) as error:  # no message to a user, so a mistake of ours
        return Price(None, fits=False, refused=f"{CRASHED}: {error}")
    prediction = answer.plan.prediction
    assert prediction is not None
    return Price(prediction.step_time_s, fits(prediction, answer.notes))


def fits(prediction: PredictionSection, notes: tuple[str, ...]) -> bool:
    """Whether the expected peak of every rank lies within its device, and of every node within its host memory."""
    peaks = prediction.peak_memory_bytes
    rooms = prediction.memory_capacities_bytes or (prediction.memory_capacity_bytes,) * len(peaks)
    in_devices = all(peak <= room for peak, room in zip(peaks, rooms, strict=True))
    return in_devices and not any("fullest node" in note for note in notes)
