"""A file imports only from floors below its own, or from its own folder: the imports are parsed, not
trusted.
"""

import ast
import sys
from functools import cache
from pathlib import Path

import structattn

ROOT = Path(structattn.__file__).parent
# The most specific prefix gives the floor. The lab is another package, which the library never imports.
FLOORS = {
    "errors": 0,
    "extras": 0,
    "checks": 1,
    "extensions": 1,
    "files": 2,
    "memory": 2,
    "seeds": 2,
    "progress": 2,
    "text_forms": 2,
    "typed_records": 2,
    "tensor_files": 3,
    "layout": 3,
    "optim": 3,
    "mup": 4,
    "matrices": 4,
    "ops": 4,
    "cache": 5,
    "parallel": 5,
    "parallel.tensor": 9,
    "layers": 6,
    "spec": 7,  # text forms: what is below takes objects
    "models": 8,
    "integrations": 9,
    "machine": 3,
    "serve": 10,
    "cli": 10,
    "__main__": 11,
}
OUTSIDE = {"", "testing"}  # the package's own front door, and helpers that nothing may import
FRONT_DOORS = {"parallel"}  # packages that import what is above them at its first use


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def floor(module: str) -> tuple[str, int]:
    """The longest listed prefix of a module and its floor."""
    known = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    assert known, f"{module} has no floor: add it to FLOORS"
    best = max(known, key=len)
    return best, FLOORS[best]


@cache
def imported(path: Path) -> list[str]:
    return list(_imported(path))


def _imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("structattn"):
            base = node.module.removeprefix("structattn").lstrip(".")
            for alias in node.names:
                joined = f"{base}.{alias.name}".lstrip(".")
                is_module = (ROOT / (joined.replace(".", "/") + ".py")).exists() or (
                    ROOT / joined.replace(".", "/")
                ).is_dir()
                yield joined if is_module else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "structattn":
                    yield alias.name.removeprefix("structattn").lstrip(".")


def test_imports_go_down_the_floors() -> None:
    seen = set()
    for module, path in modules():
        if module.split(".")[0] in OUTSIDE or module in FRONT_DOORS:
            continue
        name, own = floor(module)
        for target in imported(path):
            if target == "":
                continue  # the version, from the front door
            seen.add((module, target))
            assert target.split(".")[0] != "testing", f"{module} imports testing"
            other, theirs = floor(target)
            assert theirs < own or other == name, f"{module} (floor {own}) imports {target} (floor {theirs})"
    # Every file imports something of the package, but for a few; so none is left out by a mistake of this
    # parser.
    held = {
        module: path for module, path in modules() if module.split(".")[0] not in OUTSIDE and module not in FRONT_DOORS
    }
    assert {module for module, _ in seen} == {module for module, path in held.items() if any(imported(path))}
    assert sum(not imported(path) for path in held.values()) < 0.25 * len(held)
    text = sum(path.read_text().count("\nfrom structattn.") for _, path in modules())
    assert len(seen) > 0.9 * text
    assert {floor(target)[0] for _, target in seen} >= set(FLOORS) - {"__main__", "mup", "serve", "parallel.tensor"}


def test_an_import_that_goes_up_is_found(tmp_path) -> None:
    path = tmp_path / "planted.py"
    path.write_text("from structattn.cli.call import call\n\n\ndef f():\n    from structattn import models\n")
    assert imported(path) == ["cli.call", "models"]
    assert [floor(target)[1] > floor("ops")[1] for target in imported(path)] == [True, True]


def circles() -> list[set[str]]:
    """Groups of files that import each other, directly or through others; imports under ``TYPE_CHECKING``
    count.
    """
    graph = {name: {target for target in imported(path) if target and target != name} for name, path in modules()}
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        reach[start] = seen
    return [{other for other in reach[name] if name in reach[other]} for name in graph if name in reach[name]]


def test_no_circles() -> None:
    found = circles()
    assert not found, f"these files import each other: {sorted(found[0])}"


def test_reference_imports_only_torch_the_layout_and_the_options_of_a_call() -> None:
    allowed = {
        "reference.py": {"structattn.layout.levels", "structattn.ops.call"},
        "call.py": {"structattn.layout.levels", "structattn.ops.terms"},
        "terms.py": {"structattn.checks", "structattn.errors"},
    }
    for file, expected in allowed.items():
        names = set()
        for node in ast.walk(ast.parse((ROOT / "ops" / file).read_text())):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
        assert {x for x in names if x.partition(".")[0] not in {"torch", *sys.stdlib_module_names}} == expected
