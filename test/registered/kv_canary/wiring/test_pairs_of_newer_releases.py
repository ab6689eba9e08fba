"""SGLANG_KV_CANARY_ACTION=abort on prefill and decode servers of 0.5.22 and later."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release

if "v0_5_22.action" not in release().hook_modules:
    pytest.skip(
        "this release fails transfers in another way; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.fake.conn import FakeKVSender
from sglang_kv_canary.runner.damage_desk import Damage, Reader
from sglang_kv_canary.wiring.containment.containment import Containment, _Live
from sglang_kv_canary.wiring.containment.prefixes import NoPrefixes
from sglang_kv_canary.wiring.containment.withheld_slots import WithheldSlots
from sglang_kv_canary.wiring.v0_5_22.action import HOOKS, TERMS
from sglang_kv_canary.wiring.v0_5_22.namespace import as_sent
from sglang_kv_canary.wiring.v0_5_22.namespaces import Namespaces
from sglang_kv_canary.wiring.v0_5_22.pairs import fail_damaged, for_server_of
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")


class Manager:
    """SGLang's of a prefill rank: what it is told of the end of a transfer."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def conclude_transfer(self, **what: Any) -> None:
        self.told.append(what)


def test_the_transfer_of_a_request_that_has_read_damage_fails_and_says_why() -> None:
    manager = Manager()
    fail_damaged(manager)
    for room, rid in ((1, "ada"), (2, "bob")):
        context.sent_chunks.note(room, rid, 0, "")
    assert context.sent_chunks.fail(1, "ada", "damage")
    for room in (1, 2):
        manager.conclude_transfer(bootstrap_room=room, status=KVPoll.Success)
    assert [told["status"] for told in manager.told] == [KVPoll.Failed, KVPoll.Success]
    assert manager.told[0]["failure_reason"] == "kv-canary: damage"
    assert not context.sent_chunks.fail(2, "bob", "late")  # it has gone


@pytest.mark.parametrize(("host", "status"), [("2.2.2.2", "Failed"), ("10.0.0.1", "Success")])
def test_a_sender_fails_by_itself_only_if_there_is_no_decode_server(host: str, status: str) -> None:
    """A rank that sends nothing succeeds at once. If it failed, the part of another rank would never go."""
    request = SimpleNamespace(
        rid="ada",
        bootstrap_room=1,
        bootstrap_host=host,
        disagg_kv_sender=FakeKVSender(None, "", 1),
    )
    terms = for_server_of(_server("prefill"), TERMS)
    assert terms.end_running(request, "damage")
    request.disagg_kv_sender.send(None)
    assert request.disagg_kv_sender.poll() == getattr(KVPoll, status)
    with pytest.raises(RuntimeError, match="kv-canary: damage"):
        request.disagg_kv_sender.failure_exception()


def _server(mode: str) -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode=mode))


def test_a_failure_of_another_kind_stays_what_it_is() -> None:
    manager = Manager()
    fail_damaged(manager)
    context.sent_chunks.note(1, "ada", 0, "")
    context.sent_chunks.fail(1, "ada", "damage")
    manager.conclude_transfer(bootstrap_room=1, status=KVPoll.Failed, failure_reason="the link")
    assert manager.told[0]["failure_reason"] == "the link"


@pytest.mark.parametrize("key", [None, "tenant", "\x1fof a client"])
def test_chains_of_a_pair_start_as_if_no_cache_had_been_dropped(key: str | None) -> None:
    request = SimpleNamespace(
        extra_key=key, cache_salt=None, lora_id=None, kv=SimpleNamespace(req_pool_idx=None)
    )
    cache = Namespaces(SimpleNamespace(waiting_queue=[]), "\x1fkv-canary 0123 ", epoch=3)
    cache.admit(request)
    assert request.extra_key != key
    assert as_sent(request.extra_key) == key
    assert release().namespace_of(request) == request.extra_key
    context.is_of_pair = True
    assert release().namespace_of(request) == key
    # SGLang sends the decode server's own key when the prefill server computes the request again.
    again = Namespaces(SimpleNamespace(waiting_queue=[]), "\x1fkv-canary 4567 ", epoch=1)
    again.admit(request)
    assert request.extra_key.count("kv-canary") == 2
    assert as_sent(request.extra_key) == release().namespace_of(request) == key


def _containment(scheduler: Any, terms: Any) -> Containment:
    manager = ManagerRig().manager
    return Containment(
        scheduler=scheduler,
        manager=manager,
        desk=manager.expect_action(),
        prefixes=NoPrefixes(),
        withheld=WithheldSlots({}),
        owned=None,
        terms=terms,
    )


