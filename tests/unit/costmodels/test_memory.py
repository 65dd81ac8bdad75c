import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.ledger import StateBytes
from costmodels.memory import Division, KeptStates, state_bytes
from costmodels.recipe import load_recipe


def states_of(trainable: float, frozen: float = 0.0, **choices: object) -> StateBytes:
    """State bytes for choices given by name."""
    names = ("precision", "optimizer", "facts")
    kept = KeptStates(**{name: choices[name] for name in names if name in choices})  # type: ignore[arg-type]
    left = {name: value for name, value in choices.items() if name not in names}
    return state_bytes(trainable, frozen, kept, Division(**left))  # type: ignore[arg-type]


def per_parameter(zero_stage: int, num_shards: int, precision: str = "bf16", optimizer: str = "adamw") -> float:
    return states_of(1.0, precision=precision, optimizer=optimizer, zero_stage=zero_stage, num_shards=num_shards).total


@pytest.mark.parametrize("shards", [1, 2, 8, 64])
def test_bytes_per_parameter_of_mixed_precision_adam(shards: int) -> None:
    assert per_parameter(0, shards) == 18
    assert per_parameter(1, shards) == pytest.approx(6 + 12 / shards)
    assert per_parameter(2, shards) == pytest.approx(2 + 16 / shards)
    assert per_parameter(3, shards) == pytest.approx(16 / shards)


def test_full_precision_keeps_a_four_byte_copy_where_states_are_sharded() -> None:
    assert per_parameter(0, 1, "fp32") == 16
    assert per_parameter(1, 4, "fp32") == 8 + 12 / 4
    assert per_parameter(3, 4, "fp32") == 4


def test_full_precision_on_the_host_keeps_a_copy_on_the_device() -> None:
    state = states_of(1.0, precision="fp32", optimizer="adamw", zero_stage=0, num_shards=1, on_host=True)
    assert state == StateBytes(parameters=4, gradients=4, optimizer=0)


def test_other_frameworks_keep_a_copy_in_full_precision() -> None:
    facts = load_recipe("torchtitan").state
    found = states_of(1.0, precision="fp32", optimizer="adamw", zero_stage=0, num_shards=1, facts=facts)
    assert found.parameters == 4


def test_sgd_keeps_no_moments_but_one_of_momentum() -> None:
    assert per_parameter(0, 1, "bf16", "sgd-momentum") == 14
    assert per_parameter(3, 2, "bf16", "sgd-momentum") == 6
    assert per_parameter(0, 1, "bf16", "sgd") == 10
    assert per_parameter(3, 2, "bf16", "sgd") == 4


def test_the_parts() -> None:
    state = states_of(1e9, precision="bf16", optimizer="adam", zero_stage=1, num_shards=4)
    assert state == StateBytes(parameters=2e9, gradients=4e9, optimizer=3e9, moments=2e9)


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    state = states_of(0, frozen=100, precision="bf16", optimizer="adamw", zero_stage=0, num_shards=1)
    assert state == StateBytes(parameters=200, gradients=0, optimizer=400)


@pytest.mark.parametrize(("stage", "expected"), [(0, 2 + 4), (1, 2 + 4), (2, 2 + 4 / 8), (3, 2 / 8 + 4 / 8)])
def test_offloading_leaves_the_copy_for_compute_and_gradients(stage: int, expected: float) -> None:
    state = states_of(1, precision="bf16", optimizer="adamw", zero_stage=stage, num_shards=8, on_host=True)
    assert state.total == expected
    assert state.optimizer == state.moments == 0


@given(stage=st.integers(0, 3), shards=st.integers(2, 512), precision=st.sampled_from(["bf16", "fp32"]))
def test_more_sharding_never_takes_more(stage: int, shards: int, precision: str) -> None:
    assert per_parameter(stage, shards + 1, precision) <= per_parameter(stage, shards, precision)
    if stage < 3:
        assert per_parameter(stage + 1, shards, precision) <= per_parameter(stage, shards, precision)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"precision": "int4"}, "precision must be one of"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, adam, sgd, sgd-momentum, got 'lion'"),
        ({"zero_stage": 4}, "ZeRO stage must be 0, 1, 2 or 3, got 4"),
        ({"num_shards": 0}, "number of shards must be at least 1, got 0"),
    ],
)
def test_unknown_values_are_named(change: dict[str, str | int], rule: str) -> None:
    arguments = {"precision": "bf16", "optimizer": "adamw", "zero_stage": 1, "num_shards": 2, **change}
    with pytest.raises(ValueError, match=rule):
        states_of(1, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("shards", [2, 8, 32])
def test_bytes_per_parameter_of_nanotron(shards: int) -> None:
    """static_memory_gb of the sweep's rows: 18 on one data-parallel rank, 20 on several, 10 + 14/dp under ZeRO 1."""
    recipe = load_recipe("nanotron")

    def held(zero_stage: int, num_shards: int) -> float:
        return states_of(
            1.0,
            precision="bf16",
            optimizer="adamw",
            zero_stage=zero_stage,
            num_shards=num_shards,
            facts=recipe.state,
            is_replicated=num_shards > 1,
        ).total

    gathered = recipe.memory.gathered_update_bytes.value + recipe.memory.gathered_update_shard_bytes.value / shards
    assert held(0, 1) == 18
    assert held(0, shards) == 20
    assert held(1, shards) + gathered == pytest.approx(10 + 14 / shards)


@pytest.mark.parametrize(("precision", "held", "reduced"), [("fp16", 2, 2), ("bf16", 2 + 4, 4)])
def test_deepspeed_sums_16_bit_gradients_apart_under_bf16_alone(precision: str, held: float, reduced: float) -> None:
    """BF16_Optimizer: bf16 parameters and gradients and an fp32 sum on every rank, master and moments divided."""
    facts = load_recipe("megatron-deepspeed-2022").state
    state = states_of(1.0, precision=precision, optimizer="adamw", facts=facts, zero_stage=1, num_shards=8)
    assert (state.parameters, state.gradients, state.optimizer) == (2, held, 12 / 8)
    assert facts.reduced_bytes(precision) == reduced
    assert load_recipe("megatron-deepspeed-2021").state.held_gradient_bytes(precision) == 2


@pytest.mark.parametrize(("precision", "gradient"), [("fp16", 2), ("bf16", 4)])
@pytest.mark.parametrize("recipe", ["megatron-lm-2022", "megatron-core-overlap"])
def test_megatron_sums_gradients_in_fp32_under_bf16_alone(recipe: str, precision: str, gradient: float) -> None:
    """16 bytes a parameter under fp16 while activations are held, 18 under bf16."""
    facts = load_recipe(recipe).state
    state = states_of(1.0, precision=precision, optimizer="adamw", facts=facts, zero_stage=0, num_shards=1)
    assert (state.total, facts.reduced_bytes(precision)) == (2 + gradient + 12, gradient)
