"""What is installed under which name: pyproject.toml cannot tell a wheel from an editable install.

| form | import names |
|---|---|
| wheel | `sglang_kv_canary`, below no folder of SGLang; without the rigs of the tests |
| editable, beside an SGLang without a canary of its own | those of the folders; two modules give the short names |
| editable, beside any other SGLang | `sglang_kv_canary` and `sglang_kv_canary_rigs` |
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
COMMAND = "kv_canary_cli"
PACKAGE = "sglang_kv_canary"
RIGS = "sglang_kv_canary_rigs"
FOLDERS = {PACKAGE: "sglang/srt/kv_canary", RIGS: "sglang/test/kv_canary"}  # below python/

# In each interpreter: offers the old name where SGLang has no such package, and guards the seam where it has one.
PTH = f"{PACKAGE}.pth"
PTH_LINE = (
    f"import {PACKAGE}.import_alias as alias, {PACKAGE}.seam_guard as guard; "
    "alias.offer_old_name(); guard.guard_seam()\n"
)


def short_names(*names: str) -> dict:
    """Each package under its own name, wherever its folder lies; SGLang's packages are never part of it."""
    return {
        "packages": [package for name in names for package in _packages(name, name)],
        "package_dir": {"": "python", **{name: f"python/{FOLDERS[name]}" for name in names}},
        "py_modules": [COMMAND],
    }


def names_of_the_folders() -> dict:
    """The packages as parts of `sglang`. SGLang owns `sglang` and `sglang.test`, so they are not mapped themselves."""
    return {
        "packages": [
            p for name in FOLDERS for p in _packages(name, FOLDERS[name].replace("/", "."))
        ],
        "package_dir": {"": "python"},
        "py_modules": [COMMAND, PACKAGE, RIGS],
    }


def _packages(name: str, root: str) -> list[str]:
    below = find_namespace_packages(str(ROOT / "python" / FOLDERS[name]), exclude=["*__pycache__"])
    return [root, *(f"{root}.{package}" for package in below)]


def sglang_leaves_the_name_free() -> bool:
    """Whether SGLang is installed here, shows its files, and none lies where an import would look for ours."""
    try:
        files = [str(file) for file in distribution("sglang").files or ()]
    except PackageNotFoundError:
        return False
    theirs = [file for file in files if file.startswith("sglang/")]
    return bool(theirs) and not any(file.startswith(f"{FOLDERS[PACKAGE]}/") for file in theirs)


class BuildWheelContents(build_py):
    def run(self) -> None:
        if self.editable_mode:
            super().run()
            self._guard_editable_install()
            return
        self._forget_earlier_builds()
        super().run()
        Path(self.build_lib, PTH).write_text(PTH_LINE)

    def _guard_editable_install(self) -> None:
        """As in the wheel. The names of the folders are for an SGLang without a canary of its own."""
        if PACKAGE in self.packages:
            folder = self.get_finalized_command("install").install_lib
            Path(folder, PTH).write_text(PTH_LINE)

    def _forget_earlier_builds(self) -> None:
        """What lies in build/lib goes into the wheel: deleted modules, and the folders of earlier versions."""
        if Path(self.build_lib).resolve().is_relative_to(ROOT / "build"):
            shutil.rmtree(self.build_lib, ignore_errors=True)


class EditableWheel(editable_wheel):
    def finalize_options(self) -> None:
        layout = names_of_the_folders() if sglang_leaves_the_name_free() else short_names(*FOLDERS)
        for name, value in layout.items():
            setattr(self.distribution, name, value)
        super().finalize_options()


setup(
    cmdclass={"build_py": BuildWheelContents, "editable_wheel": EditableWheel},
    **short_names(PACKAGE),
)
