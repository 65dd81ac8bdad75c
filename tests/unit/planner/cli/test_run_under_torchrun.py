"""torchrun reads its own options wherever they stand, and abbreviations of them: none of ours may be one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer
from torch.distributed.run import parse_args
from typer.core import TyperOption

from planner.cli.main import app

RUN = typer.main.get_command(app).get_command(None, "run")  # pyright: ignore[reportAttributeAccessIssue]


def names() -> Iterator[tuple[str, ...]]:
    for parameter in RUN.params:
        if isinstance(parameter, TyperOption):
            yield tuple(parameter.opts)


def is_left_to_planner(name: str) -> bool:
    words = ["plan.json", name, "1"]
    try:
        found = parse_args(["--nnodes", "2", "-m", "planner", "run", *words])
    except SystemExit:
        return False
    return found.training_script_args == ["run", *words]


@pytest.mark.parametrize("each", list(names()))
def test_an_option_has_a_name_that_torchrun_leaves_alone(each: tuple[str, ...]) -> None:
    assert any(is_left_to_planner(name) for name in each), each


def test_log_has_another_name() -> None:
    assert not is_left_to_planner("--log")
    assert is_left_to_planner("--log-file")
