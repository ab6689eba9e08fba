"""What pyproject.toml cannot say: the rigs of the tests are importable from a checkout, and not part of the wheel."""

from setuptools import setup
from setuptools.command.build_py import build_py

RIGS = ("sglang.test.", "sglang_kv_canary_rigs")


class BuildWithoutRigs(build_py):
    def run(self) -> None:
        if not self.editable_mode:
            self.packages = [name for name in self.packages if not name.startswith(RIGS)]
            self.py_modules = [name for name in self.py_modules if not name.startswith(RIGS)]
        super().run()


setup(cmdclass={"build_py": BuildWithoutRigs})
