"""The distribution adds one package to SGLang's tree, two modules beside it, and touches nothing else in it.

SGLang's packages are linked file by file into a fresh virtual environment, and pip installs into
that: it looks like a user's site-packages, without reinstalling SGLang.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import sglang_kv_canary
import sglang_kv_canary_rigs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary_rigs.checkout import REPO

register_cpu_ci(est_time=30, suite="stage-a-test-cpu")

PACKAGE = sglang_kv_canary.__name__
OUR_PACKAGE = PACKAGE.replace(".", "/")
RIGS = sglang_kv_canary_rigs.__name__.replace(".", "/")
MODULES = {"kv_canary_cli.py", "sglang_kv_canary.py"}
DIST_INFO = "sglang_kv_canary-0.1.0.dist-info"

Snapshot = dict[str, tuple[int, int]]  # path below a tree -> (size in bytes, mtime in ns)


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that holds SGLang without the canary."""

    root: Path

    @property
    def python(self) -> str:
        return str(self.root / "bin" / "python")

    @property
    def site_packages(self) -> Path:
        (found,) = self.root.glob("lib/python*/site-packages")
        return found

    def pip(self, *args: str) -> None:
        _run(sys.executable, "-m", "pip", "--quiet", "--python", self.python, *args)

    def query(self, code: str) -> dict:
        """Run `code` in the environment; return the JSON object in its last line of stdout."""
        return json.loads(_run(self.python, "-I", "-W", "ignore", "-c", code).splitlines()[-1])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(sys.prefix))
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _snapshot(tree: Path) -> Snapshot:
    files = (path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    stats = {path: path.stat() for path in files}
    return {
        path.relative_to(tree).as_posix(): (stat.st_size, stat.st_mtime_ns)
        for path, stat in stats.items()
    }


def _our_files(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith(f"{OUR_PACKAGE}/")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPO / "python", copy / "python", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(REPO / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out))
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", *build, str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    env = Environment(tmp_path / "venv")
    _run(sys.executable, "-m", "venv", "--without-pip", str(env.root))
    spec = find_spec("sglang")
    shutil.copytree(
        Path(spec.origin).parent,
        env.site_packages / "sglang",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("kv_canary"),
    )
    # Such paths come last, and .pth files in them are not run: SGLang's dependencies and metadata
    # are found there, this checkout's own editable install is not.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (env.site_packages / "shared.pth").write_text("\n".join(shared))
    return env


def test_wheel_holds_the_canary_and_nothing_else(source: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.startswith(f"{DIST_INFO}/")}
    assert names - metadata == MODULES | _our_files(set(_snapshot(source / "python")))
    assert {f"{OUR_PACKAGE}/__init__.py", f"{OUR_PACKAGE}/testing/serving.py"} <= names
    assert not any(name.startswith(RIGS) for name in names)
    assert f"{DIST_INFO}/licenses/LICENSE" in names


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(f"{DIST_INFO}/METADATA"))
    assert metadata["Name"] == "sglang-kv-canary"
    assert metadata["Version"] == "0.1.0"
    assert metadata["Requires-Python"] == ">=3.10"
    required = metadata.get_all("Requires-Dist", [])
    assert [line for line in required if "extra ==" not in line] == []
    assert 'sglang==0.5.12.post1; extra == "sglang"' in required
    entry_points = archive.read(f"{DIST_INFO}/entry_points.txt").decode().split("\n")
    assert [line for line in entry_points if line] == [
        "[console_scripts]",
        "kv-canary = kv_canary_cli:main",
        "[sglang.srt.plugins]",
        f"kv_canary = {PACKAGE}.plugin:register",
    ]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installs_beside_an_untouched_sglang(
    kind: str, wheel: Path, source: Path, environment: Environment
) -> None:
    tree = environment.site_packages
    before = _snapshot(tree / "sglang")
    target = (str(wheel),) if kind == "wheel" else ("--editable", str(source))
    # --ignore-installed: pip sees, through shared.pth, the installation that runs this test.
    flags = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    environment.pip("install", *flags, *target)

    after = _snapshot(tree / "sglang")
    added = {f"sglang/{name}" for name in after.keys() - before.keys()}
    ours = _our_files(set(_snapshot(source / "python")))
    assert added == (ours if kind == "wheel" else set())
    assert {name: after[name] for name in before} == before

    found = environment.query(
        "import json, sglang, sglang.srt.kv_canary as srt, sglang_kv_canary.testing as testing\n"
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='sglang.srt.plugins', name='kv_canary')\n"
        "print(json.dumps({'sglang': sglang.__file__, 'srt': srt.__file__, 'testing': testing.__file__,\n"
        "    'dist': str(point.dist.locate_file('')), 'register': point.load().__module__}))"
    )
    home = tree if kind == "wheel" else source / "python"
    assert found == {
        "sglang": str(tree / "sglang/__init__.py"),
        "srt": str(home / f"{OUR_PACKAGE}/__init__.py"),
        "testing": str(home / f"{OUR_PACKAGE}/testing/__init__.py"),
        "dist": str(tree),
        "register": f"{PACKAGE}.plugin",
    }

    script = environment.root / "bin" / "kv-canary"
    assert _run(str(script), "--version").startswith("kv-canary 0.1.0, sglang ")

    environment.pip("uninstall", "--yes", "sglang-kv-canary")
    assert not script.exists()
    assert _snapshot(tree / "sglang") == before


def test_requirement_files_pin_exact_versions() -> None:
    lines = [
        f"{path.name}: {line}"
        for path in sorted((REPO / "requirements").glob("*.txt"))
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    loose = [line for line in lines if not re.fullmatch(r"[\w.]+: [\w.-]+==[\w.]+", line)]
    assert lines
    assert loose == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
