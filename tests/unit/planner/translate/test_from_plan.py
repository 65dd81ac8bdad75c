"""A plan that exists is priced as the search priced it, on other devices too, or refused with the reason."""

import random
from pathlib import Path

import pytest

from costmodels.vocabulary.choices import Recompute, Replicate, Shard
from costmodels.vocabulary.schedules import ScheduleName
from planner.api import described, find_plan, price_plan
from planner.errors import InputError, PlanError
from planner.evaluation.evaluator import Evaluator
from planner.graph.graph_file import write_graph
from planner.layout.layout import Layout, Pins
from planner.plan.schema import ModulePlacement, Plan, RecomputeRule
from planner.problem import Problem
from planner.request import Request
from planner.solver.search import search
from planner.table.keys import TensorSplit
from planner.translate import from_plan, to_plan
from tests.planning import A100, graph_of, problem_of

PROBLEMS = [
    ("llama-tiny", 8, {"batch": 16, "seq_len": 64}),
    ("gpt2-1.5b", 16, {"batch": 64}),
    ("tests/fixtures/hf/gpt2", 16, {"batch": 64, "seq_len": 1024}),
]
every_problem = pytest.mark.parametrize(("model", "num_devices", "options"), PROBLEMS, ids=["llama", "gpt", "hf gpt2"])


def plan_of(problem: Problem, choice: Layout, folder: Path) -> Plan:
    """The plan of ``choice``, whose model is a traced graph in ``folder``."""
    point = Evaluator(problem.table, choice)
    plan = described(problem, point.evaluate(point.even_starts(), exact=True))
    path = folder / "graph.json"
    if not path.exists():
        write_graph(problem.target.graph, path)
    return plan.model_copy(update={"model": plan.model.model_copy(update={"source": str(path)})})


@every_problem
def test_a_plan_is_priced_as_it_was_when_it_was_made(
    model: str, num_devices: int, options: dict, tmp_path: Path
) -> None:
    problem = problem_of(model, num_devices, **options)
    split = [c for c in problem.space.layouts if c.mesh.tp > 1]
    chosen = [*random.Random(0).sample(problem.space.layouts, 3), *random.Random(1).sample(split, 4)]
    for choice in chosen:
        plan = plan_of(problem, choice, tmp_path)
        again = price_plan(plan).plan
        assert plan.prediction is not None
        assert again.prediction is not None
        assert again.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-6), choice
        assert again.prediction.peak_memory_bytes == pytest.approx(plan.prediction.peak_memory_bytes, rel=1e-6)
        unpriced = {"prediction": None, "search": None}
        assert again.model_copy(update=unpriced) == plan.model_copy(update=unpriced)


@every_problem
def test_a_choice_and_its_stages_come_back_from_the_plan(model: str, num_devices: int, options: dict) -> None:
    problem = problem_of(model, num_devices, **options)
    for choice in random.Random(2).sample(problem.space.layouts, 60):
        rng = random.Random(3)
        free = choice.recompute is None
        modes = [rng.choice(list(Recompute)) if b and free else Recompute.NONE for b in problem.table.units.is_block]
        point = Evaluator(problem.table, choice, modes)
        plan = described(problem, point.evaluate(point.even_starts()))
        # What blocks recompute stands beside the layout.
        assert from_plan.layout_of(plan, num_devices) == choice._replace(recompute=None)
        assert from_plan.modes_of(plan, problem.target.graph) == tuple(modes)
        assert from_plan.starts_of(plan, problem.target.graph) == point.even_starts()


@every_problem
def test_placements_come_back_from_the_plan(model: str, num_devices: int, options: dict) -> None:
    problem = problem_of(model, num_devices, **options)
    graph = problem.target.graph
    split = TensorSplit(2, False)
    choice = next(c for c in problem.space.layouts if TensorSplit(c.mesh.tp, c.sequence_parallel) == split)
    point = Evaluator(problem.table, choice)
    found = from_plan.parameter_placements(described(problem, point.evaluate(point.even_starts())), graph)
    for placed in problem.decisions[split]:
        for fqn, placement in placed.parameters.items():
            assert found[fqn] == placement
    for parameter in graph.parameters:
        assert len({found[name] for name in (parameter.fqn, *parameter.aliases)}) == 1


