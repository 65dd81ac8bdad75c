"""Entries in a folder of the user's: what took long to work out is not worked out twice.

An entry is a line with the digest of the rest, and the rest. It is written whole or not at all; one whose digest
differs is none. A folder that cannot be read or written only costs time.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from planner.errors import InputError
from planner.model_file import digest_of
from planner.output_file import write_text


@dataclass(frozen=True)
class DiskCache:
    """At most ``most`` entries of one kind; the oldest go."""

    folder: Path
    suffix: str
    most: int

    def read(self, name: str) -> bytes | None:
        """The entry of that name; None where there is none, or it is damaged."""
        try:
            digest, _, content = self._path(name).read_bytes().partition(b"\n")
        except OSError:
            return None
        return content if digest == digest_of(content).encode() else None

    def write(self, name: str, content: str) -> None:
        """Puts an entry there, where that is possible."""
        with contextlib.suppress(InputError, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self._path(name), f"{digest_of(content)}\n{content}")
            self._drop_oldest()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{self.suffix}"

    def _drop_oldest(self) -> None:
        """What a killed writer left goes too: it grows old as the entries do."""
        if len(os.listdir(self.folder)) > self.most:
            entries = sorted(self.folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in entries[self.most :]:
                path.unlink(missing_ok=True)
