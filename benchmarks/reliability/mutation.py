"""Mutation testing: the code is made wrong at random places, one at a time, and tests must notice.

    python -m benchmarks.reliability.mutation [--num N] [--seed S] [--package costmodels ...] [--again] [--output FILE]

cosmic-ray (`pip install -c constraints.txt -e '.[drills]'`) says where a module can be changed and how: another
operator, comparison or number, a condition turned round, a loop that never runs. Of all places some are drawn, each as
likely as any other, and at each one of its changes. Tests run on a copy of the packages, the package's own first, then
those of what rests on it. A change that ends them, or that takes them ten times as long as without, is noticed. One
that no test notices survives: it is printed, and somebody has to say whether it changes anything at all. ``--again``
tries those that survived once more, on today's code and tests, where their line is still the same.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import unified_diff
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.reliability.drill import ROOT, Record, commit, options_of, read_results, save, working_folder

COPIED = ("benchmarks", "costmodels", "examples", "hardware_profiles", "planner", "tests", "pyproject.toml")
ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}  # no |, which joins types
KINDS = ("ReplaceComparisonOperator", "NumberReplacer", "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue",
         "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
         "ReplaceUnaryOperator", "ZeroIterationForLoop")  # fmt: skip
LATER = ("tests/golden/test_plans.py", "tests/golden/test_frozen_prices.py",
         "tests/contracts/test_optimal_equals_the_oracle.py")  # fmt: skip
TESTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "costmodels": (("tests/unit/costmodels",), LATER),
    "planner/solver": (("tests/unit/planner/solver", "tests/contracts/test_solvers.py"), LATER),
}
SLOWER = 10.0  # times as long as without a change: it runs for ever
LEAST_S = 60.0


@dataclass(frozen=True)
class Change:
    """One place of a module, and one of its changes there."""

    path: str
    position: tuple[int, int]  # line and column
    operator: str
    occurrence: int


def cosmic_ray(module: str) -> Any:
    """A module of cosmic-ray, which has no types and which only this drill needs."""
    return import_module(f"cosmic_ray.{module}")


def is_wanted(name: str) -> bool:
    """Whether an operator changes what code does; others change types or decorators, or write `is` for `==`.

    That last is the same for what is compared here, small numbers, words and members of enumerations.
    """
    kind = name.rpartition("/")[2]
    if kind.endswith(("_Eq_Is", "_NotEq_IsNot")):
        return False
    words = kind.split("_")
    return kind.startswith(KINDS) or (words[0] == "ReplaceBinaryOperator" and ARITHMETIC.issuperset(words[1:]))


def is_code(node: Any) -> bool:
    """Whether a node of the syntax tree does anything when the module runs: no decorator does, nor `*` among names."""
    parent = node.parent
    if node.type == "operator" and parent is not None and parent.type in ("param", "parameters"):
        return False
    while parent is not None and parent.type != "decorator":
        parent = parent.parent
    return parent is None


def changes_of(path: Path, root: Path) -> list[Change]:
    """Every change of the module at ``path``."""
    trees, plugins = cosmic_ray("ast"), cosmic_ray("plugins")
    tree, found = trees.get_ast(path.read_text(encoding="utf-8")), list[Change]()
    for name in filter(is_wanted, plugins.operator_names()):
        operator = plugins.get_operator(name)()
        places = ((is_code(node), at) for node in trees.ast_nodes(tree) for at, _ in operator.mutation_positions(node))
        found += [Change(str(path.relative_to(root)), at, name, n) for n, (wanted, at) in enumerate(places) if wanted]
    return found


def drawn(package: str, num: int, seed: int) -> list[Change]:
    """``num`` changes of a package, each at another place."""
    places: dict[tuple[str, tuple[int, int]], list[Change]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        for change in changes_of(path, ROOT):
            places.setdefault((change.path, change.position), []).append(change)
    draw = random.Random(f"{seed} {package}")
    return [draw.choice(places[place]) for place in draw.sample(sorted(places), min(num, len(places)))]


def seconds_of(tests: Sequence[str], limit_s: float) -> float | None:
    """How long the tests in the current folder take; None where one fails or the limit is reached."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    began_s = time.monotonic()
    try:
        result = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    return None if result.returncode else time.monotonic() - began_s


