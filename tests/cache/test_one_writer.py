"""Only ``cache/contents.py`` changes what a cache holds: the files are parsed, not trusted."""

import ast
from collections.abc import Iterator
from pathlib import Path

import structattn

ROOT = Path(structattn.__file__).parent
CACHE = ROOT / "cache"
WRITER = CACHE / "contents.py"
HOLDERS = {"_kept", "_contents"}  # attributes in which a LevelCache has its contents


def holding_files() -> list[Path]:
    """The files whose classes hold numbers or their positions: the contents, and what they are stored in."""
    return [WRITER, *sorted((CACHE / "storage").glob("*.py"))]


def classes(paths: list[Path]) -> Iterator[ast.ClassDef]:
    for path in paths:
        yield from (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes, without the parts of it that an index selects."""
    if isinstance(node, ast.Assign | ast.Delete):
        waiting = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        waiting = [node.target]
    else:
        return
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        elif isinstance(target, ast.Subscript | ast.Starred):
            waiting.append(target.value)
        else:
            yield target


def attributes(paths: list[Path]) -> set[str]:
    """The names that the classes of files assign to on ``self``."""
    return {
        target.attr
        for found in classes(paths)
        for node in ast.walk(found)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def writers(paths: list[Path]) -> set[str]:
    """The methods of the stored numbers that change them."""
    names = {"grow", "set_pages", "write", "write_each", "write_token"}
    methods = {node.name for found in classes(paths) for node in found.body if isinstance(node, ast.FunctionDef)}
    assert names <= methods
    return names


def changes(source: str, held: set[str], methods: set[str]) -> list[str]:
    """Statements that assign to held attributes of another object than ``self``, or call a method that
    writes.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        for target in targets(node):
            is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            if isinstance(target, ast.Attribute) and target.attr in held and not is_own:
                found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            found.append(ast.unparse(node))
    return found


def test_only_contents_changes_what_a_cache_holds() -> None:
    files = holding_files()
    held, methods = attributes(files), writers(files[1:])
    assert {"length", "layout", "keys", "lost", "_mark", "_step"} <= held
    for path in sorted(CACHE.rglob("*.py")):
        if path not in files:
            found = changes(path.read_text(), held, methods)
            if path.name == "native_decode.py":  # what C++ has written over, which only ``Contents.undo`` asks for
                assert found.pop() == "places[0][0].write_token(places, numbers)"
            assert not found, path
    # The check knows the writer when it sees one.
    assert len(changes(WRITER.read_text(), held, methods)) > 5


def test_only_the_cache_reaches_for_contents() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        if CACHE in path.parents:
            continue
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not names & HOLDERS, path
        assert "structattn.cache.contents" not in modules, path


def test_a_change_elsewhere_is_found() -> None:
    held, methods = {"length", "pages"}, {"write"}
    for line in (
        "contents.length = 3",
        "self._kept.length += 1",
        "store.pages[0][1] = 0",
        "del store.pages[1:]",
        "a, store.pages = (1, [])",
        "store.write(x, rows, 0, 0)",
    ):
        assert changes(f"def f(self):\n    {line}\n", held, methods) == [line]
    for line in ("self.length = 3", "length = contents.length", "contents.append(k, v)"):
        assert changes(f"def f(self):\n    {line}\n", held, methods) == []
