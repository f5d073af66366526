"""Writes a folder that Hugging Face's package `kernels` loads: `make kernels`, in build/kernels.

`kernels.get_local_kernel(Path("build/kernels"))` is a module with `structured_attention`, the layouts and
`LevelCache`, without an installation of structattn. The folder has the layout of a repository of the Hub:

    build/torch-stable-abi211-cpu-x86_64-linux   with compiled C++ code, for PyTorch 2.11 and newer
    build/torch-cpu                              Python alone, for other CPUs
    build/torch-cuda                             Triton kernels, which are compiled at their first call
    build.toml, torch-ext/structattn             what `kernel-builder` would build the last two from

Each variant is complete, and may be loaded beside structattn and beside other versions of itself: its imports
are relative, and its operators have a namespace of their own, which is in their names in the C++ code too.

    python packaging/kernels.py [FOLDER]
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "structattn"
VERSION = 1  # of the kernel: another one where calls of before fail
# The public names, and the modules that define them; `structattn/__init__.py` has the same and more.
NAMES = {
    "structured_attention": "ops",
    "explain": "ops",
    "LevelLayout": "layout",
    "HeadLayouts": "layout",
    "GlobalWindowLayout": "layout",
    "LevelCache": "cache",
    "errors": "",
}
ROOTS = ("errors", "ops", "ops.triton.backend", "layout", "cache")
VARIANTS = {"torch-stable-abi211-cpu-x86_64-linux": "cpu", "torch-cpu": "cpu", "torch-cuda": "cuda"}
_BUILD = """\
[general]
name = "structattn"
version = {version}
edition = 5
license = "Apache-2.0"
backends = ["cpu", "cuda"]

[torch-noarch]
"""
_CARD = """\
---
library_name: kernels
license: apache-2.0
---

# structattn

Softmax attention with a structured score. Made by `make kernels` of structattn {release}; its documentation is at
<https://github.com/structattn/structattn>.

```python
from pathlib import Path
from kernels import get_local_kernel

sa = get_local_kernel(Path("."))
layout = sa.LevelLayout(ranks=(32, 16, 8, 8), block_sizes=(1024, 512, 256, 128))
out = sa.structured_attention(q, k, v, layout)  # q (B, H, T, 64), k and v (B, G, S, 64)
```

Names: {names}. `LevelCache` needs the package safetensors.
"""
_INIT = '''\
"""structattn {release}: softmax attention with a structured score."""

import importlib

__version__ = "{release}"
__all__ = {names}
_HOMES = {homes}


def __getattr__(name):  # at the first use: LevelCache needs a package that PyTorch does not bring
    if name not in _HOMES:
        raise AttributeError(f"module {{__name__!r}} has no attribute {{name!r}}")
    module = importlib.import_module(f".{{_HOMES[name] or name}}", __name__)
    value = getattr(module, name) if _HOMES[name] else module
    globals()[name] = value
    return value
'''


def file_of(module: str) -> Path | None:
    """The file of a module of the package, by its name without that of the package."""
    path = PACKAGE.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def imported(file: Path) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "structattn":
            module = node.module.partition(".")[2]
            yield from (module, *(f"{module}.{name.name}".lstrip(".") for name in node.names))
        elif isinstance(node, ast.Import) and any(name.name.partition(".")[0] == "structattn" for name in node.names):
            sys.exit(f"{file} imports structattn as a whole, which has another name in a kernel")


def needed() -> list[Path]:
    """The files of the package that its public names need, relative to it."""
    files: set[Path] = set()
    left = list(ROOTS)
    while left:
        module = left.pop()
        file = file_of(module) if module else None
        if file is not None and file not in files:
            files.add(file)
            left += [*imported(file), module.rpartition(".")[0]]
    data = [PACKAGE / "ops" / "triton" / "tiles.json"]
    native = [path for path in (PACKAGE / "ops" / "native").iterdir() if path.suffix in (".cpp", ".h")]
    return sorted(path.relative_to(PACKAGE) for path in (*files, *data, *native))


def renamed(path: Path, text: str, namespace: str) -> str:
    """A source of the package with relative imports, and operators of another namespace."""
    if path.suffix == ".py":
        dots = "." * len(path.parts)
        text = re.sub(r"^(\s*)from structattn\.", rf"\1from {dots}", text, flags=re.MULTILINE)
        text = re.sub(r"^(\s*)from structattn import", rf"\1from {dots} import", text, flags=re.MULTILINE)
        text = re.sub(r"\btorch\.ops\.structattn(?=(_native)?\.)", f"torch.ops.{namespace}", text)
        text = re.sub(r'"structattn::', f'"{namespace}::', text)
        text = re.sub(r'\bLibrary\("structattn"', f'Library("{namespace}"', text)
    elif path.suffix == ".cpp":
        text, count = re.subn(r'\bLibrary out\("structattn_native"\)', f'Library out("{namespace}_native")', text)
        assert count == 1, "attention.cpp registers its operators in one place"
    return text


def release() -> str:
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return version


def write_sources(folder: Path, namespace: str) -> None:
    for path in needed():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(renamed(path, (PACKAGE / path).read_text(), namespace))
    (folder / "__init__.py").write_text(_INIT.format(release=release(), names=sorted(NAMES), homes=NAMES))


def write_variant(folder: Path, name: str, digest: str) -> None:
    namespace = f"_structattn_{re.sub('[^a-z0-9]', '_', name)}_{digest}"
    write_sources(folder, namespace)
    shutil.copy(ROOT / "LICENSE", folder)
    metadata = {
        "id": namespace,
        "name": "structattn",
        "version": VERSION,
        "kernels-minver": "0.17.0",
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": VARIANTS[name]},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    if "stable-abi" in name:
        spec = importlib.util.spec_from_file_location("compiler", folder / "ops" / "native" / "compiler.py")
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        compiler.compile_in(folder / "ops" / "native", *(name for name in compiler.INSTRUCTIONS if name != "baseline"))


def main(out: Path) -> None:
    sys.dont_write_bytecode = True  # what is loaded from the folder leaves nothing there
    digest = hashlib.sha256(b"".join((PACKAGE / path).read_bytes() for path in needed())).hexdigest()[:12]
    shutil.rmtree(out, ignore_errors=True)
    for name in VARIANTS:
        if "x86_64-linux" not in name or (sys.platform, platform.machine()) == ("linux", "x86_64"):
            write_variant(out / "build" / name, name, digest)
    write_sources(out / "torch-ext" / "structattn", f"_structattn_{digest}")
    (out / "build.toml").write_text(_BUILD.format(version=VERSION))
    (out / "README.md").write_text(_CARD.format(release=release(), names=", ".join(f"`{name}`" for name in NAMES)))
    shutil.copy(ROOT / "LICENSE", out)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / "build" / "kernels")