def survives(change: Change, stages: Sequence[tuple[Sequence[str], float]]) -> str | None:
    """The difference that no test noticed, in the current folder; None where one did."""
    path = Path(change.path)
    before = path.read_text(encoding="utf-8")
    after, difference = changed(change, before)
    path.write_text(after, encoding="utf-8")
    try:
        if any(seconds_of(tests, max(LEAST_S, SLOWER * usual_s)) is None for tests, usual_s in stages):
            return None
    finally:
        path.write_text(before, encoding="utf-8")
    return difference


def changed(change: Change, before: str) -> tuple[str, str]:
    """The text of a module after the change, and the difference, which begins with the number of its line."""
    operator = cosmic_ray("plugins").get_operator(change.operator)()
    after: str = cosmic_ray("mutating").mutate_code(before, operator, change.occurrence) or before
    lines = unified_diff(before.splitlines(), after.splitlines(), change.path, change.path, lineterm="", n=0)
    return after, "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def usual_times(package: str) -> list[tuple[Sequence[str], float]]:
    """The tests of a package, and how long they take without a change, in the current folder."""
    found: list[tuple[Sequence[str], float]] = []
    for tests in TESTS[package]:
        usual_s = seconds_of(tests, 3600.0)
        assert usual_s is not None, f"{tests} fail without any change"
        found.append((tests, usual_s))
    return found


def tried_again(package: str, record: Record, output: Path) -> Record:
    """Tries those that survived in ``record``, saving after each; a line that is another by now stays a survivor."""
    stages, left = usual_times(package), list[dict[str, Any]]()
    for number, each in enumerate(survivors := record["survivors"]):
        change = Change(each["path"], (each["position"][0], each["position"][1]), each["operator"], each["occurrence"])
        difference = each["difference"] if has_moved(change, each["difference"]) else survives(change, stages)
        if difference is not None:
            left.append(each)
        num_noticed = record["num_noticed"] + number + 1 - len(left)
        again = {"commit_again": commit(), "num_noticed": num_noticed, "survivors": left + survivors[number + 1 :]}
        save(output, {package: record | again})
    return read_results(output)[package]


def has_moved(change: Change, difference: str) -> bool:
    """Whether the change is another one in today's code."""
    before = Path(change.path).read_text(encoding="utf-8")
    return changed(change, before)[1].partition("\n")[2] != difference.partition("\n")[2]


def tried(package: str, num: int, seed: int, output: Path) -> Record:
    """Tries ``num`` changes of a package in the current folder, a copy, saving after each."""
    stages = usual_times(package)
    record: Record = {"commit": commit(), "seed": seed, "num": 0, "num_noticed": 0, "survivors": []}
    for change in drawn(package, num, seed):
        difference = survives(change, stages)
        record["num"] += 1
        record["num_noticed"] += difference is None
        if difference is not None:
            record["survivors"].append({**asdict(change), "difference": difference})
            print(f"{change.path}\n{difference}", flush=True)
        save(output, {package: record})
    return record


def main() -> int:
    """Tries the changes and prints the survivors; 1 where fewer than four fifths were noticed."""
    parser = options_of(__doc__, 100, "changes of each package", "mutation")
    parser.add_argument("--package", nargs="+", choices=list(TESTS), default=list(TESTS))
    parser.add_argument("--again", action="store_true", help="those of the file of results that survived")
    options = parser.parse_args()
    output = options.output.absolute()
    with working_folder() as folder:
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        for package in options.package:
            before = read_results(output).get(package)
            record = (
                tried_again(package, before, output)
                if options.again and before
                else tried(package, options.num, options.seed, output)
            )
            print(f"{package}: {record['num_noticed']} of {record['num']} noticed", flush=True)
    found = read_results(output)
    return int(any(5 * found[package]["num_noticed"] < 4 * found[package]["num"] for package in options.package))


if __name__ == "__main__":
    sys.exit(main())
