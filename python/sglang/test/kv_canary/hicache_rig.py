"""SGLang's real HiCacheController and host pool beside a ManagerRig, hooked as in a server, without an engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from sglang_kv_canary.testing.fill_ins import hicache_on_cpu
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.hicache import protect

from .hooked import hook_in
from .manager_rig import ManagerRig

__all__ = ["HiCacheRig"]

HOST_SLOTS = 1024


class HiCacheRig(ManagerRig):
    """Pages go to host memory and back under `controller`. `tier` has their records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: str = "layer_first", **more: Any):
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost

        super().__init__(**more)
        hicache_on_cpu()
        hook_in(self, monkeypatch)
        monkeypatch.setattr(context, "host_tier", None)
        watch_allocator(self.allocator)
        self.host_pool = MHATokenToKVPoolHost(
            self.pool, HOST_SLOTS / self.pool.size, 0, self.pool.page_size, layout, pin_memory=False
        )
        self.host_pool.kv_buffer.zero_()
        self.controller = HiCacheController(
            self.allocator,
            self.host_pool,
            self.pool.page_size,
            None,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
        )
        (self.tier,) = protect(self.manager, self.host_pool)

    def write_back(self, row: int, count: int) -> torch.Tensor:
        """Copy the row's first slots to host memory, and give them back on the device. Returns the host slots."""
        device = self.rows.req_to_token[row, :count].long().clone()
        host = self.controller.write(device)
        self.controller.evict_device(device)
        return host

    def load(self, row: int, host: torch.Tensor) -> torch.Tensor:
        """Load host slots for a new request in `row`. Returns the device slots."""
        device = self.controller.load(host)
        self.controller.start_loading()
        self.rows.req_to_token[row, : len(host)] = device.int()
        self.lengths[row] = len(host)
        return device
