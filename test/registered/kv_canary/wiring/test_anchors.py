"""Namespaces: equal tokens under another cache salt or LoRA are another prefix."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.config import CanaryMode
from sglang_kv_canary.plan.anchor import anchor_of
from sglang_kv_canary.wiring import adapter_names
from sglang_kv_canary.wiring.adapter_names import AdapterNames
from sglang_kv_canary.wiring.adapters import knows_adapter, shared_key, shared_prefix_key
from sglang_kv_canary.wiring.anchors import update_anchors
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.rig_request import RigRequest

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")


def _request(
    row: int, extra_key: str | None, session: str | None = None, lora: str | None = None
) -> RigRequest:
    """`session`: a streaming one."""
    kept = session and SimpleNamespace(session_id=session, streaming=True)
    return RigRequest(row, extra_key=extra_key, session=kept, lora_id=lora)


def _share_prefix(rig: ManagerRig, reader_key: str | None) -> list:
    """Row 1 writes under namespace 'a'; row 2 is pointed at its slots as a prefix hit would."""
    update_anchors([rig.manager], [_request(1, "a")])
    rig.extend(1, range(20))
    update_anchors([rig.manager], [_request(2, reader_key)])
    rig.rows.req_to_token[2, :20] = rig.rows.req_to_token[1, :20]
    rig.lengths[2] = 20
    rig.extend(2, range(20, 25))
    return rig.settle()


def test_a_hit_in_the_same_namespace_is_clean() -> None:
    assert _share_prefix(ManagerRig(mode=CanaryMode.RAISE), "a") == []


@pytest.mark.parametrize("key", [None, "b"])
def test_a_hit_across_namespaces_breaks_the_chain_at_its_first_slot(key: str | None) -> None:
    violations = _share_prefix(ManagerRig(), key)
    assert {v.reasons for v in violations} == {("CHAIN",)}
    assert {v.expected_position for v in violations} == {0}


def test_a_key_that_is_no_utf8_is_a_namespace_of_its_own() -> None:
    """A client may send half of a surrogate pair. SGLang takes it for a key as any other."""
    keys = "\ud800", "\udc00", "\ufffd", "?"
    assert len({anchor_of(key) for key in keys} - {0}) == len(keys)
    rig = ManagerRig(mode=CanaryMode.RAISE)
    update_anchors([rig.manager], [_request(1, "\ud800")])
    assert int(rig.manager.state.anchors[1]) == anchor_of("\ud800")


def test_a_recycled_row_forgets_its_namespace() -> None:
    rig = ManagerRig(mode=CanaryMode.RAISE)
    update_anchors([rig.manager], [_request(1, "a")])
    update_anchors([rig.manager], [_request(1, None)])
    assert int(rig.manager.state.anchors.abs().sum()) == 0


def test_a_namespace_is_hashed_only_where_its_row_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step that prefills asks for all rows of its batch."""
    rig, hashed, sha256 = ManagerRig(mode=CanaryMode.RAISE), [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(data) or sha256(data))
    keys = ["red", "blue", "blue", None]
    for _ in range(3):
        sent = [key and "".join(key) for key in keys]  # each request has a string of its own
        update_anchors([rig.manager], [_request(row, key) for row, key in enumerate(sent, 1)])
    assert hashed == [b"red", b"blue", b"blue"]
    for key in ("green", "red"):
        update_anchors([rig.manager], [_request(1, key)])
    assert hashed[3:] == [b"green", b"red"]
    assert rig.manager.state.anchors[1:5].tolist() == [anchor_of(key) for key in keys]


@pytest.mark.parametrize(
    ("between", "later", "anchor"),
    [
        (None, _request(1, "b", "s"), "a"),
        (None, _request(1, None, "s"), "a"),
        (context.row_shortened, _request(1, "b", "s"), "a"),
        (context.row_released, _request(1, "b", "s"), "b"),
        (lambda _: context.session_rows.forget_all(), _request(1, "b", "s"), "b"),
        (None, _request(1, "b", "other"), "b"),
        (None, _request(1, "b"), "b"),
        (None, _request(1, "ared", "s", "red"), "ared"),
    ],
    ids=[
        "salt",
        "no_salt",
        "shortened",
        "given_back",
        "flushed",
        "other_session",
        "no_session",
        "adapter",
    ],
)
def test_a_turn_goes_on_in_the_namespace_of_the_sessions_row(
    between: Callable[[int], Any] | None, later: Any, anchor: str
) -> None:
    """What another adapter has computed is not what this turn's adapter would have."""
    rig = ManagerRig(mode=CanaryMode.RAISE)
    update_anchors([rig.manager], [_request(1, "a", "s")])
    if between is not None:
        between(1)
    update_anchors([rig.manager], [later])
    assert int(rig.manager.state.anchors[1]) == anchor_of(anchor)


def test_anchors_are_stable_and_distinct() -> None:
    assert anchor_of(None) == anchor_of("") == 0
    assert len({anchor_of(k) for k in ("a", "b", "ab")}) == 3
    # The value is part of the record format: it must not change silently.
    assert anchor_of("a") == -3837880752741967926


