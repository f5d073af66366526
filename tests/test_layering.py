"""A file imports only from floors below its own, or from its own folder, and a class name means one class:
the files are parsed, not trusted.
"""

import ast
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import structattn
import structattn_lab


@dataclass(frozen=True, eq=False)
class Package:
    """A package and its floors.

    Attributes:
        name: of the package.
        root: its folder.
        floors: by module or folder; the most specific name gives the floor.
        outside: what has no floor: the package's own front door, and helpers that nothing may import.
        front_doors: packages that import what is above them at their first use.
        tops: floors that nothing needs to import.
    """

    name: str
    root: Path
    floors: dict[str, int]
    outside: frozenset[str] = frozenset({""})
    front_doors: frozenset[str] = frozenset()
    tops: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


LIBRARY = Package(
    name="structattn",
    root=Path(structattn.__file__).parent,
    floors={
        "errors": 0,
        "extras": 0,
        "tracing": 0,
        "checks": 1,
        "extensions": 1,
        "grammar": 2,  # of all text forms
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
    },
    outside=frozenset({"", "testing"}),
    front_doors=frozenset({"parallel"}),
    tops=frozenset({"__main__", "mup", "serve", "parallel.tensor"}),
)
LAB = Package(
    name="structattn_lab",
    root=Path(structattn_lab.__file__).parent,
    floors={
        "old_formats": 0,
        "old_imports": 0,
        "baselines": 0,  # attention variants of other papers: they import the library only
        "settings": 1,
        "runs": 2,
        "records": 2,
        "data": 3,
        "analysis": 3,
        "report": 4,
        "tasks": 5,  # with what each adds to reports
        "training": 6,
        "runner": 7,
        "compare": 8,
        "sweep": 8,
        "inference": 9,
        "planning": 9,
        "cli": 10,
    },
    tops=frozenset({"baselines", "cli"}),
)
TRANSFORMERS = Package(  # inside one floor of the library
    name="structattn.integrations.transformers",
    root=LIBRARY.root / "integrations" / "transformers",
    floors={
        "masks": 0,
        "position_table": 0,
        "variant": 1,
        "caches": 2,
        "attention": 3,
        "evaluation": 3,  # below calibration, which may measure with it
        "architecture": 4,
        "calibration": 5,
        "structurize": 6,
        "sharding": 7,
    },
    tops=frozenset({"evaluation", "sharding"}),
)
every_package = pytest.mark.parametrize("package", [LIBRARY, LAB, TRANSFORMERS], ids=str)


def modules(package: Package):
    for path in sorted(package.root.rglob("*.py")):
        parts = path.relative_to(package.root).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def modules_with_floor(package: Package):
    for module, path in modules(package):
        if module.split(".")[0] not in package.outside and module not in package.front_doors:
            yield module, path


def floor(package: Package, module: str) -> tuple[str, int]:
    """The most specific name of a module in the table, and its floor."""
    names = [name for name in package.floors if module == name or module.startswith(f"{name}.")]
    assert names, f"{package}: {module} has no floor: add it to the table"
    best = max(names, key=len)
    return best, package.floors[best]


@cache
def imported(package: Package, path: Path) -> list[str]:
    """The modules of a package that a file imports, also inside functions and under ``TYPE_CHECKING``."""
    return list(_imported(package, path))


