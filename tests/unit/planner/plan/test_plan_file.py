"""plan.json: what is written is read back, and what is damaged, foreign or contradictory is refused by name."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.vocabulary.choices import Optimizer, Precision, Recompute
from costmodels.vocabulary.schedules import ScheduleName
from costmodels.vocabulary.terms import MemoryTerm, Term
from planner.api import described
from planner.errors import PlanError
from planner.evaluation.evaluator import Evaluator
from planner.plan.checks import contradictions
from planner.plan.plan_file import plan_json, read_plan, write_plan
from planner.plan.schema import (
    Candidate,
    MeshSection,
    ModelSection,
    ModulePlacement,
    PipelineSection,
    PlacementSection,
    Plan,
    PredictionSection,
    RecomputeRule,
    SearchSection,
    StageSection,
    TrainingSection,
)
from planner.problem import Problem
from tests.planning import problem_of

degrees = st.integers(1, 64)
names = st.text(min_size=1, max_size=20)
seconds = st.floats(0, 1e6, allow_nan=False)
positive = st.floats(1e-9, 1e6, allow_nan=False)
placements = st.sampled_from(["replicate", "partial", "shard(0)", "shard(1)", "shard(12)"])
meshes = st.builds(MeshSection, **dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"), degrees))
predictions = st.builds(
    PredictionSection,
    step_time_s=positive,
    tokens_per_s_per_gpu=seconds,
    model_flops_per_gpu_per_s=seconds,
    mfu=st.floats(0, 1),
    peak_memory_bytes=st.lists(st.integers(0, 2**40), min_size=1, max_size=4).map(tuple),
    memory_capacity_bytes=st.integers(0, 2**40),
    memory_breakdown_bytes=st.lists(
        st.dictionaries(st.sampled_from(MemoryTerm), st.integers(0, 2**40), max_size=3), max_size=2
    ).map(tuple),
    breakdown_s=st.dictionaries(st.sampled_from(Term), seconds),
    usd_per_step=st.none() | seconds,
)
candidates = st.builds(
    Candidate,
    label=names,
    mesh=meshes,
    zero_stage=st.integers(0, 3),
    micro_batch_size=degrees,
    schedule=st.sampled_from(ScheduleName),
    virtual_stages=degrees,
    recompute=st.none() | st.sampled_from(Recompute),
    sequence_parallel=st.booleans(),
    step_time_s=seconds,
    peak_memory_bytes=st.integers(0, 2**40),
    fits=st.booleans(),
)
searches = st.builds(
    SearchSection,
    status=st.sampled_from(["OPTIMAL", "FEASIBLE", "PRICED"]),
    bound_step_time_s=seconds,
    gap=st.floats(0, 1),
    num_candidates=st.integers(0, 10**7),
    elapsed_s=seconds,
    baseline=st.none() | candidates,
    runners_up=st.lists(candidates, max_size=2).map(tuple),
)
stages = st.builds(
    StageSection,
    index=st.integers(0, 9),
    pp_rank=st.integers(0, 9),
    modules=st.lists(names, max_size=3).map(tuple),
)
plans = st.builds(
    Plan,
    model=st.builds(ModelSection, source=names, digest=names, num_params=st.integers(0, 10**13)),
    hardware=names,
    num_devices=degrees,
    training=st.builds(
        TrainingSection,
        global_batch_size=degrees,
        seq_len=degrees,
        precision=st.sampled_from(Precision),
        optimizer=st.sampled_from(Optimizer),
    ),
    mesh=meshes,
    zero_stage=st.integers(0, 3),
    pipeline=st.builds(
        PipelineSection,
        schedule=st.sampled_from(ScheduleName),
        num_microbatches=degrees,
        micro_batch_size=degrees,
        virtual_stages=degrees,
        stages=st.lists(stages, max_size=4).map(tuple),
    ),
    placements=st.builds(
        PlacementSection,
        tp=st.lists(
            st.builds(
                ModulePlacement,
                module=names,
                parameters=st.dictionaries(names, placements, max_size=2),
                output=st.none() | placements,
            ),
            max_size=3,
        ).map(tuple),
        sequence_parallel=st.booleans(),
        stage_input=placements,
        sharded_units=st.lists(names, max_size=3).map(tuple),
    ),
    recompute=st.lists(
        st.builds(RecomputeRule, mode=st.sampled_from(Recompute), modules=st.lists(names, max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
    prediction=st.none() | predictions,
    search=st.none() | searches,
    warnings=st.lists(names, max_size=2).map(tuple),
)


@given(plans)
def test_any_plan_survives_json(plan: Plan) -> None:
    assert Plan.model_validate_json(plan_json(plan)) == plan


@given(plans)
def test_contradictions_are_found_in_any_plan_without_a_crash(plan: Plan) -> None:
    assert all(isinstance(violation, str) and ": " in violation for violation in contradictions(plan))


PROBLEMS = [
    ("llama-tiny", 8, {"batch": 16, "seq_len": 64}),
    ("gpt2-1.5b", 8, {"batch": 64}),
    ("tests/fixtures/hf/gpt2", 8, {"batch": 16, "seq_len": 1024}),
]
every_problem = pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS, ids=["llama", "gpt", "hf gpt2"])


def sampled_plans(problem: Problem, number: int) -> list[Plan]:
    choices = random.Random(0).sample(problem.space.layouts, number)
    points = [Evaluator(problem.table, choice) for choice in choices]
    return [described(problem, point.evaluate(point.even_starts())) for point in points]


@every_problem
def test_every_point_of_the_space_makes_a_sound_plan(
    model: str, num_devices: int, options: dict, tmp_path: Path
) -> None:
    problem = problem_of(model, num_devices, **options)
    for plan in sampled_plans(problem, 40):
        assert contradictions(plan) == [], plan
        write_plan(plan, tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json") == plan


@every_problem
def test_every_parameter_lies_in_exactly_one_stage(model: str, num_devices: int, options: dict) -> None:
    problem = problem_of(model, num_devices, **options)
    graph = problem.target.graph
    for plan in sampled_plans(problem, 40):
        modules = [module for stage in plan.pipeline.stages for module in stage.modules]
        assert len(set(modules)) == len(modules)
        for parameter in graph.parameters:
            owners = [
                module
                for module in modules
                if any(fqn.startswith(f"{module}.") for fqn in (parameter.fqn, *parameter.aliases))
            ]
            assert 1 <= len(owners) <= 1 + len(parameter.aliases), parameter.fqn  # a tied one may lie in each user's


@every_problem
def test_every_module_of_the_plan_is_one_of_the_models(model: str, num_devices: int, options: dict) -> None:
    problem = problem_of(model, num_devices, **options)
    graph = problem.target.graph
    known = {fqn for p in graph.parameters for fqn in (p.fqn, *p.aliases)}
    for plan in sampled_plans(problem, 40):
        for rule in plan.recompute:
            assert set(rule.modules) == {unit.name for unit in graph.units if unit.is_block}
        for unit in plan.placements.sharded_units:
            assert any(fqn.startswith(f"{unit}.") for fqn in known), unit
        assert bool(plan.placements.tp) == (plan.mesh.tp > 1)
        counts = Counter(entry.module for entry in plan.placements.tp)
        assert all(count == 1 for count in counts.values()), counts


def test_one_sharded_unit_never_lies_in_another() -> None:
    for model, num_devices, options in PROBLEMS:
        for plan in sampled_plans(problem_of(model, num_devices, **options), 10):
            units = plan.placements.sharded_units
            assert not [(a, b) for a in units for b in units if a.startswith(f"{b}.")]


# -- refused ------------------------------------------------------------------------------------------


def tiny_plan() -> Plan:
    """pp=2, 1F1B."""
    problem = problem_of("llama-tiny", 8, batch=16, seq_len=64)
    choice = next(
        c
        for c in problem.space.layouts
        if c.mesh.pp == 2 and c.mesh.dp_shard == 4 and c.schedule is ScheduleName.ONE_F_ONE_B and c.zero_stage == 1
    )
    point = Evaluator(problem.table, choice)
    return described(problem, point.evaluate(point.even_starts()))


Content = dict[str, object]


def written(change: Callable[[Content], None], folder: Path) -> Path:
    content = json.loads(plan_json(tiny_plan()))
    change(content)
    path = folder / "plan.json"
    path.write_text(json.dumps(content))
    return path


def put(*keys: str | int, value: object) -> Callable[[Content], None]:
    """Sets the value behind ``keys``."""

    def change(content: Content) -> None:
        inner: object = content
        for key in keys[:-1]:
            inner = inner[key]  # type: ignore[index]
        inner[keys[-1]] = value  # type: ignore[index]

    return change


DAMAGED = [
    (put("schema_version", value=99), "schema_version is 99, this planner reads 1"),
    (put("schema_version", value="1"), "schema_version is '1'"),
    (lambda c: c.pop("schema_version"), "schema_version is None"),
    (put("surprise", value=1), "surprise: Extra inputs are not permitted"),
    (put("mesh", "qp", value=1), "mesh.qp: Extra inputs are not permitted"),
    (lambda c: c.pop("mesh"), "mesh: Field required"),
    (put("mesh", "pp", value=0), "mesh.pp: Input should be greater than or equal to 1"),
    (put("mesh", "pp", value="two"), "mesh.pp: Input should be a valid integer"),
    (put("zero_stage", value=4), "zero_stage: Input should be less than or equal to 3"),
    (put("pipeline", "schedule", value="2F2B"), "pipeline.schedule: Input should be"),
    (put("training", "precision", value="int4"), "training.precision: Input should be"),
    (
        put("placements", "tp", value=[{"module": "a", "output": "sideways"}]),
        "placement must be replicate, partial, shard(DIM) or",
    ),
    (put("placements", "tp", value=[{"module": "a", "parameters": {"w": "shard(-1)"}}]), "placement must be"),
    (put("recompute", value=[{"mode": "all", "modules": []}]), "recompute.0.mode: Input should be"),
    (put("prediction", "step_time_s", value=-1.0), "prediction.step_time_s: Input should be greater than 0"),
]


def numbers_in(content: object, *place: str | int) -> list[tuple[tuple[str | int, ...], object]]:
    """Every number, and every yes or no, with the keys that lead to it."""
    if isinstance(content, dict | list):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return [found for key, value in items for found in numbers_in(value, *place, key)]
    return [(place, content)] if isinstance(content, bool | int | float) else []


def test_text_is_no_number_and_a_number_is_no_yes(tmp_path: Path) -> None:
    """The text "2" was taken for 2, and 1 for true."""
    content, path = json.loads(plan_json(tiny_plan())), tmp_path / "plan.json"
    numbers = numbers_in(content)
    assert len(numbers) > 50
    for keys, value in numbers:
        key = ".".join(map(str, keys))
        for other in (json.dumps(value), 1 if isinstance(value, bool) else True):
            put(*keys, value=other)(content)
            path.write_text(json.dumps(content))
            with pytest.raises(PlanError, match="schema_version is" if key == "schema_version" else f"{key}: Input "):
                read_plan(path)
        put(*keys, value=value)(content)


@pytest.mark.parametrize(("change", "message"), DAMAGED, ids=[m for _, m in DAMAGED])
def test_a_damaged_plan_is_refused_by_name(change: Callable[[Content], None], message: str, tmp_path: Path) -> None:
    path = written(change, tmp_path)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


STAGES = "pipeline", "stages"
CONTRADICTIONS = [
    (
        put("num_devices", value=16),
        "dp_shard=4 cp=1 tp=1 makes 8 ranks, but num_devices is 16",
    ),
    (put("training", "global_batch_size", value=17), "training.global_batch_size: 17 is not dp * num_microbatches"),
    (put("zero_stage", value=0), "zero_stage: ZeRO stage 0 shards nothing, but dp_shard is 4"),
    (put(*STAGES, 1, "index", value=5), "pipeline.stages: must be stages 0 to 1 in order (pp=2, virtual_stages=1)"),
    (put(*STAGES, value=[]), "pipeline.stages: must be stages 0 to 1 in order"),
    (put(*STAGES, 1, "pp_rank", value=0), "pipeline.stages: stage i must run on pp_rank i mod 2"),
    (put(*STAGES, 1, "modules", value=["layers.0"]), "pipeline.stages: module layers.0 stands in 2 stages"),
    (
        put("pipeline", "schedule", value="Interleaved1F1B"),
        "pipeline.schedule: Interleaved1F1B needs at least 2 virtual stages a rank, got 1",
    ),
    (
        put("pipeline", "schedule", value="ZBVZeroBubble"),
        "pipeline.schedule: ZBVZeroBubble has 2 stages a rank, got 1 virtual stages",
    ),
    (
        put("placements", "sequence_parallel", value=True),
        "sequence_parallel: needs tp > 1, but mesh.tp is 1",
    ),
    (
        put("recompute", value=[{"mode": mode, "modules": ["layers.0"]} for mode in ("full", "selective")]),
        "recompute: module layers.0 stands in 2 rules",
    ),
    (put("mesh", "ep", value=3), "mesh: ep 3 does not divide dp_shard * cp = 4"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS, ids=[m for _, m in CONTRADICTIONS])
def test_a_contradiction_is_refused_with_its_values(
    change: Callable[[Content], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as caught:
        read_plan(written(change, tmp_path))
    assert message in caught.value.message


def edited(**changes: object) -> Plan:
    """The tiny plan with some of its pipeline changed, unchecked."""
    plan = tiny_plan()
    return plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update=changes)})


def test_too_few_micro_batches_for_a_schedule_are_a_contradiction() -> None:
    few = edited(num_microbatches=1, micro_batch_size=4)
    assert contradictions(few) == [
        "pipeline.schedule: 1F1B needs at least as many micro-batches as stages, got 1 for 2"
    ]
    assert contradictions(edited(num_microbatches=1, micro_batch_size=4, schedule=ScheduleName.GPIPE)) == []


def test_what_does_not_go_with_split_backward_passes_is_a_contradiction() -> None:
    plan = edited(schedule=ScheduleName.INTERLEAVED_ZERO_BUBBLE)
    assert contradictions(plan) == []
    rule = RecomputeRule(mode=Recompute.FULL, modules=("layers.0",))
    assert contradictions(plan.model_copy(update={"zero_stage": 3, "recompute": (rule,)})) == [
        "pipeline.schedule: InterleavedZeroBubble splits backward passes, so the ZeRO stage is 0 or 1, got 3",
        "pipeline.schedule: InterleavedZeroBubble splits backward passes, so nothing can be recomputed, got full",
    ]


def test_stages_in_a_v_come_back_to_the_first_rank() -> None:
    plan = tiny_plan()
    modules = [name for stage in plan.pipeline.stages for name in stage.modules]
    stages = tuple(
        StageSection(index=index, pp_rank=rank, modules=(modules[index],)) for index, rank in enumerate((0, 1, 1, 0))
    )
    assert contradictions(edited(schedule=ScheduleName.ZBV_ZERO_BUBBLE, virtual_stages=2, stages=stages)) == []
    turned = tuple(stage.model_copy(update={"pp_rank": stage.index % 2}) for stage in stages)
    assert contradictions(edited(schedule=ScheduleName.ZBV_ZERO_BUBBLE, virtual_stages=2, stages=turned)) == [
        "pipeline.stages: stage i must run up to pp_rank 1 and back again, as ZBVZeroBubble assumes"
    ]
    few = edited(
        schedule=ScheduleName.DUAL_PIPE_V, virtual_stages=2, stages=stages, num_microbatches=2, micro_batch_size=2
    )
    assert contradictions(few) == [
        "pipeline.schedule: DualPipeV needs at least as many micro-batches as stages, got 2 for 4"
    ]


def test_virtual_stages_need_a_pipeline() -> None:
    plan = tiny_plan()
    stages = tuple(stage.model_copy(update={"pp_rank": 0}) for stage in plan.pipeline.stages)
    alone = plan.model_copy(
        update={
            "mesh": plan.mesh.model_copy(update={"pp": 1, "dp_shard": 8}),
            "pipeline": plan.pipeline.model_copy(
                update={"virtual_stages": 2, "stages": stages, "num_microbatches": 1, "micro_batch_size": 2}
            ),
        }
    )
    assert any("pipeline.virtual_stages: 2 stages a rank need pp > 1" in found for found in contradictions(alone))


def test_all_contradictions_are_said_at_once(tmp_path: Path) -> None:
    def change(content: Content) -> None:
        for one in (put("num_devices", value=9), put("zero_stage", value=0), put(*STAGES, 1, "pp_rank", value=0)):
            one(content)

    with pytest.raises(PlanError) as caught:
        read_plan(written(change, tmp_path))
    assert all(part in caught.value.message for part in ("num_devices is 9", "zero_stage", "pp_rank"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1, 2]", "holds a JSON list, not an object"),
        (b'"plan"', "holds a JSON str, not an object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": 1}', "schema_version is None"),
        (b'{"nodes": [], "units": [], "schema_version": 1}', "nodes: Extra inputs are not permitted"),
    ],
)
def test_what_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert message in caught.value.message


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(PlanError, match="cannot read"):
            read_plan(path)
