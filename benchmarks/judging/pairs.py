"""Two questions of which the second offers more: its best plan is never slower than the first's."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.judging.audit import SMALL_SHAPES
from benchmarks.judging.graphs import Graphs
from benchmarks.judging.questions import (
    CRASHED,
    MACHINES,
    PRESETS,
    SMALL_MACHINES,
    Question,
    Reply,
    drawn,
    random_pins,
    random_shape,
)
from costmodels.vocabulary.choices import Precision
from hardware_profiles.catalog import load_profile
from planner.layout.layout import NO_PINS

TOLERANCE = 1e-3
CHANGES = ("more memory", "more bandwidth", "one pin fewer", "twice the devices")
MOST_PRESET = 14  # the first presets: the small ones


@dataclass(frozen=True)
class Pair:
    """Before and after, and what the second question has more of."""

    change: str
    before: Question
    after: Question


def pair_of(seed: int, index: int, graphs: Graphs, folder: Path, *, is_small: bool = False) -> Pair:
    """The pair of this index; changes take turns. ``folder`` takes the files of changed profiles."""
    draw = random.Random(f"pair-{seed}-{index}")
    change = CHANGES[index % len(CHANGES)]
    machines = [
        m for m in (SMALL_MACHINES if is_small else MACHINES) if change == "one pin fewer" or "," not in m.hardware
    ]
    options = drawn(draw, machines, 8)
    machine, pins = options.machine, options.pins
    if is_small:
        shape = SMALL_SHAPES[index // len(CHANGES) % len(SMALL_SHAPES)]
        name, model = shape.name, graphs.shape(shape, machine.precision)
    elif draw.random() < 0.5:
        name = draw.choice(PRESETS[:MOST_PRESET])
        model = graphs.preset(name, None, machine.precision)
    else:
        shape = random_shape(draw, (3, 4, 6, 8, 12))
        name, model = shape.name, graphs.shape(shape, machine.precision)
    if change == "one pin fewer" and pins == NO_PINS:
        pins = random_pins(draw, options.num_devices or 8)
    before = Question(
        name=name,
        model=str(model),
        num_devices=options.num_devices,
        hardware=machine.hardware,
        seq_len=graphs.read(model).seq_len,
        global_batch_size=options.global_batch_size,
        precision=machine.precision,
        optimizer=options.optimizer,
        pins=pins,
    )
    return Pair(change, before, _with_more(before, change, draw, folder))


def _with_more(before: Question, change: str, draw: random.Random, folder: Path) -> Question:
    if change == "one pin fewer":
        given = [name for name, value in vars(before.pins).items() if value is not None]
        return replace(before, pins=replace(before.pins, **{draw.choice(given): None}))
    if change == "twice the devices":
        assert before.num_devices is not None
        return replace(before, num_devices=2 * before.num_devices)
    factor = draw.choice((1.1, 1.5, 2.0, 4.0))
    return replace(before, hardware=str(_changed_profile(before.hardware, change, factor, folder)))


def _changed_profile(hardware: str, change: str, factor: float, folder: Path) -> Path:
    """A profile with ``factor`` times the memory of its device, or the bandwidth of its links, as a file."""
    profile = json.loads(load_profile(hardware).model_dump_json())
    if change == "more memory":
        sizes = [profile["device"]["memory_bytes"]]
    else:
        sizes = [tier["bandwidth_bytes_per_s"] for tier in profile["tiers"]]
    for size in sizes:
        size["value"] *= factor
    path = folder / f"{hardware}-{change.replace(' ', '-')}-{factor}.json"
    path.write_text(json.dumps({**profile, "name": path.stem.replace(".", "-"), "aliases": []}), encoding="utf-8")
    return path


def lost(pair: Pair, before: Reply, after: Reply) -> str:
    """How the second plan is worse than the first; "" where it is not. A gap that it states is not held against it."""
    if before.plan is None:
        return f"{before.status}: {before.reason}" if before.status == CRASHED else ""
    if after.plan is None:
        return f"{after.status}: {after.reason}"
    assert before.plan.prediction is not None
    assert after.plan.prediction is not None
    assert after.plan.search is not None
    limit_s = before.plan.prediction.step_time_s * (1 + TOLERANCE)
    step_s, bound_s = after.plan.prediction.step_time_s, after.plan.search.bound_step_time_s
    stated_s = step_s if after.status == "OPTIMAL" else bound_s
    return f"slower by {step_s / limit_s - 1:.2%}" if stated_s > limit_s else ""


def idle_question(graphs: Graphs) -> Question:
    """One sequence on eight devices that are joined by a slow link: one device is faster than all of them."""
    model = graphs.preset("gpt-tiny", None, Precision.BF16)
    return Question("gpt-tiny", str(model), 8, "aws-g5-48xlarge", graphs.read(model).seq_len, 1)


def leaves_devices_idle(reply: Reply) -> bool:
    """Whether the search may use fewer devices than it is given, seen in its reply to ``idle_question``."""
    return reply.plan is not None and reply.plan.mesh.shape().world_size < 8


def without_devices(indices: range) -> Iterator[int]:
    """Pairs that do not ask for twice the devices."""
    return (index for index in indices if CHANGES[index % len(CHANGES)] != "twice the devices")
