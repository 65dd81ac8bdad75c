"""``planner export`` and ``planner import`` as a user meets them: files, streams, exit codes, plans that come back."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Offload
from planner.plan.plan_file import read_plan, write_plan
from planner.plan.schema import Plan
from tests.unit.planner.cli.conftest import Run
from tests.unit.planner.formats.plans import Wanted

HARDWARE = ("--hardware", "dgx-a100-80gb")
TINY = Wanted("llama-tiny", dp_shard=4, zero=3, seq_len=64, microbatches=4, hardware="dgx-a100-80gb")
FILES = {
    "megatron": ("train.sh", Wanted("llama-tiny", pp=2, dp_shard=2, zero=1, stage_blocks=(1, 3), seq_len=64)),
    "deepspeed": ("ds.json", TINY),
    "accelerate": ("config.yaml", TINY),
    "torchtitan": ("job.toml", TINY),
    "nanotron": ("config.yaml", Wanted("llama-tiny", dp_shard=4, zero=1, seq_len=64)),
}
# What these files leave to a script, or to the model.
BESIDE = {
    "deepspeed": ("--model", "llama-tiny", "--gpus", 4, "--recompute", "none"),
    "accelerate": ("--model", "llama-tiny", "--global-batch", 16),
    "torchtitan": ("--model", "llama-tiny", "--gpus", 4),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    write_plan(TINY.plan(), path)
    return path


def test_a_config_goes_to_stdout_or_into_a_file(run: Run, plan_file: Path) -> None:
    code, out, err = run("export", plan_file, "--to", "deepspeed")
    assert code == 0
    assert json.loads(out)["zero_optimization"] == {"stage": 3}
    assert "note:" in err
    assert run("export", plan_file, "--to", "deepspeed", "-o", "-")[1] == out
    written = plan_file.with_name("ds.json")
    code, nothing, err = run("export", plan_file, "--to", "deepspeed", "-o", written)
    assert (code, nothing, written.read_text()) == (0, "", out)
    assert "DeepSpeed v0.19.5" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--to", "megatron-lm2"), "no format 'megatron-lm2'"),
        (("--to", "deepspeed", "-o", "nowhere/ds.json"), "no folder"),
        ((), "--to"),
    ],
)
def test_a_wrong_command_ends_with_2_and_writes_nothing(
    run: Run, plan_file: Path, options: tuple[str, ...], said: str
) -> None:
    code, out, err = run("export", plan_file, *options)
    assert (code, out) == (2, "")
    assert said in err
    assert list(plan_file.parent.iterdir()) == [plan_file]


def test_what_a_target_cannot_express_ends_with_2(run: Run, plan_file: Path) -> None:
    write_plan(TINY.plan().model_copy(update={"offload": Offload.NVME}), plan_file)
    code, out, err = run("export", plan_file, "--to", "torchtitan", "-o", plan_file.with_name("job.toml"))
    assert (code, out) == (2, "")
    assert "torchtitan v0.2.2) cannot express this plan: offload" in err
    assert "--offload none" in err
    code, out, err = run("export", plan_file, "--to", "slurm")
    assert code == 2
    assert "which folder of a host is for states that the plan keeps on NVMe" in err
    assert "--offload cpu" in err
    assert list(plan_file.parent.iterdir()) == [plan_file]


def test_a_profile_that_is_not_here_needs_the_gpus_of_a_node(run: Run, plan_file: Path) -> None:
    write_plan(TINY.plan().model_copy(update={"hardware": "our-cluster"}), plan_file)
    code, _, err = run("export", plan_file, "--to", "slurm")
    assert code == 2
    assert "--gpus-per-node" in err
    code, out, _ = run("export", plan_file, "--to", "slurm", "--gpus-per-node", 2)
    assert code == 0
    assert "#SBATCH --nodes=2\n" in out


def test_of_several_kinds_of_devices_the_weakest_says_how_large_nodes_are(run: Run, plan_file: Path) -> None:
    """What no target can name is refused by that name; a plan for devices that are taken as alike is written."""
    both = TINY.plan().model_copy(update={"hardware": "rtx-3090-x8:2,rtx-4090-x8:2"})
    write_plan(both, plan_file)
    assert run("export", plan_file, "--to", "torchtitan")[0] == 0
    groups = [stage.model_copy(update={"device_group": "rtx-3090-x8"}) for stage in both.pipeline.stages]
    pipeline = both.pipeline.model_copy(update={"stages": tuple(groups)})
    write_plan(both.model_copy(update={"pipeline": pipeline}), plan_file)
    code, _, err = run("export", plan_file, "--to", "torchtitan")
    assert code == 2
    assert "groups of unlike devices" in err
    assert "gpus-per-node" not in err


def test_a_model_that_is_no_preset_is_left_to_the_user(run: Run, plan_file: Path) -> None:
    plan = TINY.plan()
    named = plan.model.model_copy(update={"source": "model.py"})
    write_plan(plan.model_copy(update={"model": named}), plan_file)
    code, out, err = run("export", plan_file, "--to", "torchtitan")
    assert code == 0
    assert tomllib.loads(out)["model"] == {}
    assert "set model.name and model.flavor" in err


@pytest.mark.parametrize("name", FILES)
def test_a_config_comes_back_as_a_priced_plan(run: Run, tmp_path: Path, name: str) -> None:
    file_name, wanted = FILES[name]
    plan_file, config, again = tmp_path / "plan.json", tmp_path / file_name, tmp_path / "again.json"
    write_plan(wanted.plan(), plan_file)
    assert run("export", plan_file, "--to", name, "-o", config)[0] == 0
    code, out, err = run("import", config, *HARDWARE, *BESIDE.get(name, ()), "-o", again)
    assert code == 0, err
    assert f"read as {name}" in err
    assert "a step" in out
    before, after = read_plan(plan_file), read_plan(again)
    assert after.prediction is not None
    assert after.prediction.step_time_s > 0
    assert after.search is None
    for key in ("model.source", "mesh", "zero_stage", "recompute", "offload", "num_devices", "training"):
        assert _value(after, key) == _value(before, key), key
    stages = [[m for m in stage.modules if m.startswith("layers.")] for stage in before.pipeline.stages]
    assert [[m for m in stage.modules if m.startswith("layers.")] for stage in after.pipeline.stages] == stages


def test_a_config_is_priced_by_the_software_that_ran_it(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    steps: dict[str, float] = {}
    for software in ("deepspeed", "deepspeed@2021"):
        plan_file = tmp_path / "plan.json"
        options = ("--model", "llama-tiny", "--gpus", 8, *HARDWARE, "--framework", software, "-o", plan_file)
        code, _, err = run("import", config, *options)
        assert code == 0, err
        plan = read_plan(plan_file)
        assert plan.framework == software
        assert plan.prediction is not None
        steps[software] = plan.prediction.step_time_s
        code, out, err = run("estimate", plan_file, "--json")
        assert json.loads(out)["prediction"]["step_time_s"] == steps[software], err
    assert steps["deepspeed@2021"] > steps["deepspeed"]  # it gathered tensor by tensor
    code, _, err = run("import", config, "--model", "llama-tiny", "--gpus", 8, "--framework", "deepspeed@old")
    assert code == 2
    assert "says no year" in err


def _value(plan: Plan, key: str) -> object:
    found: object = plan
    for name in key.split("."):
        found = getattr(found, name)
    return found


def test_what_a_config_does_not_say_is_asked_for(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}')
    code, _, err = run("import", config)
    assert (code, "--model MODEL" in err) == (2, True)
    code, _, err = run("import", config, "--model", "llama-tiny")
    assert (code, "--gpus N" in err) == (2, True)
    code, out, err = run("import", config, "--model", "llama-tiny", "--gpus", 8, *HARDWARE)
    assert code == 0
    for assumed in ("micro-batches of one sequence", "recomputation none is assumed", "64 tokens, the model's own"):
        assert assumed in err, assumed
    assert "ZeRO" in out


NO_PRESET = (
    "torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 3 --hidden-size 64 --num-attention-heads 4 --swiglu "
    "--ffn-hidden-size 160 --vocab-size 256 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --use-distributed-optimizer"
)


def test_a_model_that_is_no_preset_is_written_beside_the_plan(run: Run, tmp_path: Path) -> None:
    config, plan_file = tmp_path / "train.sh", tmp_path / "plan.json"
    config.write_text(NO_PRESET)
    code, _, err = run("import", config, *HARDWARE)
    assert (code, "-o plan.json" in err) == (2, True)
    code, _, err = run("import", config, *HARDWARE, "-o", plan_file)
    assert code == 0, err
    assert Path(read_plan(plan_file).model.source) == tmp_path / "plan.model.json"
    code, _, err = run("estimate", plan_file)
    assert code == 0, err
    code, _, err = run("import", config, *HARDWARE, "-o", "/dev/null")
    assert (code, "-o plan.json" in err, Path("/dev/null.model.json").exists()) == (2, True, False)


def test_a_model_is_not_left_without_its_plan(tmp_path: Path) -> None:
    """On a full disk the small file was there, and the large one was not; or an old plan had a new model."""
    config, plan_file = tmp_path / "train.sh", tmp_path / "plan.json"
    command = f"{sys.executable} -m planner import {config} {' '.join(HARDWARE)} -o {plan_file}"
    limited = ["bash", "-c", f"ulimit -f 2; {command}"]  # blocks of 1 KiB, of which a plan takes six

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for before in ({}, {"plan.json": b"{}", "plan.model.json": b"of another run"}):
        config.write_text(NO_PRESET)
        for name, content in before.items():
            (tmp_path / name).write_bytes(content)
        # Or Python keeps the first kilobytes of what it compiles, and everybody reads them from then on.
        uncompiled = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(limited, capture_output=True, text=True, check=False, env=uncompiled)
        assert (done.returncode, "File too large" in done.stderr) == (2, True), done.stderr
        assert files() == {"train.sh": NO_PRESET.encode(), **before}


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (b"\xff\xfe--tensor-model-parallel-size", (), "is no text"),
        (b"hello", (), "--from"),
        (b"hello", ("--from", "slurm"), "are not read"),
        (b"x --tensor-model-parallel-size 3 --micro-batch-size 1 --global-batch-size 8", ("--gpus", 8), "no multiple"),
        (b"x --tensor-model-parallel-size 1 --expert-model-parallel-size 2", ("--gpus", 8), "ep 2 does not divide"),
    ],
)
def test_a_config_that_cannot_be_used_ends_with_2(
    run: Run, tmp_path: Path, content: bytes, options: tuple[object, ...], said: str
) -> None:
    config = tmp_path / "config"
    config.write_bytes(content)
    code, out, err = run("import", config, "--model", "moe-tiny", "--global-batch", 8, *HARDWARE, *options)
    assert (code, out) == (2, "")
    assert said in err


def test_a_missing_file_is_said(run: Run, tmp_path: Path) -> None:
    assert run("import", tmp_path / "nothing.toml")[0] == 2
