"""Reading sysfs: folders and one-line files that a kernel or driver may not have, or may refuse to show."""

from __future__ import annotations

import re
from pathlib import Path


def entries(folder: Path, pattern: str) -> list[Path]:
    """What lies in ``folder`` under a name that ``pattern`` matches whole, sorted; empty where it cannot be read."""
    try:
        return sorted(path for path in folder.iterdir() if re.fullmatch(pattern, path.name))
    except OSError:
        return []


def text(path: Path) -> str | None:
    """The content of a one-line file; None where it is missing or the driver refuses to answer."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