def _loaded(*names: str) -> dict[str, Any]:
    """The adapters of SGLang's LoRAManager, by ids of their own."""
    from sglang.srt.lora.lora_registry import LoRARef

    loaded = [LoRARef(lora_name=name, lora_path=f"/{name}") for name in names]
    return {adapter.lora_id: adapter for adapter in loaded}


def test_servers_that_name_an_adapter_alike_share_its_anchor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each server of a pair makes up ids. Its prefix cache has them in its keys, so the sweep translates, too."""
    anchors = []
    for _ in range(2):
        refs = _loaded("red", "blue")
        monkeypatch.setattr(context, "adapters", AdapterNames(SimpleNamespace(lora_refs=refs)))
        keys = [f"{key}{adapter}" for adapter in refs for key in ("", "salt")]
        anchors.append(
            [anchor_of(shared_prefix_key(key)) for key in (*keys, None, "salt", "0" * 32)]
        )
        requests = [(f"{key}{adapter}", adapter) for adapter in refs for key in ("", "salt")]
        requests += [(None, None), ("salt", None), ("0" * 32, None)]
        shared = [shared_key(SimpleNamespace(lora_id=adapter), key) for key, adapter in requests]
        assert [anchor_of(key) for key in shared] == anchors[-1]
        refs.clear()  # unloaded: what is cached keeps its anchor
        assert [anchor_of(shared_prefix_key(key)) for key in keys] == anchors[-1][:4]
    assert anchors[0] == anchors[1]
    assert len(set(anchors[0])) == 7
    assert anchors[0][4:] == [0, anchor_of("salt"), anchor_of("0" * 32)]


@pytest.mark.parametrize("adapter", [None, "a" * 32])
@pytest.mark.parametrize("salt", [None, "salt"])
@pytest.mark.parametrize("own", [None, "own"])
@pytest.mark.parametrize("shares_names", [False, True])
def test_a_cached_prefix_has_the_namespace_of_its_request(
    own: str | None,
    salt: str | None,
    adapter: str | None,
    shares_names: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sweep starts the chains of cached prefixes where those of their requests start."""
    if shares_names:
        refs = {} if adapter is None else {adapter: SimpleNamespace(lora_name="red")}
        monkeypatch.setattr(context, "adapters", AdapterNames(SimpleNamespace(lora_refs=refs)))
    has_salt = hasattr(RadixKey, "cache_salt")
    # Older releases, and SGLang itself for adapters, have all in one key
    parts = own, None if has_salt else salt, adapter
    extra_key = "".join(filter(None, parts)) or None
    request = _request(1, extra_key, lora=adapter)
    key = RadixKey(array("q", range(4)), extra_key)
    if has_salt:
        request.cache_salt = salt
        key = RadixKey(array("q", range(4)), extra_key, cache_salt=salt)
    namespace = release().namespace_of(request)
    assert (namespace is None) == (own is salt is adapter is None)
    assert release().namespace_of_key(key) == namespace
    assert release().namespace_of_key(key[2:]) == namespace  # a node that was split


def test_no_key_of_a_client_is_taken_for_an_adapter() -> None:
    refs = _loaded("red", "a")
    red, short = refs
    names = AdapterNames(SimpleNamespace(lora_refs=refs))
    shared = {
        names.of_request(key, adapter)
        for key, adapter in (
            (red, red),
            (f"x{red}", red),
            (f"{red}|elastic", red),  # SGLang appends to what it has appended
            (f"{red}{short}", short),
            (red, None),  # a client that guessed an id
            ("\0adapter 3:red", None),
            ("\0adapter 3:redx", None),
            ("\0adapter 0:\0adapter 3:red", None),
            (f"\0adapter 3:red{short}", short),
            ("ed" + short, short),
        )
    }
    assert len(shared) == 10
    assert names.of_request(f"{red}|elastic", red) == "\0adapter 3:red|elastic"
    assert names.of_request(None, None) is None


def test_a_request_of_an_unknown_adapter_is_known_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    refs = _loaded("red")
    request = SimpleNamespace(extra_key="x" + next(iter(refs)), lora_id=next(iter(refs)))
    monkeypatch.setattr(context, "adapters", AdapterNames(SimpleNamespace(lora_refs={})))
    assert not knows_adapter(request)
    assert knows_adapter(SimpleNamespace(extra_key="x", lora_id=None))
    context.adapters.manager.lora_refs.update(refs)
    assert knows_adapter(request)
    context.adapters.manager.lora_refs.clear()
    assert knows_adapter(request)  # unloaded since


def test_names_of_adapters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 2)
    refs = _loaded("red", "blue", "green")
    ids = list(refs)
    names = AdapterNames(SimpleNamespace(lora_refs=refs))
    for adapter in (*ids[:2], ids[0], ids[2]):
        names.name_of(adapter)
    refs.clear()
    assert [names.name_of(adapter) for adapter in ids] == ["red", None, "green"]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
