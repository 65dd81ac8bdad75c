"""What is fuzzed: for each kind of input sound ones to begin with, how to change one, its reader, and what uses it.

Everything lies in the current folder. The readers may refuse an input with the errors that their docstrings name, and
with nothing else.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.drill import ROOT
from benchmarks.reliability.mutations import Document, changed_bytes, changed_text
from costmodels.recipe import Recipe, load_recipe
from costmodels.vocabulary.choices import Optimizer, Precision
from costmodels.vocabulary.schedules import ScheduleName
from hardware_profiles.catalog import HardwareProfileError, load_profile, profile_for
from planner.api import find_plan, price_plan, schedule_plan
from planner.cli.export import exported, job_of
from planner.cli.import_ import MAX_BYTES, import_config
from planner.errors import InputError, PlannerError
from planner.formats.completion import Given, completed
from planner.formats.registry import all_targets, read_config, target_called
from planner.formats.target import Read, written
from planner.graph.graph_file import read_graph
from planner.graph.model_graph import ModelGraph
from planner.json_file import read_content
from planner.layout.layout import Pins, Training
from planner.model_file import content_digest, family_config_of, resolve_model
from planner.plan.plan_file import read_plan, write_plan
from planner.plan.schema import Plan
from planner.pricing.target import PricingTarget
from planner.problem import Problem
from planner.report.trace_events import trace_json
from planner.request import Request
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.search import search
from planner.table.search_file import SavedSearch, read_search, write_search

GRAPH, CONFIG, HARDWARE = Path("small.graph.json"), Path("small.json"), "cpu-gloo"
SMALL = {
    "family": "llama",
    "layers": 2,
    "hidden": 8,
    "heads": 2,
    "ffn": 16,
    "vocab": 32,
    "seq_len": 16,
    "mlp": "swiglu",
}
Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """One kind of input. ``use`` is done with some of those that ``read`` takes."""

    name: str
    seeds: tuple[bytes, ...]
    mutate: Mutate
    read: Callable[[Path], Any]
    use: Callable[[Path, Any], object]  # the file, and what was read
    refusals: tuple[type[Exception], ...] = (PlannerError,)
    file_name: str = "input.json"


def make_small_graph() -> None:
    """The graph of two small blocks, traced by a process of its own, so that this one imports no torch."""
    CONFIG.write_text(json.dumps(SMALL))
    command = [sys.executable, "-m", "planner", "trace", str(CONFIG), "--batch-size", "2", "-o", str(GRAPH)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    GRAPH.write_text(read_graph(GRAPH).model_dump_json(exclude_defaults=True, exclude={"schema_version"}))
    own = {"schema_version": 1, "source": str(GRAPH)}  # so that plans name the graph, which needs no torch
    GRAPH.write_text(json.dumps({**json.loads(GRAPH.read_text()), **own}))


def small_request(model: str = str(GRAPH), **changes: Any) -> Request:
    """A search that takes a tenth of a second: two small blocks on four devices."""
    request = Request(model, 4, HARDWARE, global_batch_size=8, precision=Precision.FP32, may_idle=False)
    return replace(request, **changes)


def all_file_targets() -> list[Target]:
    """Every kind of file, in the current folder."""
    of_plans = _of_plans(small_plans())
    of_formats = [_of_format(name) for name in ("megatron", "deepspeed", "accelerate", "torchtitan", "nanotron")]
    return [of_plans, _of_graphs(), _of_profiles(), _of_recipes(), _of_configs(), *of_formats, _of_searches()]


_PLANS = (
    Pins(pp=2, dp=2, zero=1, schedule=ScheduleName.ONE_F_ONE_B), Pins(tp=2, dp=2, zero=3, sequence_parallel=True),
    Pins(dp=4, zero=3), Pins(dp=4, dp_replicate=1, zero=1), Pins(tp=2, pp=2),
)  # fmt: skip


def small_plans() -> list[Plan]:
    """Plans of unlike layouts for the small graph, which is in the current folder."""
    return [find_plan(small_request(pins=pins)).plan for pins in _PLANS]


def _of_plans(plans: list[Plan]) -> Target:
    examples = [path.read_bytes() for path in sorted((ROOT / "examples" / "plans").glob("*.json"))]
    for number, plan in enumerate(plans):
        write_plan(plan, Path(f"plan{number}.json"))
    own = [Path(f"plan{number}.json").read_bytes() for number in range(len(plans))]
    return Target("plan", (*own, *examples), changed_json, read_plan, _use_plan)


def _use_plan(_path: Path, plan: Plan) -> object:
    """Prices it, draws its step and exports it to every target."""
    if plan.model.source != str(GRAPH):
        return None  # a preset would be traced, which is no part of this
    for attempt in (price_plan, _timeline, *(_export_to(target.name) for target in all_targets())):
        try:
            attempt(plan)
        except PlannerError:
            continue
    return None


def _timeline(plan: Plan) -> str:
    return trace_json(schedule_plan(plan)[0])


def _export_to(name: str) -> Callable[[Plan], object]:
    return lambda plan: exported(target_called(name), job_of(plan, Path("plan.json"), None))


def _of_graphs() -> Target:
    return Target("graph", (GRAPH.read_bytes(),), changed_json, read_graph, _use_graph)


def _use_graph(path: Path, _graph: ModelGraph) -> object:
    return find_plan(small_request(str(path), pins=Pins(pp=2, tp=1, dp=2, zero=1, micro_batch=1)))


def _of_configs() -> Target:
    """Shapes of models. Building and tracing them is no part of this."""

    def read(path: Path) -> object:
        source = resolve_model(str(path))
        return content_digest(source), family_config_of(str(path))

    hugging_face = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
                    "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 16}  # fmt: skip
    seeds = (CONFIG.read_bytes(), json.dumps(hugging_face).encode())
    return Target("model config", seeds, changed_json, read, lambda _path, _found: None)


def _of_profiles() -> Target:
    names = ("cpu-gloo", "dgx-h100-80gb", "gb200-nvl72", "tpu-v5p", "mi300x-x8")
    seeds = tuple((ROOT / "hardware_profiles" / "data" / f"{name}.json").read_bytes() for name in names)
    plan = read_plan(Path("plan0.json"))
    return Target(
        "profile", seeds, changed_json, lambda path: load_profile(str(path)),
        lambda path, _profile: price_plan(plan, str(path)), (HardwareProfileError,),
    )  # fmt: skip


def _of_recipes() -> Target:
    names = ("planner", "megatron-core", "deepspeed", "torchtitan", "nanotron")
    seeds = tuple((ROOT / "costmodels" / "recipes" / f"{name}.json").read_bytes() for name in names)
    graph, cluster = read_graph(GRAPH), profile_for(4, "dgx-h100-80gb")
    training = Training(8, graph.seq_len, Precision.BF16, Optimizer.ADAMW)

    def use(_path: Path, recipe: Recipe) -> object:
        target = PricingTarget(graph, cluster, "bf16", recipe)
        return Problem.build(target, training, Pins(pp=2, tp=1, dp=2, zero=1)).solved()

    def read(path: Path) -> Recipe:
        load_recipe.cache_clear()
        return load_recipe(str(path))

    return Target("recipe", seeds, changed_json, read, use, (ValueError, PlannerError))


FORMATS = {
    "megatron": "train.sh", "deepspeed": "ds.json", "accelerate": "config.yaml", "torchtitan": "job.toml",
    "nanotron": "config.yaml",
}  # fmt: skip


def _of_format(name: str) -> Target:
    """Imported configs: read, completed and, for some, priced as ``planner import`` does."""
    target, texts = target_called(name), list[bytes]()
    for number in range(len(_PLANS)):
        path = Path(f"plan{number}.json")
        plan = read_plan(path)
        named = plan.model.model_copy(update={"source": str(CONFIG)})  # which tells the shape
        job = job_of(plan.model_copy(update={"model": named}), path, 8)
        try:
            texts.append(written(target, job).text.encode())
        except PlannerError:
            continue
    assert texts, name
    given = Given(num_devices=4, seq_len=16, global_batch_size=8)

    def read(path: Path) -> Read:
        found = read_config(path.name, read_content(path, InputError, MAX_BYTES).decode("utf-8", "replace"), name)[1]
        completed(found.settings, given, 64)
        return found

    def use(path: Path, _found: Read) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import_config(path, name, str(GRAPH), HARDWARE, gpus=4, seq_len=16, global_batch=8, as_json=True)

    mutate = changed_json if name == "deepspeed" else changed_lines
    return Target(f"import {name}", tuple(texts), mutate, read, use, file_name=FORMATS[name])


@lru_cache(maxsize=2)
def _small_problem(zero: int) -> Problem:
    graph, cluster = read_graph(GRAPH), profile_for(4, HARDWARE)
    training = Training(8, graph.seq_len, Precision.FP32, Optimizer.ADAMW)
    return Problem.build(PricingTarget(graph, cluster, "fp32"), training, Pins(pp=2, zero=zero))


def write_small_search(path: Path, second: bool = False) -> None:
    """A search with few layouts, one of two."""
    problem = _small_problem(0 if second else 1)
    write_search(path, problem.table, problem.space.layouts)


def _of_searches() -> Target:
    write_small_search(Path("search.npz"))
    seed = Path("search.npz").read_bytes()

    def use(_path: Path, saved: SavedSearch) -> object:
        return search(saved.table, saved.layouts, DynamicProgramSolver())

    return Target("search file", (seed,), changed_search, read_search, use, file_name="input.npz")


@lru_cache(maxsize=64)
def _value_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def changed_json(content: bytes, draw: random.Random) -> bytes:
    """A JSON document with some of its parts changed; with its text or its bytes changed now and then."""
    value = _value_of(content)
    kind = draw.random()
    if kind < 0.1 or not isinstance(value, dict | list) or not value:
        return changed_bytes(content, draw)
    if kind < 0.2:
        return _text_of(changed_text(content.decode("utf-8", "replace"), draw))
    document = Document(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        if document.value:
            document.changed(draw)
    return _text_of(document.text())


def changed_lines(content: bytes, draw: random.Random) -> bytes:
    """A text with some words and lines changed, with its bytes changed now and then."""
    if draw.random() < 0.1:
        return changed_bytes(content, draw)
    text = content.decode("utf-8", "replace")
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        text = changed_text(text, draw)
    return _text_of(text)


def _text_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=64)
def _arrays_of(content: bytes) -> dict[str, Any]:
    """Nothing where it was damaged before: of no interest here why."""
    try:
        with np.load(io.BytesIO(content)) as stored:
            return {name: stored[name] for name in stored.files}
    except Exception:
        return {}


def changed_search(content: bytes, draw: random.Random) -> bytes:
    """A saved search whose header or one of whose arrays is another, or whose bytes are."""
    if draw.random() < 0.25:
        return changed_bytes(content, draw)
    arrays = dict(_arrays_of(content))
    if not arrays:
        return changed_bytes(content, draw)
    name = draw.choice(list(arrays))
    if "header" in arrays and draw.random() < 0.5:
        arrays["header"] = np.frombuffer(changed_json(arrays["header"].tobytes(), draw), dtype=np.uint8)
    else:
        arrays |= _changed_array(name, arrays[name], draw)
        if draw.random() < 0.1:
            arrays.pop(name)
    buffer = io.BytesIO()
    np.savez(buffer, **{key: value for key, value in arrays.items() if key != "file"})
    if draw.random() < 0.05:
        return _bomb(buffer.getvalue(), name)
    return buffer.getvalue()


def _cast(array: Any, dtype: Any) -> Any:
    """``array`` in ``dtype``; zeros where its values have none there, as texts that are no dates."""
    try:
        return array.astype(dtype)
    except ValueError:
        return np.zeros(array.shape, dtype)


def _changed_array(name: str, array: Any, draw: random.Random) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        match draw.randrange(8):
            case 0:
                return {name: array[: len(array) // 2] if array.ndim else array}
            case 1:
                return {name: array.reshape(-1)}
            case 2:
                return {name: _cast(array, draw.choice(("f4", "i8", "u1", "c16", "S3", "?", "f8", "M8[s]")))}
            case 3:
                return {name: array[..., None]}
            case 4:
                return {name: np.zeros(draw.choice(((), (0,), (2, 2), (1, 1, 1, 1, 1))))}
            case 5:
                return {f"{name}{draw.choice(('2', '', 'é', '/x'))}": array}
            case _:
                changed = array.copy().reshape(-1)
                if len(changed):
                    number = draw.choice((np.nan, np.inf, -1.0, 1e308, 0.0, 255.0, -np.inf))
                    changed[draw.randrange(len(changed))] = _cast(np.array(number), array.dtype)
                return {name: changed.reshape(array.shape)}


def _bomb(content: bytes, name: str) -> bytes:
    """The same archive with one array that says it is larger than any machine, or is zeros without end."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            if member != f"{name}.npy":
                new.writestr(member, old.read(member))
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
        new.writestr(f"{name}.npy", head.getvalue() + bytes(2**20))
    return buffer.getvalue()
