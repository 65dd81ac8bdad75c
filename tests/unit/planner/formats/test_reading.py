"""What a config says counts in its price, or is said not to."""

import json

import pytest

from costmodels.vocabulary.choices import Optimizer, Precision
from planner.api.pinned import pinned_run, price_run
from planner.errors import InputError, PlanError
from planner.formats.completion import Given, completed
from planner.formats.registry import read_config
from planner.formats.settings import layout_of
from planner.translate.pinned import shared_out

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 4096
local_batch_size = {local}
global_batch_size = {whole}
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
data_parallel_shard_degree = 4
tensor_paralel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def notes_of(name: str, text: str) -> str:
    return " / ".join(read_config(name, text, None)[1].notes)


def test_torchtitan_takes_its_global_batch_under_a_pipeline_too() -> None:
    """It was dropped: a sixteenth of the step was priced."""
    read = read_config("job.toml", TITAN.format(local=8, whole=256), None)[1]
    layout, _ = completed(read.settings, Given(num_devices=8), None)
    assert (layout.global_batch_size, layout.micro_batch_size, layout.num_microbatches) == (256, 2, 32)
    assert "empties the pipeline after each" in " ".join(read.notes)
    assert "empties" not in notes_of("job.toml", TITAN.format(local=8, whole=32))
    with pytest.raises(InputError, match="2 does not divide local_batch_size 7"):
        read_config("job.toml", TITAN.format(local=7, whole=32), None)


DEEPSPEED = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
MEGATRON = f"pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 1 --deepspeed <<E\n{DEEPSPEED}\nE\n"


@pytest.mark.parametrize(
    ("text", "format_name"),
    [
        (DEEPSPEED, "deepspeed"),
        (TITAN.format(local=8, whole=32), "torchtitan"),
        (FSDP, "accelerate"),
        (MEGATRON, "megatron"),  # whatever other configs stand in it
    ],
)
@pytest.mark.parametrize("name", ["job.cfg", "job", "job.conf.bak"])
def test_a_config_is_known_by_what_it_holds(name: str, text: str, format_name: str) -> None:
    """It was known by the ending of its name alone: ds.cfg was refused."""
    assert read_config(name, text)[0].name == format_name


def test_a_script_of_another_launcher_is_no_config() -> None:
    with pytest.raises(InputError, match="run is no config that is recognised") as error:
        read_config("run", f"#!/bin/sh\ncat > c.yaml <<E\n{FSDP}E\naccelerate launch --config_file c.yaml a.py\n")
    assert "planner import --from FORMAT" in error.value.hint


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.toml", TITAN.format(local=8, whole=32), "not read: parallelism.tensor_paralel_degree"),
        (
            "ds.json",
            '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": '
            '0.5}}, "activation_checkpointing": {"cpu_checkpointing": true, "profile": false}, "moe": {"a": 1}}',
            "not read: zero_optimization.offload_optimizer.ratio, activation_checkpointing.cpu_checkpointing, moe",
        ),
    ],
)
def test_options_that_are_not_known_are_listed(name: str, text: str, said: str) -> None:
    assert said in notes_of(name, text)


def test_accelerate_takes_only_degrees_that_make_its_processes() -> None:
    text = """
distributed_type: FSDP
num_processes: {processes}
mixed_precision: bf16
fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: true}}
parallelism_config: {{parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}}
"""
    assert read_config("acc.yaml", text.format(processes=8), None)[1].settings.tp == 2
    with pytest.raises(InputError, match="make 8 processes, num_processes is 16"):
        read_config("acc.yaml", text.format(processes=16), None)


def test_words_of_a_script_behind_a_list_of_types_are_no_types() -> None:
    script = """
ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --micro-batch-size 1
    --global-batch-size 64 --context-parallel-size 2 --cp-comm-type p2p {more}
)
torchrun --nproc-per-node 8 pretrain_gpt.py ${{ARGS[@]}}
"""
    assert read_config("run.sh", script.format(more=""), None)[1].settings.cp == 2
    with pytest.raises(InputError, match="layers that differ in --cp-comm-type"):
        read_config("run.sh", script.format(more="a2a"), None)


