"""The command line in this process."""

import sys
from collections.abc import Callable

import pytest

from planner.cli.main import main

Run = Callable[..., tuple[int, str, str]]

# For a test in which the clock ends the process: its alarm may ring when a file or a folder is open and its ``with``
# not yet entered. Python closes it all the same, and says so in a warning that users do not see.
ended_by_the_clock = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``planner`` with arguments: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["planner", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return run
