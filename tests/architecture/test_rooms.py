"""How the rooms of the house are joined: the one counter of the arrows between folders, types included."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("planner", "costmodels", "hardware_profiles")
# 135 arrows between 31 rooms: no change may join rooms more closely than they are.
MOST_ARROWS_A_ROOM = 135 / 31


def room_of(module: str, file: Path) -> str:
    """A folder with those inside it; of ``planner`` itself each module is a room of its own."""
    folder = "/".join(file.parent.relative_to(ROOT).parts[:2])
    return module if folder == "planner" else folder


def modules() -> dict[str, Path]:
    """Every module with its file; an empty ``__init__`` is none."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Our own modules that a file imports, types included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(inside & known.keys() or {node.module})
    return found & known.keys()


def arrows() -> dict[str, set[str]]:
    """For each room the rooms that it imports from."""
    known = modules()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in known.items():
        targets = (room_of(each, known[each]) for each in imported(path, known))
        found[room_of(module, path)].update(targets)
    found.pop("planner")  # the package itself, which holds nothing
    return {room: targets - {room, "planner"} for room, targets in found.items()}


def test_no_arrow_comes_back() -> None:
    """Rooms form layers: none reaches itself over others."""
    towards = arrows()
    done: set[str] = set()

    def visit(room: str, way: tuple[str, ...]) -> None:
        assert room not in way, " -> ".join((*way[way.index(room) :], room))
        if room not in done:
            for target in sorted(towards.get(room, ())):
                visit(target, (*way, room))
            done.add(room)

    for room in sorted(towards):
        visit(room, ())


def test_rooms_are_not_joined_more_closely() -> None:
    towards = arrows()
    assert sum(map(len, towards.values())) / len(towards) <= MOST_ARROWS_A_ROOM
