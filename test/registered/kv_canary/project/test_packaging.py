"""One wheel for every SGLang release: it shares no file with SGLang, and leaves SGLang as it was.

SGLang's packages are linked file by file into a fresh virtual environment, and pip installs into
that: it looks like a user's site-packages, without reinstalling SGLang. A release with a canary of
its own is downloaded.
"""

import email
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.import_alias import OLD_NAME
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.serving import free_port, free_server_port
from sglang_kv_canary_rigs.checkout import DOCS, REPO
from sglang_kv_canary_rigs.volume import FULL_VOLUME, volume
from sglang_kv_canary_rigs.warm import shared

register_cpu_ci(est_time=120, suite="stage-a-test-cpu")

PACKAGE = "sglang_kv_canary"
FOLDER = "python/sglang/srt/kv_canary"
BESIDE_THE_PACKAGE = {"kv_canary_cli.py", "sglang_kv_canary.pth"}
DIST_INFO = "sglang_kv_canary-0.1.0.dist-info"
# A release that ships `sglang.srt.kv_canary`.
NEWER = "0.5.23"
KINDS = ["wheel", "editable"][: volume(1, 2)]  # tests themselves run with an editable one
REQUIRED = "KV_CANARY_REQUIRE_NEWER_SGLANG"
ACTIVATE = "source .venv/bin/activate\n"

needs_documents = pytest.mark.skipif(not DOCS.is_dir(), reason="no source tree: docs/ is not here")

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

    def install_canary(self, target: str, *options: str) -> None:
        # --ignore-installed: pip sees, through shared.pth, the installation that runs this test.
        flags = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        self.pip("install", *flags, *options, target)

    def query(self, code: str, *args: str) -> dict:
        """Run `code` in the environment; return the JSON object in its last line of stdout."""
        shown = _run(self.python, "-B", "-I", "-W", "ignore", "-c", code, *args)
        return json.loads(shown.splitlines()[-1])


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


def _new_environment(root: Path) -> Environment:
    """Without SGLang, and with all that this environment has as a second choice."""
    env = Environment(root)
    _run(sys.executable, "-m", "venv", "--without-pip", str(env.root))
    # Such paths come last, and .pth files in them are not run: SGLang's dependencies and metadata
    # are found there, this checkout's own editable install is not.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (env.site_packages / "shared.pth").write_text("\n".join(shared))
    return env


def _with_this_sglang(root: Path) -> Environment:
    env = _new_environment(root)
    shutil.copytree(
        Path(find_spec("sglang").origin).parent,
        env.site_packages / "sglang",
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns("kv_canary"),
    )
    return env


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the build reads, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPO / "python", copy / "python", ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy2(REPO / name, copy)
    _leave_an_earlier_build(copy)
    return copy


def _leave_an_earlier_build(checkout: Path) -> None:
    """As versions did whose package lay below `sglang` in the wheel, too."""
    for folder in ("sglang/srt/kv_canary", PACKAGE):
        (checkout / "build/lib" / folder).mkdir(parents=True)
        (checkout / "build/lib" / folder / "gone.py").touch()


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    build = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out))
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", *build, str(source))
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return _with_this_sglang(tmp_path / "venv")


