"""NIXL on 0.5.23: after an error of records SGLang's own bounded wait settles the KV that was posted before them."""

from __future__ import annotations

import functools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.nixl import conn
from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.transfer.layout import TransferLayout
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.v0_5_22.nixl import NIXL
from sglang_kv_canary_rigs.manager_rig import ManagerRig

if not hasattr(conn, "_NixlPostError"):
    pytest.skip(
        "before 0.5.23 SGLang waits without a limit, or posts in other ways; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

BOUND_S = 0.3
PAGES = np.array([3, 4, 7]), np.array([10, 11, 30])


class _Agent:
    """NIXL's. KV is in `state` for ever, and records cannot be posted."""

    def __init__(self, state: str, posts_records: bool = False) -> None:
        self.state = state
        self.posts_records = posts_records
        self.over = False  # the test is

    def get_xfer_descs(self, blocks: Any, kind: str) -> Any:
        return blocks

    def initialize_xfer(self, way: str, here: Any, there: Any, peer: str) -> str:
        return "records"

    def transfer(self, handle: str) -> str:
        return "PROC" if self.posts_records else "ERR"

    def check_xfer_state(self, handle: str) -> str:
        if self.over:
            return "DONE"
        if self.state == "unreadable":
            raise RuntimeError(f"no state of {handle}")
        return self.state

    def check_remote_metadata(self, peer: str) -> bool:
        return True


def _manager(agent: _Agent, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's of a prefill rank, as far as it posts and waits, with the canary's sender."""
    rig = ManagerRig()
    monkeypatch.setattr(context, "managers", [rig.manager])
    layout = TransferLayout.of(rig.manager.groups, 1, rig.manager.config.content_mode, 1, 1)
    peer = SimpleNamespace(
        endpoint="127.0.0.1",
        dst_port=1,
        gpu_id=0,
        dst_state_dim_per_tensor=[layout.to_wire()],
        dst_state_data_ptrs=[[1 << 40, 1 << 41]],
    )
    manager = SimpleNamespace(
        agent=agent,
        decode_kv_args_table={"peer": peer},
        local_ip="127.0.0.1",
        bootstrap_port=2,
        kv_args=SimpleNamespace(engine_rank=0, gpu_id=0),
        send_kvcache=lambda *_: "KV",
        **dict.fromkeys(
            ("add_transfer_request", "send_kvcache_slice", "maybe_send_extra", "conclude_transfer"),
            print,
        ),
    )
    for name in ("_post_xfer", "_await_handles"):
        setattr(manager, name, functools.partial(getattr(conn.NixlKVManager, name), manager))
    NIXL.attach_sender(manager, layout)
    return manager


def _transfer(manager: Any) -> list[tuple[bool, bool]]:
    """A chunk by SGLang's transfer_worker, as far as it posts and waits, and an empty one. What its waits say."""
    handles: list[str] = []
    try:
        handles.append(manager.send_kvcache("peer", PAGES[0], [], PAGES[1], 0))
        failure_seen = False
    except conn._NixlPostError:
        failure_seen = True
    chunk = manager._await_handles(handles, failure_seen=failure_seen)
    return [chunk, manager._await_handles([], failure_seen=False)]


def _outcome(agent: _Agent, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool] | None:
    """(whether all KV has settled, whether anything has failed). None: the worker is held.

    What was given up is not awaited with the next chunk.
    """
    monkeypatch.setattr(conn, "NIXL_ERR_SETTLE_TIMEOUT_S", BOUND_S)
    manager = _manager(agent, monkeypatch)
    with ThreadPoolExecutor(1) as worker:
        ended = worker.submit(_transfer, manager)
        deadline = time.monotonic() + 30 * BOUND_S
        while not ended.done() and time.monotonic() < deadline:
            time.sleep(BOUND_S / 10)
        was_held, agent.over = not ended.done(), True
        chunk, following = ended.result()
    assert was_held or following == (True, False)
    return None if was_held else chunk


@pytest.mark.parametrize(
    ("state", "settled"), [("PROC", False), ("unreadable", False), ("DONE", True), ("ERR", True)]
)
def test_kv_whose_records_cannot_go_settles_within_sglangs_bound(
    monkeypatch: pytest.MonkeyPatch, state: str, settled: bool
) -> None:
    """The decode server is told that its slots are free only if nothing can write to them any more."""
    assert _outcome(_Agent(state), monkeypatch) == (settled, True)


def test_kv_with_its_records_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _outcome(_Agent("DONE", posts_records=True), monkeypatch) == (True, False)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
