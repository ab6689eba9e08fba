"""SGLang's real HiCache controller and host pool beside a ManagerRig, hooked as in a server, without an engine."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
import torch

from sglang_kv_canary.testing.fill_ins import hicache_on_cpu
from sglang_kv_canary.wiring.allocator import watch_allocator
from sglang_kv_canary.wiring.context import context
from sglang_kv_canary.wiring.hicache import protect

from .hooked import hook_in
from .manager_rig import ManagerRig
from .on_releases import UNIFIED_TREE
from .pool_fixtures import one_rank
from .radix_fixtures import cache_params

__all__ = ["HiCacheRig"]

HOST_SLOTS = 1024
WRITE_POLICY, COPIES = "write_through", "direct"


class HiCacheRig(ManagerRig):
    """Pages go to host memory and back under `controller`. `tier` has their records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layout: str = "layer_first", **more: Any):
        super().__init__(**more)
        hicache_on_cpu()
        hook_in(self, monkeypatch)
        monkeypatch.setattr(context, "host_tier", None)
        watch_allocator(self.allocator)
        host, self.controller = (_of_a_group if UNIFIED_TREE else _of_a_pool)(self, layout)
        self.host_pool = host.anchor_entry.host_pool if UNIFIED_TREE else host
        self.host_pool.pin_memory = False  # a CPU has none
        self.host_pool.kv_buffer.zero_()
        (self.tier,) = protect(self.manager, host)

    def write_back(self, row: int, count: int) -> torch.Tensor:
        """Copy the row's first slots to host memory, and give them back on the device. Returns the host slots."""
        device = self.rows.req_to_token[row, :count].long().clone()
        host = self.controller.write(device)
        self.allocator.free(device)
        return host

    def load(self, row: int, host: torch.Tensor) -> torch.Tensor:
        """Load host slots for a new request in `row`. Returns the device slots."""
        device = self.controller.load(host)
        self.controller.start_loading()
        self.rows.req_to_token[row, : len(host)] = device.int()
        self.lengths[row] = len(host)
        return device


def _of_a_pool(rig: HiCacheRig, layout: str) -> tuple[Any, Any]:
    """(host pool, controller) as `HiRadixCache` makes them."""
    from sglang.srt.managers.cache_controller import HiCacheController

    pool, ratio = rig.pool, HOST_SLOTS / rig.pool.size
    host = _host_pool_class()(pool, ratio, 0, pool.page_size, layout, pin_memory=False)
    controller = HiCacheController(
        rig.allocator,
        host,
        pool.page_size,
        None,
        threading.Event(),
        write_policy=WRITE_POLICY,
        io_backend=COPIES,
    )
    return host, controller


def _host_pool_class() -> type:
    try:
        module = import_module("sglang.srt.mem_cache.pool_host.mha")
    except ModuleNotFoundError:  # 0.5.12.post1
        module = import_module("sglang.srt.mem_cache.memory_pool_host")
    return module.MHATokenToKVPoolHost


def _of_a_group(rig: HiCacheRig, layout: str) -> tuple[Any, Any]:
    """(group of one host pool, controller) as the unified tree makes them."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_stack
    from sglang.srt.runtime_context import get_context

    settings = {
        "hicache_ratio": HOST_SLOTS / rig.pool.size,
        "hicache_mem_layout": layout,
        "hicache_write_policy": WRITE_POLICY,
        "hicache_io_backend": COPIES,
    }
    params = cache_params(rig.allocator, rig.pool.page_size, False, req_to_token_pool=rig.rows)
    with get_context().override_server_args(**settings), one_rank():
        return build_kv_only_stack(
            params=params,
            kv_pool=rig.pool,
            full_layer_mapping={i: i for i in range(rig.pool.layer_num)},
            load_cache_event=threading.Event(),
            storage_backend=None,
            use_mla=False,
        )
