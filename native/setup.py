"""The wheel has compiled code; pyproject.toml has everything else."""

from build_backend import CompileCode
from setuptools import Distribution, setup


class Compiled(Distribution):
    def has_ext_modules(self) -> bool:
        return True  # so the wheel is for one platform


setup(distclass=Compiled, cmdclass={"build_py": CompileCode})
