"""What is exported comes back: the same layout, for many plans, of every target that can be read."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from costmodels.vocabulary.choices import ContextMethod, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.errors import InputError
from planner.formats.completion import Given, completed
from planner.formats.registry import read_config, target_called
from planner.formats.settings import Layout
from planner.formats.target import Abilities, refused, written
from planner.models.catalog import preset_of_shape
from tests.unit.planner.formats.cases import ACCEPTED
from tests.unit.planner.formats.plans import Wanted, even, job, preset

FILE_NAMES = {
    "megatron": "train.sh", "deepspeed": "ds.json", "accelerate": "config.yaml", "torchtitan": "job.toml",
    "nanotron": "config.yaml",
}  # fmt: skip
# What each config itself says; the rest is given beside it.
SAYS = {
    "megatron": {"num_devices", "seq_len", "global_batch_size", "micro_batch_size", "stage_blocks", "recompute",
                 "precision", "optimizer", "virtual_stages", "zero_stage", "offload"},
    "deepspeed": {"global_batch_size", "micro_batch_size", "num_microbatches", "precision", "optimizer", "zero_stage",
                  "offload", "tp", "cp", "ep"},
    "accelerate": {"num_devices", "precision", "zero_stage", "dp_replicate", "dp_shard", "tp", "cp"},
    "torchtitan": {"seq_len", "micro_batch_size", "recompute", "precision", "optimizer", "zero_stage", "dp_replicate",
                   "dp_shard", "tp", "cp", "pp", "ep", "schedule", "virtual_stages"},
    "nanotron": {"num_devices", "seq_len", "micro_batch_size", "num_microbatches", "stage_blocks", "recompute",
                 "precision", "optimizer", "zero_stage", "dp_replicate", "dp_shard", "tp", "cp", "pp", "schedule"},
}  # fmt: skip


def random_plan(rng: random.Random, can: Abilities) -> Wanted:
    """A plan that keeps the rules of plans, with choices that a target has one by one: not all go together."""
    model = rng.choice(("llama3-8b", "llama2-7b", "llama2-13b", "mixtral-8x7b", "gpt3-1.3b"))
    pp = rng.choice((1, 1, 2, 4)) if "pp" in can.axes else 1
    schedule = rng.choice(can.schedules) if pp > 1 else ScheduleName.ONE_F_ONE_B
    virtual = 1 if schedule.rules.max_stages == 1 or pp == 1 else 2
    zero = rng.choice([stage for stage in {0, *can.zero_stages} if stage < 2 or not schedule.rules.splits_backward])
    shard = 1 if zero == 0 else rng.choice((2, 4, 8))
    tp, cp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2)) if can.cp_methods else 1
    sizes = even(preset(model).layers, pp * virtual)
    if model == "llama2-7b" and (pp, virtual) == (2, 1) and rng.random() < 0.5:
        sizes = (17, 15)
    num_full = rng.randint(1, min(sizes) - 1)
    block = tuple(Recompute.FULL if i < num_full else Recompute.NONE for size in sizes for i in range(size))
    modes = rng.choice((*can.recompute, block) if can.mixes_recompute else can.recompute)
    return Wanted(
        model,
        pp=pp, dp_replicate=rng.choice((1, 1, 2)) if zero else rng.choice((1, 2, 8)), dp_shard=shard, cp=cp, tp=tp,
        ep=2 if "ep" in can.axes and model.startswith("mixtral") and shard > 1 else 1, zero=zero,
        micro_batch=rng.choice((1, 2)), microbatches=rng.choice((8, 16)), seq_len=2048,
        precision=rng.choice(can.precisions), optimizer=rng.choice(can.optimizers),
        schedule=schedule, virtual_stages=virtual, stage_blocks=sizes,
        recompute=Recompute.NONE if schedule.rules.splits_backward and pp > 1 else modes,
        sequence_parallel=tp > 1 and rng.choice(can.sequence_parallel),
        offload=rng.choice(can.offloads), cp_method=rng.choice(can.cp_methods or tuple(ContextMethod)),
    )  # fmt: skip


def returned(name: str, wanted: Wanted) -> None:
    """Asserts that the layout comes back, with options for what the config does not say."""
    of = job(wanted)
    target, read = read_config(FILE_NAMES[name], written(target_called(name), of).text)
    assert target.name == name  # recognised
    said, layout = read.settings.said(), of.layout
    assert SAYS[name] <= said.keys()
    given = Given(
        layout.num_devices, layout.seq_len, layout.global_batch_size, layout.micro_batch_size, layout.precision,
        layout.optimizer, None if isinstance(layout.recompute, tuple) else layout.recompute,
    )  # fmt: skip
    for key in SAYS[name]:  # not because it was given
        assert said[key] == getattr(layout, key), key
    found, _notes = completed(read.settings, given, None)
    assert comparable(found, layout) == layout


def comparable(found: Layout, layout: Layout) -> Layout:
    """Configs without the model's sizes do not count its blocks."""
    return replace(found, stage_blocks=found.stage_blocks or layout.stage_blocks)