STAGES = """
[model]
name = "llama3"
flavor = "{flavor}"
[training]
local_batch_size = 16
seq_len = 8192
[parallelism]
pipeline_parallel_degree = {pp}
data_parallel_shard_degree = 1
pipeline_parallel_schedule = "{schedule}"
{more}
[activation_checkpoint]
mode = "full"
"""
FEWER = "pipeline_parallel_first_stage_less_layers = 2\npipeline_parallel_last_stage_less_layers = 3"


@pytest.mark.parametrize(
    ("flavor", "layers", "pp", "schedule", "more", "held"),
    [
        ("8B", 32, 4, "1F1B", "", (8, 9, 8, 7)),
        ("8B", 32, 4, "Interleaved1F1B", "", (4, 5, 4, 4, 4, 4, 4, 3)),
        ("70B", 80, 8, "1F1B", "", (10, 11, 10, 10, 10, 10, 10, 9)),
        ("8B", 32, 4, "Interleaved1F1B", FEWER, (3, 5, 5, 5, 5, 4, 4, 1)),
    ],
)
def test_torchtitan_counts_embedding_and_head_where_it_cuts(
    flavor: str, layers: int, pp: int, schedule: str, more: str, held: tuple[int, ...]
) -> None:
    """Stages were taken to be equal."""
    read = read_config("job.toml", STAGES.format(flavor=flavor, pp=pp, schedule=schedule, more=more), None)[1]
    layout, _ = completed(read.settings, Given(num_devices=pp), None)
    assert layout.stage_blocks is None
    assert layout.end_blocks is not None
    assert not [note for note in read.notes if "not read" in note]
    assert shared_out(layers, layout.pp * layout.virtual_stages, layout.end_blocks) == held
    with pytest.raises(PlanError, match="no share for each of 64 stages"):
        shared_out(layers, 64, (4, 4))


def test_torchtitan_is_priced_with_the_cut_that_it_makes() -> None:
    read = read_config("job.toml", STAGES.format(flavor="8B", pp=4, schedule="1F1B", more=""), None)[1]
    layout, _ = completed(read.settings, Given(num_devices=4), None)
    plan = price_run(pinned_run("llama3-8b", "torchtitan", layout), "dgx-h100-80gb").plan
    assert layout_of(plan).stage_blocks == (8, 9, 8, 7)


