"""``planner hardware``: JSON that parses and nothing beside it, tables, and errors as the planner's own."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from hardware_profiles.catalog import list_profiles, parse_profile
from planner.cli import hardware
from planner.errors import HardwareError


@pytest.fixture
def app() -> typer.Typer:
    application = typer.Typer()
    hardware.register(application)
    return application


def _output(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["hardware", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def test_list_as_json_names_every_profile(app: typer.Typer):
    listed = json.loads(_output(app, "list", "--json"))
    assert [entry["name"] for entry in listed] == [profile.name for profile in list_profiles()]
    assert all(entry["peak_flops_per_s"] and entry["memory_bytes"] > 0 for entry in listed)


@pytest.mark.parametrize("arguments", [("list",), ()])
def test_list_as_a_table_names_every_profile(app: typer.Typer, arguments: tuple[str, ...]):
    text = _output(app, *arguments)
    assert all(profile.name in text for profile in list_profiles())


def test_hardware_alone_takes_json_too(app: typer.Typer):
    assert _output(app, "--json") == _output(app, "list", "--json")


def test_show_as_json_is_a_profile_file(app: typer.Typer):
    shown = _output(app, "show", "A100", "--json")
    assert parse_profile(shown.encode(), source="stdout").name == "dgx-a100-80gb"


def test_show_gives_values_in_units_with_sources(app: typer.Typer):
    text = _output(app, "show", "dgx-h100-80gb")
    for expected in ("989 TFLOP/s", "79.18 GiB", "tiers.nvlink.bandwidth_bytes_per_s", "450 GB/s", "6.5 us"):
        assert expected in text
    assert "NVIDIA H100 Tensor Core GPU datasheet" in text


def test_detect_as_json(app: typer.Typer):
    shown = json.loads(_output(app, "detect", "--json"))
    assert shown["detected"]["ram_bytes"] > 0
    assert shown["nearest_profile"] in {profile.name for profile in list_profiles()}


def test_detect_as_a_table(app: typer.Typer):
    text = _output(app, "detect")
    assert "CPU" in text
    assert "nearest profile" in text


def test_an_unknown_profile_is_an_error_of_the_planner(app: typer.Typer):
    with pytest.raises(HardwareError) as caught:
        CliRunner().invoke(app, ["hardware", "show", "dgx-h1000"], catch_exceptions=False)
    assert caught.value.exit_code == 2
    assert "dgx-h100-80gb" in caught.value.message


def test_list_and_show_import_no_torch():
    program = (
        "import sys, typer; from planner.cli import hardware; app = typer.Typer(); hardware.register(app);"
        "from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['hardware', 'show', 'h100', '--json']).exit_code == 0;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
