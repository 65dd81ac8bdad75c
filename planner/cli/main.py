"""The command line: one file a command group, errors shown in one place."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_group

from planner.cli.ctrl_c import was_interrupted
from planner.cli.terminal import speak_any_locale, talk_console
from planner.errors import PlannerError

# Commands in the order of ``--help``. The file of each has its name, and an underscore where Python keeps that name.
COMMANDS = (
    "search", "fit", "compare", "check", "estimate", "explain", "report", "schedule", "trace", "models", "hardware",
    "profile", "calibrate", "run", "replan", "parity", "verify", "export", "import",
)  # fmt: skip


class _Commands(TyperGroup):
    """Commands whose files are imported when they are asked for.

    ``ctx`` is of typer's own copy of click, whose types have no public name.
    """

    def invoke(self, ctx: Any) -> object:
        """Runs a command; typer.Abort where Ctrl-C ends it, of which typer itself makes an exit code without a word."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str):
        """The command of that name; None where there is none, and then all are there to be suggested."""
        for name in [cmd_name] if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                own = typer.Typer()
                _file_of(name).register(own)
                self.commands.update(get_group(own).commands)
        return super().get_command(ctx, cmd_name)


def _file_of(command: str) -> ModuleType:
    return import_module(f"planner.cli.{command}{'_' * (command == 'import')}")


def load(arguments: Sequence[str]) -> None:
    """Imports the file of the command that ``arguments`` name, if they begin with one."""
    if arguments and arguments[0] in COMMANDS:
        _file_of(arguments[0])


app = typer.Typer(
    name="planner",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Chooses how to split the training of a large model over a cluster, and proves it.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("planner"))
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Global options; ``--debug`` is read by ``main`` and stands here for ``--help``."""


def main() -> None:
    """Entry point of the ``planner`` script: runs a command, shows errors, sets the exit code."""
    speak_any_locale()
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    talk = talk_console()
    try:
        result = app(args=[a for a in arguments if a != "--debug"], standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except PlannerError as error:
        if debug:
            traceback.print_exc()
        talk.print(f"[bold red]error:[/] {escape(error.message)}", soft_wrap=True)
        if error.hint:
            talk.print(f"[bold]hint:[/] {escape(error.hint)}", soft_wrap=True)
        code = error.exit_code
    except TyperException as error:  # the command line itself is wrong
        if said := error.format_message():  # without a command it is the help, which is there already
            talk.print(f"[bold red]error:[/] {escape(said)}", soft_wrap=True)
            talk.print("[bold]hint:[/] `planner --help`, or `planner COMMAND --help`", soft_wrap=True)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        talk.print("interrupted")
        code = 130
    except BrokenPipeError:
        sys.stderr.close()
        code = 1
    except Exception as error:  # the last resort: an error of ours, without a traceback unless asked
        if debug:
            traceback.print_exc()
        code = _unexpected(error, talk)
    sys.exit(code)


def _unexpected(error: Exception, talk: Console) -> int:
    """Says that an error is ours, unless Ctrl-C came before it or a disk is full, and gives the exit code."""
    if was_interrupted():
        talk.print("interrupted")
        return 130
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "standard output, or another file"
        talk.print(f"[bold red]error:[/] cannot write {escape(str(where))}: {error.strerror}", soft_wrap=True)
        talk.print("[bold]hint:[/] make room there, or write elsewhere", soft_wrap=True)
        return 1
    talk.print(f"[bold red]internal error:[/] {escape(f'{type(error).__name__}: {error}')}", soft_wrap=True)
    talk.print("[bold]hint:[/] this is a defect of planner; run again with --debug and report it", soft_wrap=True)
    return 1