ODD = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(30, 90), nn.Linear(30, 30)
        self.up, self.down = nn.Linear(30, 111), nn.Linear(111, 30)
        self.before, self.between = nn.LayerNorm(30), nn.LayerNorm(30)

    def forward(self, x):
        batch, tokens, width = x.shape
        heads = self.qkv(self.before(x)).view(batch, tokens, 15, 6).transpose(1, 2)
        q, k, v = heads.split(5, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.between(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(97, 30), nn.Linear(30, 97)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return Model()
"""


def test_outputs_are_placed_as_the_plan_says(tmp_path: Path) -> None:
    """Five heads over three ranks: to gather behind the product or behind the view takes as long, and less memory."""
    (tmp_path / "odd.py").write_text(ODD)
    request = Request(str(tmp_path / "odd.py"), 3, A100, seq_len=64, global_batch_size=48, pins=Pins(tp=3))
    plan = find_plan(request).plan
    assert plan.prediction is not None
    again = price_plan(plan).plan.prediction
    assert again is not None
    assert again.peak_memory_bytes == plan.prediction.peak_memory_bytes
    assert again.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=1e-9)
    qkv = next(entry for entry in plan.placements.tp if entry.module.endswith(".qkv"))
    other = [
        entry.model_copy(update={"output": None if qkv.output else "replicate"}) if entry is qkv else entry
        for entry in plan.placements.tp
    ]
    changed = plan.model_copy(update={"placements": plan.placements.model_copy(update={"tp": tuple(other)})})
    prediction = price_plan(changed).plan.prediction
    assert prediction is not None
    assert prediction.peak_memory_bytes != plan.prediction.peak_memory_bytes


def tiny(folder: Path, pins: Pins) -> Plan:
    problem = problem_of("llama-tiny", 8, batch=16, seq_len=64, pins=pins)
    found = search(problem.table, problem.space.layouts, problem.solver).best
    assert found is not None
    return plan_of(problem, found.layout, folder)


def test_more_and_fewer_devices_change_the_data_parallel_degree(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(dp=8, dp_replicate=1, zero=1, micro_batch=1))
    half, double = price_plan(plan, num_devices=4).plan, price_plan(plan, num_devices=16).plan
    assert (half.mesh.dp_shard, half.num_devices, half.pipeline.num_microbatches) == (4, 4, 4)
    assert (double.mesh.dp_shard, double.num_devices, double.pipeline.num_microbatches) == (16, 16, 1)
    assert half.training == double.training == plan.training
    times = [p.prediction.step_time_s for p in (half, plan, double) if p.prediction is not None]
    assert times[0] > times[1]


def test_other_hardware_prices_the_same_decisions(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(tp=2, pp=2))
    faster = price_plan(plan, hardware="dgx-h100-80gb").plan
    assert faster.hardware == "dgx-h100-80gb"
    assert faster.placements == plan.placements
    assert faster.pipeline == plan.pipeline
    assert plan.prediction is not None
    assert faster.prediction is not None
    assert faster.prediction.step_time_s != plan.prediction.step_time_s


def test_a_number_of_devices_that_the_plan_cannot_take_is_refused(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(tp=2, pp=2))
    with pytest.raises(PlanError, match="7 GPUs are no multiple of the 4"):
        price_plan(plan, num_devices=7)
    with pytest.raises(PlanError, match="does not divide the global batch of 16"):
        price_plan(plan, num_devices=4 * 5)


def test_too_few_micro_batches_after_a_change_of_devices_are_refused(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(pp=4, schedule=ScheduleName.ONE_F_ONE_B, micro_batch=1))  # dp 2: 8 micro-batches
    assert price_plan(plan, num_devices=16).plan.pipeline.num_microbatches == 4
    with pytest.raises(PlanError, match="at least as many micro-batches as stages, got 2 for 4"):
        price_plan(plan, num_devices=32)


def test_what_has_no_price_is_refused_and_all_of_it_named(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(dp=8, recompute=Recompute.FULL))
    (rule,) = plan.recompute
    half = (RecomputeRule(mode=rule.mode, modules=rule.modules[:2]),)
    faster = price_plan(plan.model_copy(update={"recompute": half})).plan
    assert faster.recompute == half
    assert faster.prediction is not None
    assert plan.prediction is not None
    assert faster.prediction.step_time_s < plan.prediction.step_time_s
    strange = (RecomputeRule(mode=rule.mode, modules=("layers.99",)),)
    mesh = plan.mesh.model_copy(update={"ep": 2})
    with pytest.raises(PlanError) as caught:
        price_plan(plan.model_copy(update={"recompute": strange, "mesh": mesh}))
    for part in ("mesh.ep: 2", "layers.99 are no repeated blocks"):
        assert part in caught.value.message


def test_foreign_stages_and_placements_are_refused(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(pp=2))
    first, second = plan.pipeline.stages
    swapped = (
        first.model_copy(update={"modules": second.modules}),
        second.model_copy(update={"modules": first.modules}),
    )
    for stages, message in (
        (swapped, "stages must hold the model's pieces in order"),
        ((first, second.model_copy(update={"modules": second.modules[1:]})), "must all lie in one stage"),
    ):
        pipeline = plan.pipeline.model_copy(update={"stages": stages})
        with pytest.raises(PlanError, match=message):
            price_plan(plan.model_copy(update={"pipeline": pipeline}))
    entry = ModulePlacement(module="layers.*.attention.qkv", parameters={"weight": "shard(0)"})
    placements = plan.placements.model_copy(update={"tp": (entry,)})
    with pytest.raises(PlanError, match=r"does not have: layers\.\*\.attention\.qkv\.weight"):
        price_plan(plan.model_copy(update={"placements": placements}))


def test_the_only_stage_has_the_modules_of_the_model_or_names_none(tmp_path: Path) -> None:
    """One that lacked a module was priced as if nothing were wrong. Modules without operators may stand there."""
    problem = problem_of("llama-tiny", 4, batch=8, seq_len=64)
    plan = plan_of(problem, next(c for c in problem.space.layouts if c.mesh.pp == 1), tmp_path)
    modules = plan.pipeline.stages[0].modules

    def priced(*modules: str) -> Plan:
        stages = (plan.pipeline.stages[0].model_copy(update={"modules": modules}),)
        pipeline = plan.pipeline.model_copy(update={"stages": stages})
        return price_plan(plan.model_copy(update={"pipeline": pipeline})).plan

    assert priced().prediction == priced(*modules).prediction
    with pytest.raises(PlanError, match=rf"the modules of .*{modules[-1]}.* must all lie in one stage"):
        priced(*modules[:-1])
    assert priced(*modules, "dropout").prediction == priced().prediction


def test_names_that_the_graph_does_not_know_are_said(tmp_path: Path) -> None:
    """They were priced without a word, and `planner run` refused the plan."""
    plan = tiny(tmp_path, Pins(pp=2))
    assert not any("neither operators" in note for note in price_plan(plan).notes)
    first, *others = plan.pipeline.stages
    more = first.model_copy(update={"modules": (*first.modules, "layers.99")})
    wrong = plan.model_copy(
        update={
            "pipeline": plan.pipeline.model_copy(update={"stages": (more, *others)}),
            "placements": plan.placements.model_copy(update={"sharded_units": ("layer.1",)}),
        }
    )
    notes = [note for note in price_plan(wrong).notes if "neither operators" in note]
    assert [note.partition(" has ")[0] for note in notes] == [
        "pipeline.stages.0: 'layers.99' (nearest: 'layers.3')",
        "placements.sharded_units: 'layer.1' (nearest: 'layers.1')",
    ]


def test_a_plan_of_another_number_of_parameters_is_refused(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(dp=8))
    model = plan.model.model_copy(update={"num_params": 7 * plan.model.num_params})
    text = rf"num_params is {model.num_params:,}, and .* has {plan.model.num_params:,} parameters"
    with pytest.raises(PlanError, match=text):
        price_plan(plan.model_copy(update={"model": model}))


def test_an_entry_for_one_name_of_a_tied_weight_places_all_of_them() -> None:
    problem = problem_of("tests/fixtures/hf/gpt2", 16, batch=64, seq_len=1024)
    graph = graph_of("tests/fixtures/hf/gpt2", 1024)
    choice = next(c for c in problem.space.layouts if c.mesh.tp == 2)
    plan = described(problem, Evaluator(problem.table, choice).evaluate(Evaluator(problem.table, choice).even_starts()))
    (tied,) = [p for p in graph.parameters if p.aliases]
    for name in (tied.fqn, *tied.aliases):
        module, _, parameter = name.rpartition(".")
        entry = ModulePlacement(module=module, parameters={parameter: "shard(1)"})
        found = from_plan.parameter_placements(
            plan.model_copy(update={"placements": plan.placements.model_copy(update={"tp": (entry,)})}), graph
        )
        assert {found[n] for n in (tied.fqn, *tied.aliases)} == {Shard(1)}
        assert found["transformer.h.0.ln_1.weight"] == Replicate()


def test_a_plan_for_a_changed_model_is_priced_with_a_note(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(dp=8))
    model = plan.model.model_copy(update={"digest": "0" * 64})
    notes = price_plan(plan.model_copy(update={"model": model})).notes
    assert any("has changed since the plan was made" in note for note in notes)
    assert not any("has changed" in note for note in price_plan(plan).notes)


def test_unknown_hardware_and_precision_are_refused(tmp_path: Path) -> None:
    plan = tiny(tmp_path, Pins(dp=8))
    with pytest.raises(InputError, match="unknown hardware profile"):
        price_plan(plan, hardware="dgx-a1000")
    with pytest.raises(InputError, match="has no bf16 arithmetic"):
        price_plan(plan, hardware="dgx-2-v100-32gb")


def test_a_plan_that_does_not_fit_is_priced_and_said_not_to(tmp_path: Path) -> None:
    problem = problem_of("llama3-8b", 16, batch=64, seq_len=2048)
    choice = max(
        (c for c in problem.space.layouts if c.mesh.pp == 1 and c.zero_stage == 1),
        key=lambda c: max(ledger.total_bytes for ledger in Evaluator(problem.table, c).ledgers((0,))),
    )
    answer = price_plan(plan_of(problem, choice, tmp_path))
    assert answer.plan.prediction is not None
    assert max(answer.plan.prediction.peak_memory_bytes) > answer.plan.prediction.memory_capacity_bytes
    assert any("does not fit" in note for note in answer.notes)


def test_a_plan_that_divides_experts_is_priced_as_it_was_found() -> None:
    request = Request("moe-tiny", 8, hardware="dgx-h100-80gb", global_batch_size=64, pins=Pins(pp=2, dp=4, ep=4))
    plan = find_plan(request).plan
    assert plan.mesh.ep == 4
    assert not any("planner run" in warning for warning in plan.warnings)
    assert "layers.1.mlp.experts.up" in plan.placements.experts
    assert price_plan(plan).plan.prediction == plan.prediction
    with pytest.raises(PlanError, match=r"ep 4 does not divide dp_shard 2 \* cp 1"):
        price_plan(plan, num_devices=4)


def test_on_fewer_devices_experts_keep_the_ranks_that_share_them() -> None:
    """Replicas of shards were kept in their place: "ep 4 does not divide dp_shard 2"."""
    pins = Pins(pp=1, tp=1, cp=1, dp=8, dp_replicate=2, ep=4)
    plan = find_plan(Request("moe-tiny", 8, hardware="dgx-h100-80gb", global_batch_size=64, pins=pins)).plan
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == (2, 4)
    half = price_plan(plan, num_devices=4).plan.mesh
    assert (half.dp_replicate, half.dp_shard, half.ep) == (1, 4, 4)


def test_a_warning_of_host_memory_is_of_the_hardware_that_is_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny(tmp_path, Pins(dp=8))
    old = plan.model_copy(update={"warnings": (f"{to_plan.HOST_WARNING}: of another node", "another")})
    assert price_plan(old).plan.warnings == ("another",)
    monkeypatch.setattr(to_plan, "host_warnings", lambda *_: (f"{to_plan.HOST_WARNING}: of this one",))
    assert price_plan(old).plan.warnings == ("another", f"{to_plan.HOST_WARNING}: of this one")
