"""Hugging Face's package `kernels` loads what `make kernels` writes, in each of its variants."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The module is loaded beside structattn, whose definition it is held to.
LOAD = """
import sys
from pathlib import Path

import kernels
import structattn as sa
import torch
from structattn.testing.interpreter import quick_interpreter

folder, backend = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
with quick_interpreter():
    kernel = kernels.get_local_kernel(folder, backend="cpu")
    layout = dict(ranks=(8, 4, 4), block_sizes=(48, 24, 12))
    q, k, v = (torch.randn(1, heads, 100, 16, requires_grad=True) for heads in (4, 2, 2))
    out = kernel.structured_attention(q, k, v, kernel.LevelLayout(**layout), backend=backend)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
expected = sa.structured_attention(*doubles, sa.LevelLayout(**layout), backend="reference")
for found, exact in zip((out, *grads), (expected, *torch.autograd.grad(expected.square().sum(), doubles)), strict=True):
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)
cache = kernel.LevelCache(kernel.LevelLayout(**layout))
steps = [cache.attend(*(x[:, :, i : i + 1].detach() for x in (q, k, v))) for i in range(20)]
torch.testing.assert_close(torch.cat(steps, 2).double(), expected[:, :, :20].detach(), rtol=1e-4, atol=1e-4)
torch.testing.assert_close(sa.structured_attention(q, k, v, sa.LevelLayout(**layout)), out, rtol=1e-4, atol=1e-4)
assert {"structured_attention", "LevelCache"} <= set(kernel.__all__)
assert not hasattr(kernel, "no_such_name")
print(kernel.__file__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "structattn"
    command = [sys.executable, str(ROOT / "packaging" / "kernels.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


def load(folder: Path, backend: str, **environment: str) -> str:
    """The file of the module that `kernels` loads, after calls of it were compared with the definition."""
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(folder), backend]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels (extra test-more)")
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None or (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="needs a C++ compiler on Linux x86-64",
)
def test_each_variant_is_loaded_beside_structattn_and_computes_the_definition(folder: Path) -> None:
    builds = {path.name: path for path in (folder / "build").iterdir()}
    # That of this machine is chosen: compiled code where it fits, from PyTorch 2.11 on.
    chosen = load(folder, "native", STRUCTATTN_CPU="")
    assert chosen == str(builds["torch-stable-abi211-cpu-x86_64-linux"] / "__init__.py")
    assert load(builds["torch-cuda"], "triton", TRITON_INTERPRET="1").startswith(str(builds["torch-cuda"]))
    shutil.rmtree(builds["torch-stable-abi211-cpu-x86_64-linux"])
    assert load(folder, "auto") == str(builds["torch-cpu"] / "__init__.py")

    build = importlib.import_module("kernels._rust").Build.open(folder)  # what kernel-builder reads
    assert sorted(map(str, build.general.backends)) == ["cpu", "cuda"]