@pytest.mark.parametrize("queue", ["waiting", "bootstrap", "none"])
def test_nobody_ends_for_an_optimistic_prefill_that_was_thrown_away(queue: str) -> None:
    """It has yielded its slots, and begins again. A request that is gone had its answer."""
    ada = SimpleNamespace(rid="ada", is_retracted=True, kv=SimpleNamespace(req_pool_idx=None))
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        waiting_queue=[ada] if queue == "waiting" else [],
        disagg_prefill_bootstrap_queue=SimpleNamespace(queue=[ada] if queue == "bootstrap" else []),
        disagg_prefill_inflight_queue=[],
        chunked_req=None,
        collect_inflight_reqs=list,
    )
    containment = _containment(scheduler, for_server_of(scheduler, TERMS))
    verdict = containment.judge(Damage(readers=(Reader("ada", 3, 7, 5, ("CONTENT",)),)))
    assert (verdict.running, verdict.waiting) == ({}, {})
    assert [*verdict.answered] == (["ada"] if queue == "none" else [])
    assert verdict.computed == {"ada": 5}  # it may be cached


@pytest.mark.parametrize(
    ("start", "key", "length", "ends"),
    [
        (4, None, 8, True),
        (6, None, 8, False),  # what bob has computed follows another token
        (4, None, 4, False),  # so far nothing is promised
        (4, "tenant", 8, False),
        (4, None, 0, False),
    ],
)
def test_a_promised_prefix_that_was_computed_from_damage_ends_its_request(
    start: int, key: str | None, length: int, ends: bool
) -> None:
    """A decode server has told the prefill server of it, and no row has it yet."""
    ada = SimpleNamespace(rid="ada", extra_key=key, origin_input_ids=[1, 2, 3, 4, 5, 6, 70, 80, 90])
    bob = SimpleNamespace(
        rid="bob", extra_key=None, origin_input_ids=[1, 2, 3, 4, 5, 6], output_ids=[7, 8, 9]
    )
    match = SimpleNamespace(needs_local_restore=length > 0, decode_prefix_len=length)
    waiting = SimpleNamespace(req=ada, prefix_match=match)
    prealloc = SimpleNamespace(queue=[], retracted_queue=[], held_rebootstrap_reqs=[])
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="decode"),
        waiting_queue=[],
        disagg_decode_prealloc_queue=prealloc,
        disagg_decode_transfer_queue=SimpleNamespace(queue=[waiting]),
    )
    containment = _containment(scheduler, for_server_of(scheduler, TERMS))
    live = [_Live(bob, 3, 9)]
    assert set(containment._promised_damage(live, {"bob": start})) == ({"ada"} if ends else set())
    assert not set(containment._promised_damage(live, {"cat": start}))


def test_nothing_slides_out_of_the_window_of_a_wrong_row() -> None:
    containment = _containment(None, TERMS)
    (hook,) = (hook for hook in HOOKS if hook.target.endswith(".evict_sliding_windows"))
    slid: list[str] = []

    def slide(_: Any, request: Any, length: int) -> None:
        slid.append(request.rid)

    ada, bob = (SimpleNamespace(rid=rid) for rid in ("ada", "bob"))
    containment._misled.add("ada")
    context.containment = containment
    try:
        for request in (ada, bob):
            hook.fn(slide, None, request, 40)
    finally:
        context.containment = None
    hook.fn(slide, None, ada, 40)
    assert slid == ["bob", "ada"]


def test_a_decode_server_ends_who_is_to_be_computed_again_and_who_waits_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    ada, bob, cat = (
        SimpleNamespace(rid=rid, kv=SimpleNamespace(retraction_backup="bytes"), to_finish=None)
        for rid in ("ada", "bob", "cat")
    )
    queue = SimpleNamespace(
        retracted_queue=[ada],
        held_rebootstrap_reqs=[bob],
        queue=[
            SimpleNamespace(req=cat, is_rebootstrap=True),
            SimpleNamespace(req=None, is_rebootstrap=False),
        ],
    )
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(disaggregation_mode="decode"),
        disagg_decode_prealloc_queue=queue,
        tree_cache=None,
        _release_aborted_request=lambda request: None,
        send_abort_output=lambda answer, request: told.append(request.rid),
    )
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_disagg",
        lambda: SimpleNamespace(disaggregation_decode_retraction_backup="cpu_tensor"),
    )
    monkeypatch.setattr("sglang.srt.managers.scheduler._make_abort_req", lambda *a, **k: None)
    terms = for_server_of(scheduler, TERMS)
    assert terms.retracted(scheduler) == [ada, bob, cat]
    for request in (ada, bob, cat):
        terms.end_waiting(scheduler, request, "damage")
    assert (told, queue.retracted_queue, ada.kv.retraction_backup) == (["ada"], [], None)
    assert [r.to_finish and r.to_finish.message for r in (ada, bob, cat)] == [
        None,
        "kv-canary: damage",
        "kv-canary: damage",
    ]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