@pytest.fixture(scope="module")
def with_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    env = _with_this_sglang(tmp_path_factory.mktemp("with_wheel") / "venv")
    env.install_canary(str(wheel))
    return env


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Unmodified, as pip installs it; skipped without a package index, unless KV_CANARY_REQUIRE_NEWER_SGLANG=1."""
    env = _new_environment(tmp_path_factory.mktemp("newer") / "venv")
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", env.python)
    flags = ("--no-deps", "--no-compile", "--ignore-installed")
    done = subprocess.run(
        [*pip, "install", *flags, f"sglang=={NEWER}"], capture_output=True, text=True
    )
    if done.returncode != 0:
        missing = f"pip cannot install sglang=={NEWER} here: {done.stderr}"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{missing} ({REQUIRED}=1)")
        pytest.skip(missing)
    return env


def test_wheel_holds_the_canary_and_nothing_else(source: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in names if name.startswith(f"{DIST_INFO}/")}
    package = {f"{PACKAGE}/{name}" for name in _snapshot(source / FOLDER)}
    assert names - metadata == BESIDE_THE_PACKAGE | package
    assert {f"{PACKAGE}/__init__.py", f"{PACKAGE}/testing/serving.py"} <= names
    assert not any(name.startswith("sglang/") for name in names)
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


@pytest.mark.parametrize("kind", KINDS)
def test_installs_beside_an_untouched_sglang(
    kind: str, wheel: Path, source: Path, environment: Environment
) -> None:
    tree = environment.site_packages
    before = _snapshot(tree / "sglang")
    environment.install_canary(*((str(wheel),) if kind == "wheel" else (str(source), "--editable")))
    assert _snapshot(tree / "sglang") == before

    found = environment.query(
        "import json, sglang_kv_canary.errors as errors\n"
        "from importlib.util import find_spec\n"
        "from importlib.metadata import entry_points\n"
        "(point,) = entry_points(group='sglang.srt.plugins', name='kv_canary')\n"
        "print(json.dumps({'sglang': find_spec('sglang').origin, 'errors': errors.__file__, 'name': errors.__name__,\n"
        "    'dist': str(point.dist.locate_file('')), 'register': point.load().__module__}))"
    )
    home = tree / PACKAGE if kind == "wheel" else source / FOLDER
    name = PACKAGE if kind == "wheel" else OLD_NAME
    assert found == {
        "sglang": str(tree / "sglang/__init__.py"),
        "errors": str(home / "errors.py"),
        "name": f"{name}.errors",
        "dist": str(tree),
        "register": f"{name}.plugin",
    }

    script = environment.root / "bin" / "kv-canary"
    assert _run(str(script), "--version").startswith("kv-canary 0.1.0, sglang ")

    environment.pip("uninstall", "--yes", "sglang-kv-canary")
    assert not script.exists()
    assert _snapshot(tree / "sglang") == before
    assert not list(tree.glob("*kv_canary*"))


# The wheel beside an SGLang without a canary of its own


# Imports each part by both names, those of `sys.argv` in their order. `files` are all that were loaded. Then it runs
# a command that asks SGLang.
IMPORT = """
import contextlib, io, json, sys
from importlib import import_module
names = sys.argv[1:]
parts = ("", ".plugin", ".kernels.reference.check", ".testing", ".demo.run", ".wiring.version_check")
pairs = [[import_module(name + part) for name in names] for part in parts]
pairs[-1][0].check_sglang()
files = [str(getattr(module, "__file__", "")) for module in set(sys.modules.values())]
with contextlib.redirect_stdout(io.StringIO()) as shown:
    import_module("kv_canary_cli").main(["pools"])
