"""Never silently off: whatever keeps the canary from starting ends the server's start, and says why."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import dedent

import psutil
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.version import __version__ as SGLANG
from sglang_kv_canary.testing import consts
from sglang_kv_canary.testing.serving import free_port
from sglang_kv_canary.testing.tiny_models import write_tiny_llama
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.releases import (
    FAMILIES,
    NEWEST_FAMILY,
    SUPPORTED_SGLANG_VERSIONS,
    release,
)
from sglang_kv_canary_rigs.cpu_cores import bind_each_rank
from sglang_kv_canary_rigs.fresh_process import FreshProcesses
from sglang_kv_canary_rigs.on_releases import fewer_on_newer_releases
from sglang_kv_canary_rigs.warm import shared

register_cpu_ci(est_time=80, suite="stage-a-test-cpu")

SUPPORTED = "0.5.12.post1"
own_flags = pytest.mark.skipif(
    release().has_own_canary,
    reason="SGLang has the flags and a seam, test_seam.py; lifted by make test SGLANG=0.5.12.post1",
)
published_args = pytest.mark.skipif(
    release().has_own_canary,
    reason="SGLang looks at arguments that a main process has published; lifted by make test SGLANG=0.5.12.post1",
)
GO_ON = "remove --kv-canary"

NEWEST = SUPPORTED_SGLANG_VERSIONS[-1]
IS_OF_NEWEST_FAMILY = FAMILIES.get(SGLANG) == NEWEST_FAMILY

LOAD = """
import json, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
"""
ASK = """
from sglang.srt.server_args import ServerArgs
ServerArgs(model_path="dummy")
print("off is fine")
ServerArgs(model_path="dummy", kv_canary="log")
"""


def script(*blocks: str) -> str:
    return "\n".join(dedent(block) for block in blocks)


CPU_FLAGS = {
    "device": "cpu",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.99,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def fresh():
    return FreshProcesses()


# The plugin in one process


def test_loads_and_can_be_asked_for(fresh):
    ended = fresh.run(script(LOAD, "load_plugins()", ASK))
    assert ended.returncode == 0, ended.stderr


@own_flags
def test_server_args_know_the_flags_once_plugins_are_loaded(fresh):
    ended = fresh.run(
        script(
            LOAD,
            """
        from sglang.srt.server_args import ServerArgs
        try:
            ServerArgs(model_path="dummy", kv_canary="log")
        except TypeError as error:
            print(error)
        load_plugins()
        print(json.dumps(ServerArgs(model_path="dummy", kv_canary="log").kv_canary))
    """,
        )
    )
    assert ended.result == "log"
    assert "unexpected keyword argument 'kv_canary'" in ended.stdout


def test_registering_twice_is_once(fresh):
    ended = fresh.run(
        script(
            LOAD,
            """
        load_plugins()
        from sglang_kv_canary.plugin import register
        before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
        register()
        after = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
        print(json.dumps([before == after, bool(before)]))
    """,
        )
    )
    assert ended.result == [True, True]


# What makes a release unsupported -> what the message names.
UNSUPPORTED_RELEASES = {
    "another version": (
        "import sglang.version; sglang.version.__version__ = '0.5.13'",
        "sglang 0.5.13 is installed",
    ),
    "a flag of its own": (
        """
        import dataclasses, sglang.srt.server_args as module
        @dataclasses.dataclass
        class ServerArgs(module.ServerArgs):
            kv_canary: str = "theirs"
        module.ServerArgs = ServerArgs
        """,
        "has a --kv-canary of its own",
    ),
    "a package of its own": (
        """
        import os, tempfile, sglang.srt
        folder = tempfile.mkdtemp()
        os.mkdir(folder + "/kv_canary")
        open(folder + "/kv_canary/config.py", "w").close()
        sglang.srt.__path__ = [*sglang.srt.__path__, folder]
        """,
        "also provided by",
    ),
    "files of its own in its distribution": (
        """
        import importlib.metadata as metadata
        read_text = metadata.PathDistribution.read_text
        def with_theirs(self, name):
            text = read_text(self, name)
            if name != "RECORD" or self.name != "sglang":
                return text
            return text + "sglang/srt/kv_canary/api.py,,"
        metadata.PathDistribution.read_text = with_theirs
        """,
        "brings a sglang/srt/kv_canary/ of its own",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "another version" else own_flags)
        for case in UNSUPPORTED_RELEASES
    ],
)
def test_unsupported_sglang_is_refused_before_anything_is_patched(case, fresh):
    change, reason = UNSUPPORTED_RELEASES[case]
    look = """
        from sglang.srt.environ import Envs
        from sglang.srt.server_args import ServerArgs
        def look():
            return dict(vars(ServerArgs)), set(vars(Envs)), dict(HookRegistry._hooks)
        before = look()
        load_plugins()
        print(json.dumps(look() == before))
    """
    ended = fresh.run(script(LOAD, change, look))
    assert ended.result is True
    assert reason in ended.stderr
    assert f"supports sglang {SUPPORTED}" in ended.stderr
    assert ended.returncode == 0  # not asked for: SGLang goes on without

    asked = fresh.run(
        script(LOAD, change, "load_plugins(); print('went on')"), "--kv-canary", "log"
    )
    assert (asked.returncode, asked.stdout) == (1, "")
    assert reason in asked.stderr.splitlines()[-1]
    assert f"supports sglang {SUPPORTED}" in asked.stderr.splitlines()[-1]


OTHER_SPELLINGS = [
    (["--kv-canary=log"], 1),
    (["--port", "1", "--kv-canary"], 1),
    (["--kv-canary=none"], 0),
    (["--kv-canary-real-data", "none"], 0),
]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--kv-canary", "raise"], 1),
        (["--kv-canary", "none"], 0),
        ([], 0),
        *fewer_on_newer_releases(OTHER_SPELLINGS, []),
    ],
    ids=str,
)
def test_only_who_asked_is_stopped(argv, code, fresh):
    ended = fresh.run(
        script(LOAD, "import sglang.version; sglang.version.__version__ = '9'; load_plugins()"),
        *argv,
    )
    assert ended.returncode == code
    assert "sglang 9 is installed" in ended.stderr
    moved = "none is gone" if SGLANG == NEWEST else "gone"
    assert f"functions that the canary hooks in {NEWEST}: {moved}" in ended.stderr


@pytest.mark.skipif(IS_OF_NEWEST_FAMILY, reason="lacks no hooks; lifted by any older release")
def test_an_untested_release_may_be_tried_and_names_the_hooks_that_it_lacks(fresh):
    """This release stands in for one: it is not of the newest family."""
    ended = fresh.run(
        script(
            LOAD,
            """
            import os
            import sglang.version
            os.environ["SGLANG_KV_CANARY_ALLOW_UNTESTED_RELEASE"] = "1"
            sglang.version.__version__ = "9"
            load_plugins()
            from sglang_kv_canary.errors import CanaryStartupError
            from sglang_kv_canary.wiring.startup_check import verify_hooks_applied
            try:
                verify_hooks_applied()
            except CanaryStartupError as error:
                print(json.dumps(str(error)))
            """,
        )
    )
    assert "nobody has tried it with sglang 9" in ended.stderr
    assert "SGLang did not apply the hooks on" in ended.result
    assert "checkpoint_kv_cache" in ended.result


@own_flags
def test_error_while_registering_is_told_to_who_asks(fresh):
    ended = fresh.run(
        script(
            LOAD,
            """
        def broken(*args, **kwargs):
            raise OSError("no hooks today")
        HookRegistry.register = broken
        load_plugins()
    """,
            ASK,
        )
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "OSError: no hooks today" in last
    assert GO_ON in last
    assert ended.stdout == "off is fine\n"


@own_flags
def test_error_while_adding_the_flags_is_told_to_who_asks(fresh):
    broken = script(
        LOAD,
        "from sglang.srt.server_args import ServerArgs; del ServerArgs.add_cli_args",
        "load_plugins()",
    )
    ended = fresh.run(broken, "--kv-canary", "log")
    assert ended.returncode == 1
    assert "add_cli_args" in ended.stderr.splitlines()[-1]
    assert fresh.run(broken).returncode == 0


def test_a_start_has_no_warning_about_hooks(fresh):
    """SGLang warns in each process of a function that two AROUND hooks share."""
    ended = fresh.run(script(LOAD, "load_plugins()"))
    assert ended.returncode == 0
    assert "Multiple AROUND hooks" not in ended.stderr


# Hooks that are not in place

ALL = {"SGLANG_KV_CANARY_ACTION": "abort", "SGLANG_KV_CANARY_TOKEN_ORACLE": "1"}  # none is left out
TARGETS = sorted({hook.target for hook in collect_hooks()})


@own_flags
def test_hooks_that_sglang_could_not_apply_are_named(fresh):
    failing = """
        def fail(cls, target, hooks):
            raise AttributeError(f"{target} is not in this release")
        HookRegistry._apply_target = classmethod(fail)
        load_plugins()
    """
    ended = fresh.run(script(LOAD, failing, ASK), env=ALL)
    for target in TARGETS:
        assert_refused_naming(target, ended)


def test_each_hook_that_was_overwritten_is_named(fresh):
    overwrite = """
        import pkgutil
        from sglang_kv_canary.errors import CanaryStartupError
        from sglang_kv_canary.wiring.startup_check import verify_hooks_applied
        load_plugins()
        seen = {}
        for target in sys.argv[1:]:
            owner, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner)
            ours = vars(owner)[name]
            setattr(owner, name, lambda *args, **kwargs: None)
            try:
                verify_hooks_applied()
            except CanaryStartupError as error:
                seen[target] = str(error)
            setattr(owner, name, ours)
        verify_hooks_applied()
        print(json.dumps(seen))
    """
    seen = fresh.run(script(LOAD, overwrite), *TARGETS, env=ALL).result
    assert seen.keys() == set(TARGETS)
    for target, message in seen.items():
        assert f"did not apply the hooks on {target}. Not protected: " in message
        assert GO_ON in message


@pytest.mark.parametrize(
    ("name", "value", "target"),
    [
        pytest.param(
            "SGLANG_KV_CANARY_ACTION",
            "abort",
            "sglang.srt.mem_cache.common.release_kv_cache",
            marks=pytest.mark.skipif(
                all(hook.only_with != "ACTION" for hook in collect_hooks()),
                reason="no action on this release; lifted by make test SGLANG=0.5.23",
            ),
        ),
        (
            "SGLANG_KV_CANARY_TOKEN_ORACLE",
            "1",
            "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ),
    ],
)
def test_hooks_of_what_is_off_are_left_out_and_it_cannot_be_turned_on_later(
    fresh, name, value, target
):
    late = """
        load_plugins()
        import os
        from sglang.srt.server_args import ServerArgs
        from sglang_kv_canary.api import install_canary
        from sglang_kv_canary.wiring.context import context
        os.environ.update([sys.argv[1:]])
        left_out = [hook.target for hook in context.registration.left_out]
        applied = [hook.target for hook in context.registration.hooks]
        try:
            server_args = ServerArgs(model_path="dummy", kv_canary="log")
            install_canary(server_args=server_args, model_runner=None)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([left_out, applied, said]))
    """
    left_out, applied, said = fresh.run(script(LOAD, late), name, value).result
    assert target in left_out
    assert len(left_out) + len(applied) == len(collect_hooks())
    assert said.startswith("CanaryStartupError: ")
    assert f"{name} was not set when SGLang loaded its plugins" in said
    assert target in said
    left_out, applied, said = fresh.run(script(LOAD, late), name, value, env=ALL).result
    assert (left_out, len(applied)) == ([], len(collect_hooks()))
    assert said.startswith("AttributeError: ")  # there is no model runner


def assert_refused_naming(target, ended):
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "CanaryStartupError" in last
    assert target in last
    assert "Not protected: " in last
    assert GO_ON in last
    assert ended.stdout == "off is fine\n"


@own_flags
def test_target_that_is_gone_is_named(fresh):
    ended = fresh.run(
        script(
            LOAD,
            "from sglang.srt.entrypoints.engine import Engine",
            "del Engine._launch_subprocesses",
            "load_plugins()",
            ASK,
        )
    )
    assert_refused_naming("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", ended)


OTHER_PLUGIN = """
from sglang_kv_canary.plugin import register
from sglang_kv_canary.wiring.startup_check import verify_hooks_applied
target = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
other = lambda *args, **kwargs: None
{first}
HookRegistry.apply_hooks()
verify_hooks_applied()
"""


@pytest.mark.parametrize("kind", ["BEFORE", "AFTER", "AROUND", "REPLACE"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_other_plugins_on_the_same_target_are_fine(kind, ours_first, fresh):
    steps = ["register()", f"HookRegistry.register(target, other, HookType.{kind})"]
    first = "\n".join(steps if ours_first else reversed(steps))
    ended = fresh.run(script(LOAD, OTHER_PLUGIN.format(first=first)))
    assert ended.returncode == 0, ended.stderr


def test_replacement_that_hides_our_hook_is_named(fresh):
    first = """
