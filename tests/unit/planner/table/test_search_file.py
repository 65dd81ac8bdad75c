"""A saved search is the search: read in another process, without a model, it is solved to the same last digit."""

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels.vocabulary.choices import Offload
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.layout.columns import Columns
from planner.layout.layout import Layout, Pins
from planner.table.search_file import MOST_BYTES, read_search, write_search
from tests.planning import problem_of
from tests.unit.planner.test_mixed_clusters import MIXED, mixed_problem

# Solves the search in the file named first, and says what it found and what it had to import.
SOLVE = """
import json, sys
from pathlib import Path
from planner.solver.dynamic_program import DynamicProgramSolver
from planner.solver.search import search
from planner.table.search_file import read_search
saved = read_search(Path(sys.argv[1]))
outcome = search(saved.table, saved.layouts, DynamicProgramSolver())
best = outcome.best
print(json.dumps({
    "step_time_s": best.step_time_s, "starts": best.starts, "mesh": list(vars(best.layout.mesh).values()),
    "peak": best.peak_memory_bytes, "visited": outcome.num_visited, "modules": sorted(sys.modules),
}))
"""
# None of these may be needed to solve a saved search.
FOREIGN = (
    "torch", "planner.graph", "planner.operators", "planner.axes", "planner.pricing", "planner.space", "planner.models",
    "planner.model_file", "costmodels.recipe", "costmodels.compute", "costmodels.communication", "costmodels.memory",
    "hardware_profiles.schema", "hardware_profiles.catalog",
)  # fmt: skip

PROBLEMS = [
    ("llama3-8b", 64, {"batch": 512, "seq_len": 2048}),
    ("moe-tiny", 8, {"batch": 32, "seq_len": 64}),
    ("gpt2-1.5b", 8, {"batch": 64, "pins": Pins(offload=Offload.CPU)}),
]


@pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS)
def test_it_is_solved_elsewhere_to_the_last_digit(model: str, num_devices: int, options: dict, tmp_path: Path) -> None:
    problem = problem_of(model, num_devices, **options)
    path = tmp_path / "search.npz"
    write_search(path, problem.table, problem.space.layouts)
    done = subprocess.run([sys.executable, "-c", SOLVE, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    here = problem.solved()
    assert here.best is not None
    assert found["step_time_s"] == here.best.step_time_s
    assert found["peak"] == here.best.peak_memory_bytes
    assert tuple(found["starts"]) == here.best.starts
    assert found["mesh"] == list(vars(here.best.layout.mesh).values())
    assert found["visited"] == here.num_visited
    needed = [name for name in found["modules"] if any(name == f or name.startswith(f + ".") for f in FOREIGN)]
    assert needed == []


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    write_search(tmp_path / "search.npz", problem.table, problem.space.layouts)
    saved = read_search(tmp_path / "search.npz")
    assert list(saved.layouts) == list(problem.space.layouts)
    for name, value in vars(problem.table).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(saved.table, name), value)
        elif name in ("units", "cluster", "framework", "work_keys", "data_keys", "state_keys", "send_keys", "splits"):
            assert getattr(saved.table, name) == value, name


def test_what_only_one_kind_of_device_runs_is_priced_for_that_alone(tmp_path: Path) -> None:
    problem, path = mixed_problem(MIXED), tmp_path / "search.npz"
    assert np.isnan(problem.table.time_s).any()
    write_search(path, problem.table, problem.space.layouts)
    np.testing.assert_array_equal(read_search(path).table.time_s, problem.table.time_s)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 damaged", b"{}"])
def test_what_is_no_search_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "search.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a saved search"):
        read_search(path)


def changed(path: Path, **arrays: np.ndarray) -> None:
    with np.load(path) as stored:
        content: dict[str, Any] = {**{name: stored[name] for name in stored.files}, **arrays}
    np.savez(path, **content)


def as_header(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"time_s": np.zeros((1, 2))}, "time_s must hold numbers in the shape"),
        ({"codes.mesh": np.zeros((2, 2), dtype=np.uint8)}, "one length|whole numbers"),
        ({"codes.zero_stage": np.zeros(1, dtype=np.uint8)}, "all of one length"),
        ({"header": as_header("[" * 10**5)}, "not a saved search"),
        ({"header": as_header('{"format": 2}')}, "not a saved search"),
        ({"more": np.zeros(3)}, None),
    ],
)
def test_arrays_that_are_not_as_the_keys_say_are_refused(
    arrays: dict[str, np.ndarray], message: str | None, tmp_path: Path
) -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    path = tmp_path / "search.npz"
    write_search(path, problem.table, problem.space.layouts)
    changed(path, **arrays)
    if message is None:
        assert len(read_search(path).layouts) == len(problem.space.layouts)
        return
    with pytest.raises(InputError, match=message):
        read_search(path)


def test_numbers_and_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    path = tmp_path / "search.npz"
    write_search(path, problem.table, problem.space.layouts)
    changed(path, time_s=problem.table.time_s * np.nan)
    with pytest.raises(InputError, match="time_s must hold numbers"):
        read_search(path)
    table = replace(problem.table, data_keys=problem.table.data_keys[:-1], data_s=problem.table.data_s[:, :-1])
    write_search(path, table, problem.space.layouts)
    with pytest.raises(InputError, match="1 of DataKey without a row"):
        read_search(path)


def test_several_stages_without_a_pipeline_are_refused(tmp_path: Path) -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    layout = next(each for each in problem.space.layouts if each.mesh.pp == 1)
    layout = layout._replace(schedule=ScheduleName.INTERLEAVED_1F1B, virtual_stages=2)
    path = tmp_path / "search.npz"
    write_search(path, problem.table, Columns.of(Layout, [layout]))
    with pytest.raises(InputError, match="without a pipeline a rank has one stage, not 2"):
        read_search(path)


@pytest.mark.parametrize("shape", [(10**12,), (2**40, 2**40)])
def test_an_archive_is_not_unpacked_beyond_what_a_search_has(shape: tuple[int, ...], tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": shape})
    path = tmp_path / "search.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", head.getvalue() + bytes(2**10))
    with pytest.raises(InputError, match="has 1024 bytes"):
        read_search(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("header.npy", "w") as member:
        for _ in range(MOST_BYTES // 2**24 + 1):
            member.write(bytes(2**24))
    assert path.stat().st_size < 2**20
    with pytest.raises(InputError, match="have more than 536,870,912 bytes"):
        read_search(path)


def test_another_versions_labels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("llama-tiny", 8, batch=32, seq_len=64)
    with monkeypatch.context() as other:
        other.setattr("planner.table.search_file.LABELS", {"Time": ["ANOTHER"]})
        write_search(tmp_path / "search.npz", problem.table, problem.space.layouts)
    with pytest.raises(InputError, match="another version"):
        read_search(tmp_path / "search.npz")


def test_pickled_objects_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "search.npz"
    np.savez(path, header=np.array([{"format": 2}], dtype=object))
    with pytest.raises(InputError, match="not a saved search"):
        read_search(path)
