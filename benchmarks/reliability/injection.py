"""Hostile names through every output: what a name says is shown or quoted, and no part of a file is made of it.

    python -m benchmarks.reliability.injection [--num 200] [--commands 200] [--seed S] [--output FILE.json]

A plan with a harmless name is put out first. Then each hostile text takes the place of that name: of the model, its
modules, the device, the hardware and the files. What is written must be what was written before but for the name. That
is asked of readers that share no code with planner: PyYAML, ``json``, ``tomllib``, ``html.parser`` and bash, which has
to find the script sound (``-n``), and then runs it with stubs and no PATH and says which words the launchers get. What
commands print must hold nothing that a terminal obeys. A name may be refused with an error, too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reliability.drill import ROOT, commit, options_of, save, working_folder
from benchmarks.reliability.fuzz_arguments import is_harmless, said
from benchmarks.reliability.fuzz_targets import CONFIG, GRAPH, HARDWARE, make_small_graph, small_plans
from benchmarks.reliability.hostile_text import hostile_texts
from planner.cli.export import exported, job_of
from planner.errors import PlannerError
from planner.formats.registry import all_targets
from planner.formats.settings import Job

HARMLESS = "harmless"
SHELL = ("megatron", "maxtext", "slurm", "torchrun")
STUBS = """
launched() { printf '%s\\0' "$@"; }
torchrun() { launched torchrun "$@"; }; python3() { launched python3 "$@"; }; srun() { shift; "$@"; }
exec() { "$@"; }; head() { read -r first; echo "$first"; }; scontrol() { echo node; }
SLURM_JOB_NODELIST=n; SLURM_JOB_ID=1
"""
_WORD = re.compile(r"(#SBATCH --job-name=)?[a-z0-9-]+")


Outcome = Mapping[str, Counter[str]]


class BrokenOutError(Exception):
    """A name became a part of an output."""


def read_shell(text: str) -> Any:
    """The words that launchers get, and the lines that sbatch reads."""
    content = text.encode("utf-8", "surrogateescape")
    checked = subprocess.run(["bash", "-n"], input=content, capture_output=True, check=False)
    if checked.returncode or checked.stderr:
        raise BrokenOutError(f"bash -n: {checked.stderr[:100]!r}")
    bash = ["/bin/bash", "-c", STUBS.encode() + content]
    ran = subprocess.run(bash, env={"PATH": "/nonexistent"}, capture_output=True, check=False)
    if ran.returncode or ran.stderr:
        raise BrokenOutError(f"bash: {ran.returncode}, {ran.stderr[:100]!r}")
    batch = [line for line in text.split("\n") if line.startswith("#SBATCH")]
    return [batch, os.fsdecode(ran.stdout).split("\0")]


def read_task(text: str) -> Any:
    """A task of SkyPilot, whose ``run`` is a script."""
    document = yaml.safe_load(text)
    return [read_shell(document.pop("run")), document]


def reader_of(target: str) -> Callable[[str], Any]:
    """What reads the files of a target."""
    if target in SHELL:
        return read_shell
    return {"deepspeed": json.loads, "torchtitan": tomllib.loads, "skypilot": read_task}.get(target, yaml.safe_load)


def check_same(harmless: Any, hostile: Any, name: str | None, place: str = "") -> None:
    """BrokenOutError where a document differs in more than text that holds the name.

    That text must have ``name`` in its place, or be of letters, digits and dashes: as a job may be called. Without a
    ``name`` it may be any text.
    """
    if isinstance(harmless, dict) and isinstance(hostile, dict) and list(harmless) == list(hostile):
        for key, value in harmless.items():
            check_same(value, hostile[key], name, f"{place}.{key}")
    elif isinstance(harmless, list) and isinstance(hostile, list) and len(harmless) == len(hostile):
        for index, (one, other) in enumerate(zip(harmless, hostile, strict=True)):
            check_same(one, other, name, f"{place}.{index}")
    elif isinstance(harmless, str) and isinstance(hostile, str) and HARMLESS in harmless:
        if name is not None and not (_WORD.fullmatch(hostile) or hostile in _named(harmless, name)):
            raise BrokenOutError(f"{place}: {hostile!r:.60} in place of {name!r:.60}")
    elif harmless != hostile:
        raise BrokenOutError(f"{place}: {hostile!r:.60} in place of {harmless!r:.60}")


def _named(harmless: str, name: str) -> tuple[str, str]:
    """With ``name`` in the place of the harmless one: a file's that begins with a dash is ./-..."""
    text = harmless.replace(HARMLESS, name)
    return text, f"./{text}"


class Outline(HTMLParser):
    """Elements of a page with the names of their attributes, and the scripts' text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Any] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element, with the values of its attributes."""
        self.elements.append([tag, [[name, value] for name, value in attrs]])

    def handle_endtag(self, tag: str) -> None:
        """Its end."""
        self.elements.append(["/" + tag])

    def handle_data(self, data: str) -> None:
        """Text: that of scripts is kept."""
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)


def read_page(path: Path) -> Any:
    """What a page is made of, without what it says."""
    outline = Outline(path.read_text(encoding="utf-8"))
    data, *code = outline.scripts
    return [outline.elements, json.loads(data), code]


def name_of_file(text: str) -> str:
    """As much of ``text`` as a file can be called."""
    kept = "".join(each for each in text if each not in "/\0")[:40]
    return os.fsdecode(kept.encode("utf-8", "replace"))


