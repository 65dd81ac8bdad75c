"""What a config says counts in its price, or is said not to."""

import pytest

from planner.errors import InputError
from planner.formats.completion import Given, completed
from planner.formats.registry import read_config

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
