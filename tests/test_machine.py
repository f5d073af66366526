"""What a processor computes in."""

import pytest
import torch

from structattn import machine
from structattn.machine import hardware, has_products

BOTH = {torch.bfloat16, torch.float16}
CPUINFO = {
    "flags\t\t: fpu avx2 avx512f avx512_vnni": set(),
    "flags\t\t: fpu avx2 avx512f avx512_bf16": {torch.bfloat16},
    "flags\t\t: fpu amx_bf16 avx512_fp16": BOTH,
    "Features\t: fp asimd asimdhp": {torch.float16},
    "Features\t: fp asimd asimdhp bf16 i8mm": BOTH,
    "model name\t: one that says nothing": set(),
}


@pytest.mark.parametrize("says", CPUINFO)
def test_products_of_16_bits_are_those_that_linux_names(says, tmp_path, monkeypatch) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{says}\n\nprocessor\t: 1\n{says}\n")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert {dtype for dtype in BOTH if has_products(dtype)} == CPUINFO[says]
    assert has_products(torch.float32)


def test_without_the_file_nothing_is_known(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "none")
    assert not has_products(torch.bfloat16)
    assert hardware().cpu
