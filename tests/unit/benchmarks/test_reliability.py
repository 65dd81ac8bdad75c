"""A quick sample of each drill of docs/reliability.md, and that the drills notice what they look for."""

import hashlib
import json
import random
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability import (
    ctrl_c,
    fault_drill,
    fault_scene,
    faults,
    fuzz,
    growth,
    injection,
    kill_files,
    mutation,
)
from benchmarks.reliability.determinism import SEARCHES, plan_digest
from benchmarks.reliability.drill import working_folder
from benchmarks.reliability.fuzz_arguments import arguments_target
from benchmarks.reliability.fuzz_runs import all_run_targets
from benchmarks.reliability.fuzz_targets import Target, all_file_targets, make_small_graph
from benchmarks.reliability.hostile_text import hostile_texts
from benchmarks.reliability.mutations import Document


@pytest.fixture(scope="module", autouse=True)
def folder() -> Generator[Path]:
    """With the small graph, whose tracing takes seconds."""
    with working_folder() as path:
        make_small_graph()
        yield path


@pytest.fixture(scope="module")
def targets(folder: Path) -> list[Target]:
    return [*all_file_targets(), *all_run_targets()]


NAMES = (
    "plan", "graph", "profile", "recipe", "model config", "import megatron", "import deepspeed", "import accelerate",
    "import torchtitan", "import nanotron", "search file", "run log",
    "run table", "checkpoint manifest",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_almost_sound_are_taken_or_refused(name: str, targets: list[Target]) -> None:
    assert [target.name for target in targets] == list(NAMES)
    num = 2000 if name == "run log" else 100  # most lines of a log are of no step
    found = fuzz.fuzzed(targets[NAMES.index(name)], num, seed=7, use_every=20)
    assert found.defects == {}
    assert found.num_taken > 0
    assert len(found.answers) > 5


def test_command_lines_that_are_almost_sound_are_taken_or_refused(targets: list[Target]) -> None:
    found = fuzz.fuzzed(arguments_target(), 20, seed=7)
    assert found.defects == {}


def test_the_fuzzer_notices_what_a_reader_does_not_refuse(targets: list[Target]) -> None:
    def read(path: Path) -> object:
        return json.loads(path.read_bytes())["mesh"]["pp"]

    broken = replace(targets[0], read=read, use=lambda _path, _value: None)
    kinds = {defect.partition(" at ")[0] for defect in fuzz.fuzzed(broken, 600, seed=0).defects}
    assert {"JSONDecodeError", "KeyError", "TypeError"} <= kinds


def test_a_changed_document_keeps_the_rest() -> None:
    before = {"a": [1, {"b": "text"}], "c": 2.5}
    texts = set[str]()
    for seed in range(200):
        document = Document(before)
        document.changed(random.Random(seed))
        texts.add(document.text())
    assert before == {"a": [1, {"b": "text"}], "c": 2.5}
    assert len(texts) > 80
    assert any('"c": 2.5' in text and text.count('"a"') == 2 for text in texts)  # a key that stands twice


def test_hostile_names_become_no_part_of_an_output() -> None:
    counts, broken = injection.drilled(hostile_texts(4, seed=3), injection.harmless_jobs(), 1)
    assert broken == {}
    assert counts["export slurm"]["the same but for the name"] == 20
    assert counts["report"]["the same but for the name"] == 1
    assert len(hostile_texts(200, seed=0)) == len(set(hostile_texts(200, seed=0))) == 200


@pytest.mark.parametrize(
    ("document", "name"), [({"a": "x", "b": 1}, "x"), ({"a": "y; z"}, "x"), ({"a": ["x"]}, "x"), ({"a": None}, "x")]
)
def test_the_drill_notices_another_document(document: dict[str, object], name: str) -> None:
    injection.check_same({"a": "harmless"}, {"a": "x"}, "x")
    with pytest.raises(injection.BrokenOutError):
        injection.check_same({"a": "harmless !"}, document, name)


def test_the_drill_notices_what_a_shell_runs() -> None:
    launch = "torchrun -m planner run {}\n"
    words = injection.read_shell(launch.format("'a b'"))
    assert words[1][:-1] == ["torchrun", "-m", "planner", "run", "a b"]
    with pytest.raises(injection.BrokenOutError):
        injection.check_same(words, injection.read_shell(launch.format("a b")), "a b")
    for text in ("a; touch b", "'", "$(touch b)"):
        with pytest.raises(injection.BrokenOutError):
            injection.check_same(words, injection.read_shell(launch.format(text)), text)
    assert not Path("b").exists()


def test_a_killed_writer_leaves_an_old_or_a_new_file(folder: Path) -> None:
    outcomes = kill_files.drilled(12, 0, folder)
    assert {kind: found["whole"] for kind, found in outcomes.items()} == dict.fromkeys(kill_files.writers(folder), 2)
    assert not any(found["litter behind the next write"] for found in outcomes.values())


def test_the_drill_notices_half_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, second: bool) -> None:
        half = ("ab" if second else "cd") * 10**6
        with path.open("w") as file:
            file.write(half)
            time.sleep(0.02)  # long enough for a kill to come between, on a busy machine too
            file.write(half)

    monkeypatch.setattr(kill_files, "writers", lambda _folder: {"plain": write})
    assert kill_files.drilled(20, 0, folder)["plain"]["BROKEN"] > 0


def test_ctrl_c_ends_a_command(folder: Path) -> None:
    of = ctrl_c.ended(["models"], 0.5, 60.0)
    assert ctrl_c.outcome(of, 0, set(), writes=False) in ("130, with no file", "ended first", "the interpreter's start")


