"""The package structattn-native: what its sdist contains, what it installs, and how the library finds it."""

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.errors import BackendUnavailableError
from structattn.ops.native import compiler, library

ROOT = Path(__file__).parent.parent.parent
CODE = Path("src/structattn/ops/native")
needs_setuptools = pytest.mark.skipif(int(version("setuptools").split(".")[0]) < 77, reason="needs setuptools 77")
BUILD = "import build_backend; build_backend.build_sdist('dist')"
CALL = """
import torch
import structattn as sa

q, layout = torch.randn(1, 2, 700, 6), sa.LevelLayout((3, 2, 1), (24, 12, 3))
assert sa.ops.explain(q, q, q, layout).startswith("native"), sa.ops.explain(q, q, q, layout)
found, expected = (sa.structured_attention(q, q, q, layout, backend=name) for name in ("native", "reference"))
torch.testing.assert_close(found, expected)
print(sa.ops.build_native())
"""


def project(path: str) -> dict:
    return tomllib.loads((ROOT / path).read_text())["project"]


def test_versions_agree() -> None:
    main, native = project("pyproject.toml"), project("native/pyproject.toml")
    assert native["version"] == main["version"]
    assert main["optional-dependencies"]["native"] == [f"{native['name']}=={native['version']}"]
    assert native["requires-python"] == main["requires-python"]
    assert "dependencies" not in native  # it is compiled without PyTorch
    assert "torch>=2.11" in main["dependencies"]  # whose functions it calls: kTorch in operators.h


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    """Built in a copy, since setuptools leaves files next to what it builds."""
    shutil.copytree(
        ROOT / "native",
        tmp_path / "native",
        symlinks=True,
        ignore=shutil.ignore_patterns("build", "*.egg-info", "*.so"),
    )
    shutil.copytree(ROOT / CODE, tmp_path / CODE)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path / "native", check=True, capture_output=True)
    (found,) = (tmp_path / "native" / "dist").iterdir()
    return found


@needs_setuptools
def test_the_sdist_has_every_file_that_is_compiled(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        files = {m.name.partition("/")[2]: archive.extractfile(m).read() for m in archive.getmembers() if m.isfile()}
    assert {name for name in files if name.startswith("code/")} == {
        f"code/{path.name}" for path in [*compiler.sources(), Path(compiler.__file__)]
    }
    for name, content in files.items():
        if name.startswith("code/"):
            assert content == (ROOT / CODE / Path(name).name).read_bytes()
    assert {"LICENSE", "build_backend.py", "setup.py", "pyproject.toml", "structattn_native/__init__.py"} <= set(files)


def test_a_package_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    q, layout = torch.randn(1, 1, 30, 6), sa.LevelLayout((3, 2, 1), (24, 12, 3))
    folder = tmp_path / "structattn_native"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "structattn_native", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiler, "BESIDE", tmp_path / "beside")
    monkeypatch.setenv("STRUCTATTN_CPU", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path / "cache"))

    def refused(message: str) -> None:
        library.why_not_here.cache_clear()
        with pytest.raises(BackendUnavailableError, match=message):
            sa.structured_attention(q, q, q, layout, backend="native")
        with pytest.raises(BackendUnavailableError, match="there is no compiler"):
            sa.ops.build_native()

    try:
        refused("is not built on this machine")
        (folder / "native_avx2_0123456789abcdef.so").touch()
        refused("is of another version of structattn, or has no library for .* run `structattn build-native` once")
        (folder / compiler.library_name(compiler.instructions_here()[0])).write_bytes(b"no library")
        refused("cannot be loaded")
    finally:
        monkeypatch.undo()
        library.why_not_here.cache_clear()


@pytest.mark.full
@needs_setuptools
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None or platform.system() != "Linux", reason="needs a C++ compiler"
)
def test_installed_from_the_sdist(sdist: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["-q", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(sdist)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (metadata,) = site.glob("*.dist-info")
    wheel = (metadata / "WHEEL").read_text()
    assert "Root-Is-Purelib: false" in wheel
    assert "Tag: py3-none-" in wheel
    installed = site / "structattn_native"
    x86 = ("amx_bf16", "avx512_bf16", "avx512", "avx2")
    instructions = x86 if platform.machine() == "x86_64" else ("baseline",)
    names = [compiler.library_name(each) for each in instructions]
    assert {path.name for path in installed.iterdir()} - {"__pycache__"} == {"__init__.py", *names}
    paths = os.pathsep.join([str(site), str(ROOT / "src")])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "STRUCTATTN_CACHE": str(tmp_path / "cache"),
        "STRUCTATTN_CPU": "",
        "CXX": "false",
    }
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str(installed / compiler.library_name(compiler.instructions_here()[0]))
    assert not (tmp_path / "cache").exists()
