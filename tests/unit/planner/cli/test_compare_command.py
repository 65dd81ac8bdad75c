"""``planner compare``, and what ``planner import`` says is wrong, as a user meets them."""

import json
from pathlib import Path
from typing import Any

import pytest

import planner
from hardware_profiles.catalog import load_profile
from planner.api import Question, compare
from planner.cli.options import pins_of
from planner.errors import InputError
from planner.request import Request
from tests.unit.planner.cli.conftest import Run

TINY = ("llama-tiny", "--gpus", 4, "--hardware", "dgx-a100-80gb", "--seq-len", 64, "--global-batch", 16)
# Two stages of unlike sizes that recompute all, on 12 GPUs of nodes of 8, with tp over nodes where it is 12.
MEGATRON = (
    "torchrun --nnodes {nodes} --nproc-per-node {gpus} pretrain_gpt.py --num-layers 4 --hidden-size 128 "
    "--num-attention-heads 16 --swiglu --ffn-hidden-size 384 --vocab-size 512 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size {batch} --bf16 --position-embedding-type rope --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "


SEARCHED = compare._searched  # pyright: ignore[reportPrivateUsage]
KNOWN: dict[Request, tuple[list[compare.Row], bool]] = {}


def searched_once(question: Question, *rest: Any) -> tuple[list[compare.Row], bool]:
    """All frameworks take 10 seconds: tests that ask the same are answered once."""
    if question.request not in KNOWN:
        KNOWN[question.request] = SEARCHED(question, *rest)
    return KNOWN[question.request]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(compare, "_searched", searched_once)


def test_a_table_of_80_columns_names_every_framework(run: Run) -> None:
    code, out, _ = run("compare", *TINY, "--mine", "tp=2,pp=2")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for name in ("megatron-core", "zero-infinity", "llm-foundry", "yours"):
        assert name in out
    assert "PP 2 · TP 2" in out


def test_a_set_up_of_no_words_is_no_folder(run: Run) -> None:
    """It was read as the file "."."""
    code, _, err = run("compare", *TINY, "--mine", "")
    assert (code, "fixes no choice of a plan" in err, "tp=4,pp=2" in err) == (2, True, True)
    with pytest.raises(InputError, match="fixes no choice of a plan"):
        planner.compare("llama-tiny", 4, mine="")


def test_json_has_every_row_and_the_users_own(run: Run) -> None:
    code, out, _ = run("compare", *TINY, "--mine", "tp=2,pp=2", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["num_devices"], found["global_batch_size"], found["seq_len"]) == (4, 16, 64)
    assert len(found["rows"]) == 16
    for row in [*found["rows"], found["mine"]]:
        assert (row["plan"] is None) == bool(row["reason"])
        if row["plan"] is not None:
            assert row["step_time_s"] == row["plan"]["prediction"]["step_time_s"]
            assert row["samples_per_s"] == pytest.approx(16 / row["step_time_s"])
            assert row["tokens_per_s_per_gpu"] == pytest.approx(16 * 64 / 4 / row["step_time_s"])
    assert found["mine"]["plan"]["mesh"]["tp"] == 2


def test_a_precision_beside_a_config_is_that_of_all(run: Run, tmp_path: Path) -> None:
    """Said beside a config, it was read over without a word."""
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    code, out, err = run("compare", *TINY, "--mine", config, "--precision", "fp32", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["precision"] == "fp32"
    assert found["mine"]["plan"]["training"] == {
        "global_batch_size": 16, "seq_len": 64, "precision": "fp32", "optimizer": "adamw",
    }  # fmt: skip
    assert "64 tokens, fp32" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mine", "nothing.yaml"), "nothing.yaml"),
        (("--mine", "tpp=2"), "fixes no choice"),
        (("--mine", "tp=3"), "yours"),
        (("--mine", "tp=2", "--micro-batch", 2), "are of a config that --mine names"),
        (("--recompute", "full"), "are of a config that --mine names"),
        (("--framework", "no-such"), "no framework"),
        (("--global-batch", 0), "--global-batch"),
    ],
)
def test_a_wrong_command_says_so(run: Run, options: tuple[object, ...], said: str) -> None:
    code, out, err = run("compare", *TINY, *options)
    if said == "yours":  # a set-up that cannot be is a row with its reason
        assert code == 0
        assert "tp=3 does not divide the 4 GPUs" in " ".join(out.split())
    else:
        assert (code, out) == (2, "")
        assert said in err


