"""SGLang's own checksum of transferred KV is the same with the canary's records beside the states as without them."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang_kv_canary.wiring import collect_hooks
from sglang_kv_canary.wiring.context import context

if not any("KvChecksumComputer" in hook.target for hook in collect_hooks()):
    pytest.skip("this release has no checksum; lifted by make test SGLANG=0.5.23", True)

from sglang.srt.disaggregation import checksum, decode, prefill
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang_kv_canary.pool_kind import PoolKind, Side
from sglang_kv_canary.pool_patcher.buf_info_splice import plain_lists
from sglang_kv_canary.transfer.layout import TransferLayout
from sglang_kv_canary.wiring import disaggregation
from sglang_kv_canary_rigs.hooked import hook_in
from sglang_kv_canary_rigs.manager_rig import ManagerRig
from sglang_kv_canary_rigs.pool_fixtures import make_mha_pool, make_mla_pool, make_swa_pool

register_cpu_ci(est_time=10, suite="stage-a-test-cpu")

COUNT, WINDOW = 12, 8
PREFILL, DECODE = 1, 2  # rows: either server's
REALS = {
    "MHA": lambda: make_mha_pool(size=128),
    "MLA": lambda: make_mla_pool(size=128),
    "SWA": lambda: make_swa_pool(size=128, size_swa=96, head_num=2, head_dim=8),
}


class _OnGpu:
    """Slots on a GPU, as far as the checksum asks."""

    is_cuda = True

    def __init__(self, slots: torch.Tensor) -> None:
        self.slots = slots

    def is_contiguous(self) -> bool:
        return True


def _digest(addresses: Sequence[int], sizes: Sequence[int], slots: Sequence[_OnGpu]) -> int:
    """In place of the kernel: of the same bytes in the same order."""
    read = hashlib.sha256()
    for address, size, each in zip(addresses, sizes, slots, strict=True):
        for slot in each.slots.tolist():
            read.update(ctypes.string_at(address + slot * size, size))
    return int.from_bytes(read.digest()[:8], "big")


class _Servers:
    """A pool with the rows of two servers, of which one has received what the other one has computed."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checksum, "adler32_strided_checksum", _digest)
        is_swa = kind == "SWA"
        self.rig = ManagerRig(real=REALS[kind](), sliding_window_size=WINDOW if is_swa else None)
        hook_in(self.rig, monkeypatch)
        self.pool, self.allocator = self.rig.pool, self.rig.allocator
        if is_swa:
            self.pool.full_to_swa_index_mapping = self.allocator.full_to_swa_index_mapping
        manager = self.rig.manager
        layout = TransferLayout.of(manager.groups, 1, manager.config.content_mode, 1, 1)
        monkeypatch.setattr(disaggregation, "_layout", lambda _: layout)
        self.allocate(PREFILL)
        if is_swa:
            self.allocator.swa_attn_allocator.alloc(5)  # so SWA slots are others than full ones
        self.allocate(DECODE)
        self.transfer()

    def allocate(self, row: int) -> None:
        self.rig.rows.req_to_token[row, :COUNT] = self.allocator.alloc(COUNT).int()

    def slots(self, row: int, kind: PoolKind = PoolKind.FULL) -> torch.Tensor:
        slots = self.rig.rows.req_to_token[row, :COUNT].long()
        return slots if kind is PoolKind.FULL else self.pool.full_to_swa_index_mapping[slots].long()

    def transfer(self) -> None:
        """Random KV and records, of which SGLang and the canary send all."""
        for group in self.rig.manager.groups:
            sent, received = self.slots(PREFILL, group.kind), self.slots(DECODE, group.kind)
            for half in group.halves:
                records = group.records(half, Side.TAIL)
                buffers = [source.data for source in group.content(half)]
                for buffer in (records, *buffers):
                    buffer.view(torch.uint8).random_(0, 120)
                    buffer[received] = buffer[sent]

    def kv_args(self) -> KVArgs:
        """As the queue of either server sets it up."""
        kv_args = KVArgs()
        kv_args.kv_cache_dtype_str, kv_args.kv_layout, kv_args.page_size = "float32", None, 1
        with plain_lists(self.pool):
            kv_args.kv_data_ptrs, _, kv_args.kv_item_lens = self.pool.get_contiguous_buf_infos()
            prefill.setup_state_kv_args(kv_args, self.pool)
        return kv_args

    def checksum(self, server: ModuleType, row: int) -> tuple[int, int]:
        """(digest, signature of the layout) on a server. `server`: SGLang's module with its queue."""
        kv_args = self.kv_args()
        assert len(kv_args.state_data_ptrs) - len(kv_args.state_types) == bool(context.managers)
        computer = server.KvChecksumComputer(
            device=torch.device("cpu"),
            kv_data_ptrs=kv_args.kv_data_ptrs,
            kv_item_lens=kv_args.kv_item_lens,
            state_data_ptrs=kv_args.state_data_ptrs,
            state_item_lens=kv_args.state_item_lens,
        )
        scheduler: Any = SimpleNamespace(
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rig.rows,
            sliding_window_size=WINDOW,
        )
        request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row))
        state = checksum.state_indices_for_request(scheduler, request, COUNT)
        digest = computer.compute(_OnGpu(self.slots(row)), None if state is None else _OnGpu(state))
        return digest, server.kv_layout_signature(kv_args)


@pytest.mark.parametrize("kind", REALS)
def test_servers_agree_with_and_without_the_canary(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = _Servers(kind, monkeypatch)
    sent = servers.checksum(prefill, PREFILL)
    assert servers.checksum(decode, DECODE) == sent
    monkeypatch.setattr(context, "managers", [])
    assert servers.checksum(decode, DECODE) == sent


def test_a_wrong_byte_of_a_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = _Servers("SWA", monkeypatch)
    sent, _ = servers.checksum(prefill, PREFILL)
    last = servers.slots(DECODE, PoolKind.SWA)[-1]
    servers.pool.swa_kv_pool.v_buffer[0][last] += 1
    assert servers.checksum(decode, DECODE)[0] != sent


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
