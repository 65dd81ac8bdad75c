"""What is exported is accepted by parsers written again from each target's source, and says what the plan says."""

import json
import os
import subprocess
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import yaml

from costmodels.vocabulary.choices import Offload, Optimizer, Recompute
from planner.cli.export import exported
from planner.formats.registry import target_called
from planner.formats.settings import Job
from tests.unit.planner.formats import declared
from tests.unit.planner.formats.cases import ACCEPTED, FULL, NONE
from tests.unit.planner.formats.plans import Wanted, job


def text_of(name: str, of: Job) -> str:
    return exported(target_called(name), of).text


@pytest.mark.parametrize("wanted", ACCEPTED["megatron"])
def test_megatron(wanted: Wanted) -> None:
    of = job(wanted)
    options, words = declared.torchrun_words(declared.words_of_script(text_of("megatron", of)))
    assert int(options["--nnodes"]) * int(options["--nproc-per-node"]) == of.plan.num_devices
    assert words[0] == "pretrain_gpt.py"
    given = declared.megatron_arguments(words[1:])
    layout, shape = of.layout, of.shape
    assert shape is not None
    assert (given["tensor_model_parallel_size"], given["pipeline_model_parallel_size"]) == (layout.tp, layout.pp)
    assert (given["context_parallel_size"], given["expert_model_parallel_size"]) == (layout.cp, layout.ep)
    assert given["global_batch_size"] == layout.global_batch_size
    assert (given["num_layers"], given["hidden_size"]) == (shape.layers, shape.hidden)
    assert given["qk_layernorm"] is (shape.qk_norm or shape.latent_attention is not None)  # gpt_layer_specs.py
    if given["pipeline_model_parallel_layout"] is not None:
        stages = declared.megatron_stages(given["pipeline_model_parallel_layout"])
        assert tuple(stage.count("t") for stage in stages) == layout.stage_blocks
    if given["optimizer"] == "sgd":  # which has a momentum of 0.9 where none is given
        assert given["sgd_momentum"] == (0.9 if layout.optimizer is Optimizer.SGD_MOMENTUM else 0)
    assert given["optimizer_cpu_offload"] is (layout.offload is Offload.CPU)
    assert (given["recompute_granularity"] is None) is (layout.recompute is Recompute.NONE)


@pytest.mark.parametrize("wanted", ACCEPTED["megatron"])
def test_megatron_has_the_environment_that_its_arguments_ask_for(wanted: Wanted) -> None:
    """validate_args ends a run of tp or cp without CUDA_DEVICE_MAX_CONNECTIONS=1, and one of Megatron-FSDP with it."""
    of = job(wanted)
    shown = 'torchrun() { printf %s "${CUDA_DEVICE_MAX_CONNECTIONS-}"; }; '
    without = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    ran = subprocess.run(["bash", "-c", shown + text_of("megatron", of)], env=without, capture_output=True, check=True)
    asks = of.layout.tp * of.layout.cp > 1 and of.layout.zero_stage <= 1
    assert ran.stdout.decode() == ("1" if asks else "")


@pytest.mark.parametrize("wanted", ACCEPTED["nemo"])
def test_nemo(wanted: Wanted) -> None:
    of = job(wanted)
    document = yaml.safe_load(text_of("nemo", of))
    assert document.pop("mixed_precision") in ("bf16_mixed", "fp16_mixed", "bf16_with_fp8_current_scaling_mixed")
    for section, fields in document.items():
        assert set(fields) <= declared.NEMO[section], section
    model, optimizer = document["model"], document["optimizer"]
    assert model["tensor_model_parallel_size"] == of.layout.tp
    if optimizer["optimizer"] == "sgd":
        assert optimizer["sgd_momentum"] == (0.9 if of.layout.optimizer is Optimizer.SGD_MOMENTUM else 0)
    if of.layout.offload is Offload.CPU:  # of OptimizerConfig, which leaves all states where they are by itself
        assert optimizer["optimizer_offload_fraction"] == 1.0
        assert optimizer["use_precision_aware_optimizer"]
        assert optimizer["use_distributed_optimizer"]
        assert document["ddp"]["use_distributed_optimizer"]
    stages = model.get("pipeline_model_parallel_layout")
    if stages is not None:
        counted = [stage.count("t") for stage in declared.megatron_stages(stages)]
        assert tuple(counted) == of.layout.stage_blocks
    assert model.get("virtual_pipeline_model_parallel_size", 1) == of.layout.virtual_stages


