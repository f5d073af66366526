"""The installation of a clone compiles the C++ code, where there is a compiler.

With STRUCTATTN_CPU=none it does not. pyproject.toml has everything else.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "src" / "structattn" / "ops" / "native"


class CompileInClone(build_py):
    """What is built for other machines has no compiled code: that is in the wheels of structattn-native."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode or os.environ.get("STRUCTATTN_CPU") == "none":
            return
        spec = importlib.util.spec_from_file_location("structattn_native_compiler", NATIVE / "compiler.py")
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        try:
            compiler.compile_in(compiler.BESIDE, compiler.instructions_here()[0])
        except compiler.CompilationError as error:  # structattn says so when it runs without
            self.warn(str(error))


setup(cmdclass={"build_py": CompileInClone})
