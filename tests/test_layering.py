"""A file imports only from floors below its own, or from its own folder: the imports are parsed, not trusted."""

import ast
import sys
from pathlib import Path

import structattn

ROOT = Path(structattn.__file__).parent
# The most specific prefix gives the floor. `spec` stands between scoring and the attention module, which reads it.
FLOORS = {
    "errors": 0,
    "checks": 1,
    "files": 2,
    "interrupt": 2,
    "folders": 3,
    "seeds": 2,
    "partition": 2,
    "progress": 2,
    "layout": 3,
    "text_layout": 4,
    "matrices": 3,
    "mup": 2,
    "ops": 4,
    "cache": 5,
    "layers.scoring": 5,
    "layers.scoring_modules": 4,
    "spec": 6,
    "layer_specs": 7,
    "layers": 7,
    "models": 8,
    "tasks": 9,
    "tasks.chronos": 10,  # the one task on top of an integration
    "integrations": 9,
    "training": 10,
    "reports": 10,
    "experiments": 11,
    "cli": 12,
}
OUTSIDE = {"", "testing"}  # the package's own front door, and helpers that nothing may import


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


def imported(path: Path):
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
    seen = 0
    for module, path in modules():
        if module.split(".")[0] in OUTSIDE or module == "layers":
            continue
        name, own = floor(module)
        for target in imported(path):
            if target == "":
                continue  # the version, from the front door
            seen += 1
            assert target.split(".")[0] != "testing", f"{module} imports testing"
            other, theirs = floor(target)
            assert theirs < own or other == name, f"{module} (floor {own}) imports {target} (floor {theirs})"
    assert seen > 30


def test_reference_imports_only_torch_and_the_layout() -> None:
    source = (ROOT / "ops" / "reference.py").read_text()
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    others = {name for name in names if name.partition(".")[0] not in {"torch", *sys.stdlib_module_names}}
    assert others == {"structattn.layout"}
