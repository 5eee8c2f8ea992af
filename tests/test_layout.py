"""Imports flow one way: a room of core sees only those before it, deferred and typing-only imports included."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

CORE = Path(__file__).parent.parent / "core"
ORDER = (
    *("errors", "progress", "contracts", "registry", "files", "serving", "data", "target", "loss", "draft", "auto"),
    *("decoding", "formats", "training", "testing", "doctor", "cli", "__main__"),
)


def modules() -> dict[str, Path]:
    """core's modules by dotted name; a package by its own."""
    named = {".".join(file.relative_to(CORE).with_suffix("").parts): file for file in CORE.rglob("*.py")}
    return {name.removesuffix("__init__").removesuffix("."): file for name, file in named.items()}


def imports(name: str, file: Path) -> Iterator[str]:
    """The modules of core that a module names in any import, wherever it stands."""
    package = (name if file.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = [*filter(None, package[: len(package) - node.level + 1]), *(node.module or "").split(".")]
        elif (node.module or "").split(".")[0] == "foredraft":
            base = (node.module or "").split(".")[1:]
        else:
            continue
        for alias in node.names:
            whole = ".".join(filter(None, [*base, alias.name]))
            yield whole if whole in MODULES else ".".join(filter(None, base))


MODULES = modules()


@cache
def graph() -> dict[str, set[str]]:
    """The modules of core that each of them imports."""
    return {name: {target for target in imports(name, file) if target} for name, file in MODULES.items() if name}


def test_no_import_runs_against_the_order() -> None:
    rooms = {room: place for place, room in enumerate(ORDER)}
    pairs = [(name, target) for name, found in graph().items() for target in found]
    assert not [f"{name} imports {target}" for name, target in pairs if rooms[_room(target)] > rooms[_room(name)]]


def test_no_circle() -> None:
    order = list(TopologicalSorter(graph()).static_order())  # raises CycleError, which names it
    assert set(order) >= graph().keys()


def test_the_root_is_small() -> None:
    assert len(list(CORE.glob("*.py"))) <= 6


def test_rooms_are_on_the_map() -> None:
    """docs/architecture.md names every room."""
    text = (CORE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert not [room for room in ORDER if not room.startswith("_") and f"`{room}" not in text]


def _room(module: str) -> str:
    return module.split(".")[0]
