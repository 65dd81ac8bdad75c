"""What a user's code reads while it makes a model: a graph in the cache is as good as these are unchanged."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 2**26  # a file above is data, and is not looked into
NAME = re.compile(rb"[A-Za-z_]\w+")


@dataclass(frozen=True)
class ReadFiles:
    """Paths that this process opened for reading, Python's, torch's and our own aside."""

    variables: Mapping[str, str]  # the environment before any of it ran
    paths: set[str] = field(default_factory=set[str])

    @staticmethod
    def watch() -> ReadFiles:
        """Takes note from now on, until the process ends."""
        read = ReadFiles(dict(os.environ))
        foreign = _foreign_folders()

        def note(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str) and arguments[1] in ("r", "rb", None):
                path = os.path.abspath(arguments[0])
                if not path.startswith(foreign) and not path.endswith(".pyc"):
                    read.paths.add(path)

        sys.addaudithook(note)
        return read

    def digests(self) -> dict[str, str]:
        """SHA-256 of each file's content as it is now."""
        return {path: digest for path in sorted(self.paths) if (digest := file_digest(path)) is not None}

    def environment(self) -> dict[str, str]:
        """The variables that the files may have asked for."""
        return variables_named_in(self.paths, self.variables)


def file_digest(path: str) -> str | None:
    """SHA-256 of the content; None where there is no such file, or none that code is made of."""
    content = _content(path)
    return None if content is None else hashlib.sha256(content).hexdigest()


def variables_named_in(paths: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ``variables`` whose names are words of the files."""
    contents = (content for path in paths if (content := _content(path)) is not None)
    words = {word for content in contents for word in NAME.findall(content)}
    return {name: value for name, value in sorted(variables.items()) if name.encode() in words}


def _content(path: str) -> bytes | None:
    file = Path(path)
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= MAX_BYTES else None
    except OSError:
        return None


def _foreign_folders() -> tuple[str, ...]:
    """Where nothing of the user's lies: installed packages, devices, this package."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = Path(__file__).parents[1]
    return (*installed, sys.prefix + os.sep, "/proc/", "/sys/", "/dev/", "/etc/", f"{own}{os.sep}")
