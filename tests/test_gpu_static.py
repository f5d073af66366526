"""The page of what compilers say of the kernels: it is what was compiled, and machine code is read
rightly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks.gpu import static  # noqa: E402
from benchmarks.gpu.sass import KINDS, Loop, loops_of  # noqa: E402

DATA = json.loads(static.DATA.read_bytes())

CODE = """
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0020*/                   LDSM.16.M88.4 R4, [R8] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/               @P0 FFMA.FTZ R9, R9, c[0x0][0x1], R3 ;
        /*0050*/                   MUFU.EX2 R9, R9 ;
        /*0060*/                   MUFU.RCP R9, R9 ;
        /*0070*/                   NOP ;
        /*0080*/             @!UP1 BRA `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*00a0*/                   FADD R1, R1, R2 ;
        /*00b0*/               @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*00c0*/              @!P3 BRA `(.L_x_0) ;
        /*00d0*/                   STL [R1], R2 ;
"""


def test_innermost_loops_and_their_instructions() -> None:
    kinds = dict.fromkeys(KINDS, 0) | {"tensor": 1, "multiply": 1, "exponential": 1, "global": 1, "shared": 1}
    assert loops_of(CODE) == (Loop(total=7, kinds=kinds),)
    # Without tensor cores a loop counts that has many products.
    plain = CODE.replace("HMMA.16816.F32.BF16", "IADD3")
    assert loops_of(plain) == ()
    many = plain.replace("MUFU.RCP R9, R9 ;", "FFMA R1, R1, R1, R1 ;\n /*0*/ " * 40 + "NOP ;")
    (loop,) = loops_of(many)
    assert loop.kinds["multiply"] == 41


def test_the_page_is_what_was_compiled() -> None:
    assert static.PAGE.read_text() == static.page(DATA), "run python -m benchmarks.gpu.static"


def test_every_kernel_of_every_shape_is_compiled() -> None:
    kernels = {tuple(key.split("/")[:2]) for key in DATA["kernels"]}
    names = ("forward", "grad_queries", "grad_keys", "decode", "cached")
    assert kernels >= {(shape, name) for shape in static.SHAPES for name in names}
    assert len(DATA["kernels"]) == len(kernels) * len(static.CAPABILITIES)


def test_kernels_fit_and_16_bit_ones_use_tensor_cores() -> None:
    """What the page shows must not get worse unseen: it is compiled again with every change of the
    kernels.
    """
    for key, found in DATA["kernels"].items():
        assert found["shared"] <= static.SHARED_LIMITS[key.rpartition("/")[2]], key
        assert found["loops"], key
        if key.startswith("bfloat16"):
            assert all(loop["kinds"]["tensor"] for loop in found["loops"]), key


AGAIN = """
import json
from dataclasses import asdict
from benchmarks.gpu import static
from benchmarks.gpu.compiled import compile_for
import triton
shape, source = next((shape, source) for shape, source in static.all_sources() if source.name == "forward")
print(json.dumps([triton.__version__, f"{shape}/{source.name}/9.0", asdict(compile_for(source, (9, 0)))]))
"""


@pytest.mark.full
def test_a_kernel_compiles_to_what_the_page_says() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    if not (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm").exists():
        pytest.skip("this Triton carries no nvdisasm")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    version, key, found = json.loads(done.stdout)
    if version != DATA["triton"]:
        pytest.skip(f"the page was compiled by Triton {DATA['triton']}, this is {version}")
    kept = DATA["kernels"][key]
    assert found == {name: kept[name] for name in found}, "run python -m benchmarks.gpu.static --again"