OLD_TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 4
seq_len = 8192
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
compile = true
{more}
[experimental]
context_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
pipeline_parallel_microbatches = 2
[float8]
enable_float8_linear = true
[activation_checkpoint]
mode = "full"
"""


def test_torchtitan_is_read_under_its_older_names() -> None:
    """It was priced as if every degree were 1."""
    read = read_config("job.toml", OLD_TITAN.format(more=""), None)[1]
    said = read.settings
    assert (said.tp, said.cp, said.pp, said.dp_shard, said.precision) == (4, 2, 2, None, Precision.FP8)
    assert (said.micro_batch_size, said.num_microbatches, read.kernels) == (2, 2, ("compile",))
    assert "training.batch_size as training.local_batch_size" in read.notes[0]
    assert not [note for note in read.notes if "not read" in note]
    loss_alone = "[compile]\ncomponents = ['loss']\n"
    assert read_config("job.toml", loss_alone + OLD_TITAN.format(more=""), None)[1].kernels == ()
    with pytest.raises(InputError, match="older name of training.local_batch_size, and the file has both"):
        read_config("job.toml", OLD_TITAN.format(more="local_batch_size = 2"), None)


def test_deepspeed_makes_one_micro_batch_of_a_whole_batch_that_is_all_it_says() -> None:
    """Micro-batches of one sequence were assumed, whose accumulation nobody asked for."""
    read = read_config("ds.json", '{"train_batch_size": 256, "zero_optimization": {"stage": 2}}', None)[1]
    layout, _ = completed(read.settings, Given(num_devices=8, seq_len=2048), None)
    assert (layout.micro_batch_size, layout.num_microbatches) == (32, 1)
    trainer = '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}'
    assert read_config("ds.json", trainer, None)[1].settings.num_microbatches is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", Optimizer.SGD_MOMENTUM),
        ("--sgd-momentum 0.95", Optimizer.SGD_MOMENTUM),
        ("--sgd-momentum 0.0", Optimizer.SGD),
    ],
)
def test_megatron_has_momentum_unless_told_otherwise(said: str, expected: Optimizer) -> None:
    """It was read as SGD without, which keeps 4 bytes a parameter less."""
    text = f"torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --optimizer sgd {said}"
    assert read_config("run.sh", text, None)[1].settings.optimizer is expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"lr": 0.1}, Optimizer.SGD),
        ({"momentum": 0.9}, Optimizer.SGD_MOMENTUM),
        ({"momentum": 0}, Optimizer.SGD),
        ({"momentum": "auto"}, Optimizer.SGD),
    ],
)
def test_deepspeed_has_momentum_where_it_is_said(params: dict[str, object], expected: Optimizer) -> None:
    text = json.dumps({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": params}})
    assert read_config("ds.json", text, None)[1].settings.optimizer is expected


@pytest.mark.parametrize("momentum", ["much", 1, -0.5, float("nan")])
def test_a_momentum_that_is_none_is_refused(momentum: object) -> None:
    text = json.dumps({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"momentum": momentum}}})
    with pytest.raises(InputError, match=r"params.momentum must be a number from 0 to below 1"):
        read_config("ds.json", text, None)


@pytest.mark.parametrize("name", ["adamw", "AdamW", "ADAMW"])
def test_deepspeed_does_not_look_at_the_case_of_an_optimizer(name: str) -> None:
    text = '{{"train_batch_size": 8, "optimizer": {{"type": "{}"}}}}'
    assert read_config("ds.json", text.format(name), None)[1].settings.optimizer is Optimizer.ADAMW


NANOTRON = """
model: {{dtype: bfloat16, model_config: {{{model}}}}}
optimizer: {{zero_stage: 1, accumulate_grad_in_fp32: {in_fp32}, optimizer_factory: {{name: adamW}}}}
parallelism: {{dp: 8, pp: 1, tp: 1, tp_recompute_allgather: {in_fp32}, recompute_layer: false}}
tokens: {{batch_accumulation_per_replica: 4, micro_batch_size: 2, sequence_length: 2048}}
"""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", NANOTRON.format(model="is_llama_config: true", in_fp32="false"), "accumulate_grad_in_fp32 is false"),
        ("c.yaml", NANOTRON.format(model="is_llama_config: true", in_fp32="false"), "tp_recompute_allgather (false)"),
        (
            "ds.json",
            '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "overlap_comm": false}}',
            "though overlap_comm is false",
        ),
        (
            "ds.json",
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_scatter": false, "cpu_offload": false, '
            '"round_robin_gradients": false}}',
            "not read: zero_optimization.reduce_scatter (false)",
        ),
    ],
)
def test_what_changes_a_step_where_it_is_false_is_said(name: str, text: str, said: str) -> None:
    assert said in notes_of(name, text)
    assert "round_robin" not in notes_of(name, text)


def test_nothing_is_said_of_what_is_as_it_always_is() -> None:
    assert notes_of("c.yaml", NANOTRON.format(model="is_llama_config: true", in_fp32="true")) == (
        "not read: parallelism.tp_recompute_allgather"
    )


def test_nanotron_has_models_that_are_not_read() -> None:
    """A Mamba was priced as a Llama of default sizes."""
    with pytest.raises(InputError, match="other than Llama and dense Qwen2"):
        read_config("c.yaml", NANOTRON.format(model="is_mamba_config: true, d_model: 1536", in_fp32="true"), None)


ACCELERATE = """
distributed_type: FSDP
num_machines: {machines}
num_processes: 16
{more}
fsdp_config: {{fsdp_version: 1, fsdp_sharding_strategy: HYBRID_SHARD}}
"""


def test_accelerate_says_what_it_assumes() -> None:
    target, read = read_config("a.yaml", ACCELERATE.format(machines=2, more="dynamo_backend: INDUCTOR"), None)
    layout, assumed = completed(read.settings, Given(None, 2048, 32, 1), None)
    notes = " / ".join((*read.notes, *assumed))
    assert target.software(read) == "accelerate+compile"
    assert layout.precision is Precision.FP32
    assert "mixed_precision is not said: fp32 is assumed" in notes
    assert "recomputation none is assumed" in notes
    for word, precision in (("no", Precision.FP32), ("'no'", Precision.FP32), ("bf16", Precision.BF16)):
        text = ACCELERATE.format(machines=2, more=f"mixed_precision: {word}\ndynamo_backend: 'NO'")
        read = read_config("a.yaml", text, None)[1]
        assert (read.settings.precision, read.kernels, read.notes) == (precision, (), ())


def test_accelerate_makes_a_replica_of_every_node() -> None:
    """It was refused, though the file says how many GPUs a node has."""
    said = read_config("a.yaml", ACCELERATE.format(machines=2, more=""), None)[1].settings
    assert (said.dp_replicate, said.dp_shard, said.zero_stage) == (2, 8, 3)
    with pytest.raises(InputError, match="num_processes 16, num_machines 3"):
        read_config("a.yaml", ACCELERATE.format(machines=3, more=""), None)


def test_accelerate_splits_over_tp_alone_without_fsdp() -> None:
    """It has no mesh for FSDP2 then, which ends with a KeyError (utils/fsdp_utils.py): nor has its own example."""
    text = "distributed_type: MULTI_GPU\nnum_processes: {}\nparallelism_config: {{parallelism_config_tp_size: 8}}"
    found = read_config("a.yaml", text.format(8), None)[1].settings
    assert (found.tp, found.dp_replicate, found.dp_shard, found.zero_stage) == (8, 1, 1, 0)
    with pytest.raises(InputError, match="make 8 processes, num_processes is 16"):
        read_config("a.yaml", text.format(16), None)


@pytest.mark.parametrize("kind", ["distributed_type: MULTI_GPU", "distributed_type: FSDP"])
def test_accelerate_refuses_a_parallelism_config_without_fsdp2(kind: str) -> None:
    text = f"{kind}\nnum_processes: 8\nparallelism_config: {{parallelism_config_tp_size: 4, "
    text += "parallelism_config_dp_shard_size: 2}"
    with pytest.raises(InputError, match="goes with distributed_type FSDP and fsdp_version 2 alone"):
        read_config("a.yaml", text, None)


@pytest.mark.parametrize(
    ("optimizer", "meant"),
    [
        ({"type": "Adam"}, Optimizer.ADAMW),
        ({"type": "Adam", "params": {"lr": 1e-4, "adam_w_mode": True}}, Optimizer.ADAMW),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, Optimizer.ADAM),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, Optimizer.ADAMW),
    ],
)
def test_deepspeed_means_adamw_by_adam_unless_it_is_told(optimizer: dict[str, object], meant: Optimizer) -> None:
    """runtime/engine.py, effective_adam_w_mode: Adam was read as torch's, and exported as what trains AdamW."""
    document = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": optimizer}
    text = json.dumps({**document, "zero_allow_untested_optimizer": True})
    read = read_config("ds.json", text, None)[1]
    assert read.settings.optimizer is meant
    assert "zero_allow_untested_optimizer" not in " ".join(read.notes)