@pytest.mark.parametrize("wanted", ACCEPTED["torchtitan"])
def test_torchtitan(wanted: Wanted) -> None:
    of, layout = job(wanted), job(wanted).layout
    document = tomllib.loads(text_of("torchtitan", of))
    declared.check(document, declared.TORCHTITAN)
    degrees, training = document["parallelism"], document["training"]
    world = (
        degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
        * degrees["context_parallel_degree"] * degrees["tensor_parallel_degree"] * degrees["pipeline_parallel_degree"]
    )  # fmt: skip
    assert world == of.plan.num_devices
    dp = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
    assert training["global_batch_size"] % (training["local_batch_size"] * dp) == 0  # trainer.py
    if layout.pp > 1:
        parts = degrees["module_fqns_per_model_part"]
        assert [name for part in parts for name in part] == [
            "tok_embeddings", *(f"layers.{i}" for i in range(layout.num_blocks or 0)), "norm", "output"
        ]  # fmt: skip
        assert len(parts) == layout.pp * layout.virtual_stages
        micro = training["local_batch_size"] // degrees["pipeline_parallel_microbatch_size"]
        assert micro == layout.num_microbatches


@pytest.mark.parametrize("wanted", ACCEPTED["deepspeed"])
def test_deepspeed(wanted: Wanted) -> None:
    of = job(wanted)
    document = json.loads(text_of("deepspeed", of))
    declared.check(document, declared.DEEPSPEED)
    dp = of.plan.num_devices // (of.layout.tp * of.layout.cp)
    product = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * dp
    assert document["train_batch_size"] == product  # _batch_assertion
    assert document["zero_optimization"]["stage"] == of.layout.zero_stage
    has_momentum = of.layout.optimizer is Optimizer.SGD_MOMENTUM
    params = document["optimizer"].get("params", {})
    assert params.get("momentum", 0) == (0.9 if has_momentum else 0)
    is_adam = of.layout.optimizer is Optimizer.ADAM  # whose decay is AdamW's where nothing is said: runtime/engine.py
    assert params.get("adam_w_mode", True) is not is_adam
    if of.layout.zero_stage > 0 and document["optimizer"]["type"] == "SGD":  # _do_optimizer_sanity_check
        assert document["zero_allow_untested_optimizer"]


@pytest.mark.parametrize("wanted", ACCEPTED["accelerate"])
def test_accelerate(wanted: Wanted) -> None:
    of = job(wanted)
    document = yaml.safe_load(text_of("accelerate", of))
    declared.check(document, declared.ACCELERATE)
    parallel = document.get("parallelism_config")
    if parallel is not None:
        sizes = [value for key, value in parallel.items() if key.endswith("_size")]
        product = 1
        for size in sizes:
            product *= size
        assert product == document["num_processes"] == of.plan.num_devices
    if document["distributed_type"] == "FSDP" and parallel is not None:  # whose mesh it looks up: fsdp_dim_names
        assert parallel["parallelism_config_dp_shard_size"] * parallel["parallelism_config_cp_size"] > 1
    assert document["num_machines"] * 8 >= document["num_processes"]


@pytest.mark.parametrize("wanted", ACCEPTED["nanotron"])
def test_nanotron(wanted: Wanted) -> None:
    of = job(wanted)
    document = yaml.safe_load(text_of("nanotron", of))
    declared.check(document, declared.NANOTRON)
    degrees = document["parallelism"]
    world = degrees["dp"] * degrees["pp"] * degrees["tp"] * degrees["context_parallel_size"]
    assert world == of.plan.num_devices  # parallel/context.py
    assert document["optimizer"]["zero_stage"] == of.layout.zero_stage
    config = document["model"]["model_config"]
    assert sum(key.startswith("is_") for key in config) == 1


@pytest.mark.parametrize("wanted", ACCEPTED["maxtext"])
def test_maxtext(wanted: Wanted) -> None:
    of, layout = job(wanted), job(wanted).layout
    words = declared.words_of_script(text_of("maxtext", of))
    assert words[:2] == ["-m", "maxtext.trainers.pre_train.train"]
    given: dict[str, Any] = {}
    for word in words[2:]:
        key, _, value = word.partition("=")
        given[key] = yaml.safe_load(value)  # as its configuration reader does with values of the command line
    given["normalization_layer_epsilon"] = float(given.get("normalization_layer_epsilon", 0))  # 1e-05 is text to YAML
    declared.check(given, declared.MAXTEXT)
    inside, outside = 1, 1
    for key, value in given.items():
        inside *= value if key.startswith("ici_") else 1
        outside *= value if key.startswith("dcn_") else 1
    assert (inside, outside) == (min(8, of.plan.num_devices), given["num_slices"])
    whole = given["per_device_batch_size"] * of.plan.num_devices * given.get("gradient_accumulation_steps", 1)
    assert whole == layout.global_batch_size
    if given.get("quantization") == "fp8":  # types.py
        assert given.get("gradient_accumulation_steps", 1) == 1
    if layout.cp > 1:  # types.py, and cudnn_flash_attention in layers/attention_op.py
        assert given["context_parallel_strategy"] in ("all_gather", "ring")
        assert (given["attention"], given["packing"]) == ("cudnn_flash_te", False)
    if layout.pp > 1:
        assert given["num_pipeline_microbatches"] % layout.pp == 0
        assert given["num_layers_per_pipeline_stage"] * layout.pp == layout.num_blocks


