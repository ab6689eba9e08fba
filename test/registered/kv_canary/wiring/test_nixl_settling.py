"""NIXL from 0.5.22 on: SGLang's own bounded wait settles KV and records, whichever of them fails."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.nixl import conn
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.transfer.layout import TransferLayout
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.nixl import waiting_in
from sglang_kv_canary.wiring.releases import release
from sglang_kv_canary.wiring.v0_5_22.nixl import NIXL, tells_of_success
from sglang_kv_canary.wiring.v0_5_22.nixl_notified import NIXL_NOTIFIED
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.on_releases import is_from_0_5_22
from sglang_kv_canary_rigs.pool_fixtures import make_swa_pool

if not is_from_0_5_22(release()):
    pytest.skip(
        "before 0.5.22 disaggregation is refused, or SGLang waits without a limit; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

T = TypeVar("T")

BOUND_S = 0.3
PAGES = np.array([3, 4, 7]), np.array([10, 11, 30])
# On 0.5.22 a notification goes with KV. The transfer succeeds with that of the last chunk.
NOTIFIES = not tells_of_success()
NOT_THE_LAST, THE_LAST = (["7_kv_0_0_0"], ["7_kv_0_1_0"]) if NOTIFIES else ([], [])


class _Agent:
    """NIXL's. `states` of transfers, which they have for ever. Records whose state is "" cannot be posted.

    Transfers to the second peer, and of records of the window, have names of their own.
    """

    def __init__(self, **states: str) -> None:
        self.states = states
        # Of records, by peer, in the order in which they are posted
        self.names: dict[str, list[str]] = {}
        self.posted: list[str] = []
        self.over = False  # the test is

    def get_xfer_descs(self, blocks: Any, kind: str) -> Any:
        return blocks

    def initialize_xfer(self, way: str, here: Any, there: Any, peer: str) -> str:
        return self.names[peer].pop(0) if peer in self.names else "records"

    def transfer(self, handle: str) -> str:
        if not self.states[handle]:
            return "ERR"
        self.posted.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        if self.over:
            return "DONE"
        if self.states[handle] == "unreadable":
            raise RuntimeError(f"no state of {handle}")
        return self.states[handle]

    def check_remote_metadata(self, peer: str) -> bool:
        return True


def _manager(agent: _Agent, monkeypatch: pytest.MonkeyPatch, pool: str = "mha") -> Any:
    """SGLang's of a prefill rank, as far as it posts and waits, with the canary's sender."""
    swa = make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8) if pool == "swa" else None
    rig = ManagerRig(real=swa, sliding_window_size=8 if swa else None)
    monkeypatch.setattr(context, "managers", [rig.manager])
    layout = TransferLayout.of(rig.manager.groups, 1, rig.manager.config.content_mode, 1, 1)
    peer = SimpleNamespace(
        endpoint="127.0.0.1",
        dst_port=1,
        gpu_id=0,
        dst_state_dim_per_tensor=[layout.to_wire()],
        # Of more records than any pool here has
        dst_state_data_ptrs=[[i << 40 for i in range(1, 9)]],
    )

    def send_kv(peer: str, *_: Any) -> str:
        handle = "KV" if peer == "peer" else f"KV_{peer}"
        agent.posted.append(handle)
        return handle

    manager = SimpleNamespace(
        agent=agent,
        decode_kv_args_table={"peer": peer, "second": peer},
        local_ip="127.0.0.1",
        bootstrap_port=2,
        kv_args=SimpleNamespace(engine_rank=0, gpu_id=0, state_types=[StateType.SWA]),
        send_kvcache=send_kv,
        maybe_send_extra=lambda *_: agent.posted.append("STATE") or ["STATE", None],
        **dict.fromkeys(
            (
                "add_transfer_request",
                "send_kvcache_slice",
                "send_aux",
                "conclude_transfer",
            ),
            print,
        ),
    )
    for name in ("_post_xfer", "_await_handles"):
        if (method := getattr(conn.NixlKVManager, name, None)) is not None:
            setattr(manager, name, functools.partial(method, manager))
    monkeypatch.setattr(conn.NixlKVSender, "send", conn.NixlKVSender.send)  # undone at the end
    (NIXL_NOTIFIED if NOTIFIES else NIXL).attach_sender(manager, layout)
    return manager


def _transfer(manager: Any, posts: Iterator[str]) -> tuple[bool, bool]:
    """A chunk by SGLang's transfer_worker, as far as it posts and waits. What its wait says."""
    handles: list[str] = []
    try:
        handles.extend(posts)
        failure_seen = False
    except RuntimeError:
        failure_seen = True
    return manager._await_handles(handles, failure_seen=failure_seen)


def _chunk(manager: Any, notification: list[str], peer: str = "peer") -> Iterator[str]:
    yield manager.send_kvcache(peer, PAGES[0], [], PAGES[1], 0, *notification)


def _unless_held(agent: _Agent, work: Callable[[], T]) -> T | None:
    """What `work` returns. None: it waits for a transfer without end, until the test lets it go."""
    with ThreadPoolExecutor(1) as worker:
        ended = worker.submit(work)
        done, _ = wait([ended], 30 * BOUND_S)
        agent.over = True
        result = ended.result()
    return result if done else None


