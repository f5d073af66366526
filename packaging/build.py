"""Builds what `make dist` offers, and checks it: sdists and wheels of structattn, structattn-lab and
structattn-native, in dist/; each wheel with a bill of materials (sbom.py).

Each wheel is built from its sdist. The same sources, compiler and SOURCE_DATE_EPOCH, by default the time of
the last commit, make the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from sbom import add_bill

ROOT = Path(__file__).parent.parent
PROJECTS = (".", "lab", "native")
WHEEL = "manylinux_2_27_x86_64"  # the platform of the wheel of structattn-native that is built on Linux x86-64
ON_WHEEL = "sys_platform == 'linux' and platform_machine == 'x86_64'"
BUILD = "import sys; sys.path.insert(0, '.'); import {backend} as x; print(x.build_{kind}(sys.argv[1]))"


def run(*command: str, cwd: Path = ROOT) -> str:
    """The output of a command, which is printed if it fails."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}")
    return done.stdout


def copy_sources(folder: Path) -> None:
    """The files of the clone, without what is built or ignored there."""
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def depend_on_native(project: Path) -> None:
    """What is installed from these files gets the compiled code with it, where there is a wheel. A clone
    compiles it by itself.
    """
    text = project.read_text()
    [pin] = re.findall(r'^native = \["(structattn-native==[^"]+)"\]$', text, flags=re.MULTILINE)
    text, count = re.subn(r"^(dependencies = \[.*)\]$", rf'\1, "{pin}; {ON_WHEEL}"]', text, count=1, flags=re.MULTILINE)
    assert count == 1, "pyproject.toml has its dependencies in one line"
    project.write_text(text)


def backend(project: Path) -> str:
    return "build_backend" if (project / "build_backend.py").exists() else "setuptools.build_meta"


def build_sdist(project: Path, out: Path, epoch: int) -> Path:
    """An sdist, without the times and owners of files."""
    program = BUILD.format(backend=backend(project), kind="sdist")
    path = out / run(sys.executable, "-c", program, str(out), cwd=project).splitlines()[-1]
    with tarfile.open(path) as archive:
        members = [(member, archive.extractfile(member)) for member in archive.getmembers() if member.isfile()]
        files = {member.name: file.read() for member, file in members if file is not None}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(files[name]), epoch, 0o644
            archive.addfile(member, io.BytesIO(files[name]))
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))
    return path


def build_wheel(sdist: Path, out: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    project = folder / sdist.name.removesuffix(".tar.gz")
    program = BUILD.format(backend=backend(project), kind="wheel")
    return out / run(sys.executable, "-c", program, str(out), cwd=project).splitlines()[-1]


def repair(wheel: Path) -> Path:
    """Names the wheel for all machines with a C library that it can run with, or ends where it needs more
    than it should. PyTorch's own library is the user's.
    """
    run("auditwheel", "repair", "--exclude", "libtorch_cpu.so", "-w", str(wheel.parent), str(wheel))
    [repaired] = wheel.parent.glob("structattn_native-*manylinux*.whl")
    wheel.unlink()
    if not repaired.name.endswith(f"-py3-none-{WHEEL}.whl"):
        sys.exit(f"the wheel is {repaired.name} and should be for {WHEEL}: it calls newer functions of the C library")
    return repaired


def main(out: Path) -> None:
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct"))
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        sources = Path(name) / "sources"
        copy_sources(sources)
        depend_on_native(sources / "pyproject.toml")
        for project in PROJECTS:
            sdist = build_sdist(sources / project, out, epoch)
            wheel = build_wheel(sdist, out, Path(name) / "unpacked")
            if wheel.name.endswith("-linux_x86_64.whl"):
                wheel = repair(wheel)
            add_bill(wheel, epoch)
    files = sorted(out.iterdir())
    run("twine", "check", "--strict", *map(str, files))
    run("check-wheel-contents", *(str(path) for path in files if path.suffix == ".whl"))
    for path in files:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>9,}  {path.name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / "dist")