register()
HookRegistry.apply_hooks()
from sglang.srt.entrypoints.engine import Engine
hidden = Engine.__dict__["_launch_subprocesses"].__func__
from sglang.srt.plugins.hook_registry import _wrap_fn
Engine._launch_subprocesses = classmethod(_wrap_fn(hidden, other, HookType.REPLACE))
"""
    ended = fresh.run(script(LOAD, OTHER_PLUGIN.format(first=first)))
    assert ended.returncode == 1
    assert "Engine._launch_subprocesses" in ended.stderr.splitlines()[-1]


# The scheduler process

SCHEDULER = """
import multiprocessing, os, pathlib, tempfile
from sglang_kv_canary.wiring.startup_check import (
    _Launch, run_guarded_scheduler_process, set_active_summary
)
from sglang.srt.server_args import ServerArgs

def scheduler(server_args, gpu_id, tp_rank, pp_rank, dp_rank, pipe_writer, display_rank=None):
    print("ran")
    {install}
    pipe_writer.send({{"status": "ready"}})

server_args = ServerArgs(model_path="dummy")
server_args.kv_canary = "log"
reader, writer = multiprocessing.Pipe(duplex=False)
folder = tempfile.mkdtemp()
try:
    launch = _Launch(folder, main_pid=os.getppid())
    run_guarded_scheduler_process(scheduler, launch, server_args, 0, 1, 0, None, writer, display_rank=3)
    code = 0
