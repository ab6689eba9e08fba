"""The one search for stale bindings finds what SGLang's own search finds, on SGLang's own registry."""

import sys
from collections import Counter
from functools import lru_cache, partial
from types import ModuleType

import pytest

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import patch_scan
from sglang_kv_canary.wiring.patch_scan import search_once

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

SOURCE, IMPORTER, LATE = (f"kv_canary_patched_{name}" for name in ("source", "importer", "late"))


both = pytest.mark.parametrize("once", [False, True], ids=["sglang", "one-search"])


class ImportsWhenAsked:
    """As `transformers` has them: whoever asks for its class imports a module."""

    @property
    def __class__(self):
        raise AssertionError("a lazy object was asked for its class")


@pytest.fixture
def modules(monkeypatch):
    """A module with two functions and a class, and one that binds them under other names."""
    source = ModuleType(SOURCE)
    exec(
        "def first(): return ['first']\n"
        "def second(): return ['second']\n"
        "class Thing:\n    def method(self): return ['method']\n",
        source.__dict__,
    )
    importer = ModuleType(IMPORTER)
    importer.lazy, importer.Thing = ImportsWhenAsked(), source.Thing
    importer.one, importer.again, importer.two = source.first, source.first, source.second
    monkeypatch.setitem(sys.modules, SOURCE, source)
    monkeypatch.setitem(sys.modules, IMPORTER, importer)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry.apply_hooks()  # applies nothing: uses up a search that an earlier test has asked for
    return source, importer


def marked(result, *_):
    return [*result, "hooked"]


def apply_hooks(once: bool) -> None:
    if once:
        search_once()
    HookRegistry.apply_hooks()
    assert (
        set(HookRegistry._hooks) == HookRegistry._patched
    )  # SGLang logs the error of a hook, and goes on


def hook(*targets: str) -> None:
    for target in targets:
        HookRegistry.register(f"{SOURCE}.{target}", marked, HookType.AFTER)


@both
def test_all_bindings_are_patched(modules, once) -> None:
    source, importer = modules
    hook("first", "second", "Thing.method")
    apply_hooks(once)
    for function, name in (
        (importer.one, "first"),
        (importer.again, "first"),
        (importer.two, "second"),
    ):
        assert function() == [name, "hooked"]
    assert source.first() == ["first", "hooked"]
    assert importer.Thing().method() == ["method", "hooked"]


@both
def test_a_module_that_a_target_imports_is_patched(modules, monkeypatch, tmp_path, once) -> None:
    """It binds a function before the hook on that function is applied."""
    (tmp_path / f"{LATE}.py").write_text(
        f"from {SOURCE} import second\n\ndef early(): return ['early']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hook("second")
    HookRegistry.register(f"{LATE}.early", marked, HookType.AFTER)
    assert sorted(HookRegistry._hooks)[0].startswith(LATE)  # applied first
    try:
        apply_hooks(once)
        assert sys.modules[LATE].second() == ["second", "hooked"]
    finally:
        sys.modules.pop(LATE, None)


@both
@pytest.mark.parametrize("wrap", [lru_cache, partial], ids=["lru_cache", "partial"])
def test_a_target_that_is_no_function(modules, wrap, once) -> None:
    """SGLang's `is_cuda` and others are such, and other plugins hook them."""
    source, importer = modules
    source.cached = importer.cached = wrap(source.first)
    hook("cached", "second")
    apply_hooks(once)
    assert source.cached() == importer.cached() == ["first", "hooked"]
    assert importer.two() == ["second", "hooked"]


@both
def test_a_module_that_grows_while_hooks_are_applied(modules, monkeypatch, tmp_path, once) -> None:
    text = f"import {IMPORTER} as grown\nfrom {SOURCE} import second\n\ngrown.late = second\n\ndef early(): return []\n"
    (tmp_path / f"{LATE}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    _, importer = modules
    importer.before_it = lambda: [0]
    HookRegistry.register(f"{IMPORTER}.before_it", marked, HookType.AFTER)  # applied first
    hook("second")
    HookRegistry.register(f"{LATE}.early", marked, HookType.AFTER)
    try:
        apply_hooks(once)
        assert importer.late() == ["second", "hooked"]
    finally:
        sys.modules.pop(LATE, None)


@both
def test_a_module_without_attributes_is_left_out(modules, monkeypatch, once) -> None:
    class Opaque(ModuleType):
        @property
        def __dict__(self):
            raise TypeError("no attributes")

    monkeypatch.setitem(sys.modules, f"{SOURCE}_opaque", Opaque("opaque"))
    hook("first")
    apply_hooks(once)
    assert modules[1].one() == ["first", "hooked"]


@both
def test_a_registry_of_another_plugin(modules, once) -> None:
    """A subclass with hooks of its own, and a wrapper that came later."""

    class Other(HookRegistry):
        _hooks, _patched = type(HookRegistry._hooks)(list), set()

    Other.register(f"{SOURCE}.second", marked, HookType.AFTER)
    hook("first")
    if once:
        search_once()
    calls, inner = [], HookRegistry.__dict__["apply_hooks"]

    def apply_and_count(cls):
        calls.append(cls)
        inner.__get__(None, cls)()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookRegistry, "apply_hooks", classmethod(apply_and_count))
        Other.apply_hooks()
        HookRegistry.apply_hooks()
        HookRegistry.apply_hooks()
    assert calls == [Other, HookRegistry, HookRegistry]
    assert modules[1].two() == ["second", "hooked"]
    assert modules[1].one() == ["first", "hooked"]


@both
def test_a_hook_on_what_another_hook_has_wrapped(modules, once) -> None:
    source, importer = modules
    importer.before_it = lambda: [0]
    HookRegistry.register(f"{IMPORTER}.before_it", marked, HookType.AFTER)
    HookRegistry.register(f"{IMPORTER}.one", lambda result: [*result, "inner"], HookType.AFTER)
    hook("first")
    apply_hooks(once)
    assert source.first() == importer.one() == ["first", "inner", "hooked"]
    assert importer.again() == ["first"]  # SGLang leaves the other names of the target's own module


def test_it_holds_for_one_call_and_leaves_sglang_as_it_was(modules) -> None:
    own = HookRegistry.__dict__["apply_hooks"], hook_registry._propagate_patch
    hook("first")
    search_once()
    assert HookRegistry.__dict__["apply_hooks"] is not own[0]
    HookRegistry.apply_hooks()
    assert (HookRegistry.__dict__["apply_hooks"], hook_registry._propagate_patch) == own


def test_modules_are_looked_at_once(modules, monkeypatch) -> None:
    looks: Counter[int] = Counter()

    class Counted(dict):
        def items(self):
            looks[id(self["module"])] += 1
            return super().items()

    def counted_vars(module: ModuleType) -> dict:
        # As many attributes as the module's own, which tell whether it has grown.
        return Counted({**module.__dict__, "module": module})

    monkeypatch.setattr(patch_scan, "vars", counted_vars, raising=False)
    hook("first", "second", "Thing.method")
    search_once()
    HookRegistry.apply_hooks()
    again = [module for module, count in looks.items() if count > 1]
    # The patched modules themselves, and what another thread imports.
    assert len(looks) > 500
    assert len(again) < 10


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
