"""The coarse points: all that the rules allow, none besides, and contradicting pins refused by name and all at once."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.vocabulary.choices import ContextMethod, Optimizer, Precision, Recompute
from costmodels.vocabulary.mesh import Mesh
from costmodels.vocabulary.schedules import ScheduleName
from planner.axes.base import Asked, divisors
from planner.axes.registry import violations
from planner.errors import InputError
from planner.layout.layout import Layout, Limits, Pins, Training
from planner.space.search_space import build_space, typical_space

TRAINING = Training(global_batch_size=64, seq_len=1024, precision=Precision.BF16, optimizer=Optimizer.ADAMW)
LIMITS = Limits(
    num_devices=16,
    devices_per_node=8,
    num_pipeline_units=12,
    tensor_degrees=frozenset({2, 4, 8}),
    sequence_degrees=frozenset({2, 4}),
    context_splits=True,
)

devices = st.sampled_from([1, 2, 3, 4, 6, 8, 12])
limits = st.builds(
    Limits,
    num_devices=devices,
    devices_per_node=st.sampled_from([1, 2, 4, 8]),
    num_pipeline_units=st.integers(1, 9),
    tensor_degrees=st.frozensets(st.sampled_from([2, 3, 4, 8]), max_size=4),
    sequence_degrees=st.frozensets(st.sampled_from([2, 4]), max_size=2),
    context_splits=st.booleans(),
    num_experts=st.sampled_from([1, 1, 4, 6]),
    whole_expert_degrees=st.sampled_from([frozenset(), frozenset({2}), frozenset({2, 4})]),
    num_heads=st.sampled_from([1, 2, 6, 8]),
    cp_methods=st.sampled_from([tuple(ContextMethod), (ContextMethod.RING,), (ContextMethod.ALL_TO_ALL,)]),
)
trainings = st.builds(
    Training,
    global_batch_size=st.sampled_from([1, 2, 5, 6, 8, 12]),
    seq_len=st.sampled_from([6, 8, 64]),
    precision=st.just(Precision.BF16),
    optimizer=st.just(Optimizer.ADAMW),
)


def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), st.none(), st.none(), values)


degree = st.sampled_from([1, 1, 2, 3, 4, 8])
pins = st.builds(
    Pins,
    tp=maybe(degree),
    pp=maybe(degree),
    dp=maybe(degree),
    cp=maybe(degree),
    zero=maybe(st.integers(0, 3)),
    micro_batch=maybe(st.sampled_from([1, 2, 3])),
    schedule=maybe(st.sampled_from(list(ScheduleName))),
    virtual_stages=maybe(st.integers(1, 3)),
    recompute=maybe(st.sampled_from(list(Recompute))),
    sequence_parallel=maybe(st.booleans()),
    dp_replicate=maybe(st.sampled_from([1, 2])),
    ep=maybe(st.sampled_from([1, 2])),
    etp=maybe(st.sampled_from([1, 2])),
    cp_method=maybe(st.sampled_from(list(ContextMethod))),
)


SPLITTING = {
    ScheduleName.INTERLEAVED_ZERO_BUBBLE,
    ScheduleName.ZBV_ZERO_BUBBLE,
    ScheduleName.DUAL_PIPE_V,
    ScheduleName.ZB_2P,
}


def can_run(schedule: ScheduleName, p: int, v: int, m: int) -> bool:
    """The rules of torch.distributed.pipelining, written out: p ranks hold v stages each and run m micro-batches."""
    rounds = max(1, m // p)
    return {
        ScheduleName.ONE_F_ONE_B: v == 1 and m >= p,
        ScheduleName.GPIPE: v == 1,
        ScheduleName.INTERLEAVED_1F1B: v >= 2 and m % rounds == 0,
        ScheduleName.INTERLEAVED_ZERO_BUBBLE: m % rounds == 0,
        ScheduleName.ZBV_ZERO_BUBBLE: v == 2,
        ScheduleName.DUAL_PIPE_V: v == 2 and m >= 2 * p,
        ScheduleName.ZB_2P: v == 1,
    }[schedule]


def is_allowed(choice: Layout, training: Training, limits: Limits, pins: Pins) -> bool:
    """The rules of a coarse point, one a line."""
    mesh, m, batch = choice.mesh, choice.num_microbatches, training.global_batch_size
    pipelined = mesh.pp > 1
    rules = (
        mesh.world_size == limits.num_devices,
        mesh.dp * m * choice.micro_batch_size == batch,
        mesh.tp == 1 or mesh.tp in limits.tensor_degrees,
        mesh.tp <= limits.devices_per_node or pins.tp == mesh.tp,
        mesh.cp == 1 or (limits.context_splits and training.seq_len % mesh.cp == 0),
        mesh.pp * choice.virtual_stages <= limits.num_pipeline_units,
        not pipelined or can_run(choice.schedule, mesh.pp, choice.virtual_stages, m),
        choice.schedule is not ScheduleName.ZB_2P or pins.schedule is ScheduleName.ZB_2P,
        choice.schedule not in SPLITTING or (choice.zero_stage < 2 and choice.recompute is Recompute.NONE),
        pipelined or (choice.virtual_stages == 1 and choice.schedule is (pins.schedule or ScheduleName.ONE_F_ONE_B)),
        pipelined or choice.schedule in (ScheduleName.ONE_F_ONE_B, ScheduleName.GPIPE),
        choice.zero_stage > 0 or mesh.dp_shard == 1,
        choice.zero_stage == 0 or mesh.dp_shard * mesh.cp > 1,
        mesh.cp == 1 or choice.cp_method in limits.cp_methods,
        mesh.cp > 1 or choice.cp_method is (pins.cp_method or ContextMethod.ALL_GATHER),
        mesh.cp == 1 or choice.cp_method is not ContextMethod.ALL_TO_ALL or limits.num_heads % (mesh.tp * mesh.cp) == 0,
        not choice.sequence_parallel
        or (mesh.tp > 1 and mesh.tp in limits.sequence_degrees and training.seq_len % (mesh.tp * mesh.cp) == 0),
        limits.num_experts % mesh.ep == 0,
        mesh.dp_shard * mesh.cp * (1 if mesh.etp is None else mesh.tp) % mesh.ep == 0,
        mesh.etp is None or (mesh.etp == 1 and mesh.tp in limits.whole_expert_degrees),
        mesh.etp is None or (mesh.tp > 1 and mesh.ep > 1 and choice.sequence_parallel),
        pins.etp in (None, mesh.tp if mesh.etp is None else mesh.etp),
        pins.ep in (None, mesh.ep),
        pins.tp in (None, mesh.tp),
        pins.pp in (None, mesh.pp),
        pins.dp in (None, mesh.dp),
        pins.cp in (None, mesh.cp),
        pins.dp_replicate in (None, mesh.dp_replicate),
        pins.zero in (None, choice.zero_stage),
        pins.cp_method in (None, choice.cp_method),
        pins.micro_batch in (None, choice.micro_batch_size),
        pins.schedule in (None, choice.schedule),
        pins.virtual_stages in (None, choice.virtual_stages),
        pins.recompute in (None, choice.recompute),
        pins.sequence_parallel in (None, choice.sequence_parallel),
    )
    return all(rules)


@cache
def all_choices(training: Training, limits: Limits) -> list[Layout]:
    """Every combination of every value that any choice could have, sensible or not."""
    n = limits.num_devices
    meshes = [
        Mesh(pp, replicate, n // (pp * replicate * cp * tp), cp, tp, ep)
        for pp, replicate, cp, tp, ep in product(*[divisors(n)] * 4, divisors(limits.num_experts))
        if n % (pp * replicate * cp * tp) == 0
    ]
    batches = [(mesh, mb) for mesh in meshes for mb in divisors(training.global_batch_size)]
    rest = product(range(4), ScheduleName, (1, 2, 3, 4, 5), (False, True), ContextMethod)
    return [
        Layout(mesh, zero, mb, m, schedule, virtual, Recompute.NONE, sequence_parallel, cp_method=method)
        for (mesh, mb), (zero, schedule, virtual, sequence_parallel, method) in product(batches, rest)
        if (m := training.global_batch_size // (mesh.dp * mb))
    ]


@given(trainings, limits, pins)
def test_every_choice_keeps_every_rule(training: Training, limits: Limits, pins: Pins) -> None:
    try:
        choices = build_space(training, pins, limits).layouts
    except InputError:
        return
    assert choices
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert is_allowed(choice, training, limits, pins), choice


@pytest.mark.parametrize("num_devices", [1, 6, 8])
@pytest.mark.parametrize(
    "pins",
    [
        Pins(),
        Pins(pp=2),
        Pins(tp=2, zero=3),
        Pins(zero=0),
        Pins(cp=2),
        Pins(zero=2, dp=1),
        Pins(cp_method=ContextMethod.ALL_TO_ALL),
        Pins(schedule=ScheduleName.GPIPE),
        Pins(schedule=ScheduleName.INTERLEAVED_1F1B),
        Pins(schedule=ScheduleName.INTERLEAVED_ZERO_BUBBLE),
        Pins(schedule=ScheduleName.ZBV_ZERO_BUBBLE),
        Pins(schedule=ScheduleName.DUAL_PIPE_V),
        Pins(schedule=ScheduleName.ZB_2P),
        Pins(virtual_stages=2),
        Pins(micro_batch=2, sequence_parallel=False),
    ],
    ids=lambda p: p.describe() or "free",
)
def test_no_allowed_choice_is_missing(num_devices: int, pins: Pins) -> None:
    pins = replace(pins, recompute=Recompute.NONE)
    training = replace(TRAINING, global_batch_size=8, seq_len=8)
    limits = replace(LIMITS, num_devices=num_devices, num_pipeline_units=5, num_heads=4)
    expected = {c for c in all_choices(training, limits) if is_allowed(c, training, limits, pins)}
    try:
        found = set(build_space(training, pins, limits).layouts)
    except InputError:
        found = set[Layout]()
    assert found == expected


@given(st.integers(1, 2000))
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_free_choices_of_recomputation_are_all_there() -> None:
    choices = build_space(TRAINING, Pins(), LIMITS).layouts
    # Each block has its own, but where backward passes are split.
    assert {c.recompute for c in choices if not c.schedule.rules.splits_backward} == {None}
    assert {c.recompute for c in choices if c.schedule.rules.splits_backward} == {Recompute.NONE}
    assert {c.recompute for c in build_space(TRAINING, Pins(recompute=Recompute.FULL), LIMITS).layouts} == {
        Recompute.FULL
    }
    assert {c.zero_stage for c in choices} == {0, 1, 2, 3}
    assert {c.schedule for c in choices} == set(ScheduleName) - {ScheduleName.ZB_2P}  # which torch cannot run
    assert any(c.is_plain_fsdp for c in choices)


def test_a_pinned_micro_batch_may_be_larger_than_any_searched() -> None:
    training = replace(TRAINING, global_batch_size=4096)
    assert max(c.micro_batch_size for c in build_space(training, Pins(dp=16), LIMITS).layouts) == 64
    assert {c.micro_batch_size for c in build_space(training, Pins(dp=16, micro_batch=128), LIMITS).layouts} == {128}


def test_states_are_divided_over_ranks_of_context_where_there_is_one_of_data() -> None:
    limits = replace(LIMITS, num_devices=8)
    choices = build_space(TRAINING, Pins(cp=8, zero=3), limits).layouts
    assert {(c.zero_stage, c.mesh.num_shards, c.mesh.dp) for c in choices} == {(3, 8, 1)}
    # Replicas of groups that shard over ranks of context alone.
    hybrid = build_space(TRAINING, Pins(cp=4, dp=2, dp_replicate=2, zero=3), limits).layouts
    assert {(c.zero_stage, c.mesh.num_shards, c.mesh.dp_replicate) for c in hybrid} == {(3, 4, 2)}
    assert {c.zero_stage for c in build_space(TRAINING, Pins(cp=8), limits).layouts} == {0, 1, 2, 3}


def test_without_context_parallelism_there_is_one_way() -> None:
    layouts = build_space(TRAINING, Pins(), replace(LIMITS, num_heads=8)).layouts
    assert {c.cp_method for c in layouts if c.mesh.cp == 1} == {ContextMethod.ALL_GATHER}
    assert {c.cp_method for c in layouts if c.mesh.cp > 1} == set(ContextMethod)
    assert {c.cp_method for c in build_space(TRAINING, Pins(cp_method=ContextMethod.RING), LIMITS).layouts} == {
        ContextMethod.RING
    }


# -- contradictions ---------------------------------------------------------------------------------

CONTRADICTIONS = [
    (Pins(tp=3), "tp=3 does not divide the 16 GPUs; allowed: 1, 2, 4, 8, 16"),
    (Pins(pp=0), "pp=0 does not divide the 16 GPUs"),
    (Pins(cp=-2), "cp=-2 does not divide the 16 GPUs"),
    (Pins(dp=32), "dp=32 does not divide the 16 GPUs"),
    (Pins(pp=8, tp=4), "pp * tp = 32 does not divide the 16 GPUs"),
    (Pins(pp=2, dp=2, cp=1, tp=2), "pp * dp * cp * tp = 8, but there are 16 GPUs"),
    (Pins(micro_batch=3), "micro-batch 3 * dp 1 does not divide the global batch of 64 sequences"),
    (Pins(micro_batch=0), "micro-batch 0 * dp 1 does not divide the global batch of 64 sequences"),
    (Pins(micro_batch=8, dp=16), "micro-batch 8 * dp 16 does not divide the global batch of 64 sequences"),
    (Pins(tp=16), "tp=16 splits no parameter of the model; degrees that do: 2, 4, 8"),
    (Pins(pp=16), "pp 16 * virtual stages 1 exceeds the 12 pieces of the model"),
    (Pins(pp=4, virtual_stages=4), "pp 4 * virtual stages 4 exceeds the 12 pieces of the model"),
    (Pins(virtual_stages=0), "virtual stages must be at least 1, got 0"),
    (Pins(pp=1, schedule=ScheduleName.INTERLEAVED_1F1B), "Interleaved1F1B needs pp > 1"),
    (Pins(pp=1, schedule=ScheduleName.ZBV_ZERO_BUBBLE), "ZBVZeroBubble needs pp > 1"),
    (
        Pins(schedule=ScheduleName.ZBV_ZERO_BUBBLE, zero=3),
        "ZBVZeroBubble splits backward passes, so the ZeRO stage is 0 or 1, got 3",
    ),
    (
        Pins(schedule=ScheduleName.DUAL_PIPE_V, recompute=Recompute.FULL),
        "DualPipeV splits backward passes, so nothing can be recomputed, got full",
    ),
    (
        Pins(schedule=ScheduleName.DUAL_PIPE_V, virtual_stages=3),
        "3 virtual stages need one of the schedules Interleaved1F1B, InterleavedZeroBubble, not DualPipeV",
    ),
    (
        Pins(virtual_stages=1, schedule=ScheduleName.INTERLEAVED_1F1B),
        "Interleaved1F1B needs at least 2 virtual stages, got 1",
    ),
    (
        Pins(virtual_stages=2, schedule=ScheduleName.GPIPE),
        "2 virtual stages need one of the schedules Interleaved1F1B, InterleavedZeroBubble, not GPipe",
    ),
    (Pins(virtual_stages=2, pp=1), "2 virtual stages need pp > 1"),
    (Pins(zero=4), "ZeRO stage must be 0, 1, 2 or 3, got 4"),
    (
        Pins(zero=3, tp=4, pp=4),
        "zero=3 divides states over the ranks of dp_shard * cp, and with tp=4, pp=4 there is only one",
    ),
    (
        Pins(zero=1, dp=1, cp=1),
        "zero=1 divides states over the ranks of dp_shard * cp, and with dp=1, cp=1 there is only one",
    ),
    (
        Pins(cp=4, tp=2, cp_method=ContextMethod.ALL_TO_ALL),
        "cp_method=all-to-all gives every rank some of the heads, but tp 2 * cp 4 does not divide the 12 that heads of "
        "queries and of keys have in common; tp * cp may be 1, 2, 3, 4, 6, 12",
    ),
    (
        Pins(cp=2, cp_method=ContextMethod.RING),
        "cp_method=ring is not one that the framework has; allowed: all-gather, all-to-all",
    ),
    (Pins(tp=1, sequence_parallel=True), "sequence parallelism needs tp > 1"),
    (Pins(tp=8, sequence_parallel=True), "tp=8 cannot split activations along the sequence of 1024 tokens"),
]


@pytest.mark.parametrize(("pins", "message"), CONTRADICTIONS, ids=lambda v: v.describe() if isinstance(v, Pins) else "")
def test_a_contradiction_is_named(pins: Pins, message: str) -> None:
    limits = replace(LIMITS, num_heads=12, cp_methods=(ContextMethod.ALL_GATHER, ContextMethod.ALL_TO_ALL))
    found = violations(Asked(TRAINING, pins, limits))
    assert any(violation.startswith(message) for violation in found), found
    with pytest.raises(InputError, match="contradict") as caught:
        build_space(TRAINING, pins, limits)
    assert message in caught.value.message
    assert caught.value.exit_code == 2
    assert caught.value.hint


def test_the_batch_and_the_sequence_must_divide() -> None:
    odd = replace(TRAINING, global_batch_size=12, seq_len=1001)
    assert violations(Asked(odd, Pins(dp=8), LIMITS)) == ["dp=8 does not divide the global batch of 12 sequences"]
    assert violations(Asked(odd, Pins(cp=2), LIMITS)) == ["cp=2 does not divide the sequence of 1001 tokens"]
    (violation,) = violations(Asked(odd, Pins(tp=2, sequence_parallel=True), LIMITS))
    assert violation.endswith("along the sequence of 1001 tokens; degrees that can: none")
    mixing = replace(LIMITS, context_splits=False)
    (violation,) = violations(Asked(TRAINING, Pins(cp=2), mixing))
    assert violation.startswith("cp > 1 needs a model in which attention mixes positions and nothing else does")


def test_all_contradictions_are_said_at_once() -> None:
    pins = Pins(tp=3, pp=5, dp=7, zero=9, virtual_stages=0, sequence_parallel=True)
    with pytest.raises(InputError) as caught:
        build_space(TRAINING, pins, LIMITS)
    for part in ("tp=3", "pp=5", "dp=7", "ZeRO stage", "virtual stages must"):
        assert part in caught.value.message
    assert caught.value.message.count("\n  - ") >= 6


def test_pins_that_no_micro_batch_count_satisfies_are_an_error_too() -> None:
    with pytest.raises(InputError, match="no layout satisfies pp=4") as caught:
        build_space(TRAINING, Pins(pp=4, micro_batch=32, schedule=ScheduleName.ONE_F_ONE_B), LIMITS)
    assert "1F1B" in caught.value.hint


@pytest.mark.parametrize("batch", [1, 7, 63])
def test_an_odd_batch_still_has_layouts(batch: int) -> None:
    training = replace(TRAINING, global_batch_size=batch)
    assert all(batch % c.mesh.dp == 0 for c in build_space(training, Pins(), LIMITS).layouts)


def test_pins_describe_themselves() -> None:
    assert Pins().describe() == ""
    assert Pins(tp=4, schedule=ScheduleName.GPIPE, sequence_parallel=False).describe() == (
        "tp=4, schedule=GPipe, sequence_parallel=False"
    )


def test_typical_layouts_are_there_though_a_batch_has_few_sequences() -> None:
    """4096 sequences over 131,072 devices leave 1F1B too few micro-batches, unless ranks share sequences."""
    training = replace(TRAINING, global_batch_size=4096, seq_len=4096)
    limits = replace(LIMITS, num_devices=131_072, num_pipeline_units=64, tensor_degrees=frozenset({8}))
    found = typical_space(training, Pins(), limits).layouts
    assert {c.schedule for c in found if c.mesh.pp > 1} == {ScheduleName.ONE_F_ONE_B}
    assert min(c.mesh.cp for c in found) > 1
    assert not typical_space(training, Pins(cp=1), limits).layouts
    # Where there are enough sequences, none are shared.
    assert {c.mesh.cp for c in typical_space(training, Pins(), replace(limits, num_devices=16)).layouts} == {1}


def test_typical_layouts_split_along_the_sequence_and_keep_experts_in_a_node() -> None:
    limits = replace(LIMITS, num_devices=64, num_experts=16, num_pipeline_units=8)
    found = typical_space(TRAINING, Pins(), limits).layouts
    whole = build_space(TRAINING, Pins(micro_batch=1), limits).layouts
    assert {c.mesh.ep for c in whole} > {c.mesh.ep for c in found} == {1, 2, 4, 8}
    assert {(c.mesh.tp, c.sequence_parallel) for c in found} == {(1, False), (2, True), (4, True), (8, False)}
    assert {c.zero_stage for c in found} == {0, 1, 3}
    assert set(found) < set(whole)
    # What the user pins is another matter.
    pinned = typical_space(TRAINING, Pins(zero=2, ep=16, sequence_parallel=False), limits).layouts
    assert {(c.zero_stage, c.mesh.ep, c.sequence_parallel) for c in pinned} == {(2, 16, False)}
    assert {c.mesh.tp for c in pinned} == {1, 2, 4}


@pytest.mark.parametrize(("pins", "message"), CONTRADICTIONS)
def test_a_contradiction_has_no_usual_layouts(pins: Pins, message: str) -> None:
    """These were priced before the rule was looked at: a degree that splits nothing ended in a KeyError."""
    limits = replace(LIMITS, num_heads=12, cp_methods=(ContextMethod.ALL_GATHER, ContextMethod.ALL_TO_ALL))
    assert violations(Asked(TRAINING, pins, limits)), message
    assert not typical_space(TRAINING, pins, limits).layouts
