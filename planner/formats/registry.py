"""Every target: what the files of ``targets/`` hold. A new file there is a new target."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from planner.errors import InputError
from planner.formats import targets
from planner.formats.target import Read, Target


@cache
def all_targets() -> tuple[Target, ...]:
    """All targets, by name."""
    found: list[Target] = []
    for module in iter_modules(targets.__path__):
        found.extend(import_module(f"{targets.__name__}.{module.name}").TARGETS)
    return tuple(sorted(found, key=lambda target: target.name))


def target_called(name: str) -> Target:
    """The target of that name; InputError lists those there are."""
    found = next((target for target in all_targets() if target.name == name.lower()), None)
    if found is None:
        known = ", ".join(target.name for target in all_targets())
        raise InputError(f"no format {name!r} is known", hint=f"known are {known}")
    return found


def _names(file_name: str, text: str) -> Iterator[str]:
    """The name of a config, then those that would say of what kind its content is, where that is no script."""
    yield file_name
    if not text.startswith("#!"):
        yield from (file_name + ending for ending in (".json", ".toml", ".yaml"))


def read_config(file_name: str, text: str, name: str | None = None) -> tuple[Target, Read]:
    """What a framework's config says, and whose it is: ``name``'s, or that of the target whose file it looks like.

    A name such as ds.cfg says nothing of what kind a file is: its content does then.

    InputError where no target can be read back, or none is recognised.
    """
    readable = [target for target in all_targets() if target.read is not None]
    known = ", ".join(target.name for target in readable)
    if name is None:
        found = next((each for name in _names(file_name, text) for each in readable if each.is_one(name, text)), None)
        if found is None:
            raise InputError(
                f"{file_name} is no config that is recognised",
                hint=f"name its format, as in `planner import --from FORMAT`: {known}",
            )
    else:
        found = next((target for target in readable if target.name == name.lower()), None)
        if found is None:
            raise InputError(f"configs of {name!r:.40} are not read", hint=f"formats that are: {known}")
    assert found.read is not None
    return found, found.read(text)