@pytest.mark.parametrize(
    ("code", "shown", "is_late", "new", "phrase"),
    [
        (130, "interrupted", False, set[str](), "130, with no file"),
        (0, "", False, {"out.json"}, "BAD: half a file"),
        (0, "", False, set[str](), "BAD: ended without its file"),
        (130, "", False, {"tmp/planner-x"}, "BAD: left tmp/planner-x"),
        (1, "", False, set[str](), "BAD: exit code 1"),
        (130, "", True, set[str](), "BAD: it went on"),
        (1, 'Traceback\n File "planner/api"', False, set[str](), "BAD: traceback"),
        (-2, "Traceback", False, set[str](), "the interpreter's start"),
    ],
)
def test_outcomes_of_ctrl_c_have_names(code: int, shown: str, is_late: bool, new: set[str], phrase: str) -> None:
    Path(ctrl_c.OUT).write_text('{"half')
    assert ctrl_c.outcome(ctrl_c.Ended(code, shown, is_late, 1.0), 0, new, writes=True) == phrase


def test_memory_does_not_grow_with_searches() -> None:
    found = growth.measured(40)
    assert len(found) == 10
    assert found[-1] <= found[4] * (1 + growth.MOST_GROWTH)


def test_two_runs_write_the_same_plan() -> None:
    words = [*SEARCHES["two small blocks"].split(), "--pp", "2", "--no-idle"]
    assert plan_digest(words, 1) == plan_digest(words, 2)


def checkpoint_of_bytes(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "rank-0.bin").write_bytes(content)
    said = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"rank-0.bin": said}}))
    return folder


def test_the_fault_drill_takes_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert fault_scene.newest_whole(tmp_path) == 0
    for step in (5, 10, 15):
        checkpoint_of_bytes(tmp_path / f"step-{step}", b"abc")
    (tmp_path / "step-15" / "rank-0.bin").write_bytes(b"abd")
    (tmp_path / ".step-20.partial").mkdir()
    assert fault_scene.newest_whole(tmp_path) == 10
    (tmp_path / "step-10" / "manifest.json").unlink()
    assert fault_scene.newest_whole(tmp_path) == 5


FAULT = faults.Fault("any", lambda _scene: None, "rank 1 .*gone", (1, 1), most_lost=2)
BASE = {step: 1.0 / step for step in range(1, 20)}
RESUMED = fault_scene.Resumed(0, "going on after step 10", {step: BASE[step] for step in range(11, 16)})
SOUND = fault_drill.Outcome(3.0, [1, 1], 12, 10, RESUMED, [])
TALK = "error: rank 1 on host0 is gone"


@pytest.mark.parametrize(
    ("outcome", "talk", "problem"),
    [
        (SOUND, TALK, None),
        (replace(SOUND, ended_s=None), TALK, "something ran for more than"),
        (replace(SOUND, codes=[1, 0]), TALK, "exit codes [1, 0] instead of [1, 1]"),
        (SOUND, "error: rank 2 is gone", "nobody said"),
        (SOUND, f"{TALK}\ninternal error: x", "a traceback, or an internal error"),
        (replace(SOUND, left=[".step-15.partial"]), TALK, "left: .step-15.partial"),
        (replace(SOUND, newest=5), TALK, "7 steps were lost, more than 2"),
        (replace(SOUND, resumed=replace(RESUMED, code=2)), TALK, "resumed from step 10 with exit code 2"),
        (replace(SOUND, resumed=replace(RESUMED, talk="")), TALK, "the resumption did not say"),
        (
            replace(SOUND, resumed=replace(RESUMED, losses=RESUMED.losses | {15: 1.00002 / 15})),
            TALK,
            "losses behind the resumption are not those of the undisturbed run",
        ),
    ],
)
def test_the_fault_drill_notices(outcome: fault_drill.Outcome, talk: str, problem: str | None) -> None:
    found = fault_drill.problems(FAULT, outcome, talk, {step: BASE[step] for step in range(1, 13)}, BASE)
    assert any(problem in each for each in found) if problem else found == []


def test_the_fault_drill_has_twenty_faults_and_notices_other_losses_before_one() -> None:
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) >= 20
    found = fault_drill.problems(FAULT, SOUND, TALK, {1: 1.001}, BASE)
    assert found == ["losses before the fault are not those of the undisturbed run"]
    with pytest.raises(fault_scene.DrillError):
        fault_drill.difference({20: 1.0}, BASE)


@pytest.mark.parametrize(
    ("line", "limit_s", "is_noticed"),
    [("assert 1 + 1 == 2", 60.0, False), ("assert 1 - 1 == 2", 60.0, True), ("while True: pass", 3.0, True)],
)
def test_tests_that_fail_or_never_end_notice_a_change(
    line: str, limit_s: float, is_noticed: bool, folder: Path
) -> None:
    path = folder / "test_line.py"
    path.write_text(f"def test_line():\n    {line}\n")
    assert (mutation.seconds_of([str(path)], limit_s) is None) == is_noticed


def test_what_is_changed_is_what_code_does() -> None:
    wanted = ("core/ReplaceBinaryOperator_Add_Sub", "core/NumberReplacer", "core/ReplaceComparisonOperator_Lt_LtE")
    types = ("core/ReplaceBinaryOperator_BitOr_Add", "core/RemoveDecorator", "core/ReplaceBinaryOperator_Add_BitAnd")
    assert all(map(mutation.is_wanted, wanted))
    assert not any(map(mutation.is_wanted, types))
