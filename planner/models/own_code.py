"""Code in the folder of a model file: always compiled from its source, and only what a plan records of it.

Python would take ``__pycache__/helper.cpython-311.pyc`` for the code of ``helper.py``, whatever is written there.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, ExtensionFileLoader, FileFinder, ModuleSpec
from importlib.machinery import SourceFileLoader as PlainLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from planner.errors import ModelError

MAX_BYTES = 2**26  # a file above is data, and is not looked into
_PACKAGES = ("planner", "costmodels", "hardware_profiles")


def content_of(path: str) -> bytes | None:
    """What is written there; None where there is no such file, or none that code is made of."""
    file = Path(path)
    try:
        return file.read_bytes() if file.is_file() and file.stat().st_size <= MAX_BYTES else None
    except OSError:
        return None


def file_digest(path: str) -> str | None:
    """SHA-256 of the content; None where ``content_of`` has none."""
    content = content_of(path)
    return None if content is None else hashlib.sha256(content).hexdigest()


@functools.cache
def foreign_folders() -> tuple[str, ...]:
    """Beginnings of paths where nothing of the user's lies: installed packages, devices, these packages."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own = Path(__file__).parents[2]
    ours = (f"{own / name}/" for name in _PACKAGES)
    return (*installed, f"{sys.prefix}/", "/proc/", "/sys/", "/dev/", "/etc/", *ours)


@dataclass(frozen=True)
class OwnCode:
    """What lies in ``folder`` and below it, installed packages and hidden folders aside.

    ``recorded``: SHA-256 of each file by its path from there, as a plan has it; None: nothing is recorded.
    """

    folder: Path
    recorded: Mapping[str, str] | None = None

    def name_of(self, path: str | Path) -> str | None:
        """The path from the folder, with ``/``; None where the file is not one of the folder's own."""
        place = Path(path)
        place = place.parent.resolve() / place.name
        if not place.is_relative_to(self.folder) or str(place).startswith(foreign_folders()):
            return None
        parts = place.relative_to(self.folder).parts
        hidden = any(part == "site-packages" or part.startswith(".") for part in parts)
        return None if hidden else "/".join(parts)

    def check(self, path: str | Path, content: bytes) -> None:
        """ModelError where ``content`` of the file is not what is recorded of it, before any of it is executed."""
        name = self.name_of(path)
        if self.recorded is None or name is None:
            return
        expected = self.recorded.get(name)
        if expected == hashlib.sha256(content).hexdigest():
            return
        wrong = "is not among the files" if expected is None else "is not the file"
        raise ModelError(
            f"{name} {wrong} that the plan was made with, so it is not executed",
            hint="look at what changed, then search again: planner search MODEL -o plan.json",
        )

    def guard_imports(self) -> None:
        """From now on, imports from the folder are checked, and compiled from their source."""
        others = [hook for hook in sys.path_hooks if not (isinstance(hook, OwnCode) and hook.folder == self.folder)]
        sys.path_hooks[:] = [self, *others]
        for entry in list(sys.path_importer_cache):
            if self.name_of(entry) is not None:
                del sys.path_importer_cache[entry]

    def __call__(self, entry: str) -> FileFinder:
        """What Python asks for each entry of ``sys.path``; ImportError where it lies elsewhere."""
        if self.name_of(entry) is None:
            raise ImportError(f"{entry} is not in {self.folder}", path=entry)
        # What it is given is called with the module's name and its path, which its type does not say.
        loaders: Any = ((self._extension, EXTENSION_SUFFIXES), (self.source_loader, SOURCE_SUFFIXES))
        return FileFinder(entry, *loaders)

    def source_loader(self, name: str, path: str) -> PlainLoader:
        """Loads one Python file."""
        return _SourceLoader(name, path, self)

    def _extension(self, name: str, path: str) -> ExtensionFileLoader:
        return _ExtensionLoader(name, path, self)


class _SourceLoader(PlainLoader):
    def __init__(self, name: str, path: str, own: OwnCode) -> None:
        super().__init__(name, path)
        self._own = own

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        content = self.get_data(path)
        self._own.check(path, content)
        return self.source_to_code(content, path)


class _ExtensionLoader(ExtensionFileLoader):
    def __init__(self, name: str, path: str, own: OwnCode) -> None:
        super().__init__(name, path)
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._own.check(self.path, Path(self.path).read_bytes())
        return super().create_module(spec)
