"""The file formats that frameworks use: YAML and JSON read as plain data, YAML, JSON and TOML written."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Generator, Mapping
from typing import Any, TypeVar

import yaml

from costmodels.vocabulary.choices import Optimizer
from planner.errors import InputError

Value = TypeVar("Value")

# Of what is read, so that no number makes a loop or a list endless: far above any model or cluster.
MAX_NUMBER, MAX_LAYERS = 2**40, 2**16
MOST_NAMED = 20  # options that are not read
MOST_DOTS = 200  # in a line of TOML: tomllib takes a minute for a key of 65,000 parts, the square of their number
MOST_NESTED = 64  # sections of YAML inside one another
# Both read plain data alone; libyaml's makes reading a config 13 times quicker, and a few installations lack it.
_YAML_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def commented(lines: list[str], mark: str = "#") -> str:
    """``lines`` as comments, each on a line of its own whatever it holds."""
    return "".join(f"{mark} {''.join(c if c.isprintable() else '?' for c in line)}\n" for line in lines)


class _PlainDumper(yaml.SafeDumper):
    """Writes every value out, and scripts line by line."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_PlainDumper.add_representer(str, _PlainDumper.represent_text)


def yaml_text(value: object) -> str:
    """``value`` as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=1000)


def json_text(value: object) -> str:
    """``value`` as JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def toml_text(tables: Mapping[str, Mapping[str, object]]) -> str:
    """Tables of plain values and lists as TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


class Document(dict[str, object]):
    """A section of a config that knows which of its keys were asked for."""

    def __init__(self, values: Mapping[Any, object]) -> None:
        super().__init__((str(key), Document(v) if isinstance(v, dict) else v) for key, v in values.items())
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        self._asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)

    def unread(self, on_by_default: Collection[str] = (), place: str = "") -> Generator[str]:
        """Names of what nobody asked for, sections by themselves or key by key.

        Of what is switched off only what is ``on_by_default``, names with their sections.
        """
        for key, value in self.items():
            name = place + key
            if key in self._asked:
                if isinstance(value, Document):
                    yield from value.unread(on_by_default, f"{name}.")
            elif value is False:
                if name in on_by_default:
                    yield f"{name} (false)"
            elif value is not None and value != {}:
                yield name


def unread_note(document: Document, on_by_default: Collection[str] = ()) -> tuple[str, ...]:
    """A note on what of ``document`` does not count in its price; none where all of it does.

    ``on_by_default``: options that change a step where they are false.
    """
    names = list(document.unread(on_by_default))
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return (f"not read: {', '.join(name[:80] for name in names[:MOST_NAMED])}{more}",) if names else ()


def read_yaml(text: str) -> Document:
    """The mapping in ``text``: plain data, with no object of any class and no alias; InputError where it is none."""
    try:
        _check_yaml(text)
        return _mapping(yaml.load(text, Loader=_YAML_LOADER), "YAML")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _broken("YAML", error) from error


def _check_yaml(text: str) -> None:
    """YAMLError where a value is meant twice, as a few such can stand for gigabytes, or sections lie too deep."""
    depth = 0
    for event in yaml.parse(text, Loader=_YAML_LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read: write the values out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise yaml.YAMLError(f"more than {MOST_NESTED} sections lie inside one another")


def read_json(text: str) -> Document:
    """The object in ``text``; InputError where it is none."""
    try:
        return _mapping(json.loads(text), "JSON")
    except (json.JSONDecodeError, RecursionError, ValueError) as error:
        raise _broken("JSON", error) from error


def read_toml(text: str) -> Document:
    """The tables in ``text``; InputError where it is no TOML."""
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise InputError(f"a line of the file has more than {MOST_DOTS} dots", hint="is it the right file?")
    try:
        return Document(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise _broken("TOML", error) from error


def section(document: Mapping[str, object], name: str) -> Document:
    """The mapping under ``name``, empty where there is none; InputError where it is something else."""
    value = document.get(name)
    if value is None:
        return Document({})
    if not isinstance(value, Document):
        raise InputError(f"{name} must be a section, not {value!r:.60}", hint="correct the file")
    return value


def number(document: Mapping[str, object], name: str, default: int | None = None) -> int | None:
    """The whole number under ``name``, -1 for what is left open; InputError where it is something else.

    DeepSpeed's ``auto`` says nothing.
    """
    value = document.get(name, default)
    if value is None or value == "auto":
        return None
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,15}", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be a whole number, not {value!r:.60}", hint="correct the file")
    most = MAX_LAYERS if "layers" in name else MAX_NUMBER
    if not -1 <= value <= most:
        raise InputError(f"{name} must be a number up to {most}, not {value}", hint="correct the file")
    return value


def flag(document: Mapping[str, object], name: str, default: bool = False) -> bool:
    """The truth value under ``name``; InputError where it is something else."""
    value = document.get(name, default)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, not {value!r:.60}", hint="correct the file")
    return value


def _mapping(value: object, kind: str) -> Document:
    if not isinstance(value, dict):
        raise InputError(f"the file holds a {kind} {type(value).__name__}, not a mapping", hint="is it the right file?")
    return Document(value)


def _broken(kind: str, error: Exception) -> InputError:
    first = str(error).strip().replace("\n", " ")[:200]
    return InputError(
        f"the file is not {kind}: {first}", hint="is it damaged, or another kind of file? name it: --from"
    )


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON's escapes, and DEL's."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def sgd_of(name: str, momentum: object) -> Optimizer:
    """SGD by the value of its momentum, which is under ``name``; InputError where it is no number from 0 to below 1."""
    try:
        value = float(str(momentum))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InputError(f"{name} must be a number from 0 to below 1, not {momentum!r:.60}", hint="correct it")
    return Optimizer.SGD_MOMENTUM if value else Optimizer.SGD


def choice(name: str, word: object, known: Mapping[Value, str]) -> Value:
    """The key of ``known`` whose value is ``word``; InputError lists those there are."""
    found = next((key for key, value in known.items() if value == word), None)
    if found is None:
        raise InputError(
            f"{name} {word!r:.60} is not priced", hint=f"priced are {', '.join(dict.fromkeys(known.values()))}"
        )
    return found
