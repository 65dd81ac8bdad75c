"""What of a plan cannot be compiled is refused with its reason; what is compiled are the units, in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler
from typer.testing import CliRunner

from costmodels.vocabulary.choices import Recompute
from costmodels.vocabulary.schedules import ScheduleName
from planner.cli.main import app
from planner.errors import PlanError
from planner.executor.compiled import INDUCTOR, apply_compile, check_compilable
from planner.plan.plan_file import write_plan
from planner.plan.schema import MeshSection, PlacementSection, Plan, RecomputeRule
from tests.distributed.cases import Case
from tests.distributed.toy_models import MODELS

PLAN = Case("gpt", MeshSection(dp_shard=4), 3, recompute=Recompute.FULL).plan()


def changed(**sections: object) -> Plan:
    return PLAN.model_copy(update=sections)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (changed(mesh=MeshSection(dp_shard=2, cp=2)), r"cp = 2"),
        (changed(mesh=MeshSection(dp_shard=4, ep=2)), r"ep = 2"),
        (changed(recompute=(RecomputeRule(mode=Recompute.SELECTIVE, modules=("layers.0",)),)), "one by one"),
        (changed(offloaded_activations=("layers.0",)), "offloaded_activations"),
        (changed(placements=PlacementSection()), "names no units"),
        (Case("gpt", MeshSection(pp=4), schedule=ScheduleName.INTERLEAVED_ZERO_BUBBLE).plan(), "splits the backward"),
    ],
)
def test_what_looks_into_units_is_refused(plan: Plan, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_compilable(plan, "aot_eager", "cpu")


def test_the_command_refuses_before_it_starts_ranks(tmp_path: Path) -> None:
    write_plan(Case("gpt", MeshSection(dp_shard=4), 3, recompute=Recompute.SELECTIVE).plan(), tmp_path / "plan.json")
    arguments = ["run", str(tmp_path / "plan.json"), "--compile"]
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    assert isinstance(result.exception, PlanError)
    assert "one by one" in result.exception.message


def test_a_plan_of_whole_blocks_is_not() -> None:
    check_compilable(PLAN, "aot_eager", "cpu")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(PlanError, match=r"C\+\+ compiler"):
        check_compilable(PLAN, INDUCTOR, "cpu")
    check_compilable(PLAN, "aot_eager", "cpu")


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # torch's own, while it looks at inputs
def test_units_are_compiled_in_place_and_compute_the_same() -> None:
    torch.manual_seed(0)
    module = MODELS["gpt"].build()
    tokens = torch.randint(256, (2, 8))
    names = [fqn for fqn, _ in module.named_parameters()]
    expected = module(tokens)
    apply_compile(module, PLAN, "eager")
    assert [fqn for fqn, _ in module.named_parameters()] == names
    assert torch.equal(module(tokens), expected)
    assert "forward" in vars(module.get_submodule("layers.0"))
    assert "forward" not in vars(module.get_submodule("head"))