def exports(jobs: list[Job], text: str) -> Iterator[tuple[str, Any]]:
    """Every target's file of every plan that it can express, read; None where the name is refused."""
    for number, job in enumerate(jobs):
        model = job.plan.model.model_copy(update={"source": f"{text}.json"})
        plan = job.plan.model_copy(update={"model": model, "hardware": text, "warnings": (text,)})
        named = replace(job, plan=plan, plan_path=f"{text}.json", device=f"H100 {text}")
        for target in all_targets():
            try:
                written = exported(target, named).text
            except PlannerError:
                yield f"export {target.name} {number}", None
            else:
                yield f"export {target.name} {number}", reader_of(target.name)(written)


def commands(text: str) -> Iterator[tuple[str, Any]]:
    """What commands write and print about a model, a device and files of that name; None where they refuse it."""
    name = name_of_file(text)
    graph, profile, plan = f"graph {name}.graph.json", "profile.json", f"plan {name}.json"
    _write(
        graph,
        _renamed(json.loads(GRAPH.read_text()), "layers", f"layers{text}") | {"warnings": [text], "source": graph},
    )
    own = json.loads((ROOT / "hardware_profiles" / "data" / f"{HARDWARE}.json").read_bytes())
    _write(profile, own | {"description": text, "device": own["device"] | {"name": f"CPU {text}"}})
    pins = ("--pp", "2", "--zero", "1", "--global-batch", "8", "--precision", "fp32", "--no-idle")
    hardware = profile if said(["hardware", "show", profile])[0] == 0 else HARDWARE
    page, trace = f"page {name}.html", f"trace {name}.json"
    lines = {
        "hardware show": ("hardware", "show", profile),
        "trace": ("trace", graph, "--check"),
        "search": ("search", graph, "--gpus", "4", "--hardware", hardware, *pins, "-o", plan),
        "estimate": ("estimate", plan),
        "explain": ("explain", plan, "--search", "none"),
        "schedule": ("schedule", plan, "--trace", trace),
        "report": ("report", plan, "--search", "none", "-o", page),
        "search of nothing": ("search", text, "--gpus", "4", "--hardware", HARDWARE),
        "hardware of nothing": ("hardware", "show", text),
        "no format": ("export", plan, "--to", text),
    }
    files: dict[str, Callable[[], Any]] = {
        "schedule": lambda: json.loads(Path(trace).read_text()), "report": lambda: read_page(Path(page)),
    }  # fmt: skip
    for command, words in lines.items():
        passable = [word.replace("\0", "").encode("utf-8", "replace").decode() for word in words]
        code, out, err = said(passable)
        if not is_harmless(out + err) or "internal error" in err:
            raise BrokenOutError(f"{command}: {err[:200]!r}")
        yield command, files[command]() if code == 0 and command in files else None


def _write(path: str, document: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(document))


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {_renamed(key, old, new): _renamed(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def harmless_jobs() -> list[Job]:
    """Plans to export, in the current folder."""
    shaped = {"source": str(CONFIG)}  # which tells the shape of the model
    plans = [plan.model_copy(update={"model": plan.model.model_copy(update=shaped)}) for plan in small_plans()]
    return [job_of(plan, Path("plan.json"), 4) for plan in plans]


def drilled(texts: list[str], jobs: list[Job], num_of_commands: int) -> tuple[Outcome, dict[str, str]]:
    """What came of each output, and an example of each that broke; of commands, for the first of the texts."""
    sources = {True: lambda text: exports(jobs, text)} | ({False: commands} if num_of_commands else {})
    harmless = {is_exact: dict(source(HARMLESS)) for is_exact, source in sources.items()}
    assert all(harmless[False][name] is not None for name in ("schedule", "report") if num_of_commands)
    counts, broken = defaultdict[str, Counter[str]](Counter), dict[str, str]()
    for number, text in enumerate(texts):
        for is_exact, source in sources.items():
            if not is_exact and number >= num_of_commands:
                continue
            place = "the first output"
            try:
                for place, document in source(text):
                    expected = harmless[is_exact][place]
                    if document is None:
                        answer = "printed" if expected is None and not is_exact else "refused"
                    else:
                        check_same(expected, document, text if is_exact else None)
                        answer = "the same but for the name"
                    counts[place.rstrip("01234 ")][answer] += 1
            except Exception as error:  # whatever a reader says: the file is not what it was
                counts[place]["BROKEN, or the one behind it"] += 1
                broken[f"{place}: {type(error).__name__} {error!s:.200}"] = repr(text)[:100]
    return counts, broken


def main() -> int:
    """Tries the texts and prints what came of them; 1 where one broke out."""
    parser = options_of(__doc__, 200, "hostile texts", "injection")
    parser.add_argument("--commands", type=int, default=200, help="of these, so many also through whole commands")
    options = parser.parse_args()
    output = options.output.absolute()
    texts = hostile_texts(options.num, options.seed)
    with working_folder():
        make_small_graph()
        counts, broken = drilled(texts, harmless_jobs(), options.commands)
    record = {
        "commit": commit(),
        "seed": options.seed,
        "num_texts": len(texts),
        "num_of_commands": options.commands,
        "outputs": counts,
        "broken": broken,
    }
    save(output, {"injection": record})
    print(json.dumps(record, indent=1))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
