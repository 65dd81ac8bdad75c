"""What a user's code reads while it makes a model: a graph in the cache is as good as these are unchanged."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.models.own_code import OwnCode, content_of, file_digest, foreign_folders

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
        foreign = foreign_folders()

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

    def own(self, folder: Path) -> dict[str, str]:
        """SHA-256 of what lies in ``folder`` or below it, by its path from there."""
        named = {OwnCode(folder).name_of(path): digest for path, digest in self.digests().items()}
        return {name: digest for name, digest in sorted(named.items(), key=str) if name is not None}

    def environment(self) -> dict[str, str]:
        """The variables that the files may have asked for."""
        return variables_named_in(self.paths, self.variables)


def variables_named_in(paths: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ``variables`` whose names are words of the files."""
    contents = (content for path in paths if (content := content_of(path)) is not None)
    words = {word for content in contents for word in NAME.findall(content)}
    return {name: value for name, value in sorted(variables.items()) if name.encode() in words}