print(json.dumps({
    "same": [a is b for a, b in pairs],
    "names": [a.__spec__.name for a, _ in pairs],
    "files": [file for file in files if "kv_canary" in file],
    "pools": shown.getvalue(),
}))
"""


def test_old_name_gives_the_same_modules(with_wheel: Environment) -> None:
    found = with_wheel.query(IMPORT, OLD_NAME, PACKAGE)
    assert found["same"] == [True] * 6
    assert {name.split(".")[0] for name in found["names"]} == {PACKAGE}
    assert len(found["files"]) == len(set(found["files"])) > 10
    assert "MHATokenToKVPool" in found["pools"]


def test_commands_answer(with_wheel: Environment) -> None:
    script = str(with_wheel.root / "bin" / "kv-canary")
    assert "demo" in _run(script, "--help")
    as_module = (with_wheel.python, "-I", "-W", "ignore", "-m", PACKAGE)
    assert _run(*as_module, "--version") == _run(script, "--version")


def test_the_wheel_alone_is_imported(with_wheel: Environment) -> None:
    where = with_wheel.query(f"import json, {PACKAGE} as p; print(json.dumps(list(p.__path__)))")
    assert where == [str(with_wheel.site_packages / PACKAGE)]


def test_the_demo_catches_its_faults(with_wheel: Environment, tmp_path: Path) -> None:
    """A real engine. With FULL=1 that of the wheel, in fresh processes."""
    demo = ("demo", "--requests", "40")
    if FULL_VOLUME:
        shown = _run(str(with_wheel.root / "bin" / "kv-canary"), *demo)
    else:
        shown = _run_forked(tmp_path, "kv_canary_cli", *demo)
    last = shown.rstrip().splitlines()[-1]
    pattern = r"kv-canary demo: caught (\d+) of \1 injected faults, 0 false alarms in \d{4,} checked slots"
    assert re.fullmatch(pattern, last), last


def _run_forked(folder: Path, module: str, *arguments: str) -> str:
    """The output of `module` of this checkout."""
    out, err = folder / "stdout", folder / "stderr"
    with out.open("w") as shown, err.open("w") as said:
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        process = shared().popen(command, stdout=shown, stderr=said, env=os.environ)
        code = process.wait(consts.PROCESS_TIMEOUT_S)
    assert code == 0, out.read_text() + err.read_text()
    return out.read_text()


@needs_documents
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page's flags are those of a CPU machine")
def test_the_walk_through_works_as_it_stands(with_wheel: Environment, tmp_path: Path) -> None:
    """The commands of docs/walkthrough.md: a real server, served and damaged by what the wheel alone brings."""
    page = (DOCS / "walkthrough.md").read_text()
    script = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    assert script.startswith(ACTIVATE)
    script = _with_free_ports(script.removeprefix(ACTIVATE))
    out = _run_in_shell(f"set -e\n{script}wait\n", with_wheel, tmp_path)
    assert "kv-canary active: mode log" in out
    assert "fault injection is ON" in out
    assert '"detail": "flipped 1 byte(s) of K, layer 0, slot ' in out
    assert re.search(r"kv-canary violation #\d+: CONTENT at TAIL_K_FULL, slot ", out), out
    assert 'checked by request "cleo"' in out
    assert 'written by request "ada"' in out


@needs_documents
def test_the_walk_through_ends_with_its_server(tmp_path: Path) -> None:
    """Its loops wait for a server. One that does not start must not keep its reader waiting."""
    page = (DOCS / "walkthrough.md").read_text()
    loops = re.findall(r"^while .*done", page, re.MULTILINE)
    assert len(loops) == 3
    assert not re.search(r"^until ", page, re.MULTILINE)
    script = "\n".join(["touch server.log", "false &", *loops, "echo ended"])
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.endswith("ended\n"), done.stderr
    assert done.stderr.count("No such process") == len(loops)


def _with_free_ports(script: str) -> str:
    """SGLang picks its second port long before it binds it, unless that is given."""
    flag = "--port 30000"
    assert flag in script
    ports = f"{flag} --nccl-port {free_port()}"
    return script.replace(flag, ports).replace("30000", str(free_server_port()))


def _run_in_shell(script: str, env: Environment, folder: Path) -> str:
    """Its output; ends whatever it leaves behind. Fails with the server's log where it does not end."""
    shell = subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "TMPDIR": str(folder),
            "PATH": f"{Path(env.python).parent}:{os.environ['PATH']}",
        },
        start_new_session=True,
    )
    try:
        return shell.communicate(timeout=consts.PROCESS_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired as error:
        logs = "\n".join(path.read_text() for path in folder.rglob("server.log"))
        pytest.fail(f"{error}\n{(error.stdout or b'').decode()}\n{logs}")
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def test_start_of_an_interpreter_imports_three_small_modules(with_wheel: Environment) -> None:
    def imported(*options: str) -> set[str]:
        code = "import sys; print(*sys.modules, sep='\\n')"
        return set(_run(with_wheel.python, *options, "-c", code).split())

    pth = with_wheel.site_packages / "sglang_kv_canary.pth"
    assert pth.read_text().count("\n") == 1
    with_pth = imported()
    hidden = pth.rename(pth.with_suffix(".off"))
    without = imported()
    hidden.rename(pth)
    small = {f"{PACKAGE}.import_alias", f"{PACKAGE}.seam_guard"}
    assert with_pth - without == {PACKAGE, *small}


# Beside an SGLang with a canary of its own


def _hashes(env: Environment) -> dict[str, str]:
    """Of every file that belongs to SGLang or lies in its folder."""
    tree = env.site_packages
    (info,) = tree.glob("sglang-*.dist-info")
    listed = [Path(file.locate()) for file in Distribution.at(info).files]
    files = {*listed, *(path for path in (tree / "sglang").rglob("*") if path.is_file())}
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# What an import would find, without importing it: SGLang's own canary is not loaded here.
FIND = """
import json, sys
from importlib.metadata import entry_points, version
import sglang_kv_canary.cli as cli

def find(name, folder=None):
    path = folder and [folder]
    return next((s for s in (f.find_spec(name, path) for f in sys.meta_path) if s), None)

(point,) = entry_points(group="sglang.srt.plugins", name="kv_canary")
srt, old_name = sys.argv[1] + "/sglang/srt", sys.argv[2]
print(json.dumps({
    "version": version("sglang"),
    "ours": cli.__file__,
    "theirs": find(old_name, srt).origin,
    "not theirs": str(find(old_name + ".import_alias", srt + "/kv_canary")),
    "register": point.load().__module__,
    "rigs": bool(find("sglang_kv_canary_rigs")),
    "guarded": any(type(finder).__name__ == "_SeamFinder" for finder in sys.meta_path),
}))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_sglang_stays_bit_for_bit_as_it_is(
    kind: str, wheel: Path, source: Path, newer: Environment
) -> None:
    tree = newer.site_packages
    before = _hashes(newer)
    assert str(tree / "sglang/srt/kv_canary/__init__.py") in before

    newer.install_canary(*((str(wheel),) if kind == "wheel" else (str(source), "--editable")))
    assert _hashes(newer) == before
    assert newer.query(FIND, str(tree), OLD_NAME) == {
        "version": NEWER,
        "ours": str((tree / PACKAGE if kind == "wheel" else source / FOLDER) / "cli/__init__.py"),
        "theirs": str(tree / "sglang/srt/kv_canary/__init__.py"),
        "not theirs": "None",
        "register": f"{PACKAGE}.plugin",
        "rigs": kind == "editable",
        "guarded": True,
    }

    newer.pip("uninstall", "--yes", "sglang-kv-canary")
    assert _hashes(newer) == before
    assert not list(tree.glob("*kv_canary*"))


def test_requirement_files_pin_exact_versions() -> None:
    lines = [
        f"{path.name}: {line}"
        for path in sorted((REPO / "requirements").glob("*.txt"))
        for line in path.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    loose = [line for line in lines if not re.fullmatch(r"[\w.-]+: [\w.-]+==[\w.]+", line)]
    assert lines
    assert loose == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
