"""What a release changes in the hooks' targets is read from its source, and told when an unknown one is refused."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

import sglang.version
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.import_alias import OLD_NAME
from sglang_kv_canary.wiring import collect_hooks, hook_targets, releases
from sglang_kv_canary.wiring.guard import taken_apart
from sglang_kv_canary.wiring.hook_spec import HookType
from sglang_kv_canary.wiring.hook_targets import (
    MovedTarget,
    RecordedTargets,
    describe_moved,
    moved_targets,
    read_signature,
    record_of,
    recorded_targets,
)

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

HERE = Path(sglang.version.__file__).parents[1]
FAMILY = releases.FAMILIES[sglang.version.__version__]
SOURCES = {
    "sglang/pool.py": """
        class Base:
            def free(self, slots): ...
            async def later(self): ...
        try:
            class Pool(Base):
                size = 4
                def alloc(self, n: int = 1) -> list: ...
        except ImportError:
            pass
        """,
    "sglang/names/__init__.py": "from .inner import Pool as Renamed",
    "sglang/names/inner.py": "from sglang.pool import Pool",
    "sglang/loop.py": "from .loop import again",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in SOURCES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.parametrize(
    ("target", "signature"),
    [
        ("sglang.pool.Pool.alloc", "(self, n: int=1)"),
        ("sglang.pool.Pool.free", "(self, slots)"),  # of its base
        ("sglang.pool.Pool.later", "async (self)"),
        ("sglang.names.Renamed.alloc", "(self, n: int=1)"),  # imported twice
        ("sglang.pool.Pool", "class"),
        ("sglang.pool.Pool.size", "value"),
        ("sglang.pool.Pool.gone", None),
        ("sglang.loop.again", None),
        ("sglang.nowhere.f", None),
    ],
)
def test_signatures_are_read_where_the_target_is_defined(root, target, signature) -> None:
    assert read_signature(root, target) == signature


def test_the_record_is_that_of_the_newest_release_of_the_family() -> None:
    """Written by `tools/hook_targets.py --record`."""
    recorded = recorded_targets(FAMILY)
    newest = [version for version, family in releases.FAMILIES.items() if family == FAMILY][-1]
    assert recorded.release == newest
    if sglang.version.__version__ != newest:
        pytest.skip(f"lifted with sglang {newest}")
    text = record_of(newest, HERE, (hook.target for hook in collect_hooks()))
    assert text == (Path(releases.__file__).parent / FAMILY / "hook_targets.json").read_text()
    assert moved_targets(HERE, recorded) == ()


def test_the_files_of_sglangs_own_canary_stay_closed(root) -> None:
    targets = [f"{OLD_NAME}.api.f", "sglang.pool.Pool.alloc"]
    assert "kv_canary" not in record_of("1", root, targets)
    with pytest.raises(LookupError, match=r"Pool\.gone"):
        record_of("1", root, ["sglang.pool.Pool.gone"])


def test_what_moved_is_named(root) -> None:
    same = {"sglang.pool.Pool.free": "(self, slots)"}
    assert moved_targets(root, RecordedTargets("1", same)) == ()
    told = describe_moved(root, RecordedTargets("1", same))
    assert told.endswith("in 1: none is gone or has another signature.")

    recorded = RecordedTargets(
        "1", {**same, "sglang.pool.Pool.alloc": "(self)", "sglang.pool.Pool.gone": "()"}
    )
    assert moved_targets(root, recorded) == (
        MovedTarget("sglang.pool.Pool.alloc", "(self)", "(self, n: int=1)"),
        MovedTarget("sglang.pool.Pool.gone", "()", None),
    )
    assert "gone 1 (sglang.pool.Pool.gone); changed 1 (sglang.pool.Pool.alloc)." in describe_moved(
        root, recorded
    )


def test_many_are_counted(root) -> None:
    recorded = RecordedTargets("1", {f"sglang.pool.f{i}": "()" for i in range(9)})
    told = describe_moved(root, recorded)
    assert "gone 9 (" in told
    assert "sglang.pool.f4 and 4 more)" in told


def test_source_that_cannot_be_read_is_no_second_error(root) -> None:
    (root / "sglang" / "pool.py").write_text("def (")
    hook_targets._parsed.cache_clear()
    recorded = RecordedTargets("1", {"sglang.pool.f": "()"})
    assert describe_moved(root, recorded) == "Its source cannot be compared with 1: SyntaxError."


def test_no_error_at_the_start_of_a_scheduler_is_contained() -> None:
    """Another hook there says that the start is over, and a guard would then go on without what has failed."""
    target = "sglang.srt.managers.scheduler.Scheduler.__init__"
    hooks = [hook.fn for hook in collect_hooks() if hook.target == target]
    assert len(hooks) > 1
    assert [taken_apart(hook)[1] for hook in hooks] == [None] * len(hooks)


def test_no_target_has_two_hooks_around_it() -> None:
    """SGLang warns of them in every process: the outer one may leave out the inner one."""
    around = Counter(h.target for h in collect_hooks() if h.hook_type is HookType.AROUND)
    assert [target for target, count in around.items() if count > 1] == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
