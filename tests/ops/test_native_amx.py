"""The C++ code on AMX, whose instructions are emulated where the CPU lacks them, and when AMX is chosen."""

import io
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from structattn.errors import ConfigError
from structattn.ops.native import compiler, library
from structattn.testing.tolerances import FORWARD, relative_error

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMMAND = os.environ.get("CXX", "c++")
AVX512_BF16 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
AMX = AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
PRODUCT = """
#include "products.h"

void multiplied(int64_t rows, int64_t cols, int64_t depth, const structattn::Pair* a, int64_t am, int64_t ak,
                const structattn::Pair* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  const structattn::RegistersFor<structattn::Pair> registers;
  structattn::product(rows, cols, depth, a, am, ak, b, ldb, c, ldc, add);
}
"""
needs_linux = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="AMX is used on Linux on x86-64"
)
needs_pairs = pytest.mark.skipif(
    "avx512_bf16" not in compiler.instructions_here(),
    reason="needs AVX512-BF16, which computes what fills no register of AMX",
)


@pytest.fixture
def compiles() -> None:
    """There is a compiler, also where wheels are tested with one that always fails."""
    if shutil.which(COMMAND) is None or subprocess.run([COMMAND, "--version"], capture_output=True).returncode:
        pytest.skip("needs a C++ compiler")


def run(command: list[str], **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def flags(instructions: str) -> list[str]:
    """Of a program, with the headers of the C++ code."""
    of_library = {"-shared", "-fvisibility=hidden"}
    options = [x for x in compiler.flags(instructions) if x not in of_library and not x.startswith("-Wl,")]
    return [*options, f"-I{compiler.SOURCE.parent}"]


@needs_linux
class TestChoice:
    @pytest.fixture
    def cpu(self, monkeypatch: pytest.MonkeyPatch):
        """Sets the flags of /proc/cpuinfo, and whether the system permits AMX; what it was asked."""
        monkeypatch.delenv("STRUCTATTN_CPU", raising=False)

        def patched(names: set[str], permits: bool) -> list[int]:
            asked: list[int] = []
            text = f"processor\t: 0\nflags\t\t: fpu {' '.join(sorted(names))}\nbugs\t\t:\n"
            monkeypatch.setattr(compiler, "open", lambda *_, **__: io.StringIO(text), raising=False)
            monkeypatch.setattr(compiler, "_may_use_tiles", lambda: asked.append(1) or permits)
            return asked

        return patched

    def test_it_is_the_first_choice(self, cpu, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = cpu(AMX, permits=True)
        assert compiler.instructions_here() == ["amx_bf16", "avx512_bf16", "avx512", "avx2", "baseline"]
        assert asked == [1]
        assert library.instructions() == "amx_bf16"
        monkeypatch.setenv("STRUCTATTN_CPU", "amx_bf16")
        assert library.instructions() == "amx_bf16"

    def test_without_permission_the_next_one_is_taken(self, cpu, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = cpu(AMX, permits=False)
        assert library.instructions() == "avx512_bf16"
        assert asked == [1]
        monkeypatch.setenv("STRUCTATTN_CPU", "amx_bf16")
        message = "must be one of avx512_bf16, avx512, avx2, baseline or none here, got 'amx_bf16': this CPU does not"
        with pytest.raises(ConfigError, match=message):
            library.instructions()

    @pytest.mark.parametrize("lacking", ["amx_tile", "amx_bf16", "avx512_bf16", "avx512dq"])
    def test_a_cpu_without_all_of_it_is_not_asked(self, cpu, lacking: str) -> None:
        asked = cpu(AMX - {lacking}, permits=True)
        narrower = {"avx512_bf16": "avx512", "avx512dq": "avx2"}.get(lacking, "avx512_bf16")
        assert library.instructions() == narrower
        assert asked == []

    def test_the_system_is_asked_again_and_again(self) -> None:
        """A CPU without AMX never gets it; another one gets it, or not, each time."""
        has_it = "amx_tile" in Path("/proc/cpuinfo").read_text()
        answers = {compiler._may_use_tiles() for _ in range(3)}
        assert len(answers) == 1
        assert has_it or answers == {False}

    def test_no_library_to_ask_is_no(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(name: None) -> None:
            raise OSError("no shared libraries")

        monkeypatch.setattr(compiler.ctypes, "CDLL", refused)
        assert compiler._may_use_tiles() is False


@pytest.mark.full
@needs_linux
@pytest.mark.usefixtures("compiles")
def test_the_instructions_are_what_is_compiled(tmp_path: Path) -> None:
    """Also where the CPU cannot run them; those of every thread begin and end with a configuration."""
    (tmp_path / "product.cpp").write_text(PRODUCT)
    text = run([COMMAND, *flags("amx_bf16"), "-O1", "-S", str(tmp_path / "product.cpp"), "-o", "-"])
    for name in ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease", "vdpbf16ps"):
        assert f"\t{name}" in text, name
    narrower = run([COMMAND, *flags("avx512_bf16"), "-O1", "-S", str(tmp_path / "product.cpp"), "-o", "-"])
    assert "tmm" not in narrower
    assert "tile" not in narrower


@pytest.mark.full
@needs_pairs
@pytest.mark.usefixtures("compiles")
def test_products_of_every_size(tmp_path: Path) -> None:
    program = str(tmp_path / "products")
    source = str(HERE / "amx_products.cpp")
    run([COMMAND, *flags("avx512_bf16"), "-O1", "-DSTRUCTATTN_EMULATE_AMX", source, "-pthread", "-o", program])
    run([program])


@pytest.mark.full
@needs_pairs
@pytest.mark.usefixtures("compiles", "built")
class TestEmulated:
    def test_calls_differ_by_the_order_of_sums_only(self, tmp_path: Path) -> None:
        """The program holds each call to the definition in float64."""
        results = {}
        real = ["amx_bf16"] if "amx_bf16" in compiler.instructions_here() else []
        for name in ("avx512_bf16", "emulated", *real):
            file, instructions = tmp_path / f"{name}.pt", "avx512_bf16" if name == "emulated" else name
            run([sys.executable, str(HERE / "amx_calls.py"), str(file), name], STRUCTATTN_CPU=instructions)
            results[name] = torch.load(file)
        expected = results.pop("avx512_bf16")
        for name, found in results.items():
            assert found.keys() == expected.keys()
            for call, tensors in expected.items():
                for a, b in zip(found[call], tensors, strict=True):
                    seen = b.isfinite()
                    limit = FORWARD[b.dtype] / 10 if b.dtype == torch.bfloat16 else FORWARD[b.dtype]
                    assert relative_error(a[seen], b[seen]) <= limit, (name, call)
        # The log-sum-exp of float32 shows that other instructions have computed the scores.
        found = results["emulated"]
        others = [call for call, x in expected.items() if len(x) > 1 and not torch.equal(x[1], found[call][1])]
        assert len(others) > 100

    def test_the_tests_of_the_other_libraries(self, tmp_path: Path) -> None:
        folders = [str(HERE), str(ROOT / "src"), str(ROOT / "lab" / "src")]
        options = ["-p", "emulated_amx", "-p", "no:cacheprovider", "--full", "--hypothesis-profile=few"]
        tests = [str(HERE / "test_native_16_bits.py"), f"{HERE / 'test_native.py'}::TestBuilt"]
        said = run(
            [sys.executable, "-m", "pytest", *options, *tests],
            STRUCTATTN_TEST_CPU="avx512_bf16",
            PYTHONPATH=os.pathsep.join(folders),
            PYTEST_DEBUG_TEMPROOT=str(tmp_path),
        )
        assert "passed" in said
