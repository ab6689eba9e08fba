"""Notices inside NIXL's notifications, from peers that are not trusted."""

import base64
import json
import sys

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.transfer.notice import Notice, NoticeBoard
from sglang_kv_canary.wiring.nixl_notices import with_notice, without_notice

register_cpu_ci(est_time=5, suite="stage-a-test-cpu")

NOTICE = Notice("10.0.0.1:8998 rank 0", True, True, request="r_7", chunks=tuple(range(0, 4096, 8)))
# Those that the decode rank must have before it sees success.
LAST = ["7_kv_3_1_0", "7_state_0", "7_aux_nokv_0"]
# A chunk before the last one, and what counts for all ranks together.
EARLIER = ["7_kv_0_0_0", "7_kv_1_0_1", "7_aux"]


@pytest.mark.parametrize("sent", LAST)
@pytest.mark.parametrize("more", ["", "_0"])  # SGLang appends the number of a state
def test_the_last_notification_of_a_rank_carries_a_notice(sent: str, more: str) -> None:
    rooms, board = [], NoticeBoard()

    def notice_of(room: int) -> Notice:
        rooms.append(room)
        return NOTICE

    message = with_notice(sent, notice_of) + more
    fields, plain = message.split("_"), sent.split("_")
    assert fields[: len(plain)] == plain  # SGLang reads them by position
    assert without_notice(message.encode("ascii"), board) == (sent + more).encode()
    assert (rooms, board.take(7)) == ([7], NOTICE)


@pytest.mark.parametrize("sent", EARLIER)
def test_earlier_ones_carry_none(sent: str) -> None:
    assert with_notice(sent, lambda _: NOTICE) == sent


@pytest.mark.parametrize("sent", [*LAST, *EARLIER])
def test_peers_without_a_canary(sent: str) -> None:
    """They get what SGLang sends, and send that."""
    board = NoticeBoard()
    assert with_notice(sent, lambda _: None) == sent
    assert without_notice(sent.encode(), board) == sent.encode()
    assert board.take(7) is None


@pytest.mark.parametrize(
    "payload",
    [b"", b"AAA", b"====", base64.b64encode(b"7"), base64.b64encode(json.dumps({}).encode())],
)
def test_what_is_no_notice_is_ignored(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    board = NoticeBoard()
    message = b"7_kv_3_1_0_kvcanary:" + payload
    assert without_notice(message, board) == b"7_kv_3_1_0"
    assert board.take(7) is None
    assert "a notice of a prefill server is ignored" in caplog.text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