def _outcome(
    agent: _Agent, monkeypatch: pytest.MonkeyPatch, notification: list[str] = NOT_THE_LAST
) -> tuple[bool, bool] | None:
    """(whether all has settled, whether anything has failed). None: the worker is held.

    What was given up is not awaited with the next chunk.
    """
    monkeypatch.setattr(conn, "NIXL_ERR_SETTLE_TIMEOUT_S", BOUND_S)
    manager = _manager(agent, monkeypatch)

    def two_chunks() -> list[tuple[bool, bool]]:
        """The second one, of the same thread, is empty."""
        return [_transfer(manager, posts) for posts in (_chunk(manager, notification), iter(()))]

    outcomes = _unless_held(agent, two_chunks)
    if outcomes is None:
        return None
    chunk, following = outcomes
    assert following == (True, False)
    return chunk


@pytest.mark.parametrize(
    ("state", "settled"), [("PROC", False), ("unreadable", False), ("DONE", True), ("ERR", True)]
)
def test_kv_whose_records_cannot_go_settles_within_sglangs_bound(
    monkeypatch: pytest.MonkeyPatch, state: str, settled: bool
) -> None:
    """The decode server is told that its slots are free only if nothing can write to them any more."""
    assert _outcome(_Agent(KV=state, records=""), monkeypatch) == (settled, True)


@pytest.mark.parametrize(
    ("kv", "records", "settled"),
    [
        ("PROC", "ERR", False),
        ("ERR", "PROC", False),
        ("DONE", "unreadable", False),
        ("DONE", "ERR", True),
        ("ERR", "DONE", True),
    ],
)
def test_kv_and_records_settle_together(
    monkeypatch: pytest.MonkeyPatch, kv: str, records: str, settled: bool
) -> None:
    """Records that may still be written belong to slots that the decode server must keep, too."""
    assert _outcome(_Agent(KV=kv, records=records), monkeypatch) == (settled, True)


@pytest.mark.skipif(not NOTIFIES, reason="0.5.23 waits for both; lifted by make test SGLANG=0.5.22")
@pytest.mark.parametrize(("records", "settled"), [("unreadable", False), ("ERR", True), ("", True)])
def test_the_last_kv_does_not_go_without_its_records(
    monkeypatch: pytest.MonkeyPatch, records: str, settled: bool
) -> None:
    """Its notification would say that they have arrived."""
    agent = _Agent(KV="DONE", records=records)
    assert _outcome(agent, monkeypatch, THE_LAST) == (settled, True)
    assert "KV" not in agent.posted


def _last_of_two(manager: Any) -> Iterator[str]:
    """The last chunk to two decode ranks, as replicas of one, or with TP that differs."""
    yield from _chunk(manager, THE_LAST)
    yield from _chunk(manager, THE_LAST, "second")


def _last_with_window(manager: Any) -> Iterator[str]:
    """The last chunk and the window's slots to one decode rank."""
    yield from _chunk(manager, THE_LAST)
    states = manager.maybe_send_extra("peer", [PAGES[0]], [], [PAGES[1]], 0, "7_state_0")
    yield from (state for state in states if state is not None)  # as SGLang does


@pytest.mark.skipif(not NOTIFIES, reason="0.5.23 waits for both; lifted by make test SGLANG=0.5.22")
@pytest.mark.parametrize(("pool", "chunk"), [("mha", _last_of_two), ("swa", _last_with_window)])
@pytest.mark.parametrize("fails", [True, False], ids=["KV fails", "clean"])
def test_records_of_a_last_chunk_are_not_awaited_after_an_error_of_its_kv(
    monkeypatch: pytest.MonkeyPatch, pool: str, chunk: Callable[[Any], Iterator[str]], fails: bool
) -> None:
    """The first KV fails, and the next records are under way for ever: a peer hangs."""
    monkeypatch.setattr(conn, "NIXL_ERR_SETTLE_TIMEOUT_S", BOUND_S)
    ended = "PROC" if fails else "DONE"
    agent = _Agent(
        KV="ERR" if fails else "DONE", KV_second="DONE", STATE="DONE", first="DONE", next=ended
    )
    agent.names = {"peer": ["first", "next"], "second": ["next"]}
    manager = _manager(agent, monkeypatch, pool)

    outcome = _unless_held(agent, lambda: _transfer(manager, chunk(manager)))
    assert outcome == ((False, True) if fails else (True, False))
    assert agent.posted[:2] == ["first", "KV"]
    assert "next" in agent.posted


@pytest.mark.parametrize(
    ("kv", "reason"),
    [("ERR", "another transfer of the chunk"), ("unreadable", "does not say what records did")],
)
def test_the_reason_says_which_transfer_has_failed(kv: str, reason: str) -> None:
    """SGLang passes it on to the decode rank."""
    agent = _Agent(KV=kv, records="PROC")
    with pytest.raises(RuntimeError, match=reason):
        waiting_in(agent, lambda: ["KV"])("records")()


@pytest.mark.parametrize("notification", [NOT_THE_LAST, THE_LAST], ids=["chunk", "last"])
def test_kv_with_its_records_settles(
    monkeypatch: pytest.MonkeyPatch, notification: list[str]
) -> None:
    agent = _Agent(KV="DONE", records="DONE")
    assert _outcome(agent, monkeypatch, notification) == (True, False)
    assert set(agent.posted) == {"KV", "records"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