except SystemExit as end:
    code = end.code
(report,) = [json.loads(path.read_text()) for path in pathlib.Path(folder).iterdir()]
print(json.dumps({{"code": code, "pipe": reader.recv(), **report}}))
"""


def test_an_engines_own_scheduler_function_may_pass_its_arguments_on():
    """`Engine.run_scheduler_process_func` may be any function that takes what SGLang's takes."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang_kv_canary.wiring.startup_check import _bound

    def own(*args, **kwargs):
        return run_scheduler_process(*args, **kwargs)

    names = list(inspect.signature(run_scheduler_process).parameters)
    values = tuple(f"the {name}" for name in names)
    assert _bound(own, values, {}).arguments == dict(zip(names, values, strict=True))
    assert _bound(own, values[:-1], {names[-1]: 7}).arguments["pipe_writer"] is not None
    assert _bound(run_scheduler_process, values, {}).args == values


def test_scheduler_with_the_canary_becomes_ready(fresh):
    ready = SCHEDULER.format(install="set_active_summary({'mode': 'log'})")
    seen = fresh.run(script(LOAD, ready)).result
    assert seen == {
        "code": 0,
        "pipe": {"status": "ready"},
        "rank": "scheduler tp1 pp0",
        "refusal": "",
        "active": {"mode": "log"},
    }


