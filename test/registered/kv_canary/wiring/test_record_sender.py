"""What a prefill rank sends with KV: which memory, to whom, and what happens after an error."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.record import RECORD_BYTES
from sglang_kv_canary.transfer.layout import TransferLayout, transferred_records
from sglang_kv_canary.transfer.notice import Notice, NoticeBoard, SentChunks
from sglang_kv_canary.wiring import nixl
from sglang_kv_canary.wiring.arrivals import news
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.mooncake import MOONCAKE
from sglang_kv_canary.wiring.nixl_notices import without_notice
from sglang_kv_canary.wiring.record_sender import RecordSender, Sides, at_once
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.v0_5_22 import nixl_notified
from sglang_kv_canary.wiring.v0_5_22.nixl import Awaited
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.on_releases import with_disaggregation
from sglang_kv_canary_rigs.pool_fixtures import make_nsa_pool, one_rank

register_cpu_ci(est_time=8, suite="stage-a-test-cpu")

pytestmark = with_disaggregation
KEYS = "dsa" if release().has_own_canary else "nsa"  # SGLang's name
THERE = (1 << 40, 1 << 41)  # K's and V's records at the peer
PAGES = np.array([3, 4, 7]), np.array([10, 11, 30])


class _Lost(Exception):
    """An error of the transport."""


@pytest.fixture
def sender_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RecordSender]:
    """A sender with a `post`, whose peers are `alike`, `other`, `older`, `drafting`, and `none` without a canary."""
    rig = ManagerRig()
    monkeypatch.setattr(context, "managers", [rig.manager])
    layout = TransferLayout.of(rig.manager.groups, 1, rig.manager.config.content_mode, 1, 1)
    layout = replace(layout, heeds_damage=1)
    monkeypatch.setattr(context, "sent_chunks", SentChunks())

    def peer(layouts: list[list[int]]) -> SimpleNamespace:
        return SimpleNamespace(
            endpoint="127.0.0.1",
            dst_port=1,
            dst_state_dim_per_tensor=layouts,
            dst_state_data_ptrs=[[*THERE]],
        )

    kv_manager = SimpleNamespace(
        decode_kv_args_table={
            **{name: peer([layout.to_wire()]) for name in ("alike", "other")},
            "older": peer([replace(layout, heeds_damage=0).to_wire()]),
            "drafting": peer(
                [replace(layout, pp_size=2, draft_groups=2, draft_layers=2).to_wire()]
            ),
            "none": peer([]),
        },
        local_ip="127.0.0.1",
        bootstrap_port=2,
        kv_args=SimpleNamespace(engine_rank=0),
    )

    def sender(post: Callable[..., Any], kv_manager: SimpleNamespace, layout: TransferLayout):
        return RecordSender(kv_manager, layout, post, (_Lost,))

    return functools.partial(sender, kv_manager=kv_manager, layout=layout)


def _blocks_of_pages() -> list[tuple[int, int, int]]:
    """(address here, address there, bytes) of the records of PAGES."""
    here = [records.data_ptr() for _, records in transferred_records(context.target.groups)]
    return [
        (mine + RECORD_BYTES * first, theirs + RECORD_BYTES * to, RECORD_BYTES * count)
        for mine, theirs in zip(here, THERE, strict=True)
        for first, to, count in ((3, 10, 2), (7, 30, 1))
    ]


def test_records_of_pages_go_to_the_same_pages(sender_of: Callable[..., RecordSender]) -> None:
    written: list[Sequence[tuple[int, int, int]]] = []

    def post(_: str, sides: Sides) -> Callable[[], int]:
        pairs = zip(*(side.tolist() for side in sides), strict=True)
        assert all(here[1] == there[1] for here, there in pairs)
        written.append([(a, b, size) for (a, size, _), (b, _, _) in zip(*sides, strict=True)])
        return at_once

    sender = sender_of(post)
    assert sender.send("alike", *PAGES) == 0
    assert written == [_blocks_of_pages()]
    notice = sender.notice("alike", 7)
    assert (notice.has_records, notice.keeps_content, notice.why) == (True, True, "")


def _manager_of_keys(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> tuple[SimpleNamespace, TransferLayout, ManagerRig]:
    """A KV manager of a server with index keys, which sends to `peer`. `state`: SGLang's name of the keys."""
    with one_rank():
        rig = ManagerRig(real=make_nsa_pool())
    monkeypatch.setattr(context, "managers", [rig.manager])
    monkeypatch.setattr(context, "sent_chunks", SentChunks())
    layout = TransferLayout.of(rig.manager.groups, 64, rig.manager.config.content_mode, 1, 1)
    peer = SimpleNamespace(
        endpoint="127.0.0.1",
        dst_port=1,
        dst_state_dim_per_tensor=[[], layout.to_wire()],
        dst_state_data_ptrs=[[], [*THERE]],
    )
    kv_manager = SimpleNamespace(
        decode_kv_args_table={"peer": peer},
        local_ip="127.0.0.1",
        bootstrap_port=2,
        kv_args=SimpleNamespace(engine_rank=0, state_types=[SimpleNamespace(value=state)]),
    )
    return kv_manager, layout, rig


