"""A pause with mode `retract` on a decode server: SGLang goes on with the token that the client has."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.releases import release

if release().transfers is None or "v0_5_22.disaggregation" not in release().hook_modules:
    pytest.skip(
        "this release never resumes what a pause retracts; lifted by make test SGLANG=0.5.23",
        allow_module_level=True,
    )

from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.decode import DecodeRequest, DecodeTransferQueue
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_kv_canary.pool_kind import Side
from sglang_kv_canary.transfer.notice import Notice
from sglang_kv_canary.wiring.arrivals import extent_of
from sglang_kv_canary_rigs.hooked import hook_in, make_request
from sglang_kv_canary_rigs.manager_rig import ManagerRig

register_cpu_ci(est_time=15, suite="stage-a-test-cpu")

PROMPT = [*range(5, 17)]
ROOM = 4711
FIRST, AGAIN = (
    77,
    99,
)  # what the prefill server sampled, and what it samples when it computes the prompt again
PREFILL, DECODE = 1, 2  # rows: either server's


class _Decode:
    """A decode server's request with one output token, which is paused. SGLang's own queue takes it up again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rig = ManagerRig()
        hook_in(self.rig, monkeypatch)
        self.rig.manager.expect_arrivals(1)
        tree = SimpleNamespace(root_node_handle=lambda: None)
        self.request = make_request(tree, DECODE, PROMPT)
        self.request.bootstrap_room = ROOM
        self.request.bootstrap_host, self.request.bootstrap_port = "10.0.0.1", 8998
        self.request.time_stats = SimpleNamespace(set_wait_queue_entry_time=lambda: None)

    def retract(self) -> None:
        """As Scheduler.pause_generation does."""
        self.request.output_ids.append(FIRST)
        self.request.pd_rebootstrap_forced_output_id = self.request.output_ids.pop()
        self.request.pd_rebootstrap_in_progress = True

    def receive(self, sampled: int) -> None:
        """KV, records and the notice of a prefill server, which has sampled the token behind them."""
        rig, count = self.rig, len(PROMPT)
        rig.extend(PREFILL, PROMPT)
        slots = rig._alloc_extend(DECODE, count)
        rig.rows.req_to_token[DECODE, :count] = slots.int()
        rig.lengths[DECODE] = count
        rig.manager.settle_slots()
        sent = rig.rows.req_to_token[PREFILL, :count].long()
        for group in rig.manager.groups:
            for half in group.halves:
                records = group.records(half, Side.TAIL)
                records[slots] = records[sent]
        for layer in (*rig.pool.k_buffer, *rig.pool.v_buffer):
            layer[slots] = layer[sent]
        self.request.kv.kv_committed_len, self.request.prefix_len = count, 0
        context.notices.put(
            ROOM, Notice("prefill", True, True, request="ada", chunks=(0,), first_token=sampled)
        )

    def take_up(self, sampled: int) -> None:
        """SGLang's own commit, the canary's hook on it, and the first decode."""
        queue = _queue(self.request, sampled)
        assert queue.pop_transferred() == [self.request]
        self.request.pd_rebootstrap_in_progress = False  # prepare_for_prebuilt, before the check
        context.check_due_arrivals()
        self.rig.decode([DECODE], [self.request.output_ids[-1]])


def _queue(request: Any, sampled: int) -> Any:
    """SGLang's DecodeTransferQueue, without process groups. The transfer of `request` has succeeded."""
    receiver = SimpleNamespace(
        poll=lambda: KVPoll.Success, failure_exception=None, clear=lambda: None
    )
    queue: Any = DecodeTransferQueue.__new__(DecodeTransferQueue)
    queue.queue = [DecodeRequest(request, receiver, metadata_buffer_index=0, is_rebootstrap=True)]
    queue.spec_algorithm, queue.gloo_group = SpeculativeAlgorithm.NONE, None
    queue.enable_staging = False
    queue._poll_with_metadata_gate = lambda: [KVPoll.Success]
    queue.req_to_metadata_buffer_idx_allocator = SimpleNamespace(free=lambda _: None)
    queue.metadata_buffers = SimpleNamespace(
        get_buf=lambda _: _metadata(sampled),
        clear_slot=lambda _: None,
        bootstrap_room=[ROOM],  # 0.5.22 clears it itself
    )
    queue.scheduler = SimpleNamespace(
        enable_decode_hicache=False,
        kv_checksum_computer=None,
        page_size=1,
        server_args=SimpleNamespace(
            disaggregation_decode_enable_radix_cache=False,
            disaggregation_mode="decode",
            disaggregation_transfer_backend="mooncake",
            pp_size=1,
        ),
        batch_result_processor=SimpleNamespace(_maybe_update_reasoning_tokens=lambda *_: None),
        enable_overlap=False,
        model_config=SimpleNamespace(is_multimodal=False, vocab_size=1000),
    )
    return queue


def _metadata(sampled: int) -> tuple[torch.Tensor, ...]:
    nothing = (torch.zeros(8, dtype=torch.int64),) * 12
    return (torch.tensor([sampled]), *nothing, torch.tensor([ROOM]))


@pytest.mark.parametrize("sampled", [FIRST, AGAIN], ids=["the_same", "another"])
def test_a_token_that_is_replayed_is_not_compared_with_what_is_sampled_then(
    monkeypatch: pytest.MonkeyPatch, sampled: int
) -> None:
    decode = _Decode(monkeypatch)
    decode.retract()
    assert extent_of(decode.request).is_computed_again
    decode.receive(sampled)
    decode.take_up(sampled)
    assert list(decode.request.output_ids) == [FIRST]
    assert decode.rig.settle() == []


@pytest.mark.parametrize("told", [FIRST, AGAIN], ids=["the_same", "another"])
def test_the_first_token_of_a_new_request_is_compared(
    monkeypatch: pytest.MonkeyPatch, told: int
) -> None:
    decode = _Decode(monkeypatch)
    decode.receive(told)
    decode.take_up(FIRST)
    found = {reason for v in decode.rig.settle() for reason in v.reasons}
    assert found == (set() if told == FIRST else {"WRITE_TOKEN"})


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