def test_a_scheduler_has_room_for_frames(fresh):
    """Up to there hooks move no call of SGLang's onto a boundary of CPython's chunks."""
    below = "import sys; print(sys._getframe(1).f_code.co_name); set_active_summary({})"
    ended = fresh.run(script(LOAD, SCHEDULER.format(install=below)))
    assert "with_room_for_frames" in ended.stdout.splitlines(), ended.stderr


def test_scheduler_without_the_canary_does_not_become_ready(fresh):
    ended = fresh.run(script(LOAD, SCHEDULER.format(install="pass")))
    seen = ended.result
    assert (seen["code"], seen["active"]) == (1, None)
    assert seen["pipe"]["status"] != "ready"
    assert "never installed" in seen["refusal"]
    assert GO_ON in seen["refusal"]
    assert seen["refusal"] in ended.stderr


def test_scheduler_that_does_not_load_the_plugin_does_not_run(fresh):
    ended = fresh.run(
        script(LOAD, SCHEDULER.format(install="pass")), env={"SGLANG_PLUGINS": "another_plugin"}
    )
    seen = ended.result
    assert seen["code"] == 1
    assert "SGLANG_PLUGINS='another_plugin' must name kv_canary" in seen["refusal"]
    assert "ran" not in ended.stdout.splitlines()