@pytest.mark.parametrize("state", ["nsa", "dsa"])
def test_records_of_index_keys_go_with_the_keys(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """SGLang sends all of them with the last chunk. By then the prefix cache may have re-pointed pages."""
    kv_manager, layout, rig = _manager_of_keys(monkeypatch, state)
    posted: list[tuple[list[int], list[int]]] = []

    def post(_: str, sides: Sides) -> Callable[[], int]:
        posted.append(tuple(side[:, 0].tolist() for side in sides))
        return lambda: -len(posted)

    def places(group: int, here: int, there: int) -> tuple[list[int], list[int]]:
        records = rig.manager.groups[group].k_tail
        page = 64 * RECORD_BYTES
        return [records.data_ptr() + page * here], [THERE[group] + page * there]

    sender = RecordSender(kv_manager, layout, post)
    assert [group.kind.value for group in rig.manager.groups] == ["FULL", "INDEXER"]
    assert sender.send("peer", np.array([1]), np.array([5])) == -1
    assert sender.send_states("peer", [np.array([2])], [np.array([6])]) == -2
    assert posted == [places(0, 1, 5), places(1, 2, 6)]
    assert sender.send_states("peer", [None], [np.array([6])]) == 0
    assert sender.send_states("peer", [np.array([], int)], [np.array([6])]) == 0
    assert len(posted) == 2


@pytest.mark.parametrize("status", [0, -1])
def test_mooncake_sends_records_of_index_keys_before_the_keys(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """Late records alone would overwrite those of right keys. The peer learns that no keys have followed."""
    manager, layout, _ = _manager_of_keys(monkeypatch, KEYS)
    order: list[str] = []
    told: list[Notice] = []

    def says(name: str, answer: int) -> Callable[..., int]:
        return lambda *_: order.append(name) or answer

    manager._transfer_data, manager.maybe_send_extra = says("records", 0), says("keys", status)
    for name in ("send_kvcache", "send_kvcache_slice", "send_aux"):
        setattr(manager, name, says(name, 0))
    manager.AUX_DATA_HEADER = b"AUX"
    socket = SimpleNamespace(send_multipart=lambda message: told.append(message[-1]))
    manager._connect = lambda *_, **__: socket
    manager._send_multipart_locked = lambda _, message, **__: told.append(message[-1])
    MOONCAKE.attach_sender(manager, layout)
    request = SimpleNamespace(
        mooncake_session_id="peer",
        room=5,
        endpoint="127.0.0.1",
        dst_port=1,
        dst_state_indices=[np.array([6])],
    )
    for _ in range(2):
        order.clear()
        assert manager.maybe_send_extra(request, [np.array([2])]) == status
        assert order == ["records", "keys"]
        assert manager.send_aux(request) == 0
    lost = (
        status != 0 and release().transfers.ignores_lost_states
    )  # newer releases fail such a request
    assert [Notice.from_wire(data).lost_states for data in told] == 2 * [lost]


def test_a_peer_without_a_canary_gets_nothing(
    sender_of: Callable[..., RecordSender], caplog: pytest.LogCaptureFixture
) -> None:
    sender = sender_of(lambda *_: pytest.fail("nothing is posted"))
    for _ in range(2):
        assert sender.send("none", *PAGES) == 0
        assert sender.notice("none", 7) is None
    assert caplog.text.count("has no canary of this kind") == 1


def test_layers_that_sglang_may_mix_up_are_told_on_both_servers(
    sender_of: Callable[..., RecordSender], caplog: pytest.LogCaptureFixture
) -> None:
    """The decode server alone has a draft model, and another number of stages."""
    sender = sender_of(lambda *_: at_once)
    for _ in range(2):
        assert sender.send("drafting", *PAGES) == 0
        notice = sender.notice("drafting", 7)
        assert (notice.has_records, notice.keeps_content) == (True, False)
        assert "may write layers of a stage to others" in notice.why
    assert caplog.text.count("KV for the decode server at 127.0.0.1:1 may be wrong") == 1
    assert caplog.text.count("draft model. Give both servers a draft model, or neither") == 1
    assert sender.notice("alike", 7).why == ""


@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.parametrize("peer", ["alike", "older", "none"])
def test_mooncake_fails_what_a_peer_cannot_be_told_of(
    peer: str, damaged: bool, sender_of: Callable[..., RecordSender]
) -> None:
    """Whoever knows what such a notice means gets one, and SGLang's success."""
    told: list[Notice] = []
    manager, layout = sender_of.keywords["kv_manager"], sender_of.keywords["layout"]
    manager.AUX_DATA_HEADER, manager._transfer_data = b"AUX", None
    for name in ("send_kvcache", "send_kvcache_slice", "maybe_send_extra"):
        setattr(manager, name, lambda *_: 0)
    manager.send_aux = lambda *_: 0
    socket = SimpleNamespace(send_multipart=lambda message: told.append(message[-1]))
    manager._connect = lambda *_, **__: socket
    manager._send_multipart_locked = lambda _, message, **__: told.append(message[-1])
    MOONCAKE.attach_sender(manager, layout)
    context.sent_chunks.note(5, "r-5", 0, "")
    assert not damaged or context.sent_chunks.fail(5, "r-5", "damage")
    request = SimpleNamespace(
        mooncake_session_id=peer, room=5, endpoint="127.0.0.1", dst_port=1, dst_state_indices=[]
    )
    # Newer releases fail it without being asked for its last part, see test_pairs_of_newer_releases.py.
    must_fail = damaged and peer != "alike" and not release().transfers.fails_damaged
    assert manager.send_aux(request) == (-1 if must_fail else 0)
    assert [Notice.from_wire(data).damage for data in told] == (
        [] if peer == "none" else ["damage" if damaged else ""]
    )
    assert context.sent_chunks.has_gone(5, "r-5") is not damaged


def test_kv_goes_from_the_pages_that_its_records_have_gone_from(
    sender_of: Callable[..., RecordSender],
) -> None:
    """On a CPU, SGLang's pages are a part of req_to_token. The prefix cache re-points the last one meanwhile."""
    manager, layout = sender_of.keywords["kv_manager"], sender_of.keywords["layout"]
    row, gone, sent = np.array([1, *PAGES[0]]), [], []

    def transfer(session: str, blocks: list[tuple[int, int, int]]) -> int:
        assert not gone, "records go first"
        sent.extend(blocks)
        row[-1] = 9
        return 0

    def send_kv(session: str, pages: np.ndarray, *_: Any) -> int:
        gone.extend(pages.tolist())
        return 0

    manager._transfer_data = transfer
    for name in ("send_kvcache", "send_kvcache_slice", "maybe_send_extra", "send_aux"):
        setattr(manager, name, send_kv)
    MOONCAKE.attach_sender(manager, layout)
    assert manager.send_kvcache("alike", row[1:], [], PAGES[1]) == 0
    assert gone == PAGES[0].tolist()
    assert sent == _blocks_of_pages()


def test_the_status_of_the_transport_counts(sender_of: Callable[..., RecordSender]) -> None:
    assert sender_of(lambda *_: lambda: -3).send("alike", *PAGES) == -3


def test_errors_of_the_transport_are_sglangs(sender_of: Callable[..., RecordSender]) -> None:
    """It fails the request, and the next one is sent with records."""
    answers = iter([_Lost("the peer is gone"), at_once])

    def post(*_: object) -> Callable[[], int]:
        answer = next(answers)
        if isinstance(answer, _Lost):
            raise answer
        return answer

    sender = sender_of(post)
    with pytest.raises(_Lost):
        sender.send("alike", *PAGES)
    assert sender.send("alike", *PAGES) == 0
    assert sender.notice("alike", 7).has_records


def test_after_an_error_of_ours_kv_goes_on_without_records(
    sender_of: Callable[..., RecordSender], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def post(peer: str, _: object) -> Callable[[], int]:
        calls.append(peer)
        if peer == "alike":
            raise KeyError("ours")
        return at_once

    sender = sender_of(post)
    assert [sender.send("alike", *PAGES) for _ in range(2)] == [0, 0]
    assert calls == ["alike"]
    notice = sender.notice("alike", 7)
    assert (notice.has_records, notice.keeps_content) == (False, False)
    assert notice.why == "an internal error of the sender's canary: KeyError"
    assert caplog.text.count("sending records to the decode rank alike has failed") == 1
    # Another peer goes on to get them.
    assert sender.send("other", *PAGES) == 0
    assert calls == ["alike", "other"]
    assert sender.notice("other", 8).has_records


@pytest.mark.parametrize("known", [False, True])
def test_a_peer_that_nixl_has_dropped_is_no_error_of_ours(known: bool) -> None:
    """After a disconnect NIXL knows the peer no more. SGLang's own transfers to it fail, too."""
    agent, error = SimpleNamespace(check_remote_metadata=lambda _: known), KeyError("NOT_FOUND")
    expected = contextlib.nullcontext() if known else pytest.raises(nixl._TransferFailed)
    with expected:
        nixl._raise_if_dropped(agent, "alike", error)


class _Agent:
    """NIXL's, with transfers that are under way until they have been asked for `asked` times, and then `end`."""

    def __init__(self, **ends: str) -> None:
        self.ends = ends
        self.asked: list[str] = []

    def check_xfer_state(self, handle: str) -> str:
        self.asked.append(handle)
        return "PROC" if self.asked.count(handle) < 3 else self.ends[handle]


@pytest.mark.parametrize("is_newer", [False, True])
def test_a_transfer_that_cannot_begin_is_an_error_of_the_transport(is_newer: bool) -> None:
    """From 0.5.23 on SGLang posts: after its own error the decode server keeps the slots for a while."""

    class PostError(RuntimeError):
        pass

    def post_xfer(handle: str, why: str) -> None:
        assert agent.transfer(handle) == "ERR"
        raise PostError(why)

    agent = SimpleNamespace(
        get_xfer_descs=lambda blocks, kind: (blocks.shape, kind),
        initialize_xfer=lambda *what: "handle",
        transfer=lambda handle: "ERR",
    )
    kv_manager = SimpleNamespace(
        agent=agent,
        **({"_post_xfer": post_xfer} if is_newer else {}),
    )
    sides = np.ones((2, 3), dtype=np.uint64), np.ones((2, 3), dtype=np.uint64)
    with pytest.raises(PostError if is_newer else nixl._TransferFailed, match="cannot begin"):
        nixl._post(kv_manager, "peer", sides)


class _Nixl:
    """NIXL's agent, as far as the sender of records asks it. Transfers are over at once."""

    def __init__(self, works: bool) -> None:
        self.works, self.posted = works, []

    def get_xfer_descs(self, blocks: Any, kind: str) -> Any:
        return blocks

    def initialize_xfer(self, way: str, here: Any, there: Any, peer: str) -> str:
        if not self.works:
            raise ValueError("an error that no transport has")
        return "records"

    def transfer(self, handle: str) -> str:
        self.posted.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        return "DONE"

    def check_remote_metadata(self, peer: str) -> bool:
        return True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def _send_by(kv_manager: Any, agent: _Nixl, send: Callable[..., str]) -> None:
    """Make `send` SGLang's `send_kvcache`. Nothing else is sent."""
    for name in ("send_kvcache_slice", "maybe_send_extra", "send_aux"):
        setattr(kv_manager, name, lambda *_: None)
    kv_manager.agent, kv_manager.send_kvcache = agent, send
    kv_manager.kv_args.gpu_id = 0
    for registration in kv_manager.decode_kv_args_table.values():
        registration.gpu_id = 0


@pytest.mark.parametrize("works", [True, False])
def test_the_last_notification_of_0_5_22_says_whether_records_have_gone(
    sender_of: Callable[..., RecordSender], monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    """The manager is a stand-in, because that release is not installed here."""
    kv_manager, agent = sender_of.keywords["kv_manager"], _Nixl(works)
    told: list[str] = []

    def send(peer: str, source: Any, pointers: Any, target: Any, gpu: int, notification: str):
        told.append(notification)
        agent.posted.append("KV")
        return "KV"

    _send_by(kv_manager, agent, send)
    kv_manager._await_handles = print
    monkeypatch.setattr(nixl_notified, "_note_events", lambda _: None)
    nixl_notified.NIXL_NOTIFIED.attach_sender(kv_manager, sender_of.keywords["layout"])
    kv_manager.send_kvcache("alike", PAGES[0], [], PAGES[1], 0, "7_kv_0_1_0")
    board = NoticeBoard()
    assert without_notice(told[0].encode(), board) == b"7_kv_0_1_0"
    notice = board.take(7)
    assert notice.has_records is works
    assert agent.posted == (["records", "KV"] if works else ["KV"])
    assert ("internal error" in notice.why) is not works


def _sending_on_0_5_12(sender_of: Callable[..., RecordSender], agent: _Nixl) -> Callable[..., str]:
    """SGLang's `send_kvcache` of PAGES, with our records. Returns the notification that goes with KV.

    It describes memory of the host, in which records cannot travel.
    """
    from sglang_kv_canary.wiring.v0_5_12.nixl import NIXL

    kv_manager = sender_of.keywords["kv_manager"]

    def send(peer: str, source: Any, pointers: Any, target: Any, gpu: int, notification: str):
        agent.get_xfer_descs(np.ones((1, 3), np.uint64), "DRAM")
        told.append(notification)
        agent.posted.append("KV")
        return "KV"

    told: list[str] = []
    _send_by(kv_manager, agent, send)
    NIXL.attach_sender(kv_manager, sender_of.keywords["layout"])

    def send_pages(notification: str = "7_kv_0_1_0") -> str:
        kv_manager.send_kvcache("alike", PAGES[0], [], PAGES[1], 0, notification)
        return told[-1]

    return send_pages


def _told(notification: str) -> Notice:
    board = NoticeBoard()
    assert without_notice(notification.encode(), board) == b"7_kv_0_1_0"
    return board.take(7)


def test_records_that_cannot_travel_with_kv_go_beside_it(
    sender_of: Callable[..., RecordSender],
) -> None:
    agent = _Nixl(works=True)
    assert _told(_sending_on_0_5_12(sender_of, agent)()).has_records
    assert agent.posted == ["KV", "records"]


def test_a_request_fails_whose_notice_says_that_records_come(
    sender_of: Callable[..., RecordSender], caplog: pytest.LogCaptureFixture
) -> None:
    """On 0.5.12.post1 the notice goes with KV. So an error of ours comes too late to take it back."""
    agent = _Nixl(works=False)
    send_pages = _sending_on_0_5_12(sender_of, agent)
    with pytest.raises(nixl._TransferFailed, match="announced"):
        send_pages()
    assert agent.posted == ["KV"]
    assert caplog.text.count("sending records to the decode rank alike has failed") == 1
    # The next one goes without records, and says so.
    notice = _told(send_pages())
    assert (notice.has_records, "internal error" in notice.why) == (False, True)
    assert agent.posted == ["KV", "KV"]


def test_a_request_goes_on_if_its_notice_is_still_to_come(
    sender_of: Callable[..., RecordSender],
) -> None:
    """The notice goes with the last chunk, and says that records are missing."""
    send_pages = _sending_on_0_5_12(sender_of, _Nixl(works=False))
    assert send_pages("7_kv_0_0_0") == "7_kv_0_0_0"
    notice = _told(send_pages())
    assert (notice.has_records, "internal error" in notice.why) == (False, True)


class _Describing:
    """NIXL's agent, as far as descriptors go."""

    def __init__(self) -> None:
        self.described: list[tuple[list[list[int]], str]] = []

    def get_xfer_descs(self, blocks: np.ndarray, kind: str) -> None:
        self.described.append((blocks.tolist(), kind))


SIDES = np.array([[1, 32, 0]], np.uint64), np.array([[2, 32, 1]], np.uint64)


def test_records_travel_in_the_first_transfer_of_kv() -> None:
    agent = _Describing()
    passenger = nixl.Passenger(agent)

    def post_kv() -> str:
        for address, kind in ((7, "DRAM"), (8, "VRAM"), (9, "VRAM"), (10, "VRAM"), (11, "VRAM")):
            agent.get_xfer_descs(np.array([[address, 64, 0]], np.uint64), kind)
        return "kv"

    assert passenger.carry(post_kv, SIDES, lambda: pytest.fail("posted twice")) == "kv"
    assert post_kv() == "kv"
    kv = {address: [[address, 64, 0]] for address in range(7, 12)}
    carried = {8: [*kv[8], [1, 32, 0]], 9: [*kv[9], [2, 32, 1]]}
    assert [blocks for blocks, _ in agent.described] == [*{**kv, **carried}.values(), *kv.values()]


def test_another_thread_s_transfer_takes_nothing_along() -> None:
    agent = _Describing()
    passenger = nixl.Passenger(agent)

    def describe() -> None:
        agent.get_xfer_descs(np.array([[8, 64, 0]], np.uint64), "VRAM")

    def post_kv() -> str:
        other = threading.Thread(target=describe)
        other.start()
        other.join()
        return "kv"

    posted: list[str] = []
    assert passenger.carry(post_kv, SIDES, lambda: posted.append("records")) == "kv"
    assert (posted, agent.described) == (["records"], [([[8, 64, 0]], "VRAM")])


def test_after_an_error_of_kv_the_next_transfer_takes_nothing_along() -> None:
    agent = _Describing()
    passenger = nixl.Passenger(agent)

    def post_kv() -> str:
        raise KeyError("SGLang's")

    with pytest.raises(KeyError):
        passenger.carry(post_kv, SIDES, lambda: pytest.fail("KV was not posted"))
    agent.get_xfer_descs(np.array([[8, 64, 0]], np.uint64), "VRAM")
    assert agent.described == [([[8, 64, 0]], "VRAM")]


@pytest.mark.parametrize("handle", ["kv", ["kv"]])
def test_after_an_error_of_records_no_kv_is_under_way(handle: str | list[str]) -> None:
    agent = _Agent(records="ERR", kv="DONE")
    with pytest.raises(nixl._TransferFailed):
        nixl.beside(lambda: handle, nixl.waiting_in(agent)("records"), nixl.settling_in(agent))
    assert agent.asked == ["records"] * 3 + ["kv"] * 3


def test_nobody_is_told_of_records_that_may_not_have_come() -> None:
    agent = _Agent()  # it knows no such transfer
    with pytest.raises(nixl._TransferFailed):
        nixl.waiting_in(agent)("records")()


def test_newer_releases_wait_for_records_with_kv() -> None:
    waits: list[tuple[list[str], bool]] = []
    awaited = Awaited()
    assert awaited.posted("records")() == 0

    def await_handles(handles: list[str], *, failure_seen: bool) -> tuple[bool, bool]:
        waits.append((handles, failure_seen))
        return True, False

    other = threading.Thread(
        target=lambda: awaited.with_ours(await_handles, ["other"], failure_seen=False)
    )
    other.start()
    other.join()
    for handles in (["kv", "aux"], []):
        assert awaited.with_ours(await_handles, handles, failure_seen=True) == (True, False)
    assert waits == [(["other"], False), (["kv", "aux", "records"], True), ([], True)]


def test_an_error_of_ours_at_the_end_of_a_transfer_does_not_reach_sglang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NIXL from 0.5.23 on, before the peers are known."""
    from sglang.srt.disaggregation.base import KVPoll
    from sglang_kv_canary.wiring.v0_5_22.nixl import NIXL

    rig, ended = ManagerRig(), []
    monkeypatch.setattr(context, "managers", [rig.manager])
    sends = ("add_transfer_request", "send_kvcache", "send_kvcache_slice", "maybe_send_extra")
    kv_manager = SimpleNamespace(
        **dict.fromkeys(sends, print),
        _await_handles=print,
        conclude_transfer=lambda **what: ended.append(what),
        transfer_infos=None,
        agent=None,
    )
    layout = TransferLayout.of(rig.manager.groups, 1, rig.manager.config.content_mode, 1, 1)
    layout = replace(layout, heeds_damage=1)
    monkeypatch.setattr(context, "sent_chunks", SentChunks())
    NIXL.attach_sender(kv_manager, layout)
    for _ in range(2):
        kv_manager.conclude_transfer(status=KVPoll.Success, bootstrap_room=7)
    assert len(ended) == 2
    assert caplog.text.count("decode rank that a transfer goes to has failed") == 1


class _SlowName(str):
    """Other threads run whenever a table asks for its hash, as they may on any machine."""

    __slots__ = ()

    def __hash__(self) -> int:
        time.sleep(0.0005)
        return super().__hash__()


def test_threads_that_count_the_same_say_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's threads count states that were not sent. Each number is one thread's, so none is said twice."""
    monkeypatch.setattr(context, "told", type(context.told)())
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda _: news(_SlowName("peer"), "what"), range(104)))
    assert sorted(said, reverse=True)[:3] == [100, 1, 0]


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
