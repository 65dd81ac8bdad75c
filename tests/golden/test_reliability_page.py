"""The table of docs/reliability.md is made from benchmarks/results. UPDATE_GOLDEN=1 writes it again."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
MARK = re.compile(r"(?<=<!-- made from benchmarks/results -->\n).*?(?=<!-- end -->)", re.DOTALL)


def results(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"reliability_{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Drill, how many were tried, what passed, the command, the commit."""
    for target, found in (each for name in ("fuzz", "fuzz_first") for each in results(name).items()):
        bad = sum(found["defects"].values())
        passed = f"{found['num_tried'] - bad:,}; {found['num_taken']:,} taken, {found['num_used']:,} used"
        tried = f"{found['num_tried']:,} inputs, {found['inputs_per_cpu_s']:,} per CPU second"
        yield f"fuzz, {target}", tried, passed, f'fuzz --target "{target}"', found["commit"]
    for found in results("injection").values():
        outputs = found["outputs"].values()
        same = sum(each.get("the same but for the name", 0) for each in outputs)
        other = sum(each.get("refused", 0) + each.get("printed", 0) for each in outputs)
        tried = f"{found['num_texts']} texts, {found['num_of_commands']} of them through whole commands"
        passed = f"{found['num_texts'] if not found['broken'] else 'not all'}; {same:,} files the same but for the name"
        command = f"injection --commands {found['num_of_commands']}"
        yield "injection", tried, f"{passed}, {other:,} refused or printed", command, found["commit"]
    for found in results("kill_files").values():
        whole = sum(each.get("whole", 0) for each in found["kinds"].values())
        left = sum(each.get("temporary files left", 0) for each in found["kinds"].values())
        yield (
            "kill_files, writers",
            f"{found['num']:,}",
            f"{whole:,}; {left} temporary files stayed",
            "kill_files",
            found["commit"],
        )
        whole = sum(found["commands"].get(name, 0) for name in ("old", "new, whole"))
        yield "kill_files, commands", str(found["num_commands"]), str(whole), "kill_files", found["commit"]
    for package, found in results("mutation").items():
        passed = f"{found['num_noticed']} noticed ({found['num_noticed'] / found['num']:.0%})"
        yield (
            f"mutation, {package}",
            f"{found['num']} changes",
            passed,
            f"mutation --package {package}",
            found["commit"],
        )
    yield from _repeated()


def _repeated() -> Iterator[tuple[str, str, str, str, str]]:
    for found in results("ctrl_c").values():
        for command, outcomes in found["commands"].items():
            num, bad = sum(outcomes.values()), sum(n for name, n in outcomes.items() if name.startswith("BAD"))
            says = "; ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
            yield (
                f"ctrl_c, {command}",
                str(num),
                f"{num - bad}: {says}",
                f'ctrl_c --command "{command}"',
                found["commit"],
            )
    for found in results("determinism").values():
        for search, each in found["searches"].items():
            passed = (
                f"{each['num_different']} plan{'s' if each['num_different'] > 1 else ''} in {each['num_runs']} runs"
            )
            yield (
                f"determinism, {search}",
                str(each["num_runs"]),
                passed,
                f'determinism --search "{search.partition(",")[0]}"{_at_once(each)}',
                found["commit"],
            )
    yield from _faults()
    for found in results("growth").values():
        yield "growth", f"{found['num']:,} searches", f"{found['growth']:+.1%} of memory", "growth", found["commit"]


def _at_once(found: dict[str, int]) -> str:
    num = found.get("num_at_once", 1)
    return "" if num == 1 else f" --num {found['num_runs']} --at-once {num}"


def _faults() -> Iterator[tuple[str, str, str, str, str]]:
    for name, found in results("faults").items():
        command = f'fault_drill --only "{name}"'
        if found["problems"]:
            yield f"faults, {name}", "1", f"0: {'; '.join(found['problems'])}", command, found["commit"]
            continue
        codes = ", ".join(str(code) for code in found["exit_codes"])
        outcome = f"1: exit codes {codes}" if codes else "1"
        if found["newest_checkpoint"]:
            outcome += f"; of {found['steps_done']} steps {found['newest_checkpoint']} are kept" if codes else ""
            outcome += "; goes on with the same losses"
        yield f"faults, {name}", f"1, over after {found['ended_s']} s", outcome, command, found["commit"]


def table() -> str:
    lines = ["| drill | tried | passed | `python -m benchmarks.reliability.` | commit |", "|---|---|---|---|---|"]
    return "\n" + "\n".join(lines + [f"| {a} | {b} | {c} | `{d}` | {e} |" for a, b, c, d, e in rows()]) + "\n\n"


def test_the_page_shows_what_the_drills_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(MARK.sub(lambda _: table(), page), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
    found = MARK.search(page)
    assert found is not None
    assert found.group(0) == table()