@pytest.mark.parametrize(("name", "wanted"), [(name, each) for name in FILE_NAMES for each in ACCEPTED[name]])
def test_every_plan_that_is_taken_comes_back(name: str, wanted: Wanted) -> None:
    returned(name, wanted)


@pytest.mark.parametrize("name", FILE_NAMES)
def test_random_plans_come_back_or_are_refused(name: str) -> None:
    target, rng, num_taken = target_called(name), random.Random(14), 0
    assert target.abilities is not None
    for _ in range(200):
        wanted = random_plan(rng, target.abilities)
        if not refused(target, job(wanted)):
            returned(name, wanted)
            num_taken += 1
    assert num_taken >= 20


@pytest.mark.parametrize("name", ["megatron", "nanotron"])
@pytest.mark.parametrize("model", ["llama2-7b", "llama3-70b", "gpt3-1.3b", "mixtral-8x7b", "deepseek-v3", "qwen3-8b"])
def test_the_model_is_told_by_its_sizes(name: str, model: str) -> None:
    of = job(Wanted(model, dp_shard=8, zero=1, seq_len=2048))
    if refused(target_called(name), of):
        assert name == "nanotron"
        assert model not in ("llama2-7b", "llama3-70b")
        return
    _target, read = read_config(FILE_NAMES[name], written(target_called(name), of).text)
    assert read.shape is not None
    found = preset_of_shape(read.shape)
    assert found is not None
    assert found.name == model


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("train.sh", "pretrain_gpt.py --tensor-model-parallel-size two", "invalid int value"),
        ("train.sh", "pretrain_gpt.py --tensor-model-parallel-size 2 'x", "cannot be read"),
        ("train.sh", "A=xx\n" + "A=$A$A\n" * 60 + "x --tensor-model-parallel-size $A", "more than 65,536"),
        ("train.sh", "x --tensor-model-parallel-size 2 --use-torch-fsdp2", "use-torch-fsdp2"),
        ("train.sh", "x --nproc-per-node 8 --use-distributed-optimizer --tensor-model-parallel-size 2 "
         "--num-distributed-optimizer-instances 3", "no multiple"),
        ("train.sh", "x --tensor-model-parallel-size 2 --cp-comm-type a2a+p2p", "not priced"),
        ("train.sh", "x --tensor-model-parallel-size 1 --pipeline-model-parallel-layout 'E(t|)*999999L'", "too long"),
        ("train.sh", "x --tensor-model-parallel-size 1 --pipeline-model-parallel-layout 'Ettx|L'", "is not made of"),
        ("c.yaml", "distributed_type: DEEPSPEED\n", "DEEPSPEED"),
        ("c.yaml", "distributed_type: FSDP\nfsdp_config: [1]\n", "must be a section"),
        ("c.yaml", "distributed_type: &a FSDP\nx: *a\n", "aliases"),
        ("c.yaml", "distributed_type: " + "[" * 100_000, "inside one another"),
        ("c.yaml", "distributed_type: !!python/object/apply:os.system ['true']\n", "not YAML"),
        ("c.yaml", "distributed_type: {\n", "not YAML"),
        ("c.yaml", "parallelism: {dp: 2, tp: 2}\ntokens: {batch_accumulation_per_replica: 1}\n", "parallelism.pp"),
        ("c.yaml", "parallelism: {dp: 2, tp: 2, pp: x}\ntokens: {batch_accumulation_per_replica: 1}\n", "whole number"),
        ("d.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 7}}', "stage must be"),
        ("d.json", '{"zero_optimization": {"offload_param": {"device": "cpu"}}}', "offload_param"),
        ("d.json", '{"train_batch_size": 8', "not JSON"),
        ("t.toml", "[training]\nenable_cpu_offload = true\n", "enable_cpu_offload"),
        ("t.toml", "[training]\n[activation_checkpoint]\nmode = 'memory_budget'\n", "memory_budget"),
        ("t.toml", "[training\n[training]", "not TOML"),
        ("t.toml", "[training]\na" + ".a" * 60_000 + " = 1\n", "more than 200 dots"),
        ("c.yaml", "parallelism: {dp: 2, tp: 2, pp: 2}\ntokens: {batch_accumulation_per_replica: 1}\n"
         "model: {model_config: {num_hidden_layers: null, hidden_size: 8}}\n", "no model"),
        ("notes.txt", "hello", "no config that is recognised"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_the_reason(name: str, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as found:
        read_config(name, text)
    assert found.value.hint


@pytest.mark.parametrize("name", FILE_NAMES)
@pytest.mark.parametrize("number", [0, -1, -7, 3, 10**18])
def test_no_number_breaks_the_reader(name: str, number: int) -> None:
    """Each whole number of a config in turn is another one: it is refused, or it gives a layout whose numbers agree."""
    wanted = ACCEPTED[name][2]
    text = written(target_called(name), job(wanted)).text
    lines = text.splitlines(keepends=True)
    for at, line in enumerate(lines):
        if line.startswith("#") or not re.search(r"(?<![\w.-])\d+(?![\w.-])", line):
            continue
        changed = re.sub(r"(?<![\w.-])\d+(?![\w.-])", str(number), line, count=1)
        try:
            _target, read = read_config(FILE_NAMES[name], "".join([*lines[:at], changed, *lines[at + 1 :]]), name)
            found, _notes = completed(read.settings, Given(num_devices=64, global_batch_size=64), 2048)
        except InputError:
            continue
        assert found.pp * found.dp * found.cp * found.tp == found.num_devices
        assert found.dp * found.micro_batch_size * found.num_microbatches == found.global_batch_size


def test_variables_and_arrays_of_a_script_are_read() -> None:
    script = """#!/bin/bash
    TP=4  # of 8
    PP=${PP:-2}
    LAYERS=16
    ARGS="
        --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP_SIZE:-2}
        --num-layers ${LAYERS}"
    MORE=(
        --hidden-size 1024 --num-attention-heads 16
        --micro-batch-size 1 --global-batch-size 64 --seq-length 2048 --lr 1e-4
        --pipeline-model-parallel-layout "Et*7|t*9L"
    )
    torchrun --nproc_per_node=8 --nnodes=2 pretrain_gpt.py $ARGS ${MORE[@]} --bf16
    """
    target, read = read_config("train.sh", script)
    said = read.settings
    assert target.name == "megatron"
    assert (said.tp, said.pp, said.num_devices, said.stage_blocks) == (4, 2, 16, (7, 9))
    assert (said.micro_batch_size, said.global_batch_size, said.dp_replicate) == (1, 64, 2)
    assert any("--lr" in note for note in read.notes)


@pytest.mark.parametrize(
    ("name", "word"), [("accelerate", "compile"), ("torchtitan", "compile"), ("megatron", "tp-comm-overlap")]
)
@pytest.mark.parametrize("is_given", [False, True])
def test_what_a_kernel_does_to_the_price_comes_back(name: str, word: str, is_given: bool) -> None:
    target, kernels = target_called(name), (word,) if is_given else ()
    split: dict[str, Any] = {"tp": 4, "sequence_parallel": True} if name == "megatron" else {"dp_shard": 8, "zero": 3}
    plain = job(model="llama3-8b", **split)
    plan = plain.plan.model_copy(update={"framework": "+".join((target.framework or name, *kernels))})
    text = written(target, replace(plain, plan=plan)).text
    assert read_config(FILE_NAMES[name], text)[1].kernels == kernels