def test_summary_must_be_json(fresh):
    ended = fresh.run(
        script(
            "from sglang_kv_canary.wiring.startup_check import set_active_summary",
            "set_active_summary({'pool': object()})",
        )
    )
    assert "TypeError" in ended.stderr.splitlines()[-1]


# The main process

ENGINE_OF_ANOTHER_KIND = """
from types import SimpleNamespace
from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.server_args import ServerArgs

class AnotherEngine(Engine):
    \"\"\"Launches its schedulers in its own way, as RayEngine does; here, none at all.\"\"\"

    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler_process_func):
        return SchedulerInitResult([{"max_req_input_len": 1}]), []

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **kwargs):
        return [], []

load_plugins()
for mode in ("none", "log"):
    server_args = ServerArgs(**json.loads(sys.argv[1]), kv_canary=mode)
    launched = AnotherEngine._launch_subprocesses(
        server_args,
        init_tokenizer_manager_func=lambda *args: (SimpleNamespace(), None),
        run_scheduler_process_func=None,
        run_detokenizer_process_func=None,
    )
    launched[4].stop()
    print(mode)
"""


@published_args
def test_engine_that_launches_schedulers_in_its_own_way_is_refused(fresh, llama):
    flags = json.dumps({"model_path": llama, **CPU_FLAGS})
    ended = fresh.run(script(LOAD, ENGINE_OF_ANOTHER_KIND), flags)
    assert ended.stdout.splitlines() == ["none"]
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert "AnotherEngine" in last
    assert GO_ON in last


def test_missing_report_of_one_scheduler_is_refused(tmp_path):
    from sglang_kv_canary.errors import CanaryStartupError
    from sglang_kv_canary.wiring.startup_check import _Report, _wait_for_reports

    _Report("scheduler tp0 pp0", active={"mode": "log"}).write(str(tmp_path))
    assert _wait_for_reports(lambda: None, str(tmp_path), expected=1) == [{"mode": "log"}]
    with pytest.raises(CanaryStartupError, match="1 of 2 scheduler processes"):
        _wait_for_reports(lambda: None, str(tmp_path), expected=2)


@published_args
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 2, "dp_size": 3}, 6),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
        ({"tp_size": 8, "nnodes": 2, "node_rank": 1}, 4),
        ({"tp_size": 2, "pp_size": 2}, 4),
    ],
    ids=str,
)
def test_scheduler_count_of_this_node(flags, expected):
    from sglang.srt.server_args import ServerArgs
    from sglang_kv_canary.wiring.releases import release

    server_args = ServerArgs(model_path="dummy")
    for name, value in flags.items():
        setattr(server_args, name, value)
    assert release().schedulers_here(server_args) == expected


# Real servers


@pytest.fixture
def plugin_dir(tmp_path):
    """`plugin_dir(code)`: a folder with a plugin of another distribution, to be put on PYTHONPATH."""

    def write(code: str) -> Path:
        info = tmp_path / "stub_plugin-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stub-plugin\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nstub = stub_plugin:register\n"
        )
        (tmp_path / "stub_plugin.py").write_text(dedent(code))
        return tmp_path

    return write