def _imported(package: Package, path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and _is_inside(package, node.module or ""):
            base = node.module.removeprefix(package.name).lstrip(".")
            for alias in node.names:
                joined = f"{base}.{alias.name}".lstrip(".")
                inside = package.root / joined.replace(".", "/")
                yield joined if inside.with_suffix(".py").exists() or inside.is_dir() else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_inside(package, alias.name):
                    yield alias.name.removeprefix(package.name).lstrip(".")


def _is_inside(package: Package, module: str) -> bool:
    return module == package.name or module.startswith(f"{package.name}.")


@every_package
def test_imports_go_down_the_floors(package: Package) -> None:
    seen = set()
    for module, path in modules_with_floor(package):
        name, own_floor = floor(package, module)
        for target in imported(package, path):
            if target == "":
                continue  # the version, from the front door
            seen.add((module, target))
            assert target.split(".")[0] not in package.outside, f"{module} imports {target}"
            other, its_floor = floor(package, target)
            assert its_floor < own_floor or other == name, (
                f"{module} (floor {own_floor}) imports {target} (floor {its_floor})"
            )
    # No file is left out by a mistake of this parser.
    with_imports = {module for module, path in modules_with_floor(package) if any(imported(package, path))}
    assert {module for module, _ in seen} == with_imports
    text = sum(path.read_text().count(f"\nfrom {package}.") for _, path in modules_with_floor(package))
    assert len(seen) > 0.9 * text
    assert {floor(package, target)[0] for _, target in seen} >= set(package.floors) - package.tops


def test_most_files_of_the_library_import_others_of_it() -> None:
    files = list(modules_with_floor(LIBRARY))
    assert sum(not imported(LIBRARY, path) for _, path in files) < 0.25 * len(files)


def test_the_library_never_imports_the_lab() -> None:
    for module, path in modules(LIBRARY):
        assert not imported(LAB, path), f"{module} imports the lab"
        assert "structattn_lab" not in path.read_text(), f"{module} names a module of the lab"


def test_an_import_that_goes_up_is_found(tmp_path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        "from structattn.cli.call import call\nfrom structattn_lab.compare import comparison\n\n\n"
        "def f():\n    from structattn import models\n    import structattn_lab.tasks.text.figures\n"
    )
    assert imported(LIBRARY, path) == ["cli.call", "models"]
    assert imported(LAB, path) == ["compare.comparison", "tasks.text.figures"]
    assert all(floor(LIBRARY, target)[1] > floor(LIBRARY, "ops")[1] for target in imported(LIBRARY, path))
    floors = [floor(LAB, target)[1] for target in imported(LAB, path)]
    assert floors[0] > floors[1] > floor(LAB, "report")[1]


def test_an_import_between_rooms_that_goes_up_is_found(tmp_path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(
        "from structattn.cache import LevelCache\n"
        "from structattn.integrations.transformers.structurize import modules\n\n\n"
        "def f():\n    import structattn.integrations.transformers.sharding.shards\n"
    )
    targets = imported(TRANSFORMERS, path)
    assert targets == ["structurize.modules", "sharding.shards"]
    assert all(floor(TRANSFORMERS, target)[1] > floor(TRANSFORMERS, "attention")[1] for target in targets)


def circles(package: Package) -> list[set[str]]:
    """Groups of files that import each other, directly or through others; imports under ``TYPE_CHECKING``
    count.
    """
    graph = {
        name: {target for target in imported(package, path) if target and target != name}
        for name, path in modules(package)
    }
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


@every_package
def test_no_circles(package: Package) -> None:
    groups = circles(package)
    assert not groups, f"these files import each other: {sorted(groups[0])}"


def test_reference_imports_only_torch_the_layout_and_the_options_of_a_call() -> None:
    allowed = {
        "reference.py": {"structattn.layout.levels", "structattn.ops.call"},
        "call.py": {"structattn.layout.levels", "structattn.ops.terms"},
        "terms.py": {"structattn.checks", "structattn.errors"},
    }
    for file, expected in allowed.items():
        names = set()
        for node in ast.walk(ast.parse((LIBRARY.root / "ops" / file).read_text())):
            if isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
        assert {x for x in names if x.partition(".")[0] not in {"torch", *sys.stdlib_module_names}} == expected


def test_a_class_name_means_one_class() -> None:
    classes = [
        (node.name, path)
        for package in (LIBRARY, LAB)
        for _, path in modules(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    homes = {name: sorted(str(path) for other, path in classes if other == name) for name, _ in classes}
    assert len(homes) > 400
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