@pytest.mark.parametrize("name", ["torchrun", "slurm", "skypilot"])
@pytest.mark.parametrize("wanted", ACCEPTED["torchrun"])
def test_shell_launchers(name: str, wanted: Wanted) -> None:
    of = job(wanted)
    text = text_of(name, of)
    if name == "skypilot":
        document = yaml.safe_load(text)
        # skypilot-org/skypilot@0048bbf: docs/source/reference/yaml-spec.rst
        assert set(document) <= {"name", "workdir", "num_nodes", "resources", "setup", "run"}
        accelerator, _, count = document["resources"]["accelerators"].partition(":")
        assert (accelerator, int(count) * document["num_nodes"]) == ("H100", of.plan.num_devices)
        text = document["run"]
    if name == "slurm":
        assert f"#SBATCH --nodes={of.num_nodes}\n" in text
    options, words = declared.torchrun_words(declared.words_of_script(text))
    assert int(options["--nnodes"]) * int(options["--nproc-per-node"]) == of.plan.num_devices
    assert words == ["-m", "planner", "run", "plans/plan.json"]


@pytest.mark.parametrize("wanted", ACCEPTED["kubernetes"])
def test_train_job(wanted: Wanted) -> None:
    """Fields of kubeflow/trainer@v2.3.0: pkg/apis/trainer/v1alpha1/trainjob_types.go."""
    of = job(wanted)
    document = yaml.safe_load(text_of("kubernetes", of))
    assert (document["apiVersion"], document["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(document["spec"]) <= {"runtimeRef", "initializer", "trainer", "runtimePatches", "suspend", "managedBy"}
    trainer = document["spec"]["trainer"]
    assert set(trainer) <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert trainer["numNodes"] * trainer["numProcPerNode"] == of.plan.num_devices
    assert trainer["args"] == ["-m", "planner", "run", "plans/plan.json"]


@pytest.mark.parametrize("wanted", ACCEPTED["kubernetes-pytorchjob"])
def test_pytorch_job(wanted: Wanted) -> None:
    """Fields of kubeflow/trainer@v1.9.4: pkg/apis/kubeflow.org/v1/pytorch_types.go, common_types.go."""
    of = job(wanted)
    document = yaml.safe_load(text_of("kubernetes-pytorchjob", of))
    assert (document["apiVersion"], document["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = document["spec"]
    assert set(spec) <= {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    assert set(spec["pytorchReplicaSpecs"]) <= {"Master", "Worker"}
    nodes = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    assert nodes * int(spec["nprocPerNode"]) == of.plan.num_devices
    for replica in spec["pytorchReplicaSpecs"].values():
        assert set(replica) <= {"replicas", "template", "restartPolicy"}
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"


def test_blocks_that_a_target_chooses_itself_are_said() -> None:
    """Megatron-Core recomputes the first blocks of a stage, whichever the plan names."""
    first, last = (FULL,) * 4 + (NONE,) * 12, (NONE,) * 12 + (FULL,) * 4
    target = target_called("megatron")
    for modes, is_said in ((first * 2, False), (last * 2, True)):
        found = exported(target, job(Wanted(pp=2, dp_replicate=4, recompute=modes)))
        assert "--recompute-num-layers 4" in found.text
        assert any("the plan's are others" in note for note in found.notes) is is_said


@pytest.mark.parametrize(
    ("framework", "is_said"),
    [("nemo", True), ("megatron-core+tp-comm-overlap", True), ("megatron-core", False), ("planner", False)],
)
def test_nemo_says_what_the_price_takes_for_granted(framework: str, is_said: bool) -> None:
    """It was said of every plan, also of those that are priced without."""
    of = job(Wanted(tp=8, sequence_parallel=True))
    notes = exported(target_called("nemo"), replace(of, plan=of.plan.model_copy(update={"framework": framework}))).notes
    assert any("collectives of tensor parallelism beside the products" in note for note in notes) is is_said


@pytest.mark.parametrize("wanted", ACCEPTED["nemo"])
def test_nemo_says_what_environment_its_layout_asks_for(wanted: Wanted) -> None:
    """docs/performance-guide.md of Megatron Bridge; Megatron-FSDP refuses to run with it (training/config.py)."""
    of = job(wanted)
    notes = exported(target_called("nemo"), of).notes
    asks = of.layout.tp * of.layout.cp > 1 and of.layout.zero_stage <= 1
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in note for note in notes) is asks


def test_whose_rule_splits_operators_is_said() -> None:
    notes = exported(target_called("nemo"), job(Wanted(tp=8, sequence_parallel=True))).notes
    assert any("placements are not written" in note for note in notes)
