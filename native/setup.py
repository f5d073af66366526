"""The wheel has compiled code; pyproject.toml has everything else."""

import platform
import sys
from pathlib import Path

from build_backend import ROOT, load_compiler
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

IS_X86 = sys.platform == "linux" and platform.machine() == "x86_64"


class Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # so the wheel is for one platform


class CompileCode(build_py):
    """A library for each set of vector instructions of the platform, of which structattn takes the best."""

    def run(self) -> None:
        super().run()
        folder = (ROOT if self.editable_mode else Path(self.build_lib)) / "structattn_native"
        compiler = load_compiler()
        try:
            compiler.compile_in(folder, *(("amx_bf16", "avx512_bf16", "avx512", "avx2") if IS_X86 else ("baseline",)))
        except compiler.CompilationError as error:
            raise CompileError(
                f"{error}\nSo structattn-native is not installed. structattn works without it, only slower on a CPU."
            ) from error


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]  # the code calls no function of Python


setup(distclass=Compiled, cmdclass={"build_py": CompileCode, "bdist_wheel": AnyPython})