def test_where_no_framework_has_a_plan_the_code_is_3(run: Run, tmp_path: Path) -> None:
    profile = load_profile("dgx-a100-80gb")
    memory = profile.device.memory_bytes.model_copy(update={"value": 1.1035e9})
    device = profile.device.model_copy(update={"memory_bytes": memory})
    small = tmp_path / "small.json"
    small.write_text(profile.model_copy(update={"device": device, "name": "small"}).model_dump_json())
    code, out, _ = run("compare", "llama-tiny", "--gpus", 1, "--hardware", small, "--seq-len", 64)
    assert code == 3
    assert "planner: no plan. nothing fits" in out
    assert "megatron-core, megatron-lm, nemo, torchtitan: no plan." in " ".join(out.split())


def test_where_there_is_no_time_the_code_is_4(run: Run) -> None:
    code, out, _ = run("compare", *TINY, "--time-limit", 0)
    assert code == 4
    assert "the time limit came before" in out


def test_pins_are_read_in_one_place() -> None:
    assert pins_of("tp=8, sequence-parallel=off,schedule=1F1B").given() == {
        "tp": 8, "sequence_parallel": False, "schedule": "1F1B",
    }  # fmt: skip
    with pytest.raises(InputError):
        pins_of("tp=eight")


def imported(run: Run, folder: Path, text: str, *options: object) -> tuple[str, str]:
    """What ``planner import`` of a command line prints."""
    file = folder / "train.sh"
    file.write_text(text)
    plan = folder / "plan.json"
    code, out, err = run("import", file, "--hardware", "dgx-a100-80gb", "-o", plan, *options)
    assert code == 0, err
    return out, err


def test_recomputation_that_memory_does_not_need_is_priced(run: Run, tmp_path: Path) -> None:
    text = MEGATRON.format(nodes=1, gpus=8, batch=8, tp=1, pp=1)
    with_it, _ = imported(run, tmp_path, text + FULL)
    slow_s = json.loads((tmp_path / "plan.json").read_text())["prediction"]["step_time_s"]
    without, _ = imported(run, tmp_path, text)
    fast_s = json.loads((tmp_path / "plan.json").read_text())["prediction"]["step_time_s"]
    said = f"with none it fits, and a step takes {1 - fast_s / slow_s:.1%} less"
    assert said in with_it
    assert "recomputation" not in without.partition("What is wrong")[2]


def test_tensor_parallelism_over_nodes_and_unused_devices_are_said(run: Run, tmp_path: Path) -> None:
    wide, _ = imported(run, tmp_path, MEGATRON.format(nodes=2, gpus=8, batch=4, tp=16, pp=1))
    assert "tensor parallelism of 16 crosses nodes of 8 GPUs" in wide
    part, _ = imported(run, tmp_path, MEGATRON.format(nodes=1, gpus=6, batch=12, tp=1, pp=1))
    assert "6 GPUs leave 2 of the 8 GPUs of their nodes unused" in part


def test_unbalanced_stages_are_priced_against_better_ones(run: Run, tmp_path: Path) -> None:
    uneven = MEGATRON.format(nodes=1, gpus=2, batch=8, tp=1, pp=2) + "--pipeline-model-parallel-layout Ettt|tL"
    out, _ = imported(run, tmp_path, uneven.replace("|", "\\|"))
    assert "unbalanced stages: its stages hold 3, 1 blocks" in out


def test_a_bubble_is_said(run: Run, tmp_path: Path) -> None:
    out, _ = imported(run, tmp_path, MEGATRON.format(nodes=1, gpus=4, batch=4, tp=1, pp=4))
    assert "bubble: " in out
    assert "4 micro-batches over 4 ranks of 1 stages each" in out


def test_a_better_set_up_is_written_whole_or_not_at_all(run: Run, tmp_path: Path) -> None:
    better = tmp_path / "better.sh"
    text = MEGATRON.format(nodes=1, gpus=8, batch=8, tp=8, pp=1) + FULL
    _, err = imported(run, tmp_path, text, "--better", better)
    assert "a step in place of" in err
    _, err = imported(run, tmp_path, better.read_text(), "--better", tmp_path / "again.sh")
    assert "no better set-up was found: nothing is written" in err
    assert not (tmp_path / "again.sh").exists()


def test_what_does_not_fit_is_said_first(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    options = ("--model", "llama3-8b", "--gpus", 8, "--seq-len", 64, "--hardware", "dgx-a100-40gb")
    code, out, _ = run("import", file, *options)
    assert code == 0
    assert "does not fit: pipeline rank 0 needs" in out.partition("What is wrong:\n")[2].splitlines()[0]
    code, out, err = run("import", file, *options, "--json")
    assert code == 0
    json.loads(out)  # the plan, and nothing else there
    assert "does not fit: pipeline rank 0 needs" in err
