"""Configs of well-known runs as ``planner import`` takes them: their price beside what was published of them.

Each file in ``tests/fixtures/published_configs`` has the published settings of one run, and says where they stand.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Recompute
from planner.api.diagnose import better_plan, findings
from planner.api.pinned import PricedRun, pinned_run, price_run
from planner.formats.completion import Given, completed
from planner.formats.registry import all_targets, read_config
from planner.formats.settings import Job, layout_of
from planner.formats.target import written
from planner.layout.deadline import Deadline
from planner.model_file import family_config_of
from planner.models.catalog import find_preset, preset_of_shape

CONFIGS = Path(__file__).parents[2] / "fixtures" / "published_configs"
MPT_30B = CONFIGS / "mpt-30b.json"  # sizes: mosaicml/llm-foundry scripts/train/yamls/pretrain/mpt-30b.yaml
SMOLLM3 = CONFIGS / "smollm3.json"  # sizes: as in its nanotron config


UNSAID = Given()


@dataclass(frozen=True)
class Published:
    """A run. ``software``: that ran it, where the file does not say its version."""

    file: str
    hardware: str
    step_s: float
    given: Given = UNSAID
    model: str | None = None
    software: str | None = None


RUNS = (
    Published("megatron_llama2_70b.sh", "dgx-h100-80gb", 4.799),
    Published("nanotron_smollm3.yaml", "dgx-h100-80gb", 192 * 3 * 4096 / (384 * 14_000), model=str(SMOLLM3)),
    Published(
        "accelerate_mpt_30b.yaml", "dgx-h100-80gb", 7.4502, Given(128, 2048, 1024, 8), model=str(MPT_30B),
        software="llm-foundry",
    ),
    Published("torchtitan_llama3_8b.toml", "dgx-a100-80gb", 8192 / 2973, Given(64)),
    Published(
        "accelerate_llama2_7b.yaml", "dgx-a100-80gb", 256 * 4096 / (128 * 4550), Given(None, 4096, 256, 2),
        model="llama2-7b",
    ),
    Published("megatron_gpt3_175b.sh", "dgx-a100-80gb", 13.75, software="megatron-lm@2022"),
    Published("megatron_mt_nlg_530b.sh", "dgx-a100-80gb", 60.1, software="megatron-deepspeed@2021"),
    # Narayanan et al. 2021, table 2: 144 TFLOP/s a GPU.
    Published(
        "deepspeed_gpt3_175b.json", "dgx-a100-80gb", 81.58, Given(384, 2048), model="gpt3-175b",
        software="deepspeed@2021",
    ),
)  # fmt: skip
BY_NAME = {run.file: run for run in RUNS}


@cache
def priced(file: str) -> PricedRun:
    """The run of a file, as ``planner import`` prices it."""
    run = BY_NAME[file]
    target, read = read_config(file, (CONFIGS / file).read_text(encoding="utf-8"))
    preset = None if read.shape is None else preset_of_shape(read.shape)
    model = run.model or read.preset or ("" if preset is None else preset.name)
    layout, _ = completed(read.settings, run.given, None)
    software = run.software or target.software(read)
    return price_run(pinned_run(model, software, layout), run.hardware)


@pytest.mark.parametrize("file", BY_NAME)
def test_a_published_run_lies_in_its_band(file: str) -> None:
    run, prediction = BY_NAME[file], priced(file).plan.prediction
    assert prediction is not None
    low, high = prediction.step_time_low_s, prediction.step_time_high_s
    assert low is not None
    assert high is not None
    assert low <= run.step_s <= high, f"{prediction.step_time_s / run.step_s - 1:+.1%}"


def test_every_readable_format_has_a_run() -> None:
    readable = {target.name for target in all_targets() if target.read is not None}
    assert {file.partition("_")[0] for file in BY_NAME} == readable


@pytest.mark.parametrize(
    "file",
    ["accelerate_llama2_7b.yaml", "torchtitan_llama3_8b.toml", "megatron_gpt3_175b.sh", "deepspeed_gpt3_175b.json"],
)
def test_a_better_one_comes_out_in_the_same_format(file: str) -> None:
    """It is read back by the format's own reader, trains the same, and its price is what was promised."""
    run, mine = BY_NAME[file], priced(file)
    plan = better_plan(mine, Deadline.never())
    assert plan is not None
    assert plan.prediction is not None
    assert plan.prediction.step_time_s < mine.found.step_time_s
    target, _ = read_config(file, (CONFIGS / file).read_text(encoding="utf-8"))
    model, preset = mine.run.model, find_preset(mine.run.model)
    job = Job(plan, layout_of(plan), family_config_of(model), preset and preset.name, "plan.json", 8)
    text = written(target, job).text
    again, read = read_config(file, text)
    assert again is target
    # What the file leaves to the training script is said by the plan.
    said, training = layout_of(plan), plan.training
    given = Given(
        said.num_devices, training.seq_len, training.global_batch_size, said.micro_batch_size, training.precision,
        training.optimizer, said.recompute if isinstance(said.recompute, Recompute) else None,
    )  # fmt: skip
    layout, _ = completed(read.settings, given, None)
    software = run.software or target.software(read)
    back = price_run(pinned_run(mine.run.model, software, layout), run.hardware)
    assert back.run.training == mine.run.training
    assert back.found.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6)


@pytest.mark.parametrize("file", ["nanotron_smollm3.yaml", "accelerate_mpt_30b.yaml"])
def test_some_set_ups_are_the_best_that_their_framework_can_run(file: str) -> None:
    """They were chosen by hand: the search, at the same risk of memory, finds nothing faster by 0.2 %."""
    mine = priced(file)
    better = better_plan(mine, Deadline.never())
    if better is not None:
        assert better.prediction is not None
        assert better.prediction.step_time_s > mine.found.step_time_s / 1.002


def test_what_is_wrong_is_said_with_its_number() -> None:
    """The bubble of MT-NLG: 34 of 240 + 34 passes are idle where all stages are alike (Narayanan et al. 2021)."""
    (bubble,) = [each for each in findings(priced("megatron_mt_nlg_530b.sh")) if each.rule == "bubble"]
    assert "240 micro-batches over 35 ranks" in bubble.says
    assert bubble.share == pytest.approx(34 / 274, abs=0.01)
