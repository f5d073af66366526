"""What `make dist` makes: sdists have what their pages need, and wheels are the same bytes each time."""

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CALL = """
import structattn as sa
import torch

q, layout = torch.randn(1, 2, 700, 6), sa.LevelLayout((3, 2, 1), (24, 12, 3))
found, expected = (sa.structured_attention(q, q, q, layout, backend=name) for name in ("native", "reference"))
torch.testing.assert_close(found, expected)
print(sa.__file__, sa.ops.build_native())
"""
TOOLS = ("auditwheel", "check_wheel_contents", "cyclonedx", "twine")
can_build = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None
    or (sys.platform, platform.machine()) != ("linux", "x86_64")
    or any(importlib.util.find_spec(name) is None for name in TOOLS),
    reason="needs a C++ compiler on Linux x86-64, and the extra dist",
)


def build(folder: Path) -> Path:
    """Of a clone in a folder, `dist`."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    done = subprocess.run([sys.executable, "packaging/build.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "dist"


@pytest.mark.full
@can_build
def test_sources_become_the_same_bytes_and_wheels_that_run(tmp_path: Path) -> None:
    dist, again = build(tmp_path / "one"), build(tmp_path / "another")
    files = {path.name: path.read_bytes() for path in dist.iterdir()}
    assert files == {path.name: path.read_bytes() for path in again.iterdir()}
    assert len(files) == 6
    assert {name.partition("-")[2] for name in files if name.endswith("any.whl")} == {"0.2.0.dev0-py3-none-any.whl"}

    [native] = dist.glob("structattn_native-*-py3-none-manylinux_2_27_x86_64.whl")
    with zipfile.ZipFile(native) as archive:
        archive.extractall(tmp_path / "native")
    libraries = list((tmp_path / "native").rglob("*.so"))
    names = sorted(path.name.removeprefix("native_").rpartition("_")[0] for path in libraries)
    assert names == ["amx_bf16", "avx2", "avx512", "avx512_bf16"]
    for library in libraries:
        check_library(library)

    [wheel] = dist.glob("structattn-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("METADATA")]
        required = re.findall(r"^Requires-Dist: (structattn-native.*)$", archive.read(metadata).decode(), re.MULTILINE)
        assert not any(name.endswith(".so") for name in archive.namelist())
    assert re.match(
        r"structattn-native==0\.2\.0\.dev0; sys_platform == .linux. and platform_machine == .x86_64.", required[0]
    )

    libraries = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries}
    check_bills(dist, {f"structattn_native/{name}": digest for name, digest in libraries.items()})

    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel), str(native)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "CXX": "false", "STRUCTATTN_CPU": "", "STRUCTATTN_CACHE": ""}
    done = subprocess.run([sys.executable, "-c", CALL], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(path.startswith(str(site)) for path in done.stdout.split())


def check_bills(dist: Path, libraries: dict[str, str]) -> None:
    """Each wheel has its bill of materials: the files that are not Python code, with their SHA-256, and the
    packages that it needs.
    """
    bills = {}
    for wheel in dist.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if "/sboms/" in name]
            bills[wheel.name.partition("-")[0]] = json.loads(archive.read(name))
            record = archive.read(f"{name.partition('/')[0]}/RECORD").decode().splitlines()
        assert {line.partition(",")[0] for line in record} == set(zipfile.ZipFile(wheel).namelist())
    inside, outside = {}, {}
    for name, bill in bills.items():
        of_data = " AND CC-BY-ND-4.0" if name == "structattn_lab" else ""  # that of ETTh1
        assert bill["metadata"]["component"]["licenses"] == [{"expression": f"Apache-2.0{of_data}"}]
        parts = bill["components"]
        inside[name] = {part["name"]: part["hashes"][0]["content"] for part in parts if not part.get("isExternal")}
        outside[name] = {part["name"] for part in parts if part.get("scope") == "required"}
    assert inside["structattn"] == {}
    assert outside["structattn"] == {"torch", "numpy", "safetensors", "structattn-native"}
    data = [ROOT / "lab" / "src" / "structattn_lab" / "data" / "files" / name for name in ("ETTh1.csv", "peps.txt")]
    digests = {str(path.relative_to(ROOT / "lab/src")): hashlib.sha256(path.read_bytes()).hexdigest() for path in data}
    assert inside["structattn_lab"] == digests
    assert outside["structattn_lab"] == {"structattn"}
    assert (inside["structattn_native"], outside["structattn_native"]) == (libraries, set())


def check_library(path: Path) -> None:
    """Nothing in it says where other libraries are, its stack runs no code, its tables are read-only, and it
    offers no symbol and takes of PyTorch the C functions of the stable interface only.
    """
    elffile = importlib.import_module("elftools.elf.elffile")
    with path.open("rb") as file:
        elf = elffile.ELFFile(file)
        segments = {segment["p_type"]: segment for segment in elf.iter_segments()}
        assert segments["PT_GNU_STACK"]["p_flags"] & 1 == 0
        assert "PT_GNU_RELRO" in segments
        tags = [(tag.entry.d_tag, tag) for tag in segments["PT_DYNAMIC"].iter_tags()]
        assert not {name for name, _ in tags} & {"DT_RPATH", "DT_RUNPATH"}
        needed = {tag.needed for name, tag in tags if name == "DT_NEEDED"}
        assert needed <= {
            "libtorch_cpu.so",
            "libstdc++.so.6",
            "libm.so.6",
            "libgcc_s.so.1",
            "libc.so.6",
            "ld-linux-x86-64.so.2",
        }
        symbols = list(elf.get_section_by_name(".dynsym").iter_symbols())
        assert not [symbol.name for symbol in symbols if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"]
        called = {symbol.name for symbol in symbols if "torch" in symbol.name}
        assert called
        assert all(re.fullmatch(r"(aoti_)?torch_[a-z0-9_]+", name) for name in called)


@pytest.mark.full
def test_the_source_distribution_has_the_pages_and_all_that_they_link_to(tmp_path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    program = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next((tmp_path / "clone" / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.glob("structattn-*")
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "docs/index.md", "benchmarks/README.md"):
        assert (folder / name).is_file(), name
    pages = [*folder.glob("*.md"), *folder.rglob("docs/**/*.md"), folder / "benchmarks" / "README.md"]
    assert len(pages) > 50
    for page in pages:
        text = re.sub(r"^```.*?^```$|`[^`]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.relative_to(folder)} links to {target}"
    assert not list(folder.rglob("test_*.py"))


def test_the_clone_has_no_links() -> None:
    """Windows makes none without special rights."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone of git")
    modes = {line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == {"100644", "100755"}


@pytest.mark.full
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_it_is_imported_and_runs_without_what_only_linux_has(platform: str) -> None:
    """As far as this can be seen on Linux: no module that only POSIX has is imported, and no compiled code is
    needed.
    """
    program = f"""
import os, pathlib, sys
import safetensors.torch, torch, torch._dynamo
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform = {platform!r}
if sys.platform == "win32":
    os.name = "nt"
    sys.modules[pathlib.Path.__module__].WindowsPath = pathlib.PosixPath  # which Linux refuses to make
import structattn as sa
assert "structattn_lab" not in sys.modules
q, layout = torch.randn(1, 2, 200, 6), sa.LevelLayout((3, 2, 1), (24, 12, 3))
found, expected = (sa.structured_attention(q, q, q, layout, backend=name) for name in ("auto", "reference"))
torch.testing.assert_close(found, expected)
print(sa.ops.explain(q, q, q, layout))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stdout.startswith("native")
