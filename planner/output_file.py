"""Files that a command writes: whole or not at all, and known to be writable before the work begins.

``-`` is standard output. A link is followed, and what it leads to is written. A character device, such as /dev/null,
and a pipe that a shell has opened, as ``>(command)`` does, are written into. Whatever else is no regular file is
refused: nothing but a regular file is ever replaced.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from planner.errors import InputError

SUFFIX = ".planner-tmp"
STALE_S = 3600.0  # far longer than any of our files takes to write: whoever began it was killed
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISBLK, "a block device"))


def is_stdout(path: Path | None) -> bool:
    """Whether ``-o`` says standard output, which then holds nothing else."""
    return path is not None and str(path) in ("-", "/dev/stdout")


def check_output(*paths: Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """InputError before the work rather than after it, where a file cannot be written, or is one that is read.

    ``reads``: what the command is given, as its user names it: FILE, FILE:factory, PLAN:LOG, a folder of a config.json.
    """
    inputs = {name: file for each in reads if each is not None for name, file in _files_of(str(each))}
    for path in paths:
        if is_stdout(path) and sys.stdout is None:  # as `>&-` of a shell leaves it
            raise InputError("cannot write standard output: it is closed", hint="name a file")
        if path is None or is_stdout(path):
            continue
        name = next((name for name, file in inputs.items() if _is_same(path, file)), None)
        if name is not None:
            raise InputError(f"cannot write {path}: it is {name}, which is read", hint="choose another file")
        try:
            target = _replaced(path)
            if target is not None:
                handle, temporary = _temporary(target)
                os.close(handle)
                os.unlink(temporary)
        except (OSError, ValueError) as error:
            raise _refused(path, error) from error


def _files_of(name: str) -> Iterator[tuple[str, Path]]:
    """The files that ``name`` may mean, each with its name."""
    parts = [name, *name.split(":"), name.rpartition(":")[0], os.path.join(name, "config.json")]
    return ((part, Path(part)) for part in parts if part)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other) and path.is_file()
    except (OSError, ValueError):  # one of them is not there
        return False


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, replacing a regular file there in one step. InputError where it cannot."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes ``content`` to ``path``, replacing a regular file there in one step. InputError where it cannot."""
    if is_stdout(path):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        target = _replaced(path)
        if target is None:
            path.write_bytes(content)
        else:
            _replace(target, content)
    except (OSError, ValueError) as error:
        raise _refused(path, error) from error


@contextlib.contextmanager
def put_back_on_error(path: Path) -> Generator[None]:
    """What ``path`` was before comes back where what is done inside ends in an error, or is interrupted.

    For a file that goes with another: neither is there without the other. InputError where nothing can be set aside.
    """
    target, aside = Path(os.path.realpath(path)), None
    try:
        if target.is_file():
            handle, aside = _temporary(target)
            os.close(handle)
            shutil.copy2(target, aside)
    except OSError as error:
        if aside is not None:
            os.unlink(aside)
        raise _refused(path, error) from error
    try:
        yield
    except BaseException:
        if aside is not None:
            os.replace(aside, target)
        elif target.is_file():
            os.unlink(target)
        raise
    if aside is not None:
        os.unlink(aside)


def _replaced(path: Path) -> Path | None:
    """The regular file that ``path`` leads to, or that will be there; None where it is written into as it is."""
    target = Path(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # a new file, or a link to one
        if not target.parent.is_dir():
            raise InputError(
                f"cannot write {path}: {target.parent} is no folder", hint="make it, or choose another file"
            ) from None
        return target
    is_open_pipe = stat.S_ISFIFO(mode) and not target.exists()  # has no name, as what a shell has opened
    if not stat.S_ISREG(mode) and not stat.S_ISCHR(mode) and not is_open_pipe:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")
        raise InputError(f"cannot write {path}: it is {kind}", hint="name a file, or - for standard output")
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write {path}: it may not be written", hint="choose another file")
    return target if stat.S_ISREG(mode) else None


def _replace(target: Path, content: bytes) -> None:
    _clean(target)
    handle, temporary = _temporary(target)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _temporary(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=SUFFIX)


def _prefix(target: Path) -> str:
    return f".{target.name[:32]}."  # so that a long name stays one


def _mode_of(target: Path) -> int:
    """That of the file which is replaced, or of any file the user makes; a temporary one is private."""
    with contextlib.suppress(FileNotFoundError):
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _clean(target: Path) -> None:
    """Removes what writers of this file left that were killed."""
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            is_ours = entry.name.startswith(_prefix(target)) and entry.name.endswith(SUFFIX)
            if is_ours and entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_S:
                os.unlink(entry.path)


def _refused(path: Path, error: OSError | ValueError) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else error  # a ValueError: a name that no file can have
    return InputError(f"cannot write {path}: {reason}", hint="choose another file")