def run_server(
    code: str, folder: Path, env: dict[str, str] | None = None, **flags
) -> subprocess.CompletedProcess:
    """Run `code` with `FLAGS` set as the main program of a server; fails if a process is left behind."""
    command = [sys.executable, "-W", "ignore", "-c", f"FLAGS = {flags!r}\n" + dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(folder), **(env or {})}
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = shared().popen(command, stdout=out, stderr=err, env=environment)
        known = {child.pid for child in psutil.Process().children()}
        try:
            process.wait(consts.PROCESS_TIMEOUT_S)
            psutil.wait_procs(orphans(known), timeout=20)
            out.seek(0), err.seek(0)
            assert not orphans(known), err.read()
            err.seek(0)
            return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())
        finally:
            for left in orphans(known - {process.pid}):
                left.kill()


def orphans(known: set[int]) -> list[psutil.Process]:
    """Children of this process beside `known` ones: as the subreaper it gets what a server leaves behind."""
    children = psutil.Process().children()
    return [c for c in children if c.pid not in known and c.status() != psutil.STATUS_ZOMBIE]


def test_http_server_whose_scheduler_does_not_load_the_plugin_does_not_start(llama, tmp_path):
    ended = run_server(
        """
        import os
        from sglang.srt.plugins import load_plugins
        load_plugins()
        os.environ["SGLANG_PLUGINS"] = "another_plugin"
        from sglang.launch_server import run_server
        from sglang.srt.server_args import ServerArgs
        run_server(ServerArgs(**FLAGS))
        """,
        tmp_path,
        model_path=llama,
        kv_canary="log",
        **CPU_FLAGS,
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "CanaryStartupError: scheduler tp0 pp0" in last
    assert "SGLANG_PLUGINS='another_plugin' must name kv_canary" in last
    assert GO_ON in last


def test_error_of_the_canary_in_a_data_parallel_scheduler_ends_the_start(llama, plugin_dir):
    """Two processes below the main one; raised where `install_canary` would, but before it takes seconds."""
    folder = plugin_dir(
        """
        def register():
            from sglang.srt.plugins.hook_registry import HookRegistry, HookType
            target = "sglang.srt.managers.scheduler.Scheduler.init_model_worker"
            HookRegistry.register(target, refuse, HookType.BEFORE)

        def refuse(*args, **kwargs):
            from sglang_kv_canary.errors import startup_error
            raise startup_error("no attacher knows the pool StubPool.", "the KV pool")
        """
    )
    ended = run_server(
        "from sglang.srt.entrypoints.engine import Engine; Engine(**FLAGS)",
        folder,
        model_path=llama,
        kv_canary="raise",
        dp_size=2,
        env=bind_each_rank(2),
        **CPU_FLAGS,
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "CanaryStartupError: scheduler tp0 pp0 dp" in last
    assert "no attacher knows the pool StubPool. Not protected: the KV pool." in last
    assert GO_ON in last


def test_server_that_starts_shows_the_flags_and_every_active_canary(llama, tmp_path):
    ended = run_server(
        """
        import json
        from sglang.srt.entrypoints.engine import Engine
        with Engine(**FLAGS) as engine:
            info = engine.get_server_info()
            print(json.dumps({name: info[name] for name in info if name.startswith("kv_canary")}))
        """,
        tmp_path,
        model_path=llama,
        kv_canary="log",
        nccl_port=free_port(),
        **CPU_FLAGS,
    )
    assert ended.returncode == 0, ended.stderr
    info = json.loads(ended.stdout.splitlines()[-1])
    (active,) = info.pop("kv_canary_active")
    assert (active["mode"], active["fault_injection"]) == ("log", "")
    assert "fault injection" not in ended.stderr
    assert info == {
        "kv_canary": "log",
        "kv_canary_real_data": "none",
        "kv_canary_sweep_interval": 0,
    }


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
