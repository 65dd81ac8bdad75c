"""The tables of docs/frameworks.md are those of the targets' records. UPDATE_GOLDEN=1 writes them again."""

import os
import re
from pathlib import Path

from planner.formats.registry import all_targets
from planner.formats.target import Abilities, Target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
MARK = re.compile(r"(?<=<!-- made from the records -->\n).*?(?=<!-- end -->)", re.DOTALL)


def tables() -> str:
    """What each target can express, its version and sources."""
    rows = ["| target | mesh | ZeRO | schedules | stages | recomputation | context parallelism | offload | precision |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    rows += [_row(target, target.abilities) for target in all_targets() if target.abilities is not None]
    rows += ["", "| target | version | read back | read in |", "|---|---|---|---|"]
    rows += [
        f"| `{target.name}` | {target.version} | {'yes' if target.read else 'no'} | {'; '.join(target.sources)} |"
        for target in all_targets()
    ]
    return "\n" + "\n".join(rows) + "\n\n"


def _row(target: Target, can: Abilities) -> str:
    axes = [axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep") if axis in can.axes]
    sequence: dict[tuple[bool, ...], str] = {
        (False, True): "",
        (True,): " (tp with sequence parallelism)",
        (False,): " (tp without it)",
    }
    cells = [
        f"`{target.name}`",
        ", ".join(axes) + sequence[can.sequence_parallel],
        ", ".join(map(str, can.zero_stages)),
        ", ".join(name.value for name in can.schedules) or "-",
        ("any cut" if can.cuts_unevenly else "equal") if "pp" in can.axes else "-",
        ", ".join(mode.value for mode in can.recompute) + ("; mixed" if can.mixes_recompute else ""),
        ", ".join(method.value for method in can.cp_methods),
        ", ".join(offload.value for offload in can.offloads),
        ", ".join(precision.value for precision in can.precisions),
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_page_shows_what_the_records_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(MARK.sub(lambda _: tables(), page), encoding="utf-8")
        page = PAGE.read_text(encoding="utf-8")
    found = MARK.search(page)
    assert found is not None
    assert found.group(0) == tables()
