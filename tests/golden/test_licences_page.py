"""docs/licences.md lists what is installed with planner, and under which licence. UPDATE_GOLDEN=1 writes it again."""

import os
import re
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """# What is installed with planner, and its licences

Made by `tests/golden/test_licences_page.py` from what the packages say of themselves: all that `planner[hf]` needs on
Linux, as `make demo` installs it, in the versions of `constraints.txt`. All of them are permissive but one: tqdm is
partly under the MPL 2.0, which asks that changes of its own files are published.

| package | version | licence |
|---|---|---|
"""
# Licences that ask for no more than a notice, and the one of tqdm's files.
PERMISSIVE = re.compile(r"Apache|MIT|BSD|ISC|PSF|BSL-1\.0|CNRI|Zlib|CC0|MPL[- ]2\.0")


def needed(name: str, extras: set[str]) -> dict[str, Distribution]:
    """Every distribution that ``name`` with these extras rests on, itself left out."""
    waiting, found = [(name, extra) for extra in ("", *extras)], dict[tuple[str, str], Distribution]()
    while waiting:
        key = waiting.pop()
        if key in found:
            continue
        found[key] = distribution(key[0])
        for requirement in map(Requirement, found[key].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": key[1]}):
                plain = requirement.name.lower().replace("_", "-")
                waiting += [(plain, extra) for extra in ("", *requirement.extras)]
    return {of: each for (of, extra), each in sorted(found.items()) if not extra and of != name}


def licence_of(package: Distribution) -> str:
    """The expression, or else the short text, or else the classifiers."""
    facts = package.metadata
    if "License-Expression" in facts:
        return facts["License-Expression"]
    classified = [each.rpartition(" :: ")[2] for each in facts.get_all("Classifier", []) if each.startswith("License")]
    return facts["License"] if "License" in facts else ", ".join(classified)


def test_every_licence_is_known_and_permissive() -> None:
    packages = needed("planner", {"hf"})
    licences = {name: licence_of(package) for name, package in packages.items()}
    unknown = {name: text for name, text in licences.items() if not PERMISSIVE.search(text) or "GPL" in text}
    assert unknown == {}
    rows = [f"| {name} | {each.version.partition('+')[0]} | {licences[name]} |" for name, each in packages.items()]
    page = HEAD + "\n".join(rows) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page
